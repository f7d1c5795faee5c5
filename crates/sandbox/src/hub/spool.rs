//! The output of a detached command, kept on disk from its first byte.
//!
//! ```text
//!   execs/ID/stdout   every byte so far      execs/ID/stderr
//! ```
//!
//! Always: a byte is acknowledged to the guest only after it is in the file, so a break loses none. At [`LIMIT`] bytes, or
//! when the file can't take more, the command is held back like by any reader that stops reading; nothing is dropped.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use sandtree_proto::{ExecStart, Failure, Outcome, StreamId};
use tokio::sync::{mpsc, watch};

use super::ExecEntry;
use super::switch::Input;

/// How much output of one detached command is kept, in bytes.
pub(super) const LIMIT: u64 = 1 << 30;
/// How often a full disk is tried again.
const ROOM_CHECK: Duration = Duration::from_secs(1);

/// What is known of the command so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    pub out: u64,
    pub err: u64,
    pub out_ended: bool,
    pub err_ended: bool,
    pub pid: Option<u32>,
    pub outcome: Option<Outcome>,
}

impl Progress {
    pub fn length(&self, stream: StreamId) -> (u64, bool) {
        match stream {
            StreamId::Err => (self.err, self.err_ended),
            StreamId::Out | StreamId::In => (self.out, self.out_ended),
        }
    }
}

#[derive(Debug)]
pub(super) enum SpoolInput {
    Data { stream: StreamId, bytes: Vec<u8> },
    Eof { stream: StreamId },
    Started { pid: u32 },
    Ended { outcome: Outcome },
}

#[derive(Debug)]
pub(super) struct Spool {
    pub channel: u32,
    pub dir: PathBuf,
    pub progress: watch::Receiver<Progress>,
    command: String,
    inputs: mpsc::UnboundedSender<SpoolInput>,
}

impl Spool {
    pub fn start(channel: u32, dir: PathBuf, exec: &ExecStart, switch: mpsc::WeakSender<Input>) -> Self {
        let (inputs, queue) = mpsc::unbounded_channel();
        let (progress_tx, progress) = watch::channel(Progress::default());
        let writer = Writer { dir: dir.clone(), tag: exec.tag.clone(), progress: progress_tx, switch };
        tokio::spawn(writer.run(queue));
        Self { channel, dir, progress, command: command_line(exec), inputs }
    }

    pub fn push(&self, input: SpoolInput) {
        // The writer ends only after it failed, and then the command is held back already.
        drop(self.inputs.send(input));
    }

    /// Whether the command is known to have ended by itself.
    pub fn has_ended(&self) -> bool {
        matches!(&self.progress.borrow().outcome, Some(outcome) if !matches!(outcome, Outcome::Lost { .. }))
    }

    pub fn entry(&self, id: &str) -> ExecEntry {
        let progress = self.progress.borrow();
        ExecEntry {
            id: id.to_owned(),
            command: self.command.clone(),
            pid: progress.pid,
            ended: progress.outcome.as_ref().map(describe),
            stdout_bytes: progress.out,
            stderr_bytes: progress.err,
        }
    }
}

/// The command for people, cut at a length that fits a table.
fn command_line(exec: &ExecStart) -> String {
    let words: Vec<_> = exec.argv.iter().map(|a| String::from_utf8_lossy(a)).collect();
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

pub(super) fn file_name(stream: StreamId) -> &'static str {
    match stream {
        StreamId::Err => "stderr",
        StreamId::Out | StreamId::In => "stdout",
    }
}

struct Writer {
    dir: PathBuf,
    tag: String,
    progress: watch::Sender<Progress>,
    switch: mpsc::WeakSender<Input>,
}

impl Writer {
    async fn run(self, queue: mpsc::UnboundedReceiver<SpoolInput>) {
        if let Err(error) = self.write_all(queue).await {
            let message = format!("its output cannot be kept: {error}");
            tracing::error!(exec = self.tag, %error, "a detached command's output cannot be kept");
            let errno = error.raw_os_error().unwrap_or(0);
            self.progress.send_modify(|p| p.outcome = Some(Outcome::Failed(Failure { errno, message })));
            // Whoever follows the command keeps its last news.
            self.progress.closed().await;
        }
    }

    async fn write_all(&self, mut queue: mpsc::UnboundedReceiver<SpoolInput>) -> io::Result<()> {
        let out = create(&self.dir, StreamId::Out).await?;
        let err = create(&self.dir, StreamId::Err).await?;
        while let Some(input) = queue.recv().await {
            match input {
                SpoolInput::Data { stream: StreamId::Err, bytes } => self.append(&err, StreamId::Err, bytes).await?,
                SpoolInput::Data { bytes, .. } => self.append(&out, StreamId::Out, bytes).await?,
                SpoolInput::Eof { stream: StreamId::Err } => self.progress.send_modify(|p| p.err_ended = true),
                SpoolInput::Eof { .. } => self.progress.send_modify(|p| p.out_ended = true),
                SpoolInput::Started { pid } => self.progress.send_modify(|p| p.pid = Some(pid)),
                SpoolInput::Ended { outcome } => self.progress.send_modify(|p| p.outcome = Some(outcome)),
            }
        }
        Ok(())
    }

    async fn append(&self, file: &Arc<File>, stream: StreamId, bytes: Vec<u8>) -> io::Result<()> {
        let (offset, _) = self.progress.borrow().length(stream);
        let length = offset + bytes.len() as u64;
        write_when_there_is_room(file, offset, &bytes.into()).await?;
        self.progress.send_modify(|p| match stream {
            StreamId::Err => p.err = length,
            StreamId::Out | StreamId::In => p.out = length,
        });
        if length < LIMIT {
            let spooled = Input::Spooled { tag: self.tag.clone(), stream, length };
            // A hub that is closing has nobody to tell.
            if let Some(switch) = self.switch.upgrade() {
                drop(switch.send(spooled).await);
            }
        }
        Ok(())
    }
}

/// A full disk holds the command back, until there is room again. By offset, so that what was half written is written anew.
async fn write_when_there_is_room(file: &Arc<File>, offset: u64, bytes: &Bytes) -> io::Result<()> {
    loop {
        let (file, bytes) = (file.clone(), bytes.clone());
        let written = tokio::task::spawn_blocking(move || file.write_all_at(&bytes, offset)).await;
        match written.expect("writing does not panic") {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => tokio::time::sleep(ROOM_CHECK).await,
            other => return other,
        }
    }
}

async fn create(dir: &Path, stream: StreamId) -> io::Result<Arc<File>> {
    tokio::fs::create_dir_all(dir).await?;
    let path = dir.join(file_name(stream));
    let created = tokio::task::spawn_blocking(move || File::create_new(path)).await;
    created.expect("creating does not panic").map(Arc::new)
}
