//! The link: one port, whose input is split into frames and whose output is collected into large
//! writes.
//!
//! ```text
//!   Hunting --preamble--> Greeting --Hello--> Open
//!      ^                     |                 |      a preamble in any state starts over;
//!      \--- bytes that make no sense ----------/      channels live on, queued output does not
//! ```
//!
//! Always: the port is opened once and never closed, because the host's data would be lost in
//! between. Its readiness is edge-triggered: while the host is away, the port reports a hang-up all
//! the time, and only an edge shows its return. At most [`QUEUE_LIMIT`] bytes of stream data are
//! queued; while twice that is queued, nothing is read either.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;
use sandtree_proto::frame::{self, Decoded, Decoder, Frame};
use sandtree_proto::message::{self, AgentMessage, HostMessage, MessageError};
use sandtree_proto::{Nonce, Outcome, StreamId};

use crate::console;
use crate::failure::refusal;

const QUEUE_LIMIT: usize = 256 * 1024;
const READ_SIZE: usize = 128 * 1024;
/// The most reads in a row for one frame; the largest frame takes seventeen pages.
const READS: usize = 32;

#[derive(Debug)]
pub struct Link {
    port: OwnedFd,
    edges: OwnedFd,
    readable: bool,
    writable: bool,
    away: bool,
    state: State,
    generation: u64,
    decoder: Decoder,
    queue: Queue,
    scratch: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Hunting,
    Greeting,
    Open,
}

#[derive(Debug)]
pub enum Event {
    /// The host starts again: data that was sent and not resumed is void.
    Restarted,
    Message(HostMessage),
    Data {
        channel: u32,
        stream: StreamId,
        offset: u64,
        bytes: Vec<u8>,
    },
    Eof {
        channel: u32,
        stream: StreamId,
        offset: u64,
    },
    Window {
        channel: u32,
        stream: StreamId,
        consumed: u64,
    },
}

impl Link {
    pub fn new(port: OwnedFd) -> rustix::io::Result<Self> {
        rustix::io::ioctl_fionbio(&port, true)?;
        let edges = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let both = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&edges, &port, epoll::EventData::new_u64(0), both)?;
        Ok(Self {
            port,
            edges,
            readable: true,
            writable: true,
            away: false,
            state: State::Hunting,
            generation: 0,
            decoder: Decoder::new(),
            queue: Queue::default(),
            scratch: vec![0; READ_SIZE],
        })
    }

    /// Readable when [`absorb_edges`](Self::absorb_edges) has an event.
    pub fn edges(&self) -> BorrowedFd<'_> {
        self.edges.as_fd()
    }

    /// Reads the events of the port since the last call.
    pub fn absorb_edges(&mut self) -> rustix::io::Result<()> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        let zero = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let count = match epoll::wait(&self.edges, events.as_mut_slice(), Some(&zero)) {
            Err(Errno::INTR) => 0,
            other => other?,
        };
        for event in &events[..count] {
            let flags = event.flags;
            self.readable |= !(flags & !epoll::EventFlags::OUT).is_empty();
            self.writable |= flags.contains(epoll::EventFlags::OUT);
        }
        Ok(())
    }

    /// Checks the port again without an edge.
    pub fn look_again(&mut self) {
        self.readable = true;
        self.writable = true;
    }

    /// The host's end is closed; on a virtio port it may return.
    pub fn is_away(&self) -> bool {
        self.away
    }

    pub fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Whether work is left that no descriptor announces.
    pub fn is_busy(&self) -> bool {
        self.may_read() || (self.writable && !self.queue.is_empty())
    }

    /// The number of preambles: a reply belongs to the generation of its request.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The next event from the host. Reads until a frame is complete: the port returns a page at a
    /// time, and a turn of the loop for each page would cost more than the page.
    pub fn next(&mut self) -> Option<Event> {
        let mut event = self.decode();
        for _ in 0..READS {
            if event.is_some() || !self.may_read() || !self.read() {
                break;
            }
            event = self.decode();
        }
        event
    }

    fn may_read(&self) -> bool {
        self.readable && self.queue.len() < 2 * QUEUE_LIMIT
    }

    fn read(&mut self) -> bool {
        match rustix::io::read(&self.port, &mut self.scratch[..]) {
            Ok(0) => {
                self.readable = false;
                self.away = true;
                false
            }
            Ok(count) => {
                self.away = false;
                self.decoder.feed(&self.scratch[..count]);
                true
            }
            Err(Errno::INTR) => false,
            Err(Errno::AGAIN) => {
                self.readable = false;
                self.away = false;
                false
            }
            Err(error) => {
                self.lose(format_args!("cannot read the port: {error}"));
                false
            }
        }
    }

    fn decode(&mut self) -> Option<Event> {
        loop {
            match self.decoder.next()? {
                Ok(Decoded::Preamble(nonce)) => return Some(self.restart(nonce)),
                Ok(Decoded::Frame(frame)) => {
                    if let Some(event) = self.event(frame) {
                        return Some(event);
                    }
                }
                Err(_) => self.state = State::Hunting,
            }
        }
    }

    fn restart(&mut self, nonce: Nonce) -> Event {
        self.generation += 1;
        self.state = State::Greeting;
        self.queue.clear();
        frame::encode_preamble(self.queue.tail(), nonce);
        Event::Restarted
    }

    fn event(&mut self, frame: Frame) -> Option<Event> {
        let event = match frame {
            Frame::Message(bytes) => match message::from_bytes(&bytes) {
                Ok(message) => Event::Message(message),
                Err(error) => {
                    self.fault(error);
                    return None;
                }
            },
            Frame::Data {
                channel,
                stream,
                offset,
                bytes,
            } => Event::Data {
                channel,
                stream,
                offset,
                bytes,
            },
            Frame::Eof {
                channel,
                stream,
                offset,
            } => Event::Eof {
                channel,
                stream,
                offset,
            },
            Frame::Window {
                channel,
                stream,
                consumed,
            } => Event::Window {
                channel,
                stream,
                consumed,
            },
        };
        match (&event, self.state) {
            (Event::Message(HostMessage::Hello(_)), State::Greeting) | (_, State::Open) => {
                Some(event)
            }
            _ => {
                self.fault("a frame before the hello");
                None
            }
        }
    }

    /// The hello was answered; streams may flow.
    pub fn open(&mut self) {
        self.state = State::Open;
    }

    /// The host has broken the protocol: everything is ignored until its next preamble.
    pub fn fault(&mut self, reason: impl std::fmt::Display) {
        console::say(format_args!("link: {reason}"));
        self.decoder.resync();
        self.state = State::Hunting;
    }

    fn lose(&mut self, reason: std::fmt::Arguments<'_>) {
        console::say(reason);
        self.readable = false;
        self.writable = false;
        self.away = true;
    }

    /// Queues a message. Without a listening host the message is dropped; the next hello repeats
    /// what matters.
    pub fn send(&mut self, message: &AgentMessage) {
        if self.state == State::Hunting {
            return;
        }
        match framed(message) {
            Ok(frame) => frame.encode(self.queue.tail()),
            Err(error) => console::say(format_args!("cannot send: {error}")),
        }
    }

    pub fn send_frame(&mut self, frame: &Frame) {
        frame.encode(self.queue.tail());
    }

    pub fn send_data(&mut self, channel: u32, stream: StreamId, offset: u64, bytes: &[u8]) {
        frame::encode_data(self.queue.tail(), channel, stream, offset, bytes);
    }

    /// Whether another piece of stream data may be queued.
    pub fn has_room(&self) -> bool {
        self.is_open() && self.queue.len() < QUEUE_LIMIT
    }

    /// Writes as much as the port accepts now. Returns true if the queue is empty.
    pub fn flush(&mut self) -> bool {
        while self.writable && !self.queue.is_empty() {
            match rustix::io::write(&self.port, self.queue.pending()) {
                Ok(count) => self.queue.advance(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(error) => self.lose(format_args!("cannot write the port: {error}")),
            }
        }
        self.queue.is_empty()
    }
}

/// A message as a frame. A caller waits for every reply, so a reply that does not fit is replaced
/// by a short one.
fn framed(message: &AgentMessage) -> Result<Frame, MessageError> {
    message::to_frame(message).or_else(|error| match substitute(message) {
        Some(short) => message::to_frame(&short),
        None => Err(error),
    })
}

fn substitute(message: &AgentMessage) -> Option<AgentMessage> {
    let failure = refusal(Errno::MSGSIZE, "the guest's answer does not fit one frame");
    match message {
        AgentMessage::Ended {
            channel,
            outcome: Outcome::NotStarted(_),
        } => Some(AgentMessage::Ended {
            channel: *channel,
            outcome: Outcome::NotStarted(failure),
        }),
        AgentMessage::Ended { channel, .. } => Some(AgentMessage::Ended {
            channel: *channel,
            outcome: Outcome::Failed(failure),
        }),
        AgentMessage::Reply { id, .. } => Some(AgentMessage::Reply {
            id: *id,
            reply: Err(failure),
        }),
        AgentMessage::Hello(_) | AgentMessage::Started { .. } => None,
    }
}

/// Bytes for the port.
#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    start: usize,
}

impl Queue {
    fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn pending(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.start = 0;
    }

    fn advance(&mut self, count: usize) {
        self.start += count;
        if self.is_empty() {
            self.clear();
        }
    }

    /// The end of the queue, to which frames are appended. The rest moves to the front only when it
    /// is the smaller part.
    fn tail(&mut self) -> &mut Vec<u8> {
        if self.start > self.len() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        &mut self.bytes
    }
}

#[cfg(test)]
mod tests {
    use sandtree_proto::Failure;

    use super::*;

    fn arrives(message: &AgentMessage) -> AgentMessage {
        let Frame::Message(bytes) = framed(message).unwrap() else {
            panic!("a message is framed as one")
        };
        message::from_bytes(&bytes).unwrap()
    }

    #[test]
    fn a_reply_that_does_not_fit_is_replaced_by_a_short_one() {
        let long = Failure {
            errno: libc::ENOENT,
            message: "x".repeat(frame::MAX_PAYLOAD),
        };
        let ended = AgentMessage::Ended {
            channel: 7,
            outcome: Outcome::NotStarted(long.clone()),
        };
        let received = arrives(&ended);
        assert!(
            matches!(
                received,
                AgentMessage::Ended {
                    channel: 7,
                    outcome: Outcome::NotStarted(_)
                }
            ),
            "{received:?}"
        );
        let received = arrives(&AgentMessage::Reply {
            id: 3,
            reply: Err(long),
        });
        let AgentMessage::Reply {
            id: 3,
            reply: Err(failure),
        } = received
        else {
            panic!("{received:?}")
        };
        assert_eq!(failure.errno, libc::EMSGSIZE);
    }
}
