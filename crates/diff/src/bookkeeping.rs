//! What a file system notes about itself, which says nothing about what is in it.

use std::ops::Range;

use crate::ext4::is_clean_superblock;
use crate::{Blocks, Error};

/// Where the superblock is.
const SUPERBLOCK: Range<u64> = 1024..2048;
/// In it: when it was last written, how much has been written, and its checksum, which holds those.
const NOTES: [Range<usize>; 4] = [0x30..0x34, 0x178..0x180, 0x274..0x275, 0x3fc..0x400];
const PIECE_BYTES: u64 = 1 << 20;

/// Whether the file system on a disk was unmounted or frozen, so that its journal has nothing to
/// add.
pub fn is_clean(disk: &dyn Blocks) -> Result<bool, Error> {
    let mut superblock = [0; 1024];
    read(disk, SUPERBLOCK.start, &mut superblock)?;
    is_clean_superblock(&superblock, disk.bytes())
}

/// Whether two disks hold the same in these ranges, but for when and how much their file systems
/// were written.
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
    for note in NOTES {
        for at in note
            .map(|at| SUPERBLOCK.start + at as u64)
            .filter(|at| range.contains(at))
        {
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
    fn only_notes_of_the_superblock_are_left_out() {
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
            "outside the ranges nobody looks"
        );
        assert!(
            !is_same_but_for_notes(&disk, &vec![7u8; 4096], &[]).unwrap(),
            "of another size"
        );
    }
}
