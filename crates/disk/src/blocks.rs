//! The interface through which disks are read.

use std::io;

/// A disk that can be read at any offset.
pub trait Blocks {
    /// The size of the disk.
    fn bytes(&self) -> u64;

    /// Fills `into` with the bytes from `offset` on. Fails if the disk ends before.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

impl Blocks for Vec<u8> {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let found = start.and_then(|start| self.get(start..start.checked_add(into.len())?));
        into.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
