//! Paths and names of a guest, and the way from them to open files.
//!
//! Always: a path is walked by the kernel from the mounted directory, and the kernel refuses
//! whatever leads out: absolute paths, `..`, every symlink, every mount point. What is found is
//! only *pinned* (`O_PATH`); a file is opened by its descriptor in `/proc/self/fd`, after its type
//! is known. So an open never waits for a FIFO and never touches a device.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use sandtree_proto::mount::PATH_MAX;

/// The kernel takes paths of at most 4095 bytes: longer ones are walked in pieces.
const PIECE_MAX: usize = 4000;
const NAME_MAX: usize = 255;
/// A walk that a rename disturbs may be asked to begin again.
const ATTEMPTS: usize = 16;

/// One component of a path.
#[derive(Debug, Clone)]
pub(crate) struct Name(CString);

impl Name {
    pub(crate) fn new(bytes: &[u8]) -> Result<Self, Errno> {
        if bytes.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        if matches!(bytes, b"" | b"." | b"..") || bytes.contains(&b'/') {
            return Err(Errno::INVAL);
        }
        CString::new(bytes).map(Self).map_err(|_| Errno::INVAL)
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        &self.0
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The parent and the name of a path; None for the mounted directory itself.
pub(crate) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.is_empty() {
        return None;
    }
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(cut) => Some((&path[..cut], &path[cut + 1..])),
        None => Some((b"", path)),
    }
}

/// Pins the file at a path beneath `root`.
pub(crate) fn pin(root: impl AsFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    check(path)?;
    let mut rest = path;
    let mut base: Option<OwnedFd> = None;
    while rest.len() > PIECE_MAX {
        let cut = rest[..PIECE_MAX].iter().rposition(|byte| *byte == b'/');
        let cut = cut.ok_or(Errno::NAMETOOLONG)?;
        let from = base.as_ref().map_or(root.as_fd(), OwnedFd::as_fd);
        base = Some(walk(from, &rest[..cut], OFlags::DIRECTORY)?);
        rest = &rest[cut + 1..];
    }
    let from = base.as_ref().map_or(root.as_fd(), OwnedFd::as_fd);
    walk(from, rest, OFlags::empty())
}

/// Pins what has a name in a directory.
pub(crate) fn pin_child(directory: impl AsFd, name: &Name) -> Result<OwnedFd, Errno> {
    walk(directory, name.as_bytes(), OFlags::empty())
}

/// Creates a regular file that did not exist.
pub(crate) fn create(directory: impl AsFd, name: &Name, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDONLY | OFlags::NOFOLLOW;
    openat2(
        directory,
        name.as_c_str(),
        flags | OFlags::CLOEXEC,
        mode,
        beneath(),
    )
}

/// Creates a regular file without a name, and pins it. It is not open for writing afterwards, so
/// that a program that gets a name can be executed.
pub(crate) fn create_unnamed(directory: impl AsFd, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat2(directory, c".", flags, mode, beneath())?;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::open(by_descriptor(&file), flags, Mode::empty())
}

/// Opens a pinned file. The caller knows that it is a regular file or a directory.
pub(crate) fn open(pinned: impl AsFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    // A lease of another program must not stop the server.
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    rustix::fs::open(by_descriptor(pinned), flags, Mode::empty())
}

/// A path to a pinned file, for calls that take no descriptor.
pub(crate) fn by_descriptor(pinned: impl AsFd) -> String {
    format!("/proc/self/fd/{}", pinned.as_fd().as_raw_fd())
}

/// Refuses paths that say the same in more than one way, or lead out.
pub(crate) fn check(path: &[u8]) -> Result<(), Errno> {
    if path.len() > PATH_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    let is_senseless = |component: &[u8]| matches!(component, b"" | b"." | b"..");
    let mut components = path.split(|byte| *byte == b'/');
    if !path.is_empty() && components.any(is_senseless) {
        return Err(Errno::INVAL);
    }
    Ok(())
}

fn walk(from: impl AsFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    let path = CString::new(path).map_err(|_| Errno::INVAL)?;
    let flags = flags | OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..ATTEMPTS {
        match openat2(&from, path.as_c_str(), flags, Mode::empty(), beneath()) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            done => return done,
        }
    }
    Err(Errno::STALE)
}

fn beneath() -> ResolveFlags {
    ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV
}
