//! Checks whether an overlay is intact. Needed after a power loss, because overlays are written
//! without flushes.
//!
//! The check walks the header, L1 and L2 tables, refcount table and blocks. Every cluster they
//! refer to must be aligned, inside the file and used once, and its refcount must be at least the
//! number of its uses. A cluster that is counted but not used only wastes space.
//!
//! Always: memory is one bit per cluster of the file and three clusters of buffer, whatever the
//! numbers in the file are. Nothing is repaired.
//!
//! Deliberately absent: compressed clusters, internal snapshots, backing file names, extended L2
//! entries. Our overlays have none, and a file that has them is refused.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sandtree_disk::qcow2::{L1_OFFSET_AT, Layout, REFCOUNT_TABLE_OFFSET_AT};

use super::entry::{self, L2Entry};
use super::header;
use crate::Error;
pub use crate::damage::disk::Damage;
use crate::damage::disk::require;
use crate::fs::{self, io_error};

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Usable. Leaked clusters only waste space.
    Clean { leaked_clusters: u64 },
    /// Its use would lose data or read wrong data.
    Corrupt(Damage),
}

/// Checks a file. An error means that it could not be read, not that it is damaged.
pub fn file(path: &Path) -> Result<Verdict, Error> {
    let file = File::open(path).map_err(io_error("open", path))?;
    let len = file.metadata().map_err(io_error("look at", path))?.len();
    run(&file, len).map_err(io_error("read", path))
}

/// Checks a file of the store, and returns the size of the guest's disk in it.
pub(crate) fn layer(file: &dyn fs::ReadAt) -> io::Result<Result<u64, Damage>> {
    let len = file.bytes()?;
    if let Verdict::Corrupt(damage) = run(file, len)? {
        return Ok(Err(damage));
    }
    let mut bytes = [0; header::LEN];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(header::parse(&bytes).map(|layout| layout.size))
}

/// Checks an overlay in memory.
pub fn bytes(bytes: &[u8]) -> io::Result<Verdict> {
    run(bytes, bytes.len() as u64)
}

trait ReadAt {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

impl ReadAt for dyn fs::ReadAt + '_ {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        buffer.copy_from_slice(&self[offset as usize..][..buffer.len()]);
        Ok(())
    }
}

/// Why a walk stops.
enum Stop {
    Damage(Damage),
    Io(io::Error),
}

impl From<Damage> for Stop {
    fn from(damage: Damage) -> Self {
        Self::Damage(damage)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn run(source: &(impl ReadAt + ?Sized), len: u64) -> io::Result<Verdict> {
    match Walk::new(source, len).and_then(Walk::run) {
        Ok(leaked_clusters) => Ok(Verdict::Clean { leaked_clusters }),
        Err(Stop::Damage(damage)) => Ok(Verdict::Corrupt(damage)),
        Err(Stop::Io(error)) => Err(error),
    }
}

/// Limits the bitmap of used clusters to 32 MiB.
const MAX_FILE_BYTES: u64 = 16 << 40;
/// QEMU's limit.
const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;

struct Walk<'a, S: ?Sized> {
    source: &'a S,
    len: u64,
    layout: Layout,
    /// One bit per cluster of the file: whether it is used.
    used: Vec<u64>,
}

impl<'a, S: ReadAt + ?Sized> Walk<'a, S> {
    fn new(source: &'a S, len: u64) -> Result<Self, Stop> {
        require(len >= header::LEN as u64, Damage::Short)?;
        require(
            len <= MAX_FILE_BYTES,
            Damage::Unexpected("more than 16 TiB"),
        )?;
        let mut bytes = [0; header::LEN];
        source.read_at(&mut bytes, 0)?;
        let layout = header::parse(&bytes)?;
        let clusters = len.div_ceil(layout.cluster.bytes());
        Ok(Self {
            source,
            len,
            layout,
            used: vec![0; clusters.div_ceil(64) as usize],
        })
    }

    /// Returns the number of leaked clusters.
    fn run(mut self) -> Result<u64, Stop> {
        self.take(0, 0)?;
        self.take_l1()?;
        self.take_refcounts()?;
        self.compare_counts()
    }

    fn cluster(&self) -> u64 {
        self.layout.cluster.bytes()
    }

    fn take_l1(&mut self) -> Result<(), Stop> {
        let offset = self.layout.l1_offset;
        let entries = u64::from(self.layout.l1_entries);
        header::check_l1_size(&self.layout)?;
        self.take_table(L1_OFFSET_AT, offset, entries * 8)?;
        self.each_entry(offset, entries, Self::take_l2)
    }

    fn take_l2(&mut self, at: u64, entry: u64) -> Result<(), Stop> {
        let Some(offset) = entry::l1(at, entry)? else {
            return Ok(());
        };
        self.take_table(at, offset, self.cluster())?;
        self.each_entry(offset, self.cluster() / 8, Self::take_data)
    }

    fn take_data(&mut self, at: u64, entry: u64) -> Result<(), Stop> {
        match entry::l2(at, entry, self.layout.cluster)? {
            L2Entry::Below | L2Entry::Zero(None) => Ok(()),
            // A cluster that is allocated for zeros may never have been written, so the file may
            // end before it.
            L2Entry::Zero(Some(offset))
                if offset >= self.len && offset.is_multiple_of(self.cluster()) =>
            {
                Ok(())
            }
            L2Entry::Zero(Some(offset)) | L2Entry::Data(offset) => self.take(at, offset),
        }
    }

    fn take_refcounts(&mut self) -> Result<(), Stop> {
        let offset = self.layout.refcount_table_offset;
        let clusters = self.layout.refcount_table_clusters;
        let bytes = u64::from(clusters) * self.cluster();
        require(
            clusters > 0 && bytes <= MAX_REFCOUNT_TABLE_BYTES.max(self.cluster()),
            Damage::RefcountTableSize,
        )?;
        self.take_table(REFCOUNT_TABLE_OFFSET_AT, offset, bytes)?;
        self.each_entry(offset, bytes / 8, |walk, at, block| match block {
            0 => Ok(()),
            block => walk.take_table(at, block, walk.cluster()),
        })
    }

    /// Marks the clusters of a table as used; all of the table must be in the file.
    fn take_table(&mut self, at: u64, offset: u64, bytes: u64) -> Result<(), Stop> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.len);
        require(end.is_some(), Damage::Beyond { at, offset })?;
        (0..bytes.div_ceil(self.cluster()))
            .try_for_each(|index| self.take(at, offset + index * self.cluster()))
    }

    fn take(&mut self, at: u64, offset: u64) -> Result<(), Stop> {
        require(
            offset.is_multiple_of(self.cluster()),
            Damage::Unaligned { at, offset },
        )?;
        require(offset < self.len, Damage::Beyond { at, offset })?;
        let cluster = offset / self.cluster();
        let word = &mut self.used[(cluster / 64) as usize];
        let bit = 1 << (cluster % 64);
        require(*word & bit == 0, Damage::Shared { offset })?;
        *word |= bit;
        Ok(())
    }

    /// Calls `visit` with the offset and the value of each entry, a cluster of them at a time.
    fn each_entry(
        &mut self,
        offset: u64,
        entries: u64,
        mut visit: impl FnMut(&mut Self, u64, u64) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let end = offset + entries * 8;
        let mut buffer = vec![0; self.cluster() as usize];
        for start in (offset..end).step_by(buffer.len()) {
            let piece = &mut buffer[..self.cluster().min(end - start) as usize];
            self.source.read_at(piece, start)?;
            let (entries, _) = piece.as_chunks();
            for (at, entry) in (start..).step_by(8).zip(entries) {
                visit(self, at, u64::from_be_bytes(*entry))?;
            }
        }
        Ok(())
    }

    fn compare_counts(mut self) -> Result<u64, Stop> {
        let offset = self.layout.refcount_table_offset;
        let entries = u64::from(self.layout.refcount_table_clusters) * self.cluster() / 8;
        let per_block = self.cluster() / 2;
        let mut leaked = 0;
        let mut first = 0;
        self.each_entry(offset, entries, |walk, _, block| {
            leaked += walk.compare_block(first, block)?;
            first += per_block;
            Ok(())
        })?;
        self.require_none_used_from(first)?;
        Ok(leaked)
    }

    fn compare_block(&self, first: u64, block: u64) -> Result<u64, Stop> {
        let in_file = self.len.div_ceil(self.cluster());
        if first >= in_file {
            return Ok(0);
        }
        let mut counts = vec![0; self.cluster() as usize];
        if block != 0 {
            self.source.read_at(&mut counts, block)?;
        }
        let mut leaked = 0;
        for (cluster, count) in (first..in_file).zip(counts.chunks_exact(2)) {
            let references = u16::from(self.is_used(cluster));
            let count = u16::from_be_bytes([count[0], count[1]]);
            require(
                count >= references,
                Damage::Uncounted {
                    offset: cluster * self.cluster(),
                },
            )?;
            leaked += u64::from(count > references);
        }
        Ok(leaked)
    }

    fn require_none_used_from(&self, first: u64) -> Result<(), Stop> {
        let in_file = self.len.div_ceil(self.cluster());
        match (first..in_file).find(|cluster| self.is_used(*cluster)) {
            Some(cluster) => Err(Damage::Uncounted {
                offset: cluster * self.cluster(),
            }
            .into()),
            None => Ok(()),
        }
    }

    fn is_used(&self, cluster: u64) -> bool {
        self.used[(cluster / 64) as usize] & (1 << (cluster % 64)) != 0
    }
}

#[cfg(test)]
mod tests;
