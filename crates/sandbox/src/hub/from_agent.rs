//! The agent's messages, and what the switch does for each.

use std::collections::HashMap;
use std::time::Instant;

use sandtree_proto::frame::{Frame, StreamId};
use sandtree_proto::{
    AgentHello, AgentMessage, ChannelState, Failure, HostMessage, HubFailure, Outcome,
};

use super::agent::Heard;
use super::slot::{Owner, Slot};
use super::spool::SpoolInput;
use super::switch::{RESYNC_FORGOTTEN, RESYNC_MAX, Switch};
use super::{Closed, Status};

/// The reason of a lost channel that the agent does not list.
pub(super) const FORGOTTEN: &str = "the guest does not know this command any more";

impl Switch {
    pub(super) fn listen(&mut self) {
        while let (None, Some(heard)) = (self.closed(), self.agent.next()) {
            let result = heard.and_then(|heard| match heard {
                Heard::Hello(hello) => self.agent_hello(hello),
                Heard::Message(message) => self.agent_message(message),
                Heard::Stream(frame) => self.agent_stream(frame),
            });
            if let Err(what) = result {
                return self.lost_thread(&what);
            }
        }
    }

    /// The agent's stream is invalid: greets it again, a few times.
    pub(super) fn lost_thread(&mut self, what: &str) {
        if self.last_loss.elapsed() > RESYNC_FORGOTTEN {
            self.resyncs = 0;
        }
        self.last_loss = Instant::now();
        self.resyncs += 1;
        tracing::warn!(
            what,
            resyncs = self.resyncs,
            "the guest's agent broke the protocol"
        );
        if self.resyncs > RESYNC_MAX {
            self.give_up(Closed {
                cause: HubFailure::Broken,
                reason: format!("the guest's agent broke the protocol: {what}"),
            });
        } else {
            self.greet();
        }
    }

    /// There is no agent any more: reports it to the waiting clients, and to those that come.
    pub(super) fn give_up(&mut self, closed: Closed) {
        self.status.send_replace(Status::Closed(closed.clone()));
        self.tell_all_lost(&closed);
    }

    pub(super) fn agent_hello(&mut self, hello: AgentHello) -> Result<(), String> {
        if hello.version == 0 {
            self.give_up(Closed {
                cause: HubFailure::AgentTooOld,
                reason: "the guest's agent speaks another version of the protocol".into(),
            });
            return Ok(());
        }
        self.agent_version = hello.version;
        if let Some(records) = self.restored_execs.take() {
            self.adopt(records, &hello.channels);
        }
        let alive: HashMap<u32, ChannelState> =
            hello.channels.into_iter().map(|c| (c.channel, c)).collect();
        for unknown in alive.keys().filter(|id| !self.channels.contains_key(id)) {
            // It was closed here, and the close was lost in the break.
            self.agent
                .send(&HostMessage::Close { channel: *unknown })
                .expect("a close is short");
        }
        let ids: Vec<u32> = self.channels.keys().copied().collect();
        for id in ids {
            self.resume(id, alive.get(&id))?;
        }
        self.status.send_replace(Status::Up);
        Ok(())
    }

    /// Continues a channel after a greeting: from its present offsets, from its beginning if the
    /// agent never received its open, or not at all.
    pub(super) fn resume(&mut self, id: u32, state: Option<&ChannelState>) -> Result<(), String> {
        let slot = self.channels.get_mut(&id).expect("its id was just listed");
        match (state, &slot.opening) {
            (Some(state), _) if !slot.continues(state) => {
                self.send_agent(&HostMessage::Close { channel: id });
                self.lose(id, &Closed::ended(FORGOTTEN));
            }
            (Some(state), _) => {
                slot.opening = None;
                let out = slot.out.received;
                let err = slot.err.received;
                match &mut slot.arrived {
                    Some(arrived) => arrived.bytes = state.received,
                    None => slot
                        .input
                        .rewind(state.received.max(slot.input.base()))
                        .map_err(|e| e.to_string())?,
                }
                // The last acknowledgements may be lost in the break.
                (slot.out.told, slot.err.told) = (0, 0);
                let behind = std::mem::take(&mut slot.behind);
                self.send_agent(&HostMessage::Resume {
                    channel: id,
                    out,
                    err,
                });
                let behind = behind.into_iter();
                behind.for_each(|frame| self.agent.send_frame(frame));
            }
            (None, Some(opening)) => {
                if !self.awaits_admission {
                    self.agent.send_frame(opening.clone());
                    let behind = slot.behind.drain(..);
                    behind.for_each(|frame| self.agent.send_frame(frame));
                }
                slot.waits = self.awaits_admission;
                slot.input.rewind(0).map_err(|e| e.to_string())?;
            }
            (None, None) => self.lose(id, &Closed::ended(FORGOTTEN)),
        }
        Ok(())
    }

    pub(super) fn lose(&mut self, id: u32, closed: &Closed) {
        if let Some(slot) = self.channels.remove(&id).filter(|slot| !slot.ended) {
            self.tell_lost(&slot.owner, closed);
        }
    }

    pub(super) fn tell_lost(&mut self, owner: &Owner, closed: &Closed) {
        let outcome = match owner {
            Owner::Client { .. } => closed.outcome(),
            Owner::Spool { .. } => closed.lost(),
        };
        self.tell_ended(owner, outcome);
    }

    /// Starts a new stream with the agent. Unanswered requests are void.
    pub(super) fn greet(&mut self) {
        self.agent.greet();
        self.void_requests(&Closed {
            cause: HubFailure::Broken,
            reason: "the link to the guest broke before the answer came".into(),
        });
    }

    pub(super) fn agent_message(&mut self, message: AgentMessage) -> Result<(), String> {
        match message {
            AgentMessage::Hello(_) => return Err("a second hello".into()),
            AgentMessage::Started { channel, pid } => self.started(channel, pid),
            AgentMessage::Ended { channel, outcome } => self.ended(channel, of_guest(outcome)),
            AgentMessage::Reply { id, reply } => {
                let reply = reply.map_err(Failure::of_guest);
                if let Some((client, id)) = self.requests.remove(&id) {
                    self.tell(client, &AgentMessage::Reply { id, reply });
                }
            }
        }
        Ok(())
    }

    pub(super) fn started(&mut self, channel: u32, pid: u32) {
        if let Some(slot) = self.channels.get_mut(&channel) {
            slot.opening = None;
            slot.pid = Some(pid);
        }
        match self.channels.get(&channel).map(|slot| slot.owner.clone()) {
            Some(Owner::Client { client, channel }) => {
                self.tell(client, &AgentMessage::Started { channel, pid })
            }
            Some(Owner::Spool { tag }) => self.spool(&tag, SpoolInput::Started { pid }),
            None => {}
        }
    }

    pub(super) fn ended(&mut self, channel: u32, outcome: Outcome) {
        let Some(slot) = self.channels.get_mut(&channel) else {
            return;
        };
        // After a break the agent repeats it.
        if slot.ended {
            return;
        }
        slot.ended = true;
        slot.opening = None;
        let owner = slot.owner.clone();
        self.tell_ended(&owner, outcome);
        self.retire(channel);
    }

    /// Closes the channel of a detached command whose output is complete here. Clients close their
    /// own channels.
    pub(super) fn retire(&mut self, channel: u32) {
        let complete = |slot: &Slot| slot.ended && slot.out.ended && slot.err.ended;
        if self
            .channels
            .get(&channel)
            .is_some_and(|slot| matches!(slot.owner, Owner::Spool { .. }) && complete(slot))
        {
            self.channels.remove(&channel);
            self.send_agent(&HostMessage::Close { channel });
        }
    }

    pub(super) fn tell_ended(&mut self, owner: &Owner, outcome: Outcome) {
        match owner {
            Owner::Client { client, channel } => {
                self.tell(
                    *client,
                    &AgentMessage::Ended {
                        channel: *channel,
                        outcome,
                    },
                );
            }
            Owner::Spool { tag } => self.spool(tag, SpoolInput::Ended { outcome }),
        }
    }

    pub(super) fn agent_stream(&mut self, frame: Frame) -> Result<(), String> {
        match frame {
            Frame::Data {
                channel,
                stream,
                offset,
                bytes,
            } => self.agent_data(channel, stream, offset, bytes),
            Frame::Eof {
                channel,
                stream,
                offset,
            } => self.agent_eof(channel, stream, offset),
            Frame::Window {
                channel, consumed, ..
            } => self.agent_window(channel, consumed),
            Frame::Message(_) => unreachable!("messages are decoded before they come here"),
        }
    }

    pub(super) fn agent_data(
        &mut self,
        channel: u32,
        stream: StreamId,
        offset: u64,
        bytes: Vec<u8>,
    ) -> Result<(), String> {
        // Data of a channel that was closed here may still arrive.
        let Some(slot) = self.channels.get_mut(&channel) else {
            return Ok(());
        };
        let (offset, bytes) = slot.accept(stream, offset, bytes)?;
        if bytes.is_empty() {
            return Ok(());
        }
        match slot.owner.clone() {
            Owner::Client { client, channel } => self.forward(
                client,
                &Frame::Data {
                    channel,
                    stream,
                    offset,
                    bytes,
                },
            ),
            Owner::Spool { tag } => self.spool(&tag, SpoolInput::Data { stream, bytes }),
        }
        Ok(())
    }

    pub(super) fn agent_eof(
        &mut self,
        channel: u32,
        stream: StreamId,
        offset: u64,
    ) -> Result<(), String> {
        let Some(slot) = self.channels.get_mut(&channel) else {
            return Ok(());
        };
        let flow = slot.flow(stream).ok_or("an end on a stream of ours")?;
        if offset != flow.received {
            return Err(format!(
                "a stream ends at {offset}, at {} it stands",
                flow.received
            ));
        }
        // After a break the agent repeats it.
        if std::mem::replace(&mut flow.ended, true) {
            return Ok(());
        }
        match slot.owner.clone() {
            Owner::Client { client, channel } => self.forward(
                client,
                &Frame::Eof {
                    channel,
                    stream,
                    offset,
                },
            ),
            Owner::Spool { tag } => self.spool(&tag, SpoolInput::Eof { stream }),
        }
        self.retire(channel);
        Ok(())
    }

    pub(super) fn agent_window(&mut self, channel: u32, consumed: u64) -> Result<(), String> {
        let Some(slot) = self.channels.get_mut(&channel) else {
            return Ok(());
        };
        if slot.take_input_over(consumed)? {
            self.drain_waiting(channel);
            return Ok(());
        }
        let before = slot.input.base();
        slot.input.consumed(consumed).map_err(|e| e.to_string())?;
        if slot.input.base() == before {
            return Ok(());
        }
        match slot.owner.clone() {
            Owner::Client { client, channel } => {
                self.forward(
                    client,
                    &Frame::Window {
                        channel,
                        stream: StreamId::In,
                        consumed,
                    },
                );
            }
            Owner::Spool { .. } => self.drain_waiting(channel),
        }
        Ok(())
    }
}

/// An outcome that an agent sent: none of its numbers are the hub's.
fn of_guest(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::NotStarted(failure) => Outcome::NotStarted(failure.of_guest()),
        Outcome::Failed(failure) => Outcome::Failed(failure.of_guest()),
        other => other,
    }
}
