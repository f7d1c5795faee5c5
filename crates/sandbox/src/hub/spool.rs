//! The output of a detached command, kept on disk from its first byte.
//!
//! ```text
//!   execs/ID/stdout   every byte so far      execs/ID/stderr
//! ```
//!
//! Always: a byte is acknowledged to the guest only after it is in the file, so a break loses none. At [`LIMIT`] bytes, or
//! when the file can't take more, the command is held back like by any reader that stops reading; nothing is dropped.

use std::io;
use std::path::{Path, PathBuf};

use sandtree_proto::{ExecStart, Outcome, StreamId};
use tokio::fs::{self, File};
use tokio::io::AsyncWriteExt;
use tokio::sync::{mpsc, watch};

use super::ExecEntry;
use super::switch::Input;

/// How much output of one detached command is kept, in bytes.
pub(super) const LIMIT: u64 = 1 << 30;

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
    pub fn start(channel: u32, dir: PathBuf, exec: &ExecStart, switch: mpsc::Sender<Input>) -> Self {
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
    switch: mpsc::Sender<Input>,
}

impl Writer {
    async fn run(self, queue: mpsc::UnboundedReceiver<SpoolInput>) {
        if let Err(error) = self.write_all(queue).await {
            tracing::error!(exec = self.tag, %error, "cannot keep a detached command's output; it is held back");
        }
    }

    async fn write_all(&self, mut queue: mpsc::UnboundedReceiver<SpoolInput>) -> io::Result<()> {
        let mut out = create(&self.dir, StreamId::Out).await?;
        let mut err = create(&self.dir, StreamId::Err).await?;
        while let Some(input) = queue.recv().await {
            match input {
                SpoolInput::Data { stream: StreamId::Err, bytes } => {
                    self.append(&mut err, StreamId::Err, &bytes).await?
                }
                SpoolInput::Data { bytes, .. } => self.append(&mut out, StreamId::Out, &bytes).await?,
                SpoolInput::Eof { stream: StreamId::Err } => self.progress.send_modify(|p| p.err_ended = true),
                SpoolInput::Eof { .. } => self.progress.send_modify(|p| p.out_ended = true),
                SpoolInput::Started { pid } => self.progress.send_modify(|p| p.pid = Some(pid)),
                SpoolInput::Ended { outcome } => self.progress.send_modify(|p| p.outcome = Some(outcome)),
            }
        }
        Ok(())
    }

    async fn append(&self, file: &mut File, stream: StreamId, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes).await?;
        file.flush().await?;
        let mut length = 0;
        self.progress.send_modify(|p| {
            let count = if stream == StreamId::Err { &mut p.err } else { &mut p.out };
            *count += bytes.len() as u64;
            length = *count;
        });
        if length < LIMIT {
            let spooled = Input::Spooled { tag: self.tag.clone(), stream, length };
            drop(self.switch.send(spooled).await);
        }
        Ok(())
    }
}

async fn create(dir: &Path, stream: StreamId) -> io::Result<File> {
    fs::create_dir_all(dir).await?;
    File::create_new(dir.join(file_name(stream))).await
}
