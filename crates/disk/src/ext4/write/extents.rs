//! The extents of a file in the 60 bytes of its inode: up to four of them, or the root of a tree.

use super::area::DataArea;
use super::error::Error;
use super::layout::{BLOCK, put};
use super::tree::Extent;
use crate::crc32c::crc32c;
use crate::ext4::format::{BLOCK_FIELD_BYTES, EXTENT_BYTES, EXTENT_MAGIC};

/// The most extents in an inode.
pub(super) const IN_INODE: usize = BLOCK_FIELD_BYTES / EXTENT_BYTES - 1;
/// The most extents in a block. The checksum follows the last one.
const IN_BLOCK: usize = (BLOCK - 4) / EXTENT_BYTES - 1;

pub(super) type Map = [u8; BLOCK_FIELD_BYTES];
type Entry = [u8; EXTENT_BYTES];

/// Encodes up to [`IN_INODE`] extents.
pub(super) fn short(extents: &[Extent]) -> Map {
    let entries: Vec<_> = extents.iter().map(leaf_entry).collect();
    root(&entries, 0)
}

/// Encodes any number of extents. Returns the map and the number of blocks written for its tree.
/// `seed` is the start value of the inode's checksums.
pub(super) fn write(
    area: &mut DataArea,
    seed: u32,
    extents: &[Extent],
) -> Result<(Map, u64), Error> {
    let mut entries: Vec<_> = extents.iter().map(leaf_entry).collect();
    let mut depth = 0;
    let mut blocks = 0;
    while entries.len() > IN_INODE {
        let level = entries.chunks(IN_BLOCK).map(|chunk| {
            let block = area.append_one(|_| node(chunk, depth, seed))?;
            Ok(index_entry(&chunk[0], block))
        });
        entries = level.collect::<Result<_, Error>>()?;
        blocks += entries.len() as u64;
        depth += 1;
    }
    Ok((root(&entries, depth), blocks))
}

fn root(entries: &[Entry], depth: u16) -> Map {
    let mut map = [0; BLOCK_FIELD_BYTES];
    fill(&mut map, entries, IN_INODE, depth);
    map
}

fn node(entries: &[Entry], depth: u16, seed: u32) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    fill(&mut block, entries, IN_BLOCK, depth);
    let checksum = crc32c(seed, &block[..BLOCK - 4]);
    put(&mut block, BLOCK - 4, checksum.to_le_bytes());
    block
}

fn fill(bytes: &mut [u8], entries: &[Entry], max: usize, depth: u16) {
    put(bytes, 0, EXTENT_MAGIC.to_le_bytes());
    put(bytes, 2, (entries.len() as u16).to_le_bytes());
    put(bytes, 4, (max as u16).to_le_bytes());
    put(bytes, 6, depth.to_le_bytes());
    bytes[EXTENT_BYTES..][..entries.len() * EXTENT_BYTES].copy_from_slice(entries.as_flattened());
}

fn leaf_entry(extent: &Extent) -> Entry {
    let mut entry = [0; EXTENT_BYTES];
    put(&mut entry, 0, extent.logical.to_le_bytes());
    put(&mut entry, 4, (extent.blocks as u16).to_le_bytes());
    put(
        &mut entry,
        6,
        ((extent.physical >> 32) as u16).to_le_bytes(),
    );
    put(&mut entry, 8, (extent.physical as u32).to_le_bytes());
    entry
}

/// The entry that points to the node in `block`, whose first entry is `first`. Both kinds of
/// entries start with the logical block.
fn index_entry(first: &Entry, block: u64) -> Entry {
    let mut entry = [0; EXTENT_BYTES];
    entry[..4].copy_from_slice(&first[..4]);
    put(&mut entry, 4, (block as u32).to_le_bytes());
    put(&mut entry, 8, ((block >> 32) as u16).to_le_bytes());
    entry
}
