//! A channel of the agent, as the hub records it.

use std::collections::VecDeque;

use sandtree_proto::frame::{Frame, StreamId};
use sandtree_proto::{ChannelState, ExecStart, Open, Outgoing};

use super::client::ClientId;
use super::details::ExecDetails;
use super::spool::command_line;
use crate::link::Source;

/// A user who presses keys while the guest is paused sends fewer.
const BEHIND_MAX: usize = 64;

#[derive(Debug, Clone)]
pub(super) enum Owner {
    Client { client: ClientId, channel: u32 },
    Spool { tag: String },
}

/// The kind of work in a channel, as far as the hub distinguishes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Exec(Box<ExecKind>),
    /// Changes nothing in the guest.
    Read,
    Write,
    Connect,
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExecKind {
    pub tag: String,
    pub command: String,
    pub details: ExecDetails,
}

impl ExecKind {
    fn of(start: &ExecStart) -> Self {
        Self {
            tag: start.tag.clone(),
            command: command_line(start),
            details: ExecDetails::of(start),
        }
    }
}

impl Kind {
    pub fn of(open: &Open) -> Self {
        match open {
            Open::Exec(start) | Open::Detached(start) | Open::DetachedAs { start, .. } => {
                Self::Exec(Box::new(ExecKind::of(start)))
            }
            Open::ReadFile { .. }
            | Open::ReadFrom { .. }
            | Open::ListDir { .. }
            | Open::TarOut { .. }
            | Open::Watch { .. }
            | Open::ReadClipboard
            | Open::Discard { .. }
            | Open::Attach { .. } => Self::Read,
            Open::WriteFile { .. } | Open::TarIn { .. } | Open::WriteClipboard => Self::Write,
            Open::Connect { .. } => Self::Connect,
        }
    }

    pub fn changes_the_guest(&self) -> bool {
        *self != Self::Read
    }
}

/// The offsets of a stream from the guest, and of its reader.
#[derive(Debug, Default)]
pub(super) struct Flow {
    pub received: u64,
    pub consumed: u64,
    /// The value of `consumed` that the agent has received.
    pub told: u64,
    pub ended: bool,
}

impl Flow {
    /// A stream whose bytes before this offset are here already.
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
    /// The open is not sent before the guest is admitted.
    pub(super) waits: bool,
    /// Signals and sizes of a terminal that came before the open was sent, and follow it.
    pub(super) behind: VecDeque<Frame>,
    pub(super) input: Outgoing,
    /// For a channel that another hub opened. The agent reports how much of its input is used, and
    /// so how much may follow; until then no input is sent.
    pub(super) arrived: Option<Arrived>,
    pub(super) out: Flow,
    pub(super) err: Flow,
    pub(super) ended: bool,
    /// Input of attached clients for which the window had no room yet.
    pub(super) waiting: VecDeque<Waiting>,
}

/// Input that another hub sent, and its window.
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
    /// The client's offset after these bytes.
    pub until: u64,
    pub end: bool,
}

impl Source for Slot {
    fn stream(&mut self) -> &mut Outgoing {
        &mut self.input
    }

    fn waits(&self) -> bool {
        self.waits
    }

    /// At most one for each stream, however often its reader reports: an agent that does not read
    /// must not fill our memory.
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
    /// Keeps a frame until the open is sent. The latest are worth the most: a size replaces those
    /// before it.
    pub(super) fn put_behind(&mut self, frame: Frame) {
        if self.behind.len() >= BEHIND_MAX {
            self.behind.pop_front();
        }
        self.behind.push_back(frame);
    }

    pub(super) fn flow(&mut self, stream: StreamId) -> Option<&mut Flow> {
        match stream {
            StreamId::Out => Some(&mut self.out),
            StreamId::Err => Some(&mut self.err),
            StreamId::In => None,
        }
    }

    /// Whether the agent can continue at the present offsets. A guest of another moment cannot.
    pub(super) fn continues(&self, state: &ChannelState) -> bool {
        let goes_on = |flow: &Flow, held: (u64, u64)| (held.0..=held.1).contains(&flow.received);
        goes_on(&self.out, state.out) && goes_on(&self.err, state.err)
    }

    /// Takes over the input from the hub that opened the channel, after the agent has reported how
    /// much is used.
    pub(super) fn take_input_over(&mut self, consumed: u64) -> Result<bool, String> {
        let Some(Arrived { bytes, window }) = self.arrived.take() else {
            return Ok(false);
        };
        // The window was at least as large as the bytes in it.
        let held = bytes.saturating_sub(consumed).min(self.window);
        let window = u64::from(window).max(held) as usize;
        self.input = Outgoing::taken_over(consumed, bytes, window).map_err(|e| e.to_string())?;
        Ok(true)
    }

    /// Accepts bytes in order. Repeated bytes, which follow a break, are dropped; anything else
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
