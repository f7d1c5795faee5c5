//! The connection: one task reads, one writes, any number of handles send commands.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::timeout;
use tracing::Instrument;

use super::command::{Capabilities, Command};
use super::event::{Ending, Event, Events};
use super::message::{Greeting, Message, Outcome, parse};
use crate::error::Error;
use crate::process::ExitWatch;
use crate::version::Version;

/// How long a command may take unless the caller says otherwise.
const COMMAND_DEADLINE: Duration = Duration::from_secs(10);

/// How long QEMU may take from `exec` to its greeting, on a machine that is busy with many others.
const GREETING_DEADLINE: Duration = Duration::from_secs(30);

/// Between the end of the connection and the end of the process that closed it.
const EXIT_GRACE: Duration = Duration::from_secs(2);

const LINE_BYTES_MAX: usize = 1 << 20;

/// Events a subscriber may be behind before it loses some.
const EVENTS_HELD: usize = 256;

/// A handle on the control connection of one QEMU. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Qmp {
    shared: Arc<Shared>,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    exit: ExitWatch,
}

/// What the writer sends: a line, and the descriptor that `getfd` and `add-fd` take.
#[derive(Debug)]
struct Outgoing {
    line: Vec<u8>,
    fd: Option<OwnedFd>,
}

#[derive(Debug)]
struct Shared {
    version: Version,
    /// Held by the command whose descriptor is under way.
    passing: tokio::sync::Mutex<()>,
    next_id: AtomicU64,
    waiting: Mutex<Waiting>,
    ending: Mutex<Ending>,
    /// Subscriptions are made here; the reader owns the only sender, so that they end with the
    /// connection.
    events: broadcast::WeakSender<Event>,
    closed: watch::Receiver<bool>,
}

/// Where the reply to a command comes, unless the connection has ended.
type Sent = Result<oneshot::Receiver<Outcome>, Closed>;

#[derive(Debug)]
enum Waiting {
    Open(HashMap<u64, oneshot::Sender<Outcome>>),
    Closed(Closed),
}

#[derive(Clone, Debug)]
enum Closed {
    /// The other side closed, most likely by ending.
    End,
    /// The other side said what it may not say.
    Broken(String),
}

#[derive(Serialize)]
struct Envelope<'a, C> {
    execute: &'static str,
    #[serde(skip_serializing_if = "is_empty")]
    arguments: &'a C,
    id: u64,
}

/// Commands without fields send no arguments at all; a command's fields are known from its type.
fn is_empty<C>(_: &&C) -> bool {
    size_of::<C>() == 0
}

impl Qmp {
    /// Waits for the greeting and negotiates. `exit` is that of the process at the other end.
    pub(crate) async fn connect(stream: UnixStream, exit: ExitWatch) -> Result<Qmp, Error> {
        let (read, write) = stream.into_split();
        let mut lines = Lines::new(read);
        let (outgoing, queue) = mpsc::unbounded_channel();
        let Greeting { version } = greet(&mut lines, &exit).await?;
        tracing::debug!(%version, "QEMU greets");
        let (shared, reader) = Shared::new(version);
        tokio::spawn(reader.run(lines));
        let qmp = Qmp {
            shared,
            outgoing,
            exit,
        };
        tokio::spawn(write_until_closed(write, queue, qmp.shared.closed.clone()));
        qmp.run_within(Capabilities {}, GREETING_DEADLINE).await?;
        Ok(qmp)
    }

    /// Runs a command within the usual deadline.
    pub async fn run<C: Command>(&self, command: C) -> Result<C::Reply, Error> {
        self.run_within(command, COMMAND_DEADLINE).await
    }

    /// Runs a command; its reply is ignored when it comes after the deadline.
    pub async fn run_within<C: Command>(
        &self,
        command: C,
        deadline: Duration,
    ) -> Result<C::Reply, Error> {
        self.execute(command, None, deadline).await
    }

    /// Runs a command that takes a descriptor.
    pub(crate) async fn run_with_fd<C: Command>(
        &self,
        command: C,
        fd: OwnedFd,
    ) -> Result<C::Reply, Error> {
        let _passing = self.shared.passing.lock().await;
        self.execute(command, Some(fd), COMMAND_DEADLINE).await
    }

    /// The version QEMU greeted with.
    pub(crate) fn version(&self) -> Version {
        self.shared.version
    }

    /// Sends a command at once; its reply is awaited later. QEMU executes commands one after the
    /// other, in the order in which they were sent, also behind one that fails.
    pub(crate) fn begin<C: Command>(
        &self,
        command: &C,
    ) -> impl Future<Output = Result<C::Reply, Error>> + use<C> {
        let id = self.next_id();
        let sent = self.send(id, command, None);
        let qmp = self.clone();
        async move { qmp.finish::<C>(id, sent, COMMAND_DEADLINE).await }
    }

    async fn execute<C: Command>(
        &self,
        command: C,
        fd: Option<OwnedFd>,
        deadline: Duration,
    ) -> Result<C::Reply, Error> {
        let id = self.next_id();
        let sent = self.send(id, &command, fd);
        self.finish::<C>(id, sent, deadline).await
    }

    fn next_id(&self) -> u64 {
        self.shared.next_id.fetch_add(1, Ordering::Relaxed)
    }

    async fn finish<C: Command>(
        &self,
        id: u64,
        sent: Result<Sent, Error>,
        deadline: Duration,
    ) -> Result<C::Reply, Error> {
        let reply = match sent? {
            Ok(reply) => reply,
            Err(closed) => return Err(self.lost(closed).await),
        };
        let answer = self
            .answer(reply)
            .instrument(tracing::debug_span!("qmp", command = C::NAME));
        let outcome = timeout(deadline, answer).await;
        self.shared.forget(id);
        match outcome {
            Err(_) => Err(Error::Timeout {
                command: C::NAME,
                after: deadline,
            }),
            Ok(Err(error)) => Err(error),
            Ok(Ok(outcome)) => interpret::<C>(outcome),
        }
    }

    /// Subscribes to events from now on.
    pub fn events(&self) -> Events {
        match self.shared.events.upgrade() {
            Some(sender) => Events(sender.subscribe()),
            // The connection has ended: a subscription to a channel without sender ends at once.
            None => Events(broadcast::channel(1).1),
        }
    }

    /// What QEMU has reported so far about the machine's end.
    pub fn ending(&self) -> Ending {
        lock(&self.shared.ending).clone()
    }

    /// Returns when everything QEMU has said was read and it will say no more.
    pub(crate) async fn closed(&self) {
        let mut closed = self.shared.closed.clone();
        // An error means that the reader is gone, which is what is waited for.
        drop(closed.wait_for(|closed| *closed).await);
    }

    fn send<C: Command>(&self, id: u64, command: &C, fd: Option<OwnedFd>) -> Result<Sent, Error> {
        let line = encode(id, command)?;
        let (sender, receiver) = oneshot::channel();
        if let Err(closed) = self.shared.expect(id, sender) {
            return Ok(Err(closed));
        }
        // A writer that is gone could not write; the reader finds out why.
        if self.outgoing.send(Outgoing { line, fd }).is_err() {
            return Ok(Err(Closed::End));
        }
        Ok(Ok(receiver))
    }

    async fn answer(&self, reply: oneshot::Receiver<Outcome>) -> Result<Outcome, Error> {
        tokio::select! {
            biased;
            outcome = reply => match outcome {
                Ok(outcome) => Ok(outcome),
                Err(_) => Err(self.lost(self.shared.why_closed()).await),
            },
            exit = self.exit.wait() => Err(Error::Died { exit }),
        }
    }

    async fn lost(&self, closed: Closed) -> Error {
        match closed {
            Closed::Broken(detail) => Error::Protocol { detail },
            Closed::End => ended(&self.exit).await,
        }
    }
}

impl Shared {
    fn new(version: Version) -> (Arc<Shared>, Reader) {
        let (events, _) = broadcast::channel(EVENTS_HELD);
        let (announce_closed, closed) = watch::channel(false);
        let shared = Arc::new(Shared {
            version,
            passing: tokio::sync::Mutex::default(),
            next_id: AtomicU64::new(1),
            waiting: Mutex::new(Waiting::Open(HashMap::new())),
            ending: Mutex::default(),
            events: events.downgrade(),
            closed,
        });
        (
            shared.clone(),
            Reader {
                shared,
                events,
                announce_closed,
            },
        )
    }

    fn expect(&self, id: u64, sender: oneshot::Sender<Outcome>) -> Result<(), Closed> {
        match &mut *lock(&self.waiting) {
            Waiting::Open(waiting) => {
                waiting.insert(id, sender);
                Ok(())
            }
            Waiting::Closed(closed) => Err(closed.clone()),
        }
    }

    fn forget(&self, id: u64) -> Option<oneshot::Sender<Outcome>> {
        match &mut *lock(&self.waiting) {
            Waiting::Open(waiting) => waiting.remove(&id),
            Waiting::Closed(_) => None,
        }
    }

    fn why_closed(&self) -> Closed {
        match &*lock(&self.waiting) {
            Waiting::Open(_) => Closed::End,
            Waiting::Closed(closed) => closed.clone(),
        }
    }
}

/// The state behind the locks is whole between any two statements, so a panic elsewhere does not
/// spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn encode<C: Command>(id: u64, command: &C) -> Result<Vec<u8>, Error> {
    let envelope = Envelope {
        execute: C::NAME,
        arguments: command,
        id,
    };
    let mut line = serde_json::to_vec(&envelope).map_err(|error| Error::Protocol {
        detail: format!("{} cannot be written as JSON: {error}", C::NAME),
    })?;
    line.push(b'\n');
    Ok(line)
}

fn interpret<C: Command>(outcome: Outcome) -> Result<C::Reply, Error> {
    let value = outcome.map_err(|refusal| Error::Qmp {
        command: C::NAME,
        class: refusal.class,
        desc: refusal.desc,
    })?;
    serde_json::from_value(value).map_err(|error| Error::Protocol {
        detail: format!("the reply to {} is not one: {error}", C::NAME),
    })
}

async fn ended(exit: &ExitWatch) -> Error {
    match timeout(EXIT_GRACE, exit.wait()).await {
        Ok(exit) => Error::Died { exit },
        Err(_) => Error::Protocol {
            detail: "it closed the connection and still runs".into(),
        },
    }
}

async fn greet(lines: &mut Lines, exit: &ExitWatch) -> Result<Greeting, Error> {
    let line = match timeout(GREETING_DEADLINE, lines.next()).await {
        Err(_) => {
            return Err(Error::Timeout {
                command: "its greeting",
                after: GREETING_DEADLINE,
            });
        }
        Ok(Err(Closed::End)) => return Err(ended(exit).await),
        Ok(Err(Closed::Broken(detail))) => return Err(Error::Protocol { detail }),
        Ok(Ok(line)) => line,
    };
    match parse(&line) {
        Ok(Message::Greeting(greeting)) => Ok(greeting),
        Ok(other) => Err(Error::Protocol {
            detail: format!("the first line is no greeting but {other:?}"),
        }),
        Err(detail) => Err(Error::Protocol { detail }),
    }
}

/// The writer ends with the reader, so that a breach closes the socket in both directions.
async fn write_until_closed(
    socket: OwnedWriteHalf,
    queue: mpsc::UnboundedReceiver<Outgoing>,
    mut closed: watch::Receiver<bool>,
) {
    tokio::select! {
        () = write_all(socket, queue) => {}
        _ = closed.wait_for(|closed| *closed) => {}
    }
}

async fn write_all(mut socket: OwnedWriteHalf, mut queue: mpsc::UnboundedReceiver<Outgoing>) {
    while let Some(outgoing) = queue.recv().await {
        if let Err(error) = write(&mut socket, outgoing).await {
            tracing::debug!(%error, "QMP connection closed for writing");
            return;
        }
    }
}

/// The descriptor travels with the first bytes of its line.
async fn write(socket: &mut OwnedWriteHalf, Outgoing { line, fd }: Outgoing) -> io::Result<()> {
    let sent = match fd {
        None => 0,
        Some(fd) => {
            socket
                .as_ref()
                .async_io(Interest::WRITABLE, || send_with(socket, &line, &fd))
                .await?
        }
    };
    socket.write_all(&line[sent..]).await
}

fn send_with(socket: &OwnedWriteHalf, line: &[u8], fd: &OwnedFd) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(
        beside.push(SendAncillaryMessage::ScmRights(&fds)),
        "the space is for one descriptor"
    );
    Ok(sendmsg(
        socket.as_ref(),
        &[IoSlice::new(line)],
        &mut beside,
        SendFlags::NOSIGNAL,
    )?)
}

#[derive(Debug)]
struct Reader {
    shared: Arc<Shared>,
    events: broadcast::Sender<Event>,
    announce_closed: watch::Sender<bool>,
}

impl Reader {
    async fn run(self, mut lines: Lines) {
        let closed = loop {
            match lines.next().await.and_then(|line| self.take(&line)) {
                Ok(()) => {}
                Err(closed) => break closed,
            }
        };
        tracing::debug!(?closed, "QMP connection ended");
        // Dropping the senders wakes every waiting command.
        *lock(&self.shared.waiting) = Waiting::Closed(closed);
        self.announce_closed.send_replace(true);
    }

    fn take(&self, line: &[u8]) -> Result<(), Closed> {
        match parse(line).map_err(Closed::Broken)? {
            Message::Greeting(_) => Err(Closed::Broken("a second greeting".into())),
            Message::Event(event) => {
                self.announce(event);
                Ok(())
            }
            Message::Reply { id, outcome } => {
                self.deliver(id, outcome);
                Ok(())
            }
        }
    }

    fn announce(&self, event: Event) {
        tracing::debug!(?event, "QEMU event");
        lock(&self.shared.ending).note(&event);
        // No subscriber is no error.
        drop(self.events.send(event));
    }

    /// The late reply of a command that timed out is dropped.
    fn deliver(&self, id: u64, outcome: Outcome) {
        let delivered = self
            .shared
            .forget(id)
            .is_some_and(|waiting| waiting.send(outcome).is_ok());
        if !delivered {
            tracing::debug!(id, "reply to a command that no caller waits for");
        }
    }
}

/// Lines of bounded length.
#[derive(Debug)]
struct Lines {
    socket: OwnedReadHalf,
    buffer: Vec<u8>,
    /// Up to here the buffer is known to hold no line end.
    searched: usize,
}

impl Lines {
    fn new(socket: OwnedReadHalf) -> Self {
        Self {
            socket,
            buffer: Vec::new(),
            searched: 0,
        }
    }

    /// The next line without its end.
    async fn next(&mut self) -> Result<Vec<u8>, Closed> {
        loop {
            if let Some(line) = self.split() {
                return Ok(line);
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(Closed::Broken(format!(
                    "a line of more than {LINE_BYTES_MAX} bytes"
                )));
            }
            match self.socket.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return Err(Closed::End),
                Ok(_) => {}
            }
        }
    }

    fn split(&mut self) -> Option<Vec<u8>> {
        let Some(end) = self.buffer[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n')
        else {
            self.searched = self.buffer.len();
            return None;
        };
        let rest = self.buffer.split_off(self.searched + end + 1);
        let mut line = std::mem::replace(&mut self.buffer, rest);
        self.searched = 0;
        line.pop();
        Some(line)
    }
}

#[cfg(test)]
#[path = "transcript_tests.rs"]
mod tests;
