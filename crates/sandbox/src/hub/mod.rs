//! The hub: connects the one port of a guest with all clients of that guest.
//!
//! ```text
//!   client --\                                   /-- spool (output of a detached command, on disk)
//!   client ---- [ switch: one task, all state ] ----
//!   client --/            |                      \-- attachments (read a spool from its first byte)
//!                         |
//!                    guest's port
//! ```
//!
//! A client speaks the guest's own protocol over a socket, as if it were the only one. The hub
//! renumbers channels and requests, and is the only part that handles breaks: after a break it
//! greets the agent again and resumes each stream at its offset, and no client notices. Flow
//! control works end to end, because offsets and windows pass unchanged; so the windows of the
//! clients bound the hub's memory.
//!
//! A restored guest runs commands that another hub started: the hub adopts them, with their
//! recorded output, and clients can attach to them like to any detached command. A paused guest
//! keeps its hub: the port closes, another one opens, and the streams continue.
//!
//! Always: an agent's data is hostile; data over the window or out of order costs the agent its
//! link, and us no memory. The channels of a client that vanishes are closed. When the guest is
//! gone, every open channel ends with the reason.

mod admission;
mod adopt;
mod agent;
mod attach;
mod client;
mod details;
mod from_agent;
mod from_client;
mod record;
mod room;
mod slot;
mod spool;
mod switch;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandtree_proto::{Failure, HubFailure, Outcome};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};

pub use self::details::{ExecConfig, ExecDetails};
pub use self::record::ExecRecord;
use self::switch::{Input, KeptOutput, Recorded, Switch, Updates};
use crate::error::{Error, ErrorKind};
use crate::link::{Link, LinkError};
use crate::mounts::MountPort;

/// Client frames that wait for the switch; a full queue slows the clients down.
const QUEUE: usize = 256;
/// How long it may take to start a new segment of a command's output at a record; only a full disk
/// takes longer.
const ROLL_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Status {
    /// The agent was greeted and has not answered.
    Greeting,
    Up,
    Closed(Closed),
}

/// Why there is no agent to talk to any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Closed {
    pub cause: HubFailure,
    pub reason: String,
}

impl Closed {
    fn ended(reason: impl Into<String>) -> Self {
        Self {
            cause: HubFailure::Ended,
            reason: reason.into(),
        }
    }

    fn failure(&self) -> Failure {
        self.cause.failure(&self.reason)
    }

    /// What a client's channel ends with.
    fn outcome(&self) -> Outcome {
        match self.cause {
            HubFailure::Ended => self.lost(),
            _ => Outcome::Failed(self.failure()),
        }
    }

    /// What is recorded of a command whose output is kept.
    fn lost(&self) -> Outcome {
        Outcome::Lost {
            reason: self.reason.clone(),
        }
    }
}

/// A detached command, as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecEntry {
    pub id: String,
    pub command: String,
    pub pid: Option<u32>,
    /// `None` while it runs.
    pub ended: Option<String>,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    #[serde(default)]
    pub details: ExecDetails,
}

/// The settings of a new hub.
#[derive(Debug)]
pub(crate) struct HubSpec {
    /// The directory for the output of commands without a client.
    pub execs: PathBuf,
    /// For a guest that was restored, not booted.
    pub restored: Option<Restored>,
    /// Asked before each command of a client.
    pub gate: Option<mpsc::Sender<Gate>>,
    /// What a client opens waits until the guest knows of changes in the host's directories.
    pub mounts: MountPort,
}

impl HubSpec {
    /// For a guest that boots.
    pub fn fresh(execs: PathBuf) -> Self {
        Self {
            execs,
            restored: None,
            gate: None,
            mounts: MountPort::new(None),
        }
    }
}

/// The result of [`Hub::record`] at the moment of the capture.
#[derive(Debug)]
pub(crate) struct Restored {
    pub records: Vec<ExecRecord>,
    /// The directory of the recorded output.
    pub from: PathBuf,
}

/// Sent before a command starts; the reply admits it or carries the reason of a refusal. The
/// admission is visible here slightly before [`Activity`] counts it.
#[derive(Debug)]
pub(crate) struct Gate {
    pub reply: oneshot::Sender<Result<(), String>>,
}

/// The clients' work in the guest. If two values are equal and not busy, clients did nothing in
/// between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Activity {
    /// Increases at the start and at the end of everything that may change the guest.
    pub count: u64,
    /// Work that may change the guest is in progress.
    pub busy: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Census {
    clients: usize,
    activity: Activity,
}

/// The hub sends nothing to its agent and reads nothing from it until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    _release: oneshot::Sender<Infallible>,
}

#[derive(Debug, Clone)]
pub(crate) struct Hub {
    inputs: mpsc::Sender<Input>,
    status: watch::Receiver<Status>,
    census: watch::Receiver<Census>,
    mounts: MountPort,
}

impl Hub {
    /// Greets the agent behind `port` and starts to serve.
    pub fn start(port: UnixStream, spec: HubSpec) -> Hub {
        let (inputs, queue) = mpsc::channel(QUEUE);
        let (status_tx, status) = watch::channel(Status::Greeting);
        let (census_tx, census) = watch::channel(Census::default());
        let mounts = spec.mounts.clone();
        let switch = Switch::new(
            port,
            spec,
            Updates {
                status: status_tx,
                census: census_tx,
            },
            inputs.clone(),
        );
        tokio::spawn(switch.run(queue));
        Hub {
            inputs,
            status,
            census,
            mounts,
        }
    }

    /// The port of its guest for mounts.
    pub fn mounts(&self) -> &MountPort {
        &self.mounts
    }

    /// Waits for the agent's answer.
    pub async fn ready(&self, deadline: Duration) -> Result<(), LinkError> {
        let mut status = self.status.clone();
        let settled = status.wait_for(|s| *s != Status::Greeting);
        match tokio::time::timeout(deadline, settled).await {
            Err(_) => Err(LinkError::Timeout { after: deadline }),
            Ok(Err(_)) => Err(LinkError::ended()),
            Ok(Ok(status)) => match &*status {
                Status::Closed(closed) => Err(closed.failure().into()),
                Status::Greeting | Status::Up => Ok(()),
            },
        }
    }

    /// Serves a client that connected from outside.
    pub async fn serve(&self, client: UnixStream) {
        // If the switch is gone, the socket is closed, which the client understands.
        drop(self.inputs.send(Input::NewClient(client)).await);
    }

    /// A connection of this process.
    pub async fn connect(&self) -> Result<Link, LinkError> {
        let (ours, theirs) = UnixStream::pair().map_err(|error| LinkError::Broken {
            what: error.to_string(),
        })?;
        self.serve(theirs).await;
        Link::connect(ours).await
    }

    /// Ends every open channel with the reason why the guest is gone, and stops.
    pub async fn close(&self, reason: String) {
        let (done, closed) = oneshot::channel();
        if self
            .inputs
            .send(Input::Close { reason, done })
            .await
            .is_ok()
        {
            drop(closed.await);
        }
    }

    /// The guest exists, but its agent is gone: ends every open channel, and every later one, with
    /// the reason.
    pub async fn give_up(&self, reason: String) {
        // A switch that is gone has ended its channels already.
        drop(self.inputs.send(Input::GiveUp { reason }).await);
    }

    /// The detached commands of this guest.
    pub async fn execs(&self) -> Vec<ExecEntry> {
        let (tx, rx) = oneshot::channel();
        if self.inputs.send(Input::List(tx)).await.is_err() {
            return Vec::new();
        }
        rx.await.unwrap_or_default()
    }

    /// Greets the agent again, as after a break. Streams continue at their offsets.
    pub async fn resync(&self) {
        // A switch that is gone has no agent to greet.
        drop(self.inputs.send(Input::Resync).await);
    }

    /// Records every command: commands whose output is kept here, with that output linked below
    /// `into`, and the running commands of clients. Called when the guest continues after a
    /// capture. Output since the capture is in the record, too, and dropped when the captured guest
    /// is restored.
    pub async fn record(&self, into: PathBuf) -> Result<Vec<ExecRecord>, Error> {
        let (tx, rx) = oneshot::channel();
        let ended = || Error::Guest {
            operation: "record the guest's commands".into(),
            source: LinkError::ended(),
        };
        self.inputs
            .send(Input::Record(tx))
            .await
            .map_err(|_| ended())?;
        let mut records = Vec::new();
        for Recorded { record, kept } in rx.await.map_err(|_| ended())? {
            let ended = kept.as_ref().is_some_and(KeptOutput::has_ended);
            let record = match kept {
                Some(kept) => keep(record, kept, &into).await,
                None => Ok(record),
            };
            match record {
                // It was discarded meanwhile.
                Err(error) if ended && error.kind() == ErrorKind::NotFound => {
                    tracing::debug!(%error, "a discarded command is not recorded");
                }
                record => records.push(record?),
            }
        }
        Ok(records)
    }

    /// Closes the port of a guest that pauses. Its connections are lost, requests are void,
    /// commands and files wait.
    pub async fn suspend(&self, reason: String) {
        let (done, suspended) = oneshot::channel();
        if self
            .inputs
            .send(Input::Suspend { reason, done })
            .await
            .is_ok()
        {
            drop(suspended.await);
        }
    }

    /// Greets the agent of the same guest behind another port. Streams continue at their offsets;
    /// [`ready`](Self::ready) waits for the answer.
    pub async fn reconnect(&self, port: UnixStream) {
        let (done, greeted) = oneshot::channel();
        if self.inputs.send(Input::GoOn { port, done }).await.is_ok() {
            drop(greeted.await);
        }
    }

    /// Lets everything reach the guest that was opened since [`reconnect`](Self::reconnect), or
    /// waited for it.
    pub async fn admit(&self) {
        // A hub that is gone has nothing to open.
        drop(self.inputs.send(Input::Admit).await);
    }

    /// Neither reads from the agent nor writes to it until the result is dropped. QEMU moves bytes
    /// between its port and the guest's memory even while the guest is stopped: there must be none
    /// to move while that memory is captured.
    pub async fn hold(&self) -> Held {
        let (release, released) = oneshot::channel();
        let (done, held) = oneshot::channel();
        // A hub that is gone sends nothing.
        if self
            .inputs
            .send(Input::Hold { done, released })
            .await
            .is_ok()
        {
            drop(held.await);
        }
        Held { _release: release }
    }

    /// How many connections have a channel open.
    pub fn clients(&self) -> usize {
        self.census.borrow().clients
    }

    /// Waits until no connection has a channel open.
    pub async fn idle(&self) {
        // A hub that is gone has no clients.
        drop(
            self.census
                .clone()
                .wait_for(|census| census.clients == 0)
                .await,
        );
    }

    pub fn activity(&self) -> Activity {
        self.census.borrow().activity
    }
}

/// Adds the kept output of the command to a record, and links it below `into`.
async fn keep(mut record: ExecRecord, kept: KeptOutput, into: &Path) -> Result<ExecRecord, Error> {
    let KeptOutput {
        dir,
        rolled,
        progress,
    } = kept;
    let progress = match tokio::time::timeout(ROLL_DEADLINE, rolled).await {
        Ok(Ok(progress)) => progress,
        // A command whose output could not be kept writes no more.
        Ok(Err(_)) => progress.borrow().clone(),
        Err(_) => {
            return Err(Error::io(
                "cut the output kept in",
                &dir,
                io::ErrorKind::TimedOut.into(),
            ));
        }
    };
    (record.pid, record.ended) = (progress.pid, progress.outcome.clone());
    (record.out, record.err) = (
        progress.out.segments.to_vec(),
        progress.err.segments.to_vec(),
    );
    let into = into.join(&record.tag);
    let linked =
        tokio::task::spawn_blocking(move || record::keep(&record, &dir, &into).map(|()| record));
    linked.await.expect("linking does not panic")
}
