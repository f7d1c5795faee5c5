//! Commands: started, joined by number, listed, written to and signalled.
//!
//! A command is a detached command of the sandbox's keeper: it outlives its client, this server and
//! a pause. The number by which clients know it is its process id in the guest.
//!
//! Always: a client that is slow slows its own stream only. The hub knows how each command was
//! started, so another server finds it again; it removes a command [`KEPT_FOR`] after its end, or
//! when its last client has read everything.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::HeaderMap;
use sandtree::{
    ByteStream, Code, Error, Exec, ExecEntry, ExecId, ExecSpec, ExitStatus, Lifetime, TermSize,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Call;
use super::rpc::{self, Answers, Messages};
use super::user::{self, Users};
use crate::auth;
use crate::error::{Fault, Result};
use crate::gateway::Connection;
use crate::processes::{Process, ProcessConfig};

/// How long a command that has ended can still be joined.
const KEPT_FOR: Duration = Duration::from_secs(30);
/// The pieces of output in one message.
const PIECE_MAX: usize = 32 * 1024;
const TAG_MAX: usize = 256;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

#[derive(Debug, Deserialize)]
struct Start {
    process: ProcessConfig,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

impl Start {
    /// A terminal is always typed into.
    fn takes_input(&self) -> bool {
        self.pty.is_some() || self.stdin.unwrap_or(true)
    }
}

#[derive(Debug, Deserialize)]
struct Pty {
    size: Option<Size>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Size {
    cols: u16,
    rows: u16,
}

impl From<Size> for TermSize {
    fn from(Size { cols, rows }: Size) -> Self {
        Self { rows, cols }
    }
}

/// Which command a client means.
#[derive(Debug, Clone, Deserialize)]
struct Selector {
    pid: Option<u32>,
    tag: Option<String>,
}

impl Selector {
    /// Whether it is this command. A number is that of a client; without it, a tag.
    fn means(&self, entry: &ExecEntry) -> bool {
        match self.pid {
            Some(pid) => entry.pid == Some(pid),
            None => entry.details.label.is_some() && entry.details.label == self.tag,
        }
    }

    fn missing(&self) -> Fault {
        let selected = match (self.pid, &self.tag) {
            (None, Some(tag)) => format!("tag {tag}"),
            (pid, _) => format!("pid {}", pid.unwrap_or_default()),
        };
        Fault::not_found(format!("process with {selected} not found"))
    }
}

#[derive(Debug, Deserialize)]
struct Selected {
    process: Selector,
}

#[derive(Debug, Deserialize)]
struct SendInput {
    process: Selector,
    input: Input,
}

/// Bytes for a command, as base64.
#[derive(Debug, Deserialize)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SendSignal {
    process: Selector,
    signal: Value,
}

#[derive(Debug, Deserialize)]
struct Update {
    process: Selector,
    pty: Option<Pty>,
}

/// A message of a client that streams input.
#[derive(Debug, Deserialize)]
struct StreamInput {
    start: Option<Selected>,
    data: Option<Data>,
}

#[derive(Debug, Deserialize)]
struct Data {
    input: Input,
}

pub async fn serve(call: Call, method: &str, request: Request) -> Result<Response> {
    let headers = request.headers().clone();
    match method {
        "Start" => Ok(streamed(start(call, &headers, request).await)),
        "Connect" => Ok(streamed(connect(call, &headers, request).await)),
        "StreamInput" => Ok(streamed(stream_input(call, request).await)),
        "List" => Ok(rpc::answer(list(&call).await)),
        "SendInput" => Ok(rpc::answer(send_input(&call, request).await)),
        "CloseStdin" => Ok(rpc::answer(close_stdin(&call, request).await)),
        "SendSignal" => Ok(rpc::answer(send_signal(&call, request).await)),
        "Update" => Ok(rpc::answer(update(&call, request).await)),
        other => Err(Fault::not_found(format!(
            "there is no process.Process/{other}"
        ))),
    }
}

fn streamed(answered: Result<Response>) -> Response {
    answered.unwrap_or_else(|fault| rpc::failed_stream(&fault))
}

async fn start(call: Call, headers: &HeaderMap, request: Request) -> Result<Response> {
    let start: Start = rpc::read_one(request).await?;
    if start.tag.as_ref().is_some_and(|tag| tag.len() > TAG_MAX) {
        return Err(Fault::bad_request("a tag has at most 256 bytes"));
    }
    let mut exec = launch(&call, headers, &start).await?;
    let terminal = start.pty.is_some();
    let takes_input = start.takes_input();
    let streams = Streams::of(&mut exec);
    let process = Process {
        exec: exec.id().clone(),
        pid: exec.pid(),
        tag: start.tag,
        config: start.process,
        terminal,
        takes_input,
        handle: exec.handle().clone(),
        stdin: tokio::sync::Mutex::new(exec.stdin.clone()),
    };
    let process = register(&call, process);
    Ok(follow(&call.connection, headers, process, streams))
}

/// Who runs a command, and where.
#[derive(Debug, PartialEq, Eq)]
struct Runner {
    user: String,
    /// Empty: the home of the user.
    workdir: PathBuf,
}

impl Runner {
    /// The runner that needs no look into the guest: the agent itself finds a user by name, and the
    /// user's home. `None`: only a look shows it.
    fn unseen(call: &Call, start: &Start) -> Option<Self> {
        let workdir = match start.process.directory() {
            Some(cwd) => user::absolute(cwd)?,
            None => call.workdir.clone().unwrap_or_default(),
        };
        let user = user::unseen(&call.connection, call.user.as_deref())?;
        Some(Self { user, workdir })
    }

    /// The runner as the guest's files show it, or the reason why there is none.
    async fn seen(call: &Call, start: &Start) -> Result<Self> {
        let users = Users::without_groups(&call.connection).await?;
        let user = users.find(call.user.as_deref())?;
        let name = users.name_for_guest(&user);
        let workdir = match start.process.directory() {
            Some(cwd) => existing(call, user.path(cwd)?, cwd).await?,
            None => call.workdir.clone().unwrap_or(user.home),
        };
        Ok(Self {
            user: name,
            workdir,
        })
    }
}

/// Starts a command. A look at the guest's users and directories costs round trips, so it comes
/// only after a refusal; a command that was refused has not run.
async fn launch(call: &Call, headers: &HeaderMap, start: &Start) -> Result<Exec> {
    let timeout = deadline(headers)?;
    let guest = &call.connection.guest;
    if let Some(runner) = Runner::unseen(call, start) {
        match guest.exec(spec(call, start, runner, timeout)).await {
            Err(error) if error.code() == Some(Code::CommandNotStarted) => {}
            started => return started.map_err(not_started),
        }
    }
    let runner = Runner::seen(call, start).await?;
    let started = guest.exec(spec(call, start, runner, timeout)).await;
    started.map_err(not_started)
}

fn spec(call: &Call, start: &Start, runner: Runner, timeout: Option<Duration>) -> ExecSpec {
    let ProcessConfig {
        cmd, args, envs, ..
    } = &start.process;
    let argv = std::iter::once(cmd).chain(args).map(OsString::from);
    let mut spec = ExecSpec::argv(argv);
    let sandbox = call.connection.id().to_owned();
    let ours = [("E2B_SANDBOX_ID".to_owned(), sandbox)];
    let env = ours.into_iter().chain(envs.clone());
    spec.env = env.map(|(key, value)| (key.into(), value.into())).collect();
    spec.workdir = Some(runner.workdir.into());
    spec.user = Some(runner.user);
    spec.terminal = start.pty.as_ref().map(|pty| {
        let size = pty.size.map(TermSize::from);
        size.unwrap_or(TermSize { rows: 24, cols: 80 })
    });
    spec.stdin = start.takes_input();
    spec.timeout = timeout;
    spec.lifetime = Lifetime::Detached;
    spec.label = start.tag.clone();
    spec.kept = Some(KEPT_FOR);
    spec
}

async fn existing(call: &Call, path: PathBuf, asked: &str) -> Result<PathBuf> {
    let files = call.connection.guest.files();
    match files.stat(&path).await {
        Ok(stat) if stat.kind == sandtree::FileKind::Dir => Ok(path),
        Ok(_) => Err(Fault::bad_request(format!(
            "cwd '{asked}' is not a directory"
        ))),
        Err(error) if error.kind() == sandtree::ErrorKind::NotFound => {
            Err(Fault::bad_request(format!("cwd '{asked}' does not exist")))
        }
        Err(error) => Err(error.into()),
    }
}

/// A command that cannot be started is a mistake of its client.
fn not_started(error: Error) -> Fault {
    match error.code() {
        Some(Code::CommandNotFound | Code::CommandNotStarted) => {
            Fault::bad_request(error.report().one_line())
        }
        _ => error.into(),
    }
}

/// The time after which a command is killed.
fn deadline(headers: &HeaderMap) -> Result<Option<Duration>> {
    let Some(text) = auth::header(headers, "connect-timeout-ms") else {
        return Ok(None);
    };
    let ms: u64 = text
        .parse()
        .map_err(|_| Fault::bad_request("invalid Connect-Timeout-Ms"))?;
    Ok(Some(Duration::from_millis(ms)).filter(|limit| !limit.is_zero()))
}

/// Makes a command known by its number, until some time after its end.
fn register(call: &Call, process: Process) -> Arc<Process> {
    let gateway = call.gateway.clone();
    let connection = call.connection.clone();
    let process = gateway.processes().add(connection.id(), process);
    let known = process.clone();
    tokio::spawn(async move {
        let mut handle = known.handle.clone();
        let ended = tokio::select! {
            ended = handle.wait() => ended,
            () = connection.ended() => return,
        };
        if ended.is_ok() {
            tokio::time::sleep(KEPT_FOR).await;
        }
        gateway.processes().remove(connection.id(), &known);
    });
    process
}

/// The output of a command, and how much of it to leave out.
struct Streams {
    out: Option<ByteStream>,
    err: Option<ByteStream>,
    skip_out: u64,
    skip_err: u64,
}

impl Streams {
    fn of(exec: &mut Exec) -> Self {
        Self {
            out: exec.stdout.take(),
            err: exec.stderr.take(),
            skip_out: 0,
            skip_err: 0,
        }
    }
}

/// Sends the output and the end of a command to a client.
fn follow(
    connection: &Connection,
    headers: &HeaderMap,
    process: Arc<Process>,
    streams: Streams,
) -> Response {
    let every = rpc::keepalive(headers);
    let (answers, response) = Answers::new();
    let connection = connection.clone();
    let mut streams = streams;
    tokio::spawn(async move {
        let told = tokio::select! {
            told = tell(&answers, &process, &mut streams, every) => told,
            () = connection.ended() => Told::Lost,
            () = answers.closed() => Told::Unheard,
        };
        match told {
            Told::Whole => answers.end().await,
            Told::TimedOut => {
                let status = hyper::StatusCode::GATEWAY_TIMEOUT;
                let fault = Fault::new(status, "the command took longer than its timeout");
                answers.fail(&fault).await;
            }
            Told::Lost => {
                connection.recorded().await;
                drop(answers);
            }
            Told::Unheard => {
                drop(answers);
                drain(streams, &connection).await;
            }
        }
    });
    response
}

/// Reads what no client reads: the end of a command comes after its output.
async fn drain(mut streams: Streams, connection: &Connection) {
    let all = async {
        tokio::join!(
            read_to_end(streams.out.take()),
            read_to_end(streams.err.take())
        );
    };
    tokio::select! {
        () = all => {}
        () = connection.ended() => {}
    }
}

/// How the story of a command ended.
enum Told {
    Whole,
    TimedOut,
    /// The sandbox does not run any more.
    Lost,
    /// The client is gone.
    Unheard,
}

async fn tell(
    answers: &Answers,
    process: &Process,
    streams: &mut Streams,
    keepalive: Duration,
) -> Told {
    let start = json!({ "event": { "start": { "pid": process.pid } } });
    if !answers.send(&start).await {
        return Told::Unheard;
    }
    let Streams {
        out,
        err,
        skip_out,
        skip_err,
    } = streams;
    let out_name = if process.terminal { "pty" } else { "stdout" };
    let mut quiet = Instant::now();
    while out.is_some() || err.is_some() {
        let next = tokio::select! {
            next = next(out), if out.is_some() => (next, out_name, &mut *skip_out, &mut *out),
            next = next(err), if err.is_some() => (next, "stderr", &mut *skip_err, &mut *err),
            () = tokio::time::sleep_until(quiet + keepalive) => {
                quiet = Instant::now();
                if !answers.send(&json!({ "event": { "keepalive": {} } })).await {
                    return Told::Unheard;
                }
                continue;
            }
        };
        quiet = Instant::now();
        let (next, name, skip, stream) = next;
        match next {
            Ok(Some(bytes)) => {
                let skipped = (*skip).min(bytes.len() as u64);
                *skip -= skipped;
                for piece in bytes[skipped as usize..].chunks(PIECE_MAX) {
                    let data = json!({ "event": { "data": { name: STANDARD.encode(piece) } } });
                    if !answers.send(&data).await {
                        return Told::Unheard;
                    }
                }
            }
            Ok(None) => *stream = None,
            Err(()) => return Told::Lost,
        }
    }
    let mut handle = process.handle.clone();
    let end = match handle.wait().await {
        Ok(ExitStatus::TimedOut) => return Told::TimedOut,
        Ok(status) => end(status),
        Err(_) => return Told::Lost,
    };
    let end = json!({ "event": { "end": end } });
    if answers.send(&end).await {
        Told::Whole
    } else {
        Told::Unheard
    }
}

async fn next(stream: &mut Option<ByteStream>) -> Result<Option<bytes::Bytes>, ()> {
    match stream {
        Some(stream) => stream.next().await.map_err(drop),
        None => std::future::pending().await,
    }
}

async fn read_to_end(stream: Option<ByteStream>) {
    let Some(mut stream) = stream else {
        return;
    };
    while let Ok(Some(_)) = stream.next().await {}
}

/// The end of a command, in the words of Go's library, which clients know.
fn end(status: ExitStatus) -> Value {
    match status {
        ExitStatus::Exited(0) => {
            json!({ "exitCode": 0, "exited": true, "status": "exit status 0" })
        }
        ExitStatus::Exited(code) => {
            let text = format!("exit status {code}");
            json!({ "exitCode": code, "exited": true, "status": text, "error": text })
        }
        ExitStatus::Signaled(signal) => {
            let text = format!("signal: {}", signal_name(signal));
            json!({ "exitCode": -1, "exited": false, "status": text, "error": text })
        }
        ExitStatus::TimedOut => json!({ "exitCode": -1, "exited": false, "status": "timed out" }),
    }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "hangup",
        2 => "interrupt",
        6 => "aborted",
        SIGKILL => "killed",
        11 => "segmentation fault",
        13 => "broken pipe",
        SIGTERM => "terminated",
        _ => return format!("signal {signal}"),
    };
    name.to_owned()
}

/// Joins a command. Its output from here on follows; earlier output is not repeated.
async fn connect(call: Call, headers: &HeaderMap, request: Request) -> Result<Response> {
    let Selected { process } = rpc::read_one(request).await?;
    let process = find(&call, &process).await?;
    let known = call.connection.sandbox.execs().await?;
    let id = process.exec.to_string();
    let entry = known.iter().find(|entry| entry.id == id);
    let mut exec = call.connection.guest.attach(process.exec.clone()).await?;
    let streams = Streams {
        skip_out: entry.map_or(0, |entry| entry.stdout_bytes),
        skip_err: entry.map_or(0, |entry| entry.stderr_bytes),
        ..Streams::of(&mut exec)
    };
    Ok(follow(&call.connection, headers, process, streams))
}

async fn list(call: &Call) -> Result<Value> {
    let entries = call.connection.sandbox.execs().await?;
    let running = entries.iter().filter(|entry| entry.ended.is_none());
    let shown = running.filter_map(|entry| {
        let pid = entry.pid?;
        let known = call.gateway.processes().get(call.connection.id(), pid);
        let config = match known
            .as_ref()
            .filter(|known| known.exec.to_string() == entry.id)
        {
            Some(known) => known.config.clone(),
            None => ProcessConfig::of(entry),
        };
        let mut shown = json!({
            "pid": pid,
            "config": { "cmd": config.cmd, "args": config.args, "envs": config.envs },
        });
        if let Some(cwd) = config.cwd {
            shown["config"]["cwd"] = cwd.into();
        }
        if let Some(tag) = &entry.details.label {
            shown["tag"] = tag.as_str().into();
        }
        Some(shown)
    });
    Ok(json!({ "processes": shown.collect::<Vec<_>>() }))
}

/// The command that a client means: one that this server started, or one that its keeper knows.
async fn find(call: &Call, selector: &Selector) -> Result<Arc<Process>> {
    let sandbox = call.connection.id();
    let processes = call.gateway.processes();
    let known = match (selector.pid, &selector.tag) {
        (Some(pid), _) => processes.get(sandbox, pid),
        (None, Some(tag)) => processes.tagged(sandbox, tag),
        (None, None) => return Err(Fault::bad_request("a process is selected by pid or tag")),
    };
    if let Some(known) = known {
        return Ok(known);
    }
    let entries = call.connection.sandbox.execs().await?;
    let mut running = entries.into_iter().filter(|entry| entry.ended.is_none());
    let entry = running.find(|entry| selector.means(entry));
    let entry = entry.ok_or_else(|| selector.missing())?;
    let id = ExecId::from_str(&entry.id)?;
    let mut exec = call.connection.guest.attach(id).await?;
    let streams = Streams::of(&mut exec);
    let connection = call.connection.clone();
    tokio::spawn(async move { drain(streams, &connection).await });
    let process = Process {
        exec: exec.id().clone(),
        pid: exec.pid(),
        tag: entry.details.label.clone(),
        config: ProcessConfig::of(&entry),
        terminal: entry.details.terminal,
        takes_input: entry.details.terminal || entry.details.stdin,
        handle: exec.handle().clone(),
        stdin: tokio::sync::Mutex::new(exec.stdin.clone()),
    };
    Ok(register(call, process))
}

fn bytes(input: &Input) -> Result<Vec<u8>> {
    let text = input.stdin.as_ref().or(input.pty.as_ref());
    let text = text.ok_or_else(|| Fault::bad_request("the input is missing"))?;
    STANDARD
        .decode(text)
        .map_err(|_| Fault::bad_request("the input is not base64"))
}

async fn write(process: &Process, bytes: &[u8]) -> Result<()> {
    if !process.takes_input {
        return Err(Fault::internal("stdin of the process is not open"));
    }
    let mut stdin = process.stdin.lock().await;
    Ok(stdin.write(bytes).await?)
}

async fn send_input(call: &Call, request: Request) -> Result<Value> {
    let SendInput { process, input } = rpc::read(request).await?;
    let bytes = bytes(&input)?;
    let process = find(call, &process).await?;
    write(&process, &bytes).await?;
    Ok(json!({}))
}

async fn stream_input(call: Call, request: Request) -> Result<Response> {
    let mut messages = Messages::new(request.into_body());
    let mut process = None;
    while let Some(StreamInput { start, data }) = messages.next().await? {
        if let Some(Selected { process: selector }) = start {
            process = Some(find(&call, &selector).await?);
        }
        let Some(Data { input }) = data else {
            // A sign of life.
            continue;
        };
        let Some(process) = &process else {
            return Err(Fault::bad_request("the first message selects a process"));
        };
        write(process, &bytes(&input)?).await?;
    }
    Ok(rpc::single(&json!({})))
}

async fn close_stdin(call: &Call, request: Request) -> Result<Value> {
    let Selected { process } = rpc::read(request).await?;
    let process = find(call, &process).await?;
    if process.terminal {
        return Err(Fault::bad_request("a terminal has no stdin to close"));
    }
    process.stdin.lock().await.close()?;
    Ok(json!({}))
}

async fn send_signal(call: &Call, request: Request) -> Result<Value> {
    let SendSignal { process, signal } = rpc::read(request).await?;
    let number = match &signal {
        Value::String(name) if name == "SIGNAL_SIGKILL" => SIGKILL,
        Value::String(name) if name == "SIGNAL_SIGTERM" => SIGTERM,
        Value::Number(number) if number.as_i64() == Some(SIGKILL.into()) => SIGKILL,
        Value::Number(number) if number.as_i64() == Some(SIGTERM.into()) => SIGTERM,
        other => return Err(Fault::bad_request(format!("invalid signal {other}"))),
    };
    let process = running(call, &process).await?;
    process.handle.signal(number)?;
    Ok(json!({}))
}

/// The command that a client means, if it has not ended.
async fn running(call: &Call, selector: &Selector) -> Result<Arc<Process>> {
    let process = find(call, selector).await?;
    let id = process.exec.to_string();
    let entries = call.connection.sandbox.execs().await?;
    let entry = entries.iter().find(|entry| entry.id == id);
    match entry {
        Some(entry) if entry.ended.is_none() => Ok(process),
        _ => {
            let message = format!("process with pid {} not found", process.pid);
            Err(Fault::not_found(message))
        }
    }
}

async fn update(call: &Call, request: Request) -> Result<Value> {
    let Update { process, pty } = rpc::read(request).await?;
    let process = running(call, &process).await?;
    let size = pty.and_then(|pty| pty.size);
    if let Some(size) = size {
        process.handle.resize(size.into())?;
    }
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_always_there() {
        assert_eq!(end(ExitStatus::Exited(0))["exitCode"], 0);
        assert!(end(ExitStatus::Exited(0)).get("error").is_none());
        assert_eq!(end(ExitStatus::Exited(3))["error"], "exit status 3");
        let killed = end(ExitStatus::Signaled(9));
        assert_eq!(killed["status"], "signal: killed");
        assert_eq!(killed["exitCode"], -1);
        assert_eq!(killed["exited"], false);
    }

    #[test]
    fn deadlines_come_from_the_header() {
        let found = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("connect-timeout-ms", text.parse().unwrap());
            deadline(&headers)
        };
        assert_eq!(found("1500").unwrap(), Some(Duration::from_millis(1500)));
        assert_eq!(found("0").unwrap(), None);
        assert!(found("x").is_err());
        assert_eq!(deadline(&HeaderMap::new()).unwrap(), None);
    }
}
