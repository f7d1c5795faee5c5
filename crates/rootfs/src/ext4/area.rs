//! The image file while it is filled: which blocks are taken, and the bytes in them.
//!
//! Always: blocks are handed out from low to high and written in that order, a few MiB at a time.
//! What is freed is not handed out again; it is free in the file system that is made, and a hole in
//! the image.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use super::layout::{BLOCK, Cursor, MAX_BLOCKS};
use crate::error::io_error;
use crate::tree::MAX_FILE_BYTES;
use crate::{BLOCK_BYTES, Content, Error, Extent};

/// So much is written at once.
const WRITE_BYTES: usize = 2 << 20;
/// One extent of ext4 has no more.
const MAX_EXTENT_BLOCKS: u32 = 32768;
static ZEROS: [u8; BLOCK] = [0; BLOCK];

/// The file of the image, and who has which blocks of it.
#[derive(Debug)]
pub(crate) struct DataArea {
    file: File,
    path: PathBuf,
    cursor: Cursor,
    /// Bytes of the last blocks that were handed out, which are not yet in the file.
    pending: Vec<u8>,
    /// The beginning of a block of the file that is written.
    partial: Vec<u8>,
    free: Vec<Range<u64>>,
    /// How much may be handed out, and how much was.
    written_limit_bytes: u64,
    written_bytes: u64,
}

impl DataArea {
    /// Makes an empty image, in which so many bytes are written at most. There must be nothing at
    /// `path`.
    pub(crate) fn create(path: &Path, written_limit_bytes: u64) -> Result<Self, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path);
        Ok(Self {
            file: file.map_err(io_error("create", path))?,
            path: path.to_owned(),
            cursor: Cursor::new(),
            pending: Vec::with_capacity(WRITE_BYTES * 2),
            partial: Vec::with_capacity(BLOCK),
            free: Vec::new(),
            written_limit_bytes,
            written_bytes: 0,
        })
    }

    /// Takes the bytes of one file, from front to back. Whole blocks of zeros become holes, as does
    /// what is missing. They may lie in so many extents, which are kept in memory.
    pub(crate) fn file(&mut self, bytes: u64, max_extents: u64) -> Result<FileWriter<'_>, Error> {
        if bytes > MAX_FILE_BYTES {
            return Err(Error::TooLarge {
                what: "a file",
                bytes,
                limit_bytes: MAX_FILE_BYTES,
            });
        }
        self.partial.clear();
        Ok(FileWriter {
            area: self,
            content: Content {
                bytes,
                extents: Vec::new(),
            },
            at: 0,
            max_extents,
        })
    }

    /// Nobody has these bytes any more.
    pub(crate) fn free(&mut self, content: &Content) {
        self.forget(&content.extents);
    }

    /// The first bytes of a file, at most `limit`.
    pub(crate) fn read(&self, content: &Content, limit: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; content.bytes.min(limit) as usize];
        for extent in &content.extents {
            for block in 0..u64::from(extent.blocks) {
                let start = (u64::from(extent.logical) + block) * BLOCK_BYTES;
                let Some(wanted) = usize::try_from(start)
                    .ok()
                    .and_then(|start| bytes.get_mut(start..))
                else {
                    break;
                };
                let wanted_bytes = wanted.len().min(BLOCK);
                self.read_block(extent.physical + block, &mut wanted[..wanted_bytes])?;
            }
        }
        Ok(bytes)
    }

    /// So many bytes from a block on.
    pub(crate) fn read_blocks(&self, first: u64, bytes: u64) -> Result<Vec<u8>, Error> {
        let mut read = vec![0; bytes as usize];
        for (block, into) in (first..).zip(read.chunks_mut(BLOCK)) {
            self.read_block(block, into)?;
        }
        Ok(read)
    }

    fn read_block(&self, block: u64, into: &mut [u8]) -> Result<(), Error> {
        match block.checked_sub(self.written_end()) {
            Some(pending) => {
                into.copy_from_slice(&self.pending[pending as usize * BLOCK..][..into.len()])
            }
            None => self
                .file
                .read_exact_at(into, block * BLOCK_BYTES)
                .map_err(io_error("read", &self.path))?,
        }
        Ok(())
    }

    fn forget(&mut self, extents: &[Extent]) {
        self.free.extend(
            extents
                .iter()
                .map(|extent| extent.physical..extent.physical + u64::from(extent.blocks)),
        );
    }

    /// Takes whole blocks, which are those of a file from `logical` on.
    pub(super) fn append(
        &mut self,
        blocks: &[u8],
        logical: u32,
        extents: &mut Vec<Extent>,
    ) -> Result<(), Error> {
        let (mut rest, mut logical) = (blocks, logical);
        while !rest.is_empty() {
            let taken = self.take((rest.len() / BLOCK) as u64)?;
            let count = (taken.end - taken.start) as u32;
            let (now, later) = rest.split_at(count as usize * BLOCK);
            self.pending.extend_from_slice(now);
            if self.pending.len() >= WRITE_BYTES {
                self.flush()?;
            }
            push(
                extents,
                Extent {
                    logical,
                    physical: taken.start,
                    blocks: count,
                },
            );
            (rest, logical) = (later, logical + count);
        }
        Ok(())
    }

    /// Takes one block, whose bytes may depend on its number.
    pub(super) fn append_one(&mut self, bytes: impl FnOnce(u64) -> Vec<u8>) -> Result<u64, Error> {
        let block = self.take(1)?.start;
        let bytes = bytes(block);
        debug_assert_eq!(bytes.len(), BLOCK);
        self.pending.extend_from_slice(&bytes);
        if self.pending.len() >= WRITE_BYTES {
            self.flush()?;
        }
        Ok(block)
    }

    fn take(&mut self, wanted: u64) -> Result<Range<u64>, Error> {
        let mut cursor = self.cursor.clone();
        let taken = cursor.take_some(wanted);
        if taken.end > MAX_BLOCKS {
            let (bytes, limit_bytes) = (taken.end * BLOCK_BYTES, MAX_BLOCKS * BLOCK_BYTES);
            return Err(Error::TooLarge {
                what: "the file system",
                bytes,
                limit_bytes,
            });
        }
        self.count((taken.end - taken.start) * BLOCK_BYTES)?;
        if taken.start != self.cursor.end() {
            self.flush()?;
        }
        self.cursor = cursor;
        Ok(taken)
    }

    fn count(&mut self, bytes: u64) -> Result<(), Error> {
        let allowed = self.written_limit_bytes;
        if bytes > allowed - self.written_bytes {
            return Err(Error::Limit {
                name: "the image".to_owned(),
                limit: "bytes written to it",
                allowed,
            });
        }
        self.written_bytes += bytes;
        Ok(())
    }

    fn written_end(&self) -> u64 {
        self.cursor.end() - (self.pending.len() / BLOCK) as u64
    }

    fn flush(&mut self) -> Result<(), Error> {
        let start = self.written_end() * BLOCK_BYTES;
        self.file
            .write_all_at(&self.pending, start)
            .map_err(io_error("write", &self.path))?;
        self.pending.clear();
        Ok(())
    }

    /// All bytes are in the file, and what was freed is a hole in it.
    pub(super) fn close(mut self) -> Result<Closed, Error> {
        self.flush()?;
        let free = merged(self.free);
        let closed = Closed {
            file: self.file,
            path: self.path,
            cursor: self.cursor,
            free,
        };
        closed
            .free
            .iter()
            .try_for_each(|range| closed.punch(range))?;
        Ok(closed)
    }
}

/// An image to which blocks are written wherever they belong.
#[derive(Debug)]
pub(super) struct Closed {
    file: File,
    path: PathBuf,
    pub cursor: Cursor,
    /// Blocks below the cursor that nobody has, sorted; none touches another.
    pub free: Vec<Range<u64>>,
}

impl Closed {
    pub(super) fn write(&self, block: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write_at(block * BLOCK_BYTES, bytes)
    }

    pub(super) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(io_error("write", &self.path))
    }

    pub(super) fn set_blocks(&self, blocks: u64) -> Result<(), Error> {
        self.file
            .set_len(blocks * BLOCK_BYTES)
            .map_err(io_error("grow", &self.path))
    }

    /// Also leaves out blocks that were not taken.
    pub(super) fn leave_out(&mut self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut free = std::mem::take(&mut self.free);
        free.extend(ranges);
        self.free = merged(free);
    }

    fn punch(&self, range: &Range<u64>) -> Result<(), Error> {
        let (offset, bytes) = (
            range.start * BLOCK_BYTES,
            (range.end - range.start) * BLOCK_BYTES,
        );
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, offset, bytes) {
            // Equal input gives equal bytes, also where there are no holes.
            Err(rustix::io::Errno::OPNOTSUPP) => range
                .clone()
                .try_for_each(|block| self.write(block, &ZEROS)),
            done => done
                .map_err(io::Error::from)
                .map_err(io_error("punch a hole into", &self.path)),
        }
    }
}

fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, before| {
        let touches = next.start <= before.end;
        if touches {
            before.end = before.end.max(next.end);
        }
        touches
    });
    ranges
}

fn push(extents: &mut Vec<Extent>, next: Extent) {
    if let Some(last) = extents.last_mut() {
        let follows = last.logical + last.blocks == next.logical
            && last.physical + u64::from(last.blocks) == next.physical;
        if follows && last.blocks + next.blocks <= MAX_EXTENT_BLOCKS {
            last.blocks += next.blocks;
            return;
        }
    }
    extents.push(next);
}

/// A file on its way into the image. Without `finish` its blocks are free again.
#[derive(Debug)]
pub(crate) struct FileWriter<'a> {
    area: &'a mut DataArea,
    content: Content,
    /// How many bytes came.
    at: u64,
    max_extents: u64,
}

impl FileWriter<'_> {
    /// Takes the next bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.check_room(bytes.len() as u64)?;
        let mut rest = bytes;
        if !self.area.partial.is_empty() {
            rest = self.fill_partial(rest)?;
        }
        let (blocks, end) = rest.split_at(rest.len() / BLOCK * BLOCK);
        self.put(blocks)?;
        self.area.partial.extend_from_slice(end);
        self.at += end.len() as u64;
        Ok(())
    }

    /// Takes zeros, without looking at each.
    pub(crate) fn skip(&mut self, zeros: u64) -> Result<(), Error> {
        self.check_room(zeros)?;
        let mut rest = zeros;
        if !self.area.partial.is_empty() {
            let missing = rest.min((BLOCK - self.area.partial.len()) as u64);
            self.fill_partial(&ZEROS[..missing as usize])?;
            rest -= missing;
        }
        self.area
            .partial
            .resize(self.area.partial.len() + (rest % BLOCK_BYTES) as usize, 0);
        self.at += rest;
        Ok(())
    }

    /// Where its bytes are.
    pub(crate) fn finish(mut self) -> Result<Content, Error> {
        let missing = self.area.partial.len().next_multiple_of(BLOCK) - self.area.partial.len();
        self.fill_partial(&ZEROS[..missing])?;
        Ok(std::mem::take(&mut self.content))
    }

    fn check_room(&self, bytes: u64) -> Result<(), Error> {
        match bytes <= self.content.bytes - self.at.min(self.content.bytes) {
            true => Ok(()),
            false => Err(Error::LongerThanAnnounced {
                announced_bytes: self.content.bytes,
            }),
        }
    }

    fn check_extents(&self) -> Result<(), Error> {
        match self.content.extents.len() as u64 <= self.max_extents {
            true => Ok(()),
            false => Err(Error::Limit {
                name: "a file".to_owned(),
                limit: "extents",
                allowed: self.max_extents,
            }),
        }
    }

    /// Takes what a begun block lacks, and gives back the rest.
    fn fill_partial<'b>(&mut self, bytes: &'b [u8]) -> Result<&'b [u8], Error> {
        let missing = bytes.len().min(BLOCK - self.area.partial.len());
        let (now, rest) = bytes.split_at(missing);
        self.area.partial.extend_from_slice(now);
        self.at += now.len() as u64;
        if self.area.partial.len() == BLOCK {
            let block = std::mem::take(&mut self.area.partial);
            self.at -= BLOCK_BYTES;
            self.put(&block)?;
            self.area.partial = block;
            self.area.partial.clear();
        }
        Ok(rest)
    }

    /// Takes whole blocks, at the beginning of one.
    fn put(&mut self, blocks: &[u8]) -> Result<(), Error> {
        let (blocks, _) = blocks.as_chunks::<BLOCK>();
        for run in blocks.chunk_by(|one, next| (*one == ZEROS) == (*next == ZEROS)) {
            if run[0] != ZEROS {
                let logical = (self.at / BLOCK_BYTES) as u32;
                self.area
                    .append(run.as_flattened(), logical, &mut self.content.extents)?;
                self.check_extents()?;
            }
            self.at += run.as_flattened().len() as u64;
        }
        Ok(())
    }
}

impl Drop for FileWriter<'_> {
    fn drop(&mut self) {
        self.area.forget(&self.content.extents);
    }
}
