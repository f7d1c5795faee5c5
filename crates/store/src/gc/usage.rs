//! What uses the disk.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use super::{GarbageKind, GcReport};
use serde::Serialize;

use crate::fs::{Entry, Kind, optional};
use crate::{Error, Store};

/// What the store takes on disk, each file once however many names it has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub kinds: Vec<KindUsage>,
    pub bytes: u64,
    /// What `gc` would give back.
    pub reclaimable_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KindUsage {
    pub kind: UsageKind,
    pub count: u64,
    pub bytes: u64,
    pub reclaimable_bytes: u64,
}

/// In the order in which they are counted: a file that two kinds have counts where it is met first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UsageKind {
    Images,
    Kernels,
    Snapshots,
    /// Files of snapshots. What sandboxes share with them counts here.
    Layers,
    Warm,
    Sandboxes,
    /// Directories that sandboxes of the HTTP server share.
    Volumes,
    /// What clients of the HTTP server sent for builds. The server removes it a day after its last
    /// use.
    Uploads,
    /// Initial file systems and findings about QEMU: all of it can be made again.
    Cache,
    Staging,
    Quarantine,
}

impl fmt::Display for UsageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Images => "images",
            Self::Kernels => "kernels",
            Self::Snapshots => "snapshots",
            Self::Layers => "layers",
            Self::Sandboxes => "sandboxes",
            Self::Volumes => "volumes",
            Self::Uploads => "uploads",
            Self::Warm => "warm",
            Self::Cache => "cache",
            Self::Staging => "staging",
            Self::Quarantine => "quarantine",
        })
    }
}

const KINDS: [UsageKind; 11] = [
    UsageKind::Images,
    UsageKind::Kernels,
    UsageKind::Snapshots,
    UsageKind::Layers,
    UsageKind::Warm,
    UsageKind::Sandboxes,
    UsageKind::Volumes,
    UsageKind::Uploads,
    UsageKind::Cache,
    UsageKind::Staging,
    UsageKind::Quarantine,
];

impl Store {
    /// What uses the disk, and how much of it `gc` would give back.
    pub fn usage(&self) -> Result<Usage, Error> {
        let garbage = self.gc(true)?;
        let mut seen = BTreeSet::new();
        let kinds = KINDS
            .into_iter()
            .map(|kind| self.usage_of(kind, &garbage, &mut seen));
        let kinds = kinds.collect::<Result<Vec<_>, _>>()?;
        Ok(Usage {
            bytes: kinds.iter().map(|kind| kind.bytes).sum(),
            reclaimable_bytes: garbage.bytes,
            kinds,
        })
    }

    fn usage_of(
        &self,
        kind: UsageKind,
        garbage: &GcReport,
        seen: &mut BTreeSet<(u64, u64)>,
    ) -> Result<KindUsage, Error> {
        let mut count = 0;
        let mut bytes = 0;
        for dir in self.dirs_of(kind) {
            let listed = self.files.list(&dir);
            let entries = match kind {
                // They are made when they are needed.
                UsageKind::Volumes | UsageKind::Uploads => optional(listed)?.unwrap_or_default(),
                _ => listed?,
            };
            for entry in entries {
                count += 1;
                bytes += match kind {
                    UsageKind::Volumes => self.files.bytes_below(&dir.join(&entry.name)),
                    _ => self.disk_bytes(&dir, &entry, seen)?,
                };
            }
        }
        match kind {
            UsageKind::Sandboxes => bytes += self.memory_dir_bytes(seen)?,
            UsageKind::Cache => bytes += self.index_bytes()?,
            _ => {}
        }
        let of_kind = garbage
            .removed
            .iter()
            .filter(|garbage| usage_kind(garbage.kind) == Some(kind));
        let reclaimable_bytes = of_kind.map(|garbage| garbage.bytes).sum();
        Ok(KindUsage {
            kind,
            count,
            bytes,
            reclaimable_bytes,
        })
    }

    fn dirs_of(&self, kind: UsageKind) -> Vec<PathBuf> {
        let layout = &self.layout;
        match kind {
            UsageKind::Images => vec![layout.images()],
            UsageKind::Kernels => vec![layout.kernels()],
            UsageKind::Snapshots => vec![layout.snapshots()],
            UsageKind::Layers => vec![layout.layers()],
            UsageKind::Warm => vec![layout.warm_dir()],
            UsageKind::Sandboxes => vec![layout.sandboxes()],
            UsageKind::Volumes => vec![layout.volumes()],
            UsageKind::Uploads => vec![layout.archives()],
            UsageKind::Cache => vec![layout.initramfs_dir(), layout.cache()],
            UsageKind::Staging => vec![layout.staging()],
            UsageKind::Quarantine => vec![layout.quarantine()],
        }
    }

    /// Layers that sandboxes have outside the store. A sandbox that cannot be read does not say
    /// where.
    fn memory_dir_bytes(&self, seen: &mut BTreeSet<(u64, u64)>) -> Result<u64, Error> {
        let sandboxes = self
            .sandboxes()?
            .into_iter()
            .filter_map(|listed| listed.sandbox.ok());
        let dirs = sandboxes.filter_map(|sandbox| sandbox.record().own_memory_dir());
        let mut bytes = 0;
        for dir in dirs {
            for entry in optional(self.files.list(&dir))?.unwrap_or_default() {
                bytes += self.disk_bytes(&dir, &entry, seen)?;
            }
        }
        Ok(bytes)
    }

    fn index_bytes(&self) -> Result<u64, Error> {
        let files = self.layout.index_files();
        let stats = files
            .iter()
            .map(|file| optional(self.files.stat(file)))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(stats.iter().flatten().map(|stat| stat.disk_bytes).sum())
    }

    /// What a directory takes with all that is in it, each file once; one that is not there takes
    /// nothing.
    pub(crate) fn bytes_on_disk(&self, dir: &Path) -> Result<u64, Error> {
        let mut bytes = 0;
        let mut seen = BTreeSet::new();
        for entry in optional(self.files.list(dir))?.unwrap_or_default() {
            bytes += self.disk_bytes(dir, &entry, &mut seen)?;
        }
        Ok(bytes)
    }

    /// What something takes that was not seen before; what goes meanwhile takes nothing.
    fn disk_bytes(
        &self,
        dir: &Path,
        entry: &Entry,
        seen: &mut BTreeSet<(u64, u64)>,
    ) -> Result<u64, Error> {
        let path = dir.join(&entry.name);
        let Some(stat) = optional(self.files.stat(&path))? else {
            return Ok(0);
        };
        let mut bytes = if seen.insert(stat.id) {
            stat.disk_bytes
        } else {
            0
        };
        if entry.kind == Kind::Dir {
            for entry in optional(self.files.list(&path))?.unwrap_or_default() {
                bytes += self.disk_bytes(&path, &entry, seen)?;
            }
        }
        Ok(bytes)
    }
}

fn usage_kind(kind: GarbageKind) -> Option<UsageKind> {
    match kind {
        GarbageKind::Reservation => None,
        GarbageKind::Snapshot => Some(UsageKind::Snapshots),
        GarbageKind::Layer => Some(UsageKind::Layers),
        GarbageKind::Warm => Some(UsageKind::Warm),
        GarbageKind::Image => Some(UsageKind::Images),
        GarbageKind::Kernel => Some(UsageKind::Kernels),
    }
}
