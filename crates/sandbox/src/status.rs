//! The state of a sandbox, as its driver publishes it to the handles of this process.

use sandtree_store::{Ended, Phase, SandboxDir, StateRecord};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

use crate::error::{Error, Result, unreachable_guest};
use crate::hub::Hub;
use crate::info::SandboxInfo;
use crate::link::Link;
use crate::verb::{Verb, has_machine};

/// Everything that a driver publishes.
#[derive(Debug, Clone)]
pub(crate) struct Status {
    pub state: State,
    pub info: SandboxInfo,
    pub stalled: bool,
    pub hub: Option<Hub>,
}

impl Status {
    pub fn new(dir: &SandboxDir, state: &StateRecord, hub: Option<&Hub>) -> Self {
        Self {
            state: State::of(state),
            info: SandboxInfo::new(dir, state),
            stalled: false,
            hub: hub.cloned(),
        }
    }

    /// The hub of a guest that runs.
    pub fn hub(&self) -> Result<Hub> {
        let name = self.info.name.clone();
        match (&self.hub, self.state.phase) {
            _ if self.stalled => Err(Error::Stalled),
            (Some(hub), Some(Phase::Running)) => Ok(hub.clone()),
            (_, Some(phase)) => Err(Error::WrongState {
                name,
                phase,
                reason: self.further_reason(),
                verb: Verb::Use,
            }),
            (_, None) => Err(Error::NoSandbox { name }),
        }
    }

    fn further_reason(&self) -> Option<String> {
        let reason = self.state.reason.clone();
        reason.filter(|_| self.info.ended != Some(Ended::Stopped))
    }

    /// A connection to a guest that runs.
    pub async fn link(&self) -> Result<Link> {
        self.hub()?.connect().await.map_err(unreachable_guest)
    }

    /// The hub of a paused sandbox, while it has waiting clients.
    pub fn paused_hub(&self) -> Option<Hub> {
        let is_paused = self.state.phase == Some(Phase::Paused);
        self.hub.clone().filter(|_| is_paused)
    }

    pub fn crashed(&mut self, reason: String) {
        self.state = State {
            phase: Some(Phase::Crashed),
            ..State::gone(&reason)
        };
        self.hub = None;
    }

    pub fn removed(&mut self) {
        self.state = State::gone("it was removed");
        self.stalled = false;
        self.hub = None;
    }
}

/// A sandbox's state, and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct State {
    /// `None` once the sandbox is removed.
    pub phase: Option<Phase>,
    pub reason: Option<String>,
    /// The snapshot it was saved as when it last stopped, if that was asked for.
    pub saved: Option<String>,
    /// Why it was not saved when it stopped, although that was asked for.
    pub save_failed: Option<String>,
}

impl State {
    pub(crate) fn of(record: &StateRecord) -> Self {
        Self {
            phase: Some(record.phase),
            reason: record.reason.clone(),
            saved: record.saved.as_ref().map(ToString::to_string),
            save_failed: record.save_failed.clone(),
        }
    }

    pub(crate) fn gone(reason: &str) -> Self {
        Self {
            phase: None,
            reason: Some(reason.into()),
            saved: None,
            save_failed: None,
        }
    }

    /// Whether the machine has ended for good: only a start gives the sandbox another one. A paused
    /// sandbox continues.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, None | Some(Phase::Stopped | Phase::Crashed))
    }

    /// Whether the sandbox has a machine, or will soon have one.
    pub fn is_live(&self) -> bool {
        self.phase
            .is_some_and(|phase| phase == Phase::Creating || has_machine(phase))
    }
}

/// Reports every change of a sandbox's state, whichever process runs it.
#[derive(Debug)]
pub struct StateWatch {
    source: Source,
    last: State,
}

#[derive(Debug)]
enum Source {
    Driver(watch::Receiver<Status>),
    /// A task that reads from a keeper or from the store sends the states.
    Task(mpsc::Receiver<State>),
}

impl StateWatch {
    pub(crate) fn new(mut status: watch::Receiver<Status>) -> Self {
        let last = status.borrow_and_update().state.clone();
        Self {
            source: Source::Driver(status),
            last,
        }
    }

    pub(crate) fn fed(first: State, states: mpsc::Receiver<State>) -> Self {
        Self {
            source: Source::Task(states),
            last: first,
        }
    }

    /// The present state, and no other.
    pub(crate) fn only(state: State) -> Self {
        Self::fed(state, mpsc::channel(1).1)
    }

    /// The state that was reported last.
    pub fn now(&self) -> &State {
        &self.last
    }

    /// The next state after the one reported last; `None` when there will be no other. A state that
    /// lasts only for a moment may be left out.
    pub async fn changed(&mut self) -> Option<State> {
        loop {
            let next = match &mut self.source {
                Source::Driver(status) => {
                    status.changed().await.ok()?;
                    status.borrow_and_update().state.clone()
                }
                Source::Task(states) => states.recv().await?,
            };
            if next != self.last {
                self.last = next.clone();
                return Some(next);
            }
        }
    }

    /// Whether a driver of this process reports the states.
    pub(crate) fn is_of_driver(&self) -> bool {
        matches!(self.source, Source::Driver(_))
    }

    /// Sends every change until the last one. An error: the receiver is gone.
    pub(crate) async fn pass_on(&mut self, states: &mpsc::Sender<State>) -> Result<(), ()> {
        loop {
            let changed = tokio::select! {
                changed = self.changed() => changed,
                () = states.closed() => return Err(()),
            };
            let Some(state) = changed else {
                return Ok(());
            };
            states.send(state).await.map_err(drop)?;
        }
    }

    /// Skips the changes that happened while no call waited.
    fn catch_up(&mut self) {
        if let Source::Driver(status) = &mut self.source {
            self.last = status.borrow_and_update().state.clone();
        }
    }

    /// Waits until the sandbox has no machine.
    pub async fn rested(&mut self) -> State {
        self.catch_up();
        while self.last.is_live() {
            if self.changed().await.is_none() {
                return State::gone("the process that ran it ended");
            }
        }
        self.last.clone()
    }
}
