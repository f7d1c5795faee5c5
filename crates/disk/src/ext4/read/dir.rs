//! Directories: names and their inode numbers.
//!
//! A directory with a hash index is read like one without: its index blocks look like entries
//! without an inode.

use std::collections::BTreeMap;

use super::error::{Error, require};
use super::inode::Inode;
use super::{Content, FileSystem};
use crate::ext4::format::BLOCK_FIELD_BYTES;
use crate::fields::Le;

/// Enough for about five million names. A directory that claims to be larger is refused.
const MAX_BYTES: u64 = 256 << 20;
const HEADER: usize = 8;
/// A directory stored inside its inode has the number of its parent before the entries.
const INLINE_PARENT: usize = 4;

/// Inode numbers by name, without `.` and `..`.
pub type Entries = BTreeMap<Box<[u8]>, u32>;

pub(super) fn entries(
    fs: &FileSystem<'_>,
    inode: &Inode,
    content: &Content,
) -> Result<Entries, Error> {
    let mut found = Found {
        inode: inode.number,
        has_file_types: fs.superblock().has_file_types(),
        entries: Entries::new(),
    };
    match content {
        Content::Inline(bytes) => {
            let field_len = bytes.len().min(BLOCK_FIELD_BYTES);
            let (field, behind) = bytes.split_at(field_len);
            found.add_block(field.get(INLINE_PARENT..).unwrap_or_default())?;
            found.add_block(behind)?;
        }
        Content::Mapped(map) => {
            let what = || format!("the directory of inode {}", inode.number);
            if inode.size > MAX_BYTES {
                return Err(Error::TooLarge {
                    what: what(),
                    limit_bytes: MAX_BYTES,
                });
            }
            for logical in 0..inode.size.div_ceil(fs.block_bytes()) {
                let physical = map.physical(logical);
                let physical =
                    physical.ok_or_else(|| Error::damaged(format!("{} has a hole", what())))?;
                found.add_block(&fs.block(physical)?)?;
            }
        }
    }
    Ok(found.entries)
}

struct Found {
    inode: u32,
    has_file_types: bool,
    entries: Entries,
}

impl Found {
    fn add_block(&mut self, block: &[u8]) -> Result<(), Error> {
        let mut rest = block;
        while rest.len() >= HEADER {
            let fields = Le(rest);
            let length = record_len(fields.u16(4), block.len());
            require(length >= HEADER && length <= rest.len(), || {
                self.bad("an entry with an invalid length")
            })?;
            let name_len = if self.has_file_types {
                fields.u8(6).into()
            } else {
                usize::from(fields.u16(6))
            };
            if fields.u32(0) != 0 {
                let name = rest[..length].get(HEADER..HEADER + name_len);
                self.add(
                    name.ok_or_else(|| Error::Damaged(self.bad("a name longer than its entry")))?,
                    fields.u32(0),
                )?;
            }
            rest = &rest[length..];
        }
        Ok(())
    }

    fn add(&mut self, name: &[u8], inode: u32) -> Result<(), Error> {
        if name == b"." || name == b".." {
            return Ok(());
        }
        let is_name = !name.is_empty() && !name.contains(&b'/') && !name.contains(&0);
        require(is_name, || self.bad("an invalid name"))?;
        let before = self.entries.insert(name.into(), inode);
        require(before.is_none(), || self.bad("a duplicate name"))
    }

    fn bad(&self, what: &str) -> String {
        format!("the directory of inode {} has {what}", self.inode)
    }
}

/// The length 65536, a whole block of 64 KiB, does not fit into the field.
fn record_len(field: u16, block_len: usize) -> usize {
    match field {
        0 | u16::MAX if block_len == 1 << 16 => block_len,
        length => length.into(),
    }
}
