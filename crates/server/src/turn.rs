//! What the connection of a client is doing.
//!
//! ```text
//!   idle ── first byte ──► head: 30 s ── complete ──► answering ── answered ──► idle
//!                                                        └── switched protocols ──► free, to its end
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const ANSWERING: u8 = 2;
const FREE: u8 = 3;

/// What a connection is doing; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Turn(Arc<AtomicU8>);

impl Turn {
    /// The head of a request is complete.
    pub fn answers(&self) {
        self.go(ANSWERING);
    }

    /// The answer is complete.
    pub fn is_idle(&self) {
        self.go(IDLE);
    }

    /// The connection continues with another protocol.
    pub fn is_free(&self) {
        self.0.store(FREE, Ordering::Relaxed);
    }

    fn go(&self, to: u8) {
        if self.0.load(Ordering::Relaxed) != FREE {
            self.0.store(to, Ordering::Relaxed);
        }
    }

    /// Bytes have come.
    pub fn has_read(&self) {
        let was_idle = self
            .0
            .compare_exchange(IDLE, HEAD, Ordering::Relaxed, Ordering::Relaxed);
        // Otherwise a head has begun already, or something else is read.
        was_idle.unwrap_or_default();
    }

    pub fn is_in_head(&self) -> bool {
        self.0.load(Ordering::Relaxed) == HEAD
    }
}
