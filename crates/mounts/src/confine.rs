//! The walls around the server's thread.
//!
//! ```text
//!   unshare(CLONE_FS)   a umask of its own: the guest's modes are exact
//!   all signals blocked a limit on file sizes is an error of the write, not the end of the process
//!   Landlock            no file outside of the mounted directories can be opened or changed
//! ```
//!
//! Always: the walk beneath the mounted directory is the first wall, and holds without these.
//! Landlock is a second one, where the kernel has it. It needs no privilege and holds for the
//! thread alone. It can only be narrowed, so a thread that serves another directory must be a new
//! one, started by a thread that is not confined.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::fs::Mode;

use crate::directory::{Access, Directory};

/// Makes the calling thread's umask its own, and 0. Blocks its signals.
pub(crate) fn detach() -> io::Result<()> {
    sys::unshare_fs()?;
    rustix::process::umask(Mode::empty());
    sys::block_signals()
}

/// Confines the calling thread to the directories. Returns the version of the kernel's Landlock.
pub(crate) fn enter<'a>(directories: impl Iterator<Item = &'a Directory>) -> io::Result<u32> {
    let version = sys::version()?;
    let handled = Handled::of(version);
    let ruleset = sys::create_ruleset(&handled)?;
    for directory in directories {
        let allowed = rights(directory.access) & handled.files;
        sys::add_rule(&ruleset, directory.root.as_fd(), allowed)?;
    }
    rustix::thread::set_no_new_privs(true)?;
    sys::restrict_self(&ruleset)?;
    Ok(version)
}

mod right {
    pub const WRITE_FILE: u64 = 1 << 1;
    pub const READ_FILE: u64 = 1 << 2;
    pub const READ_DIR: u64 = 1 << 3;
    pub const REMOVE_DIR: u64 = 1 << 4;
    pub const REMOVE_FILE: u64 = 1 << 5;
    pub const MAKE_DIR: u64 = 1 << 7;
    pub const MAKE_REG: u64 = 1 << 8;
    /// The last of those that the first version has.
    pub const MAKE_SYM: u64 = 1 << 12;
    pub const REFER: u64 = 1 << 13;
    pub const TRUNCATE: u64 = 1 << 14;
    pub const IOCTL_DEV: u64 = 1 << 15;
    pub const TCP: u64 = 0b11;
    pub const SCOPES: u64 = 0b11;
}

/// No sockets, FIFOs and devices: the server neither makes nor moves them.
fn rights(access: Access) -> u64 {
    let read = right::READ_FILE | right::READ_DIR;
    match access {
        Access::ReadOnly => read,
        Access::ReadWrite => {
            read | right::WRITE_FILE
                | right::TRUNCATE
                | right::REMOVE_DIR
                | right::REMOVE_FILE
                | right::MAKE_DIR
                | right::MAKE_REG
                | right::MAKE_SYM
                | right::REFER
        }
    }
}

/// `struct landlock_ruleset_attr`: everything that is denied unless a rule allows it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Handled {
    files: u64,
    network: u64,
    /// Abstract sockets and signals.
    scoped: u64,
    /// How much of this the kernel knows; not part of what it gets.
    version: u32,
}

impl Handled {
    fn of(version: u32) -> Self {
        let since = |first, rights| if version >= first { rights } else { 0 };
        let files = ((right::MAKE_SYM << 1) - 1)
            | since(2, right::REFER)
            | since(3, right::TRUNCATE)
            | since(5, right::IOCTL_DEV);
        Self {
            files,
            network: since(4, right::TCP),
            scoped: since(6, right::SCOPES),
            version,
        }
    }

    /// Older kernels take a shorter structure.
    fn bytes(&self) -> usize {
        match self.version {
            ..4 => 8,
            4 | 5 => 16,
            _ => 24,
        }
    }
}

#[allow(unsafe_code, reason = "these system calls have no safe form")]
mod sys {
    use super::{AsRawFd, BorrowedFd, FromRawFd, Handled, OwnedFd, RawFd, io};

    const SYS_CREATE_RULESET: libc::c_long = 444;
    const SYS_ADD_RULE: libc::c_long = 445;
    const SYS_RESTRICT_SELF: libc::c_long = 446;
    const CREATE_RULESET_VERSION: u32 = 1;
    const RULE_PATH_BENEATH: u32 = 1;

    #[repr(C, packed)]
    struct PathBeneath {
        allowed: u64,
        parent: i32,
    }

    pub(super) fn unshare_fs() -> io::Result<()> {
        let flags = rustix::thread::UnshareFlags::FS;
        // SAFETY: the table of descriptors stays shared.
        unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(io::Error::from)
    }

    pub(super) fn block_signals() -> io::Result<()> {
        let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the first call initialises the set that the second one reads.
        let failed = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut())
        };
        if failed == 0 {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(failed))
        }
    }

    pub(super) fn version() -> io::Result<u32> {
        // SAFETY: a null pointer of length zero, as the question for the version wants it.
        let version = unsafe {
            libc::syscall(
                SYS_CREATE_RULESET,
                std::ptr::null::<u8>(),
                0,
                CREATE_RULESET_VERSION,
            )
        };
        u32::try_from(version).map_err(|_| io::Error::last_os_error())
    }

    pub(super) fn create_ruleset(handled: &Handled) -> io::Result<OwnedFd> {
        // SAFETY: the pointer leads to as many initialised bytes as are named.
        let made = unsafe {
            libc::syscall(
                SYS_CREATE_RULESET,
                std::ptr::from_ref(handled),
                handled.bytes(),
                0,
            )
        };
        match RawFd::try_from(made) {
            // SAFETY: the kernel has just made this descriptor for us.
            Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(super) fn add_rule(
        ruleset: &OwnedFd,
        parent: BorrowedFd<'_>,
        allowed: u64,
    ) -> io::Result<()> {
        let rule = PathBeneath {
            allowed,
            parent: parent.as_raw_fd(),
        };
        // SAFETY: the rule has the layout the kernel expects and lives until the call returns.
        let result = unsafe {
            libc::syscall(
                SYS_ADD_RULE,
                ruleset.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const rule,
                0,
            )
        };
        done(result)
    }

    pub(super) fn restrict_self(ruleset: &OwnedFd) -> io::Result<()> {
        // SAFETY: numbers only.
        done(unsafe { libc::syscall(SYS_RESTRICT_SELF, ruleset.as_raw_fd(), 0) })
    }

    fn done(result: libc::c_long) -> io::Result<()> {
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::ErrorKind;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use sandtree_proto::mount::MountId;

    use super::*;
    use crate::directory::Owner;

    fn served(path: &Path, access: Access) -> Directory {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let root = File::options().read(true).custom_flags(flags).open(path);
        Directory {
            mount: MountId(0),
            root: root.expect("the directory exists").into(),
            path: path.to_owned(),
            access,
            owner: Owner { uid: 0, gid: 0 },
        }
    }

    /// Runs in a thread, because there is no way back.
    fn confined(directories: Vec<Directory>, check: impl FnOnce() + Send + 'static) {
        let run = move || {
            detach().expect("a thread has a umask of its own");
            match enter(directories.iter()) {
                Ok(_) => check(),
                Err(error) => println!("not checked: the kernel has no Landlock: {error}"),
            }
        };
        std::thread::spawn(run).join().expect("the checks hold");
    }

    #[test]
    fn nothing_outside_can_be_opened_or_changed() {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| temporary.path().join(name);
        for name in ["inside", "outside", "readonly"] {
            fs::create_dir(path(name)).expect("room for a directory");
            fs::write(path(name).join("file"), "content").expect("room for a file");
        }
        let inside = path("inside");
        let outside = path("outside");
        let readonly = path("readonly");
        let all = vec![
            served(&inside, Access::ReadWrite),
            served(&readonly, Access::ReadOnly),
        ];
        let kind = |result: std::io::Result<()>| result.expect_err("it is refused").kind();
        let check = move || {
            let denied = ErrorKind::PermissionDenied;
            assert_eq!(kind(File::open(outside.join("file")).map(drop)), denied);
            assert_eq!(kind(fs::read_dir(&outside).map(drop)), denied);
            assert_eq!(kind(fs::write(outside.join("new"), "")), denied);
            assert_eq!(kind(fs::remove_file(outside.join("file"))), denied);
            assert_eq!(kind(File::open("/etc/passwd").map(drop)), denied);
            assert_eq!(kind(fs::write(readonly.join("file"), "")), denied);
            assert_eq!(kind(fs::create_dir(readonly.join("new"))), denied);
            let moved = fs::rename(inside.join("file"), outside.join("moved"));
            assert!(moved.is_err());
            fs::read(readonly.join("file")).expect("it may be read");
            fs::write(inside.join("new"), "new").expect("it may be written");
            fs::create_dir(inside.join("dir")).expect("it may be made");
            fs::rename(inside.join("new"), inside.join("dir/new")).expect("it may be moved");
            fs::hard_link(inside.join("file"), inside.join("dir/link")).expect("it may be linked");
            fs::remove_file(inside.join("dir/link")).expect("it may be removed");
        };
        confined(all, check);
    }

    #[test]
    fn a_file_that_was_pinned_inside_stays_usable_without_its_name() {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let path = temporary.path().join("file");
        fs::write(&path, "content").expect("room for a file");
        let flags = libc::O_PATH;
        let pinned = File::options().read(true).custom_flags(flags).open(&path);
        let pinned = pinned.expect("the file exists");
        fs::remove_file(&path).expect("it may be removed");
        let all = vec![served(temporary.path(), Access::ReadWrite)];
        let check = move || {
            let path = format!("/proc/self/fd/{}", pinned.as_raw_fd());
            assert_eq!(fs::read(path).expect("it is readable"), b"content");
        };
        confined(all, check);
    }

    #[test]
    fn a_kernel_is_asked_for_what_it_knows() {
        let first = Handled::of(1);
        assert_eq!((first.files, first.network, first.bytes()), (0x1fff, 0, 8));
        let seventh = Handled::of(7);
        assert_eq!((seventh.files, seventh.scoped), (0xffff, 3));
    }
}
