//! Where things are whatever the image holds, and how blocks are handed out around them.
//!
//! ```text
//! group 0: superblock | descriptors, room for more | of the resize inode | journal | …
//! groups 1, 3, 5, 7, 9, 25, 27, …: the first two again, as backups | …
//! ```
//!
//! Always: descriptors and the room for more of them are together as many blocks as 1 TiB needs, so
//! blocks can be handed out before anybody knows how large the file system becomes.

use std::ops::Range;

pub(super) const BLOCK: usize = crate::BLOCK_BYTES as usize;
pub(super) const BLOCKS_PER_GROUP: u64 = 32768;
pub(super) const DESCRIPTOR_BYTES: usize = 64;
pub(super) const INODE_BYTES: usize = 256;
pub(super) const INODES_PER_BLOCK: u32 = (BLOCK / INODE_BYTES) as u32;
pub(super) const DESCRIPTORS_PER_BLOCK: u64 = (BLOCK / DESCRIPTOR_BYTES) as u64;
/// Those in use and those for growth.
pub(super) const DESCRIPTOR_BLOCKS: u64 = 128;
/// The superblock and the descriptors, in group 0 and in all with backups.
pub(super) const HEAD_BLOCKS: u64 = 1 + DESCRIPTOR_BLOCKS;
/// One descriptor block is always left for growth; without any there would be no resize inode.
pub(super) const MAX_BLOCKS: u64 =
    (DESCRIPTOR_BLOCKS - 1) * DESCRIPTORS_PER_BLOCK * BLOCKS_PER_GROUP;
pub(super) const RESIZE_BLOCK: u64 = HEAD_BLOCKS;
pub(super) const JOURNAL: Range<u64> = RESIZE_BLOCK + 1..RESIZE_BLOCK + 1 + 1024;

/// A copy of the superblock and of the descriptors begins the group.
pub(super) fn has_backup(group: u64) -> bool {
    group <= 1 || [3, 5, 7].into_iter().any(|base| is_power(group, base))
}

fn is_power(mut number: u64, base: u64) -> bool {
    while number.is_multiple_of(base) {
        number /= base;
    }
    number == 1
}

/// Hands out blocks from low to high.
#[derive(Debug, Clone)]
pub(super) struct Cursor {
    next: u64,
}

impl Cursor {
    pub(super) fn new() -> Self {
        Self { next: JOURNAL.end }
    }

    /// No block from here on was handed out.
    pub(super) fn end(&self) -> u64 {
        self.next
    }

    /// Blocks that lie together: `wanted` of them, or fewer, but some.
    pub(super) fn take_some(&mut self, wanted: u64) -> Range<u64> {
        let start = self.skip_head();
        let group_end = (start / BLOCKS_PER_GROUP + 1) * BLOCKS_PER_GROUP;
        self.next = group_end.min(start + wanted);
        start..self.next
    }

    /// As many as wanted, together and in one group, and the blocks that were left out for that.
    pub(super) fn take_all(&mut self, wanted: u64) -> (Range<u64>, Range<u64>) {
        let before = self.skip_head();
        let taken = self.take_some(wanted);
        if taken.end - taken.start == wanted {
            return (taken, before..before);
        }
        (self.take_some(wanted), taken)
    }

    fn skip_head(&mut self) -> u64 {
        let (group, within) = (self.next / BLOCKS_PER_GROUP, self.next % BLOCKS_PER_GROUP);
        if within < HEAD_BLOCKS && has_backup(group) {
            self.next = group * BLOCKS_PER_GROUP + HEAD_BLOCKS;
        }
        self.next
    }
}

/// Writes a number, in whichever order its bytes are given.
pub(super) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

/// Writes a number whose halves of 32 bits are in different places.
pub(super) fn put_halves(bytes: &mut [u8], low: usize, high: usize, value: u64) {
    put(bytes, low, (value as u32).to_le_bytes());
    put(bytes, high, ((value >> 32) as u32).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backups_are_where_the_kernel_looks_for_them() {
        let groups: Vec<_> = (0..130).filter(|group| has_backup(*group)).collect();
        assert_eq!(groups, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125]);
    }

    #[test]
    fn no_block_of_a_head_is_handed_out() {
        let mut cursor = Cursor {
            next: BLOCKS_PER_GROUP - 2,
        };
        assert_eq!(cursor.take_some(5), BLOCKS_PER_GROUP - 2..BLOCKS_PER_GROUP);
        assert_eq!(
            cursor.take_some(5),
            BLOCKS_PER_GROUP + 129..BLOCKS_PER_GROUP + 134
        );
        let mut cursor = Cursor {
            next: BLOCKS_PER_GROUP - 2,
        };
        let left_out = BLOCKS_PER_GROUP - 2..BLOCKS_PER_GROUP;
        assert_eq!(
            cursor.take_all(5),
            (BLOCKS_PER_GROUP + 129..BLOCKS_PER_GROUP + 134, left_out)
        );
    }
}
