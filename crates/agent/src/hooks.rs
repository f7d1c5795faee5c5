//! Hooks: programs of the guest that run after a restore, so that its services can draw new keys,
//! reconnect, or take a new name.
//!
//! ```text
//!   /etc/sandtree/resume.d/10-keys 20-cache …   executable regular files, in the order of their names, one by one
//! ```
//!
//! Always: a hook ends within [`HOOK_TIME`] and all of them within [`ALL_TIME`]; otherwise the
//! agent ends them with all their processes. Background processes of a hook that ended in time
//! continue. A failed hook is reported, and the next one runs.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitStatus};
use sandtree_proto::{ExecStart, HookFailure, Rebirth};

use crate::cgroup::Family;
use crate::exec::spawn::null;
use crate::failure::{cut, reason};
use crate::workers::{Bell, Finished, Start};

pub const PLACE: &str = "/etc/sandtree/resume.d";
pub const CONSOLE: &str = "/dev/console";
const HOOK_TIME: Duration = Duration::from_secs(10);
const ALL_TIME: Duration = Duration::from_secs(30);
/// How long a killed hook may take to end.
const KILL_TIME: Duration = Duration::from_secs(1);
/// The reply must fit one frame, for any number of failures and any names.
const FAILURES_MAX: usize = 64;
const TEXT_MAX: usize = 255;

/// The directory of the hooks. One that was empty is not read again until it changes, because most
/// guests have no hooks, and all of them wait for this after a restore.
#[derive(Debug)]
pub struct HookDir {
    path: PathBuf,
    empty: Option<Stamp>,
}

/// What a change of a directory changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl HookDir {
    pub fn new(path: PathBuf) -> Self {
        Self { path, empty: None }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Looks whether the directory is empty, to know it later.
    pub fn look(&mut self) {
        let stamp = stamp(&self.path);
        let is_empty = fs::read_dir(&self.path).is_ok_and(|mut entries| entries.next().is_none());
        self.empty = stamp.ok().filter(|_| is_empty);
    }

    /// Whether it is certain, without reading the directory, that there is no hook.
    pub fn is_known_empty(&self) -> bool {
        match stamp(&self.path) {
            Ok(now) => self.empty == Some(now),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }
}

fn stamp(dir: &Path) -> io::Result<Stamp> {
    let status = fs::metadata(dir)?;
    Ok(Stamp {
        device: status.dev(),
        inode: status.ino(),
        changed: (status.ctime(), status.ctime_nsec()),
    })
}

/// A child of the agent that has ended.
#[derive(Debug, Clone, Copy)]
pub struct ChildExit {
    pub pid: Pid,
    pub status: WaitStatus,
}

#[derive(Debug)]
pub struct Hooks {
    pub dir: PathBuf,
    /// The loop starts the children, reaps them, and sends each status here.
    pub exits: Receiver<ChildExit>,
    pub to_loop: Bell,
    /// The file that gets their output.
    pub console: Option<&'static str>,
}

impl Hooks {
    /// Runs all hooks. Returns those that failed.
    pub fn run(&self, rebirth: &Rebirth) -> Vec<HookFailure> {
        let names = match names(&self.dir) {
            Ok(names) => names,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return vec![failed(&self.dir, reason(&error))],
        };
        let all_until = Instant::now() + ALL_TIME;
        let run = |path: &PathBuf| {
            self.run_one(path, rebirth, all_until)
                .err()
                .map(|what| failed(path, what))
        };
        bounded(names.iter().filter_map(run).collect())
    }

    fn run_one(&self, path: &Path, rebirth: &Rebirth, all_until: Instant) -> Result<(), String> {
        let now = Instant::now();
        if now >= all_until {
            return Err(format!(
                "not run: the hooks before it took {} s",
                ALL_TIME.as_secs()
            ));
        }
        let streams = streams(self.console).map_err(|error| reason(&error))?;
        let (pid, family) = self.start(start(path, rebirth), streams)?;
        let until = all_until.min(now + HOOK_TIME);
        let ended = self.wait(pid, until).ok_or_else(|| {
            family.kill();
            self.wait(pid, Instant::now() + KILL_TIME);
            format!("ended after {} s", (until - now).as_secs())
        });
        self.let_go(family);
        verdict(ended?)
    }

    fn start(&self, start: ExecStart, streams: [OwnedFd; 3]) -> Result<(Pid, Family), String> {
        let (started, answer) = mpsc::channel();
        self.to_loop.ring(Finished::Start(Start {
            start,
            streams,
            started,
        }));
        let answer = answer
            .recv()
            .map_err(|_| "not run: the guest is going down")?;
        answer.map_err(|failure| failure.message)
    }

    /// Returns its status if it ends in time.
    fn wait(&self, pid: Pid, until: Instant) -> Option<WaitStatus> {
        loop {
            let death = self
                .exits
                .recv_timeout(until.saturating_duration_since(Instant::now()))
                .ok()?;
            if death.pid == pid {
                return Some(death.status);
            }
        }
    }

    fn let_go(&self, family: Family) {
        self.to_loop.ring(Finished::Left(family));
    }
}

/// The paths of the hooks in order, without files that are no programs, such as a README.
fn names(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let is_program =
            |found: fs::Metadata| found.is_file() && found.permissions().mode() & 0o111 != 0;
        if fs::metadata(&path).is_ok_and(is_program) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn start(path: &Path, rebirth: &Rebirth) -> ExecStart {
    let generation: String = rebirth
        .generation
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let env = [
        ("SANDTREE_GENERATION", &generation),
        ("SANDTREE_HOSTNAME", &rebirth.identity.hostname),
    ];
    ExecStart {
        tag: String::new(),
        argv: vec![path.as_os_str().as_bytes().to_vec()],
        env: env
            .map(|(key, value)| (key.into(), value.clone().into()))
            .to_vec(),
        cwd: b"/".to_vec(),
        user: String::new(),
        terminal: None,
        stdin: false,
        timeout_ms: None,
    }
}

/// No input, and the console as output, or no output without a console.
fn streams(console: Option<&str>) -> io::Result<[OwnedFd; 3]> {
    let open = |path| {
        fs::File::options()
            .write(true)
            .custom_flags(libc::O_NOCTTY)
            .open(path)
            .ok()
    };
    Ok(match console.and_then(open) {
        Some(console) => [null()?, console.try_clone()?.into(), console.into()],
        None => [null()?, null()?, null()?],
    })
}

fn verdict(status: WaitStatus) -> Result<(), String> {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => Err(format!("exit {code}")),
        (None, Some(signal)) => Err(format!("signal {signal}")),
        (None, None) => Err("ended in no known way".into()),
    }
}

fn failed(path: &Path, mut what: String) -> HookFailure {
    let mut name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned();
    cut(&mut name, TEXT_MAX);
    cut(&mut what, TEXT_MAX);
    HookFailure { name, what }
}

fn bounded(mut failures: Vec<HookFailure>) -> Vec<HookFailure> {
    if failures.len() > FAILURES_MAX {
        let more = failures.len() - (FAILURES_MAX - 1);
        failures.truncate(FAILURES_MAX - 1);
        failures.push(HookFailure {
            name: "…".into(),
            what: format!("and {more} more"),
        });
    }
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_was_empty_is_known_to_be_until_it_changes() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("resume.d");
        let mut hooks = HookDir::new(path.clone());
        assert!(hooks.is_known_empty(), "there is no directory");
        fs::create_dir(&path).unwrap();
        assert!(!hooks.is_known_empty(), "it was not read yet");
        hooks.look();
        assert!(hooks.is_known_empty());
        fs::write(path.join("10-keys"), "").unwrap();
        assert!(!hooks.is_known_empty());
        hooks.look();
        assert!(!hooks.is_known_empty(), "there is a file in it");
    }

    #[test]
    fn the_largest_report_fits_one_frame() {
        let name = "\u{fffd}".repeat(500);
        let failures = bounded(
            (0..5000)
                .map(|_| failed(Path::new(&name), name.clone()))
                .collect(),
        );
        assert_eq!(failures.last().unwrap().what, "and 4937 more");
        let reply = sandtree_proto::Reply::Restored { hooks: failures };
        sandtree_proto::message::to_frame(&sandtree_proto::AgentMessage::Reply {
            id: u32::MAX,
            reply: Ok(reply),
        })
        .unwrap();
    }
}
