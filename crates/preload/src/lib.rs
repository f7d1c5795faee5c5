//! The library loaded into QEMU. Where QEMU maps the file of its guest's RAM, the library maps the
//! memory of a captured state instead.
//!
//! ```text
//!   mmap(fd of RAM_FD's file, private) -> huge pages off -> base: zeros -> plan's entries, each from its layer
//!                                      -> write protection registered -> report -> plan, report, layers closed
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
mod protect;

use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_void, off_t, size_t};

use format::{Base, Entry, Failure, LAYER_FDS, PLAN_FD, Plan, RAM_FD, REPORT_FD, Report, Step};

static DONE: AtomicBool = AtomicBool::new(false);

/// Entries read at a time: 4 KiB of QEMU's stack.
const ENTRIES_READ: usize = 128;

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

/// The arguments of one `mmap`.
#[derive(Clone, Copy)]
struct Mapping {
    address: usize,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
}

impl Mapping {
    #[allow(
        unsafe_code,
        reason = "the system call, since the C library's function is this one"
    )]
    fn map(&self) -> Result<usize, c_int> {
        // SAFETY: this is either the caller's own request, or lies inside the range that a caller
        // asked to have replaced.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                self.address,
                self.bytes,
                self.protection,
                self.flags,
                self.fd,
                self.offset,
            )
        };
        if result == -1 {
            Err(errno())
        } else {
            Ok(result as usize)
        }
    }
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
    let laid = lay(wanted, &mut report);
    match laid {
        Ok(address) => {
            report.address = address as u64;
            report.tracking =
                tracking.and_then(|()| protect::protect(report.address, report.bytes));
        }
        Err(failure) => report.mapping = Err(failure),
    }
    tell(&report);
    close(PLAN_FD);
    close(REPORT_FD);
    laid.map_err(|failure| failure.errno)
}

/// Maps the base, then the entries over it.
fn lay(wanted: &Mapping, report: &mut Report) -> Result<usize, Failure> {
    let mut header = [0; Plan::BYTES];
    read(&mut header, 0)?;
    let plan = Plan::decode(&header).filter(|plan| plan.ram_bytes == wanted.bytes as u64);
    let plan = plan.ok_or(Failure {
        step: Step::ReadPlan,
        errno: libc::EINVAL,
    })?;
    let base = match plan.base {
        Base::File => *wanted,
        // Over a file, each first write would also allocate a page of that file.
        Base::Zeros => Mapping {
            flags: wanted.flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            fd: -1,
            offset: 0,
            ..*wanted
        },
    };
    let address = base.map().map_err(|errno| Failure {
        step: Step::MapBase,
        errno,
    })?;
    let mut layers = Layers(0);
    let laid = lay_entries(&Mapping { address, ..*wanted }, &plan, &mut layers, report);
    layers.close();
    laid.map(|()| address)
}

fn lay_entries(
    ram: &Mapping,
    plan: &Plan,
    layers: &mut Layers,
    report: &mut Report,
) -> Result<(), Failure> {
    let mut buffer = [0; ENTRIES_READ * Entry::BYTES];
    while report.regions < plan.entries {
        let left = usize::try_from(plan.entries - report.regions)
            .unwrap_or(usize::MAX)
            .min(ENTRIES_READ);
        let (piece, _) = buffer
            .split_at_mut_checked(left * Entry::BYTES)
            .unwrap_or_default();
        read(
            piece,
            Plan::BYTES as u64 + report.regions * Entry::BYTES as u64,
        )?;
        for bytes in piece.as_chunks().0 {
            let entry = Entry::decode(bytes);
            if !entry.fits(plan.ram_bytes) {
                return Err(Failure {
                    step: Step::CheckEntry,
                    errno: libc::EINVAL,
                });
            }
            layers.note(entry.descriptor);
            lay_entry(ram, &entry).map_err(|errno| Failure {
                step: Step::MapEntry,
                errno,
            })?;
            report.regions += 1;
        }
    }
    Ok(())
}

fn lay_entry(ram: &Mapping, entry: &Entry) -> Result<(), c_int> {
    let mapping = Mapping {
        address: ram.address + entry.guest_offset as usize,
        bytes: entry.bytes as usize,
        protection: ram.protection,
        flags: libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_NORESERVE,
        fd: entry.descriptor.cast_signed(),
        offset: entry.file_offset.cast_signed(),
    };
    mapping.map().map(drop)
}

/// The layers' descriptors a plan named, one bit each.
struct Layers(u64);

impl Layers {
    fn note(&mut self, descriptor: u32) {
        self.0 |= 1 << (descriptor.wrapping_sub(LAYER_FDS.start.cast_unsigned()) & 63);
    }

    /// Mappings stay when the descriptor they came from is closed; QEMU needs no way to the files
    /// themselves.
    fn close(&self) {
        for (bit, fd) in LAYER_FDS.enumerate() {
            if self.0 & 1 << bit != 0 {
                close(fd);
            }
        }
    }
}

/// Device and inode of the file behind a descriptor. The C library's `fstat` would bind this
/// library to its version.
#[allow(unsafe_code, reason = "fstat on a bare number")]
fn identity(fd: c_int) -> Option<(libc::dev_t, libc::ino_t)> {
    let mut status = core::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call gets a pointer to a local of its type, and has filled it when it returns 0.
    unsafe {
        (libc::syscall(libc::SYS_fstat, fd, status.as_mut_ptr()) == 0).then(|| status.assume_init())
    }
    .map(|status| (status.st_dev, status.st_ino))
}

/// Reads the plan from that offset on; less than all is a failure.
#[allow(unsafe_code, reason = "pread on a bare number")]
fn read(into: &mut [u8], offset: u64) -> Result<(), Failure> {
    // SAFETY: the buffer is alive and as long as said.
    let count = unsafe {
        libc::pread(
            PLAN_FD,
            into.as_mut_ptr().cast(),
            into.len(),
            offset.cast_signed(),
        )
    };
    let failed = |errno| {
        Err(Failure {
            step: Step::ReadPlan,
            errno,
        })
    };
    match usize::try_from(count) {
        Err(_) => failed(errno()),
        // The plan is a file in memory: only its end cuts a read short.
        Ok(count) if count < into.len() => failed(libc::EINVAL),
        Ok(_) => Ok(()),
    }
}

/// One write of less than a pipe takes at once. Without a report the engine knows that something is
/// wrong.
#[allow(unsafe_code, reason = "write on a bare number")]
fn tell(report: &Report) {
    let bytes = report.encode();
    // SAFETY: the buffer is alive and as long as said.
    unsafe { libc::write(REPORT_FD, bytes.as_ptr().cast(), bytes.len()) };
}

#[allow(unsafe_code, reason = "close on a bare number")]
fn close(fd: c_int) {
    // SAFETY: these descriptors were put there for this library, and it uses none of them again.
    unsafe { libc::close(fd) };
}

#[allow(unsafe_code, reason = "errno")]
fn errno() -> c_int {
    // SAFETY: the pointer to this thread's errno is always valid.
    unsafe { *libc::__errno_location() }
}

/// Nothing here panics, and a message would reach no reader.
#[cfg(panic = "abort")]
#[panic_handler]
#[allow(unsafe_code, reason = "abort")]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: it takes nothing and does not return.
    unsafe { libc::abort() }
}
