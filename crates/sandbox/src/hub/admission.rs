//! What clients open, and what waits before it reaches the guest.
//!
//! ```text
//!   client ── open ──► gate: a checkpoint is taken ──► mounts are up to date ──► switch
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
use crate::mounts::MountPort;

/// How many messages of one channel may wait behind its open; then the client's connection waits,
/// too.
const WAITING: usize = 32;

/// What may keep a client's open waiting.
#[derive(Debug, Clone)]
pub(super) struct Conditions {
    /// Asked before each command.
    pub gate: Option<mpsc::Sender<Gate>>,
    pub mounts: MountPort,
}

/// The path from one client to the switch.
pub(super) struct Admission {
    pub sender: Sender,
    pub inputs: mpsc::Sender<Input>,
    pub conditions: Conditions,
    /// Channels whose open had to wait.
    waiting: HashMap<u32, mpsc::Sender<Input>>,
}

impl Admission {
    pub fn new(sender: Sender, inputs: mpsc::Sender<Input>, conditions: Conditions) -> Self {
        Self {
            sender,
            inputs,
            conditions,
            waiting: HashMap::new(),
        }
    }

    /// Forwards a client's message. Returns whether the switch accepts more.
    pub async fn pass(&mut self, input: Input) -> bool {
        if let Some(opened) = self.waits(&input) {
            let (queue, behind) = mpsc::channel(WAITING);
            self.waiting.insert(opened.channel, queue);
            let waiting = Waiting {
                opened,
                open: input,
                behind,
            };
            let sender = self.sender.clone();
            tokio::spawn(waiting.admit(sender, self.inputs.clone()));
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

/// What an open waits for.
struct Opened {
    channel: u32,
    gate: Option<mpsc::Sender<Gate>>,
    mounts: MountPort,
}

impl Opened {
    async fn admitted(&self) -> Result<(), String> {
        if let Some(gate) = &self.gate {
            admitted(gate).await?;
        }
        self.mounts.barrier().await;
        Ok(())
    }
}

/// A channel that waits to be opened, and the client's messages for it.
struct Waiting {
    opened: Opened,
    open: Input,
    behind: mpsc::Receiver<Input>,
}

impl Waiting {
    async fn admit(mut self, sender: Sender, inputs: mpsc::Sender<Input>) {
        if let Err(message) = self.opened.admitted().await {
            let outcome = Outcome::NotStarted(Failure { errno: 0, message });
            // The switch disconnects a client that does not read.
            if !sender.ended(self.opened.channel, outcome) {
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

impl Admission {
    /// What an open has to wait for, if it has to wait: a command for its checkpoint, and whatever
    /// uses files until the guest knows of changes in its mounts.
    fn waits(&self, input: &Input) -> Option<Opened> {
        let Input::Message(_, HostMessage::Open { channel, open, .. }) = input else {
            return None;
        };
        let is_command = matches!(
            open,
            Open::Exec(_) | Open::Detached(_) | Open::DetachedAs { .. }
        );
        let Conditions { gate, mounts } = &self.conditions;
        let gate = gate.clone().filter(|_| is_command);
        let uses_files = !matches!(open, Open::Connect { .. } | Open::Attach { .. });
        let waits = gate.is_some() || uses_files && mounts.is_used();
        waits.then(|| Opened {
            channel: *channel,
            gate,
            mounts: mounts.clone(),
        })
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
