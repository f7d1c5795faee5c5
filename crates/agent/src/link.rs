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

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::event::epoll;
use rustix::io::Errno;
use sandtree_proto::frame::{self, Decoded, Decoder, Frame};
use sandtree_proto::message::{self, AgentMessage, HostMessage, MessageError};
use sandtree_proto::{AgentHello, ChannelState, HostHello, Nonce, Outcome, StreamId};

use crate::console;
use crate::failure::refusal;
use crate::held::FrameBuffer;

const QUEUE_LIMIT: usize = 256 * 1024;
/// The size from which encoded messages go to the next segment of the queue.
const SEGMENT: usize = 32 * 1024;
const READ_SIZE: usize = 64 * 1024;
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
        rustix::io::fcntl_setfd(&port, rustix::io::FdFlags::CLOEXEC)?;
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
        match rustix::io::read(&self.port, self.decoder.spare(READ_SIZE)) {
            Ok(0) => {
                self.readable = false;
                self.away = true;
                false
            }
            Ok(count) => {
                self.away = false;
                self.decoder.filled(count);
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
        self.queue
            .append(|bytes| frame::encode_preamble(bytes, nonce));
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

    /// Answers the host's hello. If both speak a common version, streams may flow.
    pub fn greet(&mut self, host: &HostHello, channels: Vec<ChannelState>) {
        let version = host.agreed();
        let build = env!("CARGO_PKG_VERSION").to_owned();
        self.send(&AgentMessage::Hello(AgentHello {
            version,
            build,
            channels,
        }));
        if version != 0 {
            self.open();
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
            Ok(frame) => self.queue.append(|bytes| frame.encode(bytes)),
            Err(error) => console::say(format_args!("cannot send: {error}")),
        }
    }

    pub fn send_frame(&mut self, frame: &Frame) {
        self.queue.append(|bytes| frame.encode(bytes));
    }

    pub fn send_data(&mut self, channel: u32, stream: StreamId, offset: u64, bytes: &[u8]) {
        self.queue
            .append(|queued| frame::encode_data(queued, channel, stream, offset, bytes));
    }

    /// Queues a sealed frame without a copy.
    pub fn send_encoded(&mut self, frame: Rc<FrameBuffer>) {
        self.queue.push(frame);
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

/// Bytes for the port: encoded messages, and sealed frames of streams.
#[derive(Debug, Default)]
struct Queue {
    segments: VecDeque<Segment>,
    /// How much of the first segment is sent.
    start: usize,
    length: usize,
    /// The memory of a sent segment, for the next one.
    spare: Vec<u8>,
}

#[derive(Debug)]
enum Segment {
    Bytes(Vec<u8>),
    Frame(Rc<FrameBuffer>),
}

impl Segment {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Frame(frame) => frame.encoded(),
        }
    }
}

impl Queue {
    fn len(&self) -> usize {
        self.length
    }

    fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes to send next.
    fn pending(&self) -> &[u8] {
        self.segments
            .front()
            .map_or(&[], |segment| &segment.bytes()[self.start..])
    }

    fn clear(&mut self) {
        self.segments.clear();
        self.start = 0;
        self.length = 0;
    }

    fn advance(&mut self, count: usize) {
        self.start += count;
        self.length -= count;
        if !self.pending().is_empty() {
            return;
        }
        self.start = 0;
        if let Some(Segment::Bytes(mut bytes)) = self.segments.pop_front() {
            bytes.clear();
            self.spare = bytes;
        }
    }

    fn push(&mut self, frame: Rc<FrameBuffer>) {
        self.length += frame.encoded().len();
        self.segments.push_back(Segment::Frame(frame));
    }

    /// Appends what `encode` writes: to the last segment, which goes to the port in one write with
    /// it. A segment is freed as a whole, so it does not grow without end.
    fn append(&mut self, encode: impl FnOnce(&mut Vec<u8>)) {
        let fits =
            |segment: &Segment| matches!(segment, Segment::Bytes(bytes) if bytes.len() < SEGMENT);
        if !self.segments.back().is_some_and(fits) {
            let spare = std::mem::take(&mut self.spare);
            self.segments.push_back(Segment::Bytes(spare));
        }
        if let Some(Segment::Bytes(bytes)) = self.segments.back_mut() {
            let before = bytes.len();
            encode(bytes);
            self.length += bytes.len() - before;
        }
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
