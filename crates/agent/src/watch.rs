//! Watches: reports the changes below a directory, by inotify.
//!
//! ```text
//!   inotify ──► wd ──► directory, relative to the watched one ──► WatchEvent ──► pipe to the host
//! ```
//!
//! Always: at most [`DIRECTORIES_MAX`] directories are watched. A host that does not read fills the
//! pipe; then the kernel's queue fills, and the kernel reports that it dropped events. A watch is a
//! part of the guest's memory, so it continues in a restored guest.
//!
//! When it fails: a directory below that cannot be watched, because it is gone or too deep, is left
//! out; the watched directory itself must be watched.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use sandtree_proto::message::encode_item;
use sandtree_proto::{Failure, WatchChange, WatchEvent, WatchScope};

use crate::failure::{OrFailure, refusal, tolerate};
use crate::files::Staging;

/// The kernel's own limit is often lower, and all watches of the guest share it.
const DIRECTORIES_MAX: usize = 16 * 1024;
const BUFFER: usize = 64 * 1024;

/// Reports changes until the other end of `out` is closed, or the directory is removed.
pub fn watch(path: &Path, scope: WatchScope, out: OwnedFd) -> Result<(), Failure> {
    let message = || format!("cannot watch {}", path.display());
    if !fs::metadata(path).or_failure(message)?.is_dir() {
        return Err(refusal(
            Errno::NOTDIR,
            format!("cannot watch {}: it is not a directory", path.display()),
        ));
    }
    let queue = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
    let mut watched = Watched {
        top: path.to_owned(),
        scope,
        queue: queue.or_failure(message)?,
        directories: HashMap::new(),
        published: None,
    };
    watched.add(PathBuf::new()).or_failure(message)?;
    if scope == WatchScope::Tree {
        // Existing files are not changes.
        watched.add_below(Path::new(""));
    }
    let mut reports = Reports {
        out: File::from(out),
    };
    match watched.report(&mut reports) {
        // The host closed the channel.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.or_failure(message),
    }
}

/// The events on their way to the host.
struct Reports {
    out: File,
}

impl Reports {
    fn send(&mut self, change: WatchChange, path: &Path) -> io::Result<()> {
        let path = path.as_os_str().as_bytes().to_vec();
        self.out
            .write_all(&encode_item(&WatchEvent { change, path }))
    }
}

/// The watched directories.
struct Watched {
    top: PathBuf,
    scope: WatchScope,
    queue: OwnedFd,
    /// By watch descriptor; relative to the top.
    directories: HashMap<i32, PathBuf>,
    /// The last rename of a temporary file, which ends a write of the agent's.
    published: Option<Published>,
}

/// A write of the agent's that gives its file a name.
struct Published {
    /// The number of the rename.
    rename: u32,
    staging: Staging,
}

impl Published {
    /// What the same write would be without a temporary file.
    fn changes(&self) -> &'static [WatchChange] {
        match self.staging {
            Staging::New => &[
                WatchChange::Created,
                WatchChange::Attributes,
                WatchChange::Written,
            ],
            Staging::Over => &[WatchChange::Written],
        }
    }
}

/// An event of the kernel's, with its directory.
struct Change {
    flags: ReadFlags,
    directory: i32,
    /// The same for both events of a rename.
    rename: u32,
    name: Option<PathBuf>,
}

impl Watched {
    fn report(&mut self, reports: &mut Reports) -> io::Result<()> {
        reports.send(WatchChange::Watching, Path::new(""))?;
        loop {
            self.wait(reports)?;
            for change in self.read()? {
                self.handle(change, reports)?;
            }
            if self.directories.is_empty() {
                return Ok(());
            }
        }
    }

    /// Waits for an event. Fails when the reports have no reader any more.
    fn wait(&self, reports: &Reports) -> io::Result<()> {
        let mut ends = [
            PollFd::new(&self.queue, PollFlags::IN),
            PollFd::from_borrowed_fd(reports.out.as_fd(), PollFlags::empty()),
        ];
        loop {
            match poll(&mut ends, None) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if !ends[1].revents().is_empty() => {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                Ok(_) => return Ok(()),
            }
        }
    }

    fn read(&self) -> io::Result<Vec<Change>> {
        let mut buffer = [const { std::mem::MaybeUninit::uninit() }; BUFFER];
        let mut reader = inotify::Reader::new(&self.queue, &mut buffer);
        let mut changes = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => changes.push(Change {
                    flags: event.events(),
                    directory: event.wd(),
                    rename: event.cookie(),
                    name: event
                        .file_name()
                        .map(|name| PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()))),
                }),
                Err(Errno::AGAIN) => return Ok(changes),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            // What was read is handled before more is read.
            if reader.is_buffer_empty() {
                return Ok(changes);
            }
        }
    }

    fn handle(&mut self, change: Change, reports: &mut Reports) -> io::Result<()> {
        let Change {
            flags,
            directory,
            rename,
            name,
        } = change;
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return reports.send(WatchChange::Missed, Path::new(""));
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&directory);
            return Ok(());
        }
        let Some(parent) = self.directories.get(&directory) else {
            return Ok(());
        };
        let Some(name) = name else {
            // An event of a directory itself, which its parent reports by name.
            return Ok(());
        };
        let Some(kind) = kind(flags) else {
            return Ok(());
        };
        if let Some(staging) = Staging::of_name(name.as_os_str()) {
            // The write itself shows when the file gets its name.
            let is_rename = kind == WatchChange::MovedAway;
            self.published = is_rename.then_some(Published { rename, staging });
            return Ok(());
        }
        let path = parent.join(name);
        let is_arrival = flags.contains(ReadFlags::MOVED_TO);
        let ours = |published: &mut Published| is_arrival && published.rename == rename;
        if let Some(published) = self.published.take_if(ours) {
            let mut changes = published.changes().iter();
            return changes.try_for_each(|change| reports.send(*change, &path));
        }
        reports.send(kind, &path)?;
        if !flags.contains(ReadFlags::ISDIR) || self.scope == WatchScope::Directory {
            return Ok(());
        }
        match kind {
            WatchChange::Created => self.follow(path, reports),
            WatchChange::MovedAway => {
                self.leave(&path);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Watches a new directory, and reports what was made in it before it was watched.
    fn follow(&mut self, directory: PathBuf, reports: &mut Reports) -> io::Result<()> {
        if self.add(directory.clone()).is_err() {
            return Ok(());
        }
        let is_staged = |path: &PathBuf| path.file_name().and_then(Staging::of_name).is_some();
        let found = self.add_below(&directory).into_iter();
        for path in found.filter(|path| !is_staged(path)) {
            reports.send(WatchChange::Created, &path)?;
        }
        Ok(())
    }

    fn add(&mut self, directory: PathBuf) -> io::Result<()> {
        if self.directories.len() >= DIRECTORIES_MAX {
            return Err(Errno::NOSPC.into());
        }
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::ONLYDIR;
        // Below the top, links are not followed: they may lead anywhere, and in circles.
        let flags = if directory.as_os_str().is_empty() {
            flags
        } else {
            flags | WatchFlags::DONT_FOLLOW
        };
        let at = self.top.join(&directory);
        let number = inotify::add_watch(&self.queue, &at, flags)?;
        self.directories.insert(number, directory);
        Ok(())
    }

    /// Watches every directory below one, and returns all files that it finds there. A directory
    /// that cannot be read is left out.
    fn add_below(&mut self, directory: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut left = vec![directory.to_owned()];
        while let Some(directory) = left.pop() {
            let Ok(entries) = fs::read_dir(self.top.join(&directory)) else {
                continue;
            };
            for entry in entries.flatten() {
                if found.len() >= DIRECTORIES_MAX {
                    return found;
                }
                let path = directory.join(entry.file_name());
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                if is_dir && self.add(path.clone()).is_ok() {
                    left.push(path.clone());
                }
                found.push(path);
            }
        }
        found
    }

    /// Ends the watches of a directory that was moved away, and of those in it.
    fn leave(&mut self, directory: &Path) {
        let numbers: Vec<i32> = self
            .directories
            .iter()
            .filter(|(_, path)| path.starts_with(directory))
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            self.directories.remove(&number);
            // A directory that was removed meanwhile is not watched any more.
            tolerate(inotify::remove_watch(&self.queue, number));
        }
    }
}

fn kind(flags: ReadFlags) -> Option<WatchChange> {
    let kinds = [
        (ReadFlags::CREATE, WatchChange::Created),
        (ReadFlags::MOVED_TO, WatchChange::Created),
        (ReadFlags::MODIFY, WatchChange::Written),
        (ReadFlags::DELETE, WatchChange::Removed),
        (ReadFlags::MOVED_FROM, WatchChange::MovedAway),
        (ReadFlags::ATTRIB, WatchChange::Attributes),
    ];
    let found = kinds.into_iter().find(|(flag, _)| flags.contains(*flag));
    found.map(|(_, kind)| kind)
}
