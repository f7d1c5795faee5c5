//! Copies the whole disk of a machine whose lower layers are damaged, and makes the manifest of a
//! capture.

use std::fs::File;
use std::time::Duration;

use sandtree_store::{LayerId, MemoryState, StateId, StateManifest};

use super::{Approach, Capture, Purpose};
use crate::degradation::Degradation;
use crate::error::{Error, Result, engine_error, store_error};
use crate::hub::ExecRecord;
use crate::machine::ground::NewLayer;
use crate::moment::{boot_id, now_unix_ms};

impl Capture<'_> {
    /// Copies everything below the active overlay into one that stands alone, and puts the active
    /// one on it.
    pub(super) async fn copy_disk(&self) -> Result<LayerId> {
        let id = self
            .owned
            .create_disk(self.disk_bytes)
            .map_err(store_error("make an overlay"))?;
        let path = self.owned.disk_layer(&id);
        let copied = self.copy_disk_into(&path).await;
        if let Err(error) = copied {
            self.discard_overlay(&id);
            return Err(error);
        }
        self.owned
            .sync_overlay(&id)
            .map_err(store_error("sync an overlay"))?;
        let mut head = self.head()?;
        head.disk = vec![
            id.clone(),
            head.disk.last().expect("a sandbox has a disk").clone(),
        ];
        self.owned
            .set_head(&head)
            .map_err(store_error("write where a sandbox stands"))?;
        Ok(id)
    }

    async fn copy_disk_into(&self, path: &std::path::Path) -> Result<()> {
        let opened = |e| Error::io("open", path, e);
        let into = File::options()
            .read(true)
            .write(true)
            .open(path)
            .map_err(opened)?;
        self.machine()
            .copy_disk(into)
            .await
            .map_err(engine_error("copy its disk"))?;
        let below = File::open(path).map_err(opened)?;
        self.machine()
            .rebase(vec![below])
            .await
            .map_err(engine_error("stand on the copy of its disk"))
    }

    pub(super) fn manifest(
        &self,
        approach: &Approach,
        layer: Option<&NewLayer>,
        purpose: Purpose,
        disk: Vec<LayerId>,
        pause: Duration,
        execs: &[ExecRecord],
    ) -> Result<StateManifest> {
        let disk_layer_bytes = disk
            .last()
            .map_or(Ok(0), |id| size_on_disk(&self.owned.disk_layer(id)))?;
        let memory = match (&self.running.ground.layers, layer) {
            (Some(layers), Some(_)) => MemoryState::Layers {
                layers: layers.clone(),
            },
            _ => MemoryState::Stream,
        };
        let head = self.head()?;
        Ok(StateManifest {
            schema: StateManifest::SCHEMA,
            id: StateId::random().map_err(store_error("make an id"))?,
            kind: purpose.kind,
            tag: purpose.tag,
            parent: head.parent,
            created_at_unix_ms: now_unix_ms(),
            sequence: 0,
            boot_id: boot_id(),
            disk,
            disk_bytes: self.disk_bytes,
            memory,
            ram_bytes: self.machine().memory().bytes(),
            mode: Some(approach.plan.mode.to_string()),
            degraded: Degradation::notes(&approach.plan.degraded),
            memory_layer_bytes: layer.map_or(0, |layer| layer.layer.len_bytes()),
            disk_layer_bytes,
            pause_us: pause.as_micros().try_into().unwrap_or(u64::MAX),
            machine: Some(self.running.record.clone()),
            execs: execs
                .iter()
                .map(|exec| serde_json::to_value(exec).expect("a record is plain data"))
                .collect(),
            mounts: head.mounts,
        })
    }
}

/// What a file takes on the disk, holes left out.
pub(crate) fn size_on_disk(path: &std::path::Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(path)
        .map_err(|e| Error::io("measure", path, e))?
        .blocks()
        * 512)
}
