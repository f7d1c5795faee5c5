//! Directories of the host in a guest, on this side: what callers ask for, and the port of one
//! machine with the thread that serves it.
//!
//! ```text
//!   guest's agent ── port of mounts ── thread of sandtree-mounts ── the host's directories
//! ```
//!
//! Always: everything that a guest needs to continue with its mounts is in its own memory. The
//! thread only has caches, so each machine gets a new one. A guest that does not answer delays a
//! caller for a bounded time, and never fails a capture.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandtree_mounts::{
    Access, Directory, Guest, HostError, Outcome, Owner, Server, Status, Watching,
};
use sandtree_proto::mount::MountId;
use sandtree_store::{HostDirectories, HostDirectory, MountAccess, MountPoint, SandboxDir};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use crate::degradation::Degradation;
use crate::error::{Error, Result, store_error};
use crate::link::fresh_nonce;

/// How long a guest may take to finish its requests before it is captured. Then it is captured
/// with them, and they are repeated after a restore.
const HELD_WITHIN: Duration = Duration::from_secs(5);
/// How long a guest may take to compare what it knows with the host.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long a command waits until its guest knows of changes on the host.
const BARRIER_WITHIN: Duration = Duration::from_secs(2);
const CHANGED_WITHIN: Duration = Duration::from_secs(10);
const STATUS_WITHIN: Duration = Duration::from_secs(1);
/// How long a list of mounts waits for a keeper, which itself waits for its server.
pub(crate) const SERVED_WITHIN: Duration = Duration::from_secs(2);
/// How many mounts a sandbox may have.
pub(crate) const MOUNTS_MAX: usize = 64;
const PATH_MAX: usize = 1024;

/// A directory of the host to mount in a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MountSpec {
    /// An absolute path.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub host: PathBuf,
    /// An absolute path in the guest. It is created if it does not exist.
    pub guest: String,
    pub access: MountAccess,
    /// The guest's user as whom the host's own user is shown. `None`: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<MountOwner>,
}

/// A user and a group of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MountOwner {
    pub uid: u32,
    pub gid: u32,
}

impl MountSpec {
    /// Refuses what cannot be mounted, before anything is done for it.
    pub fn check(&self) -> Result<()> {
        check_guest_path(&self.guest)?;
        if !self.host.is_absolute() || self.host.to_str().is_none() {
            let rule = "an absolute path, in UTF-8";
            return Err(Error::invalid(
                "directory to mount",
                self.host.display(),
                rule,
            ));
        }
        open(&self.host).map(drop)
    }
}

/// What becomes of a mount that programs in the guest use, when it is to be unmounted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InUse {
    /// It stays, and the caller gets an error.
    #[default]
    Refuse,
    /// It is unmounted, and the programs get errors.
    Detach,
}

fn check_guest_path(path: &str) -> Result<()> {
    let mut parts = Path::new(path).components();
    let is_root = parts.next() == Some(Component::RootDir);
    let is_plain = parts
        .clone()
        .all(|part| matches!(part, Component::Normal(_)));
    let fits = path.len() <= PATH_MAX && !path.chars().any(char::is_control);
    // One spelling for each path: it is compared with others.
    let is_clean = !path.ends_with('/') && !path.contains("//") && !path.contains("/./");
    if is_root && is_plain && is_clean && parts.next().is_some() && fits {
        return Ok(());
    }
    let rule = "an absolute path below /, without `..`";
    Err(Error::invalid("mount point", path, rule))
}

/// A mount of a sandbox, as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MountInfo {
    /// The path in the guest.
    pub guest: String,
    /// The host's directory. `None`: none was given for it on this host.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub host: Option<PathBuf>,
    pub access: MountAccess,
    /// What is wrong with it: why the guest cannot use it now, or why it is slow.
    pub problem: Option<String>,
    /// The last error that the host gave the guest, of a guest that runs.
    #[serde(default)]
    pub last_error: Option<String>,
    /// How often a guest that runs has asked this host.
    #[serde(default)]
    pub requests: Option<u64>,
    #[serde(skip)]
    pub(crate) id: u32,
}

/// A mount of a guest that runs, as its server sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServedMount {
    pub id: u32,
    pub requests: u64,
    pub problem: Option<String>,
    pub last_error: Option<String>,
}

impl ServedMount {
    fn new(status: &Status) -> Self {
        let describe = |error: &HostError| {
            let reason = io::Error::from_raw_os_error(error.errno);
            format!("cannot {}: {reason}", error.what)
        };
        Self {
            id: status.mount.0,
            requests: status.requests,
            problem: problem(status),
            last_error: status.last_error.as_ref().map(describe),
        }
    }
}

fn problem(status: &Status) -> Option<String> {
    if status.is_removed {
        return Some("the directory was removed".to_owned());
    }
    if status.guest == Guest::Refused {
        let said = "the guest broke the protocol too often, and is not served";
        return Some(said.to_owned());
    }
    unwatched(status.watching)
}

/// Why the guest has to ask for what it could remember.
fn unwatched(watching: Watching) -> Option<String> {
    let reason = |errno| io::Error::from_raw_os_error(errno);
    let some = "not every directory can be watched, so the guest asks each time";
    let none = "no directory can be watched, so the guest asks each time";
    match watching {
        Watching::Full => None,
        Watching::Limited { most } => Some(format!(
            "{some}: the guest uses more than {most} directories"
        )),
        Watching::Refused { errno } if errno == Errno::NOSPC.raw_os_error() => {
            Some(format!("{some}: raise fs.inotify.max_user_watches"))
        }
        Watching::Refused { errno } => Some(format!("{some}: {}", reason(errno))),
        Watching::Unavailable { errno } if errno == Errno::MFILE.raw_os_error() => {
            Some(format!("{none}: raise fs.inotify.max_user_instances"))
        }
        Watching::Unavailable { errno } => Some(format!("{none}: {}", reason(errno))),
    }
}

impl MountInfo {
    pub(crate) fn new(point: &MountPoint, directories: &HostDirectories) -> Self {
        let directory = directories.get(point.id);
        let problem = match directory {
            None => Some("no directory of this host was given for it".to_owned()),
            Some(directory) => open(&directory.path).err().map(|error| error.one_line()),
        };
        Self {
            guest: point.path.clone(),
            host: directory.map(|directory| directory.path.clone()),
            access: match (point.access, directory) {
                (MountAccess::ReadWrite, Some(of)) if of.read_only => MountAccess::ReadOnly,
                (access, _) => access,
            },
            problem,
            last_error: None,
            requests: None,
            id: point.id,
        }
    }

    /// Adds what the server of a guest that runs reports.
    pub(crate) fn add(&mut self, served: &[ServedMount]) {
        let Some(served) = served.iter().find(|served| served.id == self.id) else {
            return;
        };
        self.requests = Some(served.requests);
        self.last_error.clone_from(&served.last_error);
        if self.problem.is_none() {
            self.problem.clone_from(&served.problem);
        }
    }
}

fn open(path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|e| Error::io("open", path, e.into()))
}

/// Which directories of the host the mounts of a sandbox are.
pub(crate) fn known(dir: &SandboxDir) -> Result<HostDirectories> {
    dir.host_directories()
        .map_err(store_error("read the mounts of a sandbox"))
}

/// Opens the directory of a mount.
pub(crate) fn directory(point: &MountPoint, of: &HostDirectory) -> Result<Directory> {
    let access = match point.access {
        MountAccess::ReadWrite if !of.read_only => Access::ReadWrite,
        _ => Access::ReadOnly,
    };
    // A directory that cannot be read is found out here, and not by the guest.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(&of.path, flags, Mode::empty())
        .map_err(|e| Error::io("open", &of.path, e.into()))?;
    let (uid, gid) = of.owner.unwrap_or((0, 0));
    Ok(Directory {
        mount: MountId(point.id),
        root: open(&of.path)?,
        path: of.path.clone(),
        access,
        owner: Owner { uid, gid },
    })
}

/// Opens the directories of all mounts of a guest. Those that cannot be opened are left out, and
/// the guest gets an error when it uses them.
pub(crate) fn directories(
    points: &[MountPoint],
    known: &HostDirectories,
) -> (Vec<Directory>, Vec<Degradation>) {
    let mut opened = Vec::new();
    let mut missing = Vec::new();
    for point in points {
        let found = match known.get(point.id) {
            Some(of) => directory(point, of).map_err(|error| error.one_line()),
            None => Err("no directory of this host was given for it".to_owned()),
        };
        match found {
            Ok(directory) => opened.push(directory),
            Err(reason) => missing.push(Degradation::MountUnavailable {
                path: point.path.clone(),
                reason,
            }),
        }
    }
    (opened, missing)
}

/// The port of one machine for mounts. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct MountPort(Arc<Mutex<Use>>);

#[derive(Debug)]
enum Use {
    /// The machine has no such port, or it was used and is closed.
    Absent,
    Unused(UnixStream),
    Serving(Serving),
}

/// A server that ends in a thread of its own: a file system of the host may not answer it.
#[derive(Debug)]
struct Serving(Option<Server>);

impl Serving {
    fn server(&self) -> &Server {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let server = self.0.take();
        let thread = std::thread::Builder::new().spawn(move || drop(server));
        if let Err(error) = thread {
            tracing::warn!(%error, "a server of mounts was ended by its caller");
        }
    }
}

impl MountPort {
    pub fn new(port: Option<UnixStream>) -> Self {
        Self(Arc::new(Mutex::new(Use::of(port))))
    }

    /// Uses the port of another machine from now on.
    pub fn reconnect(&self, port: Option<UnixStream>) {
        *self.lock() = Use::of(port);
    }

    /// Serves these directories from now on.
    pub fn serve(&self, directories: Vec<Directory>) -> Result<()> {
        let mut used = self.lock();
        match std::mem::replace(&mut *used, Use::Absent) {
            Use::Unused(port) => {
                *used = Use::Serving(Serving(Some(start(port, directories)?)));
                Ok(())
            }
            other => {
                *used = other;
                Err(Error::NoMountPort {})
            }
        }
    }

    /// Serves one more directory.
    pub async fn add(&self, directory: Directory) -> Result<()> {
        let mut directory = Some(directory);
        let added = self.ask(|server, done| {
            if let Some(directory) = directory.take() {
                server.add(directory, done);
            }
        });
        match (added, directory) {
            (Some(added), _) => finished(added, CHANGED_WITHIN).await,
            (None, Some(directory)) => self.serve(vec![directory]),
            (None, None) => Ok(()),
        }
    }

    /// Serves a directory no longer.
    pub async fn remove(&self, mount: u32) -> Result<()> {
        match self.ask(|server, done| server.remove(MountId(mount), done)) {
            Some(removed) => finished(removed, CHANGED_WITHIN).await,
            None => Ok(()),
        }
    }

    /// Waits until what the guest shows is up to date with the host.
    pub async fn ready(&self) -> Result<()> {
        match self.ask(|server, done| server.on_ready(done)) {
            Some(ready) => finished(ready, READY_WITHIN).await,
            None => Ok(()),
        }
    }

    /// Waits until the guest has no request under way. From then on, the port stands still.
    pub async fn hold(&self) {
        let Some(held) = self.ask(|server, done| server.hold(done)) else {
            return;
        };
        if let Err(error) = finished(held, HELD_WITHIN).await {
            tracing::warn!(%error, "a guest is captured with requests to its mounts under way");
            let parked = self.ask(|server, done| server.park(done));
            if let Some(parked) = parked
                && let Err(error) = finished(parked, CHANGED_WITHIN).await
            {
                tracing::warn!(%error, "the port of mounts does not stand still");
            }
        }
    }

    /// The guest continues after [`hold`](Self::hold).
    pub fn go(&self) {
        if let Use::Serving(serving) = &*self.lock() {
            serving.server().go();
        }
    }

    /// Waits until the guest knows of all changes on the host so far.
    pub async fn barrier(&self) {
        let Some(passed) = self.ask(|server, done| server.barrier(done)) else {
            return;
        };
        if let Err(error) = finished(passed, BARRIER_WITHIN).await {
            tracing::debug!(%error, "a guest may not know of the host's latest changes");
        }
    }

    /// The mounts as their server sees them. Empty if it does not answer in time: a file system of
    /// the host may keep it waiting.
    pub async fn served(&self) -> Vec<ServedMount> {
        let (done, status) = oneshot::channel();
        match &*self.lock() {
            // A caller that stopped waiting needs no answer.
            Use::Serving(serving) => serving.server().status(|all| drop(done.send(all))),
            Use::Absent | Use::Unused(_) => return Vec::new(),
        }
        match tokio::time::timeout(STATUS_WITHIN, status).await {
            Ok(Ok(all)) => all.iter().map(ServedMount::new).collect(),
            Ok(Err(_)) | Err(_) => Vec::new(),
        }
    }

    pub fn is_used(&self) -> bool {
        matches!(*self.lock(), Use::Serving(_))
    }

    fn ask(
        &self,
        call: impl FnOnce(&Server, Box<dyn FnOnce(Outcome) + Send>),
    ) -> Option<oneshot::Receiver<Outcome>> {
        let used = self.lock();
        let Use::Serving(serving) = &*used else {
            return None;
        };
        let server = serving.server();
        let (done, answer) = oneshot::channel();
        // A caller that stopped waiting needs no answer.
        call(server, Box::new(|outcome| drop(done.send(outcome))));
        Some(answer)
    }

    fn lock(&self) -> MutexGuard<'_, Use> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Use {
    fn of(port: Option<UnixStream>) -> Self {
        port.map_or(Self::Absent, Self::Unused)
    }
}

fn start(port: UnixStream, directories: Vec<Directory>) -> Result<Server> {
    let port = port
        .into_std()
        .map_err(|e| Error::io("use", "the port of mounts", e))?;
    Server::start(port, fresh_nonce(), directories).map_err(mount_error)
}

async fn finished(answer: oneshot::Receiver<Outcome>, within: Duration) -> Result<()> {
    match tokio::time::timeout(within, answer).await {
        Ok(Ok(outcome)) => outcome.map_err(mount_error),
        Ok(Err(_)) => Err(mount_error(sandtree_mounts::Error::Ended)),
        Err(_) => Err(Error::MountSilent { after: within }),
    }
}

fn mount_error(source: sandtree_mounts::Error) -> Error {
    Error::MountServer { source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_of_watches_has_its_own_words() {
        let said = |watching| unwatched(watching).unwrap_or_default();
        assert_eq!(unwatched(Watching::Full), None);
        let own = said(Watching::Limited { most: 16384 });
        assert!(own.contains("more than 16384 directories") && !own.contains("raise"));
        let errno = Errno::NOSPC.raw_os_error();
        let users = said(Watching::Refused { errno });
        assert!(users.contains("raise fs.inotify.max_user_watches"));
        let errno = Errno::NOMEM.raw_os_error();
        assert!(said(Watching::Refused { errno }).contains("memory"));
        let errno = Errno::MFILE.raw_os_error();
        let none = said(Watching::Unavailable { errno });
        assert!(none.contains("raise fs.inotify.max_user_instances"));
    }
}
