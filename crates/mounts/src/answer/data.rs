//! Requests about the content of regular files.

use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use rustix::io::Errno;
use sandtree_proto::mount::{Answer, DATA_MAX, Node, Request, Seek};

use super::Desk;
use crate::directory::is_directory;
use crate::place;

/// Copied by one request, so that others do not wait for long.
const COPY_MAX: u64 = 16 * 1024 * 1024;
/// These move the rest of the file.
const MOVING_MODES: u32 =
    FallocateFlags::COLLAPSE_RANGE.bits() | FallocateFlags::INSERT_RANGE.bits();
/// NO_HIDE_STALE would show what the disk held before.
const ALLOCATE_MODES: u32 = FallocateFlags::KEEP_SIZE.bits()
    | FallocateFlags::PUNCH_HOLE.bits()
    | FallocateFlags::COLLAPSE_RANGE.bits()
    | FallocateFlags::ZERO_RANGE.bits()
    | FallocateFlags::INSERT_RANGE.bits()
    | FallocateFlags::UNSHARE_RANGE.bits();

/// Where a write puts its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Offset,
    End,
}

impl Desk<'_> {
    pub(super) fn read(&mut self, node: &Node, offset: u64, length: u32) -> Result<Answer, Errno> {
        let length = length as usize;
        if length > DATA_MAX {
            return Err(Errno::INVAL);
        }
        let found = self.locate(node)?;
        let file = self.open(&found, OFlags::RDONLY)?;
        // What the file does not have needs no memory.
        let left = found.attr.version.size.saturating_sub(offset);
        let expected = usize::try_from(left).unwrap_or(usize::MAX).min(length);
        self.out.resize(expected, 0);
        let filled = read_at(&file, self.out, offset)?;
        self.out.truncate(filled);
        Ok(Answer::Done)
    }

    /// Writes at an offset, or at the end of the file. `offset` is then where the guest's kernel
    /// knows the end.
    pub(super) fn write(&mut self, node: &Node, offset: u64, at: At) -> Result<Answer, Errno> {
        let found = self.find(node)?;
        let flags = match at {
            At::Offset => OFlags::WRONLY,
            At::End if self.replay => OFlags::RDWR | OFlags::APPEND,
            At::End => OFlags::WRONLY | OFlags::APPEND,
        };
        let file = self.open(&found, flags)?;
        let before = self.before(&found)?;
        let done = if self.replay && at == At::End {
            appended(&file, self.data, offset..before.size)?
        } else {
            0
        };
        let data = &self.data[done..];
        let mut bytes = 0;
        if !data.is_empty() {
            self.expect_content(&found);
            // The kernel finds the end by itself.
            let offset = if at == At::End { 0 } else { offset };
            bytes = write_all(&file, data, offset)?;
        }
        let start = match at {
            At::Offset => offset,
            At::End => before.size,
        };
        let end = start + u64::from(bytes);
        let bytes = bytes + u32::try_from(done).unwrap_or(0);
        Ok(Answer::Written {
            bytes,
            before,
            attr: self.after_sized(&found, before.size.max(end))?,
        })
    }

    pub(super) fn sync(&mut self, node: &Node) -> Result<Answer, Errno> {
        let found = self.locate(node)?;
        let file = if is_directory(&found.attr) {
            place::open(&found.file, OFlags::RDONLY | OFlags::DIRECTORY)?
        } else {
            self.open(&found, OFlags::RDONLY)?
        };
        rustix::fs::fsync(file)?;
        Ok(Answer::Done)
    }

    pub(super) fn allocate(&mut self, request: &Request) -> Result<Answer, Errno> {
        let Request::Allocate {
            node,
            mode,
            offset,
            length,
        } = request
        else {
            return Err(Errno::INVAL);
        };
        if mode & !ALLOCATE_MODES != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if self.replay && mode & MOVING_MODES != 0 {
            // Done twice it moves twice, and nothing says whether it was done.
            return Err(Errno::IO);
        }
        let found = self.find(node)?;
        let file = self.open(&found, OFlags::RDWR)?;
        self.expect_content(&found);
        let mode = FallocateFlags::from_bits_retain(*mode);
        let before = self.before(&found)?;
        rustix::fs::fallocate(&file, mode, *offset, *length)?;
        Ok(Answer::Changed {
            before,
            attr: self.after(&found)?,
        })
    }

    pub(super) fn copy(&mut self, request: &Request) -> Result<Answer, Errno> {
        let Request::Copy {
            from,
            offset,
            to,
            to_offset,
            length,
        } = request
        else {
            return Err(Errno::INVAL);
        };
        let from = self.locate(from)?;
        let to = self.find(to)?;
        let source = self.open(&from, OFlags::RDONLY)?;
        let target = self.open(&to, OFlags::WRONLY)?;
        self.expect_content(&to);
        let before = self.before(&to)?;
        let mut read_at = *offset;
        let mut write_at = *to_offset;
        let copied = rustix::fs::copy_file_range(
            &source,
            Some(&mut read_at),
            &target,
            Some(&mut write_at),
            (*length).min(COPY_MAX) as usize,
        )?;
        Ok(Answer::Written {
            bytes: u32::try_from(copied).unwrap_or(u32::MAX),
            before,
            attr: self.after_sized(&to, before.size.max(write_at))?,
        })
    }

    pub(super) fn seek(&mut self, node: &Node, offset: u64, what: Seek) -> Result<Answer, Errno> {
        let found = self.locate(node)?;
        let file = self.open(&found, OFlags::RDONLY)?;
        let to = match what {
            Seek::Data => SeekFrom::Data(offset),
            Seek::Hole => SeekFrom::Hole(offset),
        };
        let offset = rustix::fs::seek(&file, to)?;
        Ok(Answer::Position { offset })
    }
}

/// How much of `data` an append that is repeated has written before. `added` is from where the
/// guest knows the end of the file to its end now.
///
/// Without other programs, the data is at the start of that: all of it, or a part up to the end of
/// the file. If another program appended first, all of it is at the end of the file.
fn appended(file: &OwnedFd, data: &[u8], added: Range<u64>) -> Result<usize, Errno> {
    let mut found = vec![0; data.len()];
    let filled = read_at(file, &mut found, added.start)?;
    if data[..filled] == found[..filled] {
        return Ok(filled);
    }
    let last = added.end.checked_sub(data.len() as u64);
    let Some(last) = last.filter(|last| added.contains(last)) else {
        return Ok(0);
    };
    let filled = read_at(file, &mut found, last)?;
    let is_own = data == &found[..filled];
    Ok(if is_own { filled } else { 0 })
}

/// Fills as much of `buffer` as the file has.
fn read_at(file: &OwnedFd, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut filled = 0;
    while filled < buffer.len() {
        let position = offset.checked_add(filled as u64).ok_or(Errno::INVAL)?;
        match rustix::io::pread(file, &mut buffer[filled..], position) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(filled)
}

/// Writes as much as it can. An error counts only when nothing was written.
fn write_all(file: &OwnedFd, data: &[u8], offset: u64) -> Result<u32, Errno> {
    let mut written = 0;
    while written < data.len() {
        let position = offset.checked_add(written as u64).ok_or(Errno::INVAL)?;
        match rustix::io::pwrite(file, &data[written..], position) {
            Ok(0) => break,
            Ok(count) => written += count,
            Err(Errno::INTR) => {}
            Err(errno) if written == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(u32::try_from(written).unwrap_or(u32::MAX))
}
