//! The disk of a sandbox as one readable chain of layers.

use std::io;
use std::path::PathBuf;

use sandtree_diff::{self as diff, Blocks};
use sandtree_store::disk::Chain;
use sandtree_store::{LayerId, SandboxDir};

use crate::error::{Error, Result, store_error};
use crate::inner::Inner;

/// A disk in the form that the comparison reads.
pub(crate) struct Disk<'a>(pub &'a Chain);

impl Blocks for Disk<'_> {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, into).map_err(io::Error::other)
    }
}

impl Inner {
    /// The disk of a sandbox with these layers.
    pub fn chain(&self, dir: &SandboxDir, disk: &[LayerId]) -> Result<Chain> {
        let image = self
            .store
            .image_by_digest(&dir.record().image_digest)
            .map_err(store_error("read an image"))?;
        let layers: Vec<PathBuf> = disk.iter().map(|layer| dir.disk_layer(layer)).collect();
        Chain::open(&image.rootfs(), &layers).map_err(store_error("read a disk"))
    }
}

pub(crate) fn diff_error(source: diff::Error) -> Error {
    Error::Diff { source }
}
