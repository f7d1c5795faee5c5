//! Which blocks a file has, as the 60 bytes of its inode say it: up to four extents, or the root of
//! a tree of them.

use sandtree_diff::crc32c;

use super::area::DataArea;
use super::layout::{BLOCK, put};
use crate::{Error, Extent};

pub(super) const MAP_BYTES: usize = 60;
const MAGIC: u16 = 0xf30a;
const ENTRY_BYTES: usize = 12;
pub(super) const IN_INODE: usize = MAP_BYTES / ENTRY_BYTES - 1;
/// The checksum follows the last entry.
const IN_BLOCK: usize = (BLOCK - 4) / ENTRY_BYTES - 1;

pub(super) type Map = [u8; MAP_BYTES];
type Entry = [u8; ENTRY_BYTES];

/// The map of up to [`IN_INODE`] extents.
pub(super) fn short(extents: &[Extent]) -> Map {
    let entries: Vec<_> = extents.iter().map(leaf_entry).collect();
    root(&entries, 0)
}

/// The map of any extents, and how many blocks were written for it. `seed` begins the checksums of
/// the inode.
pub(super) fn write(
    area: &mut DataArea,
    seed: u32,
    extents: &[Extent],
) -> Result<(Map, u64), Error> {
    let mut entries: Vec<_> = extents.iter().map(leaf_entry).collect();
    let (mut depth, mut blocks) = (0, 0);
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
    let mut map = [0; MAP_BYTES];
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
    put(bytes, 0, MAGIC.to_le_bytes());
    put(bytes, 2, (entries.len() as u16).to_le_bytes());
    put(bytes, 4, (max as u16).to_le_bytes());
    put(bytes, 6, depth.to_le_bytes());
    bytes[ENTRY_BYTES..][..entries.len() * ENTRY_BYTES].copy_from_slice(entries.as_flattened());
}

fn leaf_entry(extent: &Extent) -> Entry {
    let mut entry = [0; ENTRY_BYTES];
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

/// Of the node in `block`, whose first entry is `first`; both kinds of entries begin with the block
/// of the file.
fn index_entry(first: &Entry, block: u64) -> Entry {
    let mut entry = [0; ENTRY_BYTES];
    entry[..4].copy_from_slice(&first[..4]);
    put(&mut entry, 4, (block as u32).to_le_bytes());
    put(&mut entry, 8, ((block >> 32) as u16).to_le_bytes());
    entry
}
