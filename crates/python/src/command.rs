//! A command in a guest: one task owns it, sends its output in pieces, and obeys requests.
//!
//! ```text
//!   Python ── signal, resize ──► task of the command ── events: output, …, end ──► next
//! ```
//!
//! Always: when the object is dropped, the task ends, and with it the command, unless it is
//! detached. At most [`EVENTS`] pieces wait for a reader, so a reader that stops stops the command.

use std::ffi::OsString;
use std::sync::{Arc, PoisonError};

use bytes::{Bytes, BytesMut};
use pyo3::IntoPyObject;
use pyo3::prelude::{FromPyObject, Py, PyAny, PyResult, pyclass, pymethods};
use sandtree::{ByteStream, Error, Exec, ExecSpec, ExitStatus, Lifetime, Result, Stdin, TermSize};
use tokio::sync::{Mutex, mpsc};

use crate::convert::{Blob, seconds};
use crate::runtime::{self, Operation};

/// Pieces of output that wait for a reader.
const EVENTS: usize = 8;
/// The size to which pieces are joined.
const PIECE: usize = 1 << 20;
const REQUESTS: usize = 16;

/// A command to start, as a dictionary of Python.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub struct ExecRequest {
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    workdir: Option<OsString>,
    user: Option<String>,
    /// Rows and columns.
    terminal: Option<(u16, u16)>,
    stdin: bool,
    timeout: Option<f64>,
    detached: bool,
}

impl ExecRequest {
    pub fn spec(self) -> Result<ExecSpec> {
        let timeout = self.timeout.map(|value| seconds("timeout", value));
        Ok(ExecSpec {
            env: self.env,
            workdir: self.workdir,
            user: self.user,
            terminal: self.terminal.map(|(rows, cols)| TermSize { rows, cols }),
            stdin: self.stdin,
            timeout: timeout.transpose()?,
            lifetime: if self.detached {
                Lifetime::Detached
            } else {
                Lifetime::Attached
            },
            ..ExecSpec::argv(self.argv)
        })
    }
}

/// How a command ended: a word, and the exit code or the signal.
pub type Ended = (&'static str, i32);

pub fn ended(status: ExitStatus) -> Ended {
    match status {
        ExitStatus::Exited(code) => ("exited", code),
        ExitStatus::Signaled(signal) => ("signaled", signal),
        ExitStatus::TimedOut => ("timed_out", 0),
    }
}

#[derive(Debug)]
enum Event {
    Output(u8, Bytes),
    Ended(ExitStatus),
    Failed(Error),
}

#[derive(Debug)]
enum Request {
    Signal(i32),
    Resize(TermSize),
}

#[pyclass(name = "Command", frozen)]
#[derive(Debug)]
pub struct GuestCommand {
    #[pyo3(get)]
    id: String,
    #[pyo3(get)]
    pid: u32,
    stdin: Arc<Mutex<Stdin>>,
    /// `None` once it is closed.
    requests: std::sync::Mutex<Option<mpsc::Sender<Request>>>,
    events: Arc<Mutex<Events>>,
}

impl GuestCommand {
    pub fn of(exec: Exec) -> Self {
        let (requests, asked) = mpsc::channel(REQUESTS);
        let (sender, receiver) = mpsc::channel(EVENTS);
        let command = Self {
            id: exec.id().to_string(),
            pid: exec.pid(),
            stdin: Arc::new(Mutex::new(exec.stdin.clone())),
            requests: std::sync::Mutex::new(Some(requests)),
            events: Arc::new(Mutex::new(Events {
                receiver,
                held: None,
            })),
        };
        runtime::in_background(attend(exec, asked, sender));
        command
    }

    fn ask(&self, request: Request) -> bool {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let requests = requests.as_ref();
        requests.is_some_and(|requests| requests.try_send(request).is_ok())
    }
}

#[pymethods]
impl GuestCommand {
    /// The next event: `(1, bytes)` of stdout, `(2, bytes)` of stderr, `(0, (word, number))` at
    /// the end, `None` after it.
    fn next(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let events = self.events.clone();
        runtime::start(done, async move { events.lock().await.next().await })
    }

    /// Writes to the command's stdin, and waits while it does not read.
    fn write(&self, bytes: Vec<u8>, done: Py<PyAny>) -> PyResult<Operation> {
        let stdin = self.stdin.clone();
        runtime::start(done, async move { stdin.lock().await.write(&bytes).await })
    }

    /// Ends the command's stdin.
    fn close_stdin(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let stdin = self.stdin.clone();
        runtime::start(done, async move { stdin.lock().await.close() })
    }

    /// Sends a signal to the command's process group. Returns whether the command still runs.
    fn signal(&self, number: i32) -> bool {
        self.ask(Request::Signal(number))
    }

    fn resize(&self, rows: u16, cols: u16) -> bool {
        self.ask(Request::Resize(TermSize { rows, cols }))
    }

    /// Lets the command go: one that is not detached ends.
    fn close(&self) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests = None;
    }
}

/// A value of [`GuestCommand::next`].
#[derive(Debug, IntoPyObject)]
pub enum Next {
    Output((u8, Blob)),
    Ended((u8, Ended)),
}

#[derive(Debug)]
struct Events {
    receiver: mpsc::Receiver<Event>,
    /// An event that was received and not returned yet.
    held: Option<Event>,
}

impl Events {
    async fn next(&mut self) -> Result<Option<Next>> {
        let event = match self.held.take() {
            Some(event) => Some(event),
            None => self.receiver.recv().await,
        };
        match event {
            None => Ok(None),
            Some(Event::Output(stream, bytes)) => {
                let joined = self.join(stream, bytes);
                Ok(Some(Next::Output((stream, Blob(joined)))))
            }
            Some(Event::Ended(status)) => Ok(Some(Next::Ended((0, ended(status))))),
            Some(Event::Failed(error)) => Err(error),
        }
    }

    /// Adds the pieces of the same stream that are already here: each way to Python has its cost.
    fn join(&mut self, stream: u8, first: Bytes) -> Bytes {
        let mut joined = BytesMut::new();
        while let Ok(event) = self.receiver.try_recv() {
            match event {
                Event::Output(other, bytes) if other == stream && joined.len() < PIECE => {
                    if joined.is_empty() {
                        joined.extend_from_slice(&first);
                    }
                    joined.extend_from_slice(&bytes);
                }
                other => {
                    self.held = Some(other);
                    break;
                }
            }
        }
        if joined.is_empty() {
            first
        } else {
            joined.freeze()
        }
    }
}

/// Owns the command until it has ended and all events are sent, or the object is dropped.
async fn attend(mut exec: Exec, mut asked: mpsc::Receiver<Request>, events: mpsc::Sender<Event>) {
    let mut stdout = exec.stdout.take();
    let mut stderr = exec.stderr.take();
    loop {
        let event = tokio::select! {
            request = asked.recv() => match request {
                Some(request) => {
                    if let Err(error) = obey(&exec, request) {
                        Event::Failed(error)
                    } else {
                        continue;
                    }
                }
                // The object is gone.
                None => return,
            },
            chunk = piece(&mut stdout) => output(1, chunk, &mut stdout),
            chunk = piece(&mut stderr) => output(2, chunk, &mut stderr),
            status = exec.wait(), if stdout.is_none() && stderr.is_none() => {
                status.map_or_else(Event::Failed, Event::Ended)
            }
        };
        let is_last = matches!(event, Event::Ended(_) | Event::Failed(_));
        // A stream that has just ended has no bytes.
        let is_empty = matches!(&event, Event::Output(_, bytes) if bytes.is_empty());
        if is_empty {
            continue;
        }
        let Some(room) = room(&exec, &mut asked, &events).await else {
            return;
        };
        room.send(event);
        if is_last {
            return;
        }
    }
}

/// Waits for room for an event, and obeys requests meanwhile: a command without a reader gets
/// signals, too. `None`: the object is gone.
async fn room<'a>(
    exec: &Exec,
    asked: &mut mpsc::Receiver<Request>,
    events: &'a mpsc::Sender<Event>,
) -> Option<mpsc::Permit<'a, Event>> {
    loop {
        tokio::select! {
            room = events.reserve() => return room.ok(),
            request = asked.recv() => {
                // If the link is broken, the event after this one reports it.
                drop(obey(exec, request?));
            }
        }
    }
}

fn obey(exec: &Exec, request: Request) -> Result<()> {
    match request {
        Request::Signal(number) => exec.signal(number),
        Request::Resize(size) => exec.resize(size),
    }
}

type Chunk = std::result::Result<Option<Bytes>, sandtree::LinkError>;

/// The next bytes of a stream; never, for one that has ended.
async fn piece(stream: &mut Option<ByteStream>) -> Chunk {
    match stream {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}

fn output(number: u8, chunk: Chunk, stream: &mut Option<ByteStream>) -> Event {
    match chunk {
        Ok(Some(bytes)) => Event::Output(number, bytes),
        Ok(None) => {
            *stream = None;
            Event::Output(number, Bytes::new())
        }
        Err(source) => Event::Failed(Error::Guest {
            operation: "read a command's output".into(),
            source,
        }),
    }
}
