//! A stream to the guest: bytes from the host for a descriptor or a thread.
//!
//! ```text
//!   0 ........ consumed ........ received ...... reported + window
//!     written      |   buffered     |   may still come   |
//! ```
//!
//! Always: at most `window` bytes are buffered. When the reader is gone (the command has closed its
//! stdin), bytes are dropped and count as consumed, so the host never waits for them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use thiserror::Error;

use crate::failure::tolerate;
use crate::feed::Feed;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum InputError {
    #[error("bytes at {offset} came where {expected} was expected")]
    Gap { offset: u64, expected: u64 },
    #[error("more bytes than the window of {window} came")]
    Overrun { window: usize },
}

#[derive(Debug)]
pub struct Input {
    sink: Sink,
    buffer: Vec<u8>,
    start: usize,
    received: u64,
    reported: u64,
    window: usize,
    ended: bool,
}

#[derive(Debug)]
enum Sink {
    /// It does not exist yet: bytes are buffered.
    Awaited,
    Open(OwnedFd, AtEnd),
    /// A thread, which buffers the bytes itself.
    Thread(Feed),
    /// The reader is gone: bytes are dropped.
    Gone,
}

/// What happens to the descriptor at the end of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtEnd {
    Close,
    /// Half-closes the connection, which is still read from.
    Shutdown,
    /// Types the terminal's end-of-file character, if the terminal reads lines.
    TypeEof,
}

impl Input {
    pub fn new(window: usize, sink: Option<(OwnedFd, AtEnd)>) -> Self {
        let sink = sink.map_or(Sink::Gone, |(fd, at_end)| Sink::Open(fd, at_end));
        Self {
            sink,
            buffer: Vec::new(),
            start: 0,
            received: 0,
            reported: 0,
            window,
            ended: false,
        }
    }

    /// A stream that gets its descriptor later, by [`attach`](Self::attach).
    pub fn awaiting(window: usize) -> Self {
        Self {
            sink: Sink::Awaited,
            ..Self::new(window, None)
        }
    }

    /// A stream for a thread.
    pub fn of_thread(window: usize, feed: Feed) -> Self {
        Self {
            sink: Sink::Thread(feed),
            ..Self::new(window, None)
        }
    }

    pub fn attach(&mut self, fd: OwnedFd, at_end: AtEnd) {
        self.sink = Sink::Open(fd, at_end);
        self.flush();
    }

    pub fn received(&self) -> u64 {
        self.received
    }

    pub fn is_closed(&self) -> bool {
        matches!(self.sink, Sink::Gone)
    }

    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.sink {
            Sink::Open(fd, _) => Some(fd.as_fd()),
            Sink::Awaited | Sink::Thread(_) | Sink::Gone => None,
        }
    }

    fn buffered(&self) -> usize {
        match &self.sink {
            Sink::Thread(feed) => (self.received - feed.used()) as usize,
            Sink::Awaited | Sink::Open(..) | Sink::Gone => self.buffer.len() - self.start,
        }
    }

    fn consumed(&self) -> u64 {
        self.received - self.buffered() as u64
    }

    /// Accepts bytes from the host. Bytes that arrived before a break are skipped.
    pub fn receive(
        &mut self,
        offset: u64,
        bytes: impl AsRef<[u8]> + Into<Vec<u8>>,
    ) -> Result<(), InputError> {
        if offset > self.received {
            return Err(InputError::Gap {
                offset,
                expected: self.received,
            });
        }
        let known = usize::try_from(self.received - offset).unwrap_or(usize::MAX);
        let Some(fresh) = bytes.as_ref().get(known..) else {
            return Ok(());
        };
        if self.buffered() + fresh.len() > self.window {
            return Err(InputError::Overrun {
                window: self.window,
            });
        }
        self.received += fresh.len() as u64;
        if let Sink::Thread(feed) = &mut self.sink {
            feed.push(if known == 0 {
                bytes.into()
            } else {
                fresh.to_vec()
            });
            return Ok(());
        }
        let rest = if self.buffered() == 0 {
            &fresh[self.write(fresh)..]
        } else {
            fresh
        };
        self.keep(rest);
        Ok(())
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.is_closed() {
            return;
        }
        if self.start > self.buffered() {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Lets a thread know what has arrived for it.
    pub fn announce(&mut self) {
        if let Sink::Thread(feed) = &mut self.sink {
            feed.announce();
        }
    }

    /// The host has sent its last byte.
    pub fn end(&mut self, offset: u64) -> Result<(), InputError> {
        if offset > self.received {
            return Err(InputError::Gap {
                offset,
                expected: self.received,
            });
        }
        self.ended = true;
        if let Sink::Thread(feed) = &mut self.sink {
            feed.end();
        }
        self.finish_if_drained();
        Ok(())
    }

    /// The descriptor to wait for, if bytes are buffered.
    pub fn wanted(&self) -> Option<BorrowedFd<'_>> {
        match &self.sink {
            Sink::Open(fd, _) if self.buffered() > 0 => Some(fd.as_fd()),
            _ => None,
        }
    }

    /// Writes as much as the descriptor accepts now.
    pub fn flush(&mut self) {
        let pending = std::mem::take(&mut self.buffer);
        self.start += self.write(&pending[self.start..]);
        self.buffer = pending;
        if self.is_closed() || self.buffered() == 0 {
            self.buffer.clear();
            self.start = 0;
        }
        self.finish_if_drained();
    }

    /// Writes until the descriptor is full; closes it if the reader is gone. Returns how many bytes
    /// can be dropped from the buffer.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let fd = match &self.sink {
                Sink::Open(fd, _) => fd,
                Sink::Awaited | Sink::Thread(_) => break,
                Sink::Gone => return bytes.len(),
            };
            match rustix::io::write(fd, &bytes[done..]) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => self.sink = Sink::Gone,
            }
        }
        done
    }

    fn finish_if_drained(&mut self) {
        let drained = self.ended && self.buffered() == 0 && !matches!(self.sink, Sink::Awaited);
        if !drained {
            return;
        }
        if let Sink::Open(fd, at_end) = std::mem::replace(&mut self.sink, Sink::Gone) {
            finish(&fd, at_end);
        }
    }

    /// Closes the stream, because its reader is gone.
    pub fn close(&mut self) {
        self.sink = Sink::Gone;
        self.buffer = Vec::new();
        self.start = 0;
    }

    /// The count of consumed bytes to send to the host, if it has increased enough since the last
    /// one or the host may be waiting.
    pub fn take_window(&mut self) -> Option<u64> {
        let consumed = self.consumed();
        let fresh = consumed - self.reported;
        let due = fresh > 0 && (fresh >= self.window as u64 / 4 || self.buffered() == 0);
        due.then(|| {
            self.reported = consumed;
            consumed
        })
    }

    /// After a break the last count may have been lost, so it is sent again.
    pub fn report_again(&mut self) -> u64 {
        self.reported = self.consumed();
        self.reported
    }
}

/// A failure here means that the other end is gone, which ends the stream as well.
fn finish(fd: &OwnedFd, at_end: AtEnd) {
    match at_end {
        AtEnd::Close => {}
        AtEnd::Shutdown => tolerate(rustix::net::shutdown(fd, rustix::net::Shutdown::Write)),
        AtEnd::TypeEof => crate::terminal::type_eof(fd),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn pipe() -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe_with(
            rustix::pipe::PipeFlags::NONBLOCK | rustix::pipe::PipeFlags::CLOEXEC,
        )
        .unwrap()
    }

    fn read(fd: &OwnedFd) -> Vec<u8> {
        let mut bytes = [0; 100];
        let count = rustix::io::read(fd, &mut bytes).unwrap();
        bytes[..count].to_vec()
    }

    #[test]
    fn bytes_sent_again_after_a_break_are_skipped() {
        let (reader, writer) = pipe();
        let mut input = Input::new(10, Some((writer, AtEnd::Close)));
        input.receive(0, b"abc").unwrap();
        input.receive(1, b"bcde").unwrap();
        assert_eq!(read(&reader), b"abcde");
        assert_eq!(
            input.receive(6, b"x"),
            Err(InputError::Gap {
                offset: 6,
                expected: 5
            })
        );
    }

    #[test]
    fn a_host_beyond_its_window_is_refused() {
        let mut input = Input::new(4, Some((pipe().1, AtEnd::Close)));
        assert_eq!(
            input.receive(0, b"abcde"),
            Err(InputError::Overrun { window: 4 })
        );
    }

    #[test]
    fn the_end_follows_the_last_byte_and_can_be_repeated() {
        let (reader, writer) = pipe();
        let mut input = Input::new(4, Some((writer, AtEnd::Close)));
        input.receive(0, b"ab").unwrap();
        input.end(2).unwrap();
        input.end(2).unwrap();
        assert_eq!(read(&reader), b"ab");
        assert_eq!(read(&reader), b"");
        assert_eq!(input.take_window(), Some(2));
        assert_eq!(input.take_window(), None);
        assert_eq!(input.report_again(), 2);
    }

    #[test]
    fn bytes_for_a_thread_take_the_window_until_the_thread_has_used_them() {
        let bell = crate::workers::Workers::new().unwrap().to_loop();
        let (feed, mut intake) = crate::feed::feed(4, bell);
        let mut input = Input::of_thread(4, feed);
        input.receive(0, b"abc").unwrap();
        input.receive(1, b"bcd").unwrap();
        assert_eq!(
            input.receive(4, b"e"),
            Err(InputError::Overrun { window: 4 })
        );
        assert_eq!(input.take_window(), None);
        input.end(4).unwrap();
        let mut seen = Vec::new();
        intake.read_to_end(&mut seen).unwrap();
        assert_eq!(seen, b"abcd");
        assert_eq!(input.take_window(), Some(4));
    }

    #[test]
    fn without_a_reader_bytes_count_as_consumed() {
        let (reader, writer) = pipe();
        drop(reader);
        let mut input = Input::new(4, Some((writer, AtEnd::Close)));
        input.receive(0, b"abcd").unwrap();
        input.receive(4, b"efgh").unwrap();
        assert_eq!(input.take_window(), Some(8));
        assert!(input.is_closed());
    }
}
