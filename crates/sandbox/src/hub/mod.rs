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
//! A client speaks the guest's own protocol over a socket, as if it were alone. The hub renumbers channels and requests,
//! and is the only one that knows of breaks: after one it greets the agent anew, tells it where each stream stands, and
//! no client notices. Flow control goes end to end, because offsets and windows pass through unchanged; so what the
//! hub holds is bounded by the windows its clients chose.
//!
//! Always: what an agent sends is hostile; over the window or out of order costs it the link, not us the memory. A client
//! that vanishes has its channels closed. When the guest is gone, every open channel is told why.

mod agent;
mod attach;
mod client;
mod from_agent;
mod from_client;
mod slot;
mod spool;
mod switch;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};

use self::switch::{Input, Switch};
use crate::link::{Link, LinkError};

/// Client frames that wait for the switch; a full queue slows the clients down.
const QUEUE: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Status {
    /// The agent was greeted and has not answered.
    Greeting,
    Up,
    Closed {
        reason: String,
    },
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

#[derive(Debug, Clone)]
pub(crate) struct Hub {
    inputs: mpsc::Sender<Input>,
    status: watch::Receiver<Status>,
}

impl Hub {
    /// Greets the agent behind `port` and begins to serve. Output of detached commands is kept below `execs`.
    pub fn start(port: UnixStream, execs: PathBuf) -> Hub {
        let (inputs, queue) = mpsc::channel(QUEUE);
        let (status_tx, status) = watch::channel(Status::Greeting);
        let switch = Switch::new(port, execs, status_tx, inputs.clone());
        tokio::spawn(switch.run(queue));
        Hub { inputs, status }
    }

    /// Waits for the agent's answer.
    pub async fn ready(&self, deadline: Duration) -> Result<(), LinkError> {
        let mut status = self.status.clone();
        let settled = status.wait_for(|s| *s != Status::Greeting);
        match tokio::time::timeout(deadline, settled).await {
            Err(_) => Err(LinkError::Timeout { after: deadline }),
            Ok(Err(_)) => Err(LinkError::Ended),
            Ok(Ok(status)) => match &*status {
                Status::Closed { reason } => Err(LinkError::Lost { reason: reason.clone() }),
                _ => Ok(()),
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
        let (ours, theirs) = UnixStream::pair().map_err(|_| LinkError::Ended)?;
        self.serve(theirs).await;
        Link::connect(ours).await
    }

    /// Tells every open channel why the guest is gone, and ends.
    pub async fn close(&self, reason: String) {
        let (done, closed) = oneshot::channel();
        if self.inputs.send(Input::Close { reason, done }).await.is_ok() {
            drop(closed.await);
        }
    }

    /// There is no agent any more, though there is a guest: tells every open channel, and whoever comes.
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
}
