//! A library that tests load into `sandtree` to replace calls of the C library; the tests build it
//! with `rustc` alone. Files in the directory `SANDTREE_SHIM` control it:
//!
//! - `clock`: the error of the wall clock in seconds.
//! - `fsync`: the next `fsync` of a file whose path contains this text fails with ENOSPC, and this
//!   file is removed.
//! - `fsyncs`: gets the path of each file and directory that is synced.
//! - `linkat`: the file system has no hard links.

use std::ffi::{c_char, c_int, c_long};
use std::fs;
use std::io::Write;
use std::path::PathBuf;

#[cfg(target_arch = "x86_64")]
mod number {
    pub const FSYNC: i64 = 74;
    pub const CLOCK_GETTIME: i64 = 228;
    pub const LINKAT: i64 = 265;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub const FSYNC: i64 = 82;
    pub const CLOCK_GETTIME: i64 = 113;
    pub const LINKAT: i64 = 37;
}

const EPERM: c_int = 1;
const ENOSPC: c_int = 28;
const CLOCK_REALTIME: c_int = 0;

#[repr(C)]
pub struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn __errno_location() -> *mut c_int;
}

fn order(name: &str) -> Option<PathBuf> {
    std::env::var_os("SANDTREE_SHIM")
        .map(|dir| PathBuf::from(dir).join(name))
        .filter(|path| path.exists())
}

fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library gives each thread a place for its error.
    unsafe { *__errno_location() = errno };
    -1
}

/// Whether this call must fail; only one does.
fn is_to_fail(fd: c_int) -> bool {
    let Some(order) = order("fsync") else {
        return false;
    };
    let (Ok(part), Ok(path)) = (
        fs::read_to_string(&order),
        fs::read_link(format!("/proc/self/fd/{fd}")),
    ) else {
        return false;
    };
    path.to_string_lossy().contains(part.trim()) && fs::remove_file(order).is_ok()
}

/// Records the path of a synced file, if a test asks for it.
fn note(fd: c_int) {
    let Some(notes) = order("fsyncs") else { return };
    let path = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
    let mut notes = fs::File::options()
        .append(true)
        .open(notes)
        .expect("the test's own file is there");
    writeln!(notes, "{}", path.display()).expect("the test's own file takes a line");
}

/// # Safety
///
/// As for the call of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fsync(fd: c_int) -> c_int {
    if is_to_fail(fd) {
        return fail(ENOSPC);
    }
    note(fd);
    // SAFETY: the arguments are the caller's.
    unsafe { syscall(number::FSYNC, fd) as c_int }
}

/// # Safety
///
/// As for the call of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int {
    // SAFETY: the arguments are the caller's.
    let result = unsafe { syscall(number::CLOCK_GETTIME, clock, time) as c_int };
    if clock == CLOCK_REALTIME && result == 0 {
        let wrong_by = order("clock")
            .and_then(|path| fs::read_to_string(path).ok()?.trim().parse::<i64>().ok());
        // SAFETY: the kernel has just written there.
        unsafe { (*time).seconds += wrong_by.unwrap_or(0) };
    }
    result
}

/// # Safety
///
/// As for the call of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn linkat(
    from_dir: c_int,
    from: *const c_char,
    to_dir: c_int,
    to: *const c_char,
    flags: c_int,
) -> c_int {
    if order("linkat").is_some() {
        return fail(EPERM);
    }
    // SAFETY: the arguments are the caller's.
    unsafe { syscall(number::LINKAT, from_dir, from, to_dir, to, flags) as c_int }
}
