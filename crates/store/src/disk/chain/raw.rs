//! Writes a disk as one raw file, as its guest sees it.
//!
//! Always: zeros become holes where the file system supports them. Tables that no overlay has take
//! no time, so the time depends on the stored data, not on the size. When it fails: the file is
//! incomplete, and is removed together with its staging directory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::{CLUSTER, CLUSTERS_PER_TABLE, Chain, L2_SPAN, Where};
use crate::fs::{Output, ReadAt};
use crate::{Error, Progress, progress};

/// How much is copied at once.
const PIECE: u64 = 1 << 20;
/// The unit that becomes a hole if it is all zeros.
const BLOCK: usize = 4096;
static ZEROS: [u8; CLUSTER as usize] = [0; CLUSTER as usize];

/// A range of the disk, by its origin.
enum Part {
    Base(Range<u64>),
    Zero(Range<u64>),
    /// At most one cluster.
    Layer(Range<u64>),
}

impl Chain {
    /// Writes the disk into a new file, from front to back.
    pub(crate) fn write_to(&self, out: &mut Output, progress: &dyn Progress) -> Result<(), Error> {
        let mut buffer = vec![0; PIECE as usize];
        self.each_part(progress, &mut |part| match part {
            Part::Zero(range) => out.add_zeros(range.end - range.start),
            Part::Base(range) => self.copy_base(range, &mut buffer, out, progress),
            Part::Layer(range) => {
                let piece = &mut buffer[..(range.end - range.start) as usize];
                self.read_at(range.start, piece)?;
                out.add(piece)
            }
        })
    }

    /// Turns a copy of the root file system into the disk.
    pub(crate) fn write_over(&self, file: &File, progress: &dyn Progress) -> Result<(), Error> {
        // The invisible part of the root file system becomes a hole.
        for bytes in [self.base_bytes, self.bytes] {
            file.set_len(bytes)
                .map_err(Error::layer_io("measure a disk", bytes))?;
        }
        let mut buffer = vec![0; CLUSTER as usize];
        self.each_part(progress, &mut |part| match part {
            Part::Base(_) => Ok(()),
            Part::Zero(range) => self.clear(file, range),
            Part::Layer(range) => {
                let piece = &mut buffer[..(range.end - range.start) as usize];
                self.read_at(range.start, piece)?;
                self.clear(file, range.clone())?;
                write_blocks(file, piece, range.start)
                    .map_err(Error::layer_io("write a disk", range.start))
            }
        })
    }

    fn each_part(
        &self,
        progress: &dyn Progress,
        visit: &mut dyn FnMut(Part) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for index in 0..self.bytes.div_ceil(L2_SPAN) {
            progress::check(progress)?;
            let span = index * L2_SPAN..((index + 1) * L2_SPAN).min(self.bytes);
            let bytes = span.end - span.start;
            let table = self.table(index)?;
            if table.is_none() {
                self.visit_below(span, visit)?;
            } else {
                let first = index * CLUSTERS_PER_TABLE;
                for cluster in first..first + bytes.div_ceil(CLUSTER) {
                    let range = cluster * CLUSTER..((cluster + 1) * CLUSTER).min(self.bytes);
                    match self.place(&table, cluster) {
                        Where::Base => self.visit_below(range, visit)?,
                        Where::Zero => visit(Part::Zero(range))?,
                        Where::Layer { .. } => visit(Part::Layer(range))?,
                    }
                }
            }
            progress.advance(bytes);
        }
        Ok(())
    }

    /// Visits a range that no overlay has: the root file system, and zeros after its end.
    fn visit_below(
        &self,
        range: Range<u64>,
        visit: &mut dyn FnMut(Part) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let end = self.base_bytes.clamp(range.start, range.end);
        for part in [Part::Base(range.start..end), Part::Zero(end..range.end)] {
            visit(part)?;
        }
        Ok(())
    }

    /// Copies a range of the root file system. Holes are not read.
    fn copy_base(
        &self,
        range: Range<u64>,
        buffer: &mut [u8],
        out: &mut Output,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            progress::check(progress)?;
            let data = self
                .base
                .next_data(at)
                .map_err(Error::layer_io("read a disk", at))?;
            let data = data.map_or(range.end..range.end, |data| {
                data.start.min(range.end)..data.end.min(range.end)
            });
            out.add_zeros(data.start - at)?;
            at = data.start;
            while at < data.end {
                let piece = &mut buffer[..(data.end - at).min(PIECE) as usize];
                ReadAt::read_exact_at(&self.base, piece, at)
                    .map_err(Error::layer_io("read a disk", at))?;
                out.add(piece)?;
                at += piece.len() as u64;
            }
        }
        Ok(())
    }

    /// Removes the bytes of a copy of the root file system in a range.
    fn clear(&self, file: &File, range: Range<u64>) -> Result<(), Error> {
        let end = range.end.min(self.base_bytes);
        if range.start >= end {
            return Ok(());
        }
        punch(file, range.start..end).map_err(Error::layer_io("write a disk", range.start))
    }
}

/// Makes a hole, or writes zeros on a file system without holes.
fn punch(file: &File, range: Range<u64>) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(file, flags, range.start, range.end - range.start) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let mut starts = range.clone().step_by(CLUSTER as usize);
            starts.try_for_each(|at| {
                file.write_all_at(&ZEROS[..(range.end - at).min(CLUSTER) as usize], at)
            })
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Writes the blocks that are not zero. The file has only zeros there.
fn write_blocks(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    for (block, at) in bytes.chunks(BLOCK).zip((offset..).step_by(BLOCK)) {
        if *block != ZEROS[..block.len()] {
            file.write_all_at(block, at)?;
        }
    }
    Ok(())
}
