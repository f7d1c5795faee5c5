//! The server's end of the port: what is to be sent, what has arrived, and the greeting.
//!
//! ```text
//!   Greeting ── echo of the nonce ──► Connected ── broken packet ──► Greeting, with a new nonce
//!                                                       └─ the sixth, each within 30 s ──► Refused
//!   any ── the other end is gone ──► Closed
//! ```
//!
//! Always: nothing here waits. A guest that does not read its replies fills the output up to
//! [`UNSENT_MAX`]; then its requests are not read any longer, until it reads. Memory that a large
//! packet needed is given back when the packet is sent.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use sandtree_proto::Nonce;
use sandtree_proto::frame::encode_host_preamble;
use sandtree_proto::mount::{Arrived, Assembler, FromHost, MountError, encode};

/// Requests wait while more of their replies is unsent.
const UNSENT_MAX: usize = 4 * 1024 * 1024;
/// Read at once. A virtio port gives less.
const READ_BYTES: usize = 64 * 1024;
/// Memory that the output keeps while it is empty.
const OUTPUT_KEPT: usize = 64 * 1024;
/// Sent bytes are removed from the output in pieces of this.
const COMPACT_BYTES: usize = 1024 * 1024;
/// A guest may break the protocol so often, each time within `BREAK_WINDOW` of the last.
const BREAKS_MAX: u32 = 5;
const BREAK_WINDOW: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    Greeting,
    Connected,
    Refused,
    Closed,
}

#[derive(Debug)]
pub(crate) struct Port {
    stream: Option<UnixStream>,
    link: Link,
    nonce: Nonce,
    input: Assembler,
    output: Vec<u8>,
    /// The beginning of `output` that is sent.
    sent: usize,
    breaks: u32,
    last_break: Option<Instant>,
}

impl Port {
    pub(crate) fn new(stream: UnixStream, nonce: Nonce) -> Self {
        Self {
            stream: Some(stream),
            link: Link::Greeting,
            nonce,
            input: Assembler::default(),
            output: Vec::new(),
            sent: 0,
            breaks: 0,
            last_break: None,
        }
    }

    pub(crate) fn link(&self) -> Link {
        self.link
    }

    /// The descriptor to wait at.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn has_output(&self) -> bool {
        self.sent < self.output.len()
    }

    /// Whether another reply may be made.
    pub(crate) fn has_room(&self) -> bool {
        self.output.len() - self.sent <= UNSENT_MAX
    }

    /// Appends the greeting. What was not sent is void: the preamble completes a frame that was
    /// cut.
    pub(crate) fn greet(&mut self, hello: &FromHost) {
        self.output.clear();
        self.sent = 0;
        encode_host_preamble(&mut self.output, self.nonce);
        self.send(hello);
    }

    pub(crate) fn send(&mut self, message: &FromHost) {
        // Only replies with data can be too long, and those are sent by `reply`.
        drop(self.reply(message, &[]));
    }

    pub(crate) fn reply(&mut self, message: &FromHost, data: &[u8]) -> Result<(), MountError> {
        if matches!(self.link, Link::Refused | Link::Closed) {
            return Ok(());
        }
        encode(message, data, &mut self.output)
    }

    /// Sends as much as the other end takes.
    pub(crate) fn flush(&mut self) {
        while self.has_output() {
            let Some(stream) = &mut self.stream else {
                return;
            };
            match stream.write(&self.output[self.sent..]) {
                Ok(0) => return self.close(Link::Closed),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.close(Link::Closed),
            }
        }
        self.compact();
    }

    fn compact(&mut self) {
        if !self.has_output() {
            self.output.clear();
            self.output.shrink_to(OUTPUT_KEPT);
            self.sent = 0;
        } else if self.sent >= COMPACT_BYTES {
            self.output.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Reads once.
    pub(crate) fn fill(&mut self) {
        let Some(stream) = &mut self.stream else {
            return;
        };
        match stream.read(self.input.spare(READ_BYTES)) {
            Ok(0) => self.close(Link::Closed),
            Ok(count) => self.input.filled(count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => self.close(Link::Closed),
        }
    }

    /// The next packet of a guest that has answered the greeting.
    pub(crate) fn next(&mut self) -> Option<Result<Vec<u8>, MountError>> {
        loop {
            match self.input.next()? {
                Ok(Arrived::Preamble(nonce)) if nonce == self.nonce => self.link = Link::Connected,
                // An echo of an earlier host's greeting.
                Ok(Arrived::Preamble(_)) => self.input.resync(),
                Ok(Arrived::Packet(packet)) => return Some(Ok(packet)),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// The guest broke the protocol: it is greeted again, or refused. Returns whether to greet.
    pub(crate) fn broken(&mut self, now: Instant) -> bool {
        let is_soon = |last: Instant| now.duration_since(last) < BREAK_WINDOW;
        self.breaks = if self.last_break.is_some_and(is_soon) {
            self.breaks + 1
        } else {
            1
        };
        self.last_break = Some(now);
        self.input.resync();
        match fresh() {
            Some(nonce) if self.breaks <= BREAKS_MAX => {
                self.nonce = nonce;
                self.link = Link::Greeting;
                true
            }
            _ => {
                self.close(Link::Refused);
                false
            }
        }
    }

    fn close(&mut self, link: Link) {
        self.link = link;
        self.stream = None;
        self.input = Assembler::default();
        self.output = Vec::new();
        self.sent = 0;
    }
}

fn fresh() -> Option<Nonce> {
    let mut bytes = [0; 16];
    let flags = rustix::rand::GetRandomFlags::empty();
    let count = rustix::rand::getrandom(&mut bytes, flags).ok()?;
    (count == bytes.len()).then_some(Nonce(bytes))
}
