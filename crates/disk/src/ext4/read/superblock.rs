//! The superblock: the features of a file system, and the places of its inodes.

use std::ops::Range;

use super::error::{Error, require};
use crate::ext4::format::{
    MAX_LOG_BLOCK_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_MAGIC, incompatible, is_sparse_backup,
};
use crate::fields::Le;

/// The time of the last write, the total amount written, and the checksum over both.
pub(super) const WRITE_STATISTICS: [Range<usize>; 4] =
    [0x30..0x34, 0x178..0x180, 0x274..0x275, 0x3fc..0x400];

/// Features that change nothing for a reader, or are flagged in each inode.
const HARMLESS: u32 = incompatible::EXTENTS
    | incompatible::MULTIPLE_MOUNT_PROTECTION
    | incompatible::FLEX_BG
    | incompatible::CHECKSUM_SEED
    | incompatible::INLINE_DATA
    | incompatible::CASE_FOLDING;
const KNOWN: u32 = incompatible::FILE_TYPE
    | incompatible::RECOVER
    | incompatible::META_BG
    | incompatible::IS_64BIT
    | incompatible::EA_INODE
    | incompatible::LARGE_DIR
    | HARMLESS;

const COMPATIBLE_SPARSE_SUPER2: u32 = 0x200;
const READ_ONLY_SPARSE_SUPER: u32 = 0x1;

/// Sizes and places, checked against each other and against the disk.
#[derive(Debug, Clone)]
pub(super) struct Superblock {
    pub block_bytes: u64,
    pub blocks: u64,
    pub journal_inode: u32,
    inodes: u32,
    inodes_per_group: u32,
    blocks_per_group: u32,
    first_data_block: u64,
    inode_bytes: u64,
    descriptor_bytes: u64,
    first_meta_group: u64,
    compatible: u32,
    incompatible: u32,
    read_only: u32,
    backup_groups: [u64; 2],
}

impl Superblock {
    pub(super) fn parse(bytes: &[u8; SUPERBLOCK_BYTES], disk_bytes: u64) -> Result<Self, Error> {
        let fields = Le(bytes);
        if fields.u16(56) != SUPERBLOCK_MAGIC {
            return Err(Error::NotExt4);
        }
        let incompatible = fields.u32(96);
        check_features(incompatible)?;
        require(fields.u32(24) <= MAX_LOG_BLOCK_BYTES, || {
            "its block size is invalid".into()
        })?;
        let is_64bit = incompatible & incompatible::IS_64BIT != 0;
        let superblock = Self {
            block_bytes: 1024 << fields.u32(24),
            blocks: if is_64bit {
                fields.halves(4, 336)
            } else {
                fields.u32(4).into()
            },
            journal_inode: fields.u32(224),
            inodes: fields.u32(0),
            inodes_per_group: fields.u32(40),
            blocks_per_group: fields.u32(32),
            first_data_block: fields.u32(20).into(),
            // The first revision has no field for the size of inodes.
            inode_bytes: if fields.u32(76) == 0 {
                128
            } else {
                fields.u16(88).into()
            },
            descriptor_bytes: if is_64bit { fields.u16(254).into() } else { 32 },
            first_meta_group: fields.u32(260).into(),
            compatible: fields.u32(92),
            incompatible,
            read_only: fields.u32(100),
            backup_groups: [fields.u32(588).into(), fields.u32(592).into()],
        };
        superblock.check(disk_bytes)?;
        Ok(superblock)
    }

    fn check(&self, disk_bytes: u64) -> Result<(), Error> {
        let fits = self
            .blocks
            .checked_mul(self.block_bytes)
            .is_some_and(|bytes| bytes <= disk_bytes);
        require(fits, || {
            format!("it has {} blocks, more than the disk holds", self.blocks)
        })?;
        require(
            self.inodes_per_group > 0 && self.blocks_per_group > 0,
            || "its groups are empty".into(),
        )?;
        let inode = self.inode_bytes.is_power_of_two()
            && (128..=self.block_bytes).contains(&self.inode_bytes);
        require(inode, || {
            format!("it has inodes of {} bytes", self.inode_bytes)
        })?;
        let descriptor =
            self.descriptor_bytes.is_power_of_two() && (32..=1024).contains(&self.descriptor_bytes);
        require(descriptor, || {
            format!(
                "it has group descriptors of {} bytes",
                self.descriptor_bytes
            )
        })
    }

    pub(super) fn needs_recovery(&self) -> bool {
        self.has(incompatible::RECOVER)
    }

    pub(super) fn has_file_types(&self) -> bool {
        self.has(incompatible::FILE_TYPE)
    }

    pub(super) fn has_large_dirs(&self) -> bool {
        self.has(incompatible::LARGE_DIR)
    }

    /// Values of extended attributes may be in inodes of their own.
    pub(super) fn has_xattr_inodes(&self) -> bool {
        self.has(incompatible::EA_INODE)
    }

    pub(super) fn inode_bytes(&self) -> usize {
        self.inode_bytes as usize
    }

    /// Whether equal bytes in equal places have the same meaning in both file systems.
    pub(super) fn is_laid_out_like(&self, other: &Self) -> bool {
        let layout = |of: &Self| {
            let features = of.incompatible & !incompatible::RECOVER;
            (of.block_bytes, of.inode_bytes, features)
        };
        layout(self) == layout(other)
    }

    fn has(&self, feature: u32) -> bool {
        self.incompatible & feature != 0
    }

    /// Finds the descriptor of an inode's group, and the inode's place in the group's table.
    pub(super) fn locate(&self, inode: u32) -> Result<Located, Error> {
        require(inode > 0 && inode <= self.inodes, || {
            format!("inode {inode} does not exist")
        })?;
        let group = u64::from((inode - 1) / self.inodes_per_group);
        let index = u64::from((inode - 1) % self.inodes_per_group);
        let first_block = group.checked_mul(self.blocks_per_group.into());
        require(first_block.is_some_and(|first| first < self.blocks), || {
            format!("group {group} does not exist")
        })?;
        let per_block = self.block_bytes / self.descriptor_bytes;
        let block = self.descriptor_block(group / per_block);
        let descriptor = block * self.block_bytes + group % per_block * self.descriptor_bytes;
        Ok(Located {
            descriptor,
            in_table: index * self.inode_bytes,
        })
    }

    /// The offset of an inode on the disk, by the descriptor of its group.
    pub(super) fn inode_offset(&self, descriptor: &[u8], located: &Located) -> Result<u64, Error> {
        let fields = Le(descriptor);
        let table = if self.descriptor_bytes >= 64 {
            fields.halves(8, 40)
        } else {
            fields.u32(8).into()
        };
        let offset = table
            .checked_mul(self.block_bytes)
            .and_then(|start| start.checked_add(located.in_table));
        let disk_end = self.blocks * self.block_bytes;
        let inside =
            offset.filter(|start| table > 0 && *start <= disk_end - self.inode_bytes.min(disk_end));
        inside.ok_or_else(|| {
            Error::damaged(format!(
                "the inode table at block {table} is outside the disk"
            ))
        })
    }

    pub(super) fn descriptor_len(&self) -> usize {
        self.descriptor_bytes.min(64) as usize
    }

    /// The block with group descriptors: they follow the superblock, but those of a meta group are
    /// in its first group.
    fn descriptor_block(&self, index: u64) -> u64 {
        if !self.has(incompatible::META_BG) || index < self.first_meta_group {
            return self.first_data_block + 1 + index;
        }
        let group = index * (self.block_bytes / self.descriptor_bytes);
        let first = self.first_data_block + group * u64::from(self.blocks_per_group);
        first + u64::from(self.has_backup(group))
    }

    /// Whether the group starts with a copy of the superblock.
    fn has_backup(&self, group: u64) -> bool {
        if group == 0 {
            return true;
        }
        if self.compatible & COMPATIBLE_SPARSE_SUPER2 != 0 {
            return self.backup_groups.contains(&group);
        }
        let is_sparse = self.read_only & READ_ONLY_SPARSE_SUPER != 0;
        !is_sparse || is_sparse_backup(group)
    }
}

/// The place of an inode: its group's descriptor, and its offset in the group's table.
pub(super) struct Located {
    /// In bytes from the beginning of the disk.
    pub descriptor: u64,
    in_table: u64,
}

fn check_features(incompatible: u32) -> Result<(), Error> {
    match incompatible & !KNOWN {
        0 => Ok(()),
        unknown => Err(Error::Unsupported(format!(
            "features with the bits {unknown:#x}"
        ))),
    }
}
