//! Which blocks of the disk a file's bytes are in: extents, or the older lists of block numbers.
//!
//! Always: runs are sorted, do not overlap and are inside the file system. A tree is no deeper than
//! it says at its root, and every block it names is charged to the file system's budget: what
//! refers to itself, or shares blocks over and over, ends in an error.

use super::FileSystem;
use super::fields::Le;
use super::inode::{BLOCK_FIELD, Inode};
use crate::Error;
use crate::error::require;

const EXTENT_MAGIC: u16 = 0xf30a;
const EXTENT_MAX_DEPTH: u16 = 5;
const EXTENT_BYTES: usize = 12;
/// A length above this is one of blocks that are set aside and not written: they read as zeros.
const EXTENT_MAX_WRITTEN: u64 = 32768;
/// 24 MiB of runs, and more pieces than any file should be in.
const MAX_RUNS: usize = 1 << 20;
const DIRECT_BLOCKS: usize = 12;

/// Neighbouring blocks of a file that are neighbours on the disk, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub logical: u64,
    pub physical: u64,
    pub blocks: u64,
}

impl Run {
    pub(crate) fn logical_end(&self) -> u64 {
        self.logical + self.blocks
    }
}

/// Where a file's blocks are. What no run has reads as zeros.
#[derive(Debug, Default)]
pub(crate) struct Map {
    pub runs: Vec<Run>,
    /// The blocks that say so, apart from the inode.
    pub nodes: Vec<u64>,
}

impl Map {
    pub(super) fn of(fs: &FileSystem<'_>, inode: &Inode) -> Result<Self, Error> {
        let mut builder = Builder {
            fs,
            inode: inode.number,
            map: Self::default(),
        };
        if !inode.has_blocks() {
            return Ok(builder.map);
        }
        if inode.has_extents() {
            builder.add_extents(&inode.block_field, None)?;
        } else {
            builder.add_listed(&inode.block_field)?;
        }
        Ok(builder.map)
    }

    /// The run that has a block of the file, or the next one behind it.
    pub(crate) fn run_at(&self, logical: u64) -> Option<&Run> {
        self.runs.get(
            self.runs
                .partition_point(|run| run.logical_end() <= logical),
        )
    }

    pub(super) fn physical(&self, logical: u64) -> Option<u64> {
        let run = self.run_at(logical).filter(|run| run.logical <= logical)?;
        Some(run.physical + (logical - run.logical))
    }
}

struct Builder<'f, 'b> {
    fs: &'f FileSystem<'b>,
    inode: u32,
    map: Map,
}

impl Builder<'_, '_> {
    /// Adds a node of an extent tree; all but the root know which depth they must have.
    fn add_extents(&mut self, node: &[u8], depth: Option<u16>) -> Result<(), Error> {
        let fields = Le(node);
        let (entries, is_depth) = (usize::from(fields.u16(2)), fields.u16(6));
        require(fields.u16(0) == EXTENT_MAGIC, || {
            self.bad("an extent tree without its mark")
        })?;
        require(entries < node.len() / EXTENT_BYTES, || {
            self.bad("more extents than fit")
        })?;
        let fits = depth.map_or(is_depth <= EXTENT_MAX_DEPTH, |depth| depth == is_depth);
        require(fits, || self.bad("an extent tree of the wrong depth"))?;
        for entry in node.chunks_exact(EXTENT_BYTES).skip(1).take(entries) {
            match is_depth {
                0 => self.add_extent(Le(entry))?,
                _ => self.add_child(Le(entry).halves48(4, 8), is_depth - 1)?,
            }
        }
        Ok(())
    }

    fn add_child(&mut self, block: u64, depth: u16) -> Result<(), Error> {
        self.take_node(block)?;
        let node = self.fs.block(block)?;
        self.add_extents(&node, Some(depth))
    }

    fn add_extent(&mut self, entry: Le<'_>) -> Result<(), Error> {
        let length = u64::from(entry.u16(4));
        let is_written = length <= EXTENT_MAX_WRITTEN;
        let blocks = if is_written {
            length
        } else {
            length - EXTENT_MAX_WRITTEN
        };
        let run = Run {
            logical: entry.u32(0).into(),
            physical: entry.halves48(8, 6),
            blocks,
        };
        self.fs.charge(blocks)?;
        if is_written { self.add(run) } else { Ok(()) }
    }

    /// Twelve blocks, then lists of them, lists of lists, and lists of those.
    fn add_listed(&mut self, field: &[u8; BLOCK_FIELD]) -> Result<(), Error> {
        let mut logical = 0;
        for (index, entry) in field.chunks_exact(4).enumerate() {
            let depth = index.saturating_sub(DIRECT_BLOCKS - 1) as u32;
            self.add_list(Le(entry).u32(0).into(), depth, &mut logical)?;
        }
        Ok(())
    }

    fn add_list(&mut self, block: u64, depth: u32, logical: &mut u64) -> Result<(), Error> {
        let per_block = self.fs.block_bytes() / 4;
        if block == 0 {
            *logical += per_block.pow(depth);
            return Ok(());
        }
        if depth == 0 {
            self.fs.charge(1)?;
            self.add(Run {
                logical: *logical,
                physical: block,
                blocks: 1,
            })?;
            *logical += 1;
            return Ok(());
        }
        self.take_node(block)?;
        let list = self.fs.block(block)?;
        list.chunks_exact(4)
            .try_for_each(|entry| self.add_list(Le(entry).u32(0).into(), depth - 1, logical))
    }

    fn take_node(&mut self, block: u64) -> Result<(), Error> {
        self.fs.charge(1)?;
        require(self.map.nodes.len() < MAX_RUNS, || {
            self.bad("too many tables of blocks")
        })?;
        self.map.nodes.push(block);
        Ok(())
    }

    fn add(&mut self, run: Run) -> Result<(), Error> {
        let inside = run.physical > 0
            && run
                .physical
                .checked_add(run.blocks)
                .is_some_and(|end| end <= self.fs.blocks());
        require(inside, || self.bad("blocks outside of the file system"))?;
        require(run.blocks > 0, || self.bad("an empty extent"))?;
        if let Some(last) = self.map.runs.last_mut() {
            let is_sorted = run.logical >= last.logical_end();
            if run.logical == last.logical_end() && run.physical == last.physical + last.blocks {
                last.blocks += run.blocks;
                return Ok(());
            }
            require(is_sorted, || self.bad("extents that are not sorted"))?;
        }
        require(self.map.runs.len() < MAX_RUNS, || {
            self.bad("too many pieces")
        })?;
        self.map.runs.push(run);
        Ok(())
    }

    fn bad(&self, what: &str) -> String {
        format!("inode {} has {what}", self.inode)
    }
}
