//! All processes of a command: its cgroup, or its process group in a guest without cgroups.
//!
//! Always: a command joins its cgroup before it runs, so all its processes are inside.
//! `cgroup.kill` also reaches processes that called `setsid`, and stops fork bombs. Without
//! cgroups, a process that left its group is lost.
//!
//! The next command's cgroup is made before that command comes. This saves a restored guest under
//! emulation thousands of instructions before the first answer.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Pid;

use crate::console;
use crate::failure::tolerate;
use crate::sys::{self, Target};

/// The parent directory of the commands' cgroups. It stays open, because the image's init may mount
/// over the path.
///
/// Commands are numbered here, not by their channels: after a restore another hub numbers channels,
/// and processes of an earlier command must not share a cgroup with a new one.
#[derive(Debug)]
pub struct Cgroups {
    parent: Option<OwnedFd>,
    next: AtomicU64,
    /// That of the next command.
    spare: Mutex<Option<Cgroup>>,
}

impl Cgroups {
    /// Creates `sandtree` in the hierarchy at `mount`.
    pub fn open(mount: &str) -> Self {
        let opened = make_dir(rustix::fs::CWD, &format!("{mount}/sandtree"));
        if let Err(error) = &opened {
            console::say(format_args!(
                "no cgroups: {error}; commands are ended by process group"
            ));
        }
        Self {
            parent: opened.ok(),
            ..Self::absent()
        }
    }

    pub fn absent() -> Self {
        Self {
            parent: None,
            next: AtomicU64::new(1),
            spare: Mutex::default(),
        }
    }

    /// Moves the agent into a cgroup of its own, because the image's init takes over all processes
    /// in the root.
    pub fn enter(&self) -> rustix::io::Result<()> {
        let Some(parent) = &self.parent else {
            return Ok(());
        };
        let dir = make_dir(parent.as_fd(), "agent")?;
        let procs = rustix::fs::openat(
            &dir,
            "cgroup.procs",
            OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        rustix::io::write(&procs, b"0").map(drop)
    }

    /// The cgroup of a new command. `None`: the guest has no cgroups.
    pub fn create(&self) -> rustix::io::Result<Option<Cgroup>> {
        let spare = self.spare().take();
        if spare.is_some() {
            return Ok(spare);
        }
        self.make()
    }

    /// Makes the cgroup of the next command, unless it exists. When it fails, that command tries
    /// again and reports it.
    pub fn prepare(&self) {
        let mut spare = self.spare();
        if spare.is_none() {
            *spare = self.make().ok().flatten();
        }
    }

    fn spare(&self) -> MutexGuard<'_, Option<Cgroup>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new cgroup.
    pub fn make(&self) -> rustix::io::Result<Option<Cgroup>> {
        let Some(parent) = &self.parent else {
            return Ok(None);
        };
        let name = self.next.fetch_add(1, Ordering::Relaxed).to_string();
        let dir = make_dir(parent.as_fd(), &name)?;
        let procs = open(&dir, "cgroup.procs", OFlags::WRONLY)?;
        Ok(Some(Cgroup {
            parent: parent.try_clone().map_err(|_| Errno::MFILE)?,
            name,
            dir,
            procs,
        }))
    }
}

fn make_dir(at: impl AsFd, name: &str) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::mkdirat(&at, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => open_dir(at, name),
        Err(error) => Err(error),
    }
}

fn open(dir: &OwnedFd, name: &str, access: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(dir, name, access | OFlags::CLOEXEC, Mode::empty())
}

fn open_dir(at: impl AsFd, name: &str) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(
        at,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

#[derive(Debug)]
pub struct Cgroup {
    parent: OwnedFd,
    name: String,
    dir: OwnedFd,
    procs: OwnedFd,
}

impl Cgroup {
    /// The file to which a process writes "0" to join.
    pub fn procs(&self) -> BorrowedFd<'_> {
        self.procs.as_fd()
    }

    fn file(&self, name: &str, access: OFlags) -> rustix::io::Result<OwnedFd> {
        open(&self.dir, name, access)
    }

    fn kill(&self) -> io::Result<()> {
        File::from(self.file("cgroup.kill", OFlags::WRONLY)?).write_all(b"1")
    }

    fn is_empty(&self) -> bool {
        let mut events = String::new();
        let read = self
            .file("cgroup.events", OFlags::RDONLY)
            .map_err(io::Error::from);
        match read.and_then(|fd| File::from(fd).read_to_string(&mut events)) {
            Ok(_) => events.lines().any(|line| line == "populated 0"),
            // Only an empty directory can be removed.
            Err(error) => {
                error.raw_os_error() == Some(libc::ENODEV)
                    || error.kind() == io::ErrorKind::NotFound
            }
        }
    }

    /// Removes the empty cgroup and the cgroups that its processes made in it.
    fn remove(&self) -> rustix::io::Result<()> {
        remove_below(&self.dir)?;
        rustix::fs::unlinkat(&self.parent, self.name.as_str(), AtFlags::REMOVEDIR)
    }
}

fn remove_below(dir: &OwnedFd) -> rustix::io::Result<()> {
    for entry in rustix::fs::Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type() == rustix::fs::FileType::Directory && name != "." && name != ".." {
            remove_below(&open_dir(dir, &name)?)?;
            rustix::fs::unlinkat(dir, name.as_str(), AtFlags::REMOVEDIR)?;
        }
    }
    Ok(())
}

/// A command with its descendants, as a cgroup and a process group.
#[derive(Debug)]
pub struct Family {
    leader: Pid,
    cgroup: Option<Cgroup>,
}

impl Family {
    pub fn new(leader: Pid, cgroup: Option<Cgroup>) -> Self {
        Self { leader, cgroup }
    }

    /// Signals the process group. A group that is gone is no error.
    pub fn signal(&self, number: i32) {
        tolerate(sys::signal(Target::Group(self.leader), number));
    }

    /// Ends every process, in any session or group.
    pub fn kill(&self) {
        let killed = self.cgroup.as_ref().map(Cgroup::kill);
        if !matches!(killed, Some(Ok(()))) {
            self.signal(libc::SIGKILL);
        }
    }

    pub fn is_gone(&self) -> bool {
        match &self.cgroup {
            Some(cgroup) => cgroup.is_empty(),
            None => sys::signal(Target::Group(self.leader), 0).is_err(),
        }
    }

    /// Removes the cgroup of a family that is gone. After an error, an empty directory stays until
    /// the next boot.
    pub fn remove(self) {
        if let Some(Err(error)) = self.cgroup.map(|cgroup| cgroup.remove()) {
            console::say(format_args!("cannot remove a cgroup: {error}"));
        }
    }
}
