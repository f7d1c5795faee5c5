//! A channel of the agent, as the hub keeps it.

use std::collections::VecDeque;

use sandtree_proto::Outgoing;
use sandtree_proto::frame::{Frame, StreamId};

use super::client::ClientId;
use crate::link::Source;

#[derive(Debug, Clone)]
pub(super) enum Owner {
    Client { client: ClientId, channel: u32 },
    Spool { tag: String },
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

/// A channel of the agent.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(super) owner: Owner,
    pub(super) window: u64,
    /// Kept until the agent has shown that it knows the channel.
    pub(super) opening: Option<Frame>,
    pub(super) input: Outgoing,
    pub(super) out: Flow,
    pub(super) err: Flow,
    pub(super) ended: bool,
    /// Input of attached clients that the window had no room for yet.
    pub(super) waiting: VecDeque<Waiting>,
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

    /// One for each stream, however often its reader reported: an agent that does not read must not make us hoard.
    fn take_window(&mut self) -> Option<(StreamId, u64)> {
        let due = |flow: &mut Flow| {
            (flow.consumed > std::mem::replace(&mut flow.told, flow.consumed)).then_some(flow.consumed)
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

    /// Takes bytes in order. Repeated ones are dropped, as they come after a break; anything else breaks the protocol.
    pub(super) fn accept(&mut self, stream: StreamId, offset: u64, bytes: Vec<u8>) -> Result<(u64, Vec<u8>), String> {
        let window = self.window;
        let flow = self.flow(stream).ok_or("bytes on a stream of ours")?;
        if offset > flow.received {
            return Err(format!("bytes at {offset}, expected at {}", flow.received));
        }
        let known = (flow.received - offset).min(bytes.len() as u64) as usize;
        let fresh = if known == 0 { bytes } else { bytes[known..].to_vec() };
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
