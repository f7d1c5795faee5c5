//! A sandbox, as the process that runs it holds it.

use std::sync::Arc;
use std::time::Duration;

use sandtree_store::{Owned, Phase, SandboxRecord, StateRecord};
use tokio::sync::{mpsc, oneshot, watch};

use crate::driver::{Command, Done, Order, Verb};
use crate::error::{Error, Result};
use crate::guest::{Defaults, Exec, ExecId, ExecSpec, Files, Forward, Guest};
use crate::host::Inner;
use crate::hub::{ExecEntry, Hub};
use crate::lend::{LentState, Wanted};
use crate::states::{Checkpoint, Forget, Forgotten, Goal, Paused, RestoreReport, Reverted};

/// Where a sandbox stands. Everything a driver tells to the outside.
#[derive(Debug, Clone)]
pub(crate) struct Status {
    pub state: State,
    pub stalled: bool,
    pub hub: Option<Hub>,
}

impl Status {
    pub fn new(state: &StateRecord, hub: Option<&Hub>) -> Self {
        let StateRecord {
            phase,
            reason,
            saved,
            save_failed,
            ..
        } = state.clone();
        let saved = saved.map(|digest| digest.to_string());
        let state = State {
            phase: Some(phase),
            reason,
            saved,
            save_failed,
        };
        Self {
            state,
            stalled: false,
            hub: hub.cloned(),
        }
    }

    pub fn removed(&mut self) {
        *self = Self {
            state: State::gone("it was removed"),
            stalled: false,
            hub: None,
        };
    }
}

/// Whether a tag that is taken may be given to the new state; the old one goes when the new one is
/// there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    Yes,
    No,
}

impl Replace {
    pub fn is_yes(self) -> bool {
        self == Self::Yes
    }
}

impl From<bool> for Replace {
    fn from(yes: bool) -> Self {
        if yes { Self::Yes } else { Self::No }
    }
}

/// A sandbox's state, and why it is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// `None` once the sandbox is removed.
    pub phase: Option<Phase>,
    pub reason: Option<String>,
    /// The snapshot it was saved as when it last stopped, if it was to be.
    pub saved: Option<String>,
    /// Why it was not saved when it stopped, though it was to be.
    pub save_failed: Option<String>,
}

impl State {
    fn gone(reason: &str) -> Self {
        Self {
            phase: None,
            reason: Some(reason.into()),
            saved: None,
            save_failed: None,
        }
    }

    /// Whether there is a machine, or soon will be one.
    pub fn is_live(&self) -> bool {
        matches!(
            self.phase,
            Some(Phase::Creating | Phase::Starting | Phase::Running | Phase::Stopping)
        )
    }
}

/// Tells of every change of a sandbox's state.
#[derive(Debug, Clone)]
pub struct StateWatch {
    status: watch::Receiver<Status>,
}

impl StateWatch {
    pub fn now(&self) -> State {
        self.status.borrow().state.clone()
    }

    /// The next state after the one last seen; `None` when there will be no other.
    pub async fn changed(&mut self) -> Option<State> {
        self.status.changed().await.ok()?;
        Some(self.status.borrow_and_update().state.clone())
    }

    /// Whether there is still somebody who drives the sandbox.
    pub(crate) fn is_open(&self) -> bool {
        self.status.has_changed().is_ok()
    }

    /// Waits until there is no machine any more.
    pub async fn rested(&mut self) -> State {
        match self.status.wait_for(|status| !status.state.is_live()).await {
            Ok(status) => status.state.clone(),
            Err(_) => State::gone("its driver ended"),
        }
    }
}

/// A sandbox that this process runs. Clones share it; when the last is dropped, its machine ends.
#[derive(Debug, Clone)]
pub struct Sandbox {
    commands: mpsc::Sender<Command>,
    status: watch::Receiver<Status>,
    host: Arc<Inner>,
    record: Arc<SandboxRecord>,
}

impl Sandbox {
    pub(crate) fn new(
        host: Arc<Inner>,
        owned: &Owned,
        commands: mpsc::Sender<Command>,
        status: watch::Receiver<Status>,
    ) -> Self {
        Self {
            commands,
            status,
            host,
            record: Arc::new(owned.record().clone()),
        }
    }

    pub fn id(&self) -> &str {
        self.record.id.as_str()
    }

    pub fn name(&self) -> &str {
        self.record.name.as_str()
    }

    pub fn state(&self) -> State {
        self.status.borrow().state.clone()
    }

    pub fn watch(&self) -> StateWatch {
        StateWatch {
            status: self.status.clone(),
        }
    }

    /// A connection to the guest.
    pub async fn guest(&self) -> Result<Guest> {
        let hub = self.hub()?;
        let defaults = Arc::new(Defaults::of(&self.host, &self.record)?);
        let link = hub.connect().await;
        let link = link.map_err(|source| Error::Guest {
            operation: "reach the guest".into(),
            source,
        })?;
        Ok(Guest::with_defaults(link, defaults))
    }

    /// Starts a command in the guest.
    pub async fn exec(&self, spec: ExecSpec) -> Result<Exec> {
        self.guest().await?.exec(spec).await
    }

    /// Joins a detached command, from the first byte of its output.
    pub async fn attach(&self, id: ExecId) -> Result<Exec> {
        self.guest().await?.attach(id).await
    }

    pub async fn files(&self) -> Result<Files> {
        Ok(self.guest().await?.files())
    }

    /// Carries connections to `listener` into the guest.
    pub async fn forward(
        &self,
        listener: impl Into<Arc<tokio::net::TcpListener>>,
        port: u16,
    ) -> Result<Forward> {
        self.guest().await?.forward(listener, port)
    }

    /// The detached commands of this guest.
    pub async fn execs(&self) -> Result<Vec<ExecEntry>> {
        Ok(self.hub()?.execs().await)
    }

    /// Shuts the guest down and syncs its disk. `grace` is what its processes get to end by
    /// themselves: 10 s if nothing is said, 90 s where the image's own init ends them.
    pub async fn stop(&self, grace: Option<Duration>) -> Result<()> {
        self.command(Order::Stop { grace }).await.map(drop)
    }

    /// Ends the machine at once, as if its plug were pulled.
    pub async fn kill(&self) -> Result<()> {
        self.command(Order::Kill).await.map(drop)
    }

    /// Boots again after a stop.
    pub async fn start(&self, boot_timeout: Option<Duration>) -> Result<()> {
        self.command(Order::Start { boot_timeout }).await.map(drop)
    }

    /// Ends the machine, if it runs, and removes everything of the sandbox.
    pub async fn remove(&self) -> Result<()> {
        self.command(Order::Remove).await.map(drop)
    }

    /// Takes a state of memory, disk and processes; the guest goes on. Without a tag, the next
    /// number serves as one. A tag that is taken is refused, unless it is to be replaced.
    pub async fn checkpoint(&self, tag: Option<&str>, replace: Replace) -> Result<Checkpoint> {
        let order = Order::Checkpoint {
            tag: tag.map(str::to_owned),
            replace: replace.is_yes(),
        };
        match self.command(order).await? {
            Done::Checkpoint(checkpoint) => Ok(checkpoint),
            other => unreachable!("{other:?} is no checkpoint"),
        }
    }

    /// Goes to a state, by tag or id. What is left is kept, so that it can be undone.
    pub async fn revert(&self, state: &str) -> Result<Reverted> {
        self.go_to(Goal::State(state.into())).await
    }

    /// Goes back so many states.
    pub async fn undo(&self, steps: usize) -> Result<Reverted> {
        self.go_to(Goal::Undo { steps }).await
    }

    /// Returns to what the last undo left.
    pub async fn redo(&self) -> Result<Reverted> {
        self.go_to(Goal::Redo).await
    }

    pub async fn go_to(&self, goal: Goal) -> Result<Reverted> {
        match self.command(Order::GoTo(goal)).await? {
            Done::Reverted(reverted) => Ok(reverted),
            other => unreachable!("{other:?} is no revert"),
        }
    }

    /// Removes states. No other state is touched.
    pub async fn forget(&self, which: Forget) -> Result<Forgotten> {
        match self.command(Order::Forget(which)).await? {
            Done::Forgotten(forgotten) => Ok(forgotten),
            other => unreachable!("{other:?} is no removal"),
        }
    }

    /// Writes everything to disk and ends the machine.
    pub async fn pause(&self) -> Result<Paused> {
        match self.command(Order::Pause).await? {
            Done::Paused(paused) => Ok(paused),
            other => unreachable!("{other:?} is no pause"),
        }
    }

    /// Goes on exactly where it was paused.
    pub async fn resume(&self) -> Result<RestoreReport> {
        match self.command(Order::Resume).await? {
            Done::Resumed(resumed) => Ok(resumed),
            other => unreachable!("{other:?} is no resume"),
        }
    }

    pub(crate) async fn lend(&self, wanted: Wanted) -> Result<LentState> {
        match self.command(Order::Lend(wanted)).await? {
            Done::Lent(lent) => Ok(lent),
            other => unreachable!("{other:?} is no state"),
        }
    }

    pub(crate) async fn take_back(&self, state: &str) -> Result<()> {
        self.command(Order::TakeBack {
            state: state.into(),
        })
        .await
        .map(drop)
    }

    /// For tests: greets the agent anew, as after a break of the link.
    #[doc(hidden)]
    pub async fn break_link(&self) -> Result<()> {
        self.hub()?.resync().await;
        Ok(())
    }

    /// The hub of a paused sandbox, while clients wait at it.
    pub(crate) fn paused_hub(&self) -> Option<Hub> {
        let status = self.status.borrow();
        status
            .hub
            .clone()
            .filter(|_| status.state.phase == Some(Phase::Paused))
    }

    pub(crate) fn hub(&self) -> Result<Hub> {
        let status = self.status.borrow();
        match (&status.hub, status.state.phase) {
            _ if status.stalled => Err(Error::Stalled),
            (Some(hub), Some(Phase::Running)) => Ok(hub.clone()),
            (_, Some(phase)) => {
                let (name, reason) = (self.name().to_owned(), status.state.reason.clone());
                Err(Error::WrongState {
                    name,
                    phase,
                    reason,
                    verb: Verb::Use,
                })
            }
            (_, None) => Err(Error::NoSandbox {
                name: self.name().to_owned(),
            }),
        }
    }

    async fn command(&self, order: Order) -> Result<Done> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::NoSandbox {
            name: self.name().to_owned(),
        };
        self.commands
            .send(Command { order, reply })
            .await
            .map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}
