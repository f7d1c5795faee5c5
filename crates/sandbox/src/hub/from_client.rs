//! The clients' messages, and what the switch does for each.

use std::collections::VecDeque;

use sandtree_proto::frame::{Frame, StreamId};
use sandtree_proto::message::MessageError;
use sandtree_proto::{
    AgentMessage, ExecStart, Failure, HostMessage, HubFailure, Open, Outcome, Outgoing, Request,
    ScreenRequest, message,
};
use tokio::net::UnixStream;

use super::attach::{self, AttachInput};
use super::client::{self, ClientId, Target};
use super::details::ExecDetails;
use super::record::is_plain;
use super::slot::{Flow, Kind, Owner, Slot, Waiting};
use super::spool::{Beginning, Progress, Spool, command_line};
use super::switch::{QUEUE_MAX, Switch, WAITING_MAX, WINDOW_MAX};

/// A command that is to be kept.
struct Detaching {
    start: ExecStart,
    /// `None`: they are not acceptable.
    details: Option<ExecDetails>,
}

impl Switch {
    pub(super) fn add_client(&mut self, stream: UnixStream) {
        let id = ClientId(self.next_client);
        self.next_client += 1;
        // The hub is gone, so no client is accepted.
        let Some(inputs) = self.inputs.upgrade() else {
            return;
        };
        let client = client::accept(id, stream, inputs, self.conditions.clone());
        self.clients.insert(id, client);
    }

    pub(super) fn drop_client(&mut self, id: ClientId) {
        let Some(mut client) = self.clients.remove(&id) else {
            return;
        };
        for target in std::mem::take(&mut client.channels).into_values() {
            self.close_target(&target);
        }
        self.requests.retain(|_, (asker, _)| *asker != id);
        for slot in self.channels.values_mut() {
            slot.waiting.retain(|w| w.client != id);
        }
    }

    pub(super) fn client_message(&mut self, client: ClientId, message: HostMessage) {
        match message {
            HostMessage::Open {
                channel,
                window,
                open,
            } => self.open(client, channel, window, open),
            HostMessage::Signal { channel, signal } => {
                self.with_agent_channel(client, channel, |channel| HostMessage::Signal {
                    channel,
                    signal,
                });
            }
            HostMessage::Resize { channel, size } => {
                self.with_agent_channel(client, channel, |channel| HostMessage::Resize {
                    channel,
                    size,
                });
            }
            HostMessage::Close { channel } => {
                let target = self
                    .clients
                    .get_mut(&client)
                    .and_then(|c| c.channels.remove(&channel));
                target.iter().for_each(|target| self.close_target(target));
            }
            HostMessage::Request { id, request } => self.request(client, id, request),
            // A client's connection is never resumed.
            HostMessage::Hello(_) | HostMessage::Resume { .. } => self.drop_client(client),
        }
    }

    pub(super) fn open(&mut self, client: ClientId, channel: u32, window: u32, open: Open) {
        let Some(known) = self.clients.get(&client) else {
            return;
        };
        if known.channels.contains_key(&channel) || !(1..=WINDOW_MAX).contains(&window) {
            return self.drop_client(client);
        }
        if let Some(closed) = self.closed() {
            let outcome = closed.outcome();
            return self.tell(client, &AgentMessage::Ended { channel, outcome });
        }
        if self.restored_execs.is_some() {
            // Its number might be one of the restored guest's own.
            let failure = HubFailure::NotRestored.failure("the guest is not restored yet");
            return self.refuse(client, channel, failure);
        }
        match open {
            Open::Attach { tag } => self.attach(client, channel, window, tag),
            Open::Detached(start) => {
                let details = Some(ExecDetails::of(&start));
                self.detach(client, channel, window, Detaching { start, details });
            }
            Open::DetachedAs {
                start,
                label,
                kept_ms,
            } => {
                let details = ExecDetails::labelled(&start, label, kept_ms);
                self.detach(client, channel, window, Detaching { start, details });
            }
            Open::Discard { tag } => self.discard(client, channel, &tag),
            open if open.version() > self.agent_version.max(1) => {
                self.refuse(client, channel, too_old());
            }
            open => {
                let owner = Owner::Client { client, channel };
                match self.open_agent(owner, window, open) {
                    Ok(id) => self.target(client, channel, Target::Agent(id)),
                    Err(failure) => self.refuse(client, channel, failure),
                }
            }
        }
    }

    fn refuse(&mut self, client: ClientId, channel: u32, failure: Failure) {
        let outcome = Outcome::Failed(failure);
        self.tell(client, &AgentMessage::Ended { channel, outcome });
    }

    /// Opens a channel of the agent, or returns the reason of a refusal.
    pub(super) fn open_agent(
        &mut self,
        owner: Owner,
        window: u32,
        open: Open,
    ) -> Result<u32, Failure> {
        while self.channels.contains_key(&self.next_channel) {
            self.next_channel = self.next_channel.wrapping_add(1);
        }
        let id = self.next_channel;
        let kind = Kind::of(&open);
        let opening = match message::to_frame(&HostMessage::Open {
            channel: id,
            window,
            open,
        }) {
            Ok(_) if self.agent.queued() >= QUEUE_MAX => return Err(queue_full()),
            Ok(frame) => frame,
            Err(error) => return Err(unsent(&error)),
        };
        if self.agent.is_up() && !self.awaits_admission {
            self.agent.send_frame(opening.clone());
        }
        self.next_channel = self.next_channel.wrapping_add(1);
        self.activity.count += u64::from(kind.changes_the_guest());
        let slot = Slot {
            owner,
            kind,
            pid: None,
            window: window.into(),
            opening: Some(opening),
            waits: self.awaits_admission,
            behind: VecDeque::new(),
            input: Outgoing::new(window as usize),
            arrived: None,
            out: Flow::default(),
            err: Flow::default(),
            ended: false,
            waiting: VecDeque::new(),
        };
        self.channels.insert(id, slot);
        Ok(id)
    }

    fn detach(&mut self, client: ClientId, channel: u32, window: u32, detaching: Detaching) {
        let Detaching {
            start: exec,
            details,
        } = detaching;
        let tag = exec.tag.clone();
        let is_free = is_plain(&tag) && !self.spools.contains_key(&tag);
        let Some(details) = details.filter(|_| is_free) else {
            let message = format!("invalid command id {tag:?} or label, or the id is taken");
            let outcome = Outcome::NotStarted(Failure { errno: 0, message });
            return self.tell(client, &AgentMessage::Ended { channel, outcome });
        };
        let opened = match self.open_agent(
            Owner::Spool { tag: tag.clone() },
            window,
            Open::Exec(exec.clone()),
        ) {
            Ok(opened) => opened,
            Err(failure) => return self.refuse(client, channel, failure),
        };
        let command = command_line(&exec);
        let progress = Progress::default();
        let beginning = Beginning {
            tag: tag.clone(),
            command,
            channel: Some(opened),
            window,
            progress,
            details,
        };
        let spool = Spool::start(&self.execs, beginning, &self.room, self.inputs.clone());
        self.spools.insert(tag.clone(), spool);
        self.attach(client, channel, window, tag);
    }

    pub(super) fn attach(&mut self, client: ClientId, channel: u32, window: u32, tag: String) {
        let Some(known) = self.clients.get(&client) else {
            return;
        };
        let Some(spool) = self.spools.get(&tag) else {
            let message = format!("no command {tag} was detached in this sandbox");
            return self.refuse(client, channel, HubFailure::NoCommand.failure(message));
        };
        let input = attach::start(spool, known.sender.clone(), channel, window);
        self.target(client, channel, Target::Attached { tag, input });
    }

    /// Removes a command that has ended, with its output.
    fn discard(&mut self, client: ClientId, channel: u32, tag: &str) {
        let has_ended = self.spools.get(tag).map(|spool| spool.has_ended());
        let message = match has_ended {
            Some(true) => None,
            Some(false) => Some(format!("command {tag} still runs")),
            None => Some(format!("no command {tag} was detached in this sandbox")),
        };
        if let Some(message) = message {
            return self.refuse(client, channel, HubFailure::NoCommand.failure(message));
        }
        if let Some(spool) = self.spools.remove(tag) {
            spool.remove_output();
        }
        let outcome = Outcome::Done;
        self.tell(client, &AgentMessage::Ended { channel, outcome });
    }

    /// Removes a command that has ended and that no client reads any more.
    pub(super) fn expire(&mut self, tag: &str) {
        let is_over = |spool: &Spool| spool.has_ended() && !spool.is_read();
        if self.spools.get(tag).is_some_and(is_over)
            && let Some(spool) = self.spools.remove(tag)
        {
            spool.remove_output();
        }
    }

    pub(super) fn target(&mut self, client: ClientId, channel: u32, target: Target) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.channels.insert(channel, target);
        }
    }

    pub(super) fn request(&mut self, client: ClientId, asked: u32, request: Request) {
        if let Err(failure) = self.queue_request(client, asked, request) {
            self.tell(
                client,
                &AgentMessage::Reply {
                    id: asked,
                    reply: Err(failure),
                },
            );
        }
    }

    pub(super) fn queue_request(
        &mut self,
        client: ClientId,
        asked: u32,
        request: Request,
    ) -> Result<(), Failure> {
        if let Some(closed) = self.closed() {
            return Err(closed.failure());
        }
        if request.version() > self.agent_version.max(1) {
            return Err(too_old());
        }
        let id = self.next_request;
        let changes = changes_the_guest(&request);
        match message::to_frame(&HostMessage::Request { id, request }) {
            Ok(_) if self.agent.queued() >= QUEUE_MAX => Err(queue_full()),
            Ok(frame) => {
                self.next_request = self.next_request.wrapping_add(1);
                self.requests.insert(id, (client, asked));
                self.activity.count += u64::from(changes);
                self.agent.send_frame(frame);
                Ok(())
            }
            Err(error) => Err(unsent(&error)),
        }
    }

    /// Closes the target of a client's channel. A detached command continues.
    pub(super) fn close_target(&mut self, target: &Target) {
        if let Target::Agent(id) = target {
            self.channels.remove(id);
            self.send_agent(&HostMessage::Close { channel: *id });
        }
    }

    pub(super) fn agent_channel(&self, client: ClientId, channel: u32) -> Option<u32> {
        match self.clients.get(&client)?.channels.get(&channel)? {
            Target::Agent(id) => Some(*id),
            Target::Attached { tag, .. } => self.spools.get(tag).and_then(|spool| spool.channel),
        }
    }

    pub(super) fn with_agent_channel(
        &mut self,
        client: ClientId,
        channel: u32,
        message: impl FnOnce(u32) -> HostMessage,
    ) {
        let Some(id) = self.agent_channel(client, channel) else {
            return;
        };
        let message = message(id);
        let is_up = self.agent.is_up();
        let slot = self.channels.get_mut(&id);
        let unsent = |slot: &&mut Slot| slot.opening.is_some() && (slot.waits || !is_up);
        if let Some(slot) = slot.filter(unsent) {
            // The agent does not know the channel yet.
            let frame = message::to_frame(&message);
            slot.put_behind(frame.expect("signals and sizes are short"));
        } else if self.agent.queued() < QUEUE_MAX {
            // Above the limit, thousands of earlier closes have not reached the guest.
            self.send_agent(&message);
        }
    }

    pub(super) fn client_stream(&mut self, client: ClientId, frame: Frame) {
        match frame {
            Frame::Data {
                channel,
                offset,
                bytes,
                ..
            } => self.client_input(client, channel, offset, bytes, false),
            Frame::Eof {
                channel, offset, ..
            } => self.client_input(client, channel, offset, Vec::new(), true),
            Frame::Window {
                channel,
                stream,
                consumed,
            } => self.client_window(client, channel, stream, consumed),
            Frame::Message(_) => unreachable!("messages are decoded before they come here"),
        }
    }

    pub(super) fn client_input(
        &mut self,
        client: ClientId,
        channel: u32,
        offset: u64,
        bytes: Vec<u8>,
        end: bool,
    ) {
        let attached = match self
            .clients
            .get(&client)
            .and_then(|c| c.channels.get(&channel))
        {
            Some(Target::Attached { .. }) => true,
            Some(Target::Agent(_)) => false,
            None => return,
        };
        let Some(id) = self.agent_channel(client, channel) else {
            return;
        };
        let Some(slot) = self.channels.get_mut(&id) else {
            return;
        };
        let until = offset.saturating_add(bytes.len() as u64);
        if attached {
            let held: usize = slot
                .waiting
                .iter()
                .filter(|w| w.client == client)
                .map(|w| w.bytes.len())
                .sum();
            if (held + bytes.len()) as u64 > slot.window || slot.waiting.len() >= WAITING_MAX {
                return self.drop_client(client);
            }
            slot.waiting.push_back(Waiting {
                client,
                channel,
                bytes,
                until,
                end,
            });
            return self.drain_waiting(id);
        }
        if offset != slot.input.produced() || bytes.len() > slot.input.room() {
            return self.drop_client(client);
        }
        slot.input.push(&bytes);
        if end {
            slot.input.end();
        }
    }

    /// Moves input of attached clients into the command's stream, in the order of arrival, as far
    /// as there is room.
    pub(super) fn drain_waiting(&mut self, id: u32) {
        while let Some(slot) = self
            .channels
            .get_mut(&id)
            .filter(|slot| slot.arrived.is_none())
        {
            let Some(next) = slot.waiting.front_mut() else {
                return;
            };
            let count = next.bytes.len().min(slot.input.room());
            slot.input.push(&next.bytes[..count]);
            next.bytes.drain(..count);
            if !next.bytes.is_empty() {
                return;
            }
            let Some(Waiting {
                client,
                channel,
                until,
                end,
                ..
            }) = slot.waiting.pop_front()
            else {
                return;
            };
            if end {
                slot.input.end();
            }
            self.forward(
                client,
                &Frame::Window {
                    channel,
                    stream: StreamId::In,
                    consumed: until,
                },
            );
        }
    }

    pub(super) fn client_window(
        &mut self,
        client: ClientId,
        channel: u32,
        stream: StreamId,
        consumed: u64,
    ) {
        match self
            .clients
            .get(&client)
            .and_then(|c| c.channels.get(&channel))
        {
            Some(Target::Agent(id)) => {
                let id = *id;
                self.consumed(id, stream, consumed);
            }
            Some(Target::Attached { input, .. }) => {
                // An attachment that has ended needs no acknowledgements.
                drop(input.send(AttachInput::Window { stream, consumed }))
            }
            None => {}
        }
    }

    pub(super) fn spooled(&mut self, tag: &str, stream: StreamId, length: u64) {
        if let Some(channel) = self.spools.get(tag).and_then(|spool| spool.channel) {
            self.consumed(channel, stream, length);
        }
    }

    /// A reader has used a stream's bytes up to this offset.
    pub(super) fn consumed(&mut self, id: u32, stream: StreamId, consumed: u64) {
        let Some(slot) = self.channels.get_mut(&id) else {
            return;
        };
        let Some(flow) = slot.flow(stream) else {
            return;
        };
        if consumed > flow.consumed && consumed <= flow.received {
            flow.consumed = consumed;
        }
    }
}

/// The state was captured with an earlier agent.
fn too_old() -> Failure {
    HubFailure::AgentTooOld.failure("the agent in the guest is too old for this request")
}

fn queue_full() -> Failure {
    HubFailure::QueueFull.failure("too many requests wait for the guest")
}

/// The link of a client refuses a message that is too long; here its numbers are others.
fn unsent(error: &MessageError) -> Failure {
    Failure {
        errno: 0,
        message: error.to_string(),
    }
}

/// Whether a client's request changes the guest.
fn changes_the_guest(request: &Request) -> bool {
    match request {
        Request::MakeDir { .. }
        | Request::Mount(_)
        | Request::Unmount(_)
        | Request::Rename { .. }
        | Request::Remove { .. }
        | Request::SetOwner { .. }
        | Request::SetAttributes { .. }
        | Request::Shutdown { .. } => true,
        Request::Screen(request) => *request != ScreenRequest::Look,
        Request::Ping
        | Request::Stat { .. }
        | Request::Attributes { .. }
        | Request::Metrics
        | Request::Sync
        | Request::Settle => false,
        Request::Freeze { .. } | Request::Thaw => false,
        // Part of a machine's start; the caller that starts it handles it.
        Request::Boot(_)
        | Request::Configure(_)
        | Request::Restored(_)
        | Request::Clock { .. }
        | Request::LeaveTsc => false,
    }
}
