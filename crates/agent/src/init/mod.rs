//! Pid 1: from the kernel's start of `/init` to a served link, and the shutdown.
//!
//! ```text
//!   /init in the initramfs -> early mounts -> modules -> root mounted -> switched
//!                                                     \ wait: see `wait` ´  |-- init=agent: stays pid 1 and serves
//!                                                                          \-- init=image: see `image_init`
//! ```
//!
//! When it fails: one line on the console gives the reason, and the machine powers off, so the host
//! sees it at once.

mod image_init;
mod modules;
mod options;
mod root;
mod run;
mod settle;
pub mod shutdown;
mod wait;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mount::MountFlags;
use rustix::system::RebootCommand;
use sandtree_proto::Failure;
use thiserror::Error;

use crate::failure::reason;
use crate::link::Link;
use crate::role::Role;
use crate::{console, identity};
pub use image_init::{Hold, ImageInit};
pub use modules::Rest;
use options::{Init, Options, Start};
pub use settle::Settling;

/// Where the initramfs has its modules.
const MODULES: &str = "/modules";
const PORT_APPEARS_WITHIN: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum BootError {
    #[error("cannot mount {what} on {at}: {}", reason(source))]
    Mount {
        what: String,
        at: String,
        source: io::Error,
    },
    #[error("the root disk {device} did not appear within {} s", within.as_secs())]
    NoDisk { device: String, within: Duration },
    #[error(
        "the image has no directory {at}, and none can be made: {}",
        reason(source)
    )]
    NoMountPoint { at: String, source: io::Error },
    #[error("cannot enter the root file system: {}", reason(.0))]
    Switch(io::Error),
    #[error("cannot start the image's init {path}: {}", reason(source))]
    ImageInit { path: String, source: io::Error },
    #[error("no port named {name} appeared within {} s", within.as_secs())]
    NoPort {
        name: &'static str,
        within: Duration,
    },
    #[error("cannot serve the link: {}", reason(.0))]
    Serve(io::Error),
    #[error("cannot release a disk: {}", reason(.0))]
    DiskInUse(io::Error),
    #[error("cannot find the disks: {}", reason(.0))]
    Disks(io::Error),
    #[error("cannot take entropy and time from the host: {0}")]
    Renew(Failure),
}

/// A booted guest, ready for the loop.
#[derive(Debug)]
pub struct Booted {
    pub modules: Rest,
    /// Present if the agent is not init itself.
    pub image: Option<ImageInit>,
    /// The link to the host.
    pub link: Link,
}

impl Booted {
    pub fn role(&self) -> Role {
        if self.image.is_some() {
            Role::UnderInit
        } else {
            Role::Init
        }
    }
}

/// Boots the guest. Returns in the process that serves the link.
pub fn boot() -> Result<Booted, BootError> {
    mount_early()?;
    use_console().unwrap_or_else(|error| console::say(format_args!("no console: {error}")));
    let options = Options::parse(&fs::read_to_string("/proc/cmdline").unwrap_or_default());
    match options.start {
        Start::Now => boot_now(&options),
        Start::WhenAsked => boot_when_asked(),
    }
}

fn boot_now(options: &Options) -> Result<Booted, BootError> {
    let modules = modules::load(Path::new(MODULES), || Path::new(&options.root).exists());
    let image = enter_root(options)?;
    Ok(Booted {
        modules,
        image,
        link: open_link()?,
    })
}

/// Boots as far as a guest can without a disk, and the rest when the host asks for it. All modules
/// are loaded before the wait, so nothing is left to load afterwards.
fn boot_when_asked() -> Result<Booted, BootError> {
    modules::load(Path::new(MODULES), || false);
    wait::release_disks()?;
    root::free_initramfs();
    let mut link = open_link()?;
    let asked = wait::for_boot(&mut link).map_err(|errno| BootError::Serve(errno.into()))?;
    identity::renew(&asked.boot).map_err(BootError::Renew)?;
    wait::bind_disks()?;
    let image = enter_root(&Options::parse(&asked.boot.options))?;
    asked.answer(&mut link);
    Ok(Booted {
        modules: Rest::default(),
        image,
        link,
    })
}

fn enter_root(options: &Options) -> Result<Option<ImageInit>, BootError> {
    root::enter(options)?;
    match options.init {
        Init::Agent => Ok(None),
        Init::Image => image_init::start(&options.image_init).map(Some),
    }
}

fn open_link() -> Result<Link, BootError> {
    let port = open_port(sandtree_proto::PORT_NAME)?;
    Link::new(port).map_err(|errno| BootError::Serve(errno.into()))
}

fn mount_early() -> Result<(), BootError> {
    mount("devtmpfs", "/dev", MountFlags::NOSUID)?;
    mount(
        "proc",
        "/proc",
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
    )?;
    mount(
        "sysfs",
        "/sys",
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
    )?;
    mount(
        "cgroup2",
        "/sys/fs/cgroup",
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
    )?;
    mount(
        "devpts",
        "/dev/pts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
    )?;
    mount("tmpfs", "/dev/shm", MountFlags::NOSUID | MountFlags::NODEV)?;
    mount("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV)?;
    link_streams().unwrap_or_else(|error| complain("make the links in /dev", &error));
    make_lock_dir().unwrap_or_else(|error| complain("make /run/lock", &error));
    Ok(())
}

/// The usual names of a process's own streams.
fn link_streams() -> io::Result<()> {
    let links = [
        ("fd", ""),
        ("stdin", "/0"),
        ("stdout", "/1"),
        ("stderr", "/2"),
    ];
    links.iter().try_for_each(|(name, of)| {
        match symlink(format!("/proc/self/fd{of}"), format!("/dev/{name}")) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    })
}

/// The directory of `/var/lock`, in which everyone may create a lock.
fn make_lock_dir() -> io::Result<()> {
    fs::create_dir("/run/lock")?;
    fs::set_permissions("/run/lock", fs::Permissions::from_mode(0o1777))
}

/// Reports the failure of a step that a guest does not need.
fn complain(task: &str, error: &io::Error) {
    console::say(format_args!("cannot {task}: {}", reason(error)));
}

fn mount(kind: &str, at: &str, flags: MountFlags) -> Result<(), BootError> {
    let options = match at {
        "/dev" | "/run" => c"mode=0755",
        "/dev/pts" => c"gid=5,mode=620,ptmxmode=666",
        "/dev/shm" => c"mode=1777",
        _ => c"",
    };
    let mounted = make_mount_point(Path::new(at))
        .and_then(|()| Ok(rustix::mount::mount(kind, at, kind, flags, options)?));
    mounted.map_err(|source| BootError::Mount {
        what: kind.to_owned(),
        at: at.to_owned(),
        source,
    })
}

fn make_mount_point(at: &Path) -> io::Result<()> {
    if at.is_dir() {
        Ok(())
    } else {
        fs::create_dir_all(at)
    }
}

/// The image's init and the agent's own panics write to the console of the running kernel, not to
/// the initramfs's node.
fn use_console() -> io::Result<()> {
    let console = fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/console")?;
    rustix::stdio::dup2_stdin(&console)?;
    rustix::stdio::dup2_stdout(&console)?;
    rustix::stdio::dup2_stderr(&console)?;
    Ok(())
}

/// Opens the port by its name, as soon as the kernel has it.
fn open_port(name: &'static str) -> Result<OwnedFd, BootError> {
    let deadline = Instant::now() + PORT_APPEARS_WITHIN;
    loop {
        if let Some(device) = find_port(name) {
            let opened = fs::File::options().read(true).write(true).open(device);
            return opened.map(OwnedFd::from).map_err(BootError::Serve);
        }
        if Instant::now() >= deadline {
            return Err(BootError::NoPort {
                name,
                within: PORT_APPEARS_WITHIN,
            });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The device of the port of this name, if the machine has one.
pub fn find_port(name: &str) -> Option<std::path::PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    let is_named = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("name")).is_ok_and(|n| n.trim() == name)
    };
    ports
        .flatten()
        .find(is_named)
        .map(|entry| Path::new("/dev").join(entry.file_name()))
}

/// Prints the reason and powers off. A panic of pid 1 would also work, but its trace would push the
/// reason off the screen.
pub fn give_up(error: &BootError) -> ! {
    console::say(error);
    rustix::fs::sync();
    let refused = rustix::system::reboot(RebootCommand::PowerOff);
    panic!("{error}; cannot power off either: {refused:?}");
}
