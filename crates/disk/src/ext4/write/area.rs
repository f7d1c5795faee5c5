//! The image file while it is filled: which blocks are allocated, and the bytes in them.
//!
//! Always: blocks are allocated from low to high and written in that order, a few MiB at a time.
//! Freed blocks are not allocated again; they are free in the finished file system, and holes in
//! the image.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use super::error::{Error, io_error};
use super::layout::{BLOCK, Cursor, MAX_BLOCKS};
use super::tree::{BLOCK_BYTES, Content, Extent, MAX_FILE_BYTES};
use crate::ext4::format::MAX_EXTENT_BLOCKS;

/// How much is written at once.
const WRITE_BYTES: usize = 2 << 20;
static ZEROS: [u8; BLOCK] = [0; BLOCK];

/// The image file, and the blocks that are allocated in it.
#[derive(Debug)]
pub struct DataArea {
    file: File,
    path: PathBuf,
    cursor: Cursor,
    /// The bytes of the last allocated blocks, which are not yet in the image file.
    pending: Vec<u8>,
    /// The first bytes of an incomplete block of the current file.
    partial: Vec<u8>,
    free: Vec<Range<u64>>,
    /// How much may be allocated, and how much was.
    written_limit_bytes: u64,
    written_bytes: u64,
}

impl DataArea {
    /// Creates an empty image, to which at most `written_limit_bytes` are written. `path` must not
    /// exist.
    pub fn create(path: &Path, written_limit_bytes: u64) -> Result<Self, Error> {
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

    /// Starts a file of `bytes`, to be written from front to back. Whole blocks of zeros become
    /// holes, as do bytes that are never written. The file may have at most `max_extents`, which
    /// are kept in memory.
    pub fn file(&mut self, bytes: u64, max_extents: u64) -> Result<FileWriter<'_>, Error> {
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

    /// Frees the blocks of a file.
    pub fn free(&mut self, content: &Content) {
        self.forget(&content.extents);
    }

    /// Reads the first bytes of a file, at most `limit`.
    pub fn read(&self, content: &Content, limit: u64) -> Result<Vec<u8>, Error> {
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

    /// Reads `bytes` from the block `first` on.
    pub fn read_blocks(&self, first: u64, bytes: u64) -> Result<Vec<u8>, Error> {
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

    /// Appends whole blocks, which are the blocks of a file from `logical` on.
    pub(super) fn append(
        &mut self,
        blocks: &[u8],
        logical: u32,
        extents: &mut Vec<Extent>,
    ) -> Result<(), Error> {
        let mut rest = blocks;
        let mut logical = logical;
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
            rest = later;
            logical += count;
        }
        Ok(())
    }

    /// Appends one block, whose bytes may depend on its number.
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
            return Err(Error::TooLarge {
                what: "the file system",
                bytes: taken.end * BLOCK_BYTES,
                limit_bytes: MAX_BLOCKS * BLOCK_BYTES,
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
        let limit_bytes = self.written_limit_bytes;
        if bytes > limit_bytes - self.written_bytes {
            return Err(Error::TooMuchWritten { limit_bytes });
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

    /// Writes the pending bytes, and turns freed blocks into holes.
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

/// An image with all bytes of files, to which other blocks are written in any order.
#[derive(Debug)]
pub(super) struct Closed {
    file: File,
    path: PathBuf,
    pub cursor: Cursor,
    /// Free blocks below the cursor: sorted ranges that do not touch each other.
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

    /// Marks blocks that were skipped as free, too.
    pub(super) fn leave_out(&mut self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut free = std::mem::take(&mut self.free);
        free.extend(ranges);
        self.free = merged(free);
    }

    fn punch(&self, range: &Range<u64>) -> Result<(), Error> {
        let offset = range.start * BLOCK_BYTES;
        let bytes = (range.end - range.start) * BLOCK_BYTES;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, offset, bytes) {
            // Equal input must give equal bytes on a file system without holes, too.
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

/// Writes one file into the image. Dropped without `finish`, it frees its blocks.
#[derive(Debug)]
pub struct FileWriter<'a> {
    area: &'a mut DataArea,
    content: Content,
    /// How many bytes were written or skipped.
    at: u64,
    max_extents: u64,
}

impl FileWriter<'_> {
    /// Writes the next bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
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

    /// Writes zeros, without comparing each.
    pub fn skip(&mut self, zeros: u64) -> Result<(), Error> {
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

    /// Ends the file. Returns the places of its bytes.
    pub fn finish(mut self) -> Result<Content, Error> {
        let missing = self.area.partial.len().next_multiple_of(BLOCK) - self.area.partial.len();
        self.fill_partial(&ZEROS[..missing])?;
        Ok(std::mem::take(&mut self.content))
    }

    fn check_room(&self, bytes: u64) -> Result<(), Error> {
        if bytes <= self.content.bytes - self.at.min(self.content.bytes) {
            return Ok(());
        }
        Err(Error::LongerThanAnnounced {
            announced_bytes: self.content.bytes,
        })
    }

    fn check_extents(&self) -> Result<(), Error> {
        if self.content.extents.len() as u64 <= self.max_extents {
            return Ok(());
        }
        Err(Error::TooManyExtents {
            limit: self.max_extents,
        })
    }

    /// Adds bytes to an incomplete block until it is full. Returns the remaining bytes.
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

    /// Writes whole blocks, from a block boundary on.
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
