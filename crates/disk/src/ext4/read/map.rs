//! The blocks that hold a file's bytes: extents, or the older lists of block numbers.
//!
//! Always: runs are sorted, do not overlap and are inside the file system. A tree is no deeper than
//! its root says, and every block it names is charged to the file system's budget, so a tree that
//! contains itself or shares blocks over and over ends in an error.

use super::FileSystem;
use super::error::{Error, require};
use super::inode::Inode;
use crate::ext4::format::{BLOCK_FIELD_BYTES, EXTENT_BYTES, EXTENT_MAGIC, MAX_EXTENT_BLOCKS};
use crate::fields::Le;

const EXTENT_MAX_DEPTH: u16 = 5;
/// 24 MiB of runs, far more than any real file has.
const MAX_RUNS: usize = 1 << 20;
const DIRECT_BLOCKS: usize = 12;

/// Consecutive blocks of a file that are also consecutive on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub logical: u64,
    pub physical: u64,
    pub blocks: u64,
}

impl Run {
    fn logical_end(&self) -> u64 {
        self.logical + self.blocks
    }
}

/// The places of a file's blocks. Blocks without a run read as zeros.
#[derive(Debug, Default)]
pub(super) struct Map {
    pub runs: Vec<Run>,
    /// The blocks that contain this map, without the inode.
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

    /// The run with a block of the file, or the next run after that block.
    pub(super) fn run_at(&self, logical: u64) -> Option<&Run> {
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
    /// Adds a node of an extent tree. `depth` is the required depth; the root has none.
    fn add_extents(&mut self, node: &[u8], depth: Option<u16>) -> Result<(), Error> {
        let fields = Le(node);
        let entries = usize::from(fields.u16(2));
        let is_depth = fields.u16(6);
        require(fields.u16(0) == EXTENT_MAGIC, || {
            self.bad("an extent tree without its magic number")
        })?;
        require(entries < node.len() / EXTENT_BYTES, || {
            self.bad("more extents than fit into a node")
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
        let max_written = u64::from(MAX_EXTENT_BLOCKS);
        // Blocks that are allocated but not written read as zeros.
        let is_written = length <= max_written;
        let blocks = if is_written {
            length
        } else {
            length - max_written
        };
        let run = Run {
            logical: entry.u32(0).into(),
            physical: entry.halves48(8, 6),
            blocks,
        };
        self.fs.charge(blocks)?;
        if is_written { self.add(run) } else { Ok(()) }
    }

    /// Adds twelve direct blocks, then the indirect, doubly and triply indirect ones.
    fn add_listed(&mut self, field: &[u8; BLOCK_FIELD_BYTES]) -> Result<(), Error> {
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
            self.bad("too many block tables")
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
        require(inside, || self.bad("blocks outside the file system"))?;
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
            self.bad("too many extents")
        })?;
        self.map.runs.push(run);
        Ok(())
    }

    fn bad(&self, what: &str) -> String {
        format!("inode {} has {what}", self.inode)
    }
}
