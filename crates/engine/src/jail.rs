//! The jail: what the QEMU process gives up between `fork` and `exec`.
//!
//! ```text
//!   fork -> descriptors -> session, directory, limits, signals -> groups, gid, uid -> capabilities -> no new privileges
//!        -> Landlock -> dies with its parent -> exec(environment as given) -> QEMU's own seccomp filter (see argv)
//! ```
//!
//! Always: a step that fails ends the child before `exec`; nothing runs half confined. The
//! parent-death signal comes after the change of user, which clears it, and is followed by a look
//! whether the parent died in between.
//!
//! Everything `enter` does is async-signal-safe: the process that forks has other threads, so the
//! child may not allocate or take a lock.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

use libc::{c_int, gid_t, pid_t, rlim_t};

use crate::accel::Accel;
use crate::landlock::{self, View};

/// Below this number lie the descriptors of the child, at or above it those of the parent that
/// become them.
pub(crate) const CHILD_FD_END: RawFd = 128;

/// How much address space QEMU may use in addition to the guest's memory: translated code, thread
/// stacks, allocator arenas.
const ADDRESS_SPACE_BESIDE_MEMORY: u64 = 16 << 30;

/// Whom a machine's process runs as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Jail {
    /// The user and group id to switch to; only a privileged caller can. `None`: the caller's own.
    pub uid: Option<u32>,
}

/// Limits on the machine's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Descriptors, among them one for each connection of the guest under `NetworkMode::Full`.
    pub open_files: u64,
    /// The size no file may grow beyond; the guest then sees a disk error.
    pub file_bytes: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            open_files: 4096,
            file_bytes: None,
        }
    }
}

/// A step into the jail, as named in errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Step {
    Fork,
    Descriptors,
    Session,
    Directory,
    Limit,
    Signals,
    Groups,
    Group,
    User,
    Capabilities,
    Privileges,
    Landlock,
    ParentDeath,
    Exec,
}

impl Step {
    const ALL: [Step; 14] = [
        Step::Fork,
        Step::Descriptors,
        Step::Session,
        Step::Directory,
        Step::Limit,
        Step::Signals,
        Step::Groups,
        Step::Group,
        Step::User,
        Step::Capabilities,
        Step::Privileges,
        Step::Landlock,
        Step::ParentDeath,
        Step::Exec,
    ];

    pub(crate) fn from_byte(byte: u8) -> Option<Step> {
        Step::ALL.into_iter().find(|step| *step as u8 == byte)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Fork => "the process cannot be started",
            Step::Descriptors => "its descriptors cannot be arranged (Linux 5.11 or newer is needed)",
            Step::Session => "it cannot have its own session",
            Step::Directory => "it cannot leave the current directory",
            Step::Limit => "its resources cannot be limited",
            Step::Signals => "its signals cannot be reset",
            Step::Groups => "its groups cannot be dropped (inside a user namespace this may be forbidden)",
            Step::Group => "its group id cannot be switched (this needs root, and an id mapped in the user namespace)",
            Step::User => "its user id cannot be switched (this needs root, and an id mapped in the user namespace)",
            Step::Capabilities => "its capabilities cannot be dropped",
            Step::Privileges => "gaining privileges cannot be ruled out",
            Step::Landlock => "its view of the file system cannot be restricted",
            Step::ParentDeath => "it cannot be tied to the life of this process",
            Step::Exec => "the program cannot be run",
        })
    }
}

/// A jail made concrete before the fork, so that the child only makes system calls.
#[derive(Debug)]
pub(crate) struct Confinement {
    uid: Option<u32>,
    groups: Vec<gid_t>,
    limits: [(Resource, rlim_t); 4],
    /// At a number that is no target of a descriptor.
    landlock: Option<OwnedFd>,
    parent: pid_t,
}

// The type of the first argument of setrlimit differs between C libraries.
#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = c_int;

impl Confinement {
    pub(crate) fn new(jail: Jail, limits: Limits, memory_bytes: u64, accel: Accel) -> Self {
        Self {
            uid: jail.uid,
            groups: groups_for(accel),
            limits: [
                (libc::RLIMIT_CORE, 0),
                (libc::RLIMIT_NOFILE, limits.open_files),
                (
                    libc::RLIMIT_FSIZE,
                    limits.file_bytes.unwrap_or(libc::RLIM_INFINITY),
                ),
                (
                    libc::RLIMIT_AS,
                    memory_bytes.saturating_add(ADDRESS_SPACE_BESIDE_MEMORY),
                ),
            ],
            landlock: None,
            parent: rustix::process::getpid().as_raw_pid(),
        }
    }

    /// Restricts what the process can open by path.
    pub(crate) fn seeing(self, view: &View<'_>) -> io::Result<Self> {
        let ruleset = rustix::io::fcntl_dupfd_cloexec(landlock::ruleset(view)?, CHILD_FD_END)?;
        Ok(Self {
            landlock: Some(ruleset),
            ..self
        })
    }

    /// Called in the child: gives up everything but the descriptors listed as `(source, target)`.
    pub(crate) fn enter(&self, descriptors: &[(RawFd, RawFd)]) -> Result<(), (Step, c_int)> {
        arrange(descriptors).or(Err(fail(Step::Descriptors)))?;
        own_session()?;
        for (resource, value) in self.limits {
            limit(resource, value)?;
        }
        reset_signals()?;
        if let Some(uid) = self.uid {
            switch_user(uid, &self.groups)?;
        }
        drop_capabilities()?;
        no_new_privileges()?;
        if let Some(ruleset) = &self.landlock {
            landlock::enter(ruleset.as_raw_fd()).or(Err(fail(Step::Landlock)))?;
        }
        die_with(self.parent)
    }
}

/// The group of `/dev/kvm`, where KVM is used and that group is what opens the device.
fn groups_for(accel: Accel) -> Vec<gid_t> {
    match std::fs::metadata("/dev/kvm") {
        Ok(device) if accel == Accel::Kvm && device.mode() & 0o060 == 0o060 => vec![device.gid()],
        _ => Vec::new(),
    }
}

fn fail(step: Step) -> (Step, c_int) {
    (step, io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

fn check(step: Step, result: c_int) -> Result<(), (Step, c_int)> {
    if result < 0 { Err(fail(step)) } else { Ok(()) }
}

/// Everything is closed at `exec` but the copies made here, which `dup2` makes inheritable.
#[allow(
    unsafe_code,
    reason = "plain system calls on numbers; the child owns its descriptor table alone"
)]
fn arrange(descriptors: &[(RawFd, RawFd)]) -> Result<(), ()> {
    // SAFETY: no memory is passed, and no Rust object in the child is used after its descriptor is
    // replaced.
    let closed = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if closed < 0 {
        return Err(());
    }
    for &(source, target) in descriptors {
        // SAFETY: as above; sources lie at or above CHILD_FD_END, so no target overwrites a source.
        if unsafe { libc::dup2(source, target) } < 0 {
            return Err(());
        }
    }
    Ok(())
}

/// A session of its own keeps the terminal's Ctrl-C from reaching QEMU.
#[allow(
    unsafe_code,
    reason = "system calls without Rust equivalents that are safe after fork"
)]
fn own_session() -> Result<(), (Step, c_int)> {
    // SAFETY: the only pointer is a static string.
    unsafe {
        check(Step::Session, libc::setsid())?;
        libc::umask(0o077);
        check(Step::Directory, libc::chdir(c"/".as_ptr()))
    }
}

/// Sets both limits, or the soft one alone as high as an ordinary user's hard limit lets it.
#[allow(unsafe_code, reason = "setrlimit in the child, after fork")]
fn limit(resource: Resource, value: rlim_t) -> Result<(), (Step, c_int)> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls get a pointer to a local of the right type.
    unsafe {
        check(Step::Limit, libc::getrlimit(resource, &mut limit))?;
        let value = value.min(limit.rlim_max);
        check(
            Step::Limit,
            libc::setrlimit(
                resource,
                &libc::rlimit {
                    rlim_cur: value,
                    rlim_max: value,
                },
            ),
        )
    }
}

/// No signal blocked; a write beyond the file size limit is an error and not the end of QEMU.
#[allow(unsafe_code, reason = "signal calls in the child, after fork")]
fn reset_signals() -> Result<(), (Step, c_int)> {
    // SAFETY: `mask` is initialised by sigemptyset before it is read; no handler is installed.
    unsafe {
        let mut mask = std::mem::MaybeUninit::uninit();
        check(Step::Signals, libc::sigemptyset(mask.as_mut_ptr()))?;
        check(
            Step::Signals,
            libc::sigprocmask(libc::SIG_SETMASK, mask.as_ptr(), std::ptr::null_mut()),
        )?;
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
    Ok(())
}

/// Raw system calls: the C library's wrappers would try to switch all threads, and the child has
/// but one.
#[allow(unsafe_code, reason = "change of user in the child, after fork")]
pub(crate) fn switch_user(uid: u32, groups: &[gid_t]) -> Result<(), (Step, c_int)> {
    // SAFETY: `groups` is a live slice of the length given; the other calls pass numbers.
    unsafe {
        check(
            Step::Groups,
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) as c_int,
        )?;
        check(
            Step::Group,
            libc::syscall(libc::SYS_setresgid, uid, uid, uid) as c_int,
        )?;
        check(
            Step::User,
            libc::syscall(libc::SYS_setresuid, uid, uid, uid) as c_int,
        )
    }
}

/// A change of user drops them; a caller that stays who it is may have some.
#[allow(unsafe_code, reason = "capset and prctl in the child, after fork")]
fn drop_capabilities() -> Result<(), (Step, c_int)> {
    const VERSION_3: u32 = 0x2008_0522;
    let header: [u32; 2] = [VERSION_3, 0];
    let none = [0_u32; 6];
    // SAFETY: the header and the three sets of two words have the layout the kernel expects.
    unsafe {
        // Kernels before 4.3 have no ambient set to clear.
        libc::prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_CLEAR_ALL,
            0,
            0,
            0,
        );
        check(
            Step::Capabilities,
            libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) as c_int,
        )
    }
}

#[allow(unsafe_code, reason = "prctl in the child, after fork")]
fn no_new_privileges() -> Result<(), (Step, c_int)> {
    // SAFETY: numbers only.
    check(Step::Privileges, unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    })
}

#[allow(unsafe_code, reason = "prctl in the child, after fork")]
fn die_with(parent: pid_t) -> Result<(), (Step, c_int)> {
    // SAFETY: numbers only.
    unsafe {
        check(
            Step::ParentDeath,
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0),
        )?;
        if libc::getppid() == parent {
            Ok(())
        } else {
            Err((Step::ParentDeath, libc::ESRCH))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_crosses_the_pipe() {
        for step in Step::ALL {
            assert_eq!(Step::from_byte(step as u8), Some(step));
        }
        assert_eq!(Step::from_byte(200), None);
    }
}
