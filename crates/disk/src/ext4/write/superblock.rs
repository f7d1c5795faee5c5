//! Writes the superblock, the descriptors after it, and their backups.

use super::area::Closed;
use super::error::Error;
use super::extents::Map;
use super::geometry::Geometry;
use super::groups::Groups;
use super::identity::{EPOCH, HASH_SEED, LABEL, UUID};
use super::inode::{FIRST, JOURNAL};
use super::layout::{
    self, BLOCKS_PER_GROUP, DESCRIPTOR_BLOCKS, DESCRIPTOR_BYTES, DESCRIPTORS_PER_BLOCK,
    EXTRA_INODE_BYTES, HEAD_BLOCKS, INODE_BYTES, put, put_halves,
};
use super::tree::BLOCK_BYTES;
use crate::crc32c::crc32c;
use crate::ext4::format::{
    SUPERBLOCK_BYTES as BYTES, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, incompatible,
};

/// Journal, extended attributes, resize inode, indexed directories.
const COMPATIBLE: u32 = 0x4 | 0x8 | 0x10 | 0x20;
const INCOMPATIBLE: u32 = incompatible::FILE_TYPE
    | incompatible::EXTENTS
    | incompatible::IS_64BIT
    | incompatible::FLEX_BG;
/// Few backups, large and huge files, any number of subdirectories, larger inodes, checksums.
const READ_ONLY: u32 = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | 0x400;
const ERRORS_CONTINUE: u16 = 1;
const IS_VALID: u16 = 1;
/// Names are hashed as signed characters.
const SIGNED_HASH: u32 = 1;
const HALF_MD4: u8 = 1;
const CRC32C: u8 = 1;
const LOG_GROUPS_PER_FLEX: u8 = 4;
/// Extended attributes of users, and access lists.
const DEFAULT_MOUNT_OPTIONS: u32 = 0x4 | 0x8;

/// Writes them all.
pub(super) fn write(
    image: &Closed,
    geometry: &Geometry,
    groups: &Groups,
    journal: &Map,
) -> Result<(), Error> {
    let superblock = encode(geometry, groups, journal);
    let mut backup = superblock;
    // A backup is not marked valid: a file system restored from it must be checked.
    put(&mut backup, 58, 0u16.to_le_bytes());
    for group in geometry.backups() {
        put(&mut backup, 90, (group as u16).to_le_bytes());
        let start = group * BLOCKS_PER_GROUP;
        image.write(start, &with_checksum(backup))?;
        image.write(start + 1, &groups.descriptors)?;
    }
    image.write(1, &groups.descriptors)?;
    image.write_at(SUPERBLOCK_OFFSET, &with_checksum(superblock))
}

/// The number of blocks with descriptors.
pub(super) fn descriptor_blocks(geometry: &Geometry) -> u64 {
    geometry.groups.div_ceil(DESCRIPTORS_PER_BLOCK)
}

fn with_checksum(mut bytes: [u8; BYTES]) -> [u8; BYTES] {
    let checksum = crc32c(!0, &bytes[..BYTES - 4]);
    put(&mut bytes, BYTES - 4, checksum.to_le_bytes());
    bytes
}

fn encode(geometry: &Geometry, groups: &Groups, journal: &Map) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    put_counts(&mut bytes, geometry, groups);
    put_kind(&mut bytes);
    put_journal(&mut bytes, journal);
    bytes
}

fn put_counts(bytes: &mut [u8], geometry: &Geometry, groups: &Groups) {
    let log_block_size = (BLOCK_BYTES.ilog2() - 10).to_le_bytes();
    let reserved = DESCRIPTOR_BLOCKS - descriptor_blocks(geometry);
    put(bytes, 0, geometry.inodes().to_le_bytes());
    put_halves(bytes, 4, 336, geometry.blocks);
    put_halves(bytes, 12, 344, groups.free_blocks);
    put(bytes, 16, groups.free_inodes.to_le_bytes());
    put(bytes, 24, log_block_size);
    put(bytes, 28, log_block_size);
    put(bytes, 32, (BLOCKS_PER_GROUP as u32).to_le_bytes());
    put(bytes, 36, (BLOCKS_PER_GROUP as u32).to_le_bytes());
    put(bytes, 40, geometry.inodes_per_group.to_le_bytes());
    put(bytes, 206, (reserved as u16).to_le_bytes());
    put(bytes, 584, (overhead_blocks(geometry) as u32).to_le_bytes());
}

/// The blocks that files can never use.
fn overhead_blocks(geometry: &Geometry) -> u64 {
    let heads = (1 + geometry.backups().count() as u64) * HEAD_BLOCKS;
    let tables = geometry.groups * (2 + geometry.table_blocks());
    heads + tables + layout::JOURNAL.end - layout::JOURNAL.start
}

fn put_kind(bytes: &mut [u8]) {
    let never = (-1i16).to_le_bytes();
    for time in [48, 64, 264] {
        put(bytes, time, EPOCH.to_le_bytes());
    }
    put(bytes, 54, never);
    put(bytes, 56, SUPERBLOCK_MAGIC.to_le_bytes());
    put(bytes, 58, IS_VALID.to_le_bytes());
    put(bytes, 60, ERRORS_CONTINUE.to_le_bytes());
    put(bytes, 76, 1u32.to_le_bytes());
    put(bytes, 84, FIRST.to_le_bytes());
    put(bytes, 88, (INODE_BYTES as u16).to_le_bytes());
    put(bytes, 92, COMPATIBLE.to_le_bytes());
    put(bytes, 96, INCOMPATIBLE.to_le_bytes());
    put(bytes, 100, READ_ONLY.to_le_bytes());
    put(bytes, 104, UUID);
    put(bytes, 120, *LABEL);
    put(bytes, 236, HASH_SEED);
    bytes[252] = HALF_MD4;
    put(bytes, 254, (DESCRIPTOR_BYTES as u16).to_le_bytes());
    put(bytes, 256, DEFAULT_MOUNT_OPTIONS.to_le_bytes());
    put(bytes, 348, (EXTRA_INODE_BYTES as u16).to_le_bytes());
    put(bytes, 350, (EXTRA_INODE_BYTES as u16).to_le_bytes());
    put(bytes, 352, SIGNED_HASH.to_le_bytes());
    bytes[372] = LOG_GROUPS_PER_FLEX;
    bytes[373] = CRC32C;
}

/// Writes the journal's inode number, and a copy of its extents.
fn put_journal(bytes: &mut [u8], map: &Map) {
    let journal_bytes = (layout::JOURNAL.end - layout::JOURNAL.start) * BLOCK_BYTES;
    put(bytes, 224, JOURNAL.to_le_bytes());
    bytes[253] = 1;
    put(bytes, 268, *map);
    put(bytes, 332, (journal_bytes as u32).to_le_bytes());
}
