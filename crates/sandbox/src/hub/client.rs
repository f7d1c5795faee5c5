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

use super::Gate;
use super::admission::Admission;
use super::attach::AttachInput;
use super::switch::Input;
use crate::link::READ_SIZE;

/// A client that lets more than this pile up is cut off: it does not read.
const BACKLOG: usize = 256 * 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ClientId(pub u64);

/// Where a client's channel leads.
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
    /// Everything before is written when this is answered.
    Flush(oneshot::Sender<()>),
}

/// The way to a client's socket. Never blocks the switch.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    queue: mpsc::UnboundedSender<Outgoing>,
    backlog: Arc<AtomicUsize>,
}

impl Sender {
    /// Says whether the client still keeps up.
    #[must_use = "a client that does not read must be cut off"]
    pub fn send(&self, frame: &Frame) -> bool {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        let backlog = self.backlog.fetch_add(bytes.len(), Ordering::Relaxed);
        self.queue.send(Outgoing::Bytes(bytes)).is_ok() && backlog < BACKLOG
    }

    /// Waits until the client's socket has taken everything, or is closed.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.queue.send(Outgoing::Flush(done)).is_ok() {
            // A writer that ended has nobody to write to.
            drop(flushed.await);
        }
    }

    pub fn tell(&self, message: &AgentMessage) -> bool {
        match message::to_frame(message) {
            Ok(frame) => self.send(&frame),
            // With another channel's number what just fitted a frame may not fit any more.
            Err(_) => self.send(&message::to_frame(&shortened(message)).expect("it says little")),
        }
    }

    pub fn ended(&self, channel: u32, outcome: Outcome) -> bool {
        self.tell(&AgentMessage::Ended { channel, outcome })
    }
}

/// Takes a connection in: reads go to the switch's queue, writes come from the returned client's
/// sender.
pub(super) fn accept(
    id: ClientId,
    stream: UnixStream,
    inputs: mpsc::Sender<Input>,
    gate: Option<mpsc::Sender<Gate>>,
) -> Client {
    let (reader, writer) = stream.into_split();
    let (queue, outgoing) = mpsc::unbounded_channel();
    let backlog = Arc::new(AtomicUsize::new(0));
    let sender = Sender {
        queue,
        backlog: backlog.clone(),
    };
    let writing = tokio::spawn(write_all(writer, outgoing, backlog));
    let admission = Admission::new(sender.clone(), inputs, gate);
    let reading = tokio::spawn(read_all(id, reader, admission));
    Client {
        sender,
        channels: HashMap::new(),
        tasks: [writing.abort_handle(), reading.abort_handle()],
    }
}

impl Drop for Client {
    /// Its socket closes with its tasks, whatever they wait for.
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// The same news without its text.
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
            // Whoever asked may have lost patience.
            Outgoing::Flush(done) => drop(done.send(())),
        }
    }
}

async fn read_all(id: ClientId, mut reader: OwnedReadHalf, mut admission: Admission) {
    let mut decoder = Decoder::new();
    let mut buffer = vec![0; READ_SIZE];
    'connection: loop {
        while let Some(found) = decoder.next() {
            if !receive(id, found.ok(), &mut admission).await {
                break 'connection;
            }
        }
        match reader.read(&mut buffer).await {
            Ok(count) if count > 0 => decoder.feed(&buffer[..count]),
            _ => break,
        }
    }
    // If the switch is gone, so is everything the client could leave behind.
    drop(admission.inputs.send(Input::ClientGone(id)).await);
}

/// Handles one thing a client sent. Returns whether to continue with it.
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
