//! Directories: one block of names, or an index by hash and leaves of names.
//!
//! ```text
//! root: . .. | hash → node or leaf …     node: hash → leaf …     leaf: names with hashes from here to the next
//! ```
//!
//! Always: names are ordered by their bytes in a single block, by hash in leaves. A directory with
//! too many names for two index levels has no index, and the kernel reads it from front to back.

use super::area::DataArea;
use super::error::Error;
use super::hash;
use super::layout::{BLOCK, put};
use super::tree::Extent;
use crate::crc32c::crc32c;

const TAIL_BYTES: usize = 12;
const TAIL_MARK: u8 = 0xde;
const NAMES_BYTES: usize = BLOCK - TAIL_BYTES;
/// Leaves have room for new names: the first new name would split a full leaf.
const LEAF_BYTES: usize = NAMES_BYTES / 5 * 4;
const DOT_BYTES: usize = 12;
pub(super) const KIND_DIR: u8 = 2;
const HALF_MD4: u8 = 1;
const INDEX_ENTRY_BYTES: usize = 8;
/// The offset of the entries in the root of an index, and in its other nodes.
const ROOT_FIRST: usize = 2 * DOT_BYTES + 8;
const NODE_FIRST: usize = 8;
const INDEX_TAIL_BYTES: usize = 8;
const ROOT_LIMIT: usize = (BLOCK - ROOT_FIRST - INDEX_TAIL_BYTES) / INDEX_ENTRY_BYTES;
const NODE_LIMIT: usize = (BLOCK - NODE_FIRST - INDEX_TAIL_BYTES) / INDEX_ENTRY_BYTES;

#[derive(Debug, Clone, Copy)]
pub(super) struct Name<'a> {
    pub name: &'a [u8],
    pub inode: u32,
    /// The number that directories use for the kind.
    pub kind: u8,
}

/// A directory to be written.
#[derive(Debug)]
pub(super) struct Directory<'a> {
    pub inode: u32,
    pub parent: u32,
    /// The start value of its checksums.
    pub seed: u32,
    pub names: Vec<Name<'a>>,
}

/// The place of a written directory.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub extents: Vec<Extent>,
    pub blocks: u32,
    pub is_indexed: bool,
}

impl Written {
    fn append(&mut self, area: &mut DataArea, block: &[u8]) -> Result<(), Error> {
        area.append(block, self.blocks, &mut self.extents)?;
        self.blocks += 1;
        Ok(())
    }
}

/// Names that are consecutive in the order of hashes.
struct Leaf {
    first_hash: u32,
    names: std::ops::Range<usize>,
}

impl Directory<'_> {
    pub(super) fn write(&self, area: &mut DataArea) -> Result<Written, Error> {
        let bytes = self
            .names
            .iter()
            .map(|name| entry_bytes(name.name))
            .sum::<usize>();
        if 2 * DOT_BYTES + bytes <= NAMES_BYTES {
            return self.write_in_line(area);
        }
        let order = self.by_hash();
        let leaves = self.leaves(&order);
        if leaves.len() <= ROOT_LIMIT * NODE_LIMIT {
            self.write_indexed(area, &order, &leaves)
        } else {
            self.write_in_line(area)
        }
    }

    fn write_in_line(&self, area: &mut DataArea) -> Result<Written, Error> {
        let mut written = Written::default();
        let mut block = Names::new();
        let dots = [(&b"."[..], self.inode), (b"..", self.parent)].map(|(name, inode)| Name {
            name,
            inode,
            kind: KIND_DIR,
        });
        for name in dots.iter().chain(&self.names) {
            if block.used + entry_bytes(name.name) > NAMES_BYTES {
                written.append(area, &block.close(self.seed))?;
                block = Names::new();
            }
            block.push(name);
        }
        written.append(area, &block.close(self.seed))?;
        Ok(written)
    }

    fn by_hash(&self) -> Vec<(hash::Hash, usize)> {
        let mut order: Vec<_> = self
            .names
            .iter()
            .map(|name| hash::of(name.name))
            .zip(0..)
            .collect();
        order.sort_unstable();
        order
    }

    fn leaves(&self, order: &[(hash::Hash, usize)]) -> Vec<Leaf> {
        let mut leaves: Vec<Leaf> = Vec::new();
        let mut used = LEAF_BYTES;
        for (at, (hash, name)) in order.iter().enumerate() {
            let bytes = entry_bytes(self.names[*name].name);
            match leaves.last_mut() {
                Some(leaf) if used + bytes <= LEAF_BYTES => leaf.names.end = at + 1,
                _ => {
                    // The lowest bit marks that the previous leaf has names with this hash, too.
                    let continues = at > 0 && order[at - 1].0.major == hash.major;
                    leaves.push(Leaf {
                        first_hash: hash.major | u32::from(continues),
                        names: at..at + 1,
                    });
                    used = 0;
                }
            }
            used += bytes;
        }
        leaves
    }

    fn write_indexed(
        &self,
        area: &mut DataArea,
        order: &[(hash::Hash, usize)],
        leaves: &[Leaf],
    ) -> Result<Written, Error> {
        let mut written = Written {
            is_indexed: true,
            ..Written::default()
        };
        let hashes: Vec<_> = leaves.iter().map(|leaf| leaf.first_hash).collect();
        if leaves.len() <= ROOT_LIMIT {
            written.append(area, &self.root(&hashes, 0))?;
        } else {
            let nodes: Vec<_> = hashes.chunks(NODE_LIMIT).collect();
            let node_hashes: Vec<_> = nodes.iter().map(|node| node[0]).collect();
            written.append(area, &self.root(&node_hashes, 1))?;
            let mut first_leaf = 1 + nodes.len() as u32;
            for node in nodes {
                written.append(area, &self.node(node, first_leaf))?;
                first_leaf += node.len() as u32;
            }
        }
        for leaf in leaves {
            let mut block = Names::new();
            order[leaf.names.clone()]
                .iter()
                .for_each(|(_, name)| block.push(&self.names[*name]));
            written.append(area, &block.close(self.seed))?;
        }
        Ok(written)
    }

    /// The root of an index. The blocks that it points to follow it.
    fn root(&self, hashes: &[u32], levels_below: u8) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        put_entry(
            &mut block,
            0,
            DOT_BYTES,
            &Name {
                name: b".",
                inode: self.inode,
                kind: KIND_DIR,
            },
        );
        let rest = BLOCK - DOT_BYTES;
        put_entry(
            &mut block,
            DOT_BYTES,
            rest,
            &Name {
                name: b"..",
                inode: self.parent,
                kind: KIND_DIR,
            },
        );
        block[2 * DOT_BYTES + 4..][..3].copy_from_slice(&[HALF_MD4, 8, levels_below]);
        self.put_index(&mut block, ROOT_FIRST, hashes, 1);
        block
    }

    fn node(&self, hashes: &[u32], first_leaf: u32) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        put_entry(
            &mut block,
            0,
            BLOCK,
            &Name {
                name: b"",
                inode: 0,
                kind: 0,
            },
        );
        self.put_index(&mut block, NODE_FIRST, hashes, first_leaf);
        block
    }

    /// Writes index entries from `first` on. Limit and count take the place of the first hash.
    fn put_index(&self, block: &mut [u8], first: usize, hashes: &[u32], first_block: u32) {
        for (index, (hash, target)) in hashes.iter().zip(first_block..).enumerate() {
            let at = first + index * INDEX_ENTRY_BYTES;
            put(block, at, hash.to_le_bytes());
            put(block, at + 4, target.to_le_bytes());
        }
        let limit = (BLOCK - first - INDEX_TAIL_BYTES) / INDEX_ENTRY_BYTES;
        put(block, first, (limit as u16).to_le_bytes());
        put(block, first + 2, (hashes.len() as u16).to_le_bytes());
        let entries_end = first + hashes.len() * INDEX_ENTRY_BYTES;
        let checksum = crc32c(
            crc32c(self.seed, &block[..entries_end]),
            &[0; INDEX_TAIL_BYTES],
        );
        put(block, BLOCK - 4, checksum.to_le_bytes());
    }
}

/// A block of names.
struct Names {
    block: Vec<u8>,
    used: usize,
    last: usize,
}

impl Names {
    fn new() -> Self {
        Self {
            block: vec![0; BLOCK],
            used: 0,
            last: 0,
        }
    }

    fn push(&mut self, name: &Name<'_>) {
        let bytes = entry_bytes(name.name);
        put_entry(&mut self.block, self.used, bytes, name);
        self.last = self.used;
        self.used += bytes;
    }

    /// Completes the block. The last entry extends over the remaining space.
    fn close(mut self, seed: u32) -> Vec<u8> {
        put(
            &mut self.block,
            self.last + 4,
            ((NAMES_BYTES - self.last) as u16).to_le_bytes(),
        );
        put(
            &mut self.block,
            NAMES_BYTES + 4,
            (TAIL_BYTES as u16).to_le_bytes(),
        );
        self.block[NAMES_BYTES + 7] = TAIL_MARK;
        let checksum = crc32c(seed, &self.block[..NAMES_BYTES]);
        put(&mut self.block, NAMES_BYTES + 8, checksum.to_le_bytes());
        self.block
    }
}

fn entry_bytes(name: &[u8]) -> usize {
    (8 + name.len()).next_multiple_of(4)
}

fn put_entry(block: &mut [u8], at: usize, bytes: usize, name: &Name<'_>) {
    put(block, at, name.inode.to_le_bytes());
    put(block, at + 4, (bytes as u16).to_le_bytes());
    block[at + 6] = name.name.len() as u8;
    block[at + 7] = name.kind;
    block[at + 8..][..name.name.len()].copy_from_slice(name.name);
}
