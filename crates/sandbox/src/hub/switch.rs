//! The switch: the one task that owns every channel of a guest.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use sandtree_proto::frame::{Frame, StreamId};
use sandtree_proto::{
    AgentHello, AgentMessage, ChannelState, ExecStart, Failure, HostMessage, Open, Outcome, Outgoing, message,
};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};

use super::agent::{AgentSide, Heard};
use super::attach::{self, AttachInput};
use super::client::{self, Client, ClientId, Target};
use super::spool::{Spool, SpoolInput};
use super::{ExecEntry, Status};
use crate::link::Source;

/// The largest window a client may ask for, per stream.
const WINDOW_MAX: u32 = 1024 * 1024;
/// Messages that may wait for the guest; beyond, new requests are refused.
const QUEUE_MAX: usize = 16 * 1024;
/// How often the agent may lose the thread without a single good answer in between.
pub(super) const RESYNC_MAX: u32 = 5;
/// How long clients may take to hear that it is over.
const FAREWELL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) enum Input {
    NewClient(UnixStream),
    ClientGone(ClientId),
    Message(ClientId, HostMessage),
    Stream(ClientId, Frame),
    /// A spool has this much of a stream on disk.
    Spooled {
        tag: String,
        stream: StreamId,
        length: u64,
    },
    List(oneshot::Sender<Vec<ExecEntry>>),
    Resync,
    GiveUp {
        reason: String,
    },
    Close {
        reason: String,
        done: oneshot::Sender<()>,
    },
}

#[derive(Debug, Clone)]
enum Owner {
    Client { client: ClientId, channel: u32 },
    Spool { tag: String },
}

/// How far a stream from the guest has come, and how far its reader.
#[derive(Debug, Default)]
struct Flow {
    received: u64,
    consumed: u64,
    ended: bool,
}

/// A channel of the agent.
#[derive(Debug)]
pub(crate) struct Slot {
    owner: Owner,
    window: u64,
    /// Kept until the agent has shown that it knows the channel.
    opening: Option<Frame>,
    input: Outgoing,
    out: Flow,
    err: Flow,
    ended: bool,
    /// Input of attached clients that the window had no room for yet.
    waiting: VecDeque<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    client: ClientId,
    channel: u32,
    bytes: Vec<u8>,
    /// The client's offset behind these bytes.
    until: u64,
    end: bool,
}

impl Source for Slot {
    fn stream(&mut self) -> &mut Outgoing {
        &mut self.input
    }
}

impl Slot {
    fn flow(&mut self, stream: StreamId) -> Option<&mut Flow> {
        match stream {
            StreamId::Out => Some(&mut self.out),
            StreamId::Err => Some(&mut self.err),
            StreamId::In => None,
        }
    }

    /// Takes bytes in order. Repeated ones are dropped, as they come after a break; anything else breaks the protocol.
    fn accept(&mut self, stream: StreamId, offset: u64, bytes: Vec<u8>) -> Result<(u64, Vec<u8>), String> {
        let window = self.window;
        let flow = self.flow(stream).ok_or("bytes on a stream of ours")?;
        if offset > flow.received {
            return Err(format!("bytes at {offset}, expected at {}", flow.received));
        }
        let known = (flow.received - offset).min(bytes.len() as u64) as usize;
        let fresh = if known == 0 { bytes } else { bytes[known..].to_vec() };
        if flow.received + fresh.len() as u64 - flow.consumed > window {
            return Err("more bytes than the window allows".into());
        }
        let offset = flow.received;
        flow.received += fresh.len() as u64;
        Ok((offset, fresh))
    }
}

pub(super) struct Switch {
    agent: AgentSide,
    clients: HashMap<ClientId, Client>,
    channels: BTreeMap<u32, Slot>,
    requests: HashMap<u32, (ClientId, u32)>,
    spools: BTreeMap<String, Spool>,
    next_channel: u32,
    next_request: u32,
    next_client: u64,
    resyncs: u32,
    execs: PathBuf,
    status: watch::Sender<Status>,
    inputs: mpsc::Sender<Input>,
}

impl Switch {
    pub fn new(port: UnixStream, execs: PathBuf, status: watch::Sender<Status>, inputs: mpsc::Sender<Input>) -> Self {
        Self {
            agent: AgentSide::new(port),
            clients: HashMap::new(),
            channels: BTreeMap::new(),
            requests: HashMap::new(),
            spools: BTreeMap::new(),
            next_channel: 1,
            next_request: 1,
            next_client: 1,
            resyncs: 0,
            execs,
            status,
            inputs,
        }
    }

    pub async fn run(mut self, mut queue: mpsc::Receiver<Input>) {
        let mut port_open = true;
        loop {
            tokio::select! {
                turn = self.agent.turn(&mut self.channels), if port_open => match turn {
                    Ok(count) => {
                        self.agent.feed(count);
                        self.listen();
                    }
                    // The machine is gone. Whoever watches it knows why, and closes us with the reason.
                    Err(_) => port_open = false,
                },
                input = queue.recv() => match input {
                    Some(Input::Close { reason, done }) => return self.close(reason, done).await,
                    Some(input) => self.handle(input),
                    None => return,
                },
            }
        }
    }

    fn handle(&mut self, input: Input) {
        match input {
            Input::NewClient(stream) => self.add_client(stream),
            Input::ClientGone(id) => self.drop_client(id),
            Input::Message(id, message) => self.client_message(id, message),
            Input::Stream(id, frame) => self.client_stream(id, frame),
            Input::Spooled { tag, stream, length } => self.spooled(&tag, stream, length),
            Input::List(reply) => drop(reply.send(self.spools.iter().map(|(id, s)| s.entry(id)).collect())),
            Input::Resync => self.greet(),
            Input::GiveUp { reason } => self.give_up(&reason),
            Input::Close { .. } => unreachable!("closing is handled by the loop"),
        }
    }

    /// The process may end as soon as this is done, so it is done when every client has been told.
    async fn close(mut self, reason: String, done: oneshot::Sender<()>) {
        self.tell_all_lost(&reason);
        self.status.send_replace(Status::Closed { reason });
        let farewell = async {
            for client in self.clients.values() {
                client.sender.flush().await;
            }
        };
        if tokio::time::timeout(FAREWELL, farewell).await.is_err() {
            tracing::warn!("a client does not read what became of its sandbox");
        }
        // Whoever asked may have stopped waiting.
        let _asker_left = done.send(()).is_err();
    }

    fn tell_all_lost(&mut self, reason: &str) {
        let lost = Outcome::Lost { reason: reason.to_owned() };
        for (_, slot) in std::mem::take(&mut self.channels) {
            if !slot.ended {
                self.tell_ended(&slot.owner, lost.clone());
            }
        }
        self.cut_attachments(&lost);
        self.void_requests(reason);
    }

    fn void_requests(&mut self, reason: &str) {
        for (_, (client, id)) in std::mem::take(&mut self.requests) {
            let failure = Failure { errno: Failure::LOST, message: reason.to_owned() };
            self.tell(client, &AgentMessage::Reply { id, reply: Err(failure) });
        }
    }

    /// Why nothing can be asked of the agent, if nothing can.
    fn closed(&self) -> Option<String> {
        match &*self.status.borrow() {
            Status::Closed { reason } => Some(reason.clone()),
            Status::Greeting | Status::Up => None,
        }
    }

    /// Attachments end with us, and might not come to tell it themselves.
    fn cut_attachments(&self, lost: &Outcome) {
        let runs = |tag: &str| self.spools.get(tag).is_some_and(|spool| !spool.has_ended());
        for client in self.clients.values() {
            for (channel, target) in &client.channels {
                if matches!(target, Target::Attached { tag, .. } if runs(tag)) {
                    // One that does not read learns it from the end of its connection.
                    let _kept_up = client.sender.ended(*channel, lost.clone());
                }
            }
        }
    }

    // ---- what the agent says

    fn listen(&mut self) {
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

    /// The agent's stream stopped making sense: greet it anew, a few times.
    fn lost_thread(&mut self, what: &str) {
        self.resyncs += 1;
        tracing::warn!(what, resyncs = self.resyncs, "the guest's agent broke the protocol");
        match self.resyncs > RESYNC_MAX {
            true => self.give_up(&format!("the guest's agent broke the protocol: {what}")),
            false => self.greet(),
        }
    }

    /// There is no agent to speak to any more: whoever waits is told, and so is whoever comes.
    fn give_up(&mut self, reason: &str) {
        self.status.send_replace(Status::Closed { reason: reason.to_owned() });
        self.tell_all_lost(reason);
    }

    fn agent_hello(&mut self, hello: AgentHello) -> Result<(), String> {
        if hello.version == 0 {
            self.give_up("the guest's agent speaks another version of the protocol");
            return Ok(());
        }
        let alive: HashMap<u32, ChannelState> = hello.channels.into_iter().map(|c| (c.channel, c)).collect();
        for unknown in alive.keys().filter(|id| !self.channels.contains_key(id)) {
            // It was closed here, and the close is lost with the break.
            self.agent.send(&HostMessage::Close { channel: *unknown }).expect("a close is short");
        }
        let ids: Vec<u32> = self.channels.keys().copied().collect();
        for id in ids {
            self.resume(id, alive.get(&id))?;
        }
        self.status.send_replace(Status::Up);
        Ok(())
    }

    /// Goes on with a channel after a greeting: from where it stands, from its beginning if the agent never heard of it,
    /// or not at all.
    fn resume(&mut self, id: u32, state: Option<&ChannelState>) -> Result<(), String> {
        let slot = self.channels.get_mut(&id).expect("its id was just listed");
        match (state, &slot.opening) {
            (Some(state), _) => {
                slot.opening = None;
                slot.input.rewind(state.received.max(slot.input.base())).map_err(|e| e.to_string())?;
                let (out, err) = (slot.out.received, slot.err.received);
                let windows = [(StreamId::Out, slot.out.consumed), (StreamId::Err, slot.err.consumed)];
                self.send_agent(&HostMessage::Resume { channel: id, out, err });
                for (stream, consumed) in windows {
                    self.agent.send_frame(Frame::Window { channel: id, stream, consumed });
                }
            }
            (None, Some(opening)) => {
                self.agent.send_frame(opening.clone());
                slot.input.rewind(0).map_err(|e| e.to_string())?;
            }
            (None, None) => self.lose(id),
        }
        Ok(())
    }

    fn lose(&mut self, id: u32) {
        if let Some(slot) = self.channels.remove(&id) {
            let reason = "the guest does not know this command any more".into();
            self.tell_ended(&slot.owner, Outcome::Lost { reason });
        }
    }

    /// Begins a new stream with the agent. What was asked and not answered is void.
    fn greet(&mut self) {
        self.agent.greet();
        self.void_requests("the link to the guest broke before the answer came");
    }

    fn agent_message(&mut self, message: AgentMessage) -> Result<(), String> {
        self.resyncs = 0;
        match message {
            AgentMessage::Hello(_) => return Err("a second hello".into()),
            AgentMessage::Started { channel, pid } => self.started(channel, pid),
            AgentMessage::Ended { channel, outcome } => self.ended(channel, outcome),
            AgentMessage::Reply { id, reply } => {
                if let Some((client, id)) = self.requests.remove(&id) {
                    self.tell(client, &AgentMessage::Reply { id, reply });
                }
            }
        }
        Ok(())
    }

    fn started(&mut self, channel: u32, pid: u32) {
        self.channels.get_mut(&channel).into_iter().for_each(|slot| slot.opening = None);
        match self.channels.get(&channel).map(|slot| slot.owner.clone()) {
            Some(Owner::Client { client, channel }) => self.tell(client, &AgentMessage::Started { channel, pid }),
            Some(Owner::Spool { tag }) => self.spool(&tag, SpoolInput::Started { pid }),
            None => {}
        }
    }

    fn ended(&mut self, channel: u32, outcome: Outcome) {
        let Some(slot) = self.channels.get_mut(&channel) else { return };
        // After a break the agent says it again.
        if slot.ended {
            return;
        }
        slot.ended = true;
        slot.opening = None;
        let owner = slot.owner.clone();
        self.tell_ended(&owner, outcome);
        self.retire(channel);
    }

    /// Closes the channel of a detached command of which everything is here. Those of clients are theirs to close.
    fn retire(&mut self, channel: u32) {
        let complete = |slot: &Slot| slot.ended && slot.out.ended && slot.err.ended;
        if self.channels.get(&channel).is_some_and(|slot| matches!(slot.owner, Owner::Spool { .. }) && complete(slot)) {
            self.channels.remove(&channel);
            self.send_agent(&HostMessage::Close { channel });
        }
    }

    fn tell_ended(&mut self, owner: &Owner, outcome: Outcome) {
        match owner {
            Owner::Client { client, channel } => {
                self.tell(*client, &AgentMessage::Ended { channel: *channel, outcome });
            }
            Owner::Spool { tag } => self.spool(tag, SpoolInput::Ended { outcome }),
        }
    }

    fn agent_stream(&mut self, frame: Frame) -> Result<(), String> {
        match frame {
            Frame::Data { channel, stream, offset, bytes } => self.agent_data(channel, stream, offset, bytes),
            Frame::Eof { channel, stream, offset } => self.agent_eof(channel, stream, offset),
            Frame::Window { channel, consumed, .. } => self.agent_window(channel, consumed),
            Frame::Message(_) => unreachable!("messages are decoded before they come here"),
        }
    }

    fn agent_data(&mut self, channel: u32, stream: StreamId, offset: u64, bytes: Vec<u8>) -> Result<(), String> {
        // A channel that was closed here may have bytes on their way.
        let Some(slot) = self.channels.get_mut(&channel) else { return Ok(()) };
        let (offset, bytes) = slot.accept(stream, offset, bytes)?;
        if bytes.is_empty() {
            return Ok(());
        }
        match slot.owner.clone() {
            Owner::Client { client, channel } => self.forward(client, &Frame::Data { channel, stream, offset, bytes }),
            Owner::Spool { tag } => self.spool(&tag, SpoolInput::Data { stream, bytes }),
        }
        Ok(())
    }

    fn agent_eof(&mut self, channel: u32, stream: StreamId, offset: u64) -> Result<(), String> {
        let Some(slot) = self.channels.get_mut(&channel) else { return Ok(()) };
        let flow = slot.flow(stream).ok_or("an end on a stream of ours")?;
        if offset != flow.received {
            return Err(format!("a stream ends at {offset}, at {} it stands", flow.received));
        }
        flow.ended = true;
        match slot.owner.clone() {
            Owner::Client { client, channel } => self.forward(client, &Frame::Eof { channel, stream, offset }),
            Owner::Spool { tag } => self.spool(&tag, SpoolInput::Eof { stream }),
        }
        self.retire(channel);
        Ok(())
    }

    fn agent_window(&mut self, channel: u32, consumed: u64) -> Result<(), String> {
        let Some(slot) = self.channels.get_mut(&channel) else { return Ok(()) };
        slot.input.consumed(consumed).map_err(|e| e.to_string())?;
        match slot.owner.clone() {
            Owner::Client { client, channel } => {
                self.forward(client, &Frame::Window { channel, stream: StreamId::In, consumed });
            }
            Owner::Spool { .. } => self.drain_waiting(channel),
        }
        Ok(())
    }

    // ---- what clients say

    fn add_client(&mut self, stream: UnixStream) {
        let id = ClientId(self.next_client);
        self.next_client += 1;
        self.clients.insert(id, client::accept(id, stream, self.inputs.clone()));
    }

    fn drop_client(&mut self, id: ClientId) {
        let Some(client) = self.clients.remove(&id) else { return };
        for target in client.channels.into_values() {
            self.close_target(&target);
        }
        self.requests.retain(|_, (asker, _)| *asker != id);
        for slot in self.channels.values_mut() {
            slot.waiting.retain(|w| w.client != id);
        }
    }

    fn client_message(&mut self, client: ClientId, message: HostMessage) {
        match message {
            HostMessage::Open { channel, window, open } => self.open(client, channel, window, open),
            HostMessage::Signal { channel, signal } => {
                self.with_agent_channel(client, channel, |channel| HostMessage::Signal { channel, signal });
            }
            HostMessage::Resize { channel, size } => {
                self.with_agent_channel(client, channel, |channel| HostMessage::Resize { channel, size });
            }
            HostMessage::Close { channel } => {
                let target = self.clients.get_mut(&client).and_then(|c| c.channels.remove(&channel));
                target.iter().for_each(|target| self.close_target(target));
            }
            HostMessage::Request { id, request } => self.request(client, id, request),
            // A client's connection does not break and go on; it has nothing to resume.
            HostMessage::Hello(_) | HostMessage::Resume { .. } => self.drop_client(client),
        }
    }

    fn open(&mut self, client: ClientId, channel: u32, window: u32, open: Open) {
        let Some(known) = self.clients.get(&client) else { return };
        if known.channels.contains_key(&channel) || !(1..=WINDOW_MAX).contains(&window) {
            return self.drop_client(client);
        }
        if let Some(reason) = self.closed() {
            return self.tell(client, &AgentMessage::Ended { channel, outcome: Outcome::Lost { reason } });
        }
        match open {
            Open::Attach { tag } => self.attach(client, channel, window, tag),
            Open::Detached(exec) => self.detach(client, channel, window, exec),
            open => {
                let owner = Owner::Client { client, channel };
                if let Some(id) = self.open_agent(owner, window, open) {
                    self.target(client, channel, Target::Agent(id));
                }
            }
        }
    }

    fn open_agent(&mut self, owner: Owner, window: u32, open: Open) -> Option<u32> {
        let id = self.next_channel;
        let opening = match message::to_frame(&HostMessage::Open { channel: id, window, open }) {
            Ok(_) if self.agent.queued() >= QUEUE_MAX => {
                return self.refuse(&owner, "too many requests wait for the guest");
            }
            Ok(frame) => frame,
            Err(error) => return self.refuse(&owner, &error.to_string()),
        };
        if self.agent.is_up() {
            self.agent.send_frame(opening.clone());
        }
        self.next_channel += 1;
        let slot = Slot {
            owner,
            window: window.into(),
            opening: Some(opening),
            input: Outgoing::new(window as usize),
            out: Flow::default(),
            err: Flow::default(),
            ended: false,
            waiting: VecDeque::new(),
        };
        self.channels.insert(id, slot);
        Some(id)
    }

    fn refuse(&mut self, owner: &Owner, message: &str) -> Option<u32> {
        self.tell_ended(owner, Outcome::Failed(Failure { errno: 0, message: message.into() }));
        None
    }

    fn detach(&mut self, client: ClientId, channel: u32, window: u32, exec: ExecStart) {
        let tag = exec.tag.clone();
        let plain = !tag.is_empty() && tag.bytes().all(|b| b.is_ascii_alphanumeric());
        if !plain || self.spools.contains_key(&tag) {
            let message = format!("{tag:?} does not do as a command's id, or is taken");
            let outcome = Outcome::NotStarted(Failure { errno: 0, message });
            return self.tell(client, &AgentMessage::Ended { channel, outcome });
        }
        let dir = self.execs.join(&tag);
        let spool = Spool::start(self.next_channel, dir, &exec, self.inputs.clone());
        self.spools.insert(tag.clone(), spool);
        self.open_agent(Owner::Spool { tag: tag.clone() }, window, Open::Exec(exec));
        self.attach(client, channel, window, tag);
    }

    fn attach(&mut self, client: ClientId, channel: u32, window: u32, tag: String) {
        let Some(known) = self.clients.get(&client) else { return };
        let Some(spool) = self.spools.get(&tag) else {
            let message = format!("no command {tag} was detached in this sandbox");
            let outcome = Outcome::Failed(Failure { errno: 0, message });
            return self.tell(client, &AgentMessage::Ended { channel, outcome });
        };
        let input = attach::start(spool, known.sender.clone(), channel, window);
        self.target(client, channel, Target::Attached { tag, input });
    }

    fn target(&mut self, client: ClientId, channel: u32, target: Target) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.channels.insert(channel, target);
        }
    }

    fn request(&mut self, client: ClientId, asked: u32, request: sandtree_proto::Request) {
        if let Some(message) = self.queue_request(client, asked, request) {
            let failure = Failure { errno: Failure::LOST, message };
            self.tell(client, &AgentMessage::Reply { id: asked, reply: Err(failure) });
        }
    }

    /// Says why not, if it cannot.
    fn queue_request(&mut self, client: ClientId, asked: u32, request: sandtree_proto::Request) -> Option<String> {
        if let Some(reason) = self.closed() {
            return Some(reason);
        }
        let id = self.next_request;
        match message::to_frame(&HostMessage::Request { id, request }) {
            Ok(_) if self.agent.queued() >= QUEUE_MAX => Some("too many requests wait for the guest".into()),
            Ok(frame) => {
                self.next_request += 1;
                self.requests.insert(id, (client, asked));
                self.agent.send_frame(frame);
                None
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// Closes what a client's channel led to. A detached command goes on.
    fn close_target(&mut self, target: &Target) {
        if let Target::Agent(id) = target {
            self.channels.remove(id);
            self.send_agent(&HostMessage::Close { channel: *id });
        }
    }

    fn agent_channel(&self, client: ClientId, channel: u32) -> Option<u32> {
        match self.clients.get(&client)?.channels.get(&channel)? {
            Target::Agent(id) => Some(*id),
            Target::Attached { tag, .. } => self.spools.get(tag).map(|spool| spool.channel),
        }
    }

    fn with_agent_channel(&mut self, client: ClientId, channel: u32, message: impl FnOnce(u32) -> HostMessage) {
        if let Some(id) = self.agent_channel(client, channel) {
            self.send_agent(&message(id));
        }
    }

    fn client_stream(&mut self, client: ClientId, frame: Frame) {
        match frame {
            Frame::Data { channel, offset, bytes, .. } => self.client_input(client, channel, offset, bytes, false),
            Frame::Eof { channel, offset, .. } => self.client_input(client, channel, offset, Vec::new(), true),
            Frame::Window { channel, stream, consumed } => self.client_window(client, channel, stream, consumed),
            Frame::Message(_) => unreachable!("messages are decoded before they come here"),
        }
    }

    fn client_input(&mut self, client: ClientId, channel: u32, offset: u64, bytes: Vec<u8>, end: bool) {
        let attached = match self.clients.get(&client).and_then(|c| c.channels.get(&channel)) {
            Some(Target::Attached { .. }) => true,
            Some(Target::Agent(_)) => false,
            None => return,
        };
        let Some(id) = self.agent_channel(client, channel) else { return };
        let Some(slot) = self.channels.get_mut(&id) else { return };
        let until = offset + bytes.len() as u64;
        if attached {
            let held: usize = slot.waiting.iter().filter(|w| w.client == client).map(|w| w.bytes.len()).sum();
            if (held + bytes.len()) as u64 > slot.window {
                return self.drop_client(client);
            }
            slot.waiting.push_back(Waiting { client, channel, bytes, until, end });
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

    /// Moves input of attached clients into the command's stream, in the order it came, as far as there is room.
    fn drain_waiting(&mut self, id: u32) {
        while let Some(slot) = self.channels.get_mut(&id) {
            let Some(next) = slot.waiting.front() else { return };
            if next.bytes.len() > slot.input.room() {
                return;
            }
            let Some(Waiting { client, channel, bytes, until, end }) = slot.waiting.pop_front() else { return };
            slot.input.push(&bytes);
            if end {
                slot.input.end();
            }
            self.forward(client, &Frame::Window { channel, stream: StreamId::In, consumed: until });
        }
    }

    fn client_window(&mut self, client: ClientId, channel: u32, stream: StreamId, consumed: u64) {
        match self.clients.get(&client).and_then(|c| c.channels.get(&channel)) {
            Some(Target::Agent(id)) => {
                let id = *id;
                self.consumed(id, stream, consumed);
            }
            // An attachment that has ended wants no more news.
            Some(Target::Attached { input, .. }) => drop(input.send(AttachInput::Window { stream, consumed })),
            None => {}
        }
    }

    fn spooled(&mut self, tag: &str, stream: StreamId, length: u64) {
        if let Some(channel) = self.spools.get(tag).map(|spool| spool.channel) {
            self.consumed(channel, stream, length);
        }
    }

    /// A reader has used a stream's bytes up to here.
    fn consumed(&mut self, id: u32, stream: StreamId, consumed: u64) {
        let Some(slot) = self.channels.get_mut(&id) else { return };
        let Some(flow) = slot.flow(stream) else { return };
        if consumed > flow.consumed && consumed <= flow.received {
            flow.consumed = consumed;
            self.agent.send_frame(Frame::Window { channel: id, stream, consumed });
        }
    }

    // ---- ways out

    fn send_agent(&mut self, message: &HostMessage) {
        self.agent.send(message).expect("what the hub says by itself is short");
    }

    fn spool(&self, tag: &str, input: SpoolInput) {
        if let Some(spool) = self.spools.get(tag) {
            spool.push(input);
        }
    }

    fn tell(&mut self, client: ClientId, message: &AgentMessage) {
        let kept_up = self.clients.get(&client).is_none_or(|c| c.sender.tell(message));
        if !kept_up {
            self.drop_client(client);
        }
    }

    fn forward(&mut self, client: ClientId, frame: &Frame) {
        let kept_up = self.clients.get(&client).is_none_or(|c| c.sender.send(frame));
        if !kept_up {
            self.drop_client(client);
        }
    }
}
