//! Plans the size of the file system, its number of inodes, and the places of bitmaps and inode
//! tables.

use std::ops::Range;

use super::error::Error;
use super::layout::{BLOCKS_PER_GROUP, Cursor, HEAD_BLOCKS, INODES_PER_BLOCK, MAX_BLOCKS};
use super::tree::BLOCK_BYTES;
use crate::ext4::format::is_sparse_backup;

/// One inode for 8 KiB of a whole group, also in groups that are added when the file system grows.
const MIN_INODES_PER_GROUP: u32 = 16384;
/// The number of bits in a bitmap.
const MAX_INODES_PER_GROUP: u32 = 32768;
/// The least number of blocks in the last group beyond its tables. Other tools drop a smaller
/// group.
const MIN_LAST_BLOCKS: u64 = 50;
/// Sizes are multiples of 1 MiB.
const STEP_BLOCKS: u64 = 256;

/// The requirements for the plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    /// Blocks that were allocated and freed again.
    pub freed_blocks: u64,
    pub free_blocks: u64,
    pub inodes: u32,
}

#[derive(Debug, Clone)]
pub(super) struct Geometry {
    pub blocks: u64,
    pub groups: u64,
    pub inodes_per_group: u32,
    /// By group.
    pub block_bitmaps: Vec<u64>,
    pub inode_bitmaps: Vec<u64>,
    pub tables: Vec<u64>,
    /// From here on only backups are used.
    pub end: u64,
    /// Blocks before the end that the plan skips, without the freed ones.
    pub left_out: Vec<Range<u64>>,
}

impl Geometry {
    /// Plans tables after the blocks that `cursor` allocated. Each additional group needs tables,
    /// which can require another group.
    pub(super) fn plan(cursor: &Cursor, needs: Needs) -> Result<Self, Error> {
        let mut groups = u64::from(needs.inodes.div_ceil(MAX_INODES_PER_GROUP));
        loop {
            let mut plan = Self::with_groups(cursor.clone(), groups, needs);
            plan.blocks = plan.needed_blocks(needs);
            if plan.blocks > MAX_BLOCKS {
                return Err(Error::TooLarge {
                    what: "the file system",
                    bytes: plan.blocks * BLOCK_BYTES,
                    limit_bytes: MAX_BLOCKS * BLOCK_BYTES,
                });
            }
            let needed = plan.blocks.div_ceil(BLOCKS_PER_GROUP);
            if needed <= groups {
                return Ok(plan);
            }
            groups = needed;
        }
    }

    fn with_groups(mut cursor: Cursor, groups: u64, needs: Needs) -> Self {
        let inodes_per_group = inodes_per_group(groups, needs);
        let table_blocks = u64::from(inodes_per_group / INODES_PER_BLOCK);
        let mut left_out = Vec::new();
        let mut take = |blocks| {
            let (taken, skipped) = cursor.take_all(blocks);
            left_out.push(skipped);
            taken.start
        };
        let block_bitmaps = (0..groups).map(|_| take(1)).collect();
        let inode_bitmaps = (0..groups).map(|_| take(1)).collect();
        let tables = (0..groups).map(|_| take(table_blocks)).collect();
        let end = cursor.end();
        Self {
            blocks: 0,
            groups,
            inodes_per_group,
            block_bitmaps,
            inode_bitmaps,
            tables,
            end,
            left_out,
        }
    }

    fn needed_blocks(&self, needs: Needs) -> u64 {
        let left_out: u64 = self
            .left_out
            .iter()
            .map(|range| range.end - range.start)
            .sum();
        let beyond = (0..self.groups)
            .filter(|group| is_sparse_backup(*group) && group * BLOCKS_PER_GROUP >= self.end);
        let used = self.end - left_out - needs.freed_blocks + beyond.count() as u64 * HEAD_BLOCKS;
        let wanted = self
            .end
            .max(used.saturating_add(needs.free_blocks).min(2 * MAX_BLOCKS));
        let wanted = wanted
            .max((self.groups - 1) * BLOCKS_PER_GROUP + 1)
            .next_multiple_of(STEP_BLOCKS);
        let last = (wanted - 1) / BLOCKS_PER_GROUP;
        wanted.max(last * BLOCKS_PER_GROUP + self.min_last_blocks(last))
    }

    fn min_last_blocks(&self, group: u64) -> u64 {
        let head = if is_sparse_backup(group) {
            HEAD_BLOCKS
        } else {
            0
        };
        (head + 2 + self.table_blocks() + MIN_LAST_BLOCKS).next_multiple_of(STEP_BLOCKS)
    }

    /// The number of blocks of each inode table.
    pub(super) fn table_blocks(&self) -> u64 {
        u64::from(self.inodes_per_group / INODES_PER_BLOCK)
    }

    pub(super) fn inodes(&self) -> u32 {
        self.inodes_per_group * self.groups as u32
    }

    /// The blocks of a group.
    pub(super) fn group(&self, group: u64) -> Range<u64> {
        let start = group * BLOCKS_PER_GROUP;
        start..self.blocks.min(start + BLOCKS_PER_GROUP)
    }

    /// All groups that start with backups; the first group has the originals.
    pub(super) fn backups(&self) -> impl Iterator<Item = u64> {
        (1..self.groups).filter(|group| is_sparse_backup(*group))
    }
}

/// The required inodes, and one more for every 8 KiB of free space.
fn inodes_per_group(groups: u64, needs: Needs) -> u32 {
    let wanted = u64::from(needs.inodes)
        .saturating_add(needs.free_blocks / 2)
        .div_ceil(groups);
    let wanted = wanted.min(u64::from(MAX_INODES_PER_GROUP)) as u32;
    wanted
        .max(MIN_INODES_PER_GROUP)
        .next_multiple_of(INODES_PER_BLOCK)
}
