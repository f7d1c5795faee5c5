//! Numbers of the format that reader and writer share.

/// The offset of the superblock: after room for a boot sector.
pub(super) const SUPERBLOCK_OFFSET: u64 = 1024;
pub(super) const SUPERBLOCK_BYTES: usize = 1024;
pub(super) const SUPERBLOCK_MAGIC: u16 = 0xef53;
/// The largest block size, 64 KiB, as a power of two above 1 KiB.
pub(super) const MAX_LOG_BLOCK_BYTES: u32 = 6;

/// Features that a reader must know, because they change the structures.
pub(super) mod incompatible {
    pub const FILE_TYPE: u32 = 0x2;
    pub const RECOVER: u32 = 0x4;
    pub const JOURNAL_DEVICE: u32 = 0x8;
    pub const META_BG: u32 = 0x10;
    pub const EXTENTS: u32 = 0x40;
    pub const IS_64BIT: u32 = 0x80;
    pub const MULTIPLE_MOUNT_PROTECTION: u32 = 0x100;
    pub const FLEX_BG: u32 = 0x200;
    pub const EA_INODE: u32 = 0x400;
    pub const CHECKSUM_SEED: u32 = 0x2000;
    pub const LARGE_DIR: u32 = 0x4000;
    pub const INLINE_DATA: u32 = 0x8000;
    pub const CASE_FOLDING: u32 = 0x2_0000;
}

pub(super) const ROOT_INODE: u32 = 2;
/// The fields of an inode that every revision has.
pub(super) const OLD_INODE_BYTES: usize = 128;
/// The length of the inode's field with block numbers, extents, or inline content.
pub(super) const BLOCK_FIELD_BYTES: usize = 60;

pub(super) mod inode_flag {
    pub const INDEX: u32 = 0x1000;
    pub const EXTENTS: u32 = 0x8_0000;
    pub const INLINE_DATA: u32 = 0x1000_0000;
}

pub(super) const EXTENT_MAGIC: u16 = 0xf30a;
pub(super) const EXTENT_BYTES: usize = 12;
/// The most blocks of one written extent. A larger length marks an extent that is allocated but not
/// written.
pub(super) const MAX_EXTENT_BLOCKS: u32 = 32768;

pub(super) const XATTR_MAGIC: u32 = 0xea02_0000;
pub(super) const XATTR_BLOCK_HEADER_BYTES: usize = 32;
pub(super) const XATTR_ENTRY_BYTES: usize = 16;

pub(super) const JOURNAL_MAGIC: u32 = 0xc03b_3998;
pub(super) const JOURNAL_SUPERBLOCK_V2: u32 = 4;

/// Whether a group starts with a copy of the superblock, in a file system with few copies
/// (`sparse_super`).
pub(super) fn is_sparse_backup(group: u64) -> bool {
    group <= 1 || [3, 5, 7].into_iter().any(|base| is_power(group, base))
}

fn is_power(mut number: u64, base: u64) -> bool {
    while number.is_multiple_of(base) {
        number /= base;
    }
    number == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backups_are_where_the_kernel_looks_for_them() {
        let groups: Vec<_> = (0..130).filter(|group| is_sparse_backup(*group)).collect();
        assert_eq!(groups, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125]);
    }
}
