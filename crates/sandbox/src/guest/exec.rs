//! Commands in the guest.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use sandtree_proto::{ExecStart, Open, Outcome, TermSize};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::link::{self, Channel, Control, Input, Link, LinkError, Refusal};
use crate::order::as_ms;

/// The bytes of one stream in flight between guest and reader.
const WINDOW: u32 = 1024 * 1024;

/// The version of the protocol from which on commands have labels.
const LABELS: u16 = 7;

/// How long the guest may take, after a command's timeout, to end the command and report it.
const GUEST_GRACE: Duration = Duration::from_secs(15);

/// Names a command of a sandbox. Chosen at random, so it also names the command's copy in a fork.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExecId(String);

impl ExecId {
    fn random() -> Self {
        let mut bytes = [0; 6];
        getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
        Self(bytes.iter().map(|b| format!("{b:02x}")).collect())
    }
}

impl fmt::Display for ExecId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ExecId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let valid = text.len() == 12 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let invalid = || {
            Error::invalid(
                "command id",
                text,
                "12 hexadecimal digits, as `exec --detach` prints them",
            )
        };
        valid.then(|| Self(text.to_owned())).ok_or_else(invalid)
    }
}

/// What happens to a command whose [`Exec`] is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// The command ends, with all its processes.
    Attached,
    /// The command continues, its output is kept, and [`attach`](crate::Guest::attach) reads it.
    Detached,
}

/// A command to run.
#[derive(Debug, Clone)]
pub struct ExecSpec {
    pub argv: Vec<OsString>,
    pub env: Vec<(OsString, OsString)>,
    /// `None`: the image's default, or else the user's home.
    pub workdir: Option<OsString>,
    /// A name or a number, with an optional `:group`. `None`: the image's default, or else root.
    pub user: Option<String>,
    /// With a terminal, all output is on stdout.
    pub terminal: Option<TermSize>,
    /// Without it, the command's stdin is empty.
    pub stdin: bool,
    /// After this time, the command and all its processes are ended.
    pub timeout: Option<Duration>,
    pub lifetime: Lifetime,
    /// What lists call a detached command; at most 256 bytes.
    pub label: Option<String>,
    /// How long a detached command and its output are kept after its end. Without it, as long as
    /// the guest.
    pub kept: Option<Duration>,
}

impl ExecSpec {
    pub fn argv<I, S>(argv: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<OsString>,
    {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            workdir: None,
            user: None,
            terminal: None,
            stdin: false,
            timeout: None,
            lifetime: Lifetime::Attached,
            label: None,
            kept: None,
        }
    }

    /// A line for `sh -c`.
    pub fn shell(line: impl AsRef<OsStr>) -> Self {
        Self::argv([OsStr::new("/bin/sh"), OsStr::new("-c"), line.as_ref()])
    }

    fn into_start(self, id: &ExecId) -> ExecStart {
        let bytes = |text: OsString| text.into_vec();
        ExecStart {
            tag: id.0.clone(),
            argv: self.argv.into_iter().map(bytes).collect(),
            env: self
                .env
                .into_iter()
                .map(|(key, value)| (bytes(key), bytes(value)))
                .collect(),
            cwd: self.workdir.map(bytes).unwrap_or_default(),
            user: self.user.unwrap_or_default(),
            terminal: self.terminal,
            stdin: self.stdin,
            timeout_ms: self
                .timeout
                .map(|t| t.as_millis().try_into().unwrap_or(u64::MAX)),
        }
    }
}

/// The keeper of an older program knows neither labels nor times.
fn detached(link: &Link, mut spec: ExecSpec, id: &ExecId) -> Open {
    let label = spec.label.take();
    let kept = spec.kept.take();
    let start = spec.into_start(id);
    let is_plain = label.is_none() && kept.is_none();
    if is_plain || link.version() < LABELS {
        return Open::Detached(start);
    }
    Open::DetachedAs {
        start,
        label,
        kept_ms: as_ms(kept),
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    Exited(i32),
    Signaled(i32),
    TimedOut,
}

impl ExitStatus {
    /// As in a shell and in `timeout`: 128 + n for signal n, 124 for a timeout.
    pub fn code(self) -> i32 {
        match self {
            Self::Exited(code) => code,
            Self::Signaled(signal) => 128 + (signal & 0x7f),
            Self::TimedOut => 124,
        }
    }

    pub fn success(self) -> bool {
        self == Self::Exited(0)
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signaled(signal) => write!(f, "ended by signal {signal}"),
            Self::TimedOut => f.write_str("it took too long"),
        }
    }
}

/// All output of a command, for commands with little output.
#[derive(Debug, Clone)]
pub struct Output {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

/// A started command. Its output streams can be taken out and read by other tasks.
#[derive(Debug)]
pub struct Exec {
    id: ExecId,
    pid: u32,
    pub stdin: Stdin,
    pub stdout: Option<link::Output>,
    pub stderr: Option<link::Output>,
    handle: ExecHandle,
}

/// Waits for a started command, signals it and resizes its terminal, from any task.
#[derive(Debug, Clone)]
pub struct ExecHandle {
    command: String,
    control: Control,
    /// When a guest that should have ended the command counts as not answering.
    deadline: Option<Deadline>,
}

/// The host's own clock for a command's timeout, in case the guest's stands still.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    fn new(timeout: Duration) -> Self {
        let after = timeout.saturating_add(GUEST_GRACE);
        Self {
            at: Instant::now() + after,
            after,
        }
    }

    async fn cut<T>(
        deadline: Option<Self>,
        work: impl Future<Output = Result<T, LinkError>>,
    ) -> Result<T, LinkError> {
        match deadline {
            None => work.await,
            Some(Self { at, after }) => tokio::time::timeout_at(at, work)
                .await
                .unwrap_or(Err(LinkError::Timeout { after })),
        }
    }
}

impl Exec {
    pub(super) async fn start(link: &Link, spec: ExecSpec) -> Result<Exec> {
        if spec.argv.is_empty() {
            return Err(Error::invalid("command", "", "at least one word"));
        }
        let id = ExecId::random();
        let command = String::from_utf8_lossy(spec.argv[0].as_bytes()).into_owned();
        let deadline = spec.timeout.map(Deadline::new);
        let open = match spec.lifetime {
            Lifetime::Attached => Open::Exec(spec.into_start(&id)),
            Lifetime::Detached => detached(link, spec, &id),
        };
        Self::open(link, open, id, command, deadline).await
    }

    pub(super) async fn attach(link: &Link, id: ExecId) -> Result<Exec> {
        let open = Open::Attach { tag: id.0.clone() };
        let command = format!("command {id}");
        match Self::open(link, open, id.clone(), command, None).await {
            Err(Error::Guest {
                source: LinkError::Refused(Refusal::NoCommand),
                ..
            }) => Err(Error::NoExec { id: id.to_string() }),
            other => other,
        }
    }

    pub(super) async fn discard(link: &Link, id: &ExecId) -> Result<()> {
        let failed = |source| Error::Guest {
            operation: format!("discard command {id}"),
            source,
        };
        let tag = id.0.clone();
        let opened = link.open(Open::Discard { tag }, WINDOW);
        let Channel { mut control, .. } = opened.map_err(failed)?;
        match control.ended().await.map_err(failed)? {
            Outcome::Done => Ok(()),
            outcome => Err(failed(lost(outcome))),
        }
    }

    async fn open(
        link: &Link,
        open: Open,
        id: ExecId,
        command: String,
        deadline: Option<Deadline>,
    ) -> Result<Exec> {
        let failed = |source| Error::Guest {
            operation: format!("start {command}"),
            source,
        };
        let Channel {
            out,
            err,
            input,
            mut control,
        } = link.open(open, WINDOW).map_err(failed)?;
        let pid = match Deadline::cut(deadline, control.started())
            .await
            .map_err(failed)?
        {
            Ok(pid) => pid,
            Err(Outcome::NotStarted(failure)) => {
                return Err(Error::NotStarted { command, failure });
            }
            Err(outcome) => return Err(failed(lost(outcome))),
        };
        Ok(Exec {
            id,
            pid,
            stdin: Stdin { input },
            stdout: Some(out),
            stderr: Some(err),
            handle: ExecHandle {
                command,
                control,
                deadline,
            },
        })
    }

    pub fn id(&self) -> &ExecId {
        &self.id
    }

    /// The process id in the guest.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    pub fn handle(&self) -> &ExecHandle {
        &self.handle
    }

    /// Waits for the command's end. Output that was not read yet can still be read.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        self.handle.wait().await
    }

    /// Sends a signal to the command's whole process group.
    pub fn signal(&self, signal: i32) -> Result<()> {
        self.handle.signal(signal)
    }

    pub fn resize(&self, size: TermSize) -> Result<()> {
        self.handle.resize(size)
    }

    /// Reads all output of the command, at most `limit` bytes of each stream, and waits for its
    /// end.
    pub async fn output(mut self, limit: usize) -> Result<Output> {
        let stdout = self.stdout.take();
        let stderr = self.stderr.take();
        let (out, err, status) = tokio::try_join!(
            read_all(stdout, limit),
            read_all(stderr, limit),
            self.wait()
        )?;
        Ok(Output {
            status,
            stdout: out,
            stderr: err,
        })
    }
}

impl Exec {
    /// Reads both streams to their ends, in the order in which their pieces arrive, and waits for
    /// the end of the command.
    pub(crate) async fn drained(&mut self, mut take: impl FnMut(&[u8])) -> Result<ExitStatus> {
        let mut stdout = self.stdout.take();
        let mut stderr = self.stderr.take();
        while stdout.is_some() || stderr.is_some() {
            let (from, chunk) = tokio::select! {
                chunk = next_of(&mut stdout), if stdout.is_some() => (&mut stdout, chunk),
                chunk = next_of(&mut stderr), if stderr.is_some() => (&mut stderr, chunk),
            };
            match chunk? {
                Some(chunk) => take(&chunk),
                None => *from = None,
            }
        }
        self.wait().await
    }
}

/// The end of a command's output, for the error that quotes it.
#[derive(Debug, Default)]
pub(crate) struct Tail(Vec<u8>);

impl Tail {
    const BYTES: usize = 4 << 10;

    pub fn add(&mut self, chunk: &[u8]) {
        self.0.extend_from_slice(chunk);
        let excess = self.0.len().saturating_sub(Self::BYTES);
        self.0.drain(..excess);
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0).trim_end().to_owned()
    }
}

impl ExecHandle {
    /// Waits for the command's end. Output that was not read yet can still be read.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        let failed = |source| Error::Guest {
            operation: format!("wait for {}", self.command),
            source,
        };
        match Deadline::cut(self.deadline, self.control.ended())
            .await
            .map_err(failed)?
        {
            Outcome::Exited { code } => Ok(ExitStatus::Exited(code)),
            Outcome::Signaled { signal } => Ok(ExitStatus::Signaled(signal)),
            Outcome::TimedOut => Ok(ExitStatus::TimedOut),
            outcome => Err(failed(lost(outcome))),
        }
    }

    /// Sends a signal to the command's whole process group.
    pub fn signal(&self, signal: i32) -> Result<()> {
        let operation = || format!("signal {}", self.command);
        self.control.signal(signal).map_err(|source| Error::Guest {
            operation: operation(),
            source,
        })
    }

    pub fn resize(&self, size: TermSize) -> Result<()> {
        let operation = || format!("resize the terminal of {}", self.command);
        self.control.resize(size).map_err(|source| Error::Guest {
            operation: operation(),
            source,
        })
    }
}

/// A stream that was taken out before has another reader.
async fn read_all(stream: Option<link::Output>, limit: usize) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    let Some(mut stream) = stream else {
        return Ok(all);
    };
    while let Some(chunk) = next(&mut stream).await? {
        if all.len() + chunk.len() > limit {
            return Err(Error::OutputLimit { limit });
        }
        all.extend_from_slice(&chunk);
    }
    Ok(all)
}

async fn next_of(stream: &mut Option<link::Output>) -> Result<Option<Bytes>> {
    match stream {
        Some(stream) => next(stream).await,
        None => Ok(None),
    }
}

async fn next(stream: &mut link::Output) -> Result<Option<Bytes>> {
    stream.next().await.map_err(|source| Error::Guest {
        operation: "read a command's output".into(),
        source,
    })
}

/// The error of an outcome that is not the command's own.
pub(super) fn lost(outcome: Outcome) -> LinkError {
    match outcome {
        Outcome::Lost { reason } => LinkError::Ended {
            reason: Some(reason),
        },
        Outcome::Failed(failure) | Outcome::NotStarted(failure) => LinkError::from(failure),
        other => link::protocol(format!("{other:?} where it means nothing")),
    }
}

/// A command's stdin.
#[derive(Debug, Clone)]
pub struct Stdin {
    input: Input,
}

impl Stdin {
    /// Writes all of `bytes`, waiting while the command does not read. After the command's end it
    /// has no effect.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.input
            .write(bytes)
            .await
            .map_err(|source| Error::Guest {
                operation: "write to a command".into(),
                source,
            })
    }

    /// The command then reads the end of its input.
    pub fn close(&mut self) -> Result<()> {
        self.input.end().map_err(|source| Error::Guest {
            operation: "close a command's stdin".into(),
            source,
        })
    }
}
