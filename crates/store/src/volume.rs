//! Volumes: directories of the store that sandboxes mount.
//!
//! ```text
//! volumes/<id>/volume.json   its name; never changes
//! volumes/<id>/data/         the files of sandboxes and clients
//! ```
//!
//! Always: a volume appears and goes by one rename. No two volumes have one name. The store never
//! looks into `data`: its content is hostile, and belongs to the crate `mounts`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::fs::optional;
use crate::publish::{self, Staged};
use crate::record::{self, Record};
use crate::{Error, SandboxId, Store, lock};

const RECORD: &str = "volume.json";
const DATA: &str = "data";

/// `volume.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    schema: u64,
    /// 16 random hexadecimal digits.
    pub id: String,
    pub name: String,
    pub created_at_unix_ms: u64,
}

impl Record for VolumeRecord {
    const SCHEMA: u64 = 1;
}

impl Store {
    /// Makes a volume. `None`: the name is taken.
    pub fn create_volume(&self, name: &str, now_ms: u64) -> Result<Option<VolumeRecord>, Error> {
        let record = VolumeRecord {
            schema: VolumeRecord::SCHEMA,
            id: SandboxId::random()?.to_string(),
            name: name.to_owned(),
            created_at_unix_ms: now_ms,
        };
        let staged = self.stage()?;
        self.files.create_dir(&staged.path().join(DATA))?;
        let bytes = record::canonical(&record);
        self.files.create(&staged.path().join(RECORD), &bytes)?;
        staged.make_durable()?;
        let _alone = lock::store(&self.files, &self.layout)?;
        if self.volumes()?.iter().any(|volume| volume.name == name) {
            return Ok(None);
        }
        publish::ensure_lasting_dir(&self.files, &self.layout.volumes())?;
        let target = self.layout.volumes().join(&record.id);
        publish::publish(&self.files, staged.path(), &target)?;
        Ok(Some(record))
    }

    /// All volumes, oldest first.
    pub fn volumes(&self) -> Result<Vec<VolumeRecord>, Error> {
        let listed = optional(self.files.list(&self.layout.volumes()))?.unwrap_or_default();
        let mut found = Vec::new();
        for entry in listed {
            let id = entry.name.to_str().map(str::parse::<SandboxId>);
            if let Some(Ok(id)) = id {
                found.extend(self.volume(&id)?);
            }
        }
        found.sort_by(|a, b| (a.created_at_unix_ms, &a.id).cmp(&(b.created_at_unix_ms, &b.id)));
        Ok(found)
    }

    pub fn volume(&self, id: &SandboxId) -> Result<Option<VolumeRecord>, Error> {
        let path = self.layout.volumes().join(id.as_str()).join(RECORD);
        optional(record::read(&self.files, &path))
    }

    /// The directory with the files of a volume.
    pub fn volume_data(&self, id: &SandboxId) -> PathBuf {
        self.layout.volumes().join(id.as_str()).join(DATA)
    }

    /// Takes a volume away. Its files are in `data` of what is returned, which removes them when
    /// it is dropped. `None`: there is none.
    pub fn take_volume(&self, id: &SandboxId) -> Result<Option<(Staged, PathBuf)>, Error> {
        let staged = Staged::shell(&self.files, &self.layout, &SandboxId::random()?)?;
        let from = self.layout.volumes().join(id.as_str());
        let taken = optional(self.files.rename_noreplace(&from, staged.path()))?;
        optional(self.files.sync_dir(&self.layout.volumes()))?;
        let data = staged.path().join(DATA);
        Ok(taken.map(|()| (staged, data)))
    }
}
