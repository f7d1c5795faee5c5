//! Groups: the free blocks and inodes, as bitmaps and as numbers in descriptors.
//!
//! Always: bitmaps of unused groups are not written; a flag in their descriptors says so. Unused
//! inodes are holes in the image, and a flag says that they are zeros.

use std::ops::Range;

use super::area::Closed;
use super::error::Error;
use super::geometry::Geometry;
use super::identity;
use super::layout::{BLOCK, DESCRIPTOR_BYTES, HEAD_BLOCKS, put, put_halves};
use crate::crc32c::crc32c;
use crate::ext4::format::is_sparse_backup;

mod flag {
    pub const INODES_UNUSED: u16 = 1;
    pub const BLOCKS_UNUSED: u16 = 2;
    pub const TABLE_IS_ZEROED: u16 = 4;
}

/// The descriptors of all groups, and the total numbers of free blocks and inodes.
#[derive(Debug)]
pub(super) struct Groups {
    pub descriptors: Vec<u8>,
    pub free_blocks: u64,
    pub free_inodes: u32,
}

/// Writes the bitmaps. `dirs` is the number of directories by group.
pub(super) fn write(
    image: &Closed,
    geometry: &Geometry,
    last_inode: u32,
    dirs: &[u16],
) -> Result<Groups, Error> {
    let seed = identity::seed();
    let mut groups = Groups {
        descriptors: Vec::new(),
        free_blocks: 0,
        free_inodes: 0,
    };
    for group in 0..geometry.groups {
        let mut one = Group {
            image,
            geometry,
            group,
            seed,
            bytes: [0; DESCRIPTOR_BYTES],
            flags: flag::TABLE_IS_ZEROED,
        };
        groups.free_blocks += one.put_blocks()?;
        groups.free_inodes += one.put_inodes(last_inode)?;
        let dirs = dirs.get(group as usize).copied().unwrap_or(0);
        groups.descriptors.extend_from_slice(&one.finish(dirs));
    }
    Ok(groups)
}

/// The descriptor of one group while it is filled.
struct Group<'a> {
    image: &'a Closed,
    geometry: &'a Geometry,
    group: u64,
    seed: u32,
    bytes: [u8; DESCRIPTOR_BYTES],
    flags: u16,
}

impl Group<'_> {
    fn put_blocks(&mut self) -> Result<u64, Error> {
        let bitmap = block_bitmap(self.geometry, &self.image.free, self.group);
        let free = bitmap
            .iter()
            .map(|byte| u64::from(byte.count_zeros()))
            .sum();
        let place = self.geometry.block_bitmaps[self.group as usize];
        put_halves(&mut self.bytes, 0, 32, place);
        put(&mut self.bytes, 12, (free as u16).to_le_bytes());
        let is_last = self.group + 1 == self.geometry.groups;
        if self.geometry.group(self.group).start >= self.geometry.end && !is_last {
            self.flags |= flag::BLOCKS_UNUSED;
            return Ok(free);
        }
        self.put_checksum(&bitmap, [24, 56]);
        self.image.write(place, &bitmap)?;
        Ok(free)
    }

    /// Writes the inode bitmap. Inodes are used from the first on, without gaps.
    fn put_inodes(&mut self, last_inode: u32) -> Result<u32, Error> {
        let per_group = self.geometry.inodes_per_group;
        let used = last_inode
            .saturating_sub(per_group * self.group as u32)
            .min(per_group);
        let free = per_group - used;
        let place = self.geometry.inode_bitmaps[self.group as usize];
        put_halves(&mut self.bytes, 4, 36, place);
        put_halves(
            &mut self.bytes,
            8,
            40,
            self.geometry.tables[self.group as usize],
        );
        put(&mut self.bytes, 14, (free as u16).to_le_bytes());
        put(&mut self.bytes, 28, (free as u16).to_le_bytes());
        if used == 0 {
            self.flags |= flag::INODES_UNUSED;
            return Ok(free);
        }
        let mut bitmap = [0; BLOCK];
        set(&mut bitmap, 0..u64::from(used), Bit::Used);
        set(
            &mut bitmap,
            u64::from(per_group)..BLOCK as u64 * 8,
            Bit::Used,
        );
        self.put_checksum(&bitmap[..per_group as usize / 8], [26, 58]);
        self.image.write(place, &bitmap)?;
        Ok(free)
    }

    fn put_checksum(&mut self, bitmap: &[u8], [low, high]: [usize; 2]) {
        let checksum = crc32c(self.seed, bitmap);
        put(&mut self.bytes, low, (checksum as u16).to_le_bytes());
        put(
            &mut self.bytes,
            high,
            ((checksum >> 16) as u16).to_le_bytes(),
        );
    }

    fn finish(mut self, dirs: u16) -> [u8; DESCRIPTOR_BYTES] {
        put(&mut self.bytes, 16, dirs.to_le_bytes());
        put(&mut self.bytes, 18, self.flags.to_le_bytes());
        let checksum = crc32c(
            crc32c(self.seed, &(self.group as u32).to_le_bytes()),
            &self.bytes,
        );
        put(&mut self.bytes, 30, (checksum as u16).to_le_bytes());
        self.bytes
    }
}

/// The block bitmap of a group. `free` are sorted ranges below the end of the used blocks.
fn block_bitmap(geometry: &Geometry, free: &[Range<u64>], group: u64) -> [u8; BLOCK] {
    let blocks = geometry.group(group);
    let within = |range: Range<u64>| {
        let start = range.start.clamp(blocks.start, blocks.end) - blocks.start;
        start..range.end.clamp(blocks.start, blocks.end) - blocks.start
    };
    let mut bitmap = [0; BLOCK];
    set(&mut bitmap, within(0..geometry.end), Bit::Used);
    let first = free.partition_point(|range| range.end <= blocks.start);
    for range in free[first..]
        .iter()
        .take_while(|range| range.start < blocks.end)
    {
        set(&mut bitmap, within(range.clone()), Bit::Free);
    }
    if is_sparse_backup(group) {
        set(&mut bitmap, 0..HEAD_BLOCKS, Bit::Used);
    }
    let behind_end = blocks.end - blocks.start..BLOCK as u64 * 8;
    set(&mut bitmap, behind_end, Bit::Used);
    bitmap
}

#[derive(Clone, Copy)]
enum Bit {
    Free,
    Used,
}

fn set(bitmap: &mut [u8; BLOCK], bits: Range<u64>, value: Bit) {
    let mut bit = bits.start;
    while bit < bits.end {
        let byte = &mut bitmap[(bit / 8) as usize];
        if bit.is_multiple_of(8) && bit + 8 <= bits.end {
            *byte = match value {
                Bit::Free => 0,
                Bit::Used => !0,
            };
            bit += 8;
            continue;
        }
        let mask = 1 << (bit % 8);
        match value {
            Bit::Free => *byte &= !mask,
            Bit::Used => *byte |= mask,
        }
        bit += 1;
    }
}
