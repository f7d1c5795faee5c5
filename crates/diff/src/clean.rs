//! Whether a file system is clean, and whether two disks are equal except for the superblock's own
//! statistics.

use std::ops::Range;

use sandtree_disk::Blocks;
use sandtree_disk::ext4::read::{Error, SUPERBLOCK_OFFSET, WRITE_STATISTICS};

const PIECE_BYTES: u64 = 1 << 20;

pub use sandtree_disk::ext4::read::is_clean;

/// Whether two disks are equal in these ranges, except for the times and amounts of writes that
/// their superblocks record.
pub fn is_same_but_for_notes(
    a: &dyn Blocks,
    b: &dyn Blocks,
    ranges: &[Range<u64>],
) -> Result<bool, Error> {
    if a.bytes() != b.bytes() {
        return Ok(false);
    }
    for range in ranges {
        let mut at = range.start;
        while at < range.end.min(a.bytes()) {
            let end = (at + PIECE_BYTES).min(range.end).min(a.bytes());
            if without_notes(a, at..end)? != without_notes(b, at..end)? {
                return Ok(false);
            }
            at = end;
        }
    }
    Ok(true)
}

fn without_notes(disk: &dyn Blocks, range: Range<u64>) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    read(disk, range.start, &mut bytes)?;
    for note in WRITE_STATISTICS {
        let places = note.map(|at| SUPERBLOCK_OFFSET + at as u64);
        for at in places.filter(|at| range.contains(at)) {
            bytes[(at - range.start) as usize] = 0;
        }
    }
    Ok(bytes)
}

fn read(disk: &dyn Blocks, offset: u64, into: &mut [u8]) -> Result<(), Error> {
    disk.read_at(offset, into)
        .map_err(|source| Error::Io { offset, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_write_statistics_of_the_superblock_are_ignored() {
        let disk = vec![7u8; 8192];
        let whole = [0..4096, 4096..8192];
        let changed = |at: usize| {
            let mut other = disk.clone();
            other[at] ^= 1;
            is_same_but_for_notes(&disk, &other, &whole).unwrap()
        };
        for note in [
            1024 + 0x30,
            1024 + 0x33,
            1024 + 0x178,
            1024 + 0x274,
            1024 + 0x3ff,
        ] {
            assert!(changed(note), "{note}");
        }
        for content in [
            0x30,
            1024 + 0x2f,
            1024 + 0x34,
            1024 + 0x177,
            1024 + 0x60,
            2048 + 0x30,
            8191,
        ] {
            assert!(!changed(content), "{content}");
        }
        let mut far = disk.clone();
        far[6000] = 0;
        assert!(
            is_same_but_for_notes(&disk, &far, &[0..2048, 2048..4096]).unwrap(),
            "bytes outside the ranges are not compared"
        );
        assert!(
            !is_same_but_for_notes(&disk, &vec![7u8; 4096], &[]).unwrap(),
            "disks of different sizes differ"
        );
    }
}
