//! The hub: between the one port of a guest and everyone who talks to that guest.
//!
//! ```text
//!   client --\                                   /-- spool (output of a detached command, on disk)
//!   client ---- [ switch: one task, all state ] ----
//!   client --/            |                      \-- attachments (read a spool from its first byte)
//!                         |
//!                    guest's port
//! ```
//!
//! A client speaks the guest's own protocol over a socket, as if it were alone. The hub renumbers
//! channels and requests, and is the only one that knows of breaks: after one it greets the agent
//! anew, tells it where each stream stands, and no client notices. Flow control goes end to end,
//! because offsets and windows pass through unchanged; so what the hub holds is bounded by the
//! windows its clients chose.
//!
//! A guest that was restored brings commands with it that another hub had started: they are
//! adopted, with the output that was recorded of them, and can be attached to like any detached
//! command. A guest that pauses keeps its hub: the port goes and another comes, and the streams go
//! on.
//!
//! Always: what an agent sends is hostile; over the window or out of order costs it the link, not
//! us the memory. A client that vanishes has its channels closed. When the guest is gone, every
//! open channel is told why.

mod admission;
mod adopt;
mod agent;
mod attach;
mod client;
mod from_agent;
mod from_client;
mod record;
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

pub use self::record::ExecRecord;
use self::switch::{Input, KeptOutput, News, Recorded, Switch};
use crate::error::Error;
use crate::link::{Link, LinkError};

/// Client frames that wait for the switch; a full queue slows the clients down.
const QUEUE: usize = 256;
/// How long a command's output may take to be cut at the moment of a record; only a disk that is
/// full takes longer.
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
pub struct ExecEntry {
    pub id: String,
    pub command: String,
    pub pid: Option<u32>,
    /// `None` while it runs.
    pub ended: Option<String>,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
}

/// What a hub begins with.
#[derive(Debug)]
pub(crate) struct HubSpec {
    /// Below it the output of commands that no client owns is kept.
    pub execs: PathBuf,
    /// Of a guest that was restored, not booted.
    pub restored: Option<Restored>,
    /// Asked before each command of a client.
    pub gate: Option<mpsc::Sender<Gate>>,
}

impl HubSpec {
    /// For a guest that boots.
    pub fn fresh(execs: PathBuf) -> Self {
        Self {
            execs,
            restored: None,
            gate: None,
        }
    }
}

/// What [`Hub::record`] gave at the moment of the capture.
#[derive(Debug)]
pub(crate) struct Restored {
    pub records: Vec<ExecRecord>,
    /// Where it was recorded into.
    pub from: PathBuf,
}

/// A command waits to start. An error is what its client is told instead. Who lets it start knows
/// of it a moment before the [`Activity`] shows it.
#[derive(Debug)]
pub(crate) struct Gate {
    pub reply: oneshot::Sender<Result<(), String>>,
}

/// What clients have done to the guest. Two that are equal and not busy mean that they did nothing
/// in between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Activity {
    /// Grows with everything that may change the guest, when it begins and when it is over.
    pub count: u64,
    /// Something that may change the guest goes on.
    pub busy: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Census {
    clients: usize,
    activity: Activity,
}

/// A hub is silent towards its agent as long as this is there.
#[derive(Debug)]
pub(crate) struct Held {
    _release: oneshot::Sender<Infallible>,
}

#[derive(Debug, Clone)]
pub(crate) struct Hub {
    inputs: mpsc::Sender<Input>,
    status: watch::Receiver<Status>,
    census: watch::Receiver<Census>,
}

impl Hub {
    /// Greets the agent behind `port` and begins to serve.
    pub fn start(port: UnixStream, spec: HubSpec) -> Hub {
        let (inputs, queue) = mpsc::channel(QUEUE);
        let (status_tx, status) = watch::channel(Status::Greeting);
        let (census_tx, census) = watch::channel(Census::default());
        let switch = Switch::new(
            port,
            spec,
            News {
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
        }
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
        // A switch that is gone drops the socket, which is the answer the client understands.
        drop(self.inputs.send(Input::NewClient(client)).await);
    }

    /// A connection of our own.
    pub async fn connect(&self) -> Result<Link, LinkError> {
        let (ours, theirs) = UnixStream::pair().map_err(|error| LinkError::Broken {
            what: error.to_string(),
        })?;
        self.serve(theirs).await;
        Link::connect(ours).await
    }

    /// Tells every open channel why the guest is gone, and ends.
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

    /// There is no agent any more, though there is a guest: tells every open channel, and whoever
    /// comes.
    pub async fn give_up(&self, reason: String) {
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

    /// Greets the agent anew, as after a break. Streams go on where they were.
    pub async fn resync(&self) {
        drop(self.inputs.send(Input::Resync).await);
    }

    /// Records every command: those whose output is kept here with that output, linked below
    /// `into`, and the running ones of clients. Called when the guest goes on after a capture; what
    /// it has said since is in the record, too, and left out again when the captured guest is
    /// restored.
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
            records.push(match kept {
                Some(kept) => keep(record, kept, &into).await?,
                None => record,
            });
        }
        Ok(records)
    }

    /// Lets the port go, for a guest that pauses. Its connections are lost, requests are void,
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

    /// Greets the agent of the same guest behind another port. Streams go on where they were;
    /// [`ready`](Self::ready) waits for the answer.
    pub async fn go_on(&self, port: UnixStream) {
        let (done, greeted) = oneshot::channel();
        if self.inputs.send(Input::GoOn { port, done }).await.is_ok() {
            drop(greeted.await);
        }
    }

    /// Neither hears the agent nor speaks to it until what this gives is dropped. QEMU moves bytes
    /// between its port and the guest's memory also while the guest stands still: there must be
    /// none to move while that memory is captured.
    pub async fn hold(&self) -> Held {
        let (release, released) = oneshot::channel();
        let (done, held) = oneshot::channel();
        // A hub that is gone is silent.
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

/// Fills in a record what is kept of the command, and links it below `into`.
async fn keep(mut record: ExecRecord, kept: KeptOutput, into: &Path) -> Result<ExecRecord, Error> {
    let KeptOutput {
        dir,
        rolled,
        progress,
    } = kept;
    let progress = match tokio::time::timeout(ROLL_DEADLINE, rolled).await {
        Ok(Ok(progress)) => progress,
        // One whose output could not be kept writes none any more.
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
