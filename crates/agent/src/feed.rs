//! Input for a thread: bytes from the host, in the buffers in which they arrived.
//!
//! ```text
//!   loop: Feed::push --> | piece | piece | piece | --> Intake (Read): thread
//!                                                        \-- bell: so much is used
//! ```
//!
//! A pipe would copy every byte twice more. Under emulation that costs more than the port itself.
//!
//! Always: the loop never waits. The stream's window bounds the pieces, because bytes count as used
//! only when the thread has finished with their piece. A [`Feed`] that is dropped without an end
//! also drops what the thread has not taken; after a dropped [`Intake`] every byte counts as used.

use std::collections::VecDeque;
use std::io::{self, BufRead, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::workers::Bell;

/// Pieces up to this size are joined, so that single bytes take no more memory than they are.
const JOINED_MAX: usize = 4096;

/// The loop's end.
#[derive(Debug)]
pub struct Feed {
    shared: Arc<Shared>,
    /// Whether pieces were pushed since the last [`announce`](Self::announce).
    is_unannounced: bool,
}

/// The thread's end.
#[derive(Debug)]
pub struct Intake {
    shared: Arc<Shared>,
    bell: Bell,
    piece: Vec<u8>,
    /// How much of `piece` was read.
    at: usize,
    /// The used bytes that the loop may not know of.
    unreported: usize,
    /// The number of used bytes for which the loop is woken.
    report_at: usize,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<Vec<u8>>,
    used: u64,
    ended: bool,
    /// The thread has ended.
    abandoned: bool,
}

impl State {
    /// Adds a piece, or joins it with the last one if both are small.
    fn add(&mut self, piece: Vec<u8>) {
        match self.pieces.back_mut() {
            Some(last) if last.len() + piece.len() <= JOINED_MAX => last.extend(piece),
            _ => self.pieces.push_back(piece),
        }
    }
}

impl Shared {
    /// A thread that panicked leaves nothing half done here.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A way into a thread for a stream with this window.
pub fn feed(window: usize, bell: Bell) -> (Feed, Intake) {
    let shared = Arc::<Shared>::default();
    let intake = Intake {
        shared: Arc::clone(&shared),
        bell,
        piece: Vec::new(),
        at: 0,
        unreported: 0,
        report_at: (window / 4).max(1),
    };
    let feed = Feed {
        shared,
        is_unannounced: false,
    };
    (feed, intake)
}

impl Feed {
    /// Adds a piece. The thread learns of it by [`announce`](Self::announce).
    pub fn push(&mut self, piece: Vec<u8>) {
        let mut state = self.shared.lock();
        if state.abandoned {
            state.used += piece.len() as u64;
        } else if !piece.is_empty() {
            state.add(piece);
            self.is_unannounced = true;
        }
    }

    /// Wakes the thread if it has something to read. Once for all pieces of a turn: on one
    /// processor, a thread that wakes for each piece interrupts the loop for each piece.
    pub fn announce(&mut self) {
        if std::mem::take(&mut self.is_unannounced) {
            self.shared.changed.notify_one();
        }
    }

    /// How many bytes the thread has finished with.
    pub fn used(&self) -> u64 {
        self.shared.lock().used
    }

    pub fn end(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_one();
    }
}

impl Drop for Feed {
    /// Without an end, the channel was closed: the rest must not be written.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if !state.ended {
            let left: usize = state.pieces.drain(..).map(|piece| piece.len()).sum();
            state.used += left as u64;
        }
        drop(state);
        self.end();
    }
}

impl Intake {
    /// Gives the read piece back and waits for the next one. Leaves an empty piece at the end.
    fn advance(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        state.used += self.piece.len() as u64;
        self.unreported += self.piece.len();
        self.piece = Vec::new();
        self.at = 0;
        // The loop is woken before each wait, because the host may wait for this report.
        let must_wait = state.pieces.is_empty() && !state.ended;
        if self.unreported >= self.report_at || (must_wait && self.unreported > 0) {
            self.unreported = 0;
            self.bell.wake();
        }
        while state.pieces.is_empty() && !state.ended {
            state = shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.piece = state.pieces.pop_front().unwrap_or_default();
    }
}

impl BufRead for Intake {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.at == self.piece.len() {
            self.advance();
        }
        Ok(&self.piece[self.at..])
    }

    fn consume(&mut self, count: usize) {
        self.at += count;
    }
}

impl Read for Intake {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(buffer)?;
        self.consume(count);
        Ok(count)
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.abandoned = true;
        let left: usize = state.pieces.drain(..).map(|piece| piece.len()).sum();
        state.used += (self.piece.len() + left) as u64;
        drop(state);
        self.bell.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::Workers;

    fn pair(window: usize) -> (Feed, Intake) {
        feed(window, Workers::new().unwrap().to_loop())
    }

    #[test]
    fn a_thread_reads_what_was_pushed_and_then_the_end() {
        let (mut feed, mut intake) = pair(100);
        let reader = std::thread::spawn(move || {
            let mut seen = Vec::new();
            intake.read_to_end(&mut seen).unwrap();
            seen
        });
        feed.push(b"ab".to_vec());
        feed.push(Vec::new());
        feed.push(b"cde".to_vec());
        feed.announce();
        feed.end();
        assert_eq!(reader.join().unwrap(), b"abcde");
    }

    #[test]
    fn a_piece_is_used_only_when_all_of_it_was_read() {
        let (mut feed, mut intake) = pair(100);
        feed.push(vec![1; JOINED_MAX]);
        feed.push(b"d".to_vec());
        intake.read_exact(&mut [0; JOINED_MAX]).unwrap();
        assert_eq!(feed.used(), 0);
        intake.read_exact(&mut [0; 1]).unwrap();
        assert_eq!(feed.used(), JOINED_MAX as u64);
    }

    #[test]
    fn without_its_thread_every_byte_is_used() {
        let (mut feed, mut intake) = pair(100);
        feed.push(b"abc".to_vec());
        feed.push(b"def".to_vec());
        intake.read_exact(&mut [0; 1]).unwrap();
        drop(intake);
        feed.push(b"gh".to_vec());
        assert_eq!(feed.used(), 8);
    }

    #[test]
    fn a_feed_that_is_dropped_without_an_end_drops_what_was_not_read() {
        let (mut feed, mut intake) = pair(100);
        feed.push(b"abc".to_vec());
        drop(feed);
        let mut seen = Vec::new();
        intake.read_to_end(&mut seen).unwrap();
        assert_eq!(seen, b"");
    }

    #[test]
    fn a_feed_that_has_ended_may_be_dropped_before_it_is_read() {
        let (mut feed, mut intake) = pair(100);
        feed.push(b"abc".to_vec());
        feed.end();
        drop(feed);
        let mut seen = Vec::new();
        intake.read_to_end(&mut seen).unwrap();
        assert_eq!(seen, b"abc");
    }

    #[test]
    fn single_bytes_take_one_piece() {
        let (mut feed, _intake) = pair(100);
        (0..100).for_each(|_| feed.push(vec![1]));
        assert_eq!(feed.shared.lock().pieces.len(), 1);
    }
}
