//! Folding in the background: many layers become one for what is taken next. States that exist keep
//! theirs.
//!
//! ```text
//!   machine stands on  a b c d … x   --fold-->  [a…x] y z        y, z: taken while it was folded
//! ```
//!
//! Always: the guest is not stopped for it, and nothing that exists is changed.
//! When it fails: the layers stay as they are, and the next capture tries again.

use std::fs::File;

use sandtree_store::LayerId;
use sandtree_store::memory::{self, Layer, MemoryWriter};
use tokio::task::JoinHandle;

use super::Driver;
use crate::blocking::blocking;
use crate::error::{Error, Result, engine_error, store_error};
use crate::files::open;
use crate::fold::{DISK_LAYERS, DiskFold};
use crate::machine::ground::Folded;
use crate::machine::running::Running;

/// Memory layers beyond which they are folded.
const MEMORY_LAYERS: usize = 24;
/// Pieces of memory beyond which they are folded: each is a mapping of every machine restored from
/// them.
const MAPPINGS: usize = 8192;
/// Depths at which a capture waits for the fold: a machine has only so many descriptors.
const MEMORY_LAYERS_MAX: usize = 56;
const DISK_LAYERS_MAX: usize = 40;
/// A machine with more could not be restored.
const DISK_LAYERS_LAST: usize = 45;

/// A fold under way.
#[derive(Debug)]
pub(super) struct Folding {
    what: What,
    /// What is folded, bottom first.
    old: Vec<LayerId>,
    new: LayerId,
    work: JoinHandle<Result<Folded>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Memory,
    Disk,
}

impl Folding {
    /// What must not be collected while it goes on.
    pub fn held(&self) -> Vec<LayerId> {
        self.old.iter().chain([&self.new]).cloned().collect()
    }

    /// Waits until nobody writes to its result, which is collected with what nobody lists.
    pub async fn give_up(self) {
        if let Ok(Err(error)) = self.work.await {
            tracing::debug!(%error, "a fold failed that nobody needs any more");
        }
    }

    /// Waits for its end; may be asked again if it is not waited for.
    pub async fn done(&mut self) -> Result<Folded> {
        match (&mut self.work).await {
            Ok(folded) => folded,
            Err(error) => Err(Error::io("fold", "layers", error.into())),
        }
    }
}

impl Driver {
    /// Begins to fold what has become deep, if nothing is folded yet.
    pub(super) fn fold_if_deep(&mut self) {
        if self.folding.is_some() {
            return;
        }
        match self.begin_fold() {
            Ok(folding) => self.folding = folding,
            Err(error) => tracing::warn!(%error, "layers cannot be folded now"),
        }
    }

    fn begin_fold(&self) -> Result<Option<Folding>> {
        let Some(running) = &self.running else {
            return Ok(None);
        };
        let layers = running.ground.held();
        if layers.len() > MEMORY_LAYERS || running.ground.runs() > MAPPINGS {
            return self.begin_memory_fold(layers).map(Some);
        }
        let head = self.head()?;
        let frozen = running.ground.frozen(&head.disk);
        if frozen.len() > DISK_LAYERS {
            return self.begin_disk_fold(frozen.to_vec()).map(Some);
        }
        Ok(None)
    }

    fn begin_memory_fold(&self, old: Vec<LayerId>) -> Result<Folding> {
        let (new, file) = self
            .owned()
            .memory_file()
            .map_err(store_error("make a memory layer"))?;
        let files = old
            .iter()
            .map(|id| open(&self.dir().memory_layer(id)))
            .collect::<Result<Vec<_>>>()?;
        let work = tokio::spawn(blocking(move || fold_memory(files, file)));
        Ok(Folding {
            what: What::Memory,
            old,
            new,
            work,
        })
    }

    fn begin_disk_fold(&self, old: Vec<LayerId>) -> Result<Folding> {
        let fold = DiskFold::new(self.owned(), &old)?;
        let new = fold.id().clone();
        Ok(Folding {
            what: What::Disk,
            old,
            new,
            work: tokio::spawn(blocking(move || fold.write().map(|()| Folded::default()))),
        })
    }

    /// A fold has ended: the machine stands on its result. Whether it could be used; if not, the
    /// next capture tries again.
    pub(super) async fn folded(&mut self, folded: Result<Folded>) -> bool {
        let Some(folding) = self.folding.take() else {
            return false;
        };
        let used = match folded {
            Ok(runs) => self.stand_on_folded(&folding, runs).await,
            Err(error) => Err(error),
        };
        self.collect();
        if let Err(error) = used {
            tracing::warn!(%error, "layers could not be folded");
            return false;
        }
        // There may be more of the other kind.
        self.fold_if_deep();
        true
    }

    async fn stand_on_folded(&mut self, folding: &Folding, runs: Folded) -> Result<()> {
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        match folding.what {
            What::Memory => running
                .ground
                .replace(&folding.old, folding.new.clone(), runs),
            What::Disk => self.rebase(folding).await?,
        }
        Ok(())
    }

    async fn rebase(&self, folding: &Folding) -> Result<()> {
        let mut head = self.head()?;
        if !head.disk.starts_with(&folding.old) {
            return Ok(());
        }
        let kept = head.disk.split_off(folding.old.len());
        head.disk = std::iter::once(folding.new.clone()).chain(kept).collect();
        self.owned()
            .freeze_disk(&folding.new)
            .map_err(store_error("seal an overlay"))?;
        let Running {
            machine, ground, ..
        } = self.running.as_ref().expect("it was looked at");
        let below = ground.frozen(&head.disk).iter();
        let files = below
            .map(|id| open(&self.dir().disk_layer(id)))
            .collect::<Result<_>>()?;
        machine
            .rebase(files)
            .await
            .map_err(engine_error("stand on folded overlays"))?;
        self.set_head(&head)
    }

    /// Before a capture that would be one layer too deep.
    pub(super) async fn wait_if_too_deep(&mut self) -> Result<()> {
        let memory = self
            .running
            .as_ref()
            .map_or(0, |running| running.ground.held().len());
        if memory < MEMORY_LAYERS_MAX && self.head()?.disk.len() < DISK_LAYERS_MAX {
            return Ok(());
        }
        self.fold_if_deep();
        while let Some(folding) = &mut self.folding {
            let done = folding.done().await;
            if !self.folded(done).await {
                break;
            }
        }
        match self.head()?.disk.len() < DISK_LAYERS_LAST {
            true => Ok(()),
            false => Err(Error::TooDeep {
                name: self.name(),
                layers: self.head()?.disk.len(),
                source: None,
            }),
        }
    }
}

fn fold_memory(files: Vec<File>, out: File) -> Result<Folded> {
    let read = |file: File| Layer::read(&file).map(|layer| (layer, file));
    let layers = files
        .into_iter()
        .map(read)
        .collect::<std::result::Result<Vec<_>, _>>();
    let layers = layers.map_err(store_error("read a memory layer"))?;
    let ram_bytes = layers.first().map_or(0, |(layer, _)| layer.ram_bytes);
    let writer = MemoryWriter::new(out, ram_bytes).map_err(store_error("write a memory layer"))?;
    let before = layers.iter().map(|(layer, _)| layer.pieces()).sum();
    let folded = memory::fold(&layers, writer).map_err(store_error("fold memory layers"))?;
    Ok(Folded {
        before,
        after: folded.pieces(),
    })
}
