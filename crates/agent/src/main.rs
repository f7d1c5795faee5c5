//! The agent: the program in the guest.
//!
//! As pid 1 of the initramfs it boots the guest and serves the host over a virtio port. With `--fd
//! N` it serves the socket on descriptor N instead, and does not change the machine that it runs
//! on; tests use this. `--cgroup DIR` then names a cgroup hierarchy, and `--hooks DIR` the hooks
//! that a restore runs.

mod attributes;
mod cgroup;
mod channel;
mod console;
mod exec;
mod failure;
mod feed;
mod files;
mod freeze;
mod held;
mod hooks;
mod identity;
mod init;
mod input;
mod link;
mod metrics;
mod mounts;
mod names;
mod network;
mod open;
mod output;
mod role;
mod screen;
mod serve;
mod sparse;
mod sys;
mod terminal;
mod tree;
mod tunnel;
mod user;
mod watch;
mod workers;

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;

use rustix::process::{Resource, Rlimit};
use rustix::system::RebootCommand;

use cgroup::Cgroups;
use exec::spawn::Defaults;
use failure::tolerate;
use hooks::HookDir;
use init::{BootError, ImageInit, Rest, Settling};
use link::Link;
use role::Role;
use serve::{Agent, End, Place};

/// Two windows of a stream.
const FREED_MEMORY_MAX: i32 = 2 * 1024 * 1024;

fn main() -> ExitCode {
    if rustix::process::getpid().is_init() {
        run_guest();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--fd", number] => run_guestless(number, Surroundings::default()),
        ["--fd", number, "--cgroup", mount] => run_guestless(
            number,
            Surroundings {
                cgroups: Cgroups::open(mount),
                ..Surroundings::default()
            },
        ),
        ["--fd", number, "--hooks", dir] => run_guestless(
            number,
            Surroundings {
                hooks: Some(dir.into()),
                ..Surroundings::default()
            },
        ),
        _ => {
            eprintln!(
                "usage: sandtree-agent --fd N [--cgroup DIR | --hooks DIR], or as /init of a guest"
            );
            ExitCode::from(2)
        }
    }
}

/// The environment of the agent.
struct Surroundings {
    cgroups: Cgroups,
    hooks: Option<PathBuf>,
    modules: Rest,
    image: Option<ImageInit>,
}

impl Default for Surroundings {
    fn default() -> Self {
        Self {
            cgroups: Cgroups::absent(),
            hooks: None,
            modules: Rest::default(),
            image: None,
        }
    }
}

fn run_guest() -> ! {
    let served = init::boot().and_then(|booted| {
        let role = booted.role();
        if role == Role::Init {
            // Ctrl-Alt-Del is a signal to the agent then, and not a reset without a sync.
            tolerate(rustix::system::reboot(RebootCommand::CadOff));
        }
        let cgroups = Cgroups::open("/sys/fs/cgroup");
        let hooks = Some(hooks::PLACE.into());
        if role == Role::UnderInit {
            cgroups.enter().unwrap_or_else(|error| {
                console::say(format_args!("cannot enter a cgroup: {error}"))
            });
        }
        let surroundings = Surroundings {
            cgroups,
            hooks,
            modules: booted.modules,
            image: booted.image,
        };
        let end = serve(role, booted.link, surroundings).map_err(BootError::Serve)?;
        Ok((role, end))
    });
    match served {
        Ok((role, End::Shutdown { way, grace })) => init::shutdown::leave(role, way, grace),
        Ok((_, End::HostGone)) => {
            init::give_up(&BootError::Serve(io::ErrorKind::ConnectionAborted.into()))
        }
        Err(error) => init::give_up(&error),
    }
}

fn run_guestless(number: &str, surroundings: Surroundings) -> ExitCode {
    let number = number.parse::<RawFd>().map_err(io::Error::other);
    let served = number
        .and_then(sys::inherited)
        .and_then(|socket| Ok(Link::new(socket)?))
        .and_then(|link| serve(Role::Guestless, link, surroundings));
    match served {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandtree-agent: cannot serve: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(role: Role, link: Link, surroundings: Surroundings) -> io::Result<End> {
    let Surroundings {
        cgroups,
        hooks,
        modules,
        image,
    } = surroundings;
    sys::keep_freed_memory(FREED_MEMORY_MAX);
    let signals = sys::block_signals(serve::handled_signals(role))?;
    // Not earlier: a thread with unblocked signals would receive our SIGCHLD.
    let (hold, image) = image.map(ImageInit::attend).unzip();
    let settling = Settling {
        modules: modules.load_in_background(),
        image: image.unwrap_or_default(),
    };
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    if role != Role::Guestless {
        std::fs::write("/proc/self/oom_score_adj", "-1000")?;
    }
    let defaults = Defaults {
        cgroups,
        open_files: raise_open_files()?,
    };
    let place = Place {
        role,
        defaults,
        settling,
        hooks: hooks.map(HookDir::new),
        hold,
    };
    Ok(Agent::new(place, link, signals)?.serve()?)
}

/// Each channel needs up to five descriptors. Returns the old limit, which commands get.
fn raise_open_files() -> io::Result<Rlimit> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    rustix::process::setrlimit(Resource::Nofile, raised)?;
    Ok(limit)
}
