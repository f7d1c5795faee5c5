//! The shutdown: ends every process, writes everything out, and ends the machine.
//!
//! Always: the machine ends, whatever fails on the way; each failure is a line on the console.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, WaitOptions};
use rustix::system::RebootCommand;

use super::image_init::is_systemd;
use crate::console;
use crate::failure::tolerate;
use crate::role::Role;
use crate::sys::{self, Target};

/// After SIGKILL a process ends as soon as the kernel schedules it.
const KILLED_WITHIN: Duration = Duration::from_secs(2);
const REAPED_EVERY: Duration = Duration::from_millis(50);
/// systemd's "power off" is SIGRTMIN+4; SIGRTMIN is 34, because the C library uses 32 and 33.
const SYSTEMD_POWER_OFF: i32 = 38;
/// The commands that ask other inits to power off. OpenRC's own init has a command of its own.
const POWER_OFF: &[&str] = &["/sbin/poweroff"];
const OPENRC_POWER_OFF: &[&str] = &["/sbin/openrc-shutdown", "--poweroff", "now"];

/// How the machine ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    PowerOff,
    Restart,
}

pub fn leave(role: Role, way: Way, grace: Duration) -> ! {
    if role == Role::UnderInit {
        ask_init(grace);
    } else {
        end_processes(grace);
    }
    rustix::fs::sync();
    unmount_all();
    let command = match way {
        Way::PowerOff => RebootCommand::PowerOff,
        Way::Restart => RebootCommand::Restart,
    };
    let refused = rustix::system::reboot(command);
    panic!("cannot leave the machine by {way:?}: {refused:?}");
}

/// The image's init knows its services and their order, and ends the machine. If the machine still
/// runs after the grace time, the agent ends it.
fn ask_init(grace: Duration) {
    let deadline = Instant::now() + grace;
    match request_power_off() {
        Ok(()) => reap_until(deadline),
        Err(error) => console::say(format_args!("cannot ask init to power off: {error}")),
    }
    tolerate(sys::signal(Target::Everything, libc::SIGKILL));
    reap_all(Instant::now() + KILLED_WITHIN);
}

/// systemd and busybox accept a signal; for other inits, the image has a command.
fn request_power_off() -> io::Result<()> {
    let program = fs::read_link("/proc/1/exe").unwrap_or_default();
    if is_systemd(&program) {
        return sys::signal(Target::Process(Pid::INIT), SYSTEMD_POWER_OFF);
    }
    let asked = match program.file_name().and_then(OsStr::to_str) {
        Some("busybox") => None,
        Some("openrc-init") => Some(OPENRC_POWER_OFF),
        _ => Some(POWER_OFF),
    };
    if let Some([program, arguments @ ..]) = asked
        && Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .is_ok()
    {
        return Ok(());
    }
    sys::signal(Target::Process(Pid::INIT), libc::SIGUSR2)
}

fn end_processes(grace: Duration) {
    for (number, patience) in [(libc::SIGTERM, grace), (libc::SIGKILL, KILLED_WITHIN)] {
        // Fails only when there is no process left to signal.
        tolerate(sys::signal(Target::Everything, number));
        tolerate(sys::signal(Target::Everything, libc::SIGCONT));
        if reap_all(Instant::now() + patience) {
            return;
        }
    }
}

/// Reaps every child until the deadline: an init that ends all processes waits until they are gone.
fn reap_until(deadline: Instant) {
    while Instant::now() < deadline {
        reap_all(deadline);
        std::thread::sleep(REAPED_EVERY);
    }
}

/// Waits until no child is left. Every orphan becomes a child of init.
fn reap_all(deadline: Instant) -> bool {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Err(Errno::CHILD) => return true,
            Ok(Some(_)) | Err(_) => {}
            Ok(None) if Instant::now() >= deadline => return false,
            Ok(None) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Innermost mounts first; the root, which the agent uses, becomes read-only.
fn unmount_all() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let kernel_own = ["proc", "sysfs", "devtmpfs", "devpts", "cgroup2", "rootfs"];
    for line in mounts.lines().rev() {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, at, kind, ..] = words[..] else {
            continue;
        };
        if at != "/" && !kernel_own.contains(&kind) {
            let at = at.replace("\\040", " ");
            if let Err(error) = rustix::mount::unmount(at.as_str(), UnmountFlags::empty()) {
                console::say(format_args!("cannot unmount {at}: {error}"));
            }
        }
    }
    if let Err(error) = rustix::mount::mount_remount("/", MountFlags::RDONLY, c"") {
        console::say(format_args!("cannot remount the root read-only: {error}"));
    }
    rustix::fs::sync();
}
