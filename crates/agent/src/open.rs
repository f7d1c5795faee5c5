//! Opening files that anyone in the guest may have put there.

use std::fs::File;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Opens any kind of file for reading. Opening a pipe without a writer would otherwise block the
/// thread.
pub fn open_without_waiting(path: &Path, flags: OFlags) -> rustix::io::Result<File> {
    let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from)
}
