//! A client's end of the link: channels and requests over one connection to a sandbox's hub.
//!
//! ```text
//!   Exec, Files, Tunnel --> Channel \
//!                                    Link ==frames== Hub ==frames== agent
//!                            request /
//! ```
//!
//! Always: a stream's reader that stops reading holds at most one window of bytes here. Dropping
//! the last part of a channel closes it. When the connection ends, every waiting call ends with it.

mod channel;
mod outbox;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

pub use channel::{Channel, Control, Input, Output};
pub(crate) use outbox::{Outbox, Source};
use sandtree_proto::frame::{Frame, encode_preamble};
use sandtree_proto::message::{self, MessageError};
use sandtree_proto::{
    AgentHello, AgentMessage, Decoded, Decoder, Failure, FrameError, HostHello, HostMessage,
    HubFailure, Nonce, Open, Reply, Request, VERSION_MAX, VERSION_MIN,
};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, Semaphore, oneshot};

use self::channel::Slot;

/// How much is read from a socket at once.
pub(crate) const READ_SIZE: usize = 256 * 1024;
const HELLO_DEADLINE: Duration = Duration::from_secs(10);

/// Why work through a link failed.
#[derive(Debug, Clone, Error)]
pub enum LinkError {
    /// The guest, its sandbox or the connection ended. The hub sends the reason, if it still can.
    #[error("the connection to the guest ended{}", because(reason.as_deref()))]
    Ended { reason: Option<String> },
    /// The connection was lost, or its data breaks the protocol.
    #[error("the connection to the guest is broken: {what}")]
    Broken { what: String },
    #[error("the guest did not answer within {after:?}")]
    Timeout { after: Duration },
    /// The connection works, and the other side refused.
    #[error(transparent)]
    Refused(Refusal),
}

/// Who refused, and why.
#[derive(Debug, Clone, Error)]
pub enum Refusal {
    #[error("too many requests wait for the guest")]
    QueueFull,
    #[error("the agent in the guest is too old for this request")]
    AgentTooOld,
    #[error("the guest is not restored yet")]
    NotRestored,
    #[error("the guest has no such detached command")]
    NoCommand,
    #[error("no protocol version is common: this program speaks {VERSION_MIN} to {VERSION_MAX}")]
    Version,
    #[error("the request is too long for the link")]
    TooLong(#[source] Arc<MessageError>),
    #[error("the guest refused")]
    Guest(#[source] Failure),
}

impl LinkError {
    /// The connection ended, and the other side gave no reason.
    pub const fn ended() -> Self {
        Self::Ended { reason: None }
    }
}

impl From<Failure> for LinkError {
    fn from(failure: Failure) -> Self {
        let message = failure.message.clone();
        match failure.of_hub() {
            Some(HubFailure::Ended) => Self::Ended {
                reason: Some(message),
            },
            Some(HubFailure::Broken) => Self::Broken { what: message },
            Some(HubFailure::QueueFull) => Self::Refused(Refusal::QueueFull),
            Some(HubFailure::AgentTooOld) => Self::Refused(Refusal::AgentTooOld),
            Some(HubFailure::NotRestored) => Self::Refused(Refusal::NotRestored),
            Some(HubFailure::NoCommand) => Self::Refused(Refusal::NoCommand),
            None => Self::Refused(Refusal::Guest(failure)),
        }
    }
}

fn because(reason: Option<&str>) -> String {
    reason
        .map(|reason| format!(": {reason}"))
        .unwrap_or_default()
}

/// A connection; clones share it. It closes when the last clone and the last part of its channels
/// are dropped, and everything queued is sent.
#[derive(Debug, Clone)]
pub struct Link {
    connection: Arc<Connection>,
    /// Of the protocol.
    version: u16,
}

/// Keeps a connection open. The tasks that serve the connection hold only the [`Shared`] part.
#[derive(Debug)]
struct Connection {
    shared: Arc<Shared>,
}

impl Deref for Connection {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.lock().closing = true;
        self.wake_writer.notify_one();
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake_writer: Notify,
    /// Closed when the connection is down.
    up: Semaphore,
}

#[derive(Debug, Default)]
struct State {
    down: Option<LinkError>,
    /// Every handle is dropped, so nothing new will be sent.
    closing: bool,
    next_channel: u32,
    next_request: u32,
    outbox: Outbox,
    channels: BTreeMap<u32, Slot>,
    requests: HashMap<u32, oneshot::Sender<Result<Reply, Failure>>>,
}

impl Link {
    /// Greets the other side and waits for its answer.
    pub async fn connect(stream: UnixStream) -> Result<Link, LinkError> {
        tokio::time::timeout(HELLO_DEADLINE, Self::greet(stream))
            .await
            .unwrap_or(Err(LinkError::Timeout {
                after: HELLO_DEADLINE,
            }))
    }

    async fn greet(stream: UnixStream) -> Result<Link, LinkError> {
        let (mut reader, mut writer) = stream.into_split();
        let nonce = fresh_nonce();
        writer.write_all(&hello(nonce)).await.map_err(lost)?;
        let mut decoder = Decoder::new();
        let answer = read_hello(&mut reader, &mut decoder, nonce).await?;
        if answer.version == 0 {
            return Err(LinkError::Refused(Refusal::Version));
        }
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            wake_writer: Notify::new(),
            up: Semaphore::new(0),
        });
        tokio::spawn(read_all(shared.clone(), reader, decoder));
        tokio::spawn(write_all(shared.clone(), writer));
        Ok(Link {
            connection: Arc::new(Connection { shared }),
            version: answer.version,
        })
    }

    /// The version of the protocol that the other side has agreed to.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// Opens a channel whose streams hold at most `window` bytes each on their way.
    pub fn open(&self, open: Open, window: u32) -> Result<Channel, LinkError> {
        let mut state = self.connection.lock();
        state.check_up()?;
        state.next_channel = state.next_channel.wrapping_add(1);
        let id = state.next_channel;
        state.send(&HostMessage::Open {
            channel: id,
            window,
            open,
        })?;
        let (slot, changed) = Slot::new(window as usize);
        state.channels.insert(id, slot);
        drop(state);
        self.connection.wake_writer.notify_one();
        Ok(Channel::new(
            self.connection.clone(),
            id,
            window as usize,
            changed,
        ))
    }

    /// Asks and waits for the answer, at most `deadline`. A late answer is dropped: its id is never
    /// used again.
    pub async fn request(&self, request: Request, deadline: Duration) -> Result<Reply, LinkError> {
        let answer = self.ask(request)?;
        match tokio::time::timeout(deadline, answer).await {
            Err(_) => Err(LinkError::Timeout { after: deadline }),
            Ok(Ok(reply)) => reply.map_err(LinkError::from),
            Ok(Err(_)) => Err(self.connection.lock().why_down()),
        }
    }

    /// Waits until the connection is down, and returns the reason.
    pub async fn down(&self) -> LinkError {
        // The semaphore has no permits, so this ends when the semaphore is closed.
        drop(self.connection.up.acquire().await);
        self.connection.lock().why_down()
    }

    fn ask(
        &self,
        request: Request,
    ) -> Result<oneshot::Receiver<Result<Reply, Failure>>, LinkError> {
        let mut state = self.connection.lock();
        state.check_up()?;
        state.next_request = state.next_request.wrapping_add(1);
        let id = state.next_request;
        state.send(&HostMessage::Request { id, request })?;
        let (tx, rx) = oneshot::channel();
        state.requests.retain(|_, waiting| !waiting.is_closed());
        state.requests.insert(id, tx);
        drop(state);
        self.connection.wake_writer.notify_one();
        Ok(rx)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no code panics while it holds the link's state")
    }

    fn go_down(&self, error: LinkError) {
        let mut state = self.lock();
        state.down.get_or_insert(error);
        state.requests.clear();
        state.channels.values().for_each(Slot::touch);
        drop(state);
        self.up.close();
        self.wake_writer.notify_one();
    }
}

impl State {
    fn check_up(&self) -> Result<(), LinkError> {
        self.down.clone().map_or(Ok(()), Err)
    }

    fn why_down(&self) -> LinkError {
        self.down.clone().unwrap_or(LinkError::ended())
    }

    fn send(&mut self, message: &HostMessage) -> Result<(), LinkError> {
        let frame = message::to_frame(message)
            .map_err(|error| LinkError::Refused(Refusal::TooLong(Arc::new(error))))?;
        self.outbox.push(frame);
        Ok(())
    }

    fn receive(&mut self, frame: Frame) -> Result<(), LinkError> {
        match frame {
            Frame::Message(bytes) => self.receive_message(&bytes),
            Frame::Data {
                channel,
                stream,
                offset,
                bytes,
            } => self
                .channels
                .get_mut(&channel)
                .map_or(Ok(()), |slot| slot.data(stream, offset, bytes)),
            Frame::Eof {
                channel,
                stream,
                offset,
            } => self
                .channels
                .get_mut(&channel)
                .map_or(Ok(()), |slot| slot.eof(stream, offset)),
            Frame::Window {
                channel, consumed, ..
            } => self
                .channels
                .get_mut(&channel)
                .map_or(Ok(()), |slot| slot.consumed(consumed)),
        }
    }

    fn receive_message(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        match message::from_bytes(bytes).map_err(protocol)? {
            AgentMessage::Hello(_) => Err(protocol("a second hello")),
            AgentMessage::Started { channel, pid } => {
                self.channels
                    .get_mut(&channel)
                    .into_iter()
                    .for_each(|slot| slot.started(pid));
                Ok(())
            }
            AgentMessage::Ended { channel, outcome } => {
                self.channels
                    .get_mut(&channel)
                    .into_iter()
                    .for_each(|slot| slot.ended(outcome.clone()));
                Ok(())
            }
            AgentMessage::Reply { id, reply } => {
                if let Some(waiting) = self.requests.remove(&id) {
                    // The task that asked may have stopped waiting.
                    drop(waiting.send(reply));
                }
                Ok(())
            }
        }
    }
}

/// The first bytes of a client. They need no padding, because a hub is not in the middle of a
/// frame.
fn hello(nonce: Nonce) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_preamble(&mut bytes, nonce);
    hello_frame().encode(&mut bytes);
    bytes
}

pub(crate) fn hello_frame() -> Frame {
    let hello = HostMessage::Hello(HostHello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
    });
    message::to_frame(&hello).expect("a hello is short")
}

pub(crate) fn fresh_nonce() -> Nonce {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    Nonce(bytes)
}

async fn read_hello(
    reader: &mut OwnedReadHalf,
    decoder: &mut Decoder,
    nonce: Nonce,
) -> Result<AgentHello, LinkError> {
    let mut greeted = false;
    loop {
        match decoder.next() {
            None => fill(reader, decoder).await?,
            Some(Ok(Decoded::Preamble(echo))) => greeted = echo == nonce,
            Some(Ok(Decoded::Frame(Frame::Message(bytes)))) if greeted => {
                return match message::from_bytes(&bytes).map_err(protocol)? {
                    AgentMessage::Hello(hello) => Ok(hello),
                    _ => Err(protocol("no hello")),
                };
            }
            Some(Ok(Decoded::Frame(_)) | Err(_)) => greeted = false,
        }
    }
}

async fn fill(reader: &mut OwnedReadHalf, decoder: &mut Decoder) -> Result<(), LinkError> {
    let mut buffer = [0; 4096];
    match reader.read(&mut buffer).await {
        Ok(count) if count > 0 => {
            decoder.feed(&buffer[..count]);
            Ok(())
        }
        Ok(_) => Err(LinkError::ended()),
        Err(error) => Err(lost(error)),
    }
}

async fn read_all(shared: Arc<Shared>, mut reader: OwnedReadHalf, mut decoder: Decoder) {
    let error = loop {
        if let Err(error) = drain(&shared, &mut decoder) {
            break error;
        }
        match reader.read(decoder.spare(READ_SIZE)).await {
            Ok(count) if count > 0 => decoder.filled(count),
            Ok(_) => break LinkError::ended(),
            Err(error) => break lost(error),
        }
    };
    shared.go_down(error);
}

fn drain(shared: &Shared, decoder: &mut Decoder) -> Result<(), LinkError> {
    let mut state = shared.lock();
    while let Some(found) = decoder.next() {
        match found.map_err(protocol)? {
            Decoded::Frame(frame) => state.receive(frame)?,
            Decoded::Preamble(_) => {
                return Err(protocol("a second preamble"));
            }
        }
    }
    drop(state);
    shared.wake_writer.notify_one();
    Ok(())
}

async fn write_all(shared: Arc<Shared>, mut writer: OwnedWriteHalf) {
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        {
            let mut state = shared.lock();
            if state.down.is_some() {
                return;
            }
            let State {
                outbox, channels, ..
            } = &mut *state;
            outbox.fill(channels, &mut bytes);
            if bytes.is_empty() && state.closing {
                return;
            }
        }
        if bytes.is_empty() {
            shared.wake_writer.notified().await;
        } else if let Err(error) = writer.write_all(&bytes).await {
            return shared.go_down(lost(error));
        }
    }
}

pub(crate) fn protocol(error: impl std::fmt::Display) -> LinkError {
    LinkError::Broken {
        what: format!("the other side broke the protocol: {error}"),
    }
}

/// A socket whose other end is gone has ended; every other error of it breaks the connection.
fn lost(error: io::Error) -> LinkError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => LinkError::ended(),
        _ => LinkError::Broken {
            what: error.to_string(),
        },
    }
}

impl From<FrameError> for LinkError {
    fn from(error: FrameError) -> Self {
        protocol(error)
    }
}
