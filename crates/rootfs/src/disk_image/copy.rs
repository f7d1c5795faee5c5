//! Copies a part of a disk into a sparse file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sandtree_disk::ext4::write::BLOCK_BYTES;

use super::error::DiskError;
use super::source::Source;
use crate::watch::Stop;

const PIECE_BYTES: u64 = 1 << 20;

pub(super) enum Error {
    Disk(DiskError),
    Write(io::Error),
}

impl Error {
    /// Adds the path of the written file.
    pub(super) fn at(self, to: &Path) -> DiskError {
        match self {
            Self::Disk(error) => error,
            Self::Write(source) => DiskError::io("write", to)(source),
        }
    }
}

impl From<DiskError> for Error {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

impl From<Stop> for Error {
    fn from(_: Stop) -> Self {
        Self::Disk(DiskError::GivenUp)
    }
}

/// Copies `range` of the disk to the beginning of a file. `watch` is called before each piece,
/// including those without data.
pub(super) fn copy(
    disk: &Source,
    range: Range<u64>,
    mut to: Sparse<'_>,
    watch: &mut dyn FnMut(u64) -> Result<(), Stop>,
) -> Result<(), Error> {
    let mut piece = vec![0; PIECE_BYTES as usize];
    let mut at = range.start;
    let mut read = 0;
    while at < range.end {
        watch(read)?;
        let run = disk.run(at)?;
        let mut end = run.end.min(range.end);
        if run.is_data {
            end = end.min(next_boundary(at - range.start, PIECE_BYTES) + range.start);
            let bytes = &mut piece[..(end - at) as usize];
            disk.read(at, bytes)?;
            to.write(at - range.start, bytes)?;
            read += bytes.len() as u64;
        }
        at = end;
    }
    watch(read)?;
    Ok(())
}

/// A new file in which blocks of zeros become holes.
pub(super) struct Sparse<'f> {
    file: &'f File,
    limit_bytes: u64,
    written_bytes: u64,
}

impl<'f> Sparse<'f> {
    pub(super) fn new(file: &'f File, limit_bytes: u64) -> Self {
        Self {
            file,
            limit_bytes,
            written_bytes: 0,
        }
    }

    /// Writes the blocks that are not zero, with one call for consecutive blocks.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut at = 0;
        let mut pending = 0;
        while at < bytes.len() {
            let block = next_boundary(offset + at as u64, BLOCK_BYTES) - offset;
            let end = bytes.len().min(block as usize);
            if is_zero(&bytes[at..end]) {
                self.write_all(&bytes[pending..at], offset + pending as u64)?;
                pending = end;
            }
            at = end;
        }
        self.write_all(&bytes[pending..], offset + pending as u64)
    }

    fn write_all(&mut self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.written_bytes += bytes.len() as u64;
        if self.written_bytes > self.limit_bytes {
            return Err(DiskError::TooMuchData {
                limit_bytes: self.limit_bytes,
            }
            .into());
        }
        self.file.write_all_at(bytes, offset).map_err(Error::Write)
    }
}

fn next_boundary(at: u64, step: u64) -> u64 {
    (at + 1).next_multiple_of(step)
}

pub(super) fn is_zero(bytes: &[u8]) -> bool {
    // Wide comparisons are fast, and most bytes of an image are compared.
    let (chunks, rest) = bytes.as_chunks::<16>();
    chunks.iter().all(|chunk| u128::from_ne_bytes(*chunk) == 0)
        && rest.iter().all(|byte| *byte == 0)
}
