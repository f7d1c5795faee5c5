//! Putting a snapshot together, and publishing it.
//!
//! ```text
//! staging/<id>/pin                    what must stay while this lives
//! staging/<id>/tree/blobs/<digest>    every file of the snapshot, as in the pool; a link where the pool has it
//!                   snapshot/         manifest.json
//!                   name              what the name is to hold
//!
//! all of it durable ──► [ the store's lock: pin ──► missing blobs move to layers/, sync ──► snapshot moves to
//!                         snapshots/<digest>, sync ──► name replaces names/images/<name>, sync ]
//! ```
//!
//! Always: everything a snapshot lists has a link in staging before it is published, so it does not
//! matter what is collected meanwhile. A name is the last thing that changes.
//!
//! When it fails: layers and snapshots without a name are garbage for `gc`. Staging goes with
//! its maker.

use std::io;
use std::path::{Path, PathBuf};

use super::names::{Claim, Target};
use super::pool::Form;
use super::{Pinned, Snapshot, SnapshotManifest};
use crate::blob::Blob;
use crate::fs::{Lock, optional};
use crate::named::Named;
use crate::pin::Pin;
use crate::publish::{self, Staged};
use crate::{Digest, Error, SandboxId, Store, lock};

/// A file next to a manifest that says that this store made the snapshot. It never leaves the
/// store.
const SAVED_HERE: &str = "saved-here";

/// A snapshot in the making. Dropped, nothing of it is left.
#[derive(Debug)]
pub(crate) struct Assembly<'a> {
    store: &'a Store,
    staged: Staged,
}

impl<'a> Assembly<'a> {
    pub(crate) fn new(store: &'a Store) -> Result<Self, Error> {
        let assembly = Self {
            store,
            staged: store.stage()?,
        };
        store.files.create_dir(&assembly.blobs())?;
        Ok(assembly)
    }

    fn blobs(&self) -> PathBuf {
        self.staged.path().join("blobs")
    }

    /// Where a blob is to be written as it is.
    pub(crate) fn plain(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.as_str())
    }

    /// Where a blob is to be written compressed, instead.
    pub(crate) fn compressed(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(format!("{digest}.zst"))
    }

    /// Whether the blob is staged now: it was before, or the pool has it.
    pub(crate) fn has(&self, blob: &Blob) -> Result<bool, Error> {
        let files = &self.store.files;
        for staged in [self.plain(&blob.digest), self.compressed(&blob.digest)] {
            if files.kind(&staged)?.is_some() {
                return Ok(true);
            }
        }
        let (from, to) = match self.store.usable_blob(blob)? {
            Some(Form::Plain) => (
                self.store.layout.layer(&blob.digest),
                self.plain(&blob.digest),
            ),
            Some(Form::Compressed) => (
                self.store.layout.compressed_layer(&blob.digest),
                self.compressed(&blob.digest),
            ),
            None => return Ok(false),
        };
        Ok(optional(files.share(&from, &to))?.is_some())
    }

    /// Publishes what is staged as the snapshot of this manifest, which lists nothing else. `by` is
    /// the sandbox that is saved.
    pub(crate) fn publish(
        self,
        manifest: SnapshotManifest,
        target: Target<'_>,
        by: Option<&SandboxId>,
    ) -> Result<Pinned, Error> {
        let snapshot = self.describe(manifest)?;
        if by.is_some() {
            self.store
                .files
                .create(&self.staged.path().join("snapshot").join(SAVED_HERE), &[])?;
        }
        self.stage_name(&snapshot.digest, target)?;
        self.staged.make_durable()?;
        let Self { store, staged } = self;
        {
            let held = lock::store(&store.files, &store.layout)?;
            store.check_target(target, by)?;
            store.check_image(&snapshot.manifest)?;
            staged.write_pin(&Pin::Snapshot(snapshot.digest.clone()))?;
            Showing {
                store,
                staged: &staged,
                held: &held,
                snapshot: &snapshot,
            }
            .show(target)?;
        }
        // What the pool had already would keep its room beside it.
        publish::left_for_next_open(store.files.remove_tree(staged.path()));
        Ok(Pinned::new(snapshot, staged))
    }

    fn describe(&self, manifest: SnapshotManifest) -> Result<Snapshot, Error> {
        let dir = self.staged.path().join("snapshot");
        let path = dir.join("manifest.json");
        let bytes = manifest.to_bytes();
        let (manifest, digest) =
            SnapshotManifest::parse(&bytes).map_err(|source| Error::Manifest {
                path: path.clone(),
                source,
            })?;
        self.store.files.create_dir(&dir)?;
        self.store.files.create(&path, &bytes)?;
        Ok(Snapshot { digest, manifest })
    }

    fn stage_name(&self, digest: &Digest, target: Target<'_>) -> Result<(), Error> {
        match target {
            Target::Name { .. } => self
                .store
                .write_name(&self.staged, &Named::Snapshot(digest.clone())),
            Target::Unnamed => Ok(()),
        }
    }
}

/// The steps after which others see a snapshot.
struct Showing<'a> {
    store: &'a Store,
    staged: &'a Staged,
    held: &'a Lock,
    snapshot: &'a Snapshot,
}

impl Showing<'_> {
    fn show(&self, target: Target<'_>) -> Result<(), Error> {
        self.snapshot
            .blobs()
            .try_for_each(|blob| self.put_blob(blob))?;
        // Also when they exist already: the process that published them may have died before
        // this.
        self.store.files.sync_dir(&self.store.layout.layers())?;
        self.put_manifest()?;
        match target {
            Target::Name { name, .. } => self.store.put_name(self.held, self.staged, name),
            Target::Unnamed => Ok(()),
        }
    }

    fn put_blob(&self, blob: &Blob) -> Result<(), Error> {
        if self.store.usable_blob(blob)?.is_some() {
            return Ok(());
        }
        self.store.quarantine_blob(self.held, &blob.digest)?;
        let blobs = self.staged.path().join("blobs");
        let layout = &self.store.layout;
        let forms = [
            layout.layer(&blob.digest),
            layout.compressed_layer(&blob.digest),
        ];
        for (target, name) in forms
            .iter()
            .filter_map(|target| Some((target, target.file_name()?)))
        {
            if optional(self.store.files.rename_noreplace(&blobs.join(name), target))?.is_some() {
                return Ok(());
            }
        }
        Err(Error::corrupt(layout.layer(&blob.digest), "missing"))
    }

    fn put_manifest(&self) -> Result<(), Error> {
        let from = self.staged.path().join("snapshot");
        let digest = &self.snapshot.digest;
        let target = self.store.layout.snapshot(digest);
        // Damage is no reason to fail: what is staged takes its place.
        if let Err(Error::Corrupt { .. }) = self.store.read_snapshot(digest) {
            self.store
                .quarantine(self.held, &target, &format!("snapshot-{digest}"))?;
        }
        publish::publish(&self.store.files, &from, &target).map(drop)
    }
}

impl Store {
    /// Whether a snapshot was saved from a sandbox of this store. One that was imported or pulled
    /// may come from anyone.
    pub fn is_saved_here(&self, digest: &Digest) -> Result<bool, Error> {
        Ok(self
            .files
            .kind(&self.layout.snapshot(digest).join(SAVED_HERE))?
            .is_some())
    }

    /// Refuses a target that is taken. Asked before long work, and again when it counts.
    pub(crate) fn check_target(
        &self,
        target: Target<'_>,
        by: Option<&SandboxId>,
    ) -> Result<(), Error> {
        match target {
            Target::Name { name, replace } => self.check_claim(Claim { name, replace, by }),
            Target::Unnamed => Ok(()),
        }
    }

    /// A snapshot is of no use without what lies below its disk.
    pub(crate) fn check_image(&self, manifest: &SnapshotManifest) -> Result<(), Error> {
        let image = &manifest.image;
        if self
            .files
            .kind(&self.layout.image(&image.digest))?
            .is_none()
        {
            let here = match self.named(&image.name) {
                Ok(Some(Named::Image(here))) => Some(here),
                _ => None,
            };
            return Err(Error::MissingImage {
                name: image.name.clone(),
                digest: image.digest.clone(),
                here,
            });
        }
        if self
            .files
            .kind(&self.layout.kernel(&image.kernel))?
            .is_none()
        {
            return Err(Error::MissingKernel {
                digest: image.kernel.clone(),
            });
        }
        Ok(())
    }

    /// Moves something that is damaged out of the way, under a name that nothing has yet.
    pub(crate) fn quarantine(
        &self,
        _held: &Lock,
        path: &Path,
        name: &str,
    ) -> Result<PathBuf, Error> {
        let dir = self.layout.quarantine();
        let mut target = dir.join(name);
        let mut number = 0;
        while let Err(error) = self.files.rename_noreplace(path, &target) {
            if error.io_kind() != Some(io::ErrorKind::AlreadyExists) {
                return Err(error);
            }
            number += 1;
            target = dir.join(format!("{name}-{number}"));
        }
        self.files.sync_dir(&dir)?;
        self.files.sync_dir(publish::parent(path))?;
        Ok(target)
    }
}
