//! The init of a bare guest: the same kernel and the same port as in a sandbox, without the agent.
//!
//! `sandtree-bench` embeds this program, adds it to a sandbox's initramfs and starts it with
//! `rdinit=`. The program mounts no root disk, loads no module and knows no frames:
//!
//! ```text
//!   guest: 'R' when it has booted
//!   host:  'p' and a u64      guest: one byte             a round trip
//!          'o' and a u64 n    guest: n bytes              output
//!          'i' and a u64 n, then n bytes   guest: one byte   input
//!          'x' and a u64 n    guest: one byte             n processes, started at once and awaited
//! ```
//!
//! When it fails: one line on the console names the error, and the guest powers off.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::mount::MountFlags;
use rustix::system::RebootCommand;

/// The argument of a started process, which exits immediately.
const NOTHING: &str = "--nothing";
/// As large as one buffer of the port.
const CHUNK: usize = 32 * 1024;
const PORT_APPEARS_WITHIN: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(2);

fn main() {
    if std::env::args().nth(1).as_deref() == Some(NOTHING) {
        return;
    }
    if !rustix::process::getpid().is_init() {
        eprintln!("sandtree-bench-guest runs as the init of a guest only");
        std::process::exit(2);
    }
    let Err(error) = mount_all().and_then(|()| serve(open_port()?));
    eprintln!("sandtree-bench-guest: {error}");
    let refused = rustix::system::reboot(RebootCommand::PowerOff);
    panic!("cannot power off: {refused:?}");
}

fn mount_all() -> io::Result<()> {
    for (kind, at) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        rustix::mount::mount(kind, at, kind, MountFlags::NOSUID, c"")?;
    }
    Ok(())
}

/// Opens the port by its name as soon as the kernel has it.
fn open_port() -> io::Result<File> {
    let deadline = Instant::now() + PORT_APPEARS_WITHIN;
    loop {
        if let Some(device) = find_port() {
            return File::options().read(true).write(true).open(device);
        }
        if Instant::now() >= deadline {
            return Err(io::Error::other("the port did not appear"));
        }
        std::thread::sleep(POLL);
    }
}

fn find_port() -> Option<PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    let is_ours = |entry: &fs::DirEntry| {
        let name = fs::read_to_string(entry.path().join("name"));
        name.is_ok_and(|name| name.trim() == sandtree_proto::PORT_NAME)
    };
    let port = ports.flatten().find(is_ours)?;
    Some(Path::new("/dev").join(port.file_name()))
}

/// Serves until the host closes the port.
fn serve(mut port: File) -> io::Result<std::convert::Infallible> {
    port.write_all(b"R")?;
    loop {
        let mut order = [0; 9];
        port.read_exact(&mut order)?;
        let count =
            u64::from_le_bytes(order[1..].try_into().expect("eight bytes follow the first"));
        match order[0] {
            b'o' => write(&mut port, count)?,
            b'i' => read(&mut port, count)?,
            b'x' => start(count)?,
            _ => {}
        }
        if order[0] != b'o' {
            port.write_all(b".")?;
        }
    }
}

fn write(port: &mut File, count: u64) -> io::Result<()> {
    let zeros = [0; CHUNK];
    let mut left = count;
    while left > 0 {
        let chunk = left.min(CHUNK as u64);
        port.write_all(&zeros[..chunk as usize])?;
        left -= chunk;
    }
    Ok(())
}

fn read(port: &mut File, count: u64) -> io::Result<()> {
    io::copy(&mut port.take(count), &mut io::sink()).map(drop)
}

fn start(count: u64) -> io::Result<()> {
    let children: io::Result<Vec<_>> = (0..count)
        // starts: our own program
        .map(|_| Command::new("/proc/self/exe").arg(NOTHING).spawn())
        .collect();
    children?
        .iter_mut()
        .try_for_each(|child| child.wait().map(drop))
}
