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
mod protect;

use core::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_void, off_t, size_t};

use format::{
    Base, Entry, Failure, LAYER_FDS, LAYERS_MAX, PLAN_FD, Plan, RAM_FD, REPORT_FD, Report, Step,
};

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

    /// The base of guest memory: this mapping, made.
    fn mapped(&self) -> Result<Mapping, Failure> {
        let address = self.map().map_err(|errno| Failure {
            step: Step::MapBase,
            errno,
        })?;
        Ok(Mapping { address, ..*self })
    }

    /// The base of guest memory: zeros in place of the file. Over a file, each first write would
    /// also allocate a page of that file.
    fn zeros(&self) -> Result<Mapping, Failure> {
        let zeros = Mapping {
            flags: self.flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            fd: -1,
            offset: 0,
            ..*self
        };
        zeros.mapped()
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

/// Registers write protection of memory that was laid, reports, and gives up the way to the report.
fn finish(report: &mut Report, laid: Result<usize, Failure>) {
    match laid {
        Ok(address) => {
            report.address = address as u64;
            report.tracking = report
                .tracking
                .and_then(|()| protect::protect(report.address, report.bytes));
        }
        Err(failure) => report.mapping = Err(failure),
    }
    tell(report);
    close(REPORT_FD);
}

/// Maps the base, then the entries over it.
fn lay(wanted: &Mapping, handed: &mut Handed, report: &mut Report) -> Result<usize, Failure> {
    let plan = handed.plan(wanted.bytes)?;
    let base = match plan.base {
        Base::File => wanted.mapped(),
        Base::Zeros => wanted.zeros(),
    }?;
    lay_entries(&base, &plan, handed, report).map(|()| base.address)
}

fn lay_entries(
    ram: &Mapping,
    plan: &Plan,
    handed: &mut Handed,
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
            handed.plan,
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
            lay_entry(ram, &entry, handed.layer(entry.descriptor)).map_err(|errno| Failure {
                step: Step::MapEntry,
                errno,
            })?;
            report.regions += 1;
        }
    }
    Ok(())
}

fn lay_entry(ram: &Mapping, entry: &Entry, layer: c_int) -> Result<(), c_int> {
    let mapping = Mapping {
        address: ram.address + entry.guest_offset as usize,
        bytes: entry.bytes as usize,
        protection: ram.protection,
        flags: libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_NORESERVE,
        fd: layer,
        offset: entry.file_offset.cast_signed(),
    };
    mapping.map().map(drop)
}

/// The descriptors of a plan and of the layers that it names.
struct Handed {
    plan: c_int,
    came: Came,
    /// By their place in a plan; -1 where there is none, which the kernel refuses to map.
    layers: [c_int; LAYERS_MAX],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Came {
    /// At the numbers that plans use. Other descriptors of QEMU may have such numbers, too: only
    /// those that the plan names are layers.
    WithArguments,
    InMessage,
}

impl Handed {
    fn with_arguments() -> Self {
        Self {
            plan: PLAN_FD,
            came: Came::WithArguments,
            layers: [-1; LAYERS_MAX],
        }
    }

    /// The beginning of the plan, for RAM of that size.
    fn plan(&self, ram_bytes: usize) -> Result<Plan, Failure> {
        let mut header = [0; Plan::BYTES];
        read(self.plan, &mut header, 0)?;
        let plan = Plan::decode(&header).filter(|plan| plan.ram_bytes == ram_bytes as u64);
        plan.ok_or(Failure {
            step: Step::ReadPlan,
            errno: libc::EINVAL,
        })
    }

    /// The layer that a plan names.
    fn layer(&mut self, descriptor: u32) -> c_int {
        let place = descriptor.wrapping_sub(LAYER_FDS.start.cast_unsigned()) as usize;
        let Some(layer) = self.layers.get_mut(place) else {
            return -1;
        };
        if self.came == Came::WithArguments {
            *layer = descriptor.cast_signed();
        }
        *layer
    }

    /// Mappings stay when the descriptor they came from is closed; QEMU needs no way to the files
    /// themselves.
    fn close(self) {
        close(self.plan);
        self.layers.iter().for_each(|layer| close(*layer));
    }
}

/// Device and inode of the file behind a descriptor.
fn identity(fd: c_int) -> Option<(libc::dev_t, libc::ino_t)> {
    status(fd).map(|status| (status.st_dev, status.st_ino))
}

fn is_socket(fd: c_int) -> bool {
    status(fd).is_some_and(|status| status.st_mode & libc::S_IFMT == libc::S_IFSOCK)
}

/// The C library's `fstat` would bind this library to its version.
#[allow(unsafe_code, reason = "fstat on a bare number")]
fn status(fd: c_int) -> Option<libc::stat> {
    let mut status = core::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call gets a pointer to a local of its type, and has filled it when it returns 0.
    unsafe {
        (libc::syscall(libc::SYS_fstat, fd, status.as_mut_ptr()) == 0).then(|| status.assume_init())
    }
}

/// Reads a plan from that offset on; less than all is a failure.
#[allow(unsafe_code, reason = "pread on a bare number")]
fn read(plan: c_int, into: &mut [u8], offset: u64) -> Result<(), Failure> {
    // SAFETY: the buffer is alive and as long as said.
    let count = unsafe {
        libc::pread(
            plan,
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

/// Closes a descriptor, if there is one.
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
