//! Runs a command of the guest on the user's terminal or streams.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use base64::Engine;
use sandtree::{ByteStream, Error, Exec, ExecSpec, ExitStatus, Guest, Output, Result, Stdin};
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::args::duration;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::stdin;
use crate::terminal::{self, Raw};

/// How a command runs.
#[derive(Debug, Clone, clap::Args)]
pub struct How {
    /// Connect standard input to the command
    #[arg(short, long)]
    pub interactive: bool,
    /// Allocate a terminal for the command
    #[arg(short, long)]
    pub tty: bool,
    /// Run as this user, or user:group
    #[arg(long, short, value_name = "USER")]
    pub user: Option<String>,
    /// Run in this directory [default: the user's home]
    #[arg(long, short, value_name = "DIR")]
    pub workdir: Option<OsString>,
    /// Set a variable; without VALUE, pass on the host's value (repeatable)
    #[arg(long, short, value_name = "KEY[=VALUE]", value_parser = variable)]
    pub env: Vec<(OsString, OsString)>,
    /// Kill the command and its child processes after this time; the exit code is 124
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub timeout: Option<Duration>,
}

/// `K=V`, or `K` for its value in our environment.
fn variable(text: &str) -> Result<(OsString, OsString), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("the name of the variable is missing".into()),
        Some((key, value)) => Ok((key.into(), value.into())),
        None => std::env::var_os(text)
            .map(|value| (text.into(), value))
            .ok_or(format!("{text} is not set in the environment")),
    }
}

const SIGINT: i32 = 2;
const SIGQUIT: i32 = 3;
const SIGHUP: i32 = 1;
const SIGTERM: i32 = 15;
/// After this many signals we exit, even if the command does not.
const PATIENCE: u32 = 3;
/// The limit of each stream that `--json` collects.
const JSON_LIMIT: usize = 64 << 20;
/// The reader of our output exited: the exit code of SIGPIPE.
const BROKEN_PIPE: u8 = 141;

/// The specification of a typed command.
pub fn spec(how: How, command: Vec<std::ffi::OsString>) -> Result<ExecSpec> {
    if how.tty && !terminal::is_interactive() {
        return Err(Error::invalid(
            "--tty",
            "a pipe or file",
            "standard input and output must be a terminal",
        ));
    }
    Ok(ExecSpec {
        env: term_env(&how),
        workdir: how.workdir,
        user: how.user,
        terminal: how.tty.then(terminal::size),
        stdin: how.interactive || how.tty,
        timeout: how.timeout,
        ..ExecSpec::argv(command)
    })
}

/// Programs in the guest need TERM to draw on the user's terminal.
fn term_env(how: &How) -> Vec<(std::ffi::OsString, std::ffi::OsString)> {
    let term = std::env::var_os("TERM")
        .filter(|_| how.tty)
        .map(|term| ("TERM".into(), term));
    term.into_iter().chain(how.env.clone()).collect()
}

/// Runs a command on our streams, or collects its output as JSON.
pub async fn run(guest: &Guest, spec: ExecSpec, as_json: bool) -> Outcome {
    let wants_stdin = spec.stdin;
    let tty = spec.terminal.is_some();
    let exec = guest.exec(spec).await?;
    if as_json {
        collect(exec, wants_stdin).await
    } else {
        relay(exec, wants_stdin, tty, OnSignal::Pass).await
    }
}

/// Prints the output of a command as JSON.
pub async fn collect(exec: Exec, wants_stdin: bool) -> Outcome {
    if wants_stdin {
        tokio::spawn(feed(exec.stdin.clone(), stdin::read()));
    }
    let output = exec.output(JSON_LIMIT).await?;
    crate::show::json(&described(&output));
    Ok(exit_code(output.status))
}

fn described(output: &Output) -> Value {
    let mut value = json!({ "exit_code": output.status.code(), "timed_out": output.status == ExitStatus::TimedOut });
    for (name, bytes) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        match std::str::from_utf8(bytes) {
            Ok(text) => value[name] = text.into(),
            Err(_) => {
                value[format!("{name}_base64")] = base64::engine::general_purpose::STANDARD
                    .encode(bytes)
                    .into()
            }
        }
    }
    value
}

/// What to do with a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnSignal {
    /// Send it to the command.
    Pass,
    /// Exit, while the command continues.
    Leave,
}

/// Passes streams, signals and sizes between the user and a command until it ends.
pub async fn relay(mut exec: Exec, wants_stdin: bool, tty: bool, on_signal: OnSignal) -> Outcome {
    let _raw = if tty { Some(Raw::enter()?) } else { None };
    // Before any output, which the user may answer with Ctrl-C.
    let mut signals = Signals::new()?;
    if wants_stdin {
        tokio::spawn(feed(exec.stdin.clone(), stdin::read()));
    }
    let (left, mut reader_left) = mpsc::channel(2);
    let stdout = exec
        .stdout
        .take()
        .map(|stream| tokio::spawn(pump(stream, io::stdout(), left.clone())));
    let stderr = exec
        .stderr
        .take()
        .map(|stream| tokio::spawn(pump(stream, io::stderr(), left)));
    let mut impatience = 0;
    let status = loop {
        tokio::select! {
            status = exec.wait() => break status?,
            Some(()) = reader_left.recv() => return Ok(ExitCode::from(BROKEN_PIPE)),
            request = signals.next() => match request {
                Requested::Resize => exec.resize(terminal::size())?,
                Requested::Signal(signal) => {
                    if on_signal == OnSignal::Leave || impatience >= PATIENCE {
                        return Err(Failure::Interrupted);
                    }
                    impatience += 1;
                    exec.signal(signal)?;
                }
            },
        }
    };
    for pumping in [stdout, stderr].into_iter().flatten() {
        tokio::select! {
            pumped = pumping => pumped.expect("pumping does not panic")?,
            // The command has ended, so the signal is for us: the reader of our output is stuck.
            () = signals.end() => return Err(Failure::Interrupted),
        }
    }
    Ok(exit_code(status))
}

fn exit_code(status: ExitStatus) -> ExitCode {
    ExitCode::from(u8::try_from(status.code() & 0xff).expect("it is one byte"))
}

async fn feed(mut stdin: Stdin, mut chunks: stdin::Chunks) -> Result<()> {
    // A read error ends the input.
    while let Some(Ok(chunk)) = chunks.recv().await {
        stdin.write(&chunk).await?;
    }
    stdin.close()
}

/// Writes a stream to ours, unbuffered. Sends to `left` if the reader of ours has exited.
async fn pump(mut stream: ByteStream, mut to: impl Write, left: mpsc::Sender<()>) -> Result<()> {
    loop {
        let next = stream.next().await;
        let next = next.map_err(|source| Error::Guest {
            operation: "read the command's output".into(),
            source,
        })?;
        let Some(chunk) = next else { return Ok(()) };
        let written =
            tokio::task::block_in_place(|| to.write_all(&chunk).and_then(|()| to.flush()));
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                // The receiver is gone if the session has ended; that is fine, too.
                return left.send(()).await.or(Ok(()));
            }
            Err(error) => return Err(Error::io("write the command's output to", "our own", error)),
        }
    }
}

/// Signals for the command.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    quit: Signal,
    resize: Signal,
}

/// What a signal to this process requests.
enum Requested {
    Signal(i32),
    Resize,
}

impl Signals {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).map_err(|e| Error::io("listen for", "signals", e));
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
            quit: listen(SignalKind::quit())?,
            resize: listen(SignalKind::window_change())?,
        })
    }

    async fn end(&mut self) {
        while let Requested::Resize = self.next().await {}
    }

    async fn next(&mut self) -> Requested {
        tokio::select! {
            _ = self.interrupt.recv() => Requested::Signal(SIGINT),
            _ = self.terminate.recv() => Requested::Signal(SIGTERM),
            _ = self.hangup.recv() => Requested::Signal(SIGHUP),
            _ = self.quit.recv() => Requested::Signal(SIGQUIT),
            _ = self.resize.recv() => Requested::Resize,
        }
    }
}
