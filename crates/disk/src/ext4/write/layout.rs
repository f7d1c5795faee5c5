//! The fixed places of every image, and the allocation of blocks around them.
//!
//! ```text
//! group 0: superblock | descriptors, room for more | block of the resize inode | journal | …
//! groups 1, 3, 5, 7, 9, 25, 27, …: the first two again, as backups | …
//! ```
//!
//! Always: descriptors and the room for more of them have together as many blocks as 1 TiB needs.
//! So blocks can be allocated before the size of the file system is known.

use std::ops::Range;

use super::tree::BLOCK_BYTES;
use crate::ext4::format::{OLD_INODE_BYTES, is_sparse_backup};

pub(super) const BLOCK: usize = BLOCK_BYTES as usize;
pub(super) const BLOCKS_PER_GROUP: u64 = 32768;
pub(super) const DESCRIPTOR_BYTES: usize = 64;
pub(super) const INODE_BYTES: usize = 256;
/// The fields of an inode after the first 128 bytes.
pub(super) const EXTRA_INODE_BYTES: usize = 32;
/// The rest of an inode, which holds extended attributes.
pub(super) const XATTR_BODY_BYTES: usize = INODE_BYTES - OLD_INODE_BYTES - EXTRA_INODE_BYTES;
pub(super) const INODES_PER_BLOCK: u32 = (BLOCK / INODE_BYTES) as u32;
pub(super) const DESCRIPTORS_PER_BLOCK: u64 = (BLOCK / DESCRIPTOR_BYTES) as u64;
/// Descriptor blocks in use, and reserved for growth.
pub(super) const DESCRIPTOR_BLOCKS: u64 = 128;
/// The superblock and the descriptors, in group 0 and in all groups with backups.
pub(super) const HEAD_BLOCKS: u64 = 1 + DESCRIPTOR_BLOCKS;
/// At least one descriptor block is reserved for growth: the resize inode needs one.
pub(super) const MAX_BLOCKS: u64 =
    (DESCRIPTOR_BLOCKS - 1) * DESCRIPTORS_PER_BLOCK * BLOCKS_PER_GROUP;
pub(super) const RESIZE_BLOCK: u64 = HEAD_BLOCKS;
pub(super) const JOURNAL: Range<u64> = RESIZE_BLOCK + 1..RESIZE_BLOCK + 1 + 1024;

/// Allocates blocks from low to high.
#[derive(Debug, Clone)]
pub(super) struct Cursor {
    next: u64,
}

impl Cursor {
    pub(super) fn new() -> Self {
        Self { next: JOURNAL.end }
    }

    /// The first block that was not allocated.
    pub(super) fn end(&self) -> u64 {
        self.next
    }

    /// Allocates consecutive blocks: at least one, at most `wanted`.
    pub(super) fn take_some(&mut self, wanted: u64) -> Range<u64> {
        let start = self.skip_head();
        let group_end = (start / BLOCKS_PER_GROUP + 1) * BLOCKS_PER_GROUP;
        self.next = group_end.min(start + wanted);
        start..self.next
    }

    /// Allocates exactly `wanted` consecutive blocks in one group. Also returns the blocks that
    /// were skipped for that.
    pub(super) fn take_all(&mut self, wanted: u64) -> (Range<u64>, Range<u64>) {
        let before = self.skip_head();
        let taken = self.take_some(wanted);
        if taken.end - taken.start == wanted {
            return (taken, before..before);
        }
        (self.take_some(wanted), taken)
    }

    fn skip_head(&mut self) -> u64 {
        let group = self.next / BLOCKS_PER_GROUP;
        let within = self.next % BLOCKS_PER_GROUP;
        if within < HEAD_BLOCKS && is_sparse_backup(group) {
            self.next = group * BLOCKS_PER_GROUP + HEAD_BLOCKS;
        }
        self.next
    }
}

/// Writes the bytes of a number.
pub(super) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

/// Writes a number of 64 bits whose halves are in different places.
pub(super) fn put_halves(bytes: &mut [u8], low: usize, high: usize, value: u64) {
    put(bytes, low, (value as u32).to_le_bytes());
    put(bytes, high, ((value >> 32) as u32).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_backups_are_never_allocated() {
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
        let skipped = BLOCKS_PER_GROUP - 2..BLOCKS_PER_GROUP;
        assert_eq!(
            cursor.take_all(5),
            (BLOCKS_PER_GROUP + 129..BLOCKS_PER_GROUP + 134, skipped)
        );
    }
}
