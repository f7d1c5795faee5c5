//! One channel, as its user holds it: streams to read, a stream to write, and an end to wait for.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use sandtree_proto::frame::{Frame, StreamId};
use sandtree_proto::{HostMessage, Outcome, Outgoing, TermSize};
use tokio::sync::watch;

use super::{Connection, LinkError, Source, protocol};

/// A channel's part in the link's state.
#[derive(Debug)]
pub(super) struct Slot {
    input: Outgoing,
    out: Incoming,
    err: Incoming,
    started: Option<u32>,
    outcome: Option<Outcome>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Incoming {
    chunks: VecDeque<Bytes>,
    received: u64,
    consumed: u64,
    told: u64,
    window: u64,
    ended: bool,
}

impl Incoming {
    fn new(window: usize) -> Self {
        Self {
            chunks: VecDeque::new(),
            received: 0,
            consumed: 0,
            told: 0,
            window: window as u64,
            ended: false,
        }
    }

    fn data(&mut self, offset: u64, bytes: Vec<u8>) -> Result<(), LinkError> {
        let received = self.received + bytes.len() as u64;
        if offset != self.received || self.ended || received - self.consumed > self.window {
            return Err(protocol("bytes out of turn or over the window"));
        }
        self.received = received;
        self.chunks.push_back(bytes.into());
        Ok(())
    }

    /// Takes a chunk, and returns the acknowledged offset if one is due.
    fn take(&mut self) -> Option<(Bytes, Option<u64>)> {
        let chunk = self.chunks.pop_front()?;
        self.consumed += chunk.len() as u64;
        let due = self.consumed - self.told >= self.window / 4;
        if due {
            self.told = self.consumed;
        }
        Some((chunk, due.then_some(self.consumed)))
    }
}

impl Source for Slot {
    fn stream(&mut self) -> &mut Outgoing {
        &mut self.input
    }
}

impl Slot {
    pub fn new(window: usize) -> (Self, watch::Receiver<()>) {
        let (changed, seen) = watch::channel(());
        let out = Incoming::new(window);
        let err = Incoming::new(window);
        (
            Self {
                input: Outgoing::new(window),
                out,
                err,
                started: None,
                outcome: None,
                changed,
            },
            seen,
        )
    }

    fn incoming(&mut self, stream: StreamId) -> Result<&mut Incoming, LinkError> {
        match stream {
            StreamId::Out => Ok(&mut self.out),
            StreamId::Err => Ok(&mut self.err),
            StreamId::In => Err(protocol("bytes on a stream of ours")),
        }
    }

    pub fn data(&mut self, stream: StreamId, offset: u64, bytes: Vec<u8>) -> Result<(), LinkError> {
        self.incoming(stream)?.data(offset, bytes)?;
        self.touch();
        Ok(())
    }

    pub fn eof(&mut self, stream: StreamId, offset: u64) -> Result<(), LinkError> {
        let incoming = self.incoming(stream)?;
        if offset != incoming.received {
            return Err(protocol("a stream that ends before its last byte"));
        }
        incoming.ended = true;
        self.touch();
        Ok(())
    }

    pub fn consumed(&mut self, consumed: u64) -> Result<(), LinkError> {
        self.input.consumed(consumed).map_err(protocol)?;
        self.touch();
        Ok(())
    }

    pub fn started(&mut self, pid: u32) {
        self.started = Some(pid);
        self.touch();
    }

    pub fn ended(&mut self, outcome: Outcome) {
        self.outcome = Some(outcome);
        self.touch();
    }

    /// Wakes every task that waits for this channel.
    pub fn touch(&self) {
        self.changed.send_replace(());
    }
}

/// An open channel. Its parts can be taken apart and used from different tasks.
#[derive(Debug)]
pub struct Channel {
    pub out: Output,
    pub err: Output,
    pub input: Input,
    pub control: Control,
}

/// Shared by the parts; the last one closes the channel.
#[derive(Debug)]
struct Handle {
    connection: Arc<Connection>,
    id: u32,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.connection.lock();
        state.channels.remove(&self.id);
        if state.down.is_none() {
            state
                .send(&HostMessage::Close { channel: self.id })
                .expect("a close is short");
            drop(state);
            self.connection.wake_writer.notify_one();
        }
    }
}

impl Handle {
    /// Waits until `look` finds something in the channel's slot.
    async fn wait<T>(
        &self,
        changed: &mut watch::Receiver<()>,
        mut look: impl FnMut(&mut Slot) -> Option<T>,
    ) -> Result<T, LinkError> {
        loop {
            changed.mark_unchanged();
            if let Some(found) = self.look(&mut look)? {
                return Ok(found);
            }
            changed.changed().await.map_err(|_| LinkError::ended())?;
        }
    }

    fn look<T>(
        &self,
        look: &mut impl FnMut(&mut Slot) -> Option<T>,
    ) -> Result<Option<T>, LinkError> {
        let mut state = self.connection.lock();
        let slot = state
            .channels
            .get_mut(&self.id)
            .expect("a channel's slot lives as long as its handle");
        match (look(slot), &state.down) {
            (Some(found), _) => Ok(Some(found)),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Ok(None),
        }
    }

    fn send(&self, message: &HostMessage) -> Result<(), LinkError> {
        let mut state = self.connection.lock();
        state.check_up()?;
        state.send(message)?;
        drop(state);
        self.connection.wake_writer.notify_one();
        Ok(())
    }
}

impl Channel {
    pub(super) fn new(
        connection: Arc<Connection>,
        id: u32,
        window: usize,
        changed: watch::Receiver<()>,
    ) -> Self {
        let handle = Arc::new(Handle { connection, id });
        let output = |stream| Output {
            handle: handle.clone(),
            changed: changed.clone(),
            stream,
        };
        Channel {
            out: output(StreamId::Out),
            err: output(StreamId::Err),
            input: Input {
                handle: handle.clone(),
                changed: changed.clone(),
                window,
            },
            control: Control { handle, changed },
        }
    }
}

/// A stream of bytes from the guest.
#[derive(Debug)]
pub struct Output {
    handle: Arc<Handle>,
    changed: watch::Receiver<()>,
    stream: StreamId,
}

impl Output {
    /// The next bytes, or `None` at the end. Unread bytes stay in the guest, and their writer
    /// waits.
    pub async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        let stream = self.stream;
        let taken = self
            .handle
            .wait(&mut self.changed, |slot| look_for_bytes(slot, stream))
            .await?;
        let Some((chunk, told)) = taken else {
            return Ok(None);
        };
        if let Some(consumed) = told {
            let mut state = self.handle.connection.lock();
            state.outbox.push(Frame::Window {
                channel: self.handle.id,
                stream,
                consumed,
            });
            drop(state);
            self.handle.connection.wake_writer.notify_one();
        }
        Ok(Some(chunk))
    }
}

/// Bytes, the end, or nothing yet. If the channel is lost, its streams end after the bytes that had
/// arrived.
#[allow(
    clippy::type_complexity,
    reason = "bytes with the acknowledgement they are due, or the end, or not yet"
)]
fn look_for_bytes(slot: &mut Slot, stream: StreamId) -> Option<Option<(Bytes, Option<u64>)>> {
    let cut = matches!(
        slot.outcome,
        Some(Outcome::Lost { .. } | Outcome::NotStarted(_) | Outcome::Failed(_))
    );
    let incoming = slot
        .incoming(stream)
        .expect("outputs name streams of the guest");
    match incoming.take() {
        Some(taken) => Some(Some(taken)),
        None if incoming.ended || cut => Some(None),
        None => None,
    }
}

/// A stream of bytes to the guest. Dropping it without [`end`](Self::end) leaves the stream open
/// until the channel closes.
#[derive(Debug, Clone)]
pub struct Input {
    handle: Arc<Handle>,
    changed: watch::Receiver<()>,
    window: usize,
}

impl Input {
    /// Writes all of `bytes`, waiting for the guest to accept them. When the channel has ended, the
    /// rest is dropped, as in a pipe without a reader.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<(), LinkError> {
        while !bytes.is_empty() {
            let half = self.window / 2;
            let pushed = self
                .handle
                .wait(&mut self.changed, |slot| push(slot, bytes, half))
                .await?;
            let Some(count) = pushed else { return Ok(()) };
            self.handle.connection.wake_writer.notify_one();
            bytes = &bytes[count..];
        }
        Ok(())
    }

    /// Ends the stream.
    pub fn end(&mut self) -> Result<(), LinkError> {
        self.handle.look(&mut |slot| {
            slot.input.end();
            Some(())
        })?;
        self.handle.connection.wake_writer.notify_one();
        Ok(())
    }
}

/// Pushes as much as fits. Waits for some room, to avoid sending single bytes.
fn push(slot: &mut Slot, bytes: &[u8], half: usize) -> Option<Option<usize>> {
    if slot.outcome.is_some() || slot.input.is_ended() {
        return Some(None);
    }
    let count = slot.input.room().min(bytes.len());
    if count < bytes.len().min(half) {
        return None;
    }
    slot.input.push(&bytes[..count]);
    Some(Some(count))
}

/// The other operations of a channel.
#[derive(Debug, Clone)]
pub struct Control {
    handle: Arc<Handle>,
    changed: watch::Receiver<()>,
}

impl Control {
    /// Waits until the command or connection has started, or has ended without a start.
    pub async fn started(&mut self) -> Result<Result<u32, Outcome>, LinkError> {
        self.handle
            .wait(&mut self.changed, |slot| {
                match (slot.started, &slot.outcome) {
                    (Some(pid), _) => Some(Ok(pid)),
                    (None, Some(outcome)) => Some(Err(outcome.clone())),
                    (None, None) => None,
                }
            })
            .await
    }

    /// Waits for the channel's end.
    pub async fn ended(&mut self) -> Result<Outcome, LinkError> {
        self.handle
            .wait(&mut self.changed, |slot| slot.outcome.clone())
            .await
    }

    /// The outcome of the channel, if it has ended.
    pub fn outcome(&self) -> Result<Option<Outcome>, LinkError> {
        self.handle
            .look(&mut |slot| Some(slot.outcome.clone()))
            .map(Option::flatten)
    }

    pub fn signal(&self, signal: i32) -> Result<(), LinkError> {
        self.handle.send(&HostMessage::Signal {
            channel: self.handle.id,
            signal,
        })
    }

    pub fn resize(&self, size: TermSize) -> Result<(), LinkError> {
        self.handle.send(&HostMessage::Resize {
            channel: self.handle.id,
            size,
        })
    }
}
