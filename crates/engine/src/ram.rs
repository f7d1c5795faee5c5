//! The guest's RAM in a running QEMU, seen from outside: which pages were written, and what they
//! hold.
//!
//! Always: pages are distinguished by what the kernel says of the *mapping*, never by page frame
//! numbers. A page that is swapped out counts like one that is present. The number of a process
//! that is gone is never taken for QEMU: after every answer the code checks that QEMU still lives.
//! When it fails: pages that a failed scan found are kept and returned by the next scan, because
//! finding them has already taken them off the kernel's list.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};

use crate::error::{Error, Untracked};
use crate::preload::format::PAGE_BYTES;

/// The guest's RAM. Clones are of the same. All calls block.
#[derive(Clone, Debug)]
pub struct GuestMemory {
    pid: u32,
    pidfd: Arc<OwnedFd>,
    place: Place,
    mapped: Mapped,
    tracking: Result<(), Untracked>,
    protecting: Protecting,
    /// Found written, not returned yet. Only a scan that failed leaves something here.
    found: Arc<Mutex<Vec<ByteRun>>>,
}

/// Where it lies in the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub address: u64,
    pub bytes: u64,
}

/// A part of guest RAM: whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteRun {
    pub offset: u64,
    pub bytes: u64,
}

/// What QEMU's RAM is a mapping of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// Laid by our library.
    Preload { regions: u64 },
    /// The file QEMU was given, because there is no library.
    File { reason: String },
}

/// Which range is given to the kernel to protect again. It drops KVM's mappings of the whole range,
/// whatever it finds there, and a guest under KVM then takes a fault for each page it uses next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protecting {
    /// All of memory, in one walk.
    All,
    /// What a first walk finds, and not much around it.
    Found,
}

/// Which pages count as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracking {
    /// Since the last scan of this kind.
    WriteProtect,
    /// Since the last scan of this kind.
    SoftDirty,
    /// Since the process started.
    Anonymous,
}

impl GuestMemory {
    pub(crate) fn new(
        pid: u32,
        pidfd: Arc<OwnedFd>,
        place: Place,
        mapped: Mapped,
        tracking: Result<(), Untracked>,
    ) -> Self {
        Self {
            pid,
            pidfd,
            place,
            mapped,
            tracking,
            protecting: Protecting::All,
            found: Arc::default(),
        }
    }

    pub(crate) fn protecting(self, protecting: Protecting) -> Self {
        Self { protecting, ..self }
    }

    pub fn bytes(&self) -> u64 {
        self.place.bytes
    }

    /// Where it begins in QEMU's process.
    pub fn address(&self) -> u64 {
        self.place.address
    }

    /// Which way the memory was laid.
    pub fn mapped(&self) -> Mapped {
        self.mapped.clone()
    }

    /// Whether [`Tracking::WriteProtect`] works here, or why not.
    pub fn write_protected(&self) -> Result<(), Untracked> {
        self.tracking.clone()
    }

    /// The pages written, ascending, and for the kinds that look back to the last scan: starts
    /// anew. The guest must be stopped, or a page written meanwhile may or may not be among them.
    pub fn written(&self, how: Tracking) -> Result<Vec<ByteRun>, Error> {
        let runs = match how {
            Tracking::WriteProtect => self.scan_protected()?,
            Tracking::SoftDirty => self.scan_soft_dirty()?,
            Tracking::Anonymous => self.scan_pagemap(is_written)?,
        };
        self.still_lives()?;
        Ok(runs)
    }

    /// How many bytes [`Tracking::WriteProtect`] would find now. Changes nothing.
    pub fn pending(&self) -> Result<u64, Error> {
        let mut bytes = 0;
        self.scan(self.all(), sys::Protect::Leave, |start, end| {
            bytes += end - start
        })?;
        self.still_lives()?;
        Ok(bytes)
    }

    /// Appends the bytes of the runs, in order. All of them, or it is an error.
    pub fn read(&self, runs: &[ByteRun], into: &mut Vec<u8>) -> Result<(), Error> {
        let outside = runs.iter().find(|run| {
            run.offset
                .checked_add(run.bytes)
                .is_none_or(|end| end > self.bytes())
        });
        if let Some(run) = outside {
            return Err(Error::Spec {
                detail: format!("{run:?} is not within {} bytes of memory", self.bytes()),
            });
        }
        let failed = |source| Error::Io {
            op: "read the memory of",
            path: self.proc(""),
            source,
        };
        for batch in batches(runs) {
            let batch: Vec<_> = batch
                .iter()
                .map(|run| (self.place.address + run.offset, run.bytes))
                .collect();
            sys::read_memory(self.pid, &batch, into).map_err(failed)?;
        }
        self.still_lives()
    }

    /// Writes to another place of the stopped machine's process.
    pub(crate) fn write_beside(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let failed = |source| Error::Io {
            op: "write to the memory of",
            path: self.proc(""),
            source,
        };
        sys::write_memory(self.pid, address, bytes).map_err(failed)?;
        self.still_lives()
    }

    /// The scan that reports and protects again in one step.
    fn scan_protected(&self) -> Result<Vec<ByteRun>, Error> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges = match self.protecting {
            Protecting::All => vec![self.all()],
            Protecting::Found => {
                let mut written = Vec::new();
                self.scan(self.all(), sys::Protect::Leave, |start, end| {
                    written.push(start..end)
                })?;
                near(written)
            }
        };
        for range in ranges {
            self.scan(range, sys::Protect::Again, |start, end| {
                found.push(self.run(start, end))
            })?;
        }
        Ok(joined(std::mem::take(&mut *found)))
    }

    fn all(&self) -> Range<u64> {
        self.place.address..self.place.address + self.place.bytes
    }

    fn scan(
        &self,
        range: Range<u64>,
        protect: sys::Protect,
        mut each: impl FnMut(u64, u64),
    ) -> Result<(), Error> {
        self.tracking
            .clone()
            .map_err(|untracked| Error::Untracked { source: untracked })?;
        let path = self.proc("pagemap");
        let pagemap = File::open(&path).map_err(Error::io("open", &path))?;
        let Range { start: mut at, end } = range;
        while at < end {
            let scanned =
                sys::scan_written(&pagemap, at, end, protect).map_err(Error::io("scan", &path))?;
            scanned
                .runs
                .iter()
                .for_each(|(start, stop)| each(*start, *stop));
            at = scanned.walked_to;
        }
        Ok(())
    }

    fn scan_soft_dirty(&self) -> Result<Vec<ByteRun>, Error> {
        let runs = self.scan_pagemap(is_soft_dirty)?;
        let path = self.proc("clear_refs");
        // 4 clears the soft-dirty bits.
        std::fs::write(&path, "4").map_err(Error::io("write", &path))?;
        Ok(runs)
    }

    fn scan_pagemap(&self, wanted: fn(u64) -> bool) -> Result<Vec<ByteRun>, Error> {
        const PAGES_READ: usize = 64 << 10;
        const ENTRY_BYTES: u64 = 8;
        let path = self.proc("pagemap");
        let pagemap = File::open(&path).map_err(Error::io("open", &path))?;
        let first = self.place.address / PAGE_BYTES;
        let pages = (self.place.bytes / PAGE_BYTES) as usize;
        let mut buffer = vec![0; pages.min(PAGES_READ) * ENTRY_BYTES as usize];
        let mut runs = Vec::new();
        for start in (0..pages).step_by(PAGES_READ) {
            let piece = &mut buffer[..(pages - start).min(PAGES_READ) * ENTRY_BYTES as usize];
            let offset = (first + start as u64) * ENTRY_BYTES;
            pagemap
                .read_exact_at(piece, offset)
                .map_err(Error::io("read", &path))?;
            collect(piece, start as u64, wanted, &mut runs);
        }
        Ok(runs)
    }

    fn run(&self, start: u64, end: u64) -> ByteRun {
        ByteRun {
            offset: start - self.place.address,
            bytes: end - start,
        }
    }

    fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.pid))
    }

    /// As long as QEMU is not reaped, its number is its own; so it was before.
    fn still_lives(&self) -> Result<(), Error> {
        let mut watched = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let ended = poll(
            &mut watched,
            Some(&rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        );
        match ended {
            Ok(0) => Ok(()),
            Ok(_) => Err(Error::io("look into", self.proc(""))(
                io::ErrorKind::NotFound.into(),
            )),
            Err(errno) => Err(Error::io("look into", self.proc(""))(errno.into())),
        }
    }
}

const SOFT_DIRTY: u64 = 1 << 55;
/// Set for pages of files and shared memory. A private page that was written is neither.
const FILE_OR_SHARED: u64 = 1 << 61;
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// Whether a page is this process's own copy, by its pagemap entry.
fn is_written(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0 && entry & FILE_OR_SHARED == 0
}

fn is_soft_dirty(entry: u64) -> bool {
    is_written(entry) && entry & SOFT_DIRTY != 0
}

/// Appends the runs of wanted pages; `first` is the number of the first page.
fn collect(entries: &[u8], first: u64, wanted: fn(u64) -> bool, runs: &mut Vec<ByteRun>) {
    for (page, entry) in (first..).zip(entries.as_chunks().0) {
        if wanted(u64::from_ne_bytes(*entry)) {
            push(
                runs,
                ByteRun {
                    offset: page * PAGE_BYTES,
                    bytes: PAGE_BYTES,
                },
            );
        }
    }
}

/// Appends a run that begins no earlier than the last one, as part of that one where they touch.
fn push(runs: &mut Vec<ByteRun>, run: ByteRun) {
    match runs.last_mut() {
        Some(last) if run.offset <= last.offset + last.bytes => {
            last.bytes = last.bytes.max(run.offset + run.bytes - last.offset);
        }
        _ => runs.push(run),
    }
}

/// Ranges in order, joined over gaps that cost less than another call. Where one call of a scan
/// ends and the next begins, the kernel may report the same pages twice.
fn near(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    const GAP_BYTES: u64 = 1 << 20;
    ranges.sort_unstable_by_key(|range| range.start);
    ranges
        .into_iter()
        .fold(Vec::new(), |mut joined: Vec<Range<u64>>, range| {
            match joined.last_mut() {
                Some(last) if range.start.saturating_sub(last.end) <= GAP_BYTES => {
                    last.end = last.end.max(range.end)
                }
                _ => joined.push(range),
            }
            joined
        })
}

/// Sorted and joined: what a failed scan left behind lies anywhere.
fn joined(mut runs: Vec<ByteRun>) -> Vec<ByteRun> {
    runs.sort_unstable();
    runs.into_iter().fold(Vec::new(), |mut joined, run| {
        push(&mut joined, run);
        joined
    })
}

/// Splits runs into what one call takes: its number of ranges and its number of bytes.
fn batches(runs: &[ByteRun]) -> Vec<Vec<ByteRun>> {
    const RANGES_MAX: usize = 1024;
    const BYTES_MAX: u64 = 1 << 30;
    let mut batches: Vec<Vec<ByteRun>> = Vec::new();
    let mut room = 0;
    for run in runs {
        let mut rest = *run;
        while rest.bytes > 0 {
            let full = batches.last().is_none_or(|batch| batch.len() == RANGES_MAX);
            if room == 0 || full {
                batches.push(Vec::new());
                room = BYTES_MAX;
            }
            let bytes = rest.bytes.min(room);
            batches.last_mut().expect("one was pushed").push(ByteRun {
                offset: rest.offset,
                bytes,
            });
            room -= bytes;
            rest = ByteRun {
                offset: rest.offset + bytes,
                bytes: rest.bytes - bytes,
            };
        }
    }
    batches
}

#[allow(
    unsafe_code,
    reason = "PAGEMAP_SCAN and process_vm_readv have no safe form, nor has process_vm_writev"
)]
mod sys {
    use super::{AsRawFd, File, io};

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct PageRegion {
        start: u64,
        end: u64,
        categories: u64,
    }

    #[repr(C)]
    struct ScanArguments {
        size: u64,
        flags: u64,
        start: u64,
        end: u64,
        walk_end: u64,
        regions: u64,
        regions_len: u64,
        pages_max: u64,
        category_inverted: u64,
        category_mask: u64,
        category_anyof_mask: u64,
        return_mask: u64,
    }

    // _IOWR('f', 16, 96 bytes)
    const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
    const WP_MATCHING: u64 = 1 << 0;
    /// Fails where the range is not registered, instead of protecting nothing.
    const CHECK_WPASYNC: u64 = 1 << 1;
    const IS_WRITTEN: u64 = 1 << 1;
    const IS_FILE: u64 = 1 << 2;
    const IS_PRESENT: u64 = 1 << 3;
    const IS_SWAPPED: u64 = 1 << 4;
    const IS_ZERO_PAGE: u64 = 1 << 5;

    /// What becomes of the pages that are found.
    #[derive(Clone, Copy)]
    pub(super) enum Protect {
        Again,
        Leave,
    }

    pub(super) struct Scanned {
        pub runs: Vec<(u64, u64)>,
        pub walked_to: u64,
    }

    /// Pages written and neither of a file nor the zero page: before the first scan every page
    /// counts as written.
    pub(super) fn scan_written(
        pagemap: &File,
        start: u64,
        end: u64,
        protect: Protect,
    ) -> io::Result<Scanned> {
        const REGIONS_READ: usize = 16 << 10;
        let mut regions: Vec<PageRegion> = Vec::with_capacity(REGIONS_READ);
        let mut arguments = ScanArguments {
            size: size_of::<ScanArguments>() as u64,
            flags: match protect {
                Protect::Again => WP_MATCHING | CHECK_WPASYNC,
                Protect::Leave => CHECK_WPASYNC,
            },
            start,
            end,
            walk_end: 0,
            regions: regions.as_mut_ptr() as u64,
            regions_len: REGIONS_READ as u64,
            pages_max: 0,
            category_inverted: IS_FILE | IS_ZERO_PAGE,
            category_mask: IS_WRITTEN | IS_FILE | IS_ZERO_PAGE,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            return_mask: IS_WRITTEN,
        };
        // SAFETY: the arguments have the layout and size the kernel expects and point at `regions`,
        // which is alive and has room for as many as said.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &mut arguments) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        // SAFETY: the kernel has filled `count` regions, and no more than it was given.
        unsafe { regions.set_len(count.min(REGIONS_READ)) };
        let runs = regions
            .iter()
            .map(|region| (region.start, region.end))
            .collect();
        // It walks on or the caller would ask for ever.
        let stuck = arguments.walk_end <= start;
        if stuck {
            Err(io::ErrorKind::InvalidData.into())
        } else {
            Ok(Scanned {
                runs,
                walked_to: arguments.walk_end,
            })
        }
    }

    /// Writes all of the bytes at an address of another process.
    pub(super) fn write_memory(pid: u32, address: u64, bytes: &[u8]) -> io::Result<()> {
        let local = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let remote = libc::iovec {
            iov_base: address as *mut _,
            iov_len: bytes.len(),
        };
        // SAFETY: `local` is a live slice that is only read. The remote address is only looked up
        // in the other process.
        let count = unsafe { libc::process_vm_writev(pid.cast_signed(), &local, 1, &remote, 1, 0) };
        match usize::try_from(count) {
            Err(_) => Err(io::Error::last_os_error()),
            Ok(count) if count < bytes.len() => Err(io::ErrorKind::WriteZero.into()),
            Ok(_) => Ok(()),
        }
    }

    /// Appends the bytes at `(address, bytes)` of another process.
    pub(super) fn read_memory(
        pid: u32,
        places: &[(u64, u64)],
        into: &mut Vec<u8>,
    ) -> io::Result<()> {
        let remote: Vec<libc::iovec> = places
            .iter()
            .map(|(address, bytes)| libc::iovec {
                iov_base: *address as *mut _,
                iov_len: *bytes as usize,
            })
            .collect();
        let total = remote.iter().map(|place| place.iov_len).sum();
        into.reserve(total);
        let local = libc::iovec {
            iov_base: into.spare_capacity_mut().as_mut_ptr().cast(),
            iov_len: total,
        };
        // SAFETY: `local` is spare capacity of at least `total` bytes. The remote addresses are
        // only looked up in the other process.
        let count = unsafe {
            libc::process_vm_readv(
                pid.cast_signed(),
                &local,
                1,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        match usize::try_from(count) {
            Err(_) => Err(io::Error::last_os_error()),
            Ok(count) if count < total => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {
                // SAFETY: the call filled `total` bytes of the spare capacity.
                unsafe { into.set_len(into.len() + total) };
                Ok(())
            }
        }
    }
}

#[cfg(test)]
#[path = "ram_tests.rs"]
mod tests;
