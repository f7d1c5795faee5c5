//! What the agent sends on the port of mounts.
//!
//! ```text
//!   send ── the port has room ──► port
//!        \─ it has none ───────► queue ──► thread ──► port
//! ```
//!
//! Always: bytes keep their order. Sending never waits: the thread that reads the port needs what
//! the sender holds, and a host that does not read until its own bytes are read would wait for
//! both. The requests of the kernel bound the queue.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::HOST_RETURNS;
use crate::console;

#[derive(Debug, Clone)]
pub struct Outbox(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    port: OwnedFd,
    waiting: Mutex<Waiting>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<Vec<u8>>,
    /// The thread is writing.
    is_busy: bool,
}

impl Outbox {
    /// `port` does not block.
    pub fn new(port: OwnedFd) -> Self {
        Self(Arc::new(Inner {
            port,
            waiting: Mutex::default(),
            filled: Condvar::new(),
        }))
    }

    pub fn send(&self, bytes: &[u8]) {
        let mut waiting = self.0.lock();
        let is_free = waiting.queue.is_empty() && !waiting.is_busy;
        let sent = if is_free { self.0.write(bytes) } else { 0 };
        if sent < bytes.len() {
            waiting.queue.push_back(bytes[sent..].to_vec());
            self.0.filled.notify_one();
        }
    }

    /// Writes what had to wait, for ever.
    pub fn write_waiting(&self) -> ! {
        loop {
            let mut waiting = self.0.lock();
            let bytes = loop {
                if let Some(bytes) = waiting.queue.pop_front() {
                    break bytes;
                }
                waiting = self
                    .0
                    .filled
                    .wait(waiting)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            waiting.is_busy = true;
            drop(waiting);
            self.0.write_all(&bytes);
            self.0.lock().is_busy = false;
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes as much as the port has room for.
    fn write(&self, bytes: &[u8]) -> usize {
        let mut sent = 0;
        while sent < bytes.len() {
            match rustix::io::write(&self.port, &bytes[sent..]) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => {
                    // Everything unanswered is sent again after the next greeting.
                    console::say(format_args!("cannot write to the port of mounts: {error}"));
                    return bytes.len();
                }
            }
        }
        sent
    }

    fn write_all(&self, bytes: &[u8]) {
        let mut sent = 0;
        loop {
            sent += self.write(&bytes[sent..]);
            if sent == bytes.len() {
                return;
            }
            let mut port = [PollFd::new(&self.port, PollFlags::OUT)];
            match rustix::event::poll(&mut port, None) {
                // The other end is closed: what is unanswered is sent again when it returns.
                Ok(_) if port[0].revents().contains(PollFlags::HUP) => {
                    std::thread::sleep(HOST_RETURNS);
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    return console::say(format_args!("cannot wait for the host: {error}"));
                }
            }
        }
    }
}
