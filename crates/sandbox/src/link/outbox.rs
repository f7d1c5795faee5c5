//! Data that waits to be written to a connection: messages first, then the streams' bytes in turn.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use sandtree_proto::Outgoing;
use sandtree_proto::frame::{Frame, MAX_PAYLOAD, StreamId, encode_data};

/// Enough for one write to be worth its system call, and little enough that a message waits for
/// milliseconds only.
const BATCH: usize = 256 * 1024;

/// A channel whose outgoing stream an [`Outbox`] sends.
pub(crate) trait Source {
    fn stream(&mut self) -> &mut Outgoing;

    /// Whether the other side does not know the channel yet, so that nothing of it is sent.
    fn waits(&self) -> bool {
        false
    }

    /// The acknowledgement to send to the other side, once.
    fn take_window(&mut self) -> Option<(StreamId, u64)> {
        None
    }
}

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    messages: VecDeque<Frame>,
    /// The channel that was served last; the next round starts after it.
    turn: u32,
}

impl Outbox {
    pub fn push(&mut self, frame: Frame) {
        self.messages.push_back(frame);
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Encodes waiting data, one chunk per channel and round, until the batch is full or nothing is
    /// left.
    pub fn fill<S: Source>(&mut self, channels: &mut BTreeMap<u32, S>, bytes: &mut Vec<u8>) {
        while bytes.len() < BATCH {
            let Some(frame) = self.messages.pop_front() else {
                break;
            };
            frame.encode(bytes);
        }
        while bytes.len() < BATCH && self.round(channels, bytes) {}
    }

    fn round<S: Source>(&mut self, channels: &mut BTreeMap<u32, S>, bytes: &mut Vec<u8>) -> bool {
        let before = bytes.len();
        let start = self.turn;
        let after = (Bound::Excluded(start), Bound::Unbounded);
        let order: Vec<u32> = channels
            .range(after)
            .chain(channels.range(..=start))
            .map(|(id, _)| *id)
            .collect();
        for id in order {
            if bytes.len() >= BATCH {
                break;
            }
            let source = channels.get_mut(&id).expect("its id was just listed");
            if source.waits() {
                continue;
            }
            while let Some((stream, consumed)) = source.take_window() {
                Frame::Window {
                    channel: id,
                    stream,
                    consumed,
                }
                .encode(bytes);
            }
            let stream = source.stream();
            if let Some((offset, chunk)) = stream.take(MAX_PAYLOAD) {
                encode_data(bytes, id, StreamId::In, offset, &chunk);
                self.turn = id;
            }
            if let Some(offset) = stream.take_end() {
                Frame::Eof {
                    channel: id,
                    stream: StreamId::In,
                    offset,
                }
                .encode(bytes);
            }
        }
        bytes.len() > before
    }
}
