//! The few system calls that rustix has no safe form of. Every `unsafe` of the agent is here,
//! except for the child's `execve`.

#![allow(
    unsafe_code,
    reason = "each function passes only valid pointers to live values to one system call"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::Pid;

/// Takes over a descriptor that the parent process passed by number.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD only reads, and fails for a number that is not open.
    check(unsafe { libc::fcntl(number, libc::F_GETFD) })?;
    // SAFETY: the descriptor is open, and main, the only caller, takes it over once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Makes the allocator keep up to `bytes` of freed memory. Otherwise every frame of an upload would
/// get new memory, and a page fault costs an emulated guest as much as a copy of the page.
pub fn keep_freed_memory(bytes: i32) {
    // SAFETY: mallopt takes two numbers. It returns 0 for a parameter that it does not know, and
    // then the allocator works as before.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, bytes) };
}

/// Blocks every signal for this thread and the threads that it starts, and makes `heard` readable
/// as a descriptor.
///
/// A blocked SIGTERM cannot end the agent. Children inherit the mask and must [`clean_signals`].
pub fn block_signals(heard: &[i32]) -> io::Result<OwnedFd> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut readable = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset and sigemptyset initialise the sets they are given; the others read them.
    unsafe {
        check(libc::sigfillset(all.as_mut_ptr()))?;
        check(libc::sigemptyset(readable.as_mut_ptr()))?;
        for number in heard {
            check(libc::sigaddset(readable.as_mut_ptr(), *number))?;
        }
        check(libc::pthread_sigmask(
            libc::SIG_SETMASK,
            all.as_ptr(),
            std::ptr::null_mut(),
        ))?;
        let fd = check(libc::signalfd(
            -1,
            readable.as_ptr(),
            libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
        ))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The numbers of the signals since the last call.
pub fn received_signals(fd: impl AsFd) -> Vec<i32> {
    const RECORD: usize = size_of::<libc::signalfd_siginfo>();
    let mut records = [0; 16 * RECORD];
    let count = rustix::io::read(fd, &mut records).unwrap_or(0);
    let number = |record: &[u8]| i32::from_ne_bytes([record[0], record[1], record[2], record[3]]);
    records[..count].chunks_exact(RECORD).map(number).collect()
}

/// Restores what a command expects: no signal blocked or ignored. May be called between fork and
/// exec.
pub fn clean_signals() -> io::Result<()> {
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: signal takes a number and a constant; sigemptyset initialises the set that
    // pthread_sigmask then reads.
    unsafe {
        for number in (1..32).filter(|number| ![libc::SIGKILL, libc::SIGSTOP].contains(number)) {
            if libc::signal(number, libc::SIG_DFL) == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        check(libc::sigemptyset(none.as_mut_ptr()))?;
        check(libc::pthread_sigmask(
            libc::SIG_SETMASK,
            none.as_ptr(),
            std::ptr::null_mut(),
        ))?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Process(Pid),
    Group(Pid),
    Everything,
}

/// Sends any signal by number, real-time ones included; 0 only checks that the target exists.
pub fn signal(target: Target, number: i32) -> io::Result<()> {
    let pid = match target {
        Target::Process(pid) => pid.as_raw_nonzero().get(),
        Target::Group(pid) => -pid.as_raw_nonzero().get(),
        Target::Everything => -1,
    };
    // SAFETY: kill takes two numbers.
    check(unsafe { libc::kill(pid, number) }).map(drop)
}

#[derive(Debug, PartialEq, Eq)]
pub enum Forked {
    Parent,
    Child,
}

/// Forks. Only for a process with one thread: the child has no other.
pub fn fork() -> io::Result<Forked> {
    // SAFETY: init has not started a thread yet when it forks, so the child may do anything.
    match check(unsafe { libc::fork() })? {
        0 => Ok(Forked::Child),
        _ => Ok(Forked::Parent),
    }
}

/// The stack of a child until it executes a program. It needs a few kilobytes.
const CHILD_STACK_BYTES: usize = 64 << 10;
/// What a child that could not execute its program ends with. The agent does not read it.
const NOT_EXECUTED: libc::c_int = 127;

/// Starts a process that shares this one's memory until it executes a program; this thread waits
/// until then. So no page table is copied, and no page when one of the two writes to it. If `child`
/// returns, its process ends.
///
/// `child` must make system calls only, on values made before. Other threads run meanwhile, so it
/// must not allocate. All signals are blocked, so that no handler runs in it.
pub fn spawn_sharing(mut child: &mut dyn FnMut()) -> io::Result<Pid> {
    extern "C" fn begin(argument: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the argument is the reference below, which lives until the parent continues.
        let child = unsafe { &mut *argument.cast::<&mut dyn FnMut()>() };
        child();
        NOT_EXECUTED
    }
    let mut stack = Vec::<u8>::with_capacity(CHILD_STACK_BYTES);
    let argument = (&raw mut child).cast();
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack grows down from its aligned end inside the allocation. Stack and argument
    // outlive the child's use of them, because CLONE_VFORK returns only after that.
    let pid = check(unsafe {
        let end = stack.as_mut_ptr().add(stack.capacity());
        let top = end.sub(end.addr() % 16);
        libc::clone(begin, top.cast(), flags, argument)
    })?;
    Ok(Pid::from_raw(pid).expect("a child's number is not zero"))
}

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;

/// Lets this thread allocate memory while others wait for it to write their data.
pub fn serve_writers() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: prctl takes numbers.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) }).map(drop)
}

/// Mixes bytes into the kernel's pool, credits them, and reseeds every generator from it.
pub fn add_entropy(random: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    // struct rand_pool_info: bits, length, then the bytes.
    let mut info = Vec::with_capacity(8 + bytes.len());
    info.extend_from_slice(&(bytes.len() as i32 * 8).to_ne_bytes());
    info.extend_from_slice(&(bytes.len() as i32).to_ne_bytes());
    info.extend_from_slice(bytes);
    let fd = random.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the two counts and as many bytes as the second says, all inside
    // `info`.
    check(unsafe { libc::ioctl(fd, RNDADDENTROPY, info.as_ptr()) })?;
    // SAFETY: RNDRESEEDCRNG has no argument.
    check(unsafe { libc::ioctl(fd, RNDRESEEDCRNG) }).map(drop)
}

/// Enlarges a mounted ext4 to `blocks` blocks; its present size is no error.
pub fn resize_ext4(root: impl AsFd, blocks: u64) -> io::Result<()> {
    // SAFETY: the kernel reads one u64 through the pointer.
    check(unsafe {
        libc::ioctl(
            root.as_fd().as_raw_fd(),
            EXT4_IOC_RESIZE_FS,
            &raw const blocks,
        )
    })
    .map(drop)
}

/// `_IOWR('X', …)`, the same on all our architectures.
const FIFREEZE: libc::c_ulong = 0xc004_5877;
const FITHAW: libc::c_ulong = 0xc004_5878;
const FITRIM: libc::c_ulong = 0xc018_5879;

/// Writes a file system out and blocks further writes. Writers wait; their calls do not fail.
pub fn freeze(mount: impl AsFd) -> io::Result<()> {
    // SAFETY: FIFREEZE ignores its argument.
    check(unsafe { libc::ioctl(mount.as_fd().as_raw_fd(), FIFREEZE, 0) }).map(drop)
}

pub fn thaw(mount: impl AsFd) -> io::Result<()> {
    // SAFETY: FITHAW ignores its argument.
    check(unsafe { libc::ioctl(mount.as_fd().as_raw_fd(), FITHAW, 0) }).map(drop)
}

/// Informs the disk which blocks no file uses.
pub fn trim(mount: impl AsFd) -> io::Result<()> {
    // struct fstrim_range: start, length, least length.
    let mut range: [u64; 3] = [0, u64::MAX, 0];
    // SAFETY: the kernel reads and writes three u64 through the pointer.
    check(unsafe { libc::ioctl(mount.as_fd().as_raw_fd(), FITRIM, &raw mut range) }).map(drop)
}

/// `_IOW('U', …, int)` and `_IO('U', …)` of uinput.
const UI_SET_EVBIT: libc::c_ulong = 0x4004_5564;
const UI_SET_KEYBIT: libc::c_ulong = 0x4004_5565;
const UI_SET_RELBIT: libc::c_ulong = 0x4004_5566;
const UI_SET_ABSBIT: libc::c_ulong = 0x4004_5567;
const UI_DEV_CREATE: libc::c_ulong = 0x5501;

/// What an input device of the agent can report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputBit {
    Kind(u16),
    Key(u16),
    Relative(u16),
    Absolute(u16),
}

pub fn add_input_bit(device: impl AsFd, bit: InputBit) -> io::Result<()> {
    let (request, number) = match bit {
        InputBit::Kind(number) => (UI_SET_EVBIT, number),
        InputBit::Key(number) => (UI_SET_KEYBIT, number),
        InputBit::Relative(number) => (UI_SET_RELBIT, number),
        InputBit::Absolute(number) => (UI_SET_ABSBIT, number),
    };
    let number = libc::c_int::from(number);
    // SAFETY: these requests take a number.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), request, number) }).map(drop)
}

/// Shows a device that has been described to the guest's programs, until it is closed.
pub fn create_input_device(device: impl AsFd) -> io::Result<()> {
    // SAFETY: UI_DEV_CREATE has no argument.
    check(unsafe { libc::ioctl(device.as_fd().as_raw_fd(), UI_DEV_CREATE) }).map(drop)
}

/// Sets an interface's address or netmask (`SIOCSIFADDR`, `SIOCSIFNETMASK`).
pub fn set_interface_address(
    socket: impl AsFd,
    name: &str,
    request: libc::c_ulong,
    address: [u8; 4],
) -> io::Result<()> {
    let mut ifreq = interface_request(name)?;
    ifreq.ifr_ifru.ifru_addr = internet_address(address);
    // SAFETY: the kernel reads one ifreq with its address filled in.
    check(unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), request, &raw const ifreq) }).map(drop)
}

pub fn bring_up(socket: impl AsFd, name: &str) -> io::Result<()> {
    let mut ifreq = interface_request(name)?;
    ifreq.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the kernel reads one ifreq with its flags filled in.
    check(unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::SIOCSIFFLAGS,
            &raw const ifreq,
        )
    })
    .map(drop)
}

/// Adds the default route; an existing one is no error.
pub fn add_default_route(socket: impl AsFd, gateway: [u8; 4]) -> io::Result<()> {
    // SAFETY: all zero is a valid rtentry: addresses of no family, a null device name.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = internet_address([0; 4]);
    route.rt_genmask = internet_address([0; 4]);
    route.rt_gateway = internet_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: the kernel reads one rtentry; its device name is null.
    match check(unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::SIOCADDRT,
            &raw const route,
        )
    }) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other.map(drop),
    }
}

fn interface_request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all zero is a valid ifreq.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= ifreq.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (to, from) in ifreq.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(ifreq)
}

/// A `sockaddr` that holds a `sockaddr_in`: family, port 0, address, in the bytes of both.
fn internet_address(address: [u8; 4]) -> libc::sockaddr {
    let mut data = [0 as libc::c_char; 14];
    for (to, from) in data[2..6].iter_mut().zip(address) {
        *to = from as libc::c_char;
    }
    libc::sockaddr {
        sa_family: libc::AF_INET as libc::sa_family_t,
        sa_data: data,
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
