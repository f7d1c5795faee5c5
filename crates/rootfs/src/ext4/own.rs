//! Inodes that are the file system's own: the journal, and the room in which descriptors grow.

use super::area::Closed;
use super::extents::{self, MAP_BYTES};
use super::format::{EPOCH_TIME, UUID};
use super::geometry::Geometry;
use super::inode::{Inode, Shape, flag};
use super::layout::{BLOCK, BLOCKS_PER_GROUP, DESCRIPTOR_BLOCKS, JOURNAL, RESIZE_BLOCK, put};
use super::superblock::descriptor_blocks;
use super::xattr::BODY_BYTES;
use crate::{BLOCK_BYTES, Error, Extent};

const JOURNAL_MAGIC: u32 = 0xc03b_3998;
const JOURNAL_SUPERBLOCK: u32 = 4;
const POINTERS_PER_BLOCK: u64 = BLOCK as u64 / 4;
/// As far as a doubly indirect block reaches.
const RESIZE_BYTES: u64 =
    (12 + POINTERS_PER_BLOCK + POINTERS_PER_BLOCK * POINTERS_PER_BLOCK) * BLOCK_BYTES;
const DOUBLY_INDIRECT: usize = 13;

/// An inode of root's from when the file system was made.
pub(super) fn inode(mode: u16, links: u16, shape: Shape) -> Inode {
    Inode {
        mode,
        uid: 0,
        gid: 0,
        links,
        modified: EPOCH_TIME,
        shape,
        body: [0; BODY_BYTES],
    }
}

/// Writes an empty journal: its superblock, and then zeros.
pub(super) fn write_journal(image: &Closed) -> Result<Shape, Error> {
    let blocks = (JOURNAL.end - JOURNAL.start) as u32;
    let mut superblock = [0; BLOCK];
    let (first, sequence, users) = (1u32, 1u32, 1u32);
    let fields = [
        (0, JOURNAL_MAGIC),
        (4, JOURNAL_SUPERBLOCK),
        (12, BLOCK as u32),
        (16, blocks),
        (20, first),
    ];
    for (at, value) in fields.into_iter().chain([(24, sequence), (64, users)]) {
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
        flags: flag::EXTENTS,
        map,
        ..Shape::default()
    })
}

/// Writes the file that has all blocks into which descriptors will grow: a block that lists those
/// of group 0, each of which lists its backups.
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
    let mut map = [0; MAP_BYTES];
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
