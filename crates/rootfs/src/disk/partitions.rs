//! Partition tables: where the partitions of a disk are.
//!
//! Always: a partition that is given lies on the disk. What reaches over its end is cut there, and
//! what begins behind it is left out. Logical partitions, in an extended one, are not looked for.

mod gpt;
mod mbr;

use super::DiskError;
use super::source::Source;

/// Its old table is in the first sector.
const SECTOR: u64 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Partition {
    /// As Linux counts them, from 1 on.
    pub number: u32,
    pub start: u64,
    pub bytes: u64,
    pub role: Role,
}

/// What the table says about a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The root of a machine, by its type.
    Root,
    /// A partition with partitions in it.
    Extended,
    Other,
}

/// Whether a disk that starts so has a partition table.
pub(super) fn has_table(start: &[u8]) -> bool {
    gpt::has_magic(start) || mbr::Mbr::parse(start).is_some()
}

/// Whether the table is a GPT whose first copy is intact: then nothing else begins where the disk
/// does.
pub(super) fn has_intact_gpt(disk: &Source) -> Result<bool, DiskError> {
    gpt::is_primary_intact(disk)
}

/// All partitions, or nothing if the disk has no table. `start` is the beginning of the disk.
pub(super) fn read(disk: &Source, start: &[u8]) -> Result<Option<Vec<Partition>>, DiskError> {
    match mbr::Mbr::parse(start) {
        Some(mbr) if !mbr.is_protective() => Ok(Some(mbr.partitions(disk.bytes()))),
        // The old table may be lost where the new one is not.
        None if !gpt::has_magic(start) => Ok(None),
        _ => gpt::read(disk).map(Some),
    }
}

/// The part of `first..first + bytes` that is on the disk.
fn on_disk(first: u64, bytes: u64, disk_bytes: u64) -> Option<(u64, u64)> {
    let bytes = bytes.min(disk_bytes.checked_sub(first)?);
    (bytes > 0).then_some((first, bytes))
}
