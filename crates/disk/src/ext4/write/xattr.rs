//! Extended attributes: in the inode after its fields as far as they fit, the rest in one block.
//!
//! ```text
//! inode: magic | entries … | 0 | … | values       block: header | entries … | 0 | … | values
//! ```

use std::collections::BTreeMap;

use super::acl;
use super::layout::{BLOCK, XATTR_BODY_BYTES as BODY_BYTES, put};
use crate::crc32c::crc32c;
use crate::ext4::format::{
    XATTR_BLOCK_HEADER_BYTES as HEADER_BYTES, XATTR_ENTRY_BYTES as ENTRY_BYTES,
    XATTR_MAGIC as MAGIC,
};

const MAGIC_BYTES: usize = 4;
/// The zeros after the last entry.
const END_BYTES: usize = 4;
const BODY_ROOM: usize = BODY_BYTES - MAGIC_BYTES - END_BYTES;
const BLOCK_ROOM: usize = BLOCK - HEADER_BYTES - END_BYTES;

const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";
/// Prefixes of names and their numbers. The numbers 2 and 3 stand for the two access control lists.
const PREFIXES: [(u8, &[u8]); 3] = [(1, b"user."), (4, b"trusted."), (6, b"security.")];

/// The full name of an extended attribute, from the number of its prefix and the rest. `None`: it
/// is of a kind whose value is stored in another form than programs see it.
pub fn xattr_name(prefix: u8, rest: &[u8]) -> Option<Vec<u8>> {
    let found = PREFIXES.iter().find(|(number, _)| *number == prefix);
    found.map(|(_, text)| [text, rest].concat())
}

/// Ordered as the kernel requires: by number, length and bytes of the name.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry<'a> {
    number: u8,
    name_bytes: usize,
    name: &'a [u8],
    value: Vec<u8>,
}

/// Why attributes cannot be stored.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    Name(Vec<u8>),
    Bytes { bytes: u64, limit_bytes: u64 },
}

/// The attributes of one inode, divided between inode and block.
#[derive(Debug)]
pub(super) struct Xattrs<'a> {
    body: Vec<Entry<'a>>,
    block: Vec<Entry<'a>>,
}

impl<'a> Xattrs<'a> {
    pub(super) fn new(all: &'a BTreeMap<Vec<u8>, Vec<u8>>) -> Result<Self, Unfit> {
        let entries = all.iter().map(|(name, value)| Entry::new(name, value));
        let mut entries = entries.collect::<Result<Vec<_>, _>>()?;
        entries.sort_unstable();
        let mut body_left = BODY_ROOM;
        let mut xattrs = Self {
            body: Vec::new(),
            block: Vec::new(),
        };
        for entry in entries {
            match body_left.checked_sub(entry.bytes()) {
                Some(left) => {
                    body_left = left;
                    xattrs.body.push(entry);
                }
                None => xattrs.block.push(entry),
            }
        }
        xattrs.check_room()?;
        Ok(xattrs)
    }

    fn check_room(&self) -> Result<(), Unfit> {
        let sum = |entries: &[Entry<'_>]| entries.iter().map(Entry::bytes).sum::<usize>();
        match sum(&self.block) {
            ..=BLOCK_ROOM => Ok(()),
            block => Err(Unfit::Bytes {
                bytes: (block + sum(&self.body)) as u64,
                limit_bytes: (BODY_ROOM + BLOCK_ROOM) as u64,
            }),
        }
    }

    /// The attributes in the inode, encoded.
    pub(super) fn body(&self) -> [u8; BODY_BYTES] {
        let mut bytes = [0; BODY_BYTES];
        if !self.body.is_empty() {
            put(&mut bytes, 0, MAGIC.to_le_bytes());
            fill(&mut bytes[MAGIC_BYTES..], 0, &self.body, |_| 0);
        }
        bytes
    }

    pub(super) fn needs_block(&self) -> bool {
        !self.block.is_empty()
    }

    /// The attributes in the block with this number, encoded.
    pub(super) fn block(&self, fs_seed: u32, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        let hashes = self.block.iter().map(Entry::hash);
        put(&mut bytes, 0, MAGIC.to_le_bytes());
        put(&mut bytes, 4, 1u32.to_le_bytes());
        put(&mut bytes, 8, 1u32.to_le_bytes());
        put(
            &mut bytes,
            12,
            hashes
                .fold(0, |all: u32, one| all.rotate_left(16) ^ one)
                .to_le_bytes(),
        );
        fill(&mut bytes, HEADER_BYTES, &self.block, |entry| entry.hash());
        let checksum = crc32c(crc32c(fs_seed, &number.to_le_bytes()), &bytes);
        put(&mut bytes, 16, checksum.to_le_bytes());
        bytes
    }
}

impl<'a> Entry<'a> {
    fn new(whole: &'a [u8], value: &[u8]) -> Result<Self, Unfit> {
        let unfit = || Unfit::Name(whole.to_vec());
        let access_list = || acl::encode(value).ok_or_else(unfit);
        let (number, name, value) = match whole {
            ACCESS_ACL => (2, &[][..], access_list()?),
            DEFAULT_ACL => (3, &[][..], access_list()?),
            _ => {
                let stripped =
                    |(number, prefix): &(u8, &[u8])| Some((*number, whole.strip_prefix(*prefix)?));
                let (number, name) = PREFIXES.iter().find_map(stripped).ok_or_else(unfit)?;
                let is_name = (1..=255).contains(&name.len()) && !name.contains(&0);
                (
                    number,
                    if is_name { name } else { return Err(unfit()) },
                    value.to_vec(),
                )
            }
        };
        Ok(Self {
            number,
            name_bytes: name.len(),
            name,
            value,
        })
    }

    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.name.len().next_multiple_of(4) + self.value.len().next_multiple_of(4)
    }

    fn hash(&self) -> u32 {
        let name = self
            .name
            .iter()
            .fold(0, |hash: u32, byte| hash.rotate_left(5) ^ u32::from(*byte));
        self.value.chunks(4).fold(name, |hash, chunk| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            hash.rotate_left(16) ^ u32::from_le_bytes(word)
        })
    }
}

/// Writes entries from `first` on, and values backwards from the end. All of them fit.
fn fill(bytes: &mut [u8], first: usize, entries: &[Entry<'_>], hash: impl Fn(&Entry<'_>) -> u32) {
    let mut at = first;
    let mut value_at = bytes.len();
    for entry in entries {
        value_at -= entry.value.len().next_multiple_of(4);
        bytes[at] = entry.name.len() as u8;
        bytes[at + 1] = entry.number;
        // An empty value has no place.
        let offset = if entry.value.is_empty() {
            0
        } else {
            value_at as u16
        };
        put(bytes, at + 2, offset.to_le_bytes());
        put(bytes, at + 8, (entry.value.len() as u32).to_le_bytes());
        put(bytes, at + 12, hash(entry).to_le_bytes());
        bytes[at + ENTRY_BYTES..][..entry.name.len()].copy_from_slice(entry.name);
        bytes[value_at..][..entry.value.len()].copy_from_slice(&entry.value);
        at += ENTRY_BYTES + entry.name.len().next_multiple_of(4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xattrs(all: &[(&str, usize)]) -> BTreeMap<Vec<u8>, Vec<u8>> {
        all.iter()
            .map(|(name, bytes)| (name.as_bytes().to_vec(), vec![b'x'; *bytes]))
            .collect()
    }

    #[test]
    fn attributes_that_cannot_be_stored_are_reported() {
        let all = xattrs(&[("user.a", 3900), ("user.b", 300)]);
        let bytes = 16 + 4 + 3900 + 16 + 4 + 300;
        assert_eq!(
            Xattrs::new(&all).unwrap_err(),
            Unfit::Bytes {
                bytes,
                limit_bytes: 88 + 4060
            }
        );
        for name in ["user.", "com.apple.x", "system.data", "posix"] {
            let all = xattrs(&[(name, 1)]);
            assert_eq!(Xattrs::new(&all).unwrap_err(), Unfit::Name(name.into()));
        }
    }

    #[test]
    fn attributes_may_fill_inode_and_block_completely() {
        let all = xattrs(&[("user.a", 68), ("user.b", 4040)]);
        let xattrs = Xattrs::new(&all).unwrap();
        assert_eq!((xattrs.body.len(), xattrs.block.len()), (1, 1));
    }
}
