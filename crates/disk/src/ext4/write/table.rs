//! Writes the inode tables from front to back.

use super::area::Closed;
use super::error::Error;
use super::geometry::Geometry;
use super::inode::{self, Inode};
use super::layout::{BLOCK, INODE_BYTES};

pub(super) struct Table<'a> {
    image: &'a Closed,
    geometry: &'a Geometry,
    seed: u32,
    group: u32,
    /// The table of the current group, up to the last inode put.
    bytes: Vec<u8>,
    dirs: Vec<u16>,
}

impl<'a> Table<'a> {
    pub(super) fn new(image: &'a Closed, geometry: &'a Geometry, seed: u32) -> Self {
        Self {
            image,
            geometry,
            seed,
            group: 0,
            bytes: Vec::new(),
            dirs: vec![0],
        }
    }

    /// Adds an inode. Its number is higher than all before.
    pub(super) fn put(&mut self, number: u32, inode: &Inode) -> Result<(), Error> {
        let per_group = self.geometry.inodes_per_group;
        let group = (number - 1) / per_group;
        let index = (number - 1) % per_group;
        if group != self.group {
            self.flush()?;
            self.group = group;
            self.dirs.resize(group as usize + 1, 0);
        }
        self.bytes.resize(index as usize * INODE_BYTES, 0);
        self.bytes
            .extend_from_slice(&inode.encode(inode::seed(self.seed, number)));
        self.dirs[group as usize] += u16::from(inode.is_dir());
        Ok(())
    }

    /// Writes the rest. Returns the number of directories by group.
    pub(super) fn finish(mut self) -> Result<Vec<u16>, Error> {
        self.flush()?;
        Ok(self.dirs)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.bytes
            .resize(self.bytes.len().next_multiple_of(BLOCK), 0);
        self.image
            .write(self.geometry.tables[self.group as usize], &self.bytes)?;
        self.bytes.clear();
        Ok(())
    }
}
