//! The image's own init as process 1, with the agent as another process.
//!
//! ```text
//!   pid 1 --forks--> agent: serves, takes the guest's identity --lets go--.
//!     \--waits-------------------------------------------------------------> becomes the image's init
//! ```
//!
//! Always: init starts after the guest has its names, clock and network, or after a deadline
//! without them. It does not end the agent, even when it ends all other processes, so that the host
//! keeps its link until the end.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Access;
use rustix::pipe::{PipeFlags, pipe_with};

use super::settle::{self, Startup};
use super::{BootError, complain};
use crate::sys::{self, Forked};

/// How long init waits for the guest's identity. A connected host sends it at once.
const IDENTITY_WITHIN: Duration = Duration::from_secs(30);
/// The socket to which systemd reports that it has started everything. It is abstract, so it leaves
/// no file.
const NOTIFY: &str = "sandtree-init";
/// Debian's list of processes that a shutdown spares, one file each.
const SPARED: &str = "/run/sendsigs.omit.d";

/// Prevents the start of the image's init until it is dropped.
#[derive(Debug)]
pub struct Hold(#[expect(dead_code, reason = "closed when dropped, and that is all")] OwnedFd);

/// The image's init before its start.
#[derive(Debug)]
pub struct ImageInit {
    hold: Hold,
    notify: Option<UnixDatagram>,
}

impl ImageInit {
    /// Returns the hold on its start, and the sign by which the end of its start is found. May
    /// start a thread.
    pub fn attend(self) -> (Hold, Startup) {
        let startup = self.notify.map_or(Startup::Quiet, |socket| {
            Startup::Reported(settle::listen(socket))
        });
        (self.hold, startup)
    }
}

/// Forks. Returns in the agent; pid 1 becomes the image's init.
pub fn start(path: &str) -> Result<ImageInit, BootError> {
    let failed = |source| BootError::ImageInit {
        path: path.to_owned(),
        source,
    };
    // An init that cannot start is reported now, while the host still waits for the guest.
    rustix::fs::access(path, Access::EXEC_OK).map_err(|errno| failed(errno.into()))?;
    let (waits, hold) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
    let is_systemd = fs::canonicalize(path).is_ok_and(|program| is_systemd(&program));
    let notify = is_systemd.then(listener).transpose().map_err(failed)?;
    if sys::fork().map_err(failed)? == Forked::Child {
        rustix::process::setsid().map_err(|errno| BootError::Serve(errno.into()))?;
        be_spared().unwrap_or_else(|error| complain("be spared by the image's init", &error));
        return Ok(ImageInit {
            hold: Hold(hold),
            notify,
        });
    }
    drop(hold);
    await_release(&waits);
    if is_systemd {
        silence_consoles()
            .unwrap_or_else(|error| complain("keep the consoles free of logins", &error));
    }
    Err(failed(command(path, is_systemd).exec()))
}

fn command(path: &str, is_systemd: bool) -> Command {
    let mut command = Command::new(path);
    command.env_clear().env("TERM", "linux").env("HOME", "/");
    if is_systemd {
        command.env("NOTIFY_SOCKET", format!("@{NOTIFY}"));
    }
    command
}

/// Whether the program at this path, which is no link, is systemd or a part of it.
pub fn is_systemd(program: &Path) -> bool {
    program
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("systemd"))
}

fn listener() -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(NOTIFY)?)
}

/// Nothing is ever written: the other end closes the pipe.
fn await_release(waits: &OwnedFd) {
    let timeout = Timespec {
        tv_sec: IDENTITY_WITHIN.as_secs() as i64,
        tv_nsec: 0,
    };
    if !matches!(
        poll(&mut [PollFd::new(waits, PollFlags::IN)], Some(&timeout)),
        Ok(1)
    ) {
        complain(
            "wait for the host to say who this guest is",
            &io::ErrorKind::TimedOut.into(),
        );
    }
}

/// The console is a log without a keyboard. systemd's login there would wait for a device that only
/// udev announces, and delay the whole start by 90 s.
fn silence_consoles() -> io::Result<()> {
    const UNITS: &str = "/run/systemd/system";
    fs::create_dir_all(UNITS)?;
    for console in fs::read_to_string("/sys/class/tty/console/active")?.split_whitespace() {
        match symlink(
            "/dev/null",
            format!("{UNITS}/serial-getty@{console}.service"),
        ) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// systemd spares a process whose command line starts with `@`, and System V scripts spare the
/// listed ones.
fn be_spared() -> io::Result<()> {
    let at = argument_address(&fs::read_to_string("/proc/self/stat")?)
        .ok_or(io::ErrorKind::InvalidData)?;
    File::options()
        .write(true)
        .open("/proc/self/mem")?
        .write_all_at(b"@", at)?;
    fs::create_dir_all(SPARED)?;
    fs::write(
        format!("{SPARED}/sandtree"),
        format!("{}\n", std::process::id()),
    )
}

/// The address of a process's command line: the 48th field of its `stat`. The second field is its
/// name, which may contain any character.
fn argument_address(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    fields
        .split(' ')
        .nth(48 - 3)?
        .parse()
        .ok()
        .filter(|&address| address != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_the_command_line_is_found() {
        let at = argument_address(&fs::read_to_string("/proc/self/stat").unwrap()).unwrap();
        let mut first = [0; 1];
        File::open("/proc/self/mem")
            .unwrap()
            .read_exact_at(&mut first, at)
            .unwrap();
        assert_eq!(first[0], fs::read("/proc/self/cmdline").unwrap()[0]);
        assert_eq!(argument_address("1 (a) b) S 0"), None);
    }

    #[test]
    fn systemd_is_known_by_its_program() {
        let known = [
            "/usr/lib/systemd/systemd",
            "/lib/systemd/systemd-shutdown",
            "/lib/systemd/systemd (deleted)",
        ];
        assert!(known.iter().all(|program| is_systemd(Path::new(program))));
        assert!(!is_systemd(Path::new("/sbin/init")) && !is_systemd(Path::new("")));
    }
}
