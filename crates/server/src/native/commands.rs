//! Commands in a guest: run to their end, or detached and followed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::StatusCode;
use sandtree::{ByteStream, Exec, ExecEntry, ExecId, ExecSpec, ExitStatus, Lifetime, LinkError};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::request::{At, Native, OfSandbox};
use super::sse::{self, Events};
use crate::control::Body;
use crate::error::{Fault, Result};

const TIMEOUT_MS: u64 = 60_000;
const TIMEOUT_MAX_MS: u64 = 86_400_000;
const OUTPUT_BYTES: usize = 1 << 20;
const OUTPUT_BYTES_MAX: usize = 16 << 20;

/// A command to run.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Command {
    /// The program and its arguments. Either this or `shell`.
    #[schema(example = json!(["python3", "-c", "print(1)"]))]
    argv: Vec<String>,
    /// A line for `/bin/sh -c`.
    shell: Option<String>,
    env: BTreeMap<String, String>,
    /// The image's default unless given, or else the home of the user.
    workdir: Option<String>,
    /// A name or a number, with an optional `:group`. The image's default unless given, or else
    /// root.
    user: Option<String>,
}

impl Command {
    fn spec(self) -> Result<ExecSpec> {
        let spec = match (self.shell, self.argv.is_empty()) {
            (Some(line), true) => ExecSpec::shell(line),
            (None, false) => ExecSpec::argv(self.argv),
            _ => return Err(Fault::bad_request("give either argv or shell")),
        };
        let text = |(name, value): (String, String)| (OsString::from(name), OsString::from(value));
        Ok(ExecSpec {
            env: self.env.into_iter().map(text).collect(),
            workdir: self.workdir.map(OsString::from),
            user: self.user,
            ..spec
        })
    }
}

/// A command to run to its end.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ExecOptions {
    /// The program and its arguments. Either this or `shell`.
    #[schema(example = json!(["python3", "-c", "print(1)"]))]
    argv: Vec<String>,
    /// A line for `/bin/sh -c`.
    shell: Option<String>,
    env: BTreeMap<String, String>,
    /// The image's default unless given, or else the home of the user.
    workdir: Option<String>,
    /// A name or a number, with an optional `:group`. The image's default unless given, or else
    /// root.
    user: Option<String>,
    /// What it reads on its standard input.
    stdin: Option<String>,
    /// The same for bytes that are not a text.
    stdin_base64: Option<String>,
    /// After this time the command and all its processes are ended: 60 s unless given, at most a
    /// day.
    #[schema(minimum = 1, maximum = 86400000)]
    timeout_ms: Option<u64>,
    /// How much of each stream is kept: 1 MiB unless given, at most 16 MiB. The rest is dropped.
    #[schema(maximum = 16777216)]
    output_max_bytes: Option<usize>,
}

/// How a command ended, and what it wrote.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ExecResult {
    /// As in a shell: 128 + n after signal n, 124 after a timeout.
    pub exit_code: i32,
    pub timed_out: bool,
    /// Missing if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// Whether some of it was dropped.
    pub stdout_truncated: bool,
    /// Missing if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    pub stderr_truncated: bool,
}

/// Runs a command to its end.
///
/// The command ends with all its processes when its client leaves.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/exec", tag = "commands",
    params(OfSandbox), request_body = ExecOptions,
    responses((status = 200, description = "It ended, also if it failed.", body = ExecResult)),
)]
pub async fn exec(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<ExecOptions>,
) -> Result<Json<ExecResult>> {
    let timeout_ms = options.timeout_ms.unwrap_or(TIMEOUT_MS);
    if !(1..=TIMEOUT_MAX_MS).contains(&timeout_ms) {
        let message = format!("invalid timeout_ms {timeout_ms}: use 1 to {TIMEOUT_MAX_MS}");
        return Err(Fault::bad_request(message));
    }
    let most = options.output_max_bytes.unwrap_or(OUTPUT_BYTES);
    let most = most.min(OUTPUT_BYTES_MAX);
    // Many clients may wait for much output; the server has room for some of them.
    let _place = match most {
        0..=OUTPUT_BYTES => None,
        _ => Some(native.transfer()?),
    };
    let input = input(options.stdin, options.stdin_base64)?;
    let command = Command {
        argv: options.argv,
        shell: options.shell,
        env: options.env,
        workdir: options.workdir,
        user: options.user,
    };
    let spec = ExecSpec {
        stdin: input.is_some(),
        timeout: Some(Duration::from_millis(timeout_ms)),
        ..command.spec()?
    };
    let guest = native.guest(&of.sandbox).await?;
    let exec = guest.exec(spec).await?;
    Ok(Json(collect(exec, input, most).await?))
}

fn input(text: Option<String>, encoded: Option<String>) -> Result<Option<Vec<u8>>> {
    match (text, encoded) {
        (None, None) => Ok(None),
        (Some(text), None) => Ok(Some(text.into_bytes())),
        (None, Some(encoded)) => STANDARD
            .decode(encoded)
            .map(Some)
            .map_err(|error| Fault::bad_request(format!("invalid stdin_base64: {error}"))),
        (Some(_), Some(_)) => Err(Fault::bad_request("give either stdin or stdin_base64")),
    }
}

/// Feeds a command, keeps the beginning of its output, and waits for its end.
async fn collect(mut exec: Exec, input: Option<Vec<u8>>, most: usize) -> Result<ExecResult> {
    let out = exec.stdout.take();
    let err = exec.stderr.take();
    let mut stdin = exec.stdin.clone();
    let feeding = async {
        if let Some(input) = input {
            stdin.write(&input).await?;
            stdin.close()?;
        }
        Ok(())
    };
    let waiting = async { Ok(exec.wait().await?) };
    let ended = tokio::try_join!(kept(out, most), kept(err, most), waiting, feeding)?;
    let (out, err, status, ()) = ended;
    let mut result = ExecResult {
        exit_code: status.code(),
        timed_out: status == ExitStatus::TimedOut,
        stdout_truncated: out.is_truncated,
        stderr_truncated: err.is_truncated,
        ..ExecResult::default()
    };
    (result.stdout, result.stdout_base64) = text_or_base64(out.bytes);
    (result.stderr, result.stderr_base64) = text_or_base64(err.bytes);
    Ok(result)
}

struct Kept {
    bytes: Vec<u8>,
    is_truncated: bool,
}

/// Reads a stream to its end, and keeps its beginning: a command must not wait for a reader.
async fn kept(stream: Option<ByteStream>, most: usize) -> Result<Kept> {
    let mut bytes = Vec::new();
    let mut is_truncated = false;
    let Some(mut stream) = stream else {
        return Ok(Kept {
            bytes,
            is_truncated,
        });
    };
    while let Some(chunk) = stream.next().await.map_err(unread)? {
        let room = most - bytes.len();
        is_truncated |= chunk.len() > room;
        bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }
    Ok(Kept {
        bytes,
        is_truncated,
    })
}

fn unread(source: LinkError) -> Fault {
    let operation = "read the output of a command".to_owned();
    sandtree::Error::Guest { operation, source }.into()
}

/// A text where the bytes are one.
fn text_or_base64(bytes: Vec<u8>) -> (Option<String>, Option<String>) {
    match String::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(error) => (None, Some(STANDARD.encode(error.as_bytes()))),
    }
}

/// A command that was started.
#[derive(Debug, Serialize, ToSchema)]
pub struct Started {
    /// Names the command.
    pub id: String,
    /// The process in the guest.
    pub pid: u32,
}

/// Starts a command that outlives its client and the server.
///
/// Its output is kept, at most 1 GiB of each stream; then the command waits.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/commands", tag = "commands",
    params(OfSandbox), request_body = Command,
    responses((status = 201, description = "It runs.", body = Started)),
)]
pub async fn start_command(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(command): Body<Command>,
) -> Result<(StatusCode, Json<Started>)> {
    let spec = ExecSpec {
        lifetime: Lifetime::Detached,
        ..command.spec()?
    };
    let exec = native.guest(&of.sandbox).await?.exec(spec).await?;
    let started = Started {
        id: exec.id().to_string(),
        pid: exec.pid(),
    };
    Ok((StatusCode::CREATED, Json(started)))
}

/// The detached commands of a guest.
#[derive(Debug, Serialize, ToSchema)]
pub struct Commands {
    pub commands: Vec<ExecEntry>,
}

/// Lists detached commands.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/commands", tag = "commands",
    params(OfSandbox),
    responses((status = 200, body = Commands)),
)]
pub async fn list_commands(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Json<Commands>> {
    let commands = native.sandbox(&of.sandbox)?.execs().await?;
    Ok(Json(Commands { commands }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct OfCommand {
    /// Name or id of a sandbox.
    sandbox: String,
    /// Id of a detached command.
    command: String,
}

impl OfCommand {
    async fn attach(&self, native: &Native) -> Result<Exec> {
        let id: ExecId = self.command.parse()?;
        Ok(native.guest(&self.sandbox).await?.attach(id).await?)
    }
}

/// What a command wrote, or how it ended. Each event has the fields of its name.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct CommandEvent {
    /// Of the events `stdout` and `stderr`: what was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The same, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
    /// Of the event `exit`: as in a shell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

/// Follows a detached command, from the first byte of its output.
///
/// The events are `stdout`, `stderr` and, as the last one, `exit` or `error`. A slow client slows
/// down itself only.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/commands/{command}/output", tag = "commands",
    params(OfCommand),
    responses((status = 200, body = CommandEvent, content_type = "text/event-stream")),
)]
pub async fn command_output(
    State(native): State<Native>,
    At(of): At<OfCommand>,
) -> Result<Response> {
    let mut exec = of.attach(&native).await?;
    let (events, response) = sse::channel();
    tokio::spawn(async move {
        let out = exec.stdout.take();
        let err = exec.stderr.take();
        let reading = async {
            tokio::try_join!(
                follow("stdout", out, &events),
                follow("stderr", err, &events)
            )?;
            Ok::<_, Fault>(exec.wait().await?)
        };
        match events.wait(reading).await {
            None => {}
            Some(Err(fault)) => events.fail(&fault).await,
            Some(Ok(status)) => {
                let exit = CommandEvent {
                    exit_code: Some(status.code()),
                    ..CommandEvent::default()
                };
                events.send("exit", &exit).await;
                events.finish().await;
            }
        }
    });
    Ok(response)
}

/// Sends what a stream has, until its end or until the client is gone.
async fn follow(name: &str, stream: Option<ByteStream>, events: &Events) -> Result<()> {
    let Some(mut stream) = stream else {
        return Ok(());
    };
    let mut rest = Vec::new();
    while let Some(chunk) = stream.next().await.map_err(unread)? {
        rest.extend_from_slice(&chunk);
        let whole = rest.len() - unfinished(&rest);
        let whole: Vec<u8> = rest.drain(..whole).collect();
        if !whole.is_empty() && !events.send(name, &written(whole)).await {
            return Ok(());
        }
    }
    if !rest.is_empty() {
        events.send(name, &written(rest)).await;
    }
    Ok(())
}

fn written(bytes: Vec<u8>) -> CommandEvent {
    let (text, base64) = text_or_base64(bytes);
    CommandEvent {
        text,
        base64,
        exit_code: None,
    }
}

/// How many bytes at the end begin a character that is not complete.
fn unfinished(bytes: &[u8]) -> usize {
    let is_begun = |error: std::str::Utf8Error| error.error_len().is_none();
    (1..=bytes.len().min(3))
        .find(|count| {
            let end = &bytes[bytes.len() - count..];
            std::str::from_utf8(end).is_err_and(|e| e.valid_up_to() == 0 && is_begun(e))
        })
        .unwrap_or(0)
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalOptions {
    /// A number, as `kill -l` lists them.
    #[schema(minimum = 1, maximum = 64)]
    signal: i32,
}

/// Sends a signal to the process group of a detached command.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/commands/{command}/signal", tag = "commands",
    params(OfCommand), request_body = SignalOptions,
    responses((status = 204, description = "It is sent.")),
)]
pub async fn signal_command(
    State(native): State<Native>,
    At(of): At<OfCommand>,
    Body(options): Body<SignalOptions>,
) -> Result<StatusCode> {
    if !(1..=64).contains(&options.signal) {
        return Err(Fault::bad_request("invalid signal: use 1 to 64"));
    }
    let exec = of.attach(&native).await?;
    exec.signal(options.signal)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes a detached command that has ended, with its output.
#[utoipa::path(
    delete, path = "/sandboxes/{sandbox}/commands/{command}", tag = "commands",
    params(OfCommand),
    responses((status = 204, description = "It is gone.")),
)]
pub async fn discard_command(
    State(native): State<Native>,
    At(of): At<OfCommand>,
) -> Result<StatusCode> {
    let id: ExecId = of.command.parse()?;
    let guest = native.guest(&of.sandbox).await?;
    guest.discard(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_in_two_chunks_stays_whole() {
        let euro = "€".as_bytes();
        assert_eq!(unfinished(b"abc"), 0);
        assert_eq!(unfinished(euro), 0);
        assert_eq!(unfinished(&euro[..2]), 2);
        assert_eq!(unfinished(&[b"a", &euro[..1]].concat()), 1);
        assert_eq!(unfinished(b"a\xff"), 0);
        assert_eq!(unfinished(b""), 0);
    }

    #[test]
    fn a_command_is_words_or_a_line() {
        let spec = |text: &str| serde_json::from_str::<Command>(text).unwrap().spec();
        assert!(spec(r#"{"argv":["true"]}"#).is_ok());
        assert!(spec(r#"{"shell":"true"}"#).is_ok());
        assert!(spec("{}").is_err());
        assert!(spec(r#"{"argv":["a"],"shell":"b"}"#).is_err());
    }
}
