//! The commands that are used, each with the type of its reply.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// One QMP command: its fields serialise to the arguments.
pub trait Command: Serialize {
    const NAME: &'static str;
    type Reply: DeserializeOwned;
}

/// The reply of commands that only succeed. QEMU sends an empty object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Nothing {}

#[derive(Debug, Serialize)]
pub(crate) struct Capabilities {}

impl Command for Capabilities {
    const NAME: &'static str = "qmp_capabilities";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub struct QueryStatus {}

impl Command for QueryStatus {
    const NAME: &'static str = "query-status";
    type Reply = Status;
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Status {
    pub running: bool,
    /// QEMU's own word: `running`, `paused`, `guest-panicked`, `internal-error`, `io-error`, ...
    pub status: String,
}

/// Stops the virtual processors.
#[derive(Debug, Serialize)]
pub struct Stop {}

impl Command for Stop {
    const NAME: &'static str = "stop";
    type Reply = Nothing;
}

/// Lets the virtual processors go on.
#[derive(Debug, Serialize)]
pub struct Cont {}

impl Command for Cont {
    const NAME: &'static str = "cont";
    type Reply = Nothing;
}

/// Ends QEMU in an orderly way: disk images are closed.
#[derive(Debug, Serialize)]
pub struct Quit {}

impl Command for Quit {
    const NAME: &'static str = "quit";
    type Reply = Nothing;
}

/// Presses the power button; what follows is up to the guest.
#[derive(Debug, Serialize)]
pub struct SystemPowerdown {}

impl Command for SystemPowerdown {
    const NAME: &'static str = "system_powerdown";
    type Reply = Nothing;
}
