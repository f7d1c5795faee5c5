//! The library loaded into QEMU. Where QEMU maps the file of its guest's RAM, the library maps the
//! memory of a captured state instead.
//!
//! ```text
//!   mmap(fd of RAM_FD's file, private) -> huge pages off -> base: zeros -> plan's entries, each from its layer
//!                                      -> write protection registered -> report -> plan, report, layers closed
//!   the same, PLAN_FD being a socket   -> huge pages off -> zeros; the rest in a thread, once the plan arrives (`later`)
//!   any other mmap                     -> the kernel
//! ```
//!
//! Always: it acts once per process, and only with a plan. It parses no file format: the engine
//! computes the plan. It prints nothing, allocates nothing and does not panic, being inside a
//! program that expects none of it. When it fails: a mapping that fails is reported and is a failed
//! `mmap` to QEMU, which ends. Tracking that fails is reported and nothing else: the memory is
//! right all the same.
//!
//! What is loaded has no standard library in it (see `build.rs` of `engine`). Other builds only
//! check the code, and unwinding, which they are set to, needs one.
#![cfg_attr(panic = "abort", no_std)]

mod format;
mod later;
mod lay;
mod protect;

use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_void, off_t, size_t};

use format::{PLAN_FD, RAM_FD, Report};
use lay::{Handed, Mapping, finish, identity, is_socket, lay};

static DONE: AtomicBool = AtomicBool::new(false);

#[allow(
    unsafe_code,
    reason = "takes the place of the C library's mmap in QEMU"
)]
#[unsafe(no_mangle)]
extern "C" fn mmap64(
    address: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let wanted = Mapping {
        address: address as usize,
        bytes,
        protection,
        flags,
        fd,
        offset,
    };
    let mapped = if is_guest_ram(&wanted) {
        lay_guest_ram(&wanted)
    } else {
        wanted.map()
    };
    match mapped {
        Ok(address) => address as *mut c_void,
        Err(errno) => {
            // SAFETY: the pointer to this thread's errno is always valid.
            unsafe { *libc::__errno_location() = errno };
            libc::MAP_FAILED
        }
    }
}

#[allow(
    unsafe_code,
    reason = "takes the place of the C library's mmap in QEMU"
)]
#[unsafe(no_mangle)]
extern "C" fn mmap(
    address: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    mmap64(address, bytes, protection, flags, fd, offset)
}

fn is_guest_ram(wanted: &Mapping) -> bool {
    let private = wanted.flags & libc::MAP_TYPE == libc::MAP_PRIVATE
        && wanted.flags & libc::MAP_ANONYMOUS == 0;
    private
        && !DONE.load(Ordering::Relaxed)
        && identity(PLAN_FD).is_some()
        && identity(wanted.fd).is_some_and(|file| Some(file) == identity(RAM_FD))
        && !DONE.swap(true, Ordering::Relaxed)
}

fn lay_guest_ram(wanted: &Mapping) -> Result<usize, c_int> {
    // First, before any page exists that could be a huge one.
    let tracking = protect::no_huge_pages();
    let mut report = Report {
        address: 0,
        bytes: wanted.bytes as u64,
        regions: 0,
        mapping: Ok(()),
        tracking,
    };
    let laid = if is_socket(PLAN_FD) {
        let waits = wanted.zeros().and_then(|ram| later::wait(ram, tracking));
        if let Ok(address) = waits {
            return Ok(address);
        }
        waits
    } else {
        let mut handed = Handed::with_arguments();
        let laid = lay(wanted, &mut handed, &mut report);
        handed.close();
        laid
    };
    finish(&mut report, laid);
    laid.map_err(|failure| failure.errno)
}

/// Nothing here panics, and a message would reach no reader.
#[cfg(panic = "abort")]
#[panic_handler]
#[allow(unsafe_code, reason = "abort")]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: it takes nothing and does not return.
    unsafe { libc::abort() }
}
