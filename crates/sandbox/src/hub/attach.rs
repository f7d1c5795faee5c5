//! An attachment: a client's channel that reads a detached command's spool from its first byte, and
//! then follows it.

use std::io::SeekFrom;
use std::path::PathBuf;
use std::sync::Arc;

use sandtree_proto::frame::{Frame, MAX_PAYLOAD, StreamId};
use sandtree_proto::{AgentMessage, Failure, Outcome};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::sync::{mpsc, watch};

use super::client::Sender;
use super::record::Segment;
use super::spool::{Progress, Spool};

#[derive(Debug)]
pub(super) enum AttachInput {
    Window { stream: StreamId, consumed: u64 },
}

/// Starts an attachment, and returns the channel for its client's acknowledgements. It ends when
/// that is dropped.
pub(super) fn start(
    spool: &Spool,
    sender: Sender,
    channel: u32,
    window: u32,
) -> mpsc::UnboundedSender<AttachInput> {
    let (inputs, queue) = mpsc::unbounded_channel();
    let attachment = Attachment {
        sender,
        channel,
        dir: spool.dir.clone(),
        progress: spool.progress.clone(),
        _reads: spool.readers.clone(),
    };
    let [out, err] = [StreamId::Out, StreamId::Err].map(|id| Stream {
        id,
        sent: 0,
        consumed: 0,
        window: window.into(),
        ended: false,
    });
    tokio::spawn(attachment.run(out, err, queue));
    inputs
}

/// Offsets count from the first kept byte.
struct Stream {
    id: StreamId,
    sent: u64,
    consumed: u64,
    window: u64,
    ended: bool,
}

impl Stream {
    /// Applies the client's claim of used bytes, up to the bytes that were sent to it.
    fn used(&mut self, consumed: u64) {
        if consumed > self.consumed && consumed <= self.sent {
            self.consumed = consumed;
        }
    }
}

struct Attachment {
    sender: Sender,
    channel: u32,
    dir: PathBuf,
    progress: watch::Receiver<Progress>,
    /// As long as it is here, the output stays.
    _reads: Arc<()>,
}

impl Attachment {
    async fn run(
        mut self,
        mut out: Stream,
        mut err: Stream,
        mut queue: mpsc::UnboundedReceiver<AttachInput>,
    ) {
        let mut started = false;
        loop {
            let progress = self.progress.borrow_and_update().clone();
            if let (false, Some(pid)) = (started, progress.pid) {
                started = true;
                if !self.sender.tell(&AgentMessage::Started {
                    channel: self.channel,
                    pid,
                }) {
                    return;
                }
            }
            let moved = match (
                self.pump(&mut out, &progress).await,
                self.pump(&mut err, &progress).await,
            ) {
                (Some(a), Some(b)) => a || b,
                _ => return,
            };
            if self.finished(&out, &err, &progress) {
                return;
            }
            if moved {
                continue;
            }
            tokio::select! {
                input = queue.recv() => match input {
                    Some(AttachInput::Window { stream, consumed }) => match stream {
                        StreamId::Err => err.used(consumed),
                        StreamId::Out => out.used(consumed),
                        StreamId::In => {}
                    },
                    None => return,
                },
                changed = self.progress.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Sends the end after everything was sent.
    fn finished(&self, out: &Stream, err: &Stream, progress: &Progress) -> bool {
        let Some(outcome) = &progress.outcome else {
            return false;
        };
        let cut = matches!(
            outcome,
            Outcome::Lost { .. } | Outcome::NotStarted(_) | Outcome::Failed(_)
        );
        let all_sent = out.sent == progress.out.bytes() && err.sent == progress.err.bytes();
        let done = (cut && all_sent) || (out.ended && err.ended);
        done && {
            // The switch disconnects a client that does not read.
            let _kept_up = self.sender.ended(self.channel, outcome.clone());
            true
        }
    }

    /// Sends as much as the client has room for. `Some(true)`: there may be more; `None`: it cannot
    /// continue.
    async fn pump(&self, stream: &mut Stream, progress: &Progress) -> Option<bool> {
        let kept = progress.stream(stream.id);
        let room = kept
            .bytes()
            .min(stream.consumed + stream.window)
            .saturating_sub(stream.sent);
        let position = kept.base + stream.sent;
        if let (1.., Some(segment)) = (room, kept.find(position)) {
            let count = room.min(segment.end() - position).min(MAX_PAYLOAD as u64);
            return self
                .send_bytes(stream, segment, position, count as usize)
                .await
                .then_some(true);
        }
        if kept.ended && stream.sent == kept.bytes() && !stream.ended {
            stream.ended = true;
            let eof = Frame::Eof {
                channel: self.channel,
                stream: stream.id,
                offset: stream.sent,
            };
            return self.sender.send(&eof).then_some(true);
        }
        Some(false)
    }

    async fn send_bytes(
        &self,
        stream: &mut Stream,
        segment: &Segment,
        position: u64,
        count: usize,
    ) -> bool {
        match self.read(segment, position, count).await {
            Ok(bytes) => {
                let offset = stream.sent;
                stream.sent += count as u64;
                self.sender.send(&Frame::Data {
                    channel: self.channel,
                    stream: stream.id,
                    offset,
                    bytes,
                })
            }
            Err(error) => {
                let message = format!("cannot read the command's kept output: {error}");
                let failure = Failure {
                    errno: error.raw_os_error().unwrap_or(0),
                    message,
                };
                let _kept_up = self.sender.ended(self.channel, Outcome::Failed(failure));
                false
            }
        }
    }

    async fn read(
        &self,
        segment: &Segment,
        position: u64,
        count: usize,
    ) -> std::io::Result<Vec<u8>> {
        let mut file = File::open(self.dir.join(&segment.file)).await?;
        file.seek(SeekFrom::Start(position - segment.start)).await?;
        let mut bytes = vec![0; count];
        file.read_exact(&mut bytes).await?;
        Ok(bytes)
    }
}
