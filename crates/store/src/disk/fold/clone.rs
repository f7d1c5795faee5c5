//! Shares a range of bytes between two files by FICLONERANGE, which the kernel headers define as
//! `_IOW(0x94, 13, struct file_clone_range)`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

const FICLONERANGE: Opcode = opcode::write::<FileCloneRange>(0x94, 13);

/// The kernel's `struct file_clone_range`.
#[repr(C)]
struct FileCloneRange {
    src_fd: i64,
    src_offset: u64,
    src_length: u64,
    dest_offset: u64,
}

/// Multiples of blocks. The length is not zero, which would mean "up to the end".
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub from: u64,
    pub bytes: u64,
    pub to: u64,
}

pub(super) enum Cloned {
    Yes,
    /// The file system does not support it, or not between these two files.
    CannotBe,
}

#[allow(
    unsafe_code,
    reason = "the opcode is one that rustix has no function for"
)]
pub(super) fn range(from: &File, to: &File, range: Range) -> io::Result<Cloned> {
    let request = FileCloneRange {
        src_fd: from.as_raw_fd().into(),
        src_offset: range.from,
        src_length: range.bytes,
        dest_offset: range.to,
    };
    // SAFETY: the opcode takes a pointer to a `file_clone_range` and only reads it; both files are open.
    let cloned = unsafe { ioctl(to, Setter::<FICLONERANGE, _>::new(request)) };
    match cloned {
        Ok(()) => Ok(Cloned::Yes),
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {
            Ok(Cloned::CannotBe)
        }
        Err(errno) => Err(errno.into()),
    }
}
