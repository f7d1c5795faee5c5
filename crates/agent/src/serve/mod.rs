//! The loop: one thread owns the port, every channel and every stream buffer.
//!
//! ```text
//!   receive -> collect -> tick -> settle -> send -> wait -> move streams, handle signals -> receive …
//! ```
//!
//! Always: nothing in the loop blocks. Work that waits for a disk runs in [`Workers`], and every
//! stream is a non-blocking descriptor. The windows of the channels bound the buffers, and
//! [`CHANNELS_MAX`] bounds the number of channels.

mod dispatch;
mod wait;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::WaitOptions;
use sandtree_proto::{AgentMessage, Frame, StreamId};

use crate::cgroup::Family;
use crate::channel::{Channel, Remains};
use crate::exec::spawn::{Defaults, spawn_on};
use crate::freeze::Freezer;
use crate::held::{Piece, Spares};
use crate::hooks::{ChildExit, HookDir};
use crate::identity::Means;
use crate::init::shutdown::Way;
use crate::init::{Hold, Settling};
use crate::link::Link;
use crate::mounts::Mounts;
use crate::role::Role;
use crate::screen::Screen;
use crate::sys;
use crate::workers::{Finished, Start, Workers};

/// The hello, which lists all channels, must fit one frame.
const CHANNELS_MAX: usize = 320;
/// How many frames are received, or pieces sent, before the loop does its other work.
const TURN: usize = 64;
/// How long the host has to read the queue, with the reply to its request, before the guest shuts
/// down anyway.
const FLUSH_WITHIN: Duration = Duration::from_secs(5);
/// The grace time of processes when the guest itself asks for its end.
const OWN_GRACE: Duration = Duration::from_secs(5);

/// The signals that the agent handles. `poweroff`, `halt` and `reboot` send signals to init.
pub fn handled_signals(role: Role) -> &'static [i32] {
    match role {
        Role::Init => &[
            libc::SIGCHLD,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGTERM,
            libc::SIGINT,
        ],
        Role::UnderInit | Role::Guestless => &[libc::SIGCHLD],
    }
}

/// The meaning of a signal in busybox and System V. SIGINT is Ctrl-Alt-Del.
fn way_of(signal: i32) -> Option<Way> {
    match signal {
        libc::SIGUSR1 | libc::SIGUSR2 => Some(Way::PowerOff),
        libc::SIGTERM | libc::SIGINT => Some(Way::Restart),
        _ => None,
    }
}

/// Why the loop ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    Shutdown {
        way: Way,
        grace: Duration,
    },
    /// The socket's other end is closed. A virtio port may return and never ends the loop.
    HostGone,
}

/// Where the agent runs, and its resources there.
#[derive(Debug)]
pub struct Place {
    pub role: Role,
    pub defaults: Defaults,
    pub settling: Settling,
    /// The directory of the hooks that a restore runs.
    pub hooks: Option<HookDir>,
    /// Delays the start of the image's init until the guest has its identity.
    pub hold: Option<Hold>,
}

#[derive(Debug)]
pub struct Agent {
    place: Place,
    link: Link,
    channels: BTreeMap<u32, Channel>,
    /// The last channel that sent, for a fair order.
    cursor: u32,
    workers: Workers,
    freezer: Arc<Freezer>,
    mounts: Arc<Mounts>,
    screen: Screen,
    means: Arc<Means>,
    /// Threads that wait for children of their own, because only the loop reaps children.
    exit_waiters: Vec<Sender<ChildExit>>,
    /// Readable when a child has ended, or a signal asks init to shut down.
    signals: OwnedFd,
    /// Processes of commands that have ended; some outlive them.
    families: Vec<Family>,
    /// Whether those that are gone are removed, and the next command has its cgroup.
    is_tidy: bool,
    /// Streams of such processes: read and dropped, because a closed stream would kill its writer.
    discarded: Vec<OwnedFd>,
    spares: Spares,
    /// Whether the host has sent more than one turn receives.
    has_more_input: bool,
    leaving: Option<Leaving>,
}

/// The shutdown of the guest has been decided. Streams stop from here on, so that the queue can
/// empty.
#[derive(Debug, Clone, Copy)]
struct Leaving {
    way: Way,
    grace: Duration,
    at_latest: Instant,
}

impl Leaving {
    fn new(way: Way, grace: Duration) -> Self {
        Self {
            way,
            grace,
            at_latest: Instant::now() + FLUSH_WITHIN,
        }
    }
}

impl Agent {
    pub fn new(place: Place, link: Link, signals: OwnedFd) -> rustix::io::Result<Self> {
        Ok(Self {
            means: Arc::new(Means::new(place.role)),
            place,
            link,
            channels: BTreeMap::new(),
            cursor: 0,
            workers: Workers::new()?,
            freezer: Arc::default(),
            mounts: Arc::default(),
            screen: Screen::new()?,
            exit_waiters: Vec::new(),
            signals,
            families: Vec::new(),
            is_tidy: false,
            discarded: Vec::new(),
            spares: Spares::default(),
            has_more_input: false,
            leaving: None,
        })
    }

    pub fn serve(mut self) -> rustix::io::Result<End> {
        loop {
            self.receive();
            self.collect();
            self.tick();
            self.settle();
            let unsent = self.send();
            self.screen.release_if_due();
            self.tidy();
            if let Some(end) = self.end() {
                return Ok(end);
            }
            self.wait(unsent || self.has_more_input)?;
        }
    }

    fn receive(&mut self) {
        self.has_more_input = self.receive_some();
        for channel in self.channels.values_mut() {
            channel.input.announce();
        }
    }

    /// Returns whether there may be more than one turn receives.
    fn receive_some(&mut self) -> bool {
        for _ in 0..TURN {
            let Some(event) = self.link.next() else {
                return false;
            };
            self.dispatch(event);
        }
        true
    }

    fn handle_signals(&mut self) {
        let asked = sys::received_signals(&self.signals)
            .into_iter()
            .find_map(way_of);
        self.leaving = self
            .leaving
            .or_else(|| asked.map(|way| Leaving::new(way, OWN_GRACE)));
        // Signals are merged, so `wait` finds how many children have ended.
        self.reap();
    }

    /// Reaps every child that has ended, commands and orphans alike.
    fn reap(&mut self) {
        self.is_tidy = false;
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            match self.channels.values_mut().find(|channel| channel.runs(pid)) {
                Some(channel) => channel.exited(status),
                // A thread that has ended closes its channel, and is removed from the list.
                None => self
                    .exit_waiters
                    .retain(|waiter| waiter.send(ChildExit { pid, status }).is_ok()),
            }
        }
    }

    /// Removes the cgroups of commands that are gone, and makes that of the next command. No answer
    /// waits for this.
    fn tidy(&mut self) {
        if std::mem::replace(&mut self.is_tidy, true) {
            return;
        }
        for family in self.families.extract_if(.., |family| family.is_gone()) {
            family.remove();
        }
        self.place.defaults.cgroups.prepare();
    }

    /// Handles the results of threads.
    fn collect(&mut self) {
        let mut left = Vec::new();
        for finished in self.workers.take_finished() {
            match finished {
                Finished::Channel {
                    channel,
                    ticket,
                    result,
                } => {
                    if let Some(channel) = self.channels.get_mut(&channel) {
                        channel.finished(ticket, result);
                    }
                }
                Finished::Start(Start {
                    start,
                    streams,
                    started,
                }) => {
                    let answer = spawn_on(&self.place.defaults, &start, streams);
                    // If the thread has ended, the loop takes over its command.
                    left.extend(
                        started
                            .send(answer)
                            .err()
                            .and_then(|unsent| unsent.0.ok())
                            .map(|(_, family)| family),
                    );
                }
                Finished::Left(family) => left.push(family),
                Finished::Request {
                    id,
                    generation,
                    reply,
                } if generation == self.link.generation() => {
                    self.link.send(&AgentMessage::Reply { id, reply });
                }
                // The host that asked is gone, and the next one did not ask.
                Finished::Request { .. } => {}
            }
        }
        for family in left {
            self.look_after(Remains {
                family: Some(family),
                ..Remains::default()
            });
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        for channel in self.channels.values_mut() {
            channel.tick(now, &mut self.spares);
        }
    }

    /// Ends channels that are done, and reports their outcomes. A host that is away gets them in
    /// the next hello.
    fn settle(&mut self) {
        let mut left = Vec::new();
        for (&number, channel) in &mut self.channels {
            if let Some(remains) = channel.settle() {
                left.push(remains);
            }
            if let Some(outcome) = channel.take_outcome().filter(|_| self.link.is_open()) {
                self.link.send(&AgentMessage::Ended {
                    channel: number,
                    outcome,
                });
            }
        }
        for remains in left {
            self.look_after(remains);
        }
    }

    fn look_after(&mut self, remains: Remains) {
        self.discarded.extend(remains.pipes);
        self.families.extend(remains.family);
        self.is_tidy = false;
    }

    /// Sends until the port is full or nothing is left. Returns true if neither happened in this
    /// turn.
    fn send(&mut self) -> bool {
        for _ in 0..TURN {
            let more = self.fill();
            let flushed = self.link.flush();
            if !more || !flushed {
                return false;
            }
        }
        true
    }

    /// Queues stream data while there is room, one piece of each channel in turn. Returns true if
    /// the room was not enough.
    fn fill(&mut self) -> bool {
        if self.leaving.is_some() {
            return false;
        }
        self.send_windows();
        let mut numbers: Vec<u32> = self.channels.keys().copied().collect();
        let first = numbers.partition_point(|&number| number <= self.cursor);
        numbers.rotate_left(first);
        let mut sent = true;
        while sent {
            sent = false;
            for &number in &numbers {
                if !self.link.has_room() {
                    return self.link.is_open();
                }
                let channel = self
                    .channels
                    .get_mut(&number)
                    .expect("the numbers are those of the channels");
                if channel.flowing && send_piece(&mut self.link, number, channel) {
                    sent = true;
                    self.cursor = number;
                }
            }
        }
        false
    }

    fn send_windows(&mut self) {
        if !self.link.is_open() {
            return;
        }
        for (&channel, state) in self.channels.iter_mut().filter(|(_, state)| state.flowing) {
            if let Some(consumed) = state.input.take_window() {
                self.link.send_frame(&Frame::Window {
                    channel,
                    stream: StreamId::In,
                    consumed,
                });
            }
        }
    }

    fn end(&mut self) -> Option<End> {
        if let Some(Leaving {
            way,
            grace,
            at_latest,
        }) = self.leaving
            && (self.link.flush() || at_latest <= Instant::now())
        {
            return Some(End::Shutdown { way, grace });
        }
        (self.place.role == Role::Guestless && self.link.is_away()).then_some(End::HostGone)
    }
}

/// Sends one piece of each of the channel's streams, and their ends. Returns false if there was
/// none.
fn send_piece(link: &mut Link, number: u32, channel: &mut Channel) -> bool {
    let mut sent = false;
    for (id, output) in [
        (StreamId::Out, &mut channel.out),
        (StreamId::Err, &mut channel.err),
    ] {
        match output.stream().take(number, id) {
            Some(Piece::Frame(frame)) => {
                link.send_encoded(frame);
                sent = true;
            }
            Some(Piece::Bytes { offset, bytes }) => {
                link.send_data(number, id, offset, bytes);
                sent = true;
            }
            None => {}
        }
        if let Some(offset) = output.stream().take_end() {
            link.send_frame(&Frame::Eof {
                channel: number,
                stream: id,
                offset,
            });
            sent = true;
        }
    }
    sent
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::os::unix::net::UnixStream;

    use rustix::process::{Resource, getrlimit};
    use sandtree_proto::{MAX_PAYLOAD, Outcome};

    use super::*;
    use crate::cgroup::Cgroups;

    /// An agent that acts as in a guest, and the host's end of its port.
    fn agent() -> (Agent, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let signals = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let defaults = Defaults {
            cgroups: Cgroups::absent(),
            open_files: getrlimit(Resource::Nofile),
        };
        let role = Role::UnderInit;
        let settling = Settling::default();
        let place = Place {
            role,
            defaults,
            settling,
            hooks: None,
            hold: None,
        };
        let agent = Agent::new(place, Link::new(theirs.into()).unwrap(), signals).unwrap();
        (agent, ours)
    }

    #[test]
    fn streams_stop_when_the_guest_shuts_down() {
        let (mut agent, mut host) = agent();
        agent.link.open();
        agent
            .channels
            .insert(1, Channel::failed(String::new(), Outcome::Done));
        agent.leaving = Some(Leaving::new(Way::PowerOff, OWN_GRACE));
        assert!(!agent.send());
        assert_eq!(
            agent.end(),
            Some(End::Shutdown {
                way: Way::PowerOff,
                grace: OWN_GRACE
            })
        );
        host.set_nonblocking(true).unwrap();
        assert_eq!(
            host.read(&mut [0]).unwrap_err().kind(),
            ErrorKind::WouldBlock
        );
    }

    #[test]
    fn a_host_that_reads_nothing_does_not_delay_the_shutdown() {
        let (mut agent, _host) = agent();
        (0..64).for_each(|_| agent.link.send_data(1, StreamId::Out, 0, &[0; MAX_PAYLOAD]));
        agent.leaving = Some(Leaving {
            way: Way::Restart,
            grace: OWN_GRACE,
            at_latest: Instant::now(),
        });
        assert_eq!(
            agent.end(),
            Some(End::Shutdown {
                way: Way::Restart,
                grace: OWN_GRACE
            })
        );
    }
}
