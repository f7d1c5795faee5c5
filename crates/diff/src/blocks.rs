//! Where a file system is read from.

use std::io;

/// A disk.
pub trait Blocks {
    /// Its size.
    fn bytes(&self) -> u64;

    /// Reads all of `into` from `offset` on. Fails if that is not all on the disk.
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
