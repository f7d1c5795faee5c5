//! The disk of a snapshot, as files that can be read anywhere.

use std::path::PathBuf;

use super::Snapshot;
use super::pool::Form;
use crate::publish::Staged;
use crate::{Error, Store};

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
    /// The files of the disk of a snapshot that whoever asks has pinned. Those that are held compressed are unpacked.
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
        Ok(SnapshotDiskFiles { paths, _unpacked: unpacked })
    }
}
