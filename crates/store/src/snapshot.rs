//! Snapshots: states that outlive their sandbox, whole and by name.
//!
//! ```text
//! names/images/<name> ──► snapshots/<digest>/manifest.json ──► layers/<digest>, layers/<digest>.zst, …
//!                                                          ──► images/<digest>, kernels/<digest>
//! ```
//!
//! Always: a snapshot is its manifest, and a manifest lists every layer itself: nothing depends on
//! the snapshot it calls its parent. What a manifest lists was durable before the manifest was
//! seen, and the manifest before its name. Layers are shared by all snapshots, and with sandboxes
//! by hard link; none ever changes. A snapshot without a name and without a pin is garbage, and
//! only [`Store::gc`] and the removal of its last name take it away.
//!
//! When it fails: work that was not published is in `staging/`, and goes with its maker.

mod assembly;
mod disk;
mod manifest;
mod names;
mod pinned;
mod pool;
pub(crate) mod rules;
#[cfg(test)]
mod tests;
mod verify;

use std::collections::BTreeSet;

pub(crate) use assembly::Assembly;
pub use disk::SnapshotDiskFiles;
pub use manifest::{
    CaptureRecord, Consistency, DiskFormat, ImageReference, MemoryKind, Settings, SnapshotDisk,
    SnapshotManifest, SnapshotMemory,
};
pub(crate) use names::SnapshotNames;
pub use names::{ListedName, RemovedImage, Target};
pub use pinned::Pinned;
pub(crate) use pool::Form;
pub use verify::{Damaged, Verified};

use crate::blob::Blob;
use crate::fs::optional;
use crate::{Digest, Error, Name, StateId, Store};

/// A snapshot and its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub digest: Digest,
    pub manifest: SnapshotManifest,
}

/// A directory below `snapshots/`; one that cannot be read is listed with the reason.
#[derive(Debug)]
pub struct ListedSnapshot {
    pub names: Vec<Name>,
    pub digest: Digest,
    pub snapshot: Result<Snapshot, Error>,
}

impl Snapshot {
    /// Every file it consists of, each content once: disk, memory layers, devices, commands,
    /// outputs.
    pub fn blobs(&self) -> impl Iterator<Item = &Blob> {
        let mut seen = BTreeSet::new();
        self.manifest
            .all_blobs()
            .filter(move |blob| seen.insert(&blob.digest))
    }

    /// What its files have together, each content once, not compressed.
    pub fn bytes(&self) -> u64 {
        self.blobs().map(|blob| blob.bytes).sum()
    }

    /// What it is called as a state of a sandbox that was made from it with its memory.
    pub fn state_id(&self) -> StateId {
        StateId::of(&self.digest)
    }
}

impl Store {
    /// A snapshot, if its manifest can be used and its layers exist with the right sizes.
    pub fn snapshot(&self, digest: &Digest) -> Result<Snapshot, Error> {
        let snapshot = self.read_snapshot(digest)?;
        snapshot
            .blobs()
            .try_for_each(|blob| self.check_blob(blob))?;
        Ok(snapshot)
    }

    /// A snapshot by its manifest alone.
    pub(crate) fn read_snapshot(&self, digest: &Digest) -> Result<Snapshot, Error> {
        let dir = self.layout.snapshot(digest);
        if self.files.kind(&dir)?.is_none() {
            return Err(Error::UnknownSnapshot {
                reference: digest.to_string(),
            });
        }
        let path = dir.join("manifest.json");
        let bytes =
            optional(self.files.read(&path))?.ok_or_else(|| Error::corrupt(&path, "missing"))?;
        // The digest first: of bytes that are not what was published, nothing else is worth saying.
        if Digest::of(&bytes) != *digest {
            return Err(Error::corrupt(
                path,
                "its digest is not the name of its directory",
            ));
        }
        let parsed = SnapshotManifest::parse(&bytes);
        let (manifest, digest) = parsed.map_err(|source| Error::Manifest { path, source })?;
        Ok(Snapshot { digest, manifest })
    }

    /// Every snapshot by digest, also those without a name.
    pub fn snapshots(&self) -> Result<Vec<ListedSnapshot>, Error> {
        let names = self.names_by_snapshot()?.by_digest;
        let listed = self
            .snapshot_digests()?
            .into_iter()
            .map(|digest| ListedSnapshot {
                names: names.get(&digest).cloned().unwrap_or_default(),
                snapshot: self.snapshot(&digest),
                digest,
            });
        // A snapshot that disappeared after the listing was removed by another process.
        Ok(listed
            .filter(|listed| !matches!(listed.snapshot, Err(Error::UnknownSnapshot { .. })))
            .collect())
    }

    /// What is in `snapshots/` under the name of a digest.
    pub(crate) fn snapshot_digests(&self) -> Result<Vec<Digest>, Error> {
        let entries = self.files.list(&self.layout.snapshots())?;
        Ok(entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse().ok())
            .collect())
    }
}
