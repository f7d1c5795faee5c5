//! Partition tables: the places of a disk's partitions.
//!
//! Always: a partition that is returned lies on the disk. One that reaches over the end is cut
//! there, and one that starts after the end is left out. Logical partitions, inside an extended
//! one, are not searched for.

mod gpt;
mod mbr;

use std::io;

use thiserror::Error as ThisError;

use crate::blocks::Blocks;

/// The size of the first sector, which has the MBR.
const SECTOR: u64 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// As Linux counts partitions, from 1 on.
    pub number: u32,
    pub start: u64,
    pub bytes: u64,
    pub role: Role,
}

/// The purpose of a partition, as the table records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The root file system of a machine.
    Root,
    /// It contains other partitions.
    Extended,
    Other,
}

#[derive(Debug, ThisError)]
pub enum Error {
    #[error("cannot read the disk")]
    Io(#[source] io::Error),
    #[error(
        "both copies of the disk's GPT are damaged: in the first, {primary}; in the second, {backup}"
    )]
    Gpt {
        primary: &'static str,
        backup: &'static str,
    },
}

/// Whether a disk starts with a partition table. The first 4 KiB are enough: a GPT in sectors of 4
/// KiB starts after them, but has a protective MBR.
pub fn has_table(start: &[u8]) -> bool {
    gpt::has_magic(start) || mbr::Mbr::parse(start).is_some()
}

/// Whether the disk has a GPT whose first copy is intact. If so, nothing else starts with the first
/// byte of the disk.
pub fn has_intact_gpt(disk: &dyn Blocks) -> Result<bool, Error> {
    gpt::is_primary_intact(disk)
}

/// All partitions, or `None` if the disk has no table. `start` is the beginning of the disk.
pub fn read(disk: &dyn Blocks, start: &[u8]) -> Result<Option<Vec<Partition>>, Error> {
    match mbr::Mbr::parse(start) {
        Some(mbr) if !mbr.is_protective() => Ok(Some(mbr.partitions(disk.bytes()))),
        // The protective MBR may be lost while the GPT is intact.
        None if !gpt::has_magic(start) => Ok(None),
        _ => gpt::read(disk).map(Some),
    }
}

/// The start and size of the part of `first..first + bytes` that is on the disk.
fn on_disk(first: u64, bytes: u64, disk_bytes: u64) -> Option<(u64, u64)> {
    let bytes = bytes.min(disk_bytes.checked_sub(first)?);
    (bytes > 0).then_some((first, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A disk of 4 MiB with an MBR of these types, first sectors and numbers of sectors.
    fn disk(entries: &[(u8, u32, u32)]) -> Vec<u8> {
        let mut disk = vec![0; 4 << 20];
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        for (index, (kind, first, sectors)) in entries.iter().enumerate() {
            let entry = &mut disk[446 + index * 16..][..16];
            entry[4] = *kind;
            entry[8..12].copy_from_slice(&first.to_le_bytes());
            entry[12..].copy_from_slice(&sectors.to_le_bytes());
        }
        disk
    }

    fn partition(number: u32, start: u64, bytes: u64, role: Role) -> Partition {
        Partition {
            number,
            start,
            bytes,
            role,
        }
    }

    #[test]
    fn partitions_of_an_mbr_are_cut_at_the_end_of_the_disk() {
        let disk = disk(&[
            (0x83, 2048, 2048),
            (0x05, 4096, 100_000),
            (0x83, 100_000, 1),
            (0, 1, 1),
        ]);
        assert!(has_table(&disk));
        let found = read(&disk, &disk).unwrap().unwrap();
        assert_eq!(
            found,
            [
                partition(1, MIB, MIB, Role::Other),
                partition(2, 2 * MIB, 2 * MIB, Role::Extended)
            ]
        );
    }

    #[test]
    fn a_disk_without_a_table_has_no_partitions() {
        for start in [vec![0; 4096], vec![0x55; 4096], Vec::new()] {
            assert!(!has_table(&start));
            assert_eq!(read(&start, &start).unwrap(), None);
        }
        assert!(!has_table(&disk(&[])), "the signature alone is not a table");
    }

    #[test]
    fn a_protective_mbr_without_a_gpt_is_an_error() {
        let disk = disk(&[(0xee, 1, u32::MAX)]);
        assert!(!has_intact_gpt(&disk).unwrap());
        let error = read(&disk, &disk).unwrap_err().to_string();
        assert!(
            error.contains("in the first, the header is missing"),
            "{error}"
        );
    }
}
