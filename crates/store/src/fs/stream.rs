//! Writing a file piece by piece: how everything that is too large for memory gets into the store.
//!
//! Always: blocks of zeros become holes where the file system has them; the bytes read back are the
//! same. A file is of its full length only after [`Output::finish`].
//!
//! When it fails: the file is cut short somewhere, and goes with the staging directory it is in.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{FileWriter, Files, io_error};
use crate::Error;

/// What is a hole if it is all zeros.
const BLOCK: usize = 4096;
/// How much is written at once.
const PIECE: usize = 1 << 20;
/// What comes in pieces of this size is not gathered first.
const DIRECT: usize = 64 << 10;

/// A new file that is being written from front to back.
pub(crate) struct Output {
    path: PathBuf,
    writer: Box<dyn FileWriter>,
    /// Bytes that are not written yet. The file has a multiple of [`BLOCK`] before them.
    pending: Vec<u8>,
}

impl Files {
    /// Makes a file like `create`, to be written piece by piece.
    pub(crate) fn output(&self, path: &Path) -> Result<Output, Error> {
        let writer = self.fs.writer(path).map_err(io_error("write", path))?;
        Ok(Output {
            path: path.to_owned(),
            writer,
            pending: Vec::new(),
        })
    }
}

impl Output {
    /// Adds bytes.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.write_all(bytes).map_err(io_error("write", &self.path))
    }

    /// Adds zeros, as many as you like.
    pub(crate) fn add_zeros(&mut self, mut count: u64) -> Result<(), Error> {
        let to_block = (BLOCK - self.pending.len() % BLOCK) % BLOCK;
        let first = count.min(to_block as u64);
        self.pending.resize(self.pending.len() + first as usize, 0);
        count -= first;
        let skipped = self
            .flush_pending(Rest::Keep)
            .and_then(|()| self.skip_blocks(count / BLOCK as u64));
        skipped.map_err(io_error("write", &self.path))?;
        self.pending
            .resize(self.pending.len() + (count % BLOCK as u64) as usize, 0);
        Ok(())
    }

    fn skip_blocks(&mut self, blocks: u64) -> io::Result<()> {
        if blocks == 0 {
            Ok(())
        } else {
            self.writer.skip(blocks * BLOCK as u64)
        }
    }

    /// Gives the file its full length. It is not synced.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        let finished = self
            .flush_pending(Rest::Write)
            .and_then(|()| self.writer.finish());
        finished.map_err(io_error("write", &self.path))
    }

    /// Fills up what is pending to a block, and writes all whole blocks from where they are. Says
    /// how much was taken.
    fn write_large(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let to_block = (BLOCK - self.pending.len() % BLOCK) % BLOCK;
        self.pending.extend_from_slice(&bytes[..to_block]);
        self.flush_pending(Rest::Keep)?;
        let whole = (bytes.len() - to_block) / BLOCK * BLOCK;
        write_blocks(&mut *self.writer, &bytes[to_block..to_block + whole])?;
        Ok(to_block + whole)
    }

    /// Writes whole blocks of what is pending, in runs of data and of zeros.
    fn flush_pending(&mut self, rest: Rest) -> io::Result<()> {
        let whole = match rest {
            Rest::Keep => self.pending.len() / BLOCK * BLOCK,
            Rest::Write => self.pending.len(),
        };
        write_blocks(&mut *self.writer, &self.pending[..whole])?;
        self.pending.drain(..whole);
        Ok(())
    }
}

/// Writes runs of blocks, leaving out those of zeros. Only the last block may be short.
fn write_blocks(writer: &mut dyn FileWriter, bytes: &[u8]) -> io::Result<()> {
    let is_zero = |block: &[u8]| *block == [0; BLOCK][..block.len()];
    let mut rest = bytes;
    while let Some(first) = rest.chunks(BLOCK).next() {
        let zero = is_zero(first);
        let alike = rest
            .chunks(BLOCK)
            .take_while(|block| is_zero(block) == zero);
        let (run, behind) = rest.split_at(alike.map(<[u8]>::len).sum());
        if zero {
            writer.skip(run.len() as u64)?
        } else {
            writer.write(run)?
        }
        rest = behind;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Rest {
    Keep,
    Write,
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() >= DIRECT {
            return self.write_large(bytes);
        }
        let taken = bytes.len().min(PIECE - self.pending.len().min(PIECE - 1));
        self.pending.extend_from_slice(&bytes[..taken]);
        if self.pending.len() >= PIECE {
            self.flush_pending(Rest::Keep)?;
        }
        Ok(taken)
    }

    /// What is pending is less than a piece, and written when there is more or the end.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use std::sync::Arc;

    use crate::fs::Disk;

    fn written(work: impl FnOnce(&mut Output)) -> (Vec<u8>, u64) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut output = Files::new(Arc::new(Disk)).output(&path).unwrap();
        work(&mut output);
        output.finish().unwrap();
        (
            std::fs::read(&path).unwrap(),
            std::fs::metadata(&path).unwrap().blocks() * 512,
        )
    }

    #[test]
    fn pieces_of_any_size_make_the_same_file() {
        let expected: Vec<u8> = (0..3 * PIECE + 5)
            .map(|at| if at / 10_000 % 3 == 0 { 0 } else { at as u8 })
            .collect();
        for size in [1 << 22, PIECE - 1, 4096, 1000] {
            let (found, _) = written(|output| {
                expected
                    .chunks(size)
                    .for_each(|piece| output.add(piece).unwrap())
            });
            assert!(found == expected, "in pieces of {size}");
        }
    }

    #[test]
    fn zeros_are_holes_wherever_they_come_from() {
        let (found, blocks) = written(|output| {
            output.add(b"begin").unwrap();
            output.add_zeros(10 << 20).unwrap();
            output.add(&vec![0; 10 << 20]).unwrap();
            output.add(b"end").unwrap();
            output.add_zeros(1).unwrap();
        });
        let expected = [&b"begin"[..], &vec![0; 20 << 20], b"end\0"].concat();
        assert!(found == expected);
        assert!(blocks < 1 << 20, "{blocks} bytes on disk");
    }
}
