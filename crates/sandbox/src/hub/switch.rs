//! The switch: the one task that owns every channel of a guest.
//!
//! `from_agent` and `from_client` handle the messages; this file has the switch's state, its loop
//! and its end.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sandtree_proto::frame::{Frame, StreamId};
use sandtree_proto::{AgentMessage, HostMessage, Outcome};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};

use super::admission::Conditions;
use super::agent::AgentSide;
use super::client::{Client, ClientId, Target};
use super::record::{self, ExecRecord};
use super::room::Room;
use super::slot::{Kind, Owner, Slot};
use super::spool::{Progress, Spool, SpoolInput};
use super::{Activity, Census, Closed, ExecEntry, HubSpec, Restored, Status};

/// The largest window a client may ask for, per stream.
pub(super) const WINDOW_MAX: u32 = 1024 * 1024;
/// The limit of messages that wait for the guest; above it, new requests are refused.
pub(super) const QUEUE_MAX: usize = 16 * 1024;
/// How often in a row the agent may break the protocol, each time within the period of the last.
pub(super) const RESYNC_MAX: u32 = 5;
pub(super) const RESYNC_FORGOTTEN: Duration = Duration::from_secs(30);
/// The limit of input pieces of attached clients that wait for a command to read.
pub(super) const WAITING_MAX: usize = 4096;
/// What the arguments of commands take in a list, in bytes. A keeper's answer has at most 1 MiB.
const LISTED_MAX: usize = 512 * 1024;
/// How long clients may take to read their end.
const FAREWELL: Duration = Duration::from_secs(2);

/// The values that other tasks watch.
#[derive(Debug)]
pub(super) struct Updates {
    pub status: watch::Sender<Status>,
    pub census: watch::Sender<Census>,
}

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
    /// A command that has ended was kept for as long as its client wanted.
    Expire {
        tag: String,
    },
    List(oneshot::Sender<Vec<ExecEntry>>),
    Record(oneshot::Sender<Vec<Recorded>>),
    Resync,
    Hold {
        done: oneshot::Sender<()>,
        /// Resolves when its other end is dropped.
        released: oneshot::Receiver<Infallible>,
    },
    Suspend {
        reason: String,
        done: oneshot::Sender<()>,
    },
    GoOn {
        port: UnixStream,
        done: oneshot::Sender<()>,
    },
    /// What was opened since the guest continued may reach it.
    Admit,
    GiveUp {
        reason: String,
    },
    Close {
        reason: String,
        done: oneshot::Sender<()>,
    },
}

/// A command at the moment of a record.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub record: ExecRecord,
    /// Present if its output is kept here.
    pub kept: Option<KeptOutput>,
}

/// The output of a command, available as segments that never change again.
#[derive(Debug)]
pub(crate) struct KeptOutput {
    pub(super) dir: PathBuf,
    pub(super) rolled: oneshot::Receiver<Progress>,
    pub(super) progress: watch::Receiver<Progress>,
}

impl KeptOutput {
    pub(super) fn has_ended(&self) -> bool {
        self.progress.borrow().outcome.is_some()
    }
}

pub(super) struct Switch {
    pub(super) agent: AgentSide,
    /// The protocol version agreed with the agent; 0 before that.
    pub(super) agent_version: u16,
    pub(super) clients: HashMap<ClientId, Client>,
    pub(super) channels: BTreeMap<u32, Slot>,
    pub(super) requests: HashMap<u32, (ClientId, u32)>,
    pub(super) spools: BTreeMap<String, Spool>,
    pub(super) next_channel: u32,
    pub(super) next_request: u32,
    pub(super) next_client: u64,
    pub(super) resyncs: u32,
    pub(super) last_loss: Instant,
    pub(super) execs: PathBuf,
    pub(super) room: Room,
    /// The recorded commands of a restored guest, until its agent has listed its own.
    pub(super) restored_execs: Option<Vec<ExecRecord>>,
    restored: Option<Restored>,
    /// Nothing is sent to the agent until this resolves.
    held: Option<oneshot::Receiver<Infallible>>,
    /// Nothing is opened in a guest that continues behind another port until it is admitted: it
    /// may still show what the host's directories were.
    pub(super) awaits_admission: bool,
    pub(super) conditions: Conditions,
    pub(super) activity: Activity,
    census: watch::Sender<Census>,
    pub(super) status: watch::Sender<Status>,
    /// Weak: the switch ends when the last handle of its hub is gone.
    pub(super) inputs: mpsc::WeakSender<Input>,
}

impl Switch {
    pub fn new(
        port: UnixStream,
        spec: HubSpec,
        updates: Updates,
        inputs: mpsc::Sender<Input>,
    ) -> Self {
        let HubSpec {
            execs,
            restored,
            gate,
            mounts,
        } = spec;
        let Updates { status, census } = updates;
        Self {
            agent: AgentSide::new(port),
            agent_version: 0,
            clients: HashMap::new(),
            channels: BTreeMap::new(),
            requests: HashMap::new(),
            spools: BTreeMap::new(),
            next_channel: 1,
            next_request: 1,
            next_client: 1,
            resyncs: 0,
            last_loss: Instant::now(),
            execs,
            room: Room::default(),
            restored_execs: None,
            restored,
            held: None,
            awaits_admission: false,
            conditions: Conditions { gate, mounts },
            activity: Activity::default(),
            census,
            status,
            inputs: inputs.downgrade(),
        }
    }

    pub async fn run(mut self, mut queue: mpsc::Receiver<Input>) {
        self.inherit().await;
        loop {
            self.count();
            tokio::select! {
                () = released(self.held.as_mut()) => self.held = None,
                turn = self.agent.turn(&mut self.channels), if self.held.is_none() => match turn {
                    Ok(count) => {
                        self.agent.take_in(count);
                        self.listen();
                    }
                    // The machine is gone. The driver knows the reason, and closes the hub with it.
                    Err(_) => self.agent.lost_port(),
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
            Input::Spooled {
                tag,
                stream,
                length,
            } => self.spooled(&tag, stream, length),
            Input::Expire { tag } => self.expire(&tag),
            // The task that asked may have stopped waiting.
            Input::List(reply) => drop(reply.send(self.list())),
            // As above.
            Input::Record(reply) => drop(reply.send(self.record())),
            Input::Resync => self.greet(),
            Input::Hold { done, released } => {
                self.held = Some(released);
                report_done(done);
            }
            Input::Suspend { reason, done } => {
                self.suspend(&reason);
                report_done(done);
            }
            Input::GoOn { port, done } => {
                self.continue_with(port);
                report_done(done);
            }
            Input::Admit => self.admit(),
            Input::GiveUp { reason } => self.give_up(Closed::ended(reason)),
            Input::Close { .. } => unreachable!("closing is handled by the loop"),
        }
    }

    /// Takes over the kept output of the commands that a restored guest may run.
    async fn inherit(&mut self) {
        let Some(Restored { records, from }) = self.restored.take() else {
            return;
        };
        let execs = self.execs.clone();
        let inherited =
            tokio::task::spawn_blocking(move || record::inherit(records, &from, &execs));
        self.restored_execs = Some(inherited.await.expect("inheriting does not panic"));
    }

    /// Updates the public counts of clients and work.
    fn count(&mut self) {
        let busy = self
            .channels
            .values()
            .any(|slot| !slot.ended && slot.kind.changes_the_guest());
        // An end counts as well: the work has changed something until then.
        self.activity.count += u64::from(busy != self.activity.busy);
        self.activity.busy = busy;
        let clients = self
            .clients
            .values()
            .filter(|client| !client.channels.is_empty())
            .count();
        let census = Census {
            clients,
            activity: self.activity,
        };
        self.census
            .send_if_modified(|seen| std::mem::replace(seen, census) != census);
    }

    fn list(&self) -> Vec<ExecEntry> {
        let mut listed = 0;
        let entry = |(id, spool): (&String, &Spool)| {
            let mut entry = spool.entry(id);
            listed += entry.details.size();
            if listed > LISTED_MAX {
                entry.details.config = None;
            }
            entry
        };
        self.spools.iter().map(entry).collect()
    }

    /// Every command of this hub; those of clients while they run.
    fn record(&self) -> Vec<Recorded> {
        let spools = self.spools.iter().map(|(tag, spool)| {
            let kept = KeptOutput {
                dir: spool.dir.clone(),
                rolled: spool.roll(),
                progress: spool.progress.clone(),
            };
            Recorded {
                record: spool.record(tag),
                kept: Some(kept),
            }
        });
        let clients = self
            .channels
            .values()
            .filter_map(|slot| match (&slot.owner, &slot.kind) {
                (Owner::Client { .. }, Kind::Exec(exec)) if !slot.ended => {
                    let tag = exec.tag.clone();
                    let command = exec.command.clone();
                    let window = slot.window as u32;
                    let out = Vec::new();
                    let err = Vec::new();
                    let record = ExecRecord {
                        tag,
                        command,
                        pid: slot.pid,
                        ended: None,
                        window,
                        out,
                        err,
                        details: exec.details.clone(),
                    };
                    Some(Recorded { record, kept: None })
                }
                _ => None,
            });
        spools.chain(clients).collect()
    }

    /// The guest is stopped, and its port closes. Commands and files wait; connections are lost,
    /// because their other ends would not wait.
    fn suspend(&mut self, reason: &str) {
        let closed = Closed::ended(reason);
        self.agent.suspend();
        self.void_requests(&closed);
        let connections: Vec<u32> = self
            .channels
            .iter()
            .filter(|(_, slot)| slot.kind == Kind::Connect)
            .map(|(id, _)| *id)
            .collect();
        for id in connections {
            self.lose(id, &closed);
        }
        if self.closed().is_none() {
            self.status.send_replace(Status::Greeting);
        }
    }

    /// The guest continues behind another port.
    fn continue_with(&mut self, port: UnixStream) {
        if self.closed().is_some() {
            return;
        }
        self.resyncs = 0;
        self.awaits_admission = true;
        self.status.send_replace(Status::Greeting);
        self.agent.reconnect(port);
    }

    /// Sends every open that waits.
    fn admit(&mut self) {
        self.awaits_admission = false;
        // An agent that is not up gets them with its greeting.
        if !self.agent.is_up() {
            return;
        }
        for slot in self.channels.values_mut().filter(|slot| slot.waits) {
            slot.waits = false;
            if let Some(opening) = &slot.opening {
                self.agent.send_frame(opening.clone());
            }
            let behind = slot.behind.drain(..);
            behind.for_each(|frame| self.agent.send_frame(frame));
        }
    }

    /// Ends when every client has read the reason, because the process may end right afterwards.
    async fn close(mut self, reason: String, done: oneshot::Sender<()>) {
        let closed = Closed::ended(reason);
        self.tell_all_lost(&closed);
        self.status.send_replace(Status::Closed(closed));
        let farewell = async {
            for client in self.clients.values() {
                client.sender.flush().await;
            }
        };
        if tokio::time::timeout(FAREWELL, farewell).await.is_err() {
            tracing::warn!("a client does not read that its sandbox ended");
        }
        report_done(done);
    }

    pub(super) fn tell_all_lost(&mut self, closed: &Closed) {
        for (_, slot) in std::mem::take(&mut self.channels) {
            if !slot.ended {
                self.tell_lost(&slot.owner, closed);
            }
        }
        self.cut_attachments(&closed.outcome());
        self.void_requests(closed);
    }

    pub(super) fn void_requests(&mut self, closed: &Closed) {
        for (_, (client, id)) in std::mem::take(&mut self.requests) {
            self.tell(
                client,
                &AgentMessage::Reply {
                    id,
                    reply: Err(closed.failure()),
                },
            );
        }
    }

    /// Why the agent accepts no requests, if it accepts none.
    pub(super) fn closed(&self) -> Option<Closed> {
        match &*self.status.borrow() {
            Status::Closed(closed) => Some(closed.clone()),
            Status::Greeting | Status::Up => None,
        }
    }

    /// Attachments end with the switch, and might not send their end themselves.
    fn cut_attachments(&self, lost: &Outcome) {
        let runs = |tag: &str| self.spools.get(tag).is_some_and(|spool| !spool.has_ended());
        for client in self.clients.values() {
            for (channel, target) in &client.channels {
                if matches!(target, Target::Attached { tag, .. } if runs(tag)) {
                    // A client that does not read sees the end of its connection.
                    let _kept_up = client.sender.ended(*channel, lost.clone());
                }
            }
        }
    }

    pub(super) fn send_agent(&mut self, message: &HostMessage) {
        self.agent
            .send(message)
            .expect("what the hub says by itself is short");
    }

    pub(super) fn spool(&self, tag: &str, input: SpoolInput) {
        if let Some(spool) = self.spools.get(tag) {
            spool.push(input);
        }
    }

    pub(super) fn tell(&mut self, client: ClientId, message: &AgentMessage) {
        let kept_up = self
            .clients
            .get(&client)
            .is_none_or(|c| c.sender.tell(message));
        if !kept_up {
            self.drop_client(client);
        }
    }

    pub(super) fn forward(&mut self, client: ClientId, frame: &Frame) {
        let kept_up = self
            .clients
            .get(&client)
            .is_none_or(|c| c.sender.send(frame));
        if !kept_up {
            self.drop_client(client);
        }
    }
}

/// Reports to the task that asked, which may have stopped waiting.
fn report_done(done: oneshot::Sender<()>) {
    if done.send(()).is_err() {
        tracing::trace!("the task that asked is gone");
    }
}

/// Waits until the hub is released; without end if nothing holds it.
async fn released(held: Option<&mut oneshot::Receiver<Infallible>>) {
    match held {
        // An error means that the other end was dropped, which is the release.
        Some(held) => drop(held.await),
        None => std::future::pending().await,
    }
}
