//! Requests that change the attributes of a file.

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT,
};
use rustix::io::Errno;
use sandtree_proto::mount::{Answer, Change, Node, Time};

use super::{Desk, Found, PERMISSIONS};
use crate::directory::{is_directory, is_regular, kind};
use crate::place;

/// Setgid and sticky of a directory.
const INHERITED: u32 = 0o3000;

impl Desk<'_> {
    pub(super) fn change(&mut self, node: &Node, change: &Change) -> Result<Answer, Errno> {
        let found = self.find(node)?;
        if let Some(mode) = change.mode {
            self.change_mode(&found, mode)?;
        }
        if let Some(size) = change.size {
            self.change_size(&found, size)?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            self.change_times(&found, change)?;
        }
        let before = found.attr.version;
        let size = change.size.unwrap_or(before.size);
        Ok(Answer::Changed {
            before,
            attr: self.after_sized(&found, size)?,
        })
    }

    fn change_mode(&mut self, found: &Found, mode: u32) -> Result<(), Errno> {
        if kind(&found.attr) == FileType::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        let mut given = mode & PERMISSIONS;
        if is_directory(&found.attr) {
            // What the host's user has set may stay; a guest cannot set it.
            given |= mode & found.attr.mode & INHERITED;
        }
        self.expect_content(found);
        let path = place::by_descriptor(&found.file);
        rustix::fs::chmod(path, Mode::from_raw_mode(given))
    }

    fn change_size(&mut self, found: &Found, size: u64) -> Result<(), Errno> {
        if !is_directory(&found.attr) && !is_regular(&found.attr) {
            return Err(Errno::INVAL);
        }
        let file = self.open(found, OFlags::WRONLY)?;
        self.expect_content(found);
        rustix::fs::ftruncate(file, size)
    }

    fn change_times(&mut self, found: &Found, change: &Change) -> Result<(), Errno> {
        let times = Timestamps {
            last_access: timespec(change.atime),
            last_modification: timespec(change.mtime),
        };
        self.expect_content(found);
        let path = place::by_descriptor(&found.file);
        rustix::fs::utimensat(CWD, path, &times, AtFlags::empty())
    }
}

fn timespec(time: Option<Time>) -> Timespec {
    const SECOND: i64 = 1_000_000_000;
    let (tv_sec, tv_nsec) = match time {
        None => (0, UTIME_OMIT),
        Some(Time::Now) => (0, UTIME_NOW),
        Some(Time::At { unix_ns }) => (unix_ns.div_euclid(SECOND), unix_ns.rem_euclid(SECOND)),
    };
    Timespec { tv_sec, tv_nsec }
}
