//! Reads the bytes of one file, from front to back.

use std::io::{self, Read};

use super::{Content, Error, FileSystem, Inode};

/// Reads a file. Holes read as zeros.
#[derive(Debug)]
pub struct FileReader<'f, 'b> {
    fs: &'f FileSystem<'b>,
    content: Content,
    bytes: u64,
    at: u64,
    /// The block that contains `at`, if only a part of it was read.
    block: Option<(u64, Vec<u8>)>,
}

/// Where the next bytes of a file are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The file ends here.
    End,
    /// A hole: this many zeros.
    Zeros(u64),
    /// This many bytes inside the inode.
    Inline(u64),
    /// Bytes in consecutive blocks, from byte `offset` of the disk on.
    Stored { offset: u64, bytes: u64 },
}

impl Next {
    pub fn bytes(self) -> u64 {
        match self {
            Self::End => 0,
            Self::Zeros(bytes) | Self::Inline(bytes) | Self::Stored { bytes, .. } => bytes,
        }
    }
}

impl<'f, 'b> FileReader<'f, 'b> {
    /// Opens the content of an inode.
    pub fn of(fs: &'f FileSystem<'b>, inode: Inode) -> Result<Self, Error> {
        let content = fs.content(&inode)?;
        Ok(Self {
            fs,
            content,
            bytes: inode.size,
            at: 0,
            block: None,
        })
    }

    /// The size of the file, in bytes.
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// Reads the next bytes, at most `limit`.
    pub fn read_at_most(mut self, limit: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; limit.min(self.bytes - self.at) as usize];
        self.read_exactly(&mut bytes)?;
        Ok(bytes)
    }

    /// Advances without reading. The caller skips no more than [`Self::next`] covers.
    pub fn skip(&mut self, bytes: u64) {
        self.at += bytes.min(self.bytes - self.at);
    }

    /// Fills `into`. Fails if the file ends before.
    pub fn read_exactly(&mut self, into: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        while done < into.len() {
            let read = self.read_some(&mut into[done..])?;
            if read == 0 {
                return Err(Error::Io {
                    offset: self.at,
                    source: io::ErrorKind::UnexpectedEof.into(),
                });
            }
            done += read;
        }
        Ok(())
    }

    /// Reads at least one byte, except at the end.
    fn read_some(&mut self, into: &mut [u8]) -> Result<usize, Error> {
        let next = self.next();
        let wanted = next.bytes().min(into.len() as u64) as usize;
        let into = &mut into[..wanted];
        let done = match next {
            Next::Stored { offset, .. } => self.read_stored(offset, into)?,
            Next::Inline(_) => self.copy_inline(into),
            Next::Zeros(_) | Next::End => {
                into.fill(0);
                wanted
            }
        };
        self.at += done as u64;
        Ok(done)
    }

    fn copy_inline(&self, into: &mut [u8]) -> usize {
        let Content::Inline(bytes) = &self.content else {
            return 0;
        };
        let stored = bytes.get(self.at as usize..).unwrap_or_default();
        let count = stored.len().min(into.len());
        into[..count].copy_from_slice(&stored[..count]);
        count
    }

    /// Reads whole blocks directly into `into`, and a part of a block through a kept copy.
    fn read_stored(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, Error> {
        let size = self.fs.block_bytes();
        let whole = into.len() as u64 / size * size;
        if offset.is_multiple_of(size) && whole > 0 {
            self.fs
                .read_blocks(offset / size, &mut into[..whole as usize])?;
            return Ok(whole as usize);
        }
        let number = offset / size;
        if self.block.as_ref().is_none_or(|(kept, _)| *kept != number) {
            let mut bytes = vec![0; size as usize];
            self.fs.read_blocks(number, &mut bytes)?;
            self.block = Some((number, bytes));
        }
        let bytes = self
            .block
            .as_ref()
            .map_or(&[][..], |(_, bytes)| &bytes[(offset % size) as usize..]);
        let count = bytes.len().min(into.len());
        into[..count].copy_from_slice(&bytes[..count]);
        Ok(count)
    }

    /// Where the next bytes are.
    pub fn next(&self) -> Next {
        let left = self.bytes - self.at;
        let Content::Mapped(map) = &self.content else {
            return if left == 0 {
                Next::End
            } else {
                Next::Inline(left)
            };
        };
        let size = self.fs.block_bytes();
        if left == 0 {
            return Next::End;
        }
        let logical = self.at / size;
        let within = self.at % size;
        match map.run_at(logical) {
            None => Next::Zeros(left),
            Some(run) if run.logical > logical => {
                Next::Zeros(left.min((run.logical - logical) * size - within))
            }
            Some(run) => {
                let skipped = logical - run.logical;
                let offset = (run.physical + skipped) * size + within;
                Next::Stored {
                    offset,
                    bytes: left.min((run.blocks - skipped) * size - within),
                }
            }
        }
    }
}

impl Read for FileReader<'_, '_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read_some(into).map_err(io::Error::other)
    }
}
