//! The keeper's own process: does what its lease orders, then serves the sandbox until it rests.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use sandtree_proto::Metrics;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

use super::wire::{self, Answer, GIVE_UP, GO, News, Order, RELEASE, Ready, Request, Task, Way};
use crate::console;
use crate::create;
use crate::driver::{Phase, Verb};
use crate::error::{Error, Result};
use crate::host::{Host, remove_if_there};
use crate::lend::Wanted;
use crate::sandbox::{Replace, Sandbox, StateWatch};

/// How long a client may take to say what it wants.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// Requests that are attended to at a time; further ones wait in the socket's queue.
const CLIENTS_MAX: usize = 256;
/// After a failed accept, out of descriptors most likely: rather than spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long answers may take to be sent when everything is over.
const FAREWELL: Duration = Duration::from_secs(2);

/// What a sandbox uses.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stats {
    pub guest: Metrics,
    /// Memory of the QEMU process that is in the host's RAM.
    pub host_memory_bytes: u64,
    /// Processor time of the QEMU process.
    pub host_cpu_ms: u64,
    /// Bytes on the host's disk.
    pub host_disk_bytes: u64,
}

/// A keeper's whole life. `lease` is the socket that [`Lease::start`](super::Lease::start) made.
pub async fn run(mut lease: UnixStream) -> Result<()> {
    leave_terminal();
    let order: Order = wire::read(&mut lease).await.map_err(lease_error)?;
    let mut ended = Ended::new()?;
    let made = tokio::select! {
        made = make(&order, &mut lease) => made,
        () = ended.signal() => return Ok(()),
    };
    let Made { host, sandbox, way } = match made {
        Ok(Some(made)) => made,
        // Nobody waits for it any more.
        Ok(None) => return Ok(()),
        Err(error) => {
            return wire::write(&mut lease, &News::Failed(error.report()))
                .await
                .map_err(lease_error);
        }
    };
    let listener = match announce(&host, &sandbox, way, &mut lease).await {
        Ok(listener) => listener,
        Err(error) => {
            wire::write(&mut lease, &News::Failed(error.report()))
                .await
                .map_err(lease_error)?;
            return rest(&host, sandbox, &order, Left::Unwanted, &mut lease).await;
        }
    };
    let left = serve(&host, &sandbox, listener, &mut lease, &mut ended).await;
    rest(&host, sandbox, &order, left, &mut lease).await
}

/// What a keeper's work ended with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// The sandbox rests, or is to.
    Resting,
    /// The lease closed before it was released.
    Revoked,
    /// Nobody was told that it runs, or whoever was has given it up.
    Unwanted,
}

fn lease_error(source: std::io::Error) -> Error {
    Error::io("speak on", "the lease", source)
}

/// A session of our own: what happens to the caller's terminal does not concern us.
fn leave_terminal() {
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "already the leader of a session");
    }
}

/// What a keeper was started for.
struct Made {
    host: Host,
    sandbox: Sandbox,
    way: Way,
}

/// Does what was ordered, unless the lease closes first.
async fn make(order: &Order, lease: &mut UnixStream) -> Result<Option<Made>> {
    let Task::Copy {
        source,
        state,
        name,
    } = &order.task
    else {
        return unless_closed(lease, make_alone(order)).await;
    };
    let host = Host::open(order.config.clone()).await?;
    let loading = async {
        let (state, record) = host.inner.fork_source(source, state)?;
        create::copy(host.inner.clone(), state, &record, name.clone()).await
    };
    let Some(copy) = unless_closed(lease, loading).await? else {
        return Ok(None);
    };
    wire::write(lease, &News::Loaded)
        .await
        .map_err(lease_error)?;
    match lease.read_u8().await {
        Ok(GO) => {}
        _ => return Ok(None),
    }
    let sandbox = unless_closed(lease, copy.go_on()).await?;
    Ok(sandbox.map(|sandbox| Made {
        host,
        sandbox,
        way: Way::Booted,
    }))
}

async fn make_alone(order: &Order) -> Result<Made> {
    let host = Host::open(order.config.clone()).await?;
    let (sandbox, way) = match &order.task {
        Task::Create(spec) => (host.create((**spec).clone()).await?, Way::Booted),
        Task::Start {
            reference,
            boot_timeout,
        } => (host.start(reference, *boot_timeout).await?, Way::Booted),
        Task::GoTo { reference, goal } => {
            let sandbox = host.adopt(reference, Verb::Revert).await?;
            let reverted = sandbox.go_to(goal.clone()).await?;
            (sandbox, Way::Reverted(reverted))
        }
        Task::Resume { reference } => {
            let sandbox = host.adopt(reference, Verb::Resume).await?;
            let resumed = sandbox.resume().await?;
            (sandbox, Way::Resumed(resumed))
        }
        Task::Copy { .. } => unreachable!("it is made in two steps"),
    };
    Ok(Made { host, sandbox, way })
}

/// Dropping the work undoes it.
async fn unless_closed<T>(
    lease: &mut UnixStream,
    work: impl Future<Output = Result<T>>,
) -> Result<Option<T>> {
    tokio::select! {
        done = work => done.map(Some),
        () = closed(lease) => Ok(None),
    }
}

/// Opens the socket, and says on the lease that the sandbox runs.
async fn announce(
    host: &Host,
    sandbox: &Sandbox,
    way: Way,
    lease: &mut UnixStream,
) -> Result<UnixListener> {
    let dir = host.inner.find(sandbox.id())?;
    let listener = bind(dir.path(), &dir.keeper_socket())?;
    let info = host.find(sandbox.id())?;
    log_to(&dir.path().join("keeper.log"))?;
    wire::write(lease, &News::Ready(Box::new(Ready { info, way })))
        .await
        .map_err(lease_error)?;
    Ok(listener)
}

/// Serves until the sandbox rests, nobody wants it, or we are told to end. From here on no failure
/// of ours is a reason to take a sandbox away that was given out of hand.
async fn serve(
    host: &Host,
    sandbox: &Sandbox,
    listener: UnixListener,
    lease: &mut UnixStream,
    ended: &mut Ended,
) -> Left {
    let mut watch = sandbox.watch();
    let mut clients = JoinSet::new();
    let mut released = false;
    let left = loop {
        tokio::select! {
            accepted = listener.accept(), if clients.len() < CLIENTS_MAX => match accepted {
                Ok((stream, _)) => drop(clients.spawn(attend(host.clone(), sandbox.clone(), stream))),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = clients.join_next() => {}
            // One that is paused may be about to go on: whoever asked for that is still being
            // attended to.
            () = unneeded(sandbox, &mut watch), if clients.is_empty() || !is_paused(sandbox) => break Left::Resting,
            word = lease.read_u8(), if !released => match word {
                Ok(RELEASE) => released = true,
                Ok(GIVE_UP) => break Left::Unwanted,
                _ => break Left::Revoked,
            },
            () = ended.signal() => break Left::Resting,
        }
    };
    let farewell = async { while clients.join_next().await.is_some() {} };
    if tokio::time::timeout(FAREWELL, farewell).await.is_err() {
        tracing::warn!("a client did not take its answer");
    }
    left
}

/// Waits until the sandbox rests. One that is paused is kept for the clients that wait for it to go
/// on.
async fn unneeded(sandbox: &Sandbox, watch: &mut StateWatch) {
    while watch.rested().await.phase == Some(Phase::Paused) {
        let Some(hub) = sandbox.paused_hub() else {
            return;
        };
        tokio::select! {
            () = hub.idle() => return,
            changed = watch.changed() => if changed.is_none() { return },
        }
    }
}

fn is_paused(sandbox: &Sandbox) -> bool {
    sandbox.state().phase == Some(Phase::Paused)
}

/// Takes back what nobody wants any more, saves what was to be saved, removes what was to last only
/// as long as it ran, and stops what still runs.
async fn rest(
    host: &Host,
    sandbox: Sandbox,
    order: &Order,
    left: Left,
    lease: &mut UnixStream,
) -> Result<()> {
    let info = host.find(sandbox.id());
    if left != Left::Unwanted && info.as_ref().is_ok_and(|info| info.save_on_stop.is_some()) {
        match saved(&sandbox).await {
            Some(digest) => tell_saved(lease, digest).await,
            // All there is of it is in the sandbox.
            None => return Ok(()),
        }
    }
    let taken_back = left != Left::Resting;
    let unwanted = taken_back && matches!(order.task, Task::Create(_) | Task::Copy { .. });
    let resumed = taken_back && matches!(order.task, Task::Resume { .. });
    let temporary = unwanted || info.is_ok_and(|info| info.auto_remove);
    match (temporary, sandbox.state().phase) {
        (_, None) => Ok(()),
        // Paused, it has not ended.
        (true, Some(Phase::Paused)) if !unwanted => Ok(()),
        (true, Some(_)) => sandbox.remove().await,
        (false, Some(Phase::Running)) if resumed => sandbox.pause().await.map(drop),
        (false, Some(Phase::Running)) => sandbox.stop(None).await,
        (false, Some(_)) => Ok(()),
    }
}

/// Waits until a sandbox that is saved when it stops has stopped, and tells what it was saved as;
/// nothing, if it was not.
async fn saved(sandbox: &Sandbox) -> Option<String> {
    if sandbox.state().phase == Some(Phase::Running)
        && let Err(error) = sandbox.stop(None).await
    {
        // It may have stopped by itself meanwhile. What became of it, its state tells.
        tracing::warn!(%error, "a sandbox that is to be saved was not stopped in good order");
    }
    let state = sandbox.watch().rested().await;
    match (state.phase, state.save_failed) {
        (Some(Phase::Stopped | Phase::Crashed), None) => state.saved,
        _ => None,
    }
}

async fn tell_saved(lease: &mut UnixStream, digest: String) {
    if let Err(error) = wire::write(lease, &News::Saved { digest }).await {
        tracing::debug!(%error, "nobody waits to hear what it was saved as");
    }
}

/// Binds by way of a descriptor of the directory: a path to a socket has a length limit, a store's
/// home has none.
fn bind(dir: &Path, socket: &Path) -> Result<UnixListener> {
    remove_if_there(socket)?;
    let opened = std::fs::File::open(dir).map_err(|e| Error::io("open", dir, e))?;
    UnixListener::bind(short_path(&opened, socket)).map_err(|source| {
        match has_no_sockets(&source) {
            true => Error::NoSockets {
                path: socket.into(),
                source,
            },
            false => Error::io("listen on", socket, source),
        }
    })
}

/// The directory is ours and takes other files: what is refused is the kind of file. Drivers on
/// FUSE answer with EIO.
fn has_no_sockets(error: &io::Error) -> bool {
    let refusals = [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS, Errno::IO]
        .map(|errno| Some(errno.raw_os_error()));
    refusals.contains(&error.raw_os_error())
}

pub(super) fn short_path(dir: &std::fs::File, socket: &Path) -> std::path::PathBuf {
    let name = socket.file_name().expect("a socket's path names it");
    Path::new("/proc/self/fd")
        .join(dir.as_raw_fd().to_string())
        .join(name)
}

/// From here on nobody reads our standard error: it goes to a file.
fn log_to(path: &Path) -> Result<()> {
    let file = console::append_to(path).map_err(|e| Error::io("open", path, e))?;
    rustix::stdio::dup2_stderr(&file).map_err(|e| Error::io("log to", path, e.into()))
}

/// Waits until the other end is closed. Nothing is sent on it, so anything that comes is ignored.
async fn closed(lease: &mut UnixStream) {
    let mut buffer = [0; 64];
    while let Ok(1..) = lease.read(&mut buffer).await {}
}

/// The signals that end a keeper in good order.
struct Ended {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Ended {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).map_err(|e| Error::io("listen for", "signals", e));
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn signal(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                // A terminal that goes away is not ours.
                _ = self.hangup.recv() => {}
            }
        }
    }
}

async fn attend(host: Host, sandbox: Sandbox, mut stream: UnixStream) {
    if !is_ours(&stream) {
        return;
    }
    let request = tokio::time::timeout(REQUEST_DEADLINE, wire::read(&mut stream)).await;
    let Ok(Ok(request)) = request else { return };
    if let Err(error) = answer(&host, &sandbox, stream, request).await {
        tracing::debug!(%error, "a client left before its answer");
    }
}

/// The directory's mode keeps others out already; this is the second lock.
fn is_ours(stream: &UnixStream) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == ours || peer.uid() == 0)
}

async fn answer(
    host: &Host,
    sandbox: &Sandbox,
    mut stream: UnixStream,
    request: Request,
) -> std::io::Result<()> {
    match request {
        Request::Link => {
            let hub = sandbox.hub();
            wire::write(&mut stream, &told(hub.as_ref().map(drop))).await?;
            if let Ok(hub) = hub {
                hub.serve(stream).await;
            }
            Ok(())
        }
        Request::Stats => {
            wire::write(&mut stream, &told(stats(host, sandbox).await.as_ref())).await
        }
        Request::Execs => wire::write(&mut stream, &told(sandbox.execs().await.as_ref())).await,
        Request::Stop { grace_ms } => {
            let stopped = sandbox.stop(grace_ms.map(Duration::from_millis)).await;
            wire::write(&mut stream, &told(stopped.as_ref())).await
        }
        Request::Kill => wire::write(&mut stream, &told(sandbox.kill().await.as_ref())).await,
        Request::Remove => wire::write(&mut stream, &told(sandbox.remove().await.as_ref())).await,
        Request::Checkpoint { tag, replace } => {
            let taken = sandbox
                .checkpoint(tag.as_deref(), Replace::from(replace))
                .await;
            wire::write(&mut stream, &told(taken.as_ref())).await
        }
        Request::GoTo(goal) => {
            wire::write(&mut stream, &told(sandbox.go_to(goal).await.as_ref())).await
        }
        Request::Forget(which) => {
            wire::write(&mut stream, &told(sandbox.forget(which).await.as_ref())).await
        }
        Request::Lend(wanted) => lend(sandbox, wanted, stream).await,
        Request::TakeBack { state } => {
            wire::write(&mut stream, &told(sandbox.take_back(&state).await.as_ref())).await
        }
        Request::Pause => wire::write(&mut stream, &told(sandbox.pause().await.as_ref())).await,
        Request::Resume => wire::write(&mut stream, &told(sandbox.resume().await.as_ref())).await,
    }
}

/// A state is lent until the asker gives it back, or is gone.
async fn lend(sandbox: &Sandbox, wanted: Wanted, mut stream: UnixStream) -> std::io::Result<()> {
    let lent = sandbox.lend(wanted).await;
    let written = wire::write(&mut stream, &told(lent.as_ref())).await;
    let Ok(lent) = lent else { return written };
    if written.is_ok() {
        closed(&mut stream).await;
    }
    if let Err(error) = sandbox.take_back(&lent.state).await {
        tracing::warn!(%error, "a state that was lent stays until the next start");
    }
    written
}

fn told<T>(result: Result<T, &Error>) -> Answer<T> {
    result.map_err(Error::report)
}

async fn stats(host: &Host, sandbox: &Sandbox) -> Result<Stats> {
    let guest = sandbox.guest().await?.metrics().await?;
    let dir = host.inner.find(sandbox.id())?;
    let pid = host.find(sandbox.id())?.qemu_pid.unwrap_or_default();
    let (host_memory_bytes, host_cpu_ms) = process_usage(pid)?;
    Ok(Stats {
        guest,
        host_memory_bytes,
        host_cpu_ms,
        host_disk_bytes: disk_usage(dir.path())?,
    })
}

/// Resident bytes and milliseconds of processor time, from `/proc/PID/stat`.
fn process_usage(pid: u32) -> Result<(u64, u64)> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
    // The second field is the program's name in parentheses and may hold anything, also
    // parentheses.
    let fields: Vec<u64> = text
        .rsplit_once(')')
        .map(|(_, rest)| {
            rest.split_whitespace()
                .map(|field| field.parse().unwrap_or(0))
                .collect()
        })
        .unwrap_or_default();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
    let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
    let cpu_ms = (field(14) + field(15)) * 1000 / ticks_per_second;
    Ok((field(24) * rustix::param::page_size() as u64, cpu_ms))
}

fn disk_usage(dir: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let failed = |e| Error::io("measure", dir, e);
    let mut bytes = 0;
    for entry in dir.read_dir().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // What is replaced or removed while we look has no size any more.
        let Ok(found) = entry.metadata() else {
            continue;
        };
        bytes += if found.is_dir() {
            disk_usage(&entry.path())?
        } else {
            found.blocks() * 512
        };
    }
    Ok(bytes)
}
