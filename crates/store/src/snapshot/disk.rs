//! The disk of a snapshot, as files that can be read anywhere.

use std::path::PathBuf;

use super::Snapshot;
use super::pool::Form;
use crate::disk::Chain;
use crate::publish::Staged;
use crate::{Digest, Error, Progress, Store};

/// The layers of a snapshot's disk, bottom first. What is unpacked of them stays while this lives.
#[derive(Debug)]
pub struct SnapshotDiskFiles {
    paths: Vec<PathBuf>,
    _unpacked: Option<Staged>,
}

impl SnapshotDiskFiles {
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }
}

impl Store {
    /// Writes the whole disk of a snapshot as `rootfs.raw` of a staged tree: what its guest would
    /// read, with holes where that is zero. Data is shared with the image where the file system
    /// can.
    pub fn flatten(
        &self,
        snapshot: &Digest,
        into: &Staged,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let snapshot = self.pin(snapshot)?;
        let base = self
            .image_by_digest(&snapshot.manifest.image.digest)?
            .rootfs();
        let layers = self.disk_files(&snapshot)?;
        // Above the layers, the guest had an empty one of the disk's size.
        let chain =
            Chain::open(&base, layers.paths())?.extended_to(snapshot.manifest.disk.bytes)?;
        progress.begin(chain.bytes());
        let path = into.path().join("rootfs.raw");
        if self.files.clone_file(&base, &path)? {
            let file = self.files.open_to_write(&path)?;
            return chain.write_over(&file, progress);
        }
        let mut out = self.files.output(&path)?;
        chain.write_to(&mut out, progress)?;
        out.finish()
    }

    /// The files of the disk of a snapshot that the caller has pinned. Those that are held
    /// compressed are unpacked.
    pub fn disk_files(&self, snapshot: &Snapshot) -> Result<SnapshotDiskFiles, Error> {
        let mut unpacked: Option<Staged> = None;
        let mut paths = Vec::new();
        for layer in &snapshot.manifest.disk.layers {
            let path = match self.blob_path(layer)? {
                (path, Form::Plain) => path,
                (compressed, Form::Compressed) => {
                    let staged = match unpacked.take() {
                        Some(staged) => staged,
                        None => self.stage()?,
                    };
                    let path = unpacked.insert(staged).path().join(layer.digest.as_str());
                    self.decompress(&compressed, layer, &path)?;
                    path
                }
            };
            paths.push(path);
        }
        Ok(SnapshotDiskFiles {
            paths,
            _unpacked: unpacked,
        })
    }
}
