//! ext4 (and ext2, ext3), read only and from any disk.
//!
//! A file system that was not unmounted, because its guest ran on or lost its power, is read as it
//! will be after the next mount: what its journal has is taken from there.
//!
//! Always: memory is a few blocks that are kept, the tables of one file and the names of one
//! directory. Every number is checked before it is used. The blocks that files name are counted:
//! all files together can name each block of the file system a few times, so no knot of tables is
//! followed for long.
//!
//! Deliberately absent: checksums of metadata are not checked, because layers have digests as a
//! whole; file systems with encrypted files are refused.

mod crc32c;
mod dir;
mod fields;
mod inode;
mod journal;
mod map;
mod reader;
mod superblock;
mod xattr;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

pub use crc32c::crc32c;
pub(crate) use dir::Entries;
pub(crate) use inode::Inode;
pub(crate) use map::Map;
pub use reader::FileReader;
pub(crate) use reader::Next;
pub(crate) use xattr::Xattrs;

use crate::error::require;
use crate::{Blocks, Error, Kind, Node, Path};
use journal::Replay;
use superblock::Superblock;

/// How much of tables and directories is kept.
const CACHE_BYTES: u64 = 16 << 20;
/// A file's tables are read to walk, to look for changes, and to compare: this often may all blocks
/// be named.
const BUDGET_PER_BLOCK: u64 = 8;
/// The kernel allows a target as long as a block; none has more than this.
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

/// Where the bytes of a file are.
#[derive(Debug)]
pub(crate) enum Content {
    /// In the inode.
    Inline(Vec<u8>),
    Mapped(Map),
}

/// Whether there is nothing in the journal of the file system with this superblock.
pub(crate) fn is_clean_superblock(bytes: &[u8; 1024], disk_bytes: u64) -> Result<bool, Error> {
    Superblock::parse(bytes, disk_bytes).map(|superblock| !superblock.needs_recovery())
}

impl<'b> FileSystem<'b> {
    /// Opens the file system that begins with the disk.
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

    /// What could not be taken into account when it was opened.
    pub fn incomplete(&self) -> Option<&str> {
        self.incomplete.as_deref()
    }

    /// What is at a path, if there is something. Symbolic links are not followed.
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

    /// From now on its files may name every block a few times again.
    pub(crate) fn renew_budget(&self) {
        self.budget.set(self.allowance());
    }

    fn allowance(&self) -> u64 {
        self.superblock.blocks.saturating_mul(BUDGET_PER_BLOCK)
    }

    fn find_kind(&self, path: &Path, wanted: Kind) -> Result<Inode, Error> {
        let inode = self
            .find(path)?
            .ok_or_else(|| Error::NotFound(path.clone()))?;
        match inode.kind == wanted {
            true => Ok(inode),
            false => Err(Error::OtherKind {
                path: path.clone(),
                kind: inode.kind,
                wanted,
            }),
        }
    }

    fn find(&self, path: &Path) -> Result<Option<Inode>, Error> {
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

    pub(crate) fn root(&self) -> Result<Inode, Error> {
        let root = self.inode(inode::ROOT)?;
        require(root.kind == Kind::Directory, || {
            "its root is no directory".into()
        })?;
        Ok(root)
    }

    pub(crate) fn inode(&self, number: u32) -> Result<Inode, Error> {
        let offset = self.inode_offset(number)?;
        let block = self.block(offset / self.block_bytes())?;
        let start = (offset % self.block_bytes()) as usize;
        let bytes = &block[start..start + self.superblock.inode_bytes()];
        Inode::parse(number, bytes, self.superblock.has_large_dirs())
    }

    /// Where on the disk an inode is.
    pub(crate) fn inode_offset(&self, number: u32) -> Result<u64, Error> {
        let located = self.superblock.locate(number)?;
        let block = self.block(located.descriptor / self.block_bytes())?;
        let start = (located.descriptor % self.block_bytes()) as usize;
        self.superblock.inode_offset(
            &block[start..start + self.superblock.descriptor_len()],
            &located,
        )
    }

    pub(crate) fn node(&self, inode: &Inode) -> Result<Node, Error> {
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

    /// Where a symbolic link points to.
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

    pub(crate) fn entries(&self, directory: &Inode) -> Result<Entries, Error> {
        dir::entries(self, directory, &self.content(directory)?)
    }

    pub(crate) fn xattrs(&self, inode: &Inode) -> Result<Xattrs, Error> {
        xattr::all(self, inode)
    }

    /// All extended attributes of an inode are in itself and in this block.
    pub(crate) fn xattr_block(&self, inode: &Inode) -> XattrPlace {
        match inode.xattr_block {
            _ if self.superblock.has_xattr_inodes() => XattrPlace::Elsewhere,
            0 => XattrPlace::Inode,
            block => XattrPlace::Block(block),
        }
    }

    pub(crate) fn content(&self, inode: &Inode) -> Result<Content, Error> {
        if inode.is_short_symlink() {
            return Ok(Content::Inline(inode.block_field.to_vec()));
        }
        if inode.has_inline_data() {
            let mut bytes = inode.block_field.to_vec();
            bytes.extend(xattr::inline_rest(self, inode)?);
            let fits = inode.size <= bytes.len() as u64;
            require(fits, || {
                format!("inode {} has less content than its size says", inode.number)
            })?;
            return Ok(Content::Inline(bytes));
        }
        Map::of(self, inode).map(Content::Mapped)
    }

    /// Equal bytes in equal places mean the same in both.
    pub(crate) fn is_laid_out_like(&self, other: &FileSystem<'_>) -> bool {
        self.superblock.is_laid_out_like(&other.superblock)
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.superblock.block_bytes
    }

    /// How many blocks it has.
    pub(crate) fn blocks(&self) -> u64 {
        self.superblock.blocks
    }

    fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// A block of tables or names; kept, because its neighbours will be asked for.
    pub(crate) fn block(&self, number: u64) -> Result<Rc<[u8]>, Error> {
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

    /// Fills `into`, a multiple of blocks, from block `first` on.
    pub(crate) fn read_blocks(&self, first: u64, into: &mut [u8]) -> Result<(), Error> {
        let count = into.len() as u64 / self.block_bytes();
        let inside = first
            .checked_add(count)
            .is_some_and(|end| end <= self.blocks());
        require(inside, || format!("block {first} is outside of it"))?;
        read_at(self.disk, first * self.block_bytes(), into)?;
        self.replay
            .apply(self.disk, first, into, self.block_bytes())
    }

    /// Which blocks the journal has newer versions of, and where.
    pub(crate) fn logged(
        &self,
        blocks: Range<u64>,
    ) -> impl Iterator<Item = (u64, journal::Logged)> {
        self.replay.within(blocks)
    }

    /// Counts blocks that some file says are its own.
    fn charge(&self, blocks: u64) -> Result<(), Error> {
        let left = self.budget.get().checked_sub(blocks);
        self.budget.set(left.unwrap_or(0));
        require(left.is_some(), || {
            "its files have more blocks than there are".into()
        })
    }

    /// Reads the journal, and begins again with what it says: the superblock can be in it, too.
    fn recover(&mut self) -> Result<(), Error> {
        match journal::read(self)? {
            Ok(replay) => {
                let superblock = read_superblock(self.disk, &replay)?;
                let fits = superblock.block_bytes == self.superblock.block_bytes;
                require(fits, || {
                    "its journal has a superblock with another block size".into()
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

/// Where the extended attributes of an inode are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum XattrPlace {
    Inode,
    Block(u64),
    /// In inodes of their own, perhaps.
    Elsewhere,
}

fn read_superblock(disk: &dyn Blocks, replay: &Replay) -> Result<Superblock, Error> {
    if disk.bytes() < superblock::OFFSET + superblock::LEN as u64 {
        return Err(Error::NotExt4);
    }
    let mut bytes = [0; superblock::LEN];
    read_at(disk, superblock::OFFSET, &mut bytes)?;
    replay.apply_part(disk, superblock::OFFSET, &mut bytes)?;
    Superblock::parse(&bytes, disk.bytes())
}

fn read_at(disk: &dyn Blocks, offset: u64, into: &mut [u8]) -> Result<(), Error> {
    disk.read_at(offset, into)
        .map_err(|source| Error::Io { offset, source })
}
