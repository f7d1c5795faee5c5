//! A connection to an X server: requests out, replies, errors and events in.
//!
//! ```text
//!   queue ──► outgoing ══╗
//!                        ╠══ socket ══ X server
//!   replies, events ◄════╝
//! ```
//!
//! `x11rb-protocol` encodes and decodes the messages. The connection itself is here, because every
//! wait needs a deadline and every length a limit: any program of the guest may pose as X server,
//! and the agent must outlive it.
//!
//! Always: a packet has at most [`PACKET_MAX`] bytes, at most [`EVENTS_MAX`] events wait, and no
//! call waits beyond its deadline.
//! When it fails: after an error of the socket, a deadline or a packet that does not parse, the
//! connection is broken and must be dropped. An error that the server reports leaves it whole.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sandtree_proto::Failure;
use x11rb_protocol::connect::Connect;
use x11rb_protocol::errors::ConnectError;
use x11rb_protocol::protocol::bigreq;
use x11rb_protocol::protocol::xproto::{self, GetInputFocusRequest, QueryExtensionRequest, Setup};
use x11rb_protocol::x11_utils::{ReplyRequest, Request, TryParse, VoidRequest};

use super::event::Event;
use crate::failure::{OrFailure, failure, refusal};

/// A busy server under emulation answers within seconds.
const REPLY_WITHIN: Duration = Duration::from_secs(20);
/// More than the clipboard, which is the largest reply.
const PACKET_MAX: usize = 2 * 1024 * 1024;
const EVENTS_MAX: usize = 4096;
/// How many errors of requests without a reply are kept.
const ERRORS_MAX: usize = 16;
/// Errors arrive at the latest with the next reply, so that older requests need not be known.
const UNMINDED_MAX: usize = 1024;
const READ_SIZE: usize = 64 * 1024;
/// Requests are sent when so many bytes wait.
const FLUSH_SIZE: usize = 16 * 1024;
/// The fixed part of a reply, an error and an event.
const PACKET: usize = 32;
const GENERIC_EVENT: u8 = 35;

pub struct Wire {
    socket: UnixStream,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// The number of requests that were queued; the last one has this number.
    sent: u64,
    /// Requests whose errors do not matter.
    unminded: VecDeque<u64>,
    errors: Vec<ServerError>,
    events: VecDeque<Event>,
    /// The major opcodes of the extensions, by name.
    extensions: BTreeMap<&'static str, u8>,
    request_max: usize,
    next_id: u32,
    setup: Setup,
    is_broken: bool,
    /// When all replies of the present job must have come.
    job_until: Option<Instant>,
}

/// An error that the X server reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerError {
    request: u64,
    code: u8,
    major: u8,
    minor: u16,
    value: u32,
}

/// One packet of the server's.
enum Packet {
    Reply {
        request: u64,
        bytes: Vec<u8>,
    },
    Error(ServerError),
    Event(Event),
    /// An event that concerns no code here.
    Other,
}

impl Wire {
    /// Greets the server at the other end of `socket`.
    pub fn new(socket: UnixStream) -> Result<Self, Failure> {
        let setup = greet(&socket)?;
        let mut wire = Self {
            socket,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            sent: 0,
            unminded: VecDeque::new(),
            errors: Vec::new(),
            events: VecDeque::new(),
            extensions: BTreeMap::new(),
            request_max: usize::from(setup.maximum_request_length) * 4,
            next_id: 0,
            setup,
            is_broken: false,
            job_until: None,
        };
        if wire.has_extension(bigreq::X11_EXTENSION_NAME)? {
            let enabled = wire.call(bigreq::EnableRequest)?;
            wire.request_max = enabled.maximum_request_length as usize * 4;
        }
        Ok(wire)
    }

    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Limits the time of all calls together. `None`: between jobs.
    pub fn limit(&mut self, job_until: Option<Instant>) {
        self.job_until = job_until;
    }

    fn reply_until(&self) -> Instant {
        let until = Instant::now() + REPLY_WITHIN;
        self.job_until.map_or(until, |job| until.min(job))
    }

    /// The longest request in bytes.
    pub fn request_max(&self) -> usize {
        self.request_max
    }

    /// A new identifier for a window.
    pub fn new_id(&mut self) -> Result<u32, Failure> {
        let mask = self.setup.resource_id_mask;
        let step = mask & mask.wrapping_neg();
        let id = self.next_id;
        self.next_id = id.wrapping_add(step);
        if step == 0 || id & !mask != 0 {
            return Err(self.broken("it has no identifiers left"));
        }
        Ok(self.setup.resource_id_base | id)
    }

    /// Asks whether the server has an extension, whose requests may then be sent.
    pub fn has_extension(&mut self, name: &'static str) -> Result<bool, Failure> {
        let name_bytes = name.as_bytes().into();
        let found = self.call(QueryExtensionRequest { name: name_bytes })?;
        if found.present {
            self.extensions.insert(name, found.major_opcode);
        }
        Ok(found.present)
    }

    /// Sends a request and waits for its reply.
    pub fn call<R: ReplyRequest>(&mut self, request: R) -> Result<R::Reply, Failure> {
        let number = self.queue(request)?;
        let until = self.reply_until();
        self.flush(until)?;
        loop {
            match self.next_packet(until)? {
                Some(Packet::Reply { request, bytes }) if request == number => {
                    return match R::Reply::try_parse(&bytes) {
                        Ok((reply, _)) => Ok(reply),
                        Err(_) => Err(self.broken("a reply does not parse")),
                    };
                }
                Some(Packet::Error(error)) if error.request == number => {
                    return Err(error.failure());
                }
                // A server that sends other things without end is late, too.
                Some(_) if Instant::now() > until => return Err(self.late()),
                Some(packet) => self.keep(packet),
                None => return Err(self.late()),
            }
        }
    }

    /// Queues a request without a reply. The next [`sync`](Self::sync) reports its error.
    pub fn send<R: VoidRequest>(&mut self, request: R) -> Result<(), Failure> {
        self.queue(request).map(drop)
    }

    /// Queues a request whose error does not matter, because it concerns a window of another
    /// client, which may be gone.
    pub fn try_send<R: VoidRequest>(&mut self, request: R) -> Result<(), Failure> {
        let number = self.queue(request)?;
        self.unminded.push_back(number);
        if self.unminded.len() > UNMINDED_MAX {
            self.unminded.pop_front();
        }
        Ok(())
    }

    /// Waits until the server has processed every request, and reports the first error.
    pub fn sync(&mut self) -> Result<(), Failure> {
        self.call(GetInputFocusRequest)?;
        let first = self.errors.first().copied();
        self.errors.clear();
        self.unminded.clear();
        first.map_or(Ok(()), |error| Err(error.failure()))
    }

    /// Queues a request without a reply, and waits for its success.
    pub fn check<R: VoidRequest>(&mut self, request: R) -> Result<(), Failure> {
        self.send(request)?;
        self.sync()
    }

    /// The next event, at the latest at `until`.
    pub fn event(&mut self, until: Instant) -> Result<Option<Event>, Failure> {
        self.flush(self.reply_until())?;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.next_packet(until)? {
                Some(_) if Instant::now() > until => return Ok(None),
                Some(packet) => self.keep(packet),
                None => return Ok(None),
            }
        }
    }

    fn keep(&mut self, packet: Packet) {
        match packet {
            Packet::Event(event) if self.events.len() < EVENTS_MAX => self.events.push_back(event),
            // A program that floods the agent with events loses the rest of them.
            Packet::Event(_) | Packet::Other => {}
            // The request of a reply that is late or unknown does not wait any more.
            Packet::Reply { .. } => {}
            Packet::Error(error) => {
                let is_minded = !self.unminded.contains(&error.request);
                if is_minded && self.errors.len() < ERRORS_MAX {
                    self.errors.push(error);
                }
            }
        }
    }

    fn queue<R: Request>(&mut self, request: R) -> Result<u64, Failure> {
        let opcode = match R::EXTENSION_NAME {
            None => 0,
            Some(name) => *self.extensions.get(name).ok_or_else(|| without(name))?,
        };
        let (mut bytes, _descriptors) = request.serialize(opcode);
        if bytes.len() > self.request_max {
            return Err(refusal(
                Errno::FBIG,
                format!("a request of {} bytes is too long for X", bytes.len()),
            ));
        }
        if bytes.len() / 4 > usize::from(u16::MAX) {
            // The length of a long request stands behind its head, and counts itself.
            let words = (bytes.len() / 4 + 1) as u32;
            bytes.splice(4..4, words.to_ne_bytes());
        }
        self.outgoing.extend_from_slice(&bytes);
        self.sent += 1;
        if self.outgoing.len() >= FLUSH_SIZE {
            self.flush(self.reply_until())?;
        }
        Ok(self.sent)
    }

    fn flush(&mut self, until: Instant) -> Result<(), Failure> {
        while !self.outgoing.is_empty() {
            match self.socket.write(&self.outgoing) {
                Ok(0) => return Err(self.broken("it accepts no bytes")),
                Ok(count) => {
                    self.outgoing.drain(..count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // A server that waits until its replies are read reads no requests.
                    let room = PollFlags::OUT | self.readable_flags();
                    if !self.wait(room, until)? {
                        return Err(self.late());
                    }
                    self.read()?;
                }
                Err(error) => return Err(self.lost(&error)),
            }
        }
        Ok(())
    }

    /// The next packet, at the latest at `until`.
    fn next_packet(&mut self, until: Instant) -> Result<Option<Packet>, Failure> {
        loop {
            if let Some(packet) = self.take_packet()? {
                return Ok(Some(packet));
            }
            if self.read()? {
                continue;
            }
            if !self.wait(PollFlags::IN, until)? {
                return Ok(None);
            }
        }
    }

    /// Reads what has arrived. Returns whether that was anything.
    fn read(&mut self) -> Result<bool, Failure> {
        if self.readable_flags().is_empty() {
            return Ok(false);
        }
        let mut buffer = [0; READ_SIZE];
        match self.socket.read(&mut buffer) {
            Ok(0) => Err(self.lost(&io::ErrorKind::ConnectionReset.into())),
            Ok(count) => {
                self.incoming.extend_from_slice(&buffer[..count]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(self.lost(&error)),
        }
    }

    /// A packet is taken before more is read, except while a long request is written.
    fn readable_flags(&self) -> PollFlags {
        if self.incoming.len() <= PACKET_MAX {
            PollFlags::IN
        } else {
            PollFlags::empty()
        }
    }

    /// Returns whether the socket is ready before `until`.
    fn wait(&mut self, events: PollFlags, until: Instant) -> Result<bool, Failure> {
        wait(self.socket.as_fd(), events, until).map_err(|error| self.lost(&error.into()))
    }

    fn take_packet(&mut self) -> Result<Option<Packet>, Failure> {
        let Some(head) = self.incoming.first_chunk::<PACKET>().copied() else {
            return Ok(None);
        };
        let length = match head[0] & 0x7f {
            1 | GENERIC_EVENT => PACKET + word(&head, 4) as usize * 4,
            _ => PACKET,
        };
        if length > PACKET_MAX {
            return Err(self.broken("it sends a packet that is too long"));
        }
        if self.incoming.len() < length {
            return Ok(None);
        }
        let bytes: Vec<u8> = self.incoming.drain(..length).collect();
        let number = u16::from_ne_bytes([head[2], head[3]]);
        let request = full_number(self.sent, number);
        Ok(Some(match head[0] {
            0 => Packet::Error(ServerError {
                request,
                code: head[1],
                value: word(&head, 4),
                minor: u16::from_ne_bytes([head[8], head[9]]),
                major: head[10],
            }),
            1 => Packet::Reply { request, bytes },
            _ => Event::parse(&bytes).map_or(Packet::Other, Packet::Event),
        }))
    }

    fn broken(&mut self, why: &str) -> Failure {
        self.is_broken = true;
        refusal(Errno::PROTO, format!("the X server fails: {why}"))
    }

    fn late(&mut self) -> Failure {
        self.is_broken = true;
        refusal(Errno::TIMEDOUT, "the X server does not answer in time")
    }

    fn lost(&mut self, error: &io::Error) -> Failure {
        self.is_broken = true;
        failure("the connection to the X server is lost", error)
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ServerError {
    fn failure(self) -> Failure {
        let Self {
            code,
            major,
            minor,
            value,
            ..
        } = self;
        let errno = match code {
            xproto::ACCESS_ERROR => Errno::ACCESS,
            xproto::ALLOC_ERROR => Errno::NOMEM,
            _ => Errno::INVAL,
        };
        let what = format!("error {code} for request {major}.{minor}, value {value:#x}");
        refusal(errno, format!("the X server refused: {what}"))
    }
}

fn without(extension: &str) -> Failure {
    refusal(
        Errno::OPNOTSUPP,
        format!("the X server lacks the extension {extension}"),
    )
}

/// Opens the connection, without authority.
fn greet(socket: &UnixStream) -> Result<Setup, Failure> {
    let message = || "cannot greet the X server".to_owned();
    let until = Instant::now() + REPLY_WITHIN;
    let late = || refusal(Errno::TIMEDOUT, "the X server does not greet");
    let (mut connect, hello) = Connect::with_authorization(Vec::new(), Vec::new());
    // A new socket has room for this.
    (&mut &*socket).write_all(&hello).or_failure(message)?;
    socket.set_nonblocking(true).or_failure(message)?;
    loop {
        match (&mut &*socket).read(connect.buffer()) {
            Ok(0) => return Err(refusal(Errno::CONNRESET, message())),
            Ok(count) if connect.advance(count) => break,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !wait(socket.as_fd(), PollFlags::IN, until).or_failure(message)? {
                    return Err(late());
                }
            }
            Err(error) => return Err(failure(&message(), &error)),
        }
    }
    connect.into_setup().map_err(|error| refused(&error))
}

fn refused(error: &ConnectError) -> Failure {
    let reason = match error {
        ConnectError::SetupFailed(failed) => String::from_utf8_lossy(&failed.reason).into_owned(),
        ConnectError::SetupAuthenticate(more) => String::from_utf8_lossy(&more.reason).into_owned(),
        other => other.to_string(),
    };
    let reason = reason.trim().trim_end_matches('\0').to_owned();
    refusal(
        Errno::ACCESS,
        format!("the X server refused the agent: {reason}: start it without -auth"),
    )
}

/// Returns whether the descriptor is ready before `until`.
fn wait(fd: BorrowedFd<'_>, events: PollFlags, until: Instant) -> rustix::io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::from_borrowed_fd(fd, events)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

pub fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

fn word(bytes: &[u8; PACKET], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The number of a request, of which the server sends only 16 bits.
fn full_number(last: u64, low: u16) -> u64 {
    let behind = (last as u16).wrapping_sub(low);
    last.saturating_sub(behind.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The greeting of a server without screens, and its answer that it has no BIG-REQUESTS.
    fn greeting() -> Vec<u8> {
        let mut setup = [0; 40];
        setup[..8].copy_from_slice(&[1, 0, 11, 0, 0, 0, 8, 0]);
        setup[12..20].copy_from_slice(&[0, 0, 32, 0, 255, 255, 0, 0]);
        setup[26..28].copy_from_slice(&[255, 255]);
        [&setup[..], &packet(1, 1, 0)].concat()
    }

    fn packet(kind: u8, number: u16, length: u32) -> [u8; PACKET] {
        let mut packet = [0; PACKET];
        packet[0] = kind;
        packet[2..4].copy_from_slice(&number.to_ne_bytes());
        packet[4..8].copy_from_slice(&length.to_ne_bytes());
        packet
    }

    /// A connection to a server that says all of this, whatever it is asked.
    fn connected(answers: Vec<u8>) -> Result<Wire, Failure> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            theirs.write_all(&answers).unwrap();
            // Until the agent closes its end.
            theirs.read_to_end(&mut Vec::new()).unwrap();
        });
        Wire::new(ours)
    }

    fn errno_of<T>(result: Result<T, Failure>) -> i32 {
        result.err().map_or(0, |failure| failure.errno)
    }

    #[test]
    fn a_server_cannot_make_the_agent_reserve_memory() {
        let answers = [&greeting()[..], &packet(1, 2, u32::MAX)].concat();
        let mut wire = connected(answers).unwrap();
        assert_eq!(errno_of(wire.sync()), libc::EPROTO);
        assert!(wire.is_broken());
    }

    #[test]
    fn events_beyond_the_limit_are_dropped_and_the_reply_is_found() {
        let events = packet(xproto::PROPERTY_NOTIFY_EVENT, 1, 0).repeat(EVENTS_MAX + 9);
        let answers = [&greeting()[..], &events, &packet(1, 2, 0)].concat();
        let mut wire = connected(answers).unwrap();
        wire.sync().unwrap();
        assert_eq!(wire.events.len(), EVENTS_MAX);
    }

    #[test]
    fn an_error_of_a_request_without_a_reply_is_reported_once() {
        let error = packet(0, 2, 7);
        let answers = [&greeting()[..], &error, &packet(1, 3, 0), &packet(1, 4, 0)].concat();
        let mut wire = connected(answers).unwrap();
        let window = 5;
        wire.send(xproto::DestroyWindowRequest { window }).unwrap();
        assert_eq!(errno_of(wire.sync()), libc::EINVAL);
        assert!(!wire.is_broken());
        wire.sync().unwrap();
    }

    #[test]
    fn an_error_that_does_not_matter_is_not_reported() {
        let answers = [&greeting()[..], &packet(0, 2, 7), &packet(1, 3, 0)].concat();
        let mut wire = connected(answers).unwrap();
        let window = 5;
        wire.try_send(xproto::DestroyWindowRequest { window })
            .unwrap();
        wire.sync().unwrap();
    }

    #[test]
    fn a_server_that_refuses_or_ends_is_an_error() {
        let refused = [0, 2, 11, 0, 0, 0, 1, 0, b'n', b'o', 0, 0];
        assert_eq!(errno_of(connected(refused.to_vec())), libc::EACCES);
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(Wire::new(ours).is_err());
    }

    #[test]
    fn an_extension_that_was_not_found_is_not_used() {
        let mut wire = connected(greeting()).unwrap();
        let missing =
            wire.send(x11rb_protocol::protocol::xtest::GrabControlRequest { impervious: true });
        assert_eq!(errno_of(missing), libc::EOPNOTSUPP);
    }

    #[test]
    fn identifiers_end_with_their_mask() {
        let mut wire = connected(greeting()).unwrap();
        assert_eq!(wire.new_id().unwrap(), 0x20_0000);
        assert_eq!(wire.new_id().unwrap(), 0x20_0001);
        wire.next_id = 0x1_0000;
        assert_eq!(errno_of(wire.new_id()), libc::EPROTO);
    }

    #[test]
    fn numbers_of_requests_continue_after_16_bits() {
        assert_eq!(full_number(5, 3), 3);
        assert_eq!(full_number(0x1_0002, 0xffff), 0xffff);
        assert_eq!(full_number(0x1_0002, 2), 0x1_0002);
        assert_eq!(full_number(1, 2), 0);
    }
}
