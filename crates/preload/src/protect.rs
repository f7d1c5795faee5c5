//! Asks the kernel to note which pages of a range are written: write protection that it lifts by
//! itself (Linux 6.7). `engine` compiles this same file for its probe.
//!
//! Always: only system calls on numbers and locals, so it may run between `fork` and `exec` and
//! inside QEMU's `mmap`.

use super::format::{Failure, Step};

const USER_MODE_ONLY: i32 = 1;
const API: u64 = 0xaa;
/// The kernel lifts the protection of a written page itself instead of telling a reader.
const FEATURE_WP_ASYNC: u64 = 1 << 15;
/// Pages that do not exist yet are protected, too.
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const MODE_WP: u64 = 1 << 1;
// _IOWR(0xaa, 0x3f, 24 bytes) and _IOWR(0xaa, 0x00, 32 bytes)
const IOCTL_API: u64 = 0xc018_aa3f;
const IOCTL_REGISTER: u64 = 0xc020_aa00;

/// One written byte must not make 2 MB of written pages. Without huge pages in the whole process
/// that cannot happen.
#[allow(unsafe_code, reason = "a system call on numbers")]
pub fn no_huge_pages() -> Result<(), Failure> {
    // SAFETY: no memory is passed.
    check(
        Step::HugePages,
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }.into(),
    )
    .map(drop)
}

/// Registers the range. The descriptor behind it stays open until the process ends, and the
/// registration with it.
#[allow(
    unsafe_code,
    reason = "userfaultfd has no safe form; the range is registered, not accessed"
)]
pub fn protect(address: u64, bytes: u64) -> Result<(), Failure> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    let mut api = [API, FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED, 0];
    let mut register = [address, bytes, MODE_WP, 0];
    // SAFETY: each ioctl gets an array of the length its number says, alive during the call.
    // Registered in this mode no access ever waits for a reader, so nothing in the process changes
    // but what the kernel notes.
    unsafe {
        let fd = check(Step::Open, libc::syscall(libc::SYS_userfaultfd, flags))?;
        let negotiated = check(
            Step::Negotiate,
            libc::syscall(libc::SYS_ioctl, fd, IOCTL_API, api.as_mut_ptr()),
        );
        let registered = negotiated.and_then(|_| {
            check(
                Step::Register,
                libc::syscall(libc::SYS_ioctl, fd, IOCTL_REGISTER, register.as_mut_ptr()),
            )
        });
        if registered.is_err() {
            libc::close(fd as i32);
        }
        registered.map(drop)
    }
}

#[allow(unsafe_code, reason = "errno")]
fn check(step: Step, result: i64) -> Result<i64, Failure> {
    // SAFETY: the pointer to this thread's errno is always valid.
    if result < 0 {
        Err(Failure {
            step,
            errno: unsafe { *libc::__errno_location() },
        })
    } else {
        Ok(result)
    }
}
