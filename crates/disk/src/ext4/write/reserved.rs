//! The reserved inodes of the file system: the journal, and the room for more descriptors.

use super::area::Closed;
use super::error::Error;
use super::extents;
use super::geometry::Geometry;
use super::identity::{EPOCH_TIME, UUID};
use super::inode::{Inode, Shape};
use super::layout::{
    BLOCK, BLOCKS_PER_GROUP, DESCRIPTOR_BLOCKS, JOURNAL, RESIZE_BLOCK, XATTR_BODY_BYTES, put,
};
use super::superblock::descriptor_blocks;
use super::tree::{BLOCK_BYTES, Extent};
use crate::ext4::format::{BLOCK_FIELD_BYTES, JOURNAL_MAGIC, JOURNAL_SUPERBLOCK_V2, inode_flag};

const POINTERS_PER_BLOCK: u64 = BLOCK as u64 / 4;
/// The size that a doubly indirect block can address.
const RESIZE_BYTES: u64 =
    (12 + POINTERS_PER_BLOCK + POINTERS_PER_BLOCK * POINTERS_PER_BLOCK) * BLOCK_BYTES;
const DOUBLY_INDIRECT: usize = 13;

/// An inode that root owns, with the creation time of the file system.
pub(super) fn inode(mode: u16, links: u16, shape: Shape) -> Inode {
    Inode {
        mode,
        uid: 0,
        gid: 0,
        links,
        modified: EPOCH_TIME,
        shape,
        body: [0; XATTR_BODY_BYTES],
    }
}

/// Writes an empty journal: its superblock, followed by zeros.
pub(super) fn write_journal(image: &Closed) -> Result<Shape, Error> {
    let blocks = (JOURNAL.end - JOURNAL.start) as u32;
    let mut superblock = [0; BLOCK];
    let first = 1;
    let sequence = 1;
    let users = 1;
    let fields = [
        (0, JOURNAL_MAGIC),
        (4, JOURNAL_SUPERBLOCK_V2),
        (12, BLOCK as u32),
        (16, blocks),
        (20, first),
        (24, sequence),
        (64, users),
    ];
    for (at, value) in fields {
        put(&mut superblock, at, value.to_be_bytes());
    }
    put(&mut superblock, 48, UUID);
    image.write(JOURNAL.start, &superblock)?;
    let map = extents::short(&[Extent {
        logical: 0,
        physical: JOURNAL.start,
        blocks,
    }]);
    let bytes = u64::from(blocks) * BLOCK_BYTES;
    Ok(Shape {
        bytes,
        blocks: blocks.into(),
        flags: inode_flag::EXTENTS,
        map,
        ..Shape::default()
    })
}

/// Writes the file that owns the blocks reserved for descriptors: one block lists those of group 0,
/// and each of these lists its backups.
pub(super) fn write_resize(image: &Closed, geometry: &Geometry) -> Result<Shape, Error> {
    let backups: Vec<_> = geometry.backups().collect();
    let reserved = descriptor_blocks(geometry)..DESCRIPTOR_BLOCKS;
    let mut list = [0; BLOCK];
    for index in reserved.clone() {
        let block = 1 + index;
        put(&mut list, index as usize * 4, (block as u32).to_le_bytes());
        if !backups.is_empty() {
            image.write(block, &backup_list(&backups, block))?;
        }
    }
    image.write(RESIZE_BLOCK, &list)?;
    let mut map = [0; BLOCK_FIELD_BYTES];
    put(
        &mut map,
        DOUBLY_INDIRECT * 4,
        (RESIZE_BLOCK as u32).to_le_bytes(),
    );
    let blocks = 1 + (reserved.end - reserved.start) * (1 + backups.len() as u64);
    Ok(Shape {
        bytes: RESIZE_BYTES,
        blocks,
        map,
        ..Shape::default()
    })
}

fn backup_list(backups: &[u64], block: u64) -> [u8; BLOCK] {
    let mut list = [0; BLOCK];
    for (index, group) in backups.iter().enumerate() {
        put(
            &mut list,
            index * 4,
            ((group * BLOCKS_PER_GROUP + block) as u32).to_le_bytes(),
        );
    }
    list
}
