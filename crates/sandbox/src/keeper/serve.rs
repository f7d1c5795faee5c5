//! The keeper's own process: carries out the mission of its lease, then serves the sandbox until
//! the sandbox rests.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sandtree_store::Phase;
use serde::Serialize;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

use super::requests::{Carried, Requests};
use super::samples::Samples;
use super::stats::stats;
use super::wire::{
    self, Answer, Call, Hello, Mission, News, PROTOCOL, PictureSize, Ready, Task, Word,
};
use crate::blocking::may_block;
use crate::boxed::Boxed;
use crate::cause::Cause;
use crate::console;
use crate::create::{self, CopySpec};
use crate::driver::{Commit, Existence, Local};
use crate::error::{Error, Result};
use crate::files::remove_if_there;
use crate::host::Host;
use crate::hub::{ExecEntry, Hub};
use crate::mounts::ServedMount;
use crate::order::{GiveBack, Kill, OpenView, Order, Pause, Remove, Stop, TakePicture, Wanted};
use crate::status::StateWatch;

/// How long a client may take to send its request.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// The number of clients that are served at a time. Further clients wait in the socket's queue.
const CLIENTS_MAX: usize = 256;
/// The wait after a failed accept, so that the loop does not spin. Most likely, the process has no
/// free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long clients may take to receive their answers when the keeper ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// A keeper's whole life. `lease` is its end of the socket pair that it was started with.
pub fn run(mut lease: UnixStream) -> Boxed<'static, Result<()>> {
    Box::pin(async move {
        leave_terminal();
        let Some((mission, cause)) = accept(&mut lease).await? else {
            return Ok(());
        };
        let began = Instant::now();
        let mut ended = Ended::new()?;
        let made = tokio::select! {
            made = make(&mission, &mut lease) => made,
            () = ended.signal() => return Ok(()),
        };
        let made = match made {
            Ok(Some(made)) => made,
            // The lease closed, and its holder waits for our end of it. Threads may still undo what
            // was dropped, so it closes with the process.
            Ok(None) => {
                std::mem::forget(lease);
                return Ok(());
            }
            Err(error) => return fail(&mut lease, &error).await,
        };
        let Made {
            host,
            sandbox,
            answer,
        } = made;
        let mut shift = Shift {
            host,
            sandbox,
            mission,
            lease,
            is_owned: false,
            is_committed: false,
            is_released: false,
            samples: Samples::default(),
            requests: Requests::default(),
        };
        let left = match shift.announce(answer).await {
            Ok(listener) => {
                let carried = Carried {
                    verb: shift.mission.task.name(),
                    began,
                    failed: None,
                };
                shift.requests.note(cause.as_ref(), &carried);
                shift.serve(listener, &mut ended).await
            }
            Err(error) => {
                fail(&mut shift.lease, &error).await?;
                Left::Unwanted
            }
        };
        let mut watch = shift.sandbox.watch();
        let rested = shift.rest(left).await;
        // The driver removes the socket when its sandbox has no handle left. This process must not
        // end before that.
        let driven = async { while watch.changed().await.is_some() {} };
        if tokio::time::timeout(FAREWELL, driven).await.is_err() {
            tracing::warn!("a sandbox is still driven when its keeper ends");
        }
        rested
    })
}

/// Exchanges hellos and reads the mission, and the request that it is for. `None`: the other end
/// speaks another version, or has stopped waiting.
async fn accept(lease: &mut UnixStream) -> Result<Option<(Mission, Option<Cause>)>> {
    let theirs: Option<Hello> = unless_gone(wire::read(lease).await)?;
    let Some(theirs) = theirs else {
        return Ok(None);
    };
    let answered = unless_gone(wire::write(lease, &Hello::ours()).await)?;
    if answered.is_none() || theirs.protocol != PROTOCOL {
        return Ok(None);
    }
    let mission = unless_gone(wire::read(lease).await)?;
    Ok(mission.map(|mission| (mission, theirs.cause())))
}

/// `None`: the other end is closed.
fn unless_gone<T>(done: io::Result<T>) -> Result<Option<T>> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    match done {
        Ok(done) => Ok(Some(done)),
        Err(e) if matches!(e.kind(), UnexpectedEof | BrokenPipe | ConnectionReset) => Ok(None),
        Err(e) => Err(lease_error(e)),
    }
}

async fn fail(lease: &mut UnixStream, error: &Error) -> Result<()> {
    wire::write(lease, &News::Failed(error.report()))
        .await
        .map_err(lease_error)
}

/// How a keeper's work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// The sandbox rests, or must stop now.
    Resting,
    /// The lease closed before it was released.
    Revoked,
    /// The sandbox was never announced, or its creator gave it up.
    Unwanted,
}

fn lease_error(source: std::io::Error) -> Error {
    Error::io("use", "the lease", source)
}

/// Starts a session of our own, so that we do not depend on the caller's terminal.
fn leave_terminal() {
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "already the leader of a session");
    }
}

/// A sandbox that runs, and the answer to the order that started it.
struct Made {
    host: Host,
    sandbox: Local,
    answer: Value,
}

/// Carries the mission out. `None`: the lease closed first.
async fn make(mission: &Mission, lease: &mut UnixStream) -> Result<Option<Made>> {
    let host = Host::open(mission.config.clone()).await?;
    let unfinished = match &mission.task {
        Task::Order { reference, order } => {
            return start(host, reference, order.clone(), lease).await;
        }
        Task::Create(spec) => {
            let creating =
                create::created(host.inner.clone(), (**spec).clone(), mission.batch.clone());
            unless_closed(lease, may_block(creating)).await?
        }
        Task::Copy {
            source,
            state,
            name,
            mounts,
        } => {
            let copying = async {
                let copy = CopySpec {
                    source: host.inner.copy_source(source, state)?,
                    mounts: *mounts,
                    name: name.clone(),
                    batch: mission.batch.clone(),
                };
                create::copy(host.inner.clone(), copy).await
            };
            let Some(copy) = unless_closed(lease, may_block(copying)).await? else {
                return Ok(None);
            };
            wire::write(lease, &News::Loaded)
                .await
                .map_err(lease_error)?;
            if word(lease).await != Some(Word::Go) {
                return Ok(None);
            }
            unless_closed(lease, may_block(copy.resume())).await?
        }
    };
    let Some(unfinished) = unfinished else {
        return Ok(None);
    };
    let answer = value(Ok(&unfinished.running.created))?;
    Ok(Some(Made {
        sandbox: unfinished.drive(&host, Existence::Pending),
        host,
        answer,
    }))
}

/// Takes a sandbox at rest and carries out the order that starts it. If the lease closes first, the
/// sandbox rests again.
async fn start(
    host: Host,
    reference: &str,
    order: Order,
    lease: &mut UnixStream,
) -> Result<Option<Made>> {
    let sandbox = host.adopt(reference, order.verb()).await?;
    let answer = match unless_closed(lease, obey(&sandbox, order)).await? {
        Some(answer) => answer,
        None => {
            // The machine may have been about to start.
            if let Err(error) = sandbox.ask(Kill {}).await {
                tracing::debug!(%error, "there was nothing to interrupt");
            }
            return Ok(None);
        }
    };
    Ok(Some(Made {
        host,
        sandbox,
        answer,
    }))
}

/// Carries an order out. Each answer is of its verb's own type; on the socket it is JSON.
async fn obey(sandbox: &Local, order: Order) -> Result<Value> {
    match order {
        Order::Stop(ask) => value(sandbox.ask(ask).await),
        Order::Kill(ask) => value(sandbox.ask(ask).await),
        Order::Start(ask) => value(sandbox.ask(ask).await),
        Order::Remove(ask) => value(sandbox.ask(ask).await),
        Order::Checkpoint(ask) => value(sandbox.ask(ask).await),
        Order::GoTo(ask) => value(sandbox.ask(ask).await),
        Order::Forget(ask) => value(sandbox.ask(ask).await),
        Order::Lend(ask) => value(sandbox.ask(ask).await),
        Order::GiveBack(ask) => value(sandbox.ask(ask).await),
        Order::Pause(ask) => value(sandbox.ask(ask).await),
        Order::Resume(ask) => value(sandbox.ask(ask).await),
        Order::Mount(ask) => value(sandbox.ask(ask).await),
        Order::Unmount(ask) => value(sandbox.ask(ask).await),
        Order::Applied(ask) => value(sandbox.ask(ask).await),
        Order::Expire(ask) => value(sandbox.ask(ask).await),
    }
}

fn value<T: Serialize>(answer: Result<T>) -> Result<Value> {
    let answer = serde_json::to_value(answer?);
    answer.map_err(|e| Error::io("write", "an answer", e.into()))
}

/// The next word of the lease's holder. `None`: the lease closed, or the byte is no word.
async fn word(lease: &mut UnixStream) -> Option<Word> {
    Word::of(lease.read_u8().await.ok()?)
}

/// Does the work. `None`: the lease closed first; then the work is dropped, which undoes it.
async fn unless_closed<T>(
    lease: &mut UnixStream,
    work: impl Future<Output = Result<T>>,
) -> Result<Option<T>> {
    tokio::select! {
        done = work => done.map(Some),
        () = closed(lease) => Ok(None),
    }
}

/// A keeper while it serves its sandbox.
struct Shift {
    host: Host,
    sandbox: Local,
    mission: Mission,
    lease: UnixStream,
    /// Whether the sandbox belongs to the holder of the lease, even at rest.
    is_owned: bool,
    is_committed: bool,
    is_released: bool,
    samples: Samples,
    requests: Requests,
}

impl Shift {
    /// Opens the socket, and reports on the lease that the sandbox runs.
    async fn announce(&mut self, answer: Value) -> Result<UnixListener> {
        let info = self.sandbox.status().info;
        let dir = self.host.inner.find(&info.id)?;
        let listener = bind(dir.path(), &dir.keeper_socket())?;
        log_to(&dir.path().join("keeper.log"))?;
        let ready = News::Ready(Box::new(Ready { info, answer }));
        wire::write(&mut self.lease, &ready)
            .await
            .map_err(lease_error)?;
        Ok(listener)
    }

    /// Serves until the sandbox rests, its creator gives it up, or a signal ends the keeper. After
    /// the sandbox's release, an error in the keeper must not stop the sandbox.
    async fn serve(&mut self, listener: UnixListener, ended: &mut Ended) -> Left {
        let mut watch = self.sandbox.watch();
        let mut clients = JoinSet::new();
        let left = loop {
            tokio::select! {
                accepted = listener.accept(), if clients.len() < CLIENTS_MAX => match accepted {
                    Ok((stream, _)) => {
                        let hello = match self.needed() {
                            Needed::UntilItRests => Hello::ours(),
                            Needed::UntilItIsRemoved => Hello::of_owned(),
                        };
                        clients.spawn(self.desk().attend(stream, hello));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a client");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = clients.join_next() => {}
                // A client may be resuming the paused sandbox: the keeper still serves it.
                () = unneeded(&self.sandbox, self.needed(), &mut watch),
                    if clients.is_empty() || !is_paused(&self.sandbox) => break Left::Resting,
                word = self.lease.read_u8(), if !self.is_released => {
                    if let Some(left) = self.obey_lease(word.ok()).await {
                        break left;
                    }
                }
                () = ended.signal() => break Left::Resting,
            }
        };
        let farewell = async { while clients.join_next().await.is_some() {} };
        if tokio::time::timeout(FAREWELL, farewell).await.is_err() {
            tracing::warn!("a client did not take its answer");
        }
        left
    }

    fn desk(&self) -> Desk {
        Desk {
            host: self.host.clone(),
            sandbox: self.sandbox.clone(),
            samples: self.samples.clone(),
            requests: self.requests.clone(),
        }
    }

    /// From here on the keeper serves the sandbox while it rests, too.
    fn own(&mut self) {
        self.is_owned = true;
        let serves = &self.host.inner.serves_at_rest;
        serves.store(true, Ordering::Relaxed);
    }

    fn disown(&mut self) {
        self.is_owned = false;
        let serves = &self.host.inner.serves_at_rest;
        serves.store(false, Ordering::Relaxed);
    }

    fn needed(&self) -> Needed {
        if self.is_owned && !self.sandbox.status().info.auto_remove {
            Needed::UntilItIsRemoved
        } else {
            Needed::UntilItRests
        }
    }

    /// Carries out a word of the lease's holder. A `byte` of `None`: the lease closed. Returns how
    /// the keeper's work ended, if it did.
    async fn obey_lease(&mut self, byte: Option<u8>) -> Option<Left> {
        match byte.and_then(Word::of) {
            Some(Word::Commit) => {
                let committed = self.commit().await;
                let sent = match &committed {
                    Ok(()) => wire::write(&mut self.lease, &News::Committed).await,
                    Err(error) => {
                        tracing::error!(%error, "a new sandbox cannot be recorded");
                        let failed = News::Failed(error.report());
                        wire::write(&mut self.lease, &failed).await
                    }
                };
                match (committed, sent) {
                    (Ok(()), Ok(())) => None,
                    // One with an owner does not outlive its owner, even in a committed batch.
                    _ if !self.is_owned && self.is_in_committed_batch() => self.live_on().await,
                    (Ok(()), Err(_)) => Some(Left::Revoked),
                    (Err(_), _) => Some(Left::Unwanted),
                }
            }
            Some(Word::Own) => {
                self.own();
                None
            }
            Some(Word::Release) => {
                self.disown();
                self.is_released = true;
                None
            }
            Some(Word::GiveUp) => Some(Left::Unwanted),
            // Even one of a committed batch.
            None if self.is_owned => Some(Left::Revoked),
            Some(Word::Go) | None if self.is_in_committed_batch() => {
                // The creator died after all sandboxes of the batch were committed.
                if let Err(error) = self.commit().await {
                    tracing::error!(%error, "a new sandbox cannot be recorded");
                }
                self.live_on().await
            }
            Some(Word::Go) | None => Some(Left::Revoked),
        }
    }

    /// Releases a sandbox whose batch is committed: it no longer depends on its creator.
    async fn live_on(&mut self) -> Option<Left> {
        self.disown();
        self.is_released = true;
        // A creator that still waits sees the end of the lease.
        if let Err(error) = self.lease.shutdown().await {
            tracing::debug!(%error, "the creator of a sandbox is gone");
        }
        None
    }

    async fn commit(&mut self) -> Result<()> {
        if self.mission.task.makes_a_sandbox() {
            self.sandbox.ask(Commit {}).await?;
        }
        self.is_committed = true;
        Ok(())
    }

    /// Whether the sandbox belongs to a batch that is committed, so that it must stay.
    fn is_in_committed_batch(&self) -> bool {
        let Some(batch) = &self.mission.batch else {
            return false;
        };
        let store = &self.host.inner.store;
        self.is_committed || store.is_committed(batch).unwrap_or(false)
    }

    /// Ends the keeper's work: saves a sandbox that is saved when it stops, removes one that is
    /// unwanted or temporary, pauses one whose resume was revoked, and stops one that still runs.
    async fn rest(mut self, left: Left) -> Result<()> {
        if !self.is_committed && self.is_in_committed_batch() {
            self.commit().await?;
        }
        let info = self.sandbox.status().info;
        if left != Left::Unwanted && info.save_on_stop.is_some() {
            match saved(&self.sandbox).await {
                Some(digest) => self.report_saved(digest).await,
                // The sandbox stays, because nothing else holds its data.
                None => return Ok(()),
            }
        }
        let is_taken_back = left != Left::Resting;
        let is_unwanted = is_taken_back && self.mission.task.makes_a_sandbox();
        let is_resumed = is_taken_back
            && matches!(
                self.mission.task,
                Task::Order {
                    order: Order::Resume(_),
                    ..
                }
            );
        let is_temporary = is_unwanted || info.auto_remove;
        let sandbox = &self.sandbox;
        match (is_temporary, sandbox.status().state.phase) {
            (_, None) => Ok(()),
            // A paused sandbox has not ended.
            (true, Some(Phase::Paused)) if !is_unwanted => Ok(()),
            (true, Some(_)) => sandbox.ask(Remove {}).await,
            (false, Some(Phase::Running)) if is_resumed => sandbox.ask(Pause {}).await.map(drop),
            (false, Some(Phase::Running)) => sandbox.ask(Stop { grace_ms: None }).await,
            (false, Some(_)) => Ok(()),
        }
    }

    async fn report_saved(&mut self, digest: String) {
        if let Err(error) = wire::write(&mut self.lease, &News::Saved { digest }).await {
            tracing::debug!(%error, "no process waits for the digest of the saved snapshot");
        }
    }
}

/// How long a sandbox needs its keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needed {
    UntilItRests,
    UntilItIsRemoved,
}

/// Waits until the sandbox no longer needs its keeper. For a paused sandbox, waits also until no
/// client waits for it to continue.
async fn unneeded(sandbox: &Local, needed: Needed, watch: &mut StateWatch) {
    if needed == Needed::UntilItIsRemoved {
        while watch.now().phase.is_some() && watch.changed().await.is_some() {}
        return;
    }
    while watch.rested().await.phase == Some(Phase::Paused) {
        let Some(hub) = sandbox.status().paused_hub() else {
            return;
        };
        tokio::select! {
            () = hub.idle() => return,
            changed = watch.changed() => if changed.is_none() { return },
        }
    }
}

fn is_paused(sandbox: &Local) -> bool {
    sandbox.status().state.phase == Some(Phase::Paused)
}

/// Stops a sandbox that is saved when it stops, and waits until it rests. Returns the digest of the
/// snapshot; `None` if the sandbox was not saved.
async fn saved(sandbox: &Local) -> Option<String> {
    if sandbox.status().state.phase == Some(Phase::Running)
        && let Err(error) = sandbox.ask(Stop { grace_ms: None }).await
    {
        // It may have stopped by itself meanwhile. Its state, which is read below, says how it
        // ended.
        tracing::warn!(%error, "a sandbox that is to be saved was not stopped in good order");
    }
    let state = sandbox.watch().rested().await;
    match (state.phase, state.save_failed) {
        (Some(Phase::Stopped | Phase::Crashed), None) => state.saved,
        _ => None,
    }
}

/// Binds through a descriptor of the directory: the path of a socket has a length limit, and the
/// path of a store has none.
fn bind(dir: &Path, socket: &Path) -> Result<UnixListener> {
    remove_if_there(socket)?;
    let opened = std::fs::File::open(dir).map_err(|e| Error::io("open", dir, e))?;
    UnixListener::bind(short_path(&opened, socket)).map_err(|source| {
        if has_no_sockets(&source) {
            Error::NoSockets {
                path: socket.into(),
                source,
            }
        } else {
            Error::io("listen on", socket, source)
        }
    })
}

/// Whether the file system refuses sockets. The directory is ours and takes other files, so the
/// error is about the kind of file. Drivers on FUSE answer with EIO.
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

/// Redirects standard error to a file, because no process reads it from here on.
fn log_to(path: &Path) -> Result<()> {
    let file = console::append_to(path).map_err(|e| Error::io("open", path, e))?;
    rustix::stdio::dup2_stderr(&file).map_err(|e| Error::io("log to", path, e.into()))
}

/// Waits until the other end closes the stream. The other end has nothing to send, so any bytes are
/// ignored.
async fn closed(stream: &mut (impl AsyncRead + Unpin)) {
    let mut buffer = [0; 64];
    while let Ok(1..) = stream.read(&mut buffer).await {}
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
                // The keeper has no terminal, so a hangup does not concern it.
                _ = self.hangup.recv() => {}
            }
        }
    }
}

/// What a client is served with.
struct Desk {
    host: Host,
    sandbox: Local,
    samples: Samples,
    requests: Requests,
}

impl Desk {
    async fn attend(self, mut stream: UnixStream, hello: Hello) {
        if !is_ours(&stream) {
            return;
        }
        let hearing = tokio::time::timeout(REQUEST_DEADLINE, hear(&mut stream, &hello));
        let Ok(Ok(Some((call, cause)))) = hearing.await else {
            return;
        };
        if let Err(error) = self.answer(stream, call, cause).await {
            tracing::debug!(%error, "a client left before its answer");
        }
    }
}

/// Exchanges hellos and reads the call, and the request that it is for. `None`: the client speaks
/// another version.
async fn hear(stream: &mut UnixStream, ours: &Hello) -> io::Result<Option<(Call, Option<Cause>)>> {
    let theirs: Hello = wire::read(stream).await?;
    wire::write(stream, ours).await?;
    if theirs.protocol != PROTOCOL {
        return Ok(None);
    }
    let call = wire::read(stream).await?;
    Ok(Some((call, theirs.cause())))
}

/// Whether the client has our user id, or is root. The directory's mode already refuses other
/// users; this is a second check.
fn is_ours(stream: &UnixStream) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == ours || peer.uid() == 0)
}

impl Desk {
    async fn answer(
        &self,
        mut stream: UnixStream,
        call: Call,
        cause: Option<Cause>,
    ) -> io::Result<()> {
        let sandbox = &self.sandbox;
        match call {
            Call::Link => {
                let hub = sandbox.status().hub();
                wire::write(&mut stream, &reported(hub.as_ref().map(drop))).await?;
                if let Ok(hub) = hub {
                    hub.serve(stream).await;
                }
                Ok(())
            }
            Call::Watch => watch(sandbox, stream).await,
            Call::Stats => {
                let stats = stats(&self.host, sandbox).await;
                wire::write(&mut stream, &reported(stats.as_ref())).await
            }
            Call::Samples => {
                let samples = self.samples.asked(sandbox).await;
                wire::write(&mut stream, &Answer::Ok(samples)).await
            }
            Call::Execs => {
                let execs = execs(sandbox).await;
                wire::write(&mut stream, &reported(execs.as_ref())).await
            }
            Call::Mounts => {
                let mounts = mounts(sandbox).await;
                wire::write(&mut stream, &reported(mounts.as_ref())).await
            }
            Call::Picture => picture(sandbox, stream).await,
            Call::View => view(sandbox, stream).await,
            Call::Order(Order::Lend(wanted)) => self.lend(wanted, stream, cause).await,
            // Only the connection of a loan can end the loan.
            Call::Order(Order::GiveBack(given)) => {
                let rule = "a lent state is returned by closing the connection that it was lent on";
                let refused: Result<()> =
                    Err(Error::invalid("order to give back", given.state, rule));
                wire::write(&mut stream, &reported(refused.as_ref())).await
            }
            Call::Order(order) => {
                let began = Instant::now();
                let verb = order.name();
                let answer = obey(sandbox, order).await;
                let carried = Carried {
                    verb,
                    began,
                    failed: answer.as_ref().err(),
                };
                self.requests.note(cause.as_ref(), &carried);
                wire::write(&mut stream, &reported(answer.as_ref())).await
            }
        }
    }
}

/// Sends the present state and every later one, until the keeper is about to end or the client
/// leaves. A keeper of a paused sandbox waits for the clients of its guest, but not for the clients
/// that watch.
async fn watch(sandbox: &Local, mut stream: UnixStream) -> io::Result<()> {
    let mut watch = sandbox.watch();
    let mut next = Some(watch.now().clone());
    let (mut reader, mut writer) = stream.split();
    while let Some(state) = next {
        let is_live = state.is_live();
        wire::write(&mut writer, &Answer::Ok(state)).await?;
        let hub = sandbox.status().paused_hub();
        if !is_live && hub.is_none() {
            return Ok(());
        }
        next = tokio::select! {
            state = watch.changed() => state,
            () = closed(&mut reader) => None,
            () = idle(hub) => None,
        };
    }
    Ok(())
}

/// Sends the size of a picture of the screen, and its pixels.
async fn picture(sandbox: &Local, mut stream: UnixStream) -> io::Result<()> {
    let picture = sandbox.ask(TakePicture {}).await;
    let size = picture.as_ref().map(|picture| PictureSize {
        width: picture.width,
        height: picture.height,
    });
    wire::write(&mut stream, &reported(size)).await?;
    match picture {
        Ok(picture) => stream.write_all(&picture.rgb).await,
        Err(_) => Ok(()),
    }
}

/// Connects a viewer with the machine, until either ends.
async fn view(sandbox: &Local, mut stream: UnixStream) -> io::Result<()> {
    let view = sandbox.ask(OpenView {}).await;
    wire::write(&mut stream, &reported(view.as_ref().map(drop))).await?;
    let Ok(mut view) = view else { return Ok(()) };
    let mut watch = sandbox.watch();
    // A viewer that reads nothing does not notice the end of the machine.
    let rests = async { while watch.now().is_live() && watch.changed().await.is_some() {} };
    tokio::select! {
        copied = copy_bidirectional(&mut stream, &mut view) => copied.map(drop),
        () = rests => Ok(()),
    }
}

/// Waits until no client waits for a paused sandbox to continue.
async fn idle(paused: Option<Hub>) {
    match paused {
        Some(hub) => hub.idle().await,
        None => std::future::pending().await,
    }
}

async fn execs(sandbox: &Local) -> Result<Vec<ExecEntry>> {
    Ok(sandbox.status().hub()?.execs().await)
}

async fn mounts(sandbox: &Local) -> Result<Vec<ServedMount>> {
    Ok(sandbox.status().hub()?.mounts().served().await)
}

impl Desk {
    /// Lends a state until the client closes the connection.
    async fn lend(
        &self,
        wanted: Wanted,
        mut stream: UnixStream,
        cause: Option<Cause>,
    ) -> io::Result<()> {
        let began = Instant::now();
        let lent = self.sandbox.ask(wanted).await;
        let carried = Carried {
            verb: "lend",
            began,
            failed: lent.as_ref().err(),
        };
        self.requests.note(cause.as_ref(), &carried);
        let written = wire::write(&mut stream, &reported(lent.as_ref())).await;
        let Ok(lent) = lent else { return written };
        if written.is_ok() {
            closed(&mut stream).await;
        }
        let returned = self.sandbox.ask(GiveBack { state: lent.state }).await;
        if let Err(error) = returned {
            tracing::warn!(%error, "a lent state stays until the sandbox is next opened");
        }
        written
    }
}

/// A result as the answer that is sent.
fn reported<T>(result: Result<T, &Error>) -> Answer<T> {
    result.map_err(Error::report)
}
