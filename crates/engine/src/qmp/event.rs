//! Events that QEMU sends without a request.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tokio::sync::broadcast;

/// Why the machine shut down.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Shutdown {
    /// Whether the guest did it: powered off, rebooted or panicked.
    pub guest: bool,
    /// QEMU's own word: `guest-shutdown`, `guest-reset`, `guest-panic`, `host-qmp-quit`,
    /// `host-signal`, ...
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    Shutdown(Shutdown),
    GuestPanicked,
    /// The guest is stopped; `at` is QEMU's time, since 1970. QEMU may be too busy to send the
    /// event before the guest continues.
    Stop {
        at: Duration,
    },
    Resume {
        at: Duration,
    },
    Reset,
    BlockIoError {
        node: String,
        /// `read` or `write`.
        operation: String,
        /// The host's disk is full.
        no_space: bool,
    },
    /// A program in the guest opened the link's port, or closed it.
    Port {
        open: bool,
    },
    /// A state is being saved or loaded: `active`, `completed`, `failed`, ...
    Migration {
        status: String,
    },
    /// A job of the block layer: `running`, `concluded`, ...
    Job {
        id: String,
        status: String,
    },
    Other {
        name: String,
    },
    /// This subscriber was too slow and missed so many. `Ending` misses none.
    Lost {
        count: u64,
    },
}

impl Event {
    /// Reads an event; one whose data does not have the expected form is not an event QEMU could
    /// send.
    pub(crate) fn parse(name: &str, data: Value, at: Duration) -> Result<Event, serde_json::Error> {
        Ok(match name {
            "SHUTDOWN" => Event::Shutdown(serde_json::from_value(data)?),
            "GUEST_PANICKED" => Event::GuestPanicked,
            "STOP" => Event::Stop { at },
            "RESUME" => Event::Resume { at },
            "RESET" => Event::Reset,
            "VSERPORT_CHANGE" => Event::Port {
                open: PortChange::deserialize(data)?.open,
            },
            "BLOCK_IO_ERROR" => BlockIoError::deserialize(data)?.into(),
            "MIGRATION" => Event::Migration {
                status: Change::deserialize(data)?.status,
            },
            "JOB_STATUS_CHANGE" => {
                let Change { id, status } = Change::deserialize(data)?;
                Event::Job { id, status }
            }
            other => Event::Other {
                name: other.to_owned(),
            },
        })
    }
}

#[derive(Deserialize)]
struct PortChange {
    open: bool,
}

#[derive(Deserialize)]
struct Change {
    /// A migration has none.
    #[serde(default)]
    id: String,
    status: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct BlockIoError {
    #[serde(default)]
    node_name: String,
    operation: String,
    #[serde(default)]
    nospace: bool,
}

impl From<BlockIoError> for Event {
    fn from(error: BlockIoError) -> Self {
        Event::BlockIoError {
            node: error.node_name,
            operation: error.operation,
            no_space: error.nospace,
        }
    }
}

/// What QEMU has reported about the machine's end. Unlike events it is kept for later calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    pub panicked: bool,
    pub shutdown: Option<Shutdown>,
}

impl Ending {
    pub(crate) fn note(&mut self, event: &Event) {
        match event {
            Event::GuestPanicked => self.panicked = true,
            Event::Shutdown(shutdown) => self.shutdown = Some(shutdown.clone()),
            _ => {}
        }
    }
}

/// A subscription to events, from the moment it was made.
#[derive(Debug)]
pub struct Events(pub(crate) broadcast::Receiver<Event>);

impl Events {
    /// The next event; none when the connection has ended.
    pub async fn next(&mut self) -> Option<Event> {
        match self.0.recv().await {
            Ok(event) => Some(event),
            Err(broadcast::error::RecvError::Lagged(count)) => Some(Event::Lost { count }),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}
