//! Commands that wait until they may start.
//!
//! ```text
//!   client ── open ──► gate: a checkpoint is taken ──► switch
//!          ── everything else of that channel waits behind its open
//!          ── everything of other channels ──────────► switch
//! ```
//!
//! Always: the order within a channel is kept. A client that leaves does not start its command.

use std::collections::HashMap;

use sandtree_proto::frame::Frame;
use sandtree_proto::{Failure, HostMessage, Open, Outcome};
use tokio::sync::{mpsc, oneshot};

use super::Gate;
use super::client::Sender;
use super::switch::Input;

/// How many messages of one channel may wait behind its open; then the client's connection waits,
/// too.
const WAITING: usize = 32;

/// The path from one client to the switch.
pub(super) struct Admission {
    pub sender: Sender,
    pub inputs: mpsc::Sender<Input>,
    pub gate: Option<mpsc::Sender<Gate>>,
    /// Channels whose command had to wait.
    waiting: HashMap<u32, mpsc::Sender<Input>>,
}

impl Admission {
    pub fn new(
        sender: Sender,
        inputs: mpsc::Sender<Input>,
        gate: Option<mpsc::Sender<Gate>>,
    ) -> Self {
        Self {
            sender,
            inputs,
            gate,
            waiting: HashMap::new(),
        }
    }

    /// Forwards a client's message. Returns whether the switch accepts more.
    pub async fn pass(&mut self, input: Input) -> bool {
        if let Some(channel) = opened_command(&input)
            && let Some(gate) = self.gate.clone()
        {
            let (queue, behind) = mpsc::channel(WAITING);
            self.waiting.insert(channel, queue);
            let command = Command {
                channel,
                open: input,
                behind,
            };
            let sender = self.sender.clone();
            tokio::spawn(command.admit(gate, sender, self.inputs.clone()));
            return true;
        }
        let channel = channel_of(&input);
        let queue = channel.and_then(|channel| self.waiting.get(&channel));
        let Some(queue) = queue else {
            return self.inputs.send(input).await.is_ok();
        };
        let is_last = matches!(input, Input::Message(_, HostMessage::Close { .. }));
        // After a refusal, later messages of the command are dropped.
        let is_refused = queue.send(input).await.is_err();
        if is_last || is_refused {
            channel.map(|channel| self.waiting.remove(&channel));
        }
        true
    }
}

/// A command that waits to start, and the client's messages for it.
struct Command {
    channel: u32,
    open: Input,
    behind: mpsc::Receiver<Input>,
}

impl Command {
    async fn admit(
        mut self,
        gate: mpsc::Sender<Gate>,
        sender: Sender,
        inputs: mpsc::Sender<Input>,
    ) {
        if let Err(message) = admitted(&gate).await {
            let outcome = Outcome::NotStarted(Failure { errno: 0, message });
            // The switch disconnects a client that does not read.
            if !sender.ended(self.channel, outcome) {
                tracing::debug!("a client left before its command was refused");
            }
            return;
        }
        let mut next = Some(self.open);
        while let Some(input) = next {
            if inputs.send(input).await.is_err() {
                return;
            }
            next = self.behind.recv().await;
        }
    }
}

/// Waits until a command may start.
async fn admitted(gate: &mpsc::Sender<Gate>) -> Result<(), String> {
    // The gate is gone because its sandbox is ending.
    let gone = || "the sandbox takes no commands any more".to_owned();
    let (reply, answer) = oneshot::channel();
    gate.send(Gate { reply }).await.map_err(|_| gone())?;
    answer.await.map_err(|_| gone())?
}

/// The channel of a command that is about to start.
fn opened_command(input: &Input) -> Option<u32> {
    match input {
        Input::Message(
            _,
            HostMessage::Open {
                channel,
                open: Open::Exec(_) | Open::Detached(_),
                ..
            },
        ) => Some(*channel),
        _ => None,
    }
}

fn channel_of(input: &Input) -> Option<u32> {
    match input {
        Input::Stream(_, frame) => match frame {
            Frame::Data { channel, .. }
            | Frame::Eof { channel, .. }
            | Frame::Window { channel, .. } => Some(*channel),
            Frame::Message(_) => None,
        },
        Input::Message(_, message) => match message {
            HostMessage::Open { channel, .. }
            | HostMessage::Signal { channel, .. }
            | HostMessage::Resize { channel, .. }
            | HostMessage::Close { channel } => Some(*channel),
            HostMessage::Request { .. } | HostMessage::Hello(_) | HostMessage::Resume { .. } => {
                None
            }
        },
        _ => None,
    }
}
