//! The plan of a machine that was started ahead of time: a thread waits for it on a socket.
//!
//! ```text
//!   QEMU's thread: mmap -> zeros -> thread started -> QEMU starts up and waits for a state
//!   the thread:    message (plan and layers as descriptors) -> entries laid over the zeros
//!                    -> write protection registered -> report -> everything closed
//! ```
//!
//! Always: the guest's processors stand still until the report is written, so nothing reads or
//! writes the memory while it changes. The socket's other end is the engine, which sends one
//! message. When it fails: the report says so, and the engine ends QEMU. If the engine is gone, the
//! thread ends, and QEMU with it.

use core::sync::atomic::{AtomicUsize, Ordering};

use libc::{c_int, c_void};

use crate::format::{Base, Failure, LAYERS_MAX, PLAN_FD, Report, Step};
use crate::lay::{Came, Handed, Mapping, close, errno, finish, lay_entries};

static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Whether huge pages are off.
static TRACKING: AtomicUsize = AtomicUsize::new(0);

/// Room for the descriptors of a plan and its layers in one message, aligned as the kernel wants.
#[repr(align(8))]
struct Control([u8; CONTROL_BYTES]);

const HEADER_BYTES: usize = size_of::<libc::cmsghdr>();
const CONTROL_BYTES: usize = HEADER_BYTES + (1 + LAYERS_MAX) * size_of::<c_int>() + 8;

/// Starts the thread that lays the plan over this memory. Returns the memory's address.
#[allow(unsafe_code, reason = "starts a thread")]
pub fn wait(ram: Mapping, tracking: Result<(), Failure>) -> Result<usize, Failure> {
    ADDRESS.store(ram.address, Ordering::Release);
    BYTES.store(ram.bytes, Ordering::Release);
    TRACKING.store(usize::from(tracking.is_ok()), Ordering::Release);
    let mut thread = core::mem::MaybeUninit::<libc::pthread_t>::uninit();
    let mut all = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: every pointer is to a local of its type. The sets are filled before they are read.
    // The thread gets no argument. Signals are for QEMU's own threads, so this one blocks them all.
    let failed = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let failed = libc::pthread_create(
            thread.as_mut_ptr(),
            core::ptr::null(),
            run,
            core::ptr::null_mut(),
        );
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut());
        failed
    };
    match failed {
        0 => Ok(ram.address),
        errno => Err(Failure {
            step: Step::Wait,
            errno,
        }),
    }
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    let bytes = BYTES.load(Ordering::Acquire);
    let ram = Mapping {
        address: ADDRESS.load(Ordering::Acquire),
        bytes,
        protection: libc::PROT_READ | libc::PROT_WRITE,
        flags: 0,
        fd: -1,
        offset: 0,
    };
    let tracking = match TRACKING.load(Ordering::Acquire) {
        0 => Err(Failure {
            step: Step::HugePages,
            errno: libc::EINVAL,
        }),
        _ => Ok(()),
    };
    let mut report = Report {
        address: 0,
        bytes: bytes as u64,
        regions: 0,
        mapping: Ok(()),
        tracking,
    };
    let laid = match receive() {
        Ok(None) => return core::ptr::null_mut(),
        Ok(Some(mut handed)) => {
            let laid = lay_over_zeros(&ram, &mut handed, &mut report);
            handed.close();
            laid
        }
        Err(failure) => Err(failure),
    };
    finish(&mut report, laid);
    close(PLAN_FD);
    core::ptr::null_mut()
}

fn lay_over_zeros(
    ram: &Mapping,
    handed: &mut Handed,
    report: &mut Report,
) -> Result<usize, Failure> {
    let plan = handed.plan(ram.bytes)?;
    if plan.base != Base::Zeros {
        return Err(Failure {
            step: Step::MapBase,
            errno: libc::EINVAL,
        });
    }
    lay_entries(ram, &plan, handed, report).map(|()| ram.address)
}

/// Waits for the message; nothing if the engine is gone.
#[allow(unsafe_code, reason = "recvmsg on a bare number")]
fn receive() -> Result<Option<Handed>, Failure> {
    let mut byte = 0u8;
    let mut piece = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: all zeros is a valid value of this structure of numbers and pointers.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES;
    let count = loop {
        // SAFETY: the message points to locals that are alive and as long as it says.
        let count = unsafe { libc::recvmsg(PLAN_FD, &mut message, libc::MSG_CMSG_CLOEXEC) };
        if count >= 0 || errno() != libc::EINTR {
            break count;
        }
    };
    match count {
        0 => Ok(None),
        1 if message.msg_flags & libc::MSG_CTRUNC == 0 => descriptors(&control.0).map(Some),
        1 => Err(refused(libc::EMSGSIZE)),
        _ => Err(refused(errno())),
    }
}

/// The descriptors of the one control message: the plan's, then the layers'.
fn descriptors(control: &[u8; CONTROL_BYTES]) -> Result<Handed, Failure> {
    // The length of the control message, its header included, is at its beginning.
    let filled = control
        .first_chunk()
        .map_or(0, |length| usize::from_ne_bytes(*length));
    let mut numbers = control
        .get(HEADER_BYTES..filled)
        .unwrap_or_default()
        .chunks_exact(size_of::<c_int>())
        .map(|bytes| bytes.try_into().map_or(-1, c_int::from_ne_bytes));
    let plan = numbers.next().ok_or(refused(libc::EBADMSG))?;
    let mut layers = [-1; LAYERS_MAX];
    for (layer, number) in layers.iter_mut().zip(numbers) {
        *layer = number;
    }
    Ok(Handed {
        plan,
        came: Came::InMessage,
        layers,
    })
}

fn refused(errno: c_int) -> Failure {
    Failure {
        step: Step::Wait,
        errno,
    }
}
