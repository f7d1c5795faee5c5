//! Frames: what a byte stream between host and guest is cut into.
//!
//! ```text
//!  0      1       2         4          8         12       16        24            24+length
//!  | kind | stream | zero    | length   | channel | check  | offset  | payload …  | check |
//!  | u8   | u8     | u16     | u32      | u32     | u32    | u64     |            | u32   |
//! ```
//!
//! All numbers are little-endian. `check` is the CRC-32 of the header with `check` itself as zero;
//! it stands again behind the payload, so a frame that was cut by a break and filled up by what
//! came next is found out.
//!
//! A stream begins with a *preamble*: as many zero bytes as a frame can have (they complete
//! whatever the other side was in the middle of; a zero header is never valid), then a magic, a
//! nonce and their CRC-32:
//!
//! ```text
//!  | 0 × PADDING | magic, 16 bytes | nonce, 16 bytes | crc32(magic, nonce) |
//! ```
//!
//! The host makes the nonce and the agent echoes it, with no padding, so neither can take an old
//! stream for the new one.
//!
//! Always: a decoder holds at most one frame. After an error it is hunting for a preamble again and
//! can be fed on.

use std::ops::Range;

use thiserror::Error;

/// The largest payload of one frame, in bytes.
pub const MAX_PAYLOAD: usize = 64 * 1024;
pub const HEADER_LEN: usize = 24;
pub const TRAILER_LEN: usize = 4;
/// Zero bytes in front of the host's preamble: enough to complete any frame the agent waits for.
pub const PADDING: usize = HEADER_LEN + MAX_PAYLOAD + TRAILER_LEN;
pub const MAGIC: [u8; 16] = *b"\xF5sandtree link\r\n";
const PREAMBLE_LEN: usize = MAGIC.len() + 16 + 4;

/// Names one stream of bytes within a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum StreamId {
    /// Host to guest: stdin, a file being written.
    In = 0,
    /// Guest to host: stdout, a terminal, a file being read.
    Out = 1,
    /// Guest to host: stderr.
    Err = 2,
}

impl StreamId {
    fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::In),
            1 => Some(Self::Out),
            2 => Some(Self::Err),
            _ => None,
        }
    }
}

/// What makes one connection different from every other, also from the one a restored guest
/// remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nonce(pub [u8; 16]);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// An encoded [`HostMessage`](crate::HostMessage) or [`AgentMessage`](crate::AgentMessage).
    Message(Vec<u8>),
    /// Bytes of a stream; `offset` is the position of the first.
    Data {
        channel: u32,
        stream: StreamId,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// The stream ends at `offset`.
    Eof {
        channel: u32,
        stream: StreamId,
        offset: u64,
    },
    /// The receiver has used everything before `consumed`: the sender may forget it and send as
    /// much again.
    Window {
        channel: u32,
        stream: StreamId,
        consumed: u64,
    },
}

const KIND_MESSAGE: u8 = 1;
const KIND_DATA: u8 = 2;
const KIND_EOF: u8 = 3;
const KIND_WINDOW: u8 = 4;

#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("frame header fails its check")]
    Header,
    #[error("frame of kind {0} is unknown")]
    Kind(u8),
    #[error("frame payload of {0} bytes is over the limit")]
    Length(u32),
    #[error("frame is cut: its trailer does not match")]
    Trailer,
}

impl Frame {
    /// Appends the frame's bytes to `out`.
    ///
    /// # Panics
    /// If the payload is over [`MAX_PAYLOAD`]; senders cut their data, and messages are bounded
    /// where they are made.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Frame::Message(payload) => encode(out, KIND_MESSAGE, 0, 0, 0, payload),
            Frame::Data {
                channel,
                stream,
                offset,
                bytes,
            } => encode_data(out, *channel, *stream, *offset, bytes),
            Frame::Eof {
                channel,
                stream,
                offset,
            } => encode(out, KIND_EOF, *stream as u8, *channel, *offset, &[]),
            Frame::Window {
                channel,
                stream,
                consumed,
            } => {
                encode(out, KIND_WINDOW, *stream as u8, *channel, *consumed, &[]);
            }
        }
    }
}

/// Appends a data frame without an owned copy of its bytes.
pub fn encode_data(out: &mut Vec<u8>, channel: u32, stream: StreamId, offset: u64, bytes: &[u8]) {
    encode(out, KIND_DATA, stream as u8, channel, offset, bytes);
}

/// Completes a data frame around its payload, which stands in `frame` between the room for header
/// and trailer. So bytes can be sent from the place to which they were read.
///
/// # Panics
/// If the payload is over [`MAX_PAYLOAD`], or there is no room for header and trailer.
pub fn seal_data(frame: &mut [u8], channel: u32, stream: StreamId, offset: u64) {
    let length = frame.len() - HEADER_LEN - TRAILER_LEN;
    let header = Fields {
        kind: KIND_DATA,
        stream: stream as u8,
        channel,
        offset,
        length,
    }
    .encode();
    frame[..HEADER_LEN].copy_from_slice(&header);
    frame[HEADER_LEN + length..].copy_from_slice(&header[CHECK]);
}

fn encode(out: &mut Vec<u8>, kind: u8, stream: u8, channel: u32, offset: u64, payload: &[u8]) {
    let header = Fields {
        kind,
        stream,
        channel,
        offset,
        length: payload.len(),
    }
    .encode();
    out.extend_from_slice(&header);
    out.extend_from_slice(payload);
    out.extend_from_slice(&header[CHECK]);
}

/// Where the check stands in a header.
const CHECK: Range<usize> = 12..16;

/// The fields of a header.
struct Fields {
    kind: u8,
    stream: u8,
    channel: u32,
    offset: u64,
    length: usize,
}

impl Fields {
    fn encode(&self) -> [u8; HEADER_LEN] {
        assert!(
            self.length <= MAX_PAYLOAD,
            "a frame's payload is cut by its sender"
        );
        let mut header = [0u8; HEADER_LEN];
        header[0] = self.kind;
        header[1] = self.stream;
        header[4..8].copy_from_slice(&(self.length as u32).to_le_bytes());
        header[8..12].copy_from_slice(&self.channel.to_le_bytes());
        header[16..24].copy_from_slice(&self.offset.to_le_bytes());
        let check = crc32fast::hash(&header).to_le_bytes();
        header[CHECK].copy_from_slice(&check);
        header
    }
}

/// The preamble of the host: padding, magic, nonce.
pub fn encode_host_preamble(out: &mut Vec<u8>, nonce: Nonce) {
    out.resize(out.len() + PADDING, 0);
    encode_preamble(out, nonce);
}

/// The preamble of the agent: the host is already hunting, so it needs no padding.
pub fn encode_preamble(out: &mut Vec<u8>, nonce: Nonce) {
    let start = out.len();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&nonce.0);
    let check = crc32fast::hash(&out[start..]);
    out.extend_from_slice(&check.to_le_bytes());
}

/// What a [`Decoder`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decoded {
    /// A new stream begins here; everything known of the old one is void.
    Preamble(Nonce),
    Frame(Frame),
}

/// What [`Decoder::next_part`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    Preamble(Nonce),
    Message(&'a [u8]),
    Data(&'a [u8]),
    /// A frame of another kind.
    Other,
}

/// Cuts a byte stream into frames. Starts out hunting for a preamble.
///
/// ```text
///   buffer: | taken | pending ............ | spare |
///           0       start                  end
/// ```
#[derive(Debug)]
pub struct Decoder {
    /// All of it is initialised, so that a reader can be given its spare part.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    hunting: bool,
    /// The header of the frame that is not complete yet: it is checked once, however many pieces
    /// its payload comes in.
    header: Option<Header>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    pub fn new() -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            end: 0,
            hunting: true,
            header: None,
        }
    }

    /// Takes bytes in. Call [`next`](Self::next) until it gives nothing before feeding on, and
    /// memory stays bounded by one frame and one read.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.spare(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }

    /// Room for at least `count` bytes, into which a reader can put what comes next without a copy.
    /// [`filled`](Self::filled) takes it in; the rule of [`feed`](Self::feed) holds here as well.
    pub fn spare(&mut self, count: usize) -> &mut [u8] {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.buffer.len() < self.end + count {
            self.buffer.resize(self.end + count, 0);
        }
        &mut self.buffer[self.end..]
    }

    /// Takes in the first `count` bytes of the spare room.
    ///
    /// # Panics
    /// If there was less room.
    pub fn filled(&mut self, count: usize) {
        assert!(
            count <= self.buffer.len() - self.end,
            "a reader fills at most the room that it was given"
        );
        self.end += count;
    }

    /// The next preamble or frame, if one is complete. After an error the decoder hunts for a
    /// preamble.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator must not end and then continue; this does"
    )]
    pub fn next(&mut self) -> Option<Result<Decoded, FrameError>> {
        if self.hunting {
            return self.hunt().map(|nonce| Ok(Decoded::Preamble(nonce)));
        }
        match self.frame() {
            Ok(frame) => frame.map(|f| Ok(Decoded::Frame(f))),
            Err(error) => {
                self.hunting = true;
                Some(Err(error))
            }
        }
    }

    /// Goes back to hunting: frames were well formed and yet what they said cannot be.
    pub fn resync(&mut self) {
        self.hunting = true;
        self.header = None;
    }

    fn pending(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    fn hunt(&mut self) -> Option<Nonce> {
        loop {
            let pending = self.pending();
            let Some(at) = pending.iter().position(|&b| b == MAGIC[0]) else {
                self.start = self.end;
                return None;
            };
            self.start += at;
            let pending = self.pending();
            if pending.len() < PREAMBLE_LEN {
                let known = pending.len().min(MAGIC.len());
                if pending[..known] == MAGIC[..known] {
                    return None;
                }
            } else if let Some(nonce) = preamble(&pending[..PREAMBLE_LEN]) {
                self.start += PREAMBLE_LEN;
                self.hunting = false;
                return Some(nonce);
            }
            self.start += 1;
        }
    }

    /// As [`next`](Self::next), without a copy of the payload.
    pub(crate) fn next_part(&mut self) -> Option<Result<Part<'_>, FrameError>> {
        if self.hunting {
            return self.hunt().map(|nonce| Ok(Part::Preamble(nonce)));
        }
        match self.whole() {
            Ok(None) => None,
            Ok(Some((header, payload))) => Some(Ok(header.into_part(&self.buffer[payload]))),
            Err(error) => {
                self.hunting = true;
                Some(Err(error))
            }
        }
    }

    fn frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some((header, payload)) = self.whole()? else {
            return Ok(None);
        };
        let payload = self.buffer[payload].to_vec();
        header.into_frame(payload).map(Some)
    }

    /// Takes a frame that is complete. Returns where its payload stands until the next read.
    fn whole(&mut self) -> Result<Option<(Header, Range<usize>)>, FrameError> {
        let header = match self.header.take() {
            Some(header) => header,
            None if self.pending().len() < HEADER_LEN => return Ok(None),
            None => Header::parse(self.pending())?,
        };
        let pending = self.pending();
        let total = HEADER_LEN + header.length + TRAILER_LEN;
        if pending.len() < total {
            self.header = Some(header);
            return Ok(None);
        }
        if pending[total - TRAILER_LEN..total] != header.check {
            return Err(FrameError::Trailer);
        }
        let from = self.start + HEADER_LEN;
        self.start += total;
        Ok(Some((header, from..self.start - TRAILER_LEN)))
    }
}

fn preamble(bytes: &[u8]) -> Option<Nonce> {
    let (body, check) = bytes.split_at(PREAMBLE_LEN - 4);
    let valid = body.starts_with(&MAGIC) && crc32fast::hash(body).to_le_bytes() == check;
    valid.then(|| {
        Nonce(
            body[MAGIC.len()..]
                .try_into()
                .expect("the split leaves 16 bytes"),
        )
    })
}

#[derive(Debug)]
struct Header {
    kind: u8,
    stream: StreamId,
    channel: u32,
    offset: u64,
    length: usize,
    check: [u8; 4],
}

impl Header {
    fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut header: [u8; HEADER_LEN] = bytes[..HEADER_LEN]
            .try_into()
            .expect("the caller has a whole header");
        let check = [header[12], header[13], header[14], header[15]];
        header[12..16].fill(0);
        if crc32fast::hash(&header).to_le_bytes() != check || header[2..4] != [0, 0] {
            return Err(FrameError::Header);
        }
        let number =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let length = number(4);
        if length as usize > MAX_PAYLOAD {
            return Err(FrameError::Length(length));
        }
        let stream = StreamId::from_byte(header[1]).ok_or(FrameError::Header)?;
        let offset = u64::from_le_bytes(header[16..24].try_into().expect("eight bytes"));
        Ok(Self {
            kind: header[0],
            stream,
            channel: number(8),
            offset,
            length: length as usize,
            check,
        })
    }

    fn into_part(self, bytes: &[u8]) -> Part<'_> {
        match self.kind {
            KIND_MESSAGE => Part::Message(bytes),
            KIND_DATA => Part::Data(bytes),
            _ => Part::Other,
        }
    }

    fn into_frame(self, bytes: Vec<u8>) -> Result<Frame, FrameError> {
        let Self {
            kind,
            stream,
            channel,
            offset,
            ..
        } = self;
        match kind {
            KIND_MESSAGE => Ok(Frame::Message(bytes)),
            KIND_DATA => Ok(Frame::Data {
                channel,
                stream,
                offset,
                bytes,
            }),
            KIND_EOF if bytes.is_empty() => Ok(Frame::Eof {
                channel,
                stream,
                offset,
            }),
            KIND_WINDOW if bytes.is_empty() => Ok(Frame::Window {
                channel,
                stream,
                consumed: offset,
            }),
            KIND_EOF | KIND_WINDOW => Err(FrameError::Length(bytes.len() as u32)),
            other => Err(FrameError::Kind(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONCE: Nonce = Nonce([7; 16]);

    fn synced() -> Decoder {
        let mut decoder = Decoder::new();
        let mut bytes = Vec::new();
        encode_preamble(&mut bytes, NONCE);
        decoder.feed(&bytes);
        assert_eq!(decoder.next(), Some(Ok(Decoded::Preamble(NONCE))));
        decoder
    }

    fn data(bytes: &[u8]) -> Frame {
        Frame::Data {
            channel: 3,
            stream: StreamId::Out,
            offset: 5,
            bytes: bytes.to_vec(),
        }
    }

    /// These bytes stand in `docs/protocol.md`.
    #[test]
    fn golden_data_frame() {
        let mut bytes = Vec::new();
        data(b"hi").encode(&mut bytes);
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "020100000200000003000000e1206f4a05000000000000006869".to_owned() + "e1206f4a"
        );
    }

    #[test]
    fn a_frame_sealed_in_place_has_the_bytes_of_an_encoded_one() {
        let mut encoded = Vec::new();
        data(b"hi").encode(&mut encoded);
        let mut sealed = [0xff; HEADER_LEN + 2 + TRAILER_LEN];
        sealed[HEADER_LEN..HEADER_LEN + 2].copy_from_slice(b"hi");
        seal_data(&mut sealed, 3, StreamId::Out, 5);
        assert_eq!(sealed, encoded[..]);
    }

    #[test]
    fn a_frame_cut_by_a_break_is_refused_and_the_next_stream_found() {
        let mut decoder = synced();
        let mut bytes = Vec::new();
        data(&[9; 1000]).encode(&mut bytes);
        bytes.truncate(500);
        encode_host_preamble(&mut bytes, Nonce([8; 16]));
        data(b"new").encode(&mut bytes);
        decoder.feed(&bytes);
        assert_eq!(decoder.next(), Some(Err(FrameError::Trailer)));
        assert_eq!(decoder.next(), Some(Ok(Decoded::Preamble(Nonce([8; 16])))));
        assert_eq!(decoder.next(), Some(Ok(Decoded::Frame(data(b"new")))));
        assert_eq!(decoder.next(), None);
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_its_bytes_come() {
        let mut header = [0u8; HEADER_LEN];
        header[0] = KIND_DATA;
        header[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        let check = crc32fast::hash(&header).to_le_bytes();
        header[12..16].copy_from_slice(&check);
        let mut decoder = synced();
        decoder.feed(&header);
        assert_eq!(decoder.next(), Some(Err(FrameError::Length(u32::MAX))));
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..20),
            cuts in prop::collection::vec(1usize..97, 1..40),
        ) {
            let mut bytes = Vec::new();
            let frames: Vec<Frame> = payloads.iter().map(|p| data(p)).collect();
            frames.iter().for_each(|f| f.encode(&mut bytes));
            let mut decoder = synced();
            let mut seen = Vec::new();
            let mut at = 0;
            let mut cut = cuts.iter().cycle();
            while at < bytes.len() {
                let end = (at + cut.next().unwrap()).min(bytes.len());
                decoder.feed(&bytes[at..end]);
                at = end;
                while let Some(found) = decoder.next() {
                    let Decoded::Frame(frame) = found.unwrap() else { panic!("no preamble was sent") };
                    seen.push(frame);
                }
            }
            prop_assert_eq!(seen, frames);
        }

        #[test]
        fn garbage_neither_panics_nor_grows(
            bytes in prop::collection::vec(any::<u8>(), 0..4000),
            start_synced: bool,
        ) {
            let mut decoder = if start_synced { synced() } else { Decoder::new() };
            for chunk in bytes.chunks(61) {
                decoder.feed(chunk);
                while decoder.next().is_some() {}
                prop_assert!(decoder.pending().len() <= PADDING + 61);
            }
        }
    }
}
