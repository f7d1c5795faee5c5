//! The loop: one thread owns the port, every channel and every stream buffer.
//!
//! ```text
//!   receive -> reap -> collect -> tick -> settle -> send -> wait -> move streams -> receive …
//! ```
//!
//! Always: nothing in the loop blocks. What waits for a disk runs in [`Workers`], and every stream
//! is a non-blocking descriptor. Buffers are bounded by the windows of the channels, and their
//! number by [`CHANNELS_MAX`].

mod dispatch;
mod wait;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::process::WaitOptions;
use sandtree_proto::{AgentMessage, Frame, MAX_PAYLOAD, StreamId};

use crate::cgroup::Family;
use crate::channel::{Channel, Remains};
use crate::exec::spawn::{Ground, spawn_on};
use crate::freeze::Freezer;
use crate::hooks::{Death, HookDir};
use crate::identity::Means;
use crate::init::shutdown::Way;
use crate::init::{Hold, Settling};
use crate::link::Link;
use crate::role::Role;
use crate::sys;
use crate::workers::{Finished, Start, Workers};

/// So many that the hello, which lists them all, fits one frame.
const CHANNELS_MAX: usize = 320;
const SCRATCH_SIZE: usize = 256 * 1024;
/// Frames taken in, and pieces sent out, before the other side of the loop has its turn.
const TURN: usize = 64;
/// How long the host has to take what is queued, the answer to its request among it, before the
/// guest leaves without.
const FAREWELL: Duration = Duration::from_secs(5);
/// What processes get to end when the guest itself asks for its end.
const OWN_GRACE: Duration = Duration::from_secs(5);

/// The signals that mean something to the agent. Init is asked to leave by signal, as `poweroff`,
/// `halt` and `reboot` do.
pub fn heard_by(role: Role) -> &'static [i32] {
    match role {
        Role::Init => &[
            libc::SIGCHLD,
            libc::SIGUSR1,
            libc::SIGUSR2,
            libc::SIGTERM,
            libc::SIGINT,
        ],
        Role::BesideInit | Role::Guestless => &[libc::SIGCHLD],
    }
}

/// What busybox and System V mean by it. SIGINT is Ctrl-Alt-Del.
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
    /// The socket's other end is closed. A virtio port comes back and never ends the loop.
    HostGone,
}

/// Where the agent runs, and what it has there.
#[derive(Debug)]
pub struct Place {
    pub role: Role,
    pub ground: Ground,
    pub settling: Settling,
    /// The directory of what a restore runs.
    pub hooks: Option<HookDir>,
    /// Lets the image's init start, once the guest knows who it is.
    pub hold: Option<Hold>,
}

#[derive(Debug)]
pub struct Agent {
    place: Place,
    link: Link,
    channels: BTreeMap<u32, Channel>,
    /// The last channel that sent, for taking turns.
    cursor: u32,
    workers: Workers,
    freezer: Arc<Freezer>,
    means: Arc<Means>,
    /// Threads that wait for children of their own: the loop takes every child's status.
    mourners: Vec<Sender<Death>>,
    /// Readable when a child has ended, or init is asked to leave.
    signals: OwnedFd,
    /// What lives on of commands that have ended.
    families: Vec<Family>,
    /// Streams of such: read and dropped, for a closed one would kill the writer.
    spilled: Vec<OwnedFd>,
    scratch: Vec<u8>,
    /// The host has said more than one turn takes in.
    unheard: bool,
    leaving: Option<Leaving>,
}

/// The guest's end, decided upon. Streams stand still from here on, so that what is queued can run
/// dry.
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
            at_latest: Instant::now() + FAREWELL,
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
            mourners: Vec::new(),
            signals,
            families: Vec::new(),
            spilled: Vec::new(),
            scratch: vec![0; SCRATCH_SIZE],
            unheard: false,
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
            if let Some(end) = self.end() {
                return Ok(end);
            }
            self.wait(unsent || self.unheard)?;
        }
    }

    fn receive(&mut self) {
        for _ in 0..TURN {
            let Some(event) = self.link.next() else {
                self.unheard = false;
                return;
            };
            self.dispatch(event);
        }
        self.unheard = true;
    }

    fn hear(&mut self) {
        let asked = sys::heard_signals(&self.signals)
            .into_iter()
            .find_map(way_of);
        self.leaving = self
            .leaving
            .or_else(|| asked.map(|way| Leaving::new(way, OWN_GRACE)));
        // How many children ended is for `wait` to say.
        self.reap();
    }

    /// Takes the status of every child that has ended, commands and orphans alike.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            match self.channels.values_mut().find(|channel| channel.runs(pid)) {
                Some(channel) => channel.exited(status),
                // One that has ended does not hear it, and is forgotten.
                None => self
                    .mourners
                    .retain(|mourner| mourner.send(Death { pid, status }).is_ok()),
            }
        }
        for family in self.families.extract_if(.., |family| family.is_gone()) {
            family.bury();
        }
    }

    /// Takes what the threads have done.
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
                    let answer = spawn_on(&self.place.ground, &start, streams);
                    // One that does not wait any more has its command looked after.
                    left.extend(
                        started
                            .send(answer)
                            .err()
                            .and_then(|unheard| unheard.0.ok())
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
                // Its host is gone; the next one did not ask.
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
            channel.tick(now, &mut self.scratch);
        }
    }

    /// Ends what is done, and says how. A host that is away reads it in the next hello.
    fn settle(&mut self) {
        let mut left = Vec::new();
        for (&number, channel) in &mut self.channels {
            if let Some(remains) = channel.settle() {
                left.push(remains);
            }
            if let Some(outcome) = channel.take_news().filter(|_| self.link.is_open()) {
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
        self.spilled.extend(remains.pipes);
        match remains.family {
            Some(family) if family.is_gone() => family.bury(),
            Some(family) => self.families.push(family),
            None => {}
        }
    }

    /// Sends until the port is full or nothing is left. True if neither was reached in this turn.
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

    /// Queues stream data while there is room, one piece of each channel in turn. True if it
    /// stopped for want of room.
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

/// One piece of each of the channel's streams, and their ends. False if there was none.
fn send_piece(link: &mut Link, number: u32, channel: &mut Channel) -> bool {
    let mut sent = false;
    for (id, output) in [
        (StreamId::Out, &mut channel.out),
        (StreamId::Err, &mut channel.err),
    ] {
        if let Some((offset, bytes)) = output.stream().take_slice(MAX_PAYLOAD) {
            link.send_data(number, id, offset, bytes);
            sent = true;
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
    use sandtree_proto::Outcome;

    use super::*;
    use crate::cgroup::Cgroups;

    /// An agent in a guest, as far as it can tell, and the host's end of its port.
    fn agent() -> (Agent, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let signals = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let ground = Ground {
            cgroups: Cgroups::absent(),
            open_files: getrlimit(Resource::Nofile),
        };
        let (role, settling) = (Role::BesideInit, Settling::default());
        let place = Place {
            role,
            ground,
            settling,
            hooks: None,
            hold: None,
        };
        let agent = Agent::new(place, Link::new(theirs.into()).unwrap(), signals).unwrap();
        (agent, ours)
    }

    #[test]
    fn streams_stand_still_when_the_guest_leaves() {
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
    fn a_host_that_takes_nothing_does_not_keep_the_guest() {
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
