//! A channel of the agent, as the hub keeps it.

use std::collections::VecDeque;

use sandtree_proto::frame::{Frame, StreamId};
use sandtree_proto::{ChannelState, Open, Outgoing};

use super::client::ClientId;
use super::spool::command_line;
use crate::link::Source;

#[derive(Debug, Clone)]
pub(super) enum Owner {
    Client { client: ClientId, channel: u32 },
    Spool { tag: String },
}

/// What goes on in a channel, as far as the hub cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Exec {
        tag: String,
        command: String,
    },
    /// Changes nothing in the guest.
    Read,
    Write,
    Connect,
}

impl Kind {
    pub fn of(open: &Open) -> Self {
        match open {
            Open::Exec(exec) | Open::Detached(exec) => Self::Exec {
                tag: exec.tag.clone(),
                command: command_line(exec),
            },
            Open::ReadFile { .. }
            | Open::ListDir { .. }
            | Open::TarOut { .. }
            | Open::Attach { .. } => Self::Read,
            Open::WriteFile { .. } | Open::TarIn { .. } => Self::Write,
            Open::Connect { .. } => Self::Connect,
        }
    }

    pub fn changes_the_guest(&self) -> bool {
        *self != Self::Read
    }
}

/// How far a stream from the guest has come, and how far its reader.
#[derive(Debug, Default)]
pub(super) struct Flow {
    pub received: u64,
    pub consumed: u64,
    /// What the agent knows of `consumed`.
    pub told: u64,
    pub ended: bool,
}

impl Flow {
    /// A stream of which everything before this is here already.
    pub fn from(position: u64) -> Self {
        Self {
            received: position,
            consumed: position,
            told: 0,
            ended: false,
        }
    }
}

/// A channel of the agent.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(super) owner: Owner,
    pub(super) kind: Kind,
    pub(super) pid: Option<u32>,
    pub(super) window: u64,
    /// Kept until the agent has shown that it knows the channel.
    pub(super) opening: Option<Frame>,
    pub(super) input: Outgoing,
    /// Of a channel that another hub opened. How much of its input is used, and so how much may
    /// follow, the agent tells; until then none goes out.
    pub(super) arrived: Option<Arrived>,
    pub(super) out: Flow,
    pub(super) err: Flow,
    pub(super) ended: bool,
    /// Input of attached clients that the window had no room for yet.
    pub(super) waiting: VecDeque<Waiting>,
}

/// Input that another hub sent, and the window it was sent within.
#[derive(Debug)]
pub(super) struct Arrived {
    pub bytes: u64,
    pub window: u32,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub client: ClientId,
    pub channel: u32,
    pub bytes: Vec<u8>,
    /// The client's offset behind these bytes.
    pub until: u64,
    pub end: bool,
}

impl Source for Slot {
    fn stream(&mut self) -> &mut Outgoing {
        &mut self.input
    }

    /// One for each stream, however often its reader reported: an agent that does not read must not
    /// make us hoard.
    fn take_window(&mut self) -> Option<(StreamId, u64)> {
        let due = |flow: &mut Flow| {
            (flow.consumed > std::mem::replace(&mut flow.told, flow.consumed))
                .then_some(flow.consumed)
        };
        let out = due(&mut self.out).map(|consumed| (StreamId::Out, consumed));
        out.or_else(|| due(&mut self.err).map(|consumed| (StreamId::Err, consumed)))
    }
}

impl Slot {
    pub(super) fn flow(&mut self, stream: StreamId) -> Option<&mut Flow> {
        match stream {
            StreamId::Out => Some(&mut self.out),
            StreamId::Err => Some(&mut self.err),
            StreamId::In => None,
        }
    }

    /// Whether the agent can go on from where the streams stand here. A guest of another moment
    /// cannot.
    pub(super) fn continues(&self, state: &ChannelState) -> bool {
        let goes_on = |flow: &Flow, held: (u64, u64)| (held.0..=held.1).contains(&flow.received);
        goes_on(&self.out, state.out) && goes_on(&self.err, state.err)
    }

    /// Takes the input over from the hub that opened the channel, now that the agent has told what
    /// is used of it.
    pub(super) fn take_input_over(&mut self, consumed: u64) -> Result<bool, String> {
        let Some(Arrived { bytes, window }) = self.arrived.take() else {
            return Ok(false);
        };
        // The window was as large as what is in it, whatever is known of it.
        let held = bytes.saturating_sub(consumed).min(self.window);
        let window = u64::from(window).max(held) as usize;
        self.input = Outgoing::taken_over(consumed, bytes, window).map_err(|e| e.to_string())?;
        Ok(true)
    }

    /// Takes bytes in order. Repeated ones are dropped, as they come after a break; anything else
    /// breaks the protocol.
    pub(super) fn accept(
        &mut self,
        stream: StreamId,
        offset: u64,
        bytes: Vec<u8>,
    ) -> Result<(u64, Vec<u8>), String> {
        let window = self.window;
        let flow = self.flow(stream).ok_or("bytes on a stream of ours")?;
        if offset > flow.received {
            return Err(format!("bytes at {offset}, expected at {}", flow.received));
        }
        let known = (flow.received - offset).min(bytes.len() as u64) as usize;
        let fresh = if known == 0 {
            bytes
        } else {
            bytes[known..].to_vec()
        };
        if flow.ended && !fresh.is_empty() {
            return Err("bytes behind the end of a stream".into());
        }
        if flow.received + fresh.len() as u64 - flow.consumed > window {
            return Err("more bytes than the window allows".into());
        }
        let offset = flow.received;
        flow.received += fresh.len() as u64;
        Ok((offset, fresh))
    }
}
