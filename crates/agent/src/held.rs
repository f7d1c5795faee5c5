//! The bytes of one stream to the host that the host has not used yet, ready to be sent.
//!
//! ```text
//!   chunks:  | frame of 64 KiB | frame | bytes of small reads | frame |
//!   offsets: base ........................ sent ................. produced ... base + window
//! ```
//!
//! A large read goes straight into the frames from which it is sent, because under emulation a copy
//! costs as much as half of the port. Small reads are joined, so that a program that writes single
//! bytes takes no more memory than its bytes.
//!
//! Always: at most `window` bytes are held, in at most twice their memory and two chunks. Nothing
//! between `base` and `produced` is forgotten, so after a break sending continues from the offset
//! that the host names; a frame in the middle of which that offset lies is sent whole, and the host
//! drops what it has.

use std::collections::VecDeque;
use std::rc::Rc;

use sandtree_proto::frame::{HEADER_LEN, TRAILER_LEN, seal_data};
use sandtree_proto::{StreamError, StreamId};

/// A frame as a whole: two buffers of the port, which takes 32 KiB at a time.
const FRAME: usize = 64 * 1024;
/// The payload of one frame.
pub const PIECE: usize = FRAME - HEADER_LEN - TRAILER_LEN;
/// The frames that are kept for later reads: new memory costs a page fault for each page.
const SPARE_MAX: usize = 16;

/// A frame, with a payload that is read to its place.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Box<[u8]>,
    length: usize,
}

impl FrameBuffer {
    fn new() -> Self {
        Self {
            bytes: vec![0; FRAME].into_boxed_slice(),
            length: 0,
        }
    }

    /// The place of the payload.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[HEADER_LEN..HEADER_LEN + PIECE]
    }

    fn payload(&self, length: usize) -> &[u8] {
        &self.bytes[HEADER_LEN..HEADER_LEN + length]
    }

    /// The bytes for the port.
    pub fn encoded(&self) -> &[u8] {
        &self.bytes[..HEADER_LEN + self.length + TRAILER_LEN]
    }

    fn seal(&mut self, channel: u32, stream: StreamId, offset: u64) {
        let end = HEADER_LEN + self.length + TRAILER_LEN;
        seal_data(&mut self.bytes[..end], channel, stream, offset);
    }
}

/// Frames to read into, shared by all streams.
#[derive(Debug, Default)]
pub struct Spares(Vec<FrameBuffer>);

impl Spares {
    pub fn take(&mut self) -> FrameBuffer {
        self.0.pop().unwrap_or_else(FrameBuffer::new)
    }

    pub fn put(&mut self, frame: FrameBuffer) {
        if self.0.len() < SPARE_MAX {
            self.0.push(frame);
        }
    }
}

#[derive(Debug)]
struct Chunk {
    offset: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// At least half full. Shared with the port's queue while that sends it.
    Frame(Rc<FrameBuffer>),
    Bytes(Vec<u8>),
}

impl Chunk {
    fn end(&self) -> u64 {
        let length = match &self.content {
            Content::Frame(frame) => frame.length,
            Content::Bytes(bytes) => bytes.len(),
        };
        self.offset + length as u64
    }
}

/// The next part of a stream to send.
#[derive(Debug)]
pub enum Piece<'a> {
    Frame(Rc<FrameBuffer>),
    Bytes { offset: u64, bytes: &'a [u8] },
}

#[derive(Debug)]
pub struct Held {
    chunks: VecDeque<Chunk>,
    base: u64,
    sent: u64,
    produced: u64,
    window: usize,
    ended: bool,
    end_sent: bool,
}

impl Held {
    pub fn new(window: usize) -> Self {
        Self {
            chunks: VecDeque::new(),
            base: 0,
            sent: 0,
            produced: 0,
            window,
            ended: false,
            end_sent: false,
        }
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn produced(&self) -> u64 {
        self.produced
    }

    /// How many bytes may be produced before the host has to use some.
    pub fn room(&self) -> usize {
        self.window - (self.produced - self.base) as usize
    }

    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// No more bytes will be produced.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Adds the first `length` bytes of the frame's room. Returns the frame if it was not kept.
    ///
    /// # Panics
    /// If there is no [`room`](Self::room) for them.
    pub fn push(&mut self, mut frame: FrameBuffer, length: usize) -> Option<FrameBuffer> {
        assert!(length <= self.room(), "the reader asks for room first");
        if length < PIECE / 2 {
            self.join(frame.payload(length));
            return Some(frame);
        }
        frame.length = length;
        let content = Content::Frame(Rc::new(frame));
        self.append(content, length);
        None
    }

    fn join(&mut self, bytes: &[u8]) {
        match self.chunks.back_mut() {
            Some(Chunk {
                content: Content::Bytes(last),
                ..
            }) if last.len() + bytes.len() <= PIECE => {
                last.extend_from_slice(bytes);
                self.produced += bytes.len() as u64;
            }
            _ => self.append(Content::Bytes(bytes.to_vec()), bytes.len()),
        }
    }

    fn append(&mut self, content: Content, length: usize) {
        let offset = self.produced;
        self.chunks.push_back(Chunk { offset, content });
        self.produced += length as u64;
    }

    /// The next piece to send, as one of this channel and stream. It counts as sent.
    pub fn take(&mut self, channel: u32, stream: StreamId) -> Option<Piece<'_>> {
        let sent = self.sent;
        let index = self.chunks.partition_point(|chunk| chunk.end() <= sent);
        let chunk = self.chunks.get_mut(index)?;
        self.sent = chunk.end();
        match &mut chunk.content {
            Content::Frame(frame) => {
                // A frame that the port's queue still has is sealed.
                if let Some(unshared) = Rc::get_mut(frame) {
                    unshared.seal(channel, stream, chunk.offset);
                }
                Some(Piece::Frame(Rc::clone(frame)))
            }
            Content::Bytes(bytes) => Some(Piece::Bytes {
                offset: sent,
                bytes: &bytes[(sent - chunk.offset) as usize..],
            }),
        }
    }

    /// The offset of the end, once, when everything before it has been sent.
    pub fn take_end(&mut self) -> Option<u64> {
        let due = self.ended && !self.end_sent && self.sent == self.produced;
        self.end_sent |= due;
        due.then_some(self.produced)
    }

    /// The host has used everything before `consumed`. An earlier offset is ignored.
    pub fn consumed(&mut self, consumed: u64, spares: &mut Spares) -> Result<(), StreamError> {
        if consumed > self.sent {
            return Err(StreamError::Offset {
                offset: consumed,
                base: self.base,
                produced: self.sent,
            });
        }
        self.base = self.base.max(consumed);
        let used = self.chunks.partition_point(|chunk| chunk.end() <= consumed);
        for chunk in self.chunks.drain(..used) {
            if let Content::Frame(frame) = chunk.content
                && let Some(frame) = Rc::into_inner(frame)
            {
                spares.put(frame);
            }
        }
        Ok(())
    }

    /// After a break: the host has everything before `offset` and wants the rest.
    pub fn rewind(&mut self, offset: u64) -> Result<(), StreamError> {
        if offset < self.base || offset > self.produced {
            return Err(StreamError::Offset {
                offset,
                base: self.base,
                produced: self.produced,
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
    use sandtree_proto::{Decoded, Decoder, Frame, Nonce, frame};

    use super::*;

    fn filled(length: usize, from: u64) -> FrameBuffer {
        let mut buffer = FrameBuffer::new();
        for (byte, at) in buffer.room()[..length].iter_mut().zip(from..) {
            *byte = content(at);
        }
        buffer
    }

    /// The byte of the stream at this offset.
    fn content(at: u64) -> u8 {
        (at % 251) as u8
    }

    fn produce(held: &mut Held, length: usize, spares: &mut Spares) {
        let buffer = filled(length, held.produced());
        if let Some(unused) = held.push(buffer, length) {
            spares.put(unused);
        }
    }

    /// Takes a piece as the host receives it.
    fn sent(held: &mut Held) -> Option<(u64, Vec<u8>)> {
        let encoded = match held.take(7, StreamId::Out)? {
            Piece::Bytes { offset, bytes } => return Some((offset, bytes.to_vec())),
            Piece::Frame(frame) => frame.encoded().to_vec(),
        };
        let mut stream = Vec::new();
        frame::encode_preamble(&mut stream, Nonce([1; 16]));
        stream.extend(encoded);
        let mut decoder = Decoder::new();
        decoder.feed(&stream);
        assert!(matches!(decoder.next(), Some(Ok(Decoded::Preamble(_)))));
        match decoder.next() {
            Some(Ok(Decoded::Frame(Frame::Data {
                channel: 7,
                stream: StreamId::Out,
                offset,
                bytes,
            }))) => Some((offset, bytes)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn single_bytes_take_one_chunk() {
        let mut held = Held::new(1000);
        let mut spares = Spares::default();
        (0..1000).for_each(|_| produce(&mut held, 1, &mut spares));
        assert_eq!(held.chunks.len(), 1);
        assert_eq!(held.room(), 0);
    }

    #[test]
    fn a_used_frame_is_read_into_again_unless_the_port_still_sends_it() {
        let mut held = Held::new(2 * PIECE);
        let mut spares = Spares::default();
        produce(&mut held, PIECE, &mut spares);
        produce(&mut held, PIECE, &mut spares);
        drop(held.take(1, StreamId::Out));
        let Some(Piece::Frame(queued)) = held.take(1, StreamId::Out) else {
            panic!("a full frame is sent as it is")
        };
        held.consumed(2 * PIECE as u64, &mut spares).unwrap();
        assert_eq!(spares.0.len(), 1);
        assert_eq!(queued.encoded().len(), FRAME);
    }

    #[test]
    fn a_host_that_claims_what_it_never_got_is_refused() {
        let mut held = Held::new(10);
        let mut spares = Spares::default();
        produce(&mut held, 2, &mut spares);
        assert!(held.consumed(1, &mut spares).is_err());
        assert!(held.rewind(3).is_err());
    }

    #[test]
    fn the_end_is_sent_after_the_last_byte_and_again_after_a_break() {
        let mut held = Held::new(10);
        let mut spares = Spares::default();
        produce(&mut held, 2, &mut spares);
        held.end();
        assert_eq!(held.take_end(), None);
        drop(held.take(1, StreamId::Err));
        assert_eq!(held.take_end(), Some(2));
        assert_eq!(held.take_end(), None);
        held.rewind(2).unwrap();
        assert_eq!(held.take_end(), Some(2));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Whatever breaks happen, a host that drops what it has sees every byte once, in order.
        #[test]
        fn no_byte_is_lost_or_doubled(
            steps in prop::collection::vec((0u8..5, 0usize..4, 0.0f64..1.0), 1..80),
        ) {
            let mut held = Held::new(5 * PIECE);
            let mut spares = Spares::default();
            let mut got = 0u64;
            let mut used = 0u64;
            for (action, size, part) in steps {
                match action {
                    0 | 1 => {
                        let sizes = [1, PIECE / 2 - 1, PIECE / 2, PIECE];
                        let length = sizes[size].min(held.room());
                        produce(&mut held, length, &mut spares);
                    }
                    2 => if let Some((offset, bytes)) = sent(&mut held) {
                        prop_assert!(offset <= got);
                        let mut bytes_at = bytes.iter().zip(offset..);
                        let right = bytes_at.all(|(byte, at)| *byte == content(at));
                        prop_assert!(right);
                        got = got.max(offset + bytes.len() as u64);
                    },
                    3 => {
                        used += ((got - used) as f64 * part) as u64;
                        held.consumed(used, &mut spares).unwrap();
                    }
                    _ => {
                        // Sent and lost; the host has a part of what came before.
                        drop(held.take(7, StreamId::Out));
                        held.rewind(got).unwrap();
                    }
                }
                prop_assert!(held.room() <= 5 * PIECE);
            }
            held.rewind(got).unwrap();
            while let Some((offset, bytes)) = sent(&mut held) {
                prop_assert!(offset <= got && offset + bytes.len() as u64 > got);
                got = offset + bytes.len() as u64;
            }
            prop_assert_eq!(got, held.produced());
        }
    }
}
