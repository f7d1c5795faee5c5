//! Imports the root file system of a disk image.
//!
//! ```text
//!  raw   ─┐            ┌─ ext4 from the first byte on ────────┐
//!         ├─► a disk ──┤                                      ├─► a raw ext4 in a sparse file
//!  qcow2 ─┤            └─ MBR or GPT ──► the root's partition ┘
//!  overlays on a file system ──────────► that file system, as the newest overlay leaves it
//! ```
//!
//! Always: images are hostile. Every offset and size is checked against the file and against each
//! other, memory holds a few tables and one piece of data, and no more than the limit is written.
//! No other file that a qcow2 names is opened. The file system is copied unchanged; its journal may
//! still need a replay.
//!
//! When it fails: the new file is removed.

mod copy;
mod error;
mod kind;
mod overlay;
mod qcow2;
mod root;
#[cfg(test)]
mod samples;
mod source;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use sandtree_disk::ext4::probe;
use sandtree_disk::ext4::write::BLOCK_BYTES;
use sandtree_disk::{partitions, qcow2 as format};

pub use error::{DiskError, FoundPartition, Qcow2Damage, Qcow2Refused};

use crate::watch::Stop;
use crate::{tar, unpack};
use copy::Sparse;
use overlay::Opened;
use root::Root;
use source::Source;

/// Far above the overlays of any save.
const MAX_OVERLAYS: usize = 128;
/// Each overlay keeps its L1 table in memory: 128 KiB for a disk of 1 TiB.
const MAX_TABLES_BYTES: usize = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFormat {
    Raw,
    Qcow2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskLimits {
    /// The size of the whole disk, as its machine sees it.
    pub bytes: u64,
    /// The size of the new file without its holes.
    pub written_bytes: u64,
}

/// A file system that was copied from a disk image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedDisk {
    /// The size of the new file.
    pub bytes: u64,
    pub format: DiskFormat,
    /// The number of its partition, as Linux counts them; `None` if the disk has no partitions.
    pub partition: Option<u32>,
    /// It was unmounted, and no errors are recorded. A file system that is not clean replays its
    /// journal when it is mounted.
    pub clean: bool,
    pub uuid: [u8; 16],
    /// Any text from the image.
    pub label: Option<String>,
}

/// Recognises a disk image by its first bytes. 4 KiB are enough.
pub fn looks_like_disk(start: &[u8]) -> Option<DiskFormat> {
    if start.starts_with(&format::MAGIC) {
        return Some(DiskFormat::Qcow2);
    }
    // The bytes of an archive may look like anything.
    let is_archive = unpack::is_packed(start) || tar::has_magic(start);
    let is_disk = !is_archive && (probe::has_superblock(start) || partitions::has_table(start));
    is_disk.then_some(DiskFormat::Raw)
}

/// Copies the root file system of a disk image into a new sparse file at `to`. `watch` receives the
/// number of bytes read.
///
/// The new file is not synced; the caller syncs it.
pub fn import_disk(
    from: &Path,
    to: &Path,
    limits: DiskLimits,
    watch: &mut dyn FnMut(u64) -> Result<(), Stop>,
) -> Result<ImportedDisk, DiskError> {
    let disk = Source::open(from, limits)?;
    let root = root::find(&disk)?;
    copy_root((&disk, root), to, limits, watch)
}

/// A file system, and what was written to it afterwards.
#[derive(Debug, Clone, Copy)]
pub struct DiskLayers<'a> {
    /// A bare ext4.
    pub base: &'a Path,
    /// qcow2 files that lie on it in their order. The names of backing files in them are ignored.
    pub overlays: &'a [PathBuf],
}

/// Copies a file system, as qcow2 overlays on it leave it, into a new sparse file at `to`.
///
/// An overlay has only what differs from its base, so the disk must have the same file system as
/// the base: on another version of the base, the result would be a mixture of both.
pub fn import_overlays(
    layers: DiskLayers<'_>,
    to: &Path,
    limits: DiskLimits,
    watch: &mut dyn FnMut(u64) -> Result<(), Stop>,
) -> Result<ImportedDisk, DiskError> {
    let DiskLayers { base, overlays } = layers;
    if overlays.len() > MAX_OVERLAYS {
        return Err(DiskError::TooManyOverlays(overlays.len()));
    }
    let mut disk = Source::open(base, limits)?;
    let below = root::bare(&disk)?;
    let mut tables_bytes = 0;
    for overlay in overlays {
        let top = Opened::open(overlay, limits)?;
        tables_bytes += top.table_bytes();
        if tables_bytes > MAX_TABLES_BYTES {
            return Err(DiskError::TooManyOverlays(overlays.len()));
        }
        disk = top.on(disk);
    }
    let root = root::bare(&disk)?;
    if root.summary.uuid != below.summary.uuid {
        return Err(DiskError::OtherBase);
    }
    copy_root((&disk, root), to, limits, watch)
}

fn copy_root(
    (disk, root): (&Source, Root),
    to: &Path,
    limits: DiskLimits,
    watch: &mut dyn FnMut(u64) -> Result<(), Stop>,
) -> Result<ImportedDisk, DiskError> {
    let file = fs::OpenOptions::new().write(true).create_new(true).open(to);
    let file = file.map_err(DiskError::io("create", to))?;
    let bytes = root.summary.bytes.next_multiple_of(BLOCK_BYTES);
    let range = root.start..root.start + root.summary.bytes;
    let copied = copy::copy(disk, range, Sparse::new(&file, limits.written_bytes), watch);
    let done = copied.and_then(|()| file.set_len(bytes).map_err(copy::Error::Write));
    done.map_err(|error| {
        // The caller needs the first error more than one about a file that could not be removed.
        drop(fs::remove_file(to));
        error.at(to)
    })?;
    Ok(ImportedDisk {
        bytes,
        format: disk.format(),
        partition: root.partition,
        clean: root.summary.is_clean,
        uuid: root.summary.uuid,
        label: root.summary.label,
    })
}
