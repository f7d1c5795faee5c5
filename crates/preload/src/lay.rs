//! Laying captured memory over the guest's RAM, as a plan says.
//!
//! Always: only system calls on numbers and locals. What comes with the plan is closed when it is
//! laid, whether that succeeds or not.

use libc::{c_int, off_t};

use crate::format::{
    Base, Entry, Failure, LAYER_FDS, LAYERS_MAX, PLAN_FD, Plan, REPORT_FD, Report, Step,
};
use crate::protect;

/// Entries read at a time: 4 KiB of QEMU's stack.
const ENTRIES_READ: usize = 128;

/// The arguments of one `mmap`.
#[derive(Clone, Copy)]
pub struct Mapping {
    pub address: usize,
    pub bytes: usize,
    pub protection: c_int,
    pub flags: c_int,
    pub fd: c_int,
    pub offset: off_t,
}

impl Mapping {
    #[allow(
        unsafe_code,
        reason = "the system call, since the C library's function is this one"
    )]
    pub fn map(&self) -> Result<usize, c_int> {
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
    pub fn zeros(&self) -> Result<Mapping, Failure> {
        let zeros = Mapping {
            flags: self.flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            fd: -1,
            offset: 0,
            ..*self
        };
        zeros.mapped()
    }
}

/// Registers write protection of memory that was laid, reports, and gives up the way to the report.
pub fn finish(report: &mut Report, laid: Result<usize, Failure>) {
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
pub fn lay(wanted: &Mapping, handed: &mut Handed, report: &mut Report) -> Result<usize, Failure> {
    let plan = handed.plan(wanted.bytes)?;
    let base = match plan.base {
        Base::File => wanted.mapped(),
        Base::Zeros => wanted.zeros(),
    }?;
    lay_entries(&base, &plan, handed, report).map(|()| base.address)
}

pub fn lay_entries(
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
pub struct Handed {
    pub plan: c_int,
    pub came: Came,
    /// By their place in a plan; -1 where there is none, which the kernel refuses to map.
    pub layers: [c_int; LAYERS_MAX],
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Came {
    /// At the numbers that plans use. Other descriptors of QEMU may have such numbers, too: only
    /// those that the plan names are layers.
    WithArguments,
    InMessage,
}

impl Handed {
    pub fn with_arguments() -> Self {
        Self {
            plan: PLAN_FD,
            came: Came::WithArguments,
            layers: [-1; LAYERS_MAX],
        }
    }

    /// The beginning of the plan, for RAM of that size.
    pub fn plan(&self, ram_bytes: usize) -> Result<Plan, Failure> {
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
    pub fn close(self) {
        close(self.plan);
        self.layers.iter().for_each(|layer| close(*layer));
    }
}

/// Device and inode of the file behind a descriptor.
pub fn identity(fd: c_int) -> Option<(libc::dev_t, libc::ino_t)> {
    status(fd).map(|status| (status.st_dev, status.st_ino))
}

pub fn is_socket(fd: c_int) -> bool {
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
pub fn close(fd: c_int) {
    // SAFETY: these descriptors were put there for this library, and it uses none of them again.
    unsafe { libc::close(fd) };
}

#[allow(unsafe_code, reason = "errno")]
pub fn errno() -> c_int {
    // SAFETY: the pointer to this thread's errno is always valid.
    unsafe { *libc::__errno_location() }
}
