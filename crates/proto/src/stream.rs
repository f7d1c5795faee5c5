//! The sending end of one stream: what was produced and not yet used by the other side.
//!
//! ```text
//!   0 ........ base ............ sent ............ produced ...... base + window
//!      used      | in flight or    |  not sent yet    |  room        |
//!      (gone)    | lost in a break |                  |              |
//! ```
//!
//! Always: at most `window` bytes are held; nothing between `base` and `produced` is forgotten, so
//! after a break sending continues from the offset that the other side names.

use std::collections::VecDeque;

use thiserror::Error;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum StreamError {
    #[error("offset {offset} is outside what is held, {base} to {produced}")]
    Offset {
        offset: u64,
        base: u64,
        produced: u64,
    },
}

#[derive(Debug)]
pub struct Outgoing {
    held: VecDeque<u8>,
    base: u64,
    sent: u64,
    window: usize,
    ended: bool,
    end_sent: bool,
}

impl Outgoing {
    pub fn new(window: usize) -> Self {
        Self {
            held: VecDeque::new(),
            base: 0,
            sent: 0,
            window,
            ended: false,
            end_sent: false,
        }
    }

    /// The rest of a stream that another sender began: `received` bytes of it have arrived, and
    /// `consumed` of them are used. What is in between takes its room as before, and is never sent
    /// again.
    pub fn taken_over(consumed: u64, received: u64, window: usize) -> Result<Self, StreamError> {
        let held = received
            .checked_sub(consumed)
            .filter(|held| *held <= window as u64);
        let held = held.ok_or(StreamError::Offset {
            offset: consumed,
            base: 0,
            produced: received,
        })?;
        let held = std::iter::repeat_n(0, held as usize).collect();
        Ok(Self {
            held,
            base: consumed,
            sent: received,
            ..Self::new(window)
        })
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn produced(&self) -> u64 {
        self.base + self.held.len() as u64
    }

    /// How many bytes may be produced before the other side has to use some.
    pub fn room(&self) -> usize {
        self.window - self.held.len()
    }

    /// Everything was produced, sent and used, and the end was sent.
    pub fn is_finished(&self) -> bool {
        self.ended && self.end_sent && self.held.is_empty()
    }

    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Adds bytes.
    ///
    /// # Panics
    /// If there is no [`room`](Self::room) for them.
    pub fn push(&mut self, bytes: &[u8]) {
        assert!(
            bytes.len() <= self.room(),
            "the producer asks for room first"
        );
        self.held.extend(bytes);
    }

    /// No more bytes will be produced.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// The next bytes to send, at most `limit`, with their offset. They count as sent.
    pub fn take(&mut self, limit: usize) -> Option<(u64, Vec<u8>)> {
        let offset = self.sent;
        let skip = (offset - self.base) as usize;
        let count = (self.held.len() - skip).min(limit);
        if count == 0 {
            return None;
        }
        self.sent += count as u64;
        Some((offset, self.copy(skip, count)))
    }

    /// Copies by slices, which is faster than byte by byte.
    fn copy(&self, skip: usize, count: usize) -> Vec<u8> {
        let (front, back) = self.held.as_slices();
        let mut bytes = Vec::with_capacity(count);
        if skip < front.len() {
            bytes.extend_from_slice(&front[skip..front.len().min(skip + count)]);
        }
        if bytes.len() < count {
            let from = skip.saturating_sub(front.len());
            bytes.extend_from_slice(&back[from..from + count - bytes.len()]);
        }
        bytes
    }

    /// The offset of the end, once, when everything before it has been sent.
    pub fn take_end(&mut self) -> Option<u64> {
        let due = self.ended && !self.end_sent && self.sent == self.produced();
        self.end_sent |= due;
        due.then(|| self.produced())
    }

    /// The other side has used everything before `consumed`. Old news is ignored.
    pub fn consumed(&mut self, consumed: u64) -> Result<(), StreamError> {
        if consumed > self.sent {
            return Err(StreamError::Offset {
                offset: consumed,
                base: self.base,
                produced: self.sent,
            });
        }
        if consumed > self.base {
            self.held.drain(..(consumed - self.base) as usize);
            self.base = consumed;
        }
        Ok(())
    }

    /// After a break: the other side has everything before `offset` and wants the rest.
    pub fn rewind(&mut self, offset: u64) -> Result<(), StreamError> {
        if offset < self.base || offset > self.produced() {
            return Err(StreamError::Offset {
                offset,
                base: self.base,
                produced: self.produced(),
            });
        }
        self.sent = offset;
        self.end_sent = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn continues_after_a_break_from_the_readers_offset() {
        let mut out = Outgoing::new(10);
        out.push(b"abcdef");
        assert_eq!(out.take(4), Some((0, b"abcd".to_vec())));
        out.consumed(2).unwrap();
        out.rewind(3).unwrap();
        assert_eq!(out.take(99), Some((3, b"def".to_vec())));
        assert_eq!(out.room(), 6);
    }

    #[test]
    fn the_end_is_sent_after_the_last_byte_and_again_after_a_break() {
        let mut out = Outgoing::new(10);
        out.push(b"ab");
        out.end();
        assert_eq!(out.take_end(), None);
        out.take(9);
        assert_eq!(out.take_end(), Some(2));
        assert_eq!(out.take_end(), None);
        out.rewind(2).unwrap();
        assert_eq!(out.take_end(), Some(2));
    }

    #[test]
    fn a_reader_that_claims_what_it_never_got_is_refused() {
        let mut out = Outgoing::new(10);
        out.push(b"ab");
        assert!(out.consumed(1).is_err());
        assert!(out.rewind(3).is_err());
    }

    #[test]
    fn what_another_sent_takes_its_room_until_it_is_used() {
        let mut out = Outgoing::taken_over(3, 7, 10).unwrap();
        assert_eq!((out.room(), out.produced(), out.take(9)), (6, 7, None));
        out.push(b"ab");
        assert_eq!(out.take(9), Some((7, b"ab".to_vec())));
        out.consumed(7).unwrap();
        assert_eq!(out.room(), 8);
        assert!(Outgoing::taken_over(0, 11, 10).is_err());
        assert!(Outgoing::taken_over(8, 7, 10).is_err());
    }

    proptest! {
        /// Whatever breaks happen, a reader that continues from its own offset sees every byte
        /// once.
        #[test]
        fn no_byte_is_lost_or_doubled(seed in prop::collection::vec(0u8..5, 1..400)) {
            let mut out = Outgoing::new(37);
            let mut made = Vec::new();
            let mut got = Vec::new();
            let mut used = 0u64;
            for (step, action) in seed.iter().enumerate() {
                match action {
                    0 | 1 => {
                        let count = out.room().min(11);
                        let bytes: Vec<u8> = (0..count).map(|i| (i + step) as u8).collect();
                        made.extend_from_slice(&bytes);
                        out.push(&bytes);
                    }
                    2 => if let Some((offset, bytes)) = out.take(7) {
                        prop_assert_eq!(offset, got.len() as u64);
                        got.extend(bytes);
                    },
                    3 => {
                        used = (used + 5).min(got.len() as u64);
                        out.consumed(used).unwrap();
                    }
                    _ => {
                        out.take(3);
                        out.rewind(got.len() as u64).unwrap();
                    }
                }
            }
            prop_assert_eq!(&made[..got.len()], &got[..]);
        }
    }
}
