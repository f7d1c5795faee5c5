//! One client of the hub: a socket that speaks the guest's protocol.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sandtree_proto::frame::{Frame, encode_preamble};
use sandtree_proto::{
    AgentHello, AgentMessage, Decoded, Decoder, Failure, HostHello, HostMessage, Outcome, message,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use super::admission::{Admission, Conditions};
use super::attach::AttachInput;
use super::switch::Input;
use crate::link::READ_SIZE;

/// The switch disconnects a client with more unread bytes than this. All commands that a guest can
/// run at a time, each with two full windows, are less.
const BACKLOG: usize = 768 * 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ClientId(pub u64);

/// The other end of a client's channel.
#[derive(Debug)]
pub(super) enum Target {
    /// A channel of the agent.
    Agent(u32),
    /// The spool of a detached command.
    Attached {
        tag: String,
        input: mpsc::UnboundedSender<AttachInput>,
    },
}

#[derive(Debug)]
pub(super) struct Client {
    pub sender: Sender,
    pub channels: HashMap<u32, Target>,
    tasks: [AbortHandle; 2],
}

#[derive(Debug)]
enum Outgoing {
    Bytes(Vec<u8>),
    /// Answered when everything before it is written.
    Flush(oneshot::Sender<()>),
}

/// The path to a client's socket. Never blocks the switch.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    queue: mpsc::UnboundedSender<Outgoing>,
    backlog: Arc<AtomicUsize>,
}

impl Sender {
    /// Returns whether the client still reads.
    #[must_use = "a client that does not read must be cut off"]
    pub fn send(&self, frame: &Frame) -> bool {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        let backlog = self.backlog.fetch_add(bytes.len(), Ordering::Relaxed);
        self.queue.send(Outgoing::Bytes(bytes)).is_ok() && backlog < BACKLOG
    }

    /// Waits until the client's socket has accepted everything, or is closed.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.queue.send(Outgoing::Flush(done)).is_ok() {
            // A writer that ended has no socket.
            drop(flushed.await);
        }
    }

    pub fn tell(&self, message: &AgentMessage) -> bool {
        match message::to_frame(message) {
            Ok(frame) => self.send(&frame),
            // With another channel number, a message that just fitted a frame may be too long.
            Err(_) => self.send(&message::to_frame(&shortened(message)).expect("it says little")),
        }
    }

    pub fn ended(&self, channel: u32, outcome: Outcome) -> bool {
        self.tell(&AgentMessage::Ended { channel, outcome })
    }
}

/// Accepts a connection: a task reads into the switch's queue, and the returned client's sender
/// writes.
pub(super) fn accept(
    id: ClientId,
    stream: UnixStream,
    inputs: mpsc::Sender<Input>,
    conditions: Conditions,
) -> Client {
    let (reader, writer) = stream.into_split();
    let (queue, outgoing) = mpsc::unbounded_channel();
    let backlog = Arc::new(AtomicUsize::new(0));
    let sender = Sender {
        queue,
        backlog: backlog.clone(),
    };
    let writing = tokio::spawn(write_all(writer, outgoing, backlog));
    let admission = Admission::new(sender.clone(), inputs, conditions);
    let reading = tokio::spawn(read_all(id, reader, admission));
    Client {
        sender,
        channels: HashMap::new(),
        tasks: [writing.abort_handle(), reading.abort_handle()],
    }
}

impl Drop for Client {
    /// The socket closes with its tasks, even if they wait.
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// The same message without its text.
fn shortened(message: &AgentMessage) -> AgentMessage {
    let reason = "what the guest said of it is too long".to_owned();
    match message {
        AgentMessage::Ended { channel, .. } => AgentMessage::Ended {
            channel: *channel,
            outcome: Outcome::Lost { reason },
        },
        AgentMessage::Reply { id, .. } => AgentMessage::Reply {
            id: *id,
            reply: Err(Failure {
                errno: 0,
                message: reason,
            }),
        },
        other => other.clone(),
    }
}

async fn write_all(
    mut writer: OwnedWriteHalf,
    mut outgoing: mpsc::UnboundedReceiver<Outgoing>,
    backlog: Arc<AtomicUsize>,
) {
    while let Some(next) = outgoing.recv().await {
        match next {
            Outgoing::Bytes(bytes) => {
                backlog.fetch_sub(bytes.len(), Ordering::Relaxed);
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            // The task that asked may have stopped waiting.
            Outgoing::Flush(done) => drop(done.send(())),
        }
    }
}

async fn read_all(id: ClientId, mut reader: OwnedReadHalf, mut admission: Admission) {
    let mut decoder = Decoder::new();
    'connection: loop {
        while let Some(found) = decoder.next() {
            if !receive(id, found.ok(), &mut admission).await {
                break 'connection;
            }
        }
        match reader.read(decoder.spare(READ_SIZE)).await {
            Ok(count) if count > 0 => decoder.filled(count),
            _ => break,
        }
    }
    // If the switch is gone, nothing of the client is left.
    drop(admission.inputs.send(Input::ClientGone(id)).await);
}

/// Handles one message of a client. Returns whether to continue.
async fn receive(id: ClientId, found: Option<Decoded>, admission: &mut Admission) -> bool {
    let sender = &admission.sender;
    match found {
        None => false,
        Some(Decoded::Preamble(nonce)) => {
            let mut bytes = Vec::new();
            encode_preamble(&mut bytes, nonce);
            sender.backlog.fetch_add(bytes.len(), Ordering::Relaxed);
            sender.queue.send(Outgoing::Bytes(bytes)).is_ok()
        }
        Some(Decoded::Frame(Frame::Message(bytes))) => match message::from_bytes(&bytes) {
            Ok(HostMessage::Hello(hello)) => sender.tell(&AgentMessage::Hello(answer(&hello))),
            Ok(message) => admission.pass(Input::Message(id, message)).await,
            Err(_) => false,
        },
        Some(Decoded::Frame(frame)) => admission.pass(Input::Stream(id, frame)).await,
    }
}

fn answer(hello: &HostHello) -> AgentHello {
    AgentHello {
        version: hello.agreed(),
        build: env!("CARGO_PKG_VERSION").into(),
        channels: Vec::new(),
    }
}
