//! The output of a command without a client, kept on disk from its first byte.
//!
//! ```text
//!   execs/TAG/out.0 out.1 …   every byte so far, cut where a state was recorded      execs/TAG/err.0 …
//! ```
//!
//! Always: a byte is acknowledged to the guest only after it is in the file, so a break loses none.
//! Only the last segment grows, and never a recorded one. At [`LIMIT`] bytes, or when the disk is
//! full, the command blocks as with any reader that stops; nothing is dropped. The same holds when
//! all commands of the guest together have filled their [`Room`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use sandtree_proto::{ExecStart, Failure, Outcome, StreamId};
use tokio::sync::{mpsc, oneshot, watch};

use super::ExecEntry;
use super::details::ExecDetails;
use super::record::{self, ExecRecord, Segment};
use super::room::Room;
use super::switch::Input;

/// How much output of one detached command is kept, in bytes.
pub(super) const LIMIT: u64 = 1 << 30;
/// Bounds of the time that a command is kept after its end.
const KEPT_LEAST: Duration = Duration::from_secs(1);
const KEPT_MOST: Duration = Duration::from_secs(86_400);
/// How often a full disk is tried again.
const ROOM_CHECK: Duration = Duration::from_secs(1);

/// The kept part of one stream. Positions are those of the command's stream.
#[derive(Debug, Clone, Default)]
pub(super) struct Kept {
    pub segments: Arc<Vec<Segment>>,
    /// The first kept position.
    pub base: u64,
    pub length: u64,
    pub ended: bool,
}

impl Kept {
    /// Adjacent segments, the first at `base`.
    pub fn of(segments: Vec<Segment>, base: u64) -> Self {
        let base = segments.first().map_or(base, |first| first.start);
        let length = segments.last().map_or(base, Segment::end);
        Self {
            segments: Arc::new(segments),
            base,
            length,
            ended: false,
        }
    }

    pub fn bytes(&self) -> u64 {
        self.length - self.base
    }

    /// The segment that contains this position, which is before the end.
    pub fn find(&self, position: u64) -> Option<&Segment> {
        let behind = self
            .segments
            .partition_point(|segment| segment.start <= position);
        self.segments[..behind].last()
    }

    fn grow(&mut self, bytes: u64) {
        self.length += bytes;
        Arc::make_mut(&mut self.segments)
            .last_mut()
            .expect("bytes are written into a segment")
            .bytes += bytes;
    }
}

/// The present state of the command.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    pub out: Kept,
    pub err: Kept,
    pub pid: Option<u32>,
    pub outcome: Option<Outcome>,
}

impl Progress {
    pub fn stream(&self, stream: StreamId) -> &Kept {
        match stream {
            StreamId::Err => &self.err,
            StreamId::Out | StreamId::In => &self.out,
        }
    }

    /// What it has kept, of both streams.
    fn bytes(&self) -> u64 {
        self.out.bytes() + self.err.bytes()
    }

    fn stream_mut(&mut self, stream: StreamId) -> &mut Kept {
        match stream {
            StreamId::Err => &mut self.err,
            StreamId::Out | StreamId::In => &mut self.out,
        }
    }
}

#[derive(Debug)]
pub(super) enum SpoolInput {
    Data {
        stream: StreamId,
        bytes: Vec<u8>,
    },
    Eof {
        stream: StreamId,
    },
    Started {
        pid: u32,
    },
    Ended {
        outcome: Outcome,
    },
    /// Start new segments; the existing ones never change again.
    Roll(oneshot::Sender<Progress>),
}

/// The initial state of a spool.
#[derive(Debug)]
pub(super) struct Beginning {
    pub tag: String,
    pub command: String,
    /// The agent's channel, while it has one.
    pub channel: Option<u32>,
    pub window: u32,
    pub progress: Progress,
    pub details: ExecDetails,
}

#[derive(Debug)]
pub(super) struct Spool {
    pub channel: Option<u32>,
    pub dir: PathBuf,
    pub progress: watch::Receiver<Progress>,
    /// Each attachment has a clone.
    pub readers: Arc<()>,
    command: String,
    window: u32,
    details: ExecDetails,
    room: Room,
    inputs: mpsc::UnboundedSender<SpoolInput>,
}

impl Spool {
    pub fn start(
        execs: &Path,
        beginning: Beginning,
        room: &Room,
        switch: mpsc::WeakSender<Input>,
    ) -> Self {
        let Beginning {
            tag,
            command,
            channel,
            window,
            progress,
            details,
        } = beginning;
        let dir = execs.join(&tag);
        room.take(progress.bytes());
        let has_ended = progress.outcome.is_some();
        let (inputs, queue) = mpsc::unbounded_channel();
        let (progress_tx, progress) = watch::channel(progress);
        let writer = Writer {
            dir: dir.clone(),
            tag,
            progress: progress_tx,
            switch,
            room: room.clone(),
            kept_ms: details.kept_ms,
        };
        if has_ended {
            writer.expire_later();
        }
        tokio::spawn(writer.run(queue));
        Self {
            channel,
            dir,
            progress,
            readers: Arc::default(),
            command,
            window,
            details,
            room: room.clone(),
            inputs,
        }
    }

    pub fn push(&self, input: SpoolInput) {
        // The writer ends only after a failure, and then the command is blocked already.
        drop(self.inputs.send(input));
    }

    /// Starts new segments, and answers with the earlier ones; the answer is dropped if nothing is
    /// written any more.
    pub fn roll(&self) -> oneshot::Receiver<Progress> {
        let (done, rolled) = oneshot::channel();
        self.push(SpoolInput::Roll(done));
        rolled
    }

    /// Whether a client reads it.
    pub fn is_read(&self) -> bool {
        Arc::strong_count(&self.readers) > 1
    }

    /// Removes the kept output. Nothing waits for the disk.
    pub fn remove_output(self) {
        self.room.give(self.progress.borrow().bytes());
        tokio::task::spawn_blocking(move || {
            // A command without output has no directory.
            if let Err(error) = std::fs::remove_dir_all(&self.dir) {
                tracing::debug!(%error, "the output of a command is not removed");
            }
        });
    }

    /// Whether the command has ended by itself.
    pub fn has_ended(&self) -> bool {
        let progress = self.progress.borrow();
        let outcome = progress.outcome.as_ref();
        outcome.is_some_and(|outcome| !matches!(outcome, Outcome::Lost { .. }))
    }

    pub fn entry(&self, id: &str) -> ExecEntry {
        let progress = self.progress.borrow();
        ExecEntry {
            id: id.to_owned(),
            command: self.command.clone(),
            pid: progress.pid,
            ended: progress.outcome.as_ref().map(describe),
            stdout_bytes: progress.out.bytes(),
            stderr_bytes: progress.err.bytes(),
            details: self.details.clone(),
        }
    }

    /// The present record; its segments are added after they are [rolled](Self::roll).
    pub fn record(&self, tag: &str) -> ExecRecord {
        let tag = tag.to_owned();
        let command = self.command.clone();
        let out = Vec::new();
        let err = Vec::new();
        ExecRecord {
            tag,
            command,
            pid: None,
            ended: None,
            window: self.window,
            out,
            err,
            details: self.details.clone(),
        }
    }
}

/// The command for people, cut to the width of a table.
pub(super) fn command_line(exec: &ExecStart) -> String {
    let words: Vec<_> = exec
        .argv
        .iter()
        .map(|a| String::from_utf8_lossy(a))
        .collect();
    words.join(" ").chars().take(200).collect()
}

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Exited { code } => format!("exit {code}"),
        Outcome::Signaled { signal } => format!("signal {signal}"),
        Outcome::TimedOut => "timed out".into(),
        Outcome::NotStarted(failure) | Outcome::Failed(failure) => failure.to_string(),
        Outcome::Done => "done".into(),
        Outcome::Lost { reason } => reason.clone(),
    }
}

/// The growing segments.
#[derive(Default)]
struct Growing {
    out: Option<Arc<File>>,
    err: Option<Arc<File>>,
    /// Streams of which the guest may not send more until there is room.
    withheld: Vec<StreamId>,
}

impl Growing {
    fn withhold(&mut self, stream: StreamId) {
        if !self.withheld.contains(&stream) {
            self.withheld.push(stream);
        }
    }

    fn is_withheld(&self) -> bool {
        !self.withheld.is_empty()
    }

    /// Begins new segments.
    fn roll(&mut self) {
        self.out = None;
        self.err = None;
    }

    fn file(&mut self, stream: StreamId) -> &mut Option<Arc<File>> {
        match stream {
            StreamId::Err => &mut self.err,
            StreamId::Out | StreamId::In => &mut self.out,
        }
    }
}

struct Writer {
    dir: PathBuf,
    tag: String,
    progress: watch::Sender<Progress>,
    switch: mpsc::WeakSender<Input>,
    room: Room,
    /// How long the command is kept after its end.
    kept_ms: Option<u64>,
}

impl Writer {
    async fn run(self, queue: mpsc::UnboundedReceiver<SpoolInput>) {
        if let Err(error) = self.write_all(queue).await {
            let message = format!("its output cannot be kept: {error}");
            tracing::error!(exec = self.tag, %error, "a detached command's output cannot be kept");
            let errno = error.raw_os_error().unwrap_or(0);
            self.progress
                .send_modify(|p| p.outcome = Some(Outcome::Failed(Failure { errno, message })));
            // Readers of the command keep its last progress.
            self.progress.closed().await;
        }
    }

    async fn write_all(&self, mut queue: mpsc::UnboundedReceiver<SpoolInput>) -> io::Result<()> {
        let mut growing = Growing::default();
        loop {
            let input = tokio::select! {
                input = queue.recv() => input,
                () = self.room.is_free(), if growing.is_withheld() => {
                    self.report_withheld(&mut growing).await;
                    continue;
                }
            };
            let Some(input) = input else {
                return Ok(());
            };
            match input {
                SpoolInput::Data { stream, bytes } => {
                    self.append(&mut growing, stream, bytes).await?
                }
                SpoolInput::Eof { stream } => self
                    .progress
                    .send_modify(|p| p.stream_mut(stream).ended = true),
                SpoolInput::Started { pid } => self.progress.send_modify(|p| p.pid = Some(pid)),
                SpoolInput::Ended { outcome } => {
                    self.progress.send_modify(|p| p.outcome = Some(outcome));
                    self.expire_later();
                }
                SpoolInput::Roll(done) => {
                    growing.roll();
                    // The task that asked may have stopped waiting.
                    drop(done.send(self.progress.borrow().clone()));
                }
            }
        }
    }

    /// Asks the switch to remove the command when it was kept long enough, and again as long as
    /// clients read it.
    fn expire_later(&self) {
        let Some(kept_ms) = self.kept_ms else {
            return;
        };
        let kept = Duration::from_millis(kept_ms).clamp(KEPT_LEAST, KEPT_MOST);
        let tag = self.tag.clone();
        let switch = self.switch.clone();
        let progress = self.progress.subscribe();
        tokio::spawn(async move {
            // Without its writer, the command is removed already.
            while progress.has_changed().is_ok() {
                tokio::time::sleep(kept).await;
                let tag = tag.clone();
                let Some(switch) = switch.upgrade() else {
                    return;
                };
                // As above.
                drop(switch.send(Input::Expire { tag }).await);
            }
        });
    }

    async fn append(
        &self,
        growing: &mut Growing,
        stream: StreamId,
        bytes: Vec<u8>,
    ) -> io::Result<()> {
        let file = match growing.file(stream) {
            Some(file) => file.clone(),
            none => none.insert(self.begin_segment(stream).await?).clone(),
        };
        let (count, within) = {
            let progress = self.progress.borrow();
            let kept = progress.stream(stream);
            (
                bytes.len() as u64,
                kept.segments.last().map_or(0, |segment| segment.bytes),
            )
        };
        write_when_there_is_room(&file, within, &bytes.into()).await?;
        self.progress
            .send_modify(|p| p.stream_mut(stream).grow(count));
        self.room.take(count);
        if self.room.is_full() {
            growing.withhold(stream);
        } else {
            self.report(stream).await;
        }
        Ok(())
    }

    /// Lets the guest send more of a stream, unless its command has written too much.
    async fn report(&self, stream: StreamId) {
        let kept = self.progress.borrow().stream(stream).clone();
        if kept.bytes() >= LIMIT {
            return;
        }
        let spooled = Input::Spooled {
            tag: self.tag.clone(),
            stream,
            length: kept.length,
        };
        if let Some(switch) = self.switch.upgrade() {
            // A switch that has ended needs no report.
            drop(switch.send(spooled).await);
        }
    }

    async fn report_withheld(&self, growing: &mut Growing) {
        for stream in std::mem::take(&mut growing.withheld) {
            self.report(stream).await;
        }
    }

    async fn begin_segment(&self, stream: StreamId) -> io::Result<Arc<File>> {
        let number = self.progress.borrow().stream(stream).segments.len();
        let (name, file) = create(self.dir.clone(), stream, number).await?;
        self.progress.send_modify(|progress| {
            let kept = progress.stream_mut(stream);
            let segment = Segment {
                start: kept.length,
                bytes: 0,
                file: name,
            };
            Arc::make_mut(&mut kept.segments).push(segment);
        });
        Ok(Arc::new(file))
    }
}

/// On a full disk the command waits until there is room. Writes use offsets, so a partly written
/// piece is written again.
async fn write_when_there_is_room(file: &Arc<File>, offset: u64, bytes: &Bytes) -> io::Result<()> {
    loop {
        let file = file.clone();
        let bytes = bytes.clone();
        let written = tokio::task::spawn_blocking(move || file.write_all_at(&bytes, offset)).await;
        match written.expect("writing does not panic") {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                tokio::time::sleep(ROOM_CHECK).await
            }
            other => return other,
        }
    }
}

/// Creates a file; on a full disk, as soon as there is room.
async fn create(dir: PathBuf, stream: StreamId, number: usize) -> io::Result<(String, File)> {
    loop {
        let dir = dir.clone();
        let created = tokio::task::spawn_blocking(move || {
            std::fs::create_dir_all(&dir)?;
            record::unused(stream, number, &dir, File::create_new)
        });
        match created.await.expect("creating does not panic") {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                tokio::time::sleep(ROOM_CHECK).await
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_room_blocks_a_command_until_others_have_left() {
        let execs = tempfile::tempdir().unwrap();
        let (inputs, mut switch) = mpsc::channel(8);
        let room = Room::of(100);
        room.take(90);
        let beginning = Beginning {
            tag: "t".into(),
            command: "yes".into(),
            channel: None,
            window: 1000,
            progress: Progress::default(),
            details: ExecDetails::default(),
        };
        let mut spool = Spool::start(execs.path(), beginning, &room, inputs.downgrade());
        let stream = StreamId::Out;
        let bytes = vec![b'y'; 20];
        spool.push(SpoolInput::Data { stream, bytes });
        let kept = spool.progress.wait_for(|progress| progress.bytes() == 20);
        drop(kept.await.unwrap());
        // A record of the command waits for nothing.
        assert_eq!(spool.roll().await.unwrap().bytes(), 20);
        assert!(switch.try_recv().is_err(), "the guest may not send more");
        room.give(90);
        let reported = switch.recv().await;
        assert!(
            matches!(reported, Some(Input::Spooled { length: 20, .. })),
            "{reported:?}"
        );
        spool.remove_output();
        assert!(!room.is_full());
    }
}
