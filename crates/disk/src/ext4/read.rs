//! Reads ext4, ext3 and ext2 from any disk.
//!
//! A file system that was not unmounted, because its guest still ran or lost power, is read as it
//! will be after the next mount: committed blocks come from the journal.
//!
//! Always: memory holds a few cached blocks, the tables of one file and the names of one directory.
//! Every number is checked before it is used. Blocks are charged to a budget when a file names
//! them: all files together may name each block a few times, so tables that refer to each other in
//! circles end in an error.
//!
//! Deliberately absent: metadata checksums are not verified, because layers have digests as a
//! whole. File systems with encrypted files are refused.

mod dir;
mod error;
mod file;
mod inode;
mod journal;
mod map;
mod node;
mod path;
mod superblock;
mod xattr;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

pub use dir::Entries;
pub use error::Error;
pub use file::{FileReader, Next};
pub use inode::Inode;
pub use journal::Logged;
pub use node::{Kind, Node};
pub use path::Path;
pub use xattr::Xattrs;

use super::format::{self, ROOT_INODE, SUPERBLOCK_BYTES};
use crate::blocks::Blocks;
use error::require;
use inode::DirSizes;
use journal::Replay;
use map::Map;
use superblock::Superblock;

/// The size of the cache for blocks of tables and directories.
const CACHE_BYTES: u64 = 16 << 20;
/// How often files may name each block: a file's tables are read for a walk, to look for changes,
/// and to compare.
const BUDGET_PER_BLOCK: u64 = 8;
/// The kernel allows a target as long as a block; no block is larger than this.
const MAX_TARGET_BYTES: u64 = 64 << 10;

/// An opened file system.
pub struct FileSystem<'b> {
    disk: &'b dyn Blocks,
    superblock: Superblock,
    replay: Replay,
    incomplete: Option<String>,
    budget: Cell<u64>,
    cache: RefCell<HashMap<u64, Rc<[u8]>>>,
}

impl fmt::Debug for FileSystem<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            superblock,
            incomplete,
            ..
        } = self;
        out.debug_struct("FileSystem")
            .field("superblock", superblock)
            .field("incomplete", incomplete)
            .finish()
    }
}

/// The places of a file's bytes.
#[derive(Debug)]
enum Content {
    /// Inside the inode.
    Inline(Vec<u8>),
    Mapped(Map),
}

/// The offset of the superblock on the disk.
pub const SUPERBLOCK_OFFSET: u64 = format::SUPERBLOCK_OFFSET;
/// The fields of the superblock that record when and how much was written, and the checksum, which
/// covers them. They do not describe the content of the file system.
pub const WRITE_STATISTICS: [Range<usize>; 4] = superblock::WRITE_STATISTICS;

/// Whether the file system on a disk was unmounted or frozen, so that its journal is empty.
pub fn is_clean(disk: &dyn Blocks) -> Result<bool, Error> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    read_at(disk, SUPERBLOCK_OFFSET, &mut bytes)?;
    let superblock = Superblock::parse(&bytes, disk.bytes())?;
    Ok(!superblock.needs_recovery())
}

impl<'b> FileSystem<'b> {
    /// Opens the file system that starts with the first byte of the disk.
    pub fn open(disk: &'b dyn Blocks) -> Result<Self, Error> {
        let mut fs = Self {
            disk,
            superblock: read_superblock(disk, &Replay::default())?,
            replay: Replay::default(),
            incomplete: None,
            budget: Cell::default(),
            cache: RefCell::default(),
        };
        fs.budget = Cell::new(fs.allowance());
        if fs.superblock.needs_recovery() {
            fs.recover()?;
        }
        Ok(fs)
    }

    /// The part of the journal that could not be replayed, if any.
    pub fn incomplete(&self) -> Option<&str> {
        self.incomplete.as_deref()
    }

    /// Describes the node at a path, if it exists. Symbolic links are not followed.
    pub fn stat(&self, path: &Path) -> Result<Option<Node>, Error> {
        self.find(path)?.map(|inode| self.node(&inode)).transpose()
    }

    /// The names in a directory, sorted.
    pub fn list(&self, path: &Path) -> Result<Vec<Box<[u8]>>, Error> {
        let inode = self.find_kind(path, Kind::Directory)?;
        Ok(self.entries(&inode)?.into_keys().collect())
    }

    /// The content of a file.
    pub fn read_file(&self, path: &Path) -> Result<FileReader<'_, 'b>, Error> {
        FileReader::of(self, self.find_kind(path, Kind::File)?)
    }

    /// Allows files to name every block a few times again.
    fn renew_budget(&self) {
        self.budget.set(self.allowance());
    }

    fn allowance(&self) -> u64 {
        self.superblock.blocks.saturating_mul(BUDGET_PER_BLOCK)
    }

    fn find_kind(&self, path: &Path, wanted: Kind) -> Result<Inode, Error> {
        let inode = self
            .find(path)?
            .ok_or_else(|| Error::NotFound(path.clone()))?;
        if inode.kind == wanted {
            return Ok(inode);
        }
        Err(Error::OtherKind {
            path: path.clone(),
            kind: inode.kind,
            wanted,
        })
    }

    /// The inode at a path, if it exists. Symbolic links are not followed.
    pub fn find(&self, path: &Path) -> Result<Option<Inode>, Error> {
        self.renew_budget();
        let mut at = self.root()?;
        for name in path.components() {
            if at.kind != Kind::Directory {
                return Ok(None);
            }
            let Some(number) = self.entries(&at)?.remove(name) else {
                return Ok(None);
            };
            at = self.inode(number)?;
        }
        Ok(Some(at))
    }

    /// The inode of the root directory.
    pub fn root(&self) -> Result<Inode, Error> {
        let root = self.inode(ROOT_INODE)?;
        require(root.kind == Kind::Directory, || {
            "its root is not a directory".into()
        })?;
        Ok(root)
    }

    pub fn inode(&self, number: u32) -> Result<Inode, Error> {
        let offset = self.inode_offset(number)?;
        let block = self.block(offset / self.block_bytes())?;
        let start = (offset % self.block_bytes()) as usize;
        let bytes = &block[start..start + self.superblock.inode_bytes()];
        let dir_sizes = if self.superblock.has_large_dirs() {
            DirSizes::Large
        } else {
            DirSizes::Small
        };
        Inode::parse(number, bytes, dir_sizes)
    }

    /// The offset of an inode on the disk.
    pub fn inode_offset(&self, number: u32) -> Result<u64, Error> {
        let located = self.superblock.locate(number)?;
        let block = self.block(located.descriptor / self.block_bytes())?;
        let start = (located.descriptor % self.block_bytes()) as usize;
        self.superblock.inode_offset(
            &block[start..start + self.superblock.descriptor_len()],
            &located,
        )
    }

    /// Describes an inode.
    pub fn node(&self, inode: &Inode) -> Result<Node, Error> {
        let has_size = matches!(inode.kind, Kind::File | Kind::Symlink);
        let is_link = inode.kind == Kind::Symlink;
        Ok(Node {
            kind: inode.kind,
            size: if has_size { inode.size } else { 0 },
            mode: inode.mode,
            uid: inode.uid,
            gid: inode.gid,
            links: inode.links,
            modified_unix_s: inode.modified_unix_s,
            target: if is_link {
                Some(self.target(inode)?.into())
            } else {
                None
            },
            device: inode.device(),
        })
    }

    /// The target of a symbolic link.
    fn target(&self, inode: &Inode) -> Result<Vec<u8>, Error> {
        if inode.size > MAX_TARGET_BYTES {
            let what = format!("the target of inode {}", inode.number);
            return Err(Error::TooLarge {
                what,
                limit_bytes: MAX_TARGET_BYTES,
            });
        }
        FileReader::of(self, inode.clone())?.read_at_most(inode.size)
    }

    /// The names in a directory.
    pub fn entries(&self, directory: &Inode) -> Result<Entries, Error> {
        dir::entries(self, directory, &self.content(directory)?)
    }

    pub fn xattrs(&self, inode: &Inode) -> Result<Xattrs, Error> {
        xattr::all(self, inode)
    }

    /// Where all extended attributes of an inode are.
    pub fn xattr_place(&self, inode: &Inode) -> XattrPlace {
        match inode.xattr_block {
            _ if self.superblock.has_xattr_inodes() => XattrPlace::Elsewhere,
            0 => XattrPlace::Inode,
            block => XattrPlace::Block(block),
        }
    }

    /// The blocks that hold the content of an inode, and the tables that list them.
    pub fn content_blocks(&self, inode: &Inode) -> Result<Vec<Range<u64>>, Error> {
        let Content::Mapped(map) = self.content(inode)? else {
            return Ok(Vec::new());
        };
        let tables = map
            .nodes
            .iter()
            .map(|block| *block..block.saturating_add(1));
        let data = map
            .runs
            .iter()
            .map(|run| run.physical..run.physical + run.blocks);
        Ok(tables.chain(data).collect())
    }

    fn content(&self, inode: &Inode) -> Result<Content, Error> {
        if inode.is_short_symlink() {
            return Ok(Content::Inline(inode.block_field.to_vec()));
        }
        if inode.has_inline_data() {
            let mut bytes = inode.block_field.to_vec();
            bytes.extend(xattr::inline_rest(self, inode)?);
            let fits = inode.size <= bytes.len() as u64;
            require(fits, || {
                format!("inode {} has fewer bytes than its size says", inode.number)
            })?;
            return Ok(Content::Inline(bytes));
        }
        Map::of(self, inode).map(Content::Mapped)
    }

    /// Whether equal bytes in equal places have the same meaning in both file systems.
    pub fn is_laid_out_like(&self, other: &FileSystem<'_>) -> bool {
        self.superblock.is_laid_out_like(&other.superblock)
    }

    /// The size of a block.
    pub fn block_bytes(&self) -> u64 {
        self.superblock.block_bytes
    }

    /// The number of blocks.
    fn blocks(&self) -> u64 {
        self.superblock.blocks
    }

    fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Reads a block of tables or names through the cache, because most are read repeatedly.
    fn block(&self, number: u64) -> Result<Rc<[u8]>, Error> {
        if let Some(block) = self.cache.borrow().get(&number) {
            return Ok(Rc::clone(block));
        }
        let mut bytes = vec![0; self.block_bytes() as usize];
        self.read_blocks(number, &mut bytes)?;
        let block: Rc<[u8]> = bytes.into();
        let mut cache = self.cache.borrow_mut();
        if cache.len() as u64 >= CACHE_BYTES / self.block_bytes() {
            cache.clear();
        }
        cache.insert(number, Rc::clone(&block));
        Ok(block)
    }

    /// Fills `into`, whose length is a multiple of the block size, from block `first` on.
    fn read_blocks(&self, first: u64, into: &mut [u8]) -> Result<(), Error> {
        let count = into.len() as u64 / self.block_bytes();
        let inside = first
            .checked_add(count)
            .is_some_and(|end| end <= self.blocks());
        require(inside, || format!("block {first} is outside the disk"))?;
        read_at(self.disk, first * self.block_bytes(), into)?;
        self.replay
            .apply(self.disk, first, into, self.block_bytes())
    }

    /// The blocks whose newer versions are in the journal, and the places of these.
    pub fn logged(&self, blocks: Range<u64>) -> impl Iterator<Item = (u64, Logged)> {
        self.replay.within(blocks)
    }

    /// Charges blocks that a file names to the budget.
    fn charge(&self, blocks: u64) -> Result<(), Error> {
        let left = self.budget.get().checked_sub(blocks);
        self.budget.set(left.unwrap_or(0));
        require(left.is_some(), || {
            "its files name more blocks than it has".into()
        })
    }

    /// Reads the journal, then the superblock again, because its newer version can be in the
    /// journal.
    fn recover(&mut self) -> Result<(), Error> {
        match journal::read(self)? {
            Ok(replay) => {
                let superblock = read_superblock(self.disk, &replay)?;
                let fits = superblock.block_bytes == self.superblock.block_bytes;
                require(fits, || {
                    "its journal has a superblock with a different block size".into()
                })?;
                self.superblock = superblock;
                self.incomplete = replay.trouble().map(str::to_owned);
                self.replay = replay;
            }
            Err(reason) => {
                self.incomplete = Some(format!("its journal was not replayed: {reason}"))
            }
        }
        self.cache.take();
        self.renew_budget();
        Ok(())
    }
}

/// The place of an inode's extended attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XattrPlace {
    /// All are inside the inode.
    Inode,
    /// All are inside the inode and in this block.
    Block(u64),
    /// Some may be in other inodes.
    Elsewhere,
}

fn read_superblock(disk: &dyn Blocks, replay: &Replay) -> Result<Superblock, Error> {
    if disk.bytes() < SUPERBLOCK_OFFSET + SUPERBLOCK_BYTES as u64 {
        return Err(Error::NotExt4);
    }
    let mut bytes = [0; SUPERBLOCK_BYTES];
    read_at(disk, SUPERBLOCK_OFFSET, &mut bytes)?;
    replay.apply_part(disk, SUPERBLOCK_OFFSET, &mut bytes)?;
    Superblock::parse(&bytes, disk.bytes())
}

fn read_at(disk: &dyn Blocks, offset: u64, into: &mut [u8]) -> Result<(), Error> {
    disk.read_at(offset, into)
        .map_err(|source| Error::Io { offset, source })
}
