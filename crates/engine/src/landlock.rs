//! What a machine's process can open once it is confined: by Landlock, which needs no privilege.
//!
//! ```text
//!   read, execute    the system's programs, libraries and data; where QEMU is installed
//!   read             /proc, the description of the processors, name resolution for a full network
//!   read, write      /dev/null, and /dev/kvm where it is used
//!   one by one       the kernel, the initramfs, a file that holds the guest's memory
//!   nothing else     no home directory, no store, no socket by TCP but for a full network
//! ```
//!
//! Always: files that are handed over open stay usable; this is about paths. A right that the
//! kernel does not know yet cannot be denied. Whether QEMU starts under it is found by trying (see
//! `probe`); where it does not, or the kernel has no Landlock, the rest of the jail holds without
//! it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::accel::Accel;
use crate::network::NetworkMode;

/// What may be done with a file, or with everything below a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadExecute,
    ReadWrite,
}

/// What a process may reach by path.
#[derive(Debug)]
pub(crate) struct View<'a> {
    /// Where QEMU is installed: its program and its data.
    pub installed: &'a [PathBuf],
    /// Files that are opened again by their descriptors.
    pub files: Vec<(BorrowedFd<'a>, Access)>,
    pub accel: Accel,
    pub network: NetworkMode,
}

/// Programs, libraries and data of the system, wherever a distribution puts them.
const SYSTEM: [&str; 9] = [
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
];
const KERNEL: [&str; 2] = ["/proc", "/sys/devices/system"];
const RANDOM: [&str; 2] = ["/dev/random", "/dev/urandom"];
/// What user-mode networking resolves names by. The file is often a link to where a service writes
/// it anew.
const NAMES: &str = "/etc";
const RESOLVER: &str = "/etc/resolv.conf";

/// Where a program at this path has its own files.
pub(crate) fn beside(program: &Path) -> Option<PathBuf> {
    let dir = program.parent()?;
    let is_prefix = dir.file_name().is_some_and(|name| name == "bin");
    let prefix = if is_prefix { dir.parent()? } else { dir };
    // A prefix of / would allow everything; what is installed there is in the system's directories.
    (prefix != Path::new("/")).then(|| prefix.to_owned())
}

/// The version of the kernel's Landlock; an error where it has none.
pub(crate) fn version() -> io::Result<u32> {
    sys::version()
}

/// The rules for a process that is about to be started.
pub(crate) fn ruleset(view: &View<'_>) -> io::Result<OwnedFd> {
    let handled = Handled::of(version()?, view.network);
    let ruleset = sys::create_ruleset(&handled)?;
    let allow = |paths: &[&str], access| {
        paths
            .iter()
            .try_for_each(|path| handled.allow(&ruleset, Path::new(path), access))
    };
    allow(&SYSTEM, Access::ReadExecute)?;
    allow(&KERNEL, Access::Read)?;
    allow(&RANDOM, Access::Read)?;
    allow(&["/dev/null"], Access::ReadWrite)?;
    if view.accel == Accel::Kvm {
        allow(&["/dev/kvm"], Access::ReadWrite)?;
    }
    if view.network == NetworkMode::Full {
        allow(&[NAMES], Access::Read)?;
        let written = Path::new(RESOLVER).canonicalize().ok();
        let written_in = written
            .as_deref()
            .and_then(Path::parent)
            .filter(|dir| dir.parent().is_some());
        written_in.map_or(Ok(()), |dir| handled.allow(&ruleset, dir, Access::Read))?;
    }
    view.installed
        .iter()
        .try_for_each(|path| handled.allow(&ruleset, path, Access::ReadExecute))?;
    view.files
        .iter()
        .try_for_each(|(file, access)| handled.allow_open(&ruleset, *file, *access))?;
    Ok(ruleset)
}

/// Confines the calling process. Makes one system call, so it can be called between `fork` and
/// `exec`.
pub(crate) fn enter(ruleset: RawFd) -> Result<(), ()> {
    sys::restrict_self(ruleset)
}

mod right {
    pub const EXECUTE: u64 = 1 << 0;
    pub const WRITE_FILE: u64 = 1 << 1;
    pub const READ_FILE: u64 = 1 << 2;
    pub const READ_DIR: u64 = 1 << 3;
    /// The last of those that the first version has.
    pub const MAKE_SYM: u64 = 1 << 12;
    pub const REFER: u64 = 1 << 13;
    pub const TRUNCATE: u64 = 1 << 14;
    pub const IOCTL_DEV: u64 = 1 << 15;
    /// Those that make sense for something that is no directory.
    pub const OF_FILES: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
    pub const TCP: u64 = 0b11;
    pub const SCOPES: u64 = 0b11;
}

/// `struct landlock_ruleset_attr`: everything that is denied unless a rule allows it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Handled {
    files: u64,
    network: u64,
    /// Abstract sockets and signals: nothing outside is reached.
    scoped: u64,
    /// How much of this the kernel knows; not part of what it gets.
    version: u32,
}

impl Handled {
    fn of(version: u32, network: NetworkMode) -> Self {
        let since = |first, rights| if version >= first { rights } else { 0 };
        let files = ((right::MAKE_SYM << 1) - 1)
            | since(2, right::REFER)
            | since(3, right::TRUNCATE)
            | since(5, right::IOCTL_DEV);
        let network = if network == NetworkMode::Full {
            0
        } else {
            since(4, right::TCP)
        };
        Self {
            files,
            network,
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

    fn rights(&self, access: Access) -> u64 {
        let rights = match access {
            Access::Read => right::READ_FILE | right::READ_DIR,
            Access::ReadExecute => right::READ_FILE | right::READ_DIR | right::EXECUTE,
            Access::ReadWrite => {
                right::READ_FILE | right::WRITE_FILE | right::TRUNCATE | right::IOCTL_DEV
            }
        };
        rights & self.files
    }

    /// A path that is not there needs no rule.
    fn allow(&self, ruleset: &OwnedFd, path: &Path, access: Access) -> io::Result<()> {
        match File::options()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(path)
        {
            Ok(opened) => self.allow_open(ruleset, opened.as_fd(), access),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            // What we cannot look at, a process with fewer rights cannot either.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn allow_open(
        &self,
        ruleset: &OwnedFd,
        opened: BorrowedFd<'_>,
        access: Access,
    ) -> io::Result<()> {
        let status = rustix::fs::fstat(opened)?;
        let is_dir =
            rustix::fs::FileType::from_raw_mode(status.st_mode) == rustix::fs::FileType::Directory;
        let rights = if is_dir {
            self.rights(access)
        } else {
            self.rights(access) & right::OF_FILES
        };
        match sys::add_rule(ruleset, opened, rights) {
            // A file that no path leads to, in memory: Landlock leaves those alone.
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => Ok(()),
            done => done,
        }
    }
}

#[allow(unsafe_code, reason = "Landlock's system calls have no safe form")]
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
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    pub(super) fn restrict_self(ruleset: RawFd) -> Result<(), ()> {
        // SAFETY: numbers only.
        if unsafe { libc::syscall(SYS_RESTRICT_SELF, ruleset, 0) } == 0 {
            Ok(())
        } else {
            Err(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_asked_for_what_it_knows() {
        let first = Handled::of(1, NetworkMode::None);
        assert_eq!(
            (first.files, first.network, first.scoped, first.bytes()),
            (0x1fff, 0, 0, 8)
        );
        let seventh = Handled::of(7, NetworkMode::Isolated);
        assert_eq!(
            (
                seventh.files,
                seventh.network,
                seventh.scoped,
                seventh.bytes()
            ),
            (0xffff, 3, 3, 24)
        );
        assert_eq!(Handled::of(7, NetworkMode::Full).network, 0);
    }

    #[test]
    fn a_program_has_its_own_files_beside_it() {
        let beside = |path: &str| beside(Path::new(path));
        assert_eq!(
            beside("/opt/qemu/bin/qemu-system-x86_64"),
            Some("/opt/qemu".into())
        );
        assert_eq!(beside("/tmp/wrapper/qemu"), Some("/tmp/wrapper".into()));
        assert_eq!(beside("/bin/qemu"), None);
        assert_eq!(beside("/qemu"), None);
    }
}
