//! The descriptions of an image and of its kernel, all of which may be hostile.

use std::collections::BTreeSet;

use super::{Damage, Member};
use crate::blob::Blob;
use crate::image::{ImageRecord, KernelRecord};
use crate::record::{self, Record};
use crate::{Digest, Error, ImageReference, SnapshotManifest};

const MAX_MODULES: usize = 1024;

/// What an image consists of, as its own descriptions say.
pub(super) struct ImageFiles {
    /// Of the image and of the kernel bundle.
    pub digests: [Digest; 2],
    pub image: ImageRecord,
    pub kernel: KernelRecord,
    /// The two descriptions, byte for byte.
    pub texts: [Vec<u8>; 2],
}

impl ImageFiles {
    pub(super) fn read(manifest: &SnapshotManifest, texts: [Vec<u8>; 2]) -> Result<Self, Error> {
        let ImageReference { digest, kernel, .. } = &manifest.image;
        let files = Self::parse([digest.clone(), kernel.clone()], texts)?;
        if files.image.arch != manifest.arch {
            return Err(Damage::Image {
                rule: "it is of another architecture than the snapshot",
            }
            .into());
        }
        Ok(files)
    }

    /// The descriptions of these digests, if they fit each other.
    pub(super) fn parse(digests: [Digest; 2], texts: [Vec<u8>; 2]) -> Result<Self, Error> {
        let image = parse_description(&digests[0], &texts[0])?;
        let kernel = parse_description(&digests[1], &texts[1])?;
        let files = Self {
            digests,
            image,
            kernel,
            texts,
        };
        files.check()?;
        Ok(files)
    }

    /// The files behind the descriptions, in the order in which they travel.
    pub(super) fn blobs(&self) -> impl Iterator<Item = &Blob> {
        let modules = self.kernel.modules.iter().map(|module| &module.content);
        let below = [&self.kernel.kernel]
            .into_iter()
            .chain(&self.kernel.initramfs);
        below.chain(modules).chain([&self.image.rootfs])
    }

    pub(super) fn bytes(&self) -> u64 {
        self.blobs()
            .map(|blob| blob.bytes)
            .fold(0, u64::saturating_add)
    }

    fn check(&self) -> Result<(), Damage> {
        let refused = |rule| Err(Damage::Image { rule });
        let mut names = BTreeSet::new();
        let mut modules = self.kernel.modules.iter();
        if self.image.kernel != self.digests[1] {
            return refused("it boots with another kernel than the one that comes with it");
        }
        if self.image.arch != self.kernel.arch {
            return refused("its kernel is of another architecture");
        }
        if self.image.disk_rule().is_some() {
            return refused("no disk has the size that it asks for");
        }
        if self.kernel.modules.len() > MAX_MODULES {
            return refused("its kernel has more than 1024 modules");
        }
        if !modules.all(|module| is_file_name(&module.file) && names.insert(&module.file)) {
            return refused(
                "a module of its kernel has a name that no file can have, or that another one has",
            );
        }
        Ok(())
    }
}

pub(super) fn parse_description<T: Record>(digest: &Digest, text: &[u8]) -> Result<T, Error> {
    record::parse_canonical(Member::Blob(digest.clone()).to_string().as_ref(), text)
}

/// One harmless component of a path.
fn is_file_name(name: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'+');
    !name.is_empty() && name.len() <= 255 && !name.starts_with('.') && name.bytes().all(allowed)
}
