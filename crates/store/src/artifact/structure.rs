//! Checks the structure of a snapshot's layers, before a machine uses them.

use std::path::PathBuf;

use super::Damage;
use crate::fs::{Files, io_error};
use crate::memory::Layer;
use crate::{Digest, Error, MemoryKind, SnapshotManifest, disk};

/// Checks every layer; `place` returns its path.
pub(super) fn check(
    files: &Files,
    manifest: &SnapshotManifest,
    place: &dyn Fn(&Digest) -> PathBuf,
) -> Result<(), Error> {
    check_disk(files, manifest, place)?;
    check_memory(files, manifest, place)
}

/// Disks only grow towards the top.
fn check_disk(
    files: &Files,
    manifest: &SnapshotManifest,
    place: &dyn Fn(&Digest) -> PathBuf,
) -> Result<(), Error> {
    let mut below = 0;
    for (layer, blob) in manifest.disk.layers.iter().enumerate() {
        let path = place(&blob.digest);
        let checked =
            disk::check::layer(&*files.open_at(&path)?).map_err(io_error("read", &path))?;
        let bytes = checked.map_err(|damage| Error::DiskLayer { layer, damage })?;
        if bytes < below || bytes > manifest.disk.bytes {
            return Err(Damage::DiskBytes { layer, bytes }.into());
        }
        below = bytes;
    }
    Ok(())
}

fn check_memory(
    files: &Files,
    manifest: &SnapshotManifest,
    place: &dyn Fn(&Digest) -> PathBuf,
) -> Result<(), Error> {
    let Some(memory) = manifest
        .memory
        .as_ref()
        .filter(|memory| memory.kind == MemoryKind::Layers)
    else {
        return Ok(());
    };
    for (layer, blob) in memory.layers.iter().enumerate() {
        let found = Layer::read_from(&*files.open_at(&place(&blob.digest))?)?.ram_bytes;
        if found != memory.bytes {
            return Err(Damage::RamBytes {
                layer,
                expected: memory.bytes,
                found,
            }
            .into());
        }
    }
    Ok(())
}
