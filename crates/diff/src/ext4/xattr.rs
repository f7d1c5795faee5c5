//! Extended attributes: in the inode behind its fields, in a block, or with values in inodes of
//! their own.

use std::collections::BTreeMap;

use super::fields::Le;
use super::inode::Inode;
use super::{FileReader, FileSystem};
use crate::Error;
use crate::error::require;

const MAGIC: u32 = 0xea02_0000;
const BLOCK_HEADER: usize = 32;
const ENTRY_HEADER: usize = 16;
/// The kernel's own limit.
const MAX_VALUE_BYTES: u32 = 64 << 10;
/// All values of one file together: more than a block of names can have.
const MAX_VALUES_BYTES: usize = 16 << 20;
/// Names with this prefix and this name are the rest of a small file's content.
const SYSTEM: u8 = 7;
const INLINE_DATA: &[u8] = b"data";

/// Values by the number of their prefix (`user.`, `security.`, …) and the rest of their name.
pub(crate) type Xattrs = BTreeMap<(u8, Box<[u8]>), Vec<u8>>;

/// Without the one that is content.
pub(super) fn all(fs: &FileSystem<'_>, inode: &Inode) -> Result<Xattrs, Error> {
    let mut found = in_inode(fs, inode)?;
    found.remove(&(SYSTEM, INLINE_DATA.into()));
    if inode.xattr_block != 0 {
        let block = fs.block(inode.xattr_block)?;
        require(Le(&block).u32(0) == MAGIC, || {
            bad(inode, "a block without its mark")
        })?;
        add(
            &mut found,
            fs,
            inode,
            Area {
                bytes: &block,
                first: BLOCK_HEADER,
            },
        )?;
    }
    Ok(found)
}

/// What of a small file's content did not fit into the block field.
pub(super) fn inline_rest(fs: &FileSystem<'_>, inode: &Inode) -> Result<Vec<u8>, Error> {
    Ok(in_inode(fs, inode)?
        .remove(&(SYSTEM, INLINE_DATA.into()))
        .unwrap_or_default())
}

fn in_inode(fs: &FileSystem<'_>, inode: &Inode) -> Result<Xattrs, Error> {
    let mut found = Xattrs::new();
    if Le(&inode.behind_fields).u32(0) == MAGIC {
        add(
            &mut found,
            fs,
            inode,
            Area {
                bytes: &inode.behind_fields[4..],
                first: 0,
            },
        )?;
    }
    Ok(found)
}

/// Bytes with entries from `first` on; values are told from the beginning of the bytes.
struct Area<'a> {
    bytes: &'a [u8],
    first: usize,
}

fn add(
    found: &mut Xattrs,
    fs: &FileSystem<'_>,
    inode: &Inode,
    area: Area<'_>,
) -> Result<(), Error> {
    let mut rest = area.bytes.get(area.first..).unwrap_or_default();
    let mut total = 0;
    while Le(rest).u32(0) != 0 {
        let name = rest.get(ENTRY_HEADER..ENTRY_HEADER + usize::from(rest[0]));
        let name = name.ok_or_else(|| Error::Damaged(bad(inode, "a name outside of its block")))?;
        let value = value(fs, inode, &area, Le(rest))?;
        total += value.len();
        require(total <= MAX_VALUES_BYTES, || {
            bad(inode, "values that are too large together")
        })?;
        found.insert((rest[1], name.into()), value);
        rest = rest
            .get((ENTRY_HEADER + name.len()).next_multiple_of(4)..)
            .unwrap_or_default();
    }
    Ok(())
}

fn value(
    fs: &FileSystem<'_>,
    inode: &Inode,
    area: &Area<'_>,
    entry: Le<'_>,
) -> Result<Vec<u8>, Error> {
    let (offset, in_inode, bytes) = (usize::from(entry.u16(2)), entry.u32(4), entry.u32(8));
    require(bytes <= MAX_VALUE_BYTES, || {
        bad(inode, "a value that is too large")
    })?;
    if in_inode != 0 && fs.superblock().has_xattr_inodes() {
        return FileReader::of(fs, fs.inode(in_inode)?)?.read_at_most(bytes.into());
    }
    let found = area.bytes.get(offset..offset + bytes as usize);
    Ok(found
        .ok_or_else(|| Error::Damaged(bad(inode, "a value outside of its block")))?
        .to_vec())
}

fn bad(inode: &Inode, what: &str) -> String {
    format!(
        "the extended attributes of inode {} have {what}",
        inode.number
    )
}
