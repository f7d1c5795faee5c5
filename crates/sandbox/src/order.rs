//! The verbs of a sandbox: one type for each verb, with the type of its answer.
//!
//! The same values travel on a driver's queue and, as JSON, on a keeper's socket, so a verb is
//! written once and works whichever process runs the sandbox.
//!
//! ```text
//!   Sandbox::checkpoint ── TakeCheckpoint ─┬─ driver of this process
//!                                          ├─ Order ── keeper's socket ── its driver
//!                                          └─ no process runs it: see `AtRest`
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use sandtree_engine::Picture;
use sandtree_store::Consistency;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::degradation::Degradation;
use crate::mounts::{InUse, MountSpec};
use crate::states::{
    Checkpoint, Forget, Forgotten, Goal, Paused, Replace, RestoreReport, Reverted,
};
use crate::verb::Verb;

/// A verb with its arguments.
pub(crate) trait Ask: Send + 'static {
    type Answer: Send + 'static;

    const URGENCY: Urgency = Urgency::Queued;

    /// What the table of legal verbs calls it.
    fn verb(&self) -> Verb;
}

/// A verb for a sandbox that any process may run, or none.
pub(crate) trait Anywhere:
    Ask<Answer: Serialize + DeserializeOwned> + Into<Order> + Clone
{
    const AT_REST: AtRest;
}

/// When a driver carries an order out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// After those that came before it.
    Queued,
    /// At once: it interrupts the verb that is being carried out.
    Interrupts,
}

/// What happens to an order for a sandbox that no process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtRest {
    /// It needs a machine, so it is refused.
    Refused,
    /// This process takes the sandbox for as long as the order takes.
    Brief,
    /// A machine runs afterwards, in this process or in a keeper.
    Starts,
}

/// Any verb with its arguments, as it is sent to a keeper.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    Stop(Stop),
    Kill(Kill),
    Start(Start),
    Remove(Remove),
    Checkpoint(TakeCheckpoint),
    GoTo(Goal),
    Forget(Forget),
    Lend(Wanted),
    GiveBack(GiveBack),
    Pause(Pause),
    Resume(Resume),
    Mount(MountSpec),
    Unmount(Unmount),
    Applied(Applied),
    Expire(Expire),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stop {
    /// How long the guest's processes may take to end; without it, as long as its init needs.
    pub grace_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kill {}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub boot_timeout_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Remove {}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TakeCheckpoint {
    pub tag: Option<String>,
    pub replace: Replace,
}

/// Returns a lent state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GiveBack {
    pub state: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pause {}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Resume {}

/// Unmounts a directory of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unmount {
    /// The path in the guest.
    pub path: String,
    pub in_use: InUse,
}

/// Records what was written to the host's directory of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Applied {
    /// The mount's number.
    pub mount: u32,
    /// By path, the version that the host's file has since.
    pub versions: BTreeMap<String, String>,
}

/// Sets when a running sandbox expires.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expire {
    /// From now on; `None`: it does not expire.
    pub after_ms: Option<u64>,
}

/// Takes a picture of the screen.
#[derive(Debug)]
pub(crate) struct TakePicture {}

impl Ask for TakePicture {
    type Answer = Picture;

    fn verb(&self) -> Verb {
        Verb::Use
    }
}

/// Connects a viewer to the screen.
#[derive(Debug)]
pub(crate) struct OpenView {}

impl Ask for OpenView {
    type Answer = UnixStream;

    fn verb(&self) -> Verb {
        Verb::Use
    }
}

/// What a state is wanted for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wanted {
    /// Memory and disk, for copies.
    Copies,
    /// The disk alone; a guest that runs is not stopped.
    Disk,
    /// Memory and disk, for a snapshot.
    Memory,
    /// An existing state, by tag or id, with all it has.
    State(String),
}

impl Wanted {
    pub fn verb(&self) -> Verb {
        match self {
            Self::Copies => Verb::Fork,
            Self::Disk | Self::Memory | Self::State(_) => Verb::Save,
        }
    }
}

/// A state that is lent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LentState {
    pub state: String,
    /// How long the source was stopped.
    pub pause_ms: f64,
    pub degraded: Vec<Degradation>,
    pub consistency: Consistency,
    /// The state has memory, which is not wanted.
    pub disk_only: bool,
}

macro_rules! verbs {
    ($(
        $order:ident($ask:ident) -> $answer:ty,
        $at_rest:ident,
        $urgency:ident,
        |$it:pat_param| $verb:expr;
    )*) => {$(
        impl From<$ask> for Order {
            fn from(ask: $ask) -> Self {
                Self::$order(ask)
            }
        }

        impl Anywhere for $ask {
            const AT_REST: AtRest = AtRest::$at_rest;
        }

        impl Ask for $ask {
            type Answer = $answer;

            const URGENCY: Urgency = Urgency::$urgency;

            fn verb(&self) -> Verb {
                let $it = self;
                $verb
            }
        }
    )*};
}

verbs! {
    Stop(Stop) -> (), Refused, Queued, |_| Verb::Stop;
    Kill(Kill) -> (), Refused, Interrupts, |_| Verb::Kill;
    Start(Start) -> (), Starts, Queued, |_| Verb::Start;
    Remove(Remove) -> (), Brief, Interrupts, |_| Verb::Remove;
    Checkpoint(TakeCheckpoint) -> Checkpoint, Refused, Queued, |_| Verb::Checkpoint;
    GoTo(Goal) -> Reverted, Starts, Queued, |_| Verb::Revert;
    Forget(Forget) -> Forgotten, Brief, Queued, |_| Verb::Forget;
    Lend(Wanted) -> LentState, Brief, Queued, |wanted| wanted.verb();
    GiveBack(GiveBack) -> (), Brief, Queued, |_| Verb::Forget;
    Pause(Pause) -> Paused, Refused, Queued, |_| Verb::Pause;
    Resume(Resume) -> RestoreReport, Starts, Queued, |_| Verb::Resume;
    Mount(MountSpec) -> (), Refused, Queued, |_| Verb::Use;
    Unmount(Unmount) -> (), Refused, Queued, |_| Verb::Use;
    Applied(Applied) -> (), Brief, Queued, |_| Verb::Save;
    Expire(Expire) -> (), Refused, Queued, |_| Verb::Use;
}

impl Order {
    /// Its name in a keeper's log: that on the socket.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Kill(_) => "kill",
            Self::Start(_) => "start",
            Self::Remove(_) => "remove",
            Self::Checkpoint(_) => "checkpoint",
            Self::GoTo(_) => "go_to",
            Self::Forget(_) => "forget",
            Self::Lend(_) => "lend",
            Self::GiveBack(_) => "give_back",
            Self::Pause(_) => "pause",
            Self::Resume(_) => "resume",
            Self::Mount(_) => "mount",
            Self::Unmount(_) => "unmount",
            Self::Applied(_) => "applied",
            Self::Expire(_) => "expire",
        }
    }

    pub fn verb(&self) -> Verb {
        match self {
            Self::Stop(ask) => ask.verb(),
            Self::Kill(ask) => ask.verb(),
            Self::Start(ask) => ask.verb(),
            Self::Remove(ask) => ask.verb(),
            Self::Checkpoint(ask) => ask.verb(),
            Self::GoTo(ask) => ask.verb(),
            Self::Forget(ask) => ask.verb(),
            Self::Lend(ask) => ask.verb(),
            Self::GiveBack(ask) => ask.verb(),
            Self::Pause(ask) => ask.verb(),
            Self::Resume(ask) => ask.verb(),
            Self::Mount(ask) => ask.verb(),
            Self::Unmount(ask) => ask.verb(),
            Self::Applied(ask) => ask.verb(),
            Self::Expire(ask) => ask.verb(),
        }
    }
}

/// A duration as it is sent. One that is too long for the field is as good as none.
pub(crate) fn as_ms(duration: Option<Duration>) -> Option<u64> {
    duration.map(|duration| duration.as_millis().try_into().unwrap_or(u64::MAX))
}
