//! Disk images people have, and the root file system in them.
//!
//! ```text
//!  raw   ─┐            ┌─ ext4 from the first byte on ────────┐
//!         ├─► a disk ──┤                                      ├─► a raw ext4 in a sparse file
//!  qcow2 ─┘            └─ MBR or GPT ──► the root's partition ┘
//! ```
//!
//! Always: what an image says is not trusted. Every offset and size is checked against the file and
//! the others, memory is a few tables and one piece of data, and not more than the limit is
//! written. A qcow2 is read as it is, alone: no other file that it names is opened. The file system
//! is copied as it is, with a journal that may be left to replay.
//!
//! When it fails: the new file is removed again.

mod copy;
mod error;
mod ext4;
mod kind;
mod partitions;
mod qcow2;
mod root;
#[cfg(test)]
mod samples;
mod source;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;

pub use error::{DiskError, FoundPartition, Qcow2Damage, Qcow2Refused};

use crate::{BLOCK_BYTES, Stop, tar, unpack};
use copy::Sparse;
use source::Source;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFormat {
    Raw,
    Qcow2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskLimits {
    /// Of the whole disk, as its machine would see it.
    pub bytes: u64,
    /// Of the new file, without its holes.
    pub written_bytes: u64,
}

/// What was taken from a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedDisk {
    /// Of the new file.
    pub bytes: u64,
    pub format: DiskFormat,
    /// Which partition it was, as Linux counts them; nothing if the disk has none.
    pub partition: Option<u32>,
    /// It was unmounted, and nobody found errors in it. One that is not clean replays its journal
    /// when it is mounted.
    pub clean: bool,
    pub uuid: [u8; 16],
    /// Any text, as the image has it.
    pub label: Option<String>,
}

/// What lies at a path, by its first bytes: 4 KiB of them are enough.
pub fn looks_like_disk(start: &[u8]) -> Option<DiskFormat> {
    if start.starts_with(&qcow2::MAGIC) {
        return Some(DiskFormat::Qcow2);
    }
    // The bytes of an archive may look like anything.
    let is_archive = unpack::is_packed(start) || tar::has_magic(start);
    let is_disk = !is_archive && (ext4::has_superblock(start) || partitions::has_table(start));
    is_disk.then_some(DiskFormat::Raw)
}

/// Copies the root file system of a disk image into a new sparse file at `to`. `watch` hears how
/// many bytes were read.
///
/// The new file is not synced: that is for whoever keeps it.
pub fn import_disk(
    from: &Path,
    to: &Path,
    limits: DiskLimits,
    watch: &mut dyn FnMut(u64) -> Result<(), Stop>,
) -> Result<ImportedDisk, DiskError> {
    let disk = Source::open(from, limits)?;
    let root = root::find(&disk)?;
    let file = fs::OpenOptions::new().write(true).create_new(true).open(to);
    let file = file.map_err(DiskError::io("create", to))?;
    let bytes = root.superblock.bytes.next_multiple_of(BLOCK_BYTES);
    let range = root.start..root.start + root.superblock.bytes;
    let copied = copy::copy(
        &disk,
        range,
        Sparse::new(&file, limits.written_bytes),
        watch,
    );
    let done = copied.and_then(|()| file.set_len(bytes).map_err(copy::Error::Write));
    done.map_err(|error| {
        // The reason is worth more than a file that could not be removed.
        drop(fs::remove_file(to));
        error.at(to)
    })?;
    Ok(ImportedDisk {
        bytes,
        format: disk.format(),
        partition: root.partition,
        clean: root.superblock.is_clean,
        uuid: root.superblock.uuid,
        label: root.superblock.label,
    })
}
