//! Extended attributes: in the inode after its fields, in a block, or with values in separate
//! inodes.

use std::collections::BTreeMap;

use super::error::{Error, require};
use super::inode::Inode;
use super::{FileReader, FileSystem};
use crate::ext4::format::{XATTR_BLOCK_HEADER_BYTES, XATTR_ENTRY_BYTES, XATTR_MAGIC};
use crate::fields::Le;

/// The kernel's limit for one value.
const MAX_VALUE_BYTES: u32 = 64 << 10;
/// The limit for all values of one file together: more than a block of names can refer to.
const MAX_VALUES_BYTES: usize = 16 << 20;
/// The attribute with this prefix and name holds the rest of an inline file's content.
const SYSTEM: u8 = 7;
const INLINE_DATA: &[u8] = b"data";

/// Values by the number of the name's prefix (`user.`, `security.`, …) and the rest of the name.
pub type Xattrs = BTreeMap<(u8, Box<[u8]>), Vec<u8>>;

/// Reads all attributes of an inode, without the one that holds content.
pub(super) fn all(fs: &FileSystem<'_>, inode: &Inode) -> Result<Xattrs, Error> {
    let mut found = in_inode(fs, inode)?;
    found.remove(&(SYSTEM, INLINE_DATA.into()));
    if inode.xattr_block != 0 {
        let block = fs.block(inode.xattr_block)?;
        require(Le(&block).u32(0) == XATTR_MAGIC, || {
            bad(inode, "a block without its magic number")
        })?;
        add(
            &mut found,
            fs,
            inode,
            Area {
                bytes: &block,
                first: XATTR_BLOCK_HEADER_BYTES,
            },
        )?;
    }
    Ok(found)
}

/// The part of an inline file's content that did not fit into the block field.
pub(super) fn inline_rest(fs: &FileSystem<'_>, inode: &Inode) -> Result<Vec<u8>, Error> {
    Ok(in_inode(fs, inode)?
        .remove(&(SYSTEM, INLINE_DATA.into()))
        .unwrap_or_default())
}

fn in_inode(fs: &FileSystem<'_>, inode: &Inode) -> Result<Xattrs, Error> {
    let mut found = Xattrs::new();
    if Le(&inode.behind_fields).u32(0) == XATTR_MAGIC {
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

/// Bytes with entries from `first` on. Offsets of values count from the beginning of the bytes.
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
        let name = rest.get(XATTR_ENTRY_BYTES..XATTR_ENTRY_BYTES + usize::from(rest[0]));
        let name = name.ok_or_else(|| Error::Damaged(bad(inode, "a name outside its block")))?;
        let value = value(fs, inode, &area, Le(rest))?;
        total += value.len();
        require(total <= MAX_VALUES_BYTES, || {
            bad(inode, "values whose total size is too large")
        })?;
        found.insert((rest[1], name.into()), value);
        rest = rest
            .get((XATTR_ENTRY_BYTES + name.len()).next_multiple_of(4)..)
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
    let offset = usize::from(entry.u16(2));
    let in_inode = entry.u32(4);
    let bytes = entry.u32(8);
    require(bytes <= MAX_VALUE_BYTES, || {
        bad(inode, "a value that is too large")
    })?;
    if in_inode != 0 && fs.superblock().has_xattr_inodes() {
        return FileReader::of(fs, fs.inode(in_inode)?)?.read_at_most(bytes.into());
    }
    let found = area.bytes.get(offset..offset + bytes as usize);
    Ok(found
        .ok_or_else(|| Error::Damaged(bad(inode, "a value outside its block")))?
        .to_vec())
}

fn bad(inode: &Inode, what: &str) -> String {
    format!(
        "the extended attributes of inode {} have {what}",
        inode.number
    )
}
