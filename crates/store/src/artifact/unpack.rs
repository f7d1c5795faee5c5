//! Members that came one by one become a snapshot or an image of the store.
//!
//! They lie in a directory under their digests, and are linked into the store once every byte of
//! them was read. Those that are not there the store must have: in the pool, or as a file of some
//! image or kernel.
//!
//! Always: what comes is checked as an artifact is, and nothing of it is seen before all of it was
//! read. What the store has of it is read there, and put aside if it is damaged. When it fails:
//! staging goes, and with it everything. The directory is its owner's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::import::{Import, parse_manifest};
use super::intake::Loose;
use super::packing::{Role, kernel_roles};
use super::parts::{self, Lender, Part, Scope};
use crate::blob::Blob;
use crate::fs::optional;
use crate::{Digest, Error, Image, KernelBundle, Pinned, Progress, Snapshot, Store, Target};

/// What the store has that members can be taken from.
type Shelf = BTreeMap<Digest, Part>;

impl Store {
    /// Whether the store has this content, so that a directory to unpack from need not. It is
    /// looked at by its size.
    pub fn has_member(&self, digest: &Digest, bytes: u64) -> Result<bool, Error> {
        if self
            .find_blob(&Blob {
                digest: digest.clone(),
                bytes,
            })
            .is_ok()
        {
            return Ok(true);
        }
        let mut shelf = self.shelf()?;
        self.add_manifest(digest, &mut shelf)?;
        Ok(shelf
            .get(digest)
            .is_some_and(|part| part.blob.bytes == bytes))
    }

    /// Publishes a snapshot whose members are files in `dir`, named by their digests, once every
    /// byte is verified.
    pub fn unpack_snapshot(
        &self,
        snapshot: &Digest,
        dir: &Path,
        target: Target<'_>,
        progress: &dyn Progress,
    ) -> Result<Pinned, Error> {
        self.check_target(target, None)?;
        let mut loose = Loose::new(self.files.clone(), dir);
        let mut shelf = self.lacking(&loose)?;
        if !loose.has(snapshot)? {
            self.add_manifest(snapshot, &mut shelf)?;
        }
        let text = Import::new(self, &mut loose, shelf.clone(), progress).description(snapshot)?;
        let (manifest, digest) = parse_manifest(&text)?;
        let snapshot = Snapshot { digest, manifest };
        for (role, blob) in parts::blobs(&snapshot.manifest) {
            if !loose.has(&blob.digest)? && self.find_blob(blob).is_ok() {
                shelf.insert(blob.digest.clone(), Part::pooled(role, blob));
            }
        }
        Import::new(self, &mut loose, shelf, progress).snapshot(&snapshot, Scope::WithImage, target)
    }

    /// Like `unpack_snapshot`, of an image, which stays as long as the result lives.
    pub fn unpack_image(
        &self,
        image: &Digest,
        dir: &Path,
        progress: &dyn Progress,
    ) -> Result<Image, Error> {
        let mut loose = Loose::new(self.files.clone(), dir);
        let shelf = self.lacking(&loose)?;
        Import::new(self, &mut loose, shelf, progress).image_alone(image)
    }

    /// What the store has, but for what came.
    fn lacking(&self, loose: &Loose) -> Result<Shelf, Error> {
        let mut shelf = self.shelf()?;
        for digest in shelf.keys().cloned().collect::<Vec<_>>() {
            if loose.has(&digest)? {
                shelf.remove(&digest);
            }
        }
        Ok(shelf)
    }

    /// Every file of every image and kernel. One that cannot be read has none.
    fn shelf(&self) -> Result<Shelf, Error> {
        let mut shelf = Shelf::new();
        for image in self
            .image_digests()?
            .iter()
            .filter_map(|digest| self.image_by_digest(digest).ok())
        {
            let path = self.layout.image(&image.digest).join("image.json");
            self.add_record(Role::Image, &image.digest, path, &mut shelf)?;
            for (path, blob) in image.files() {
                let by = Lender::Image(image.digest.clone());
                shelf.insert(
                    blob.digest.clone(),
                    Part::lent(Role::Rootfs, blob, path, by),
                );
            }
        }
        for kernel in self
            .kernel_digests()?
            .iter()
            .filter_map(|digest| self.kernel(digest).ok())
        {
            self.add_kernel(&kernel, &mut shelf)?;
        }
        Ok(shelf)
    }

    fn add_kernel(&self, kernel: &KernelBundle, shelf: &mut Shelf) -> Result<(), Error> {
        let path = self.layout.kernel(&kernel.digest).join("bundle.json");
        self.add_record(Role::Kernel, &kernel.digest, path, shelf)?;
        for (role, (path, blob)) in kernel_roles(&kernel.record).zip(kernel.files()) {
            let by = Lender::Kernel(kernel.digest.clone());
            shelf.insert(blob.digest.clone(), Part::lent(role, blob, path, by));
        }
        Ok(())
    }

    /// The manifest of a snapshot, if the store has it.
    fn add_manifest(&self, digest: &Digest, shelf: &mut Shelf) -> Result<(), Error> {
        self.add_record(
            Role::Manifest,
            digest,
            self.layout.snapshot(digest).join("manifest.json"),
            shelf,
        )
    }

    /// What went since it was listed is not there.
    fn add_record(
        &self,
        role: Role,
        digest: &Digest,
        path: PathBuf,
        shelf: &mut Shelf,
    ) -> Result<(), Error> {
        let part = optional(self.record_part(role, digest, path))?;
        shelf.extend(part.map(|part| (digest.clone(), part)));
        Ok(())
    }
}
