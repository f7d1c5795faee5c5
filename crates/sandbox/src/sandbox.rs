//! A handle of a sandbox: sends each verb to the process that runs the sandbox.
//!
//! ```text
//!                    ┌─ this process runs it ──► its driver
//!   Sandbox ── verb ─┼─ a keeper runs it ──────► the keeper's socket
//!                    └─ no process runs it ────► refused | this process takes it briefly
//!                                                        | started, here or in a keeper
//! ```
//!
//! Always: the handle looks for the sandbox's process again at each verb, so it outlives keepers. A
//! sandbox that this process runs ends when its last handle is dropped.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sandtree_engine::Picture;
use sandtree_store::{Phase, SandboxDir, SandboxRecord, StateRecord};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::mpsc;

use crate::blocking::in_place;
use crate::boxed::Boxed;
use crate::config::RunIn;
use crate::driver::{Local, Perform, WeakLocal};
use crate::error::{Code, Error, ErrorKind, Result, Unsaved};
use crate::guest::{
    Defaults, Exec, ExecId, ExecSpec, Files, Forward, Guest, has_entrypoint, main_command,
};
use crate::host::Host;
use crate::hub::ExecEntry;
use crate::info::SandboxInfo;
use crate::keeper::{self, Connection, Keeper, Sample, Stats, Task};
use crate::lend::Loan;
use crate::mounts::{InUse, MountInfo, MountSpec, SERVED_WITHIN, ServedMount};
use crate::order::{
    Anywhere, AtRest, Expire, Kill, OpenView, Pause, Remove, Resume, Start, Stop, TakeCheckpoint,
    TakePicture, Unmount, Wanted, as_ms,
};
use crate::spec::check_expiry;
use crate::states::{
    Checkpoint, Forget, Forgotten, Goal, Paused, Replace, RestoreReport, Reverted, StateInfo,
};
use crate::status::{State, StateWatch};
use crate::verb::Verb;

/// The interval between reads of the state of a sandbox that no process runs.
const REST_POLL: Duration = Duration::from_millis(200);

/// A handle of a sandbox. Clones share the sandbox. If this process runs the sandbox, the machine
/// ends when the last handle is dropped.
#[derive(Debug, Clone)]
pub struct Sandbox {
    host: Host,
    record: Arc<SandboxRecord>,
    /// The driver of this process, once it runs the sandbox.
    local: Arc<OnceLock<Local>>,
    /// The keeper that created it.
    keeper: Option<Keeper>,
    /// How it was restored when this handle created it.
    created: Option<Arc<RestoreReport>>,
}

/// Where a verb goes.
enum Route {
    Here(Local),
    Keeper(Connection),
    Nowhere(StateRecord),
}

impl Host {
    /// A sandbox by its name or id, whichever process runs it, if any does.
    pub fn sandbox(&self, reference: &str) -> Result<Sandbox> {
        let (dir, _) = in_place(|| self.inner.settled(reference))?;
        let driver = self.local(dir.id());
        let local = driver.map_or_else(OnceLock::new, OnceLock::from);
        Ok(Sandbox {
            host: self.clone(),
            record: Arc::new(dir.record().clone()),
            local: Arc::new(local),
            keeper: None,
            created: None,
        })
    }
}

impl Sandbox {
    /// A sandbox that this process drives.
    pub(crate) fn driven(host: &Host, record: SandboxRecord, driver: Local) -> Self {
        Self {
            host: host.clone(),
            record: Arc::new(record),
            local: Arc::new(OnceLock::from(driver)),
            keeper: None,
            created: None,
        }
    }

    /// A sandbox that a keeper has just created. `created` is how its guest was restored.
    pub(crate) fn kept(
        host: &Host,
        dir: &SandboxDir,
        keeper: Keeper,
        created: Option<RestoreReport>,
    ) -> Self {
        Self {
            host: host.clone(),
            record: Arc::new(dir.record().clone()),
            local: Arc::default(),
            keeper: Some(keeper),
            created: created.map(Arc::new),
        }
    }

    pub fn id(&self) -> &str {
        self.record.id.as_str()
    }

    pub fn name(&self) -> &str {
        self.record.name.as_str()
    }

    /// How its guest was restored, if a keeper created it through this handle or one that it was
    /// cloned from. `None`: it was found, it booted, or this process runs it.
    pub fn created(&self) -> Option<&RestoreReport> {
        self.created.as_deref()
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The information about the sandbox that needs no answer of its guest.
    pub fn info(&self) -> Result<SandboxInfo> {
        match self.here() {
            Some(local) if local.status().state.phase.is_some() => Ok(local.status().info),
            _ => self.host.find(self.id()),
        }
    }

    /// The environment of its commands.
    pub fn env(&self) -> Result<BTreeMap<String, String>> {
        let dir = in_place(|| self.host.inner.find(self.id()))?;
        Ok(dir.record().env.clone())
    }

    pub fn state(&self) -> State {
        if let Some(local) = self.here() {
            return local.status().state;
        }
        let settled = in_place(|| self.host.inner.settled(self.id()));
        settled.map_or_else(
            |_| State::gone("it was removed"),
            |(_, state)| State::of(&state),
        )
    }

    /// Reports every change of its state, from the present one on, until it is removed. Other
    /// processes may start and stop it meanwhile.
    pub fn watch(&self) -> Boxed<'_, Result<StateWatch>> {
        Box::pin(async move {
            let first = self.watch_process().await?;
            if first.is_of_driver() {
                return Ok(first);
            }
            let (states, watched) = mpsc::channel(1);
            let now = first.now().clone();
            tokio::spawn(self.clone().follow(first, states));
            Ok(StateWatch::fed(now, watched))
        })
    }

    /// The states that the sandbox's present process reports. Without a process: the present state
    /// alone.
    fn watch_process(&self) -> Boxed<'_, Result<StateWatch>> {
        Box::pin(async move {
            match self.route().await? {
                Route::Here(local) => Ok(local.watch()),
                Route::Keeper(connection) => connection.watch().await,
                Route::Nowhere(state) => Ok(StateWatch::only(State::of(&state))),
            }
        })
    }

    /// Forwards the reports of each process that runs the sandbox, one process after the other.
    async fn follow(self, mut watch: StateWatch, states: mpsc::Sender<State>) {
        while watch.pass_on(&states).await.is_ok() {
            tokio::select! {
                () = tokio::time::sleep(REST_POLL) => {}
                () = states.closed() => return,
            }
            // A keeper that just left is no reason to give up; a sandbox that is gone is.
            watch = match self.watch_process().await {
                Ok(next) => next,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    StateWatch::only(State::gone("it was removed"))
                }
                Err(_) => continue,
            };
            let now = watch.now().clone();
            let is_gone = now.phase.is_none();
            if states.send(now).await.is_err() || is_gone {
                return;
            }
        }
    }

    /// A connection to the guest.
    pub fn guest(&self) -> Boxed<'_, Result<Guest>> {
        Box::pin(async move {
            let defaults = in_place(|| Defaults::of(&self.host.inner, &self.record))?;
            let link = match self.route().await? {
                Route::Here(local) => local.status().link().await?,
                Route::Keeper(connection) => connection.link().await?,
                Route::Nowhere(state) => return Err(self.wrong_state(&state, Verb::Use)),
            };
            Ok(Guest::with_defaults(link, Arc::new(defaults)))
        })
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
        listener: impl Into<Arc<TcpListener>>,
        port: u16,
    ) -> Result<Forward> {
        self.guest().await?.forward(listener, port)
    }

    /// The detached commands of this guest.
    pub fn execs(&self) -> Boxed<'_, Result<Vec<ExecEntry>>> {
        Box::pin(async move {
            match self.route().await? {
                Route::Here(local) => Ok(local.status().hub()?.execs().await),
                Route::Keeper(connection) => connection.execs().await,
                Route::Nowhere(state) => Err(self.wrong_state(&state, Verb::Use)),
            }
        })
    }

    /// Its mounts. Those of a guest that runs have what their server reports as well, if it answers
    /// in time.
    pub fn mounts(&self) -> Boxed<'_, Result<Vec<MountInfo>>> {
        Box::pin(async move {
            let info = self.host.find(self.id())?;
            let mut mounts = info.mounts;
            if info.state != Phase::Running || mounts.is_empty() {
                return Ok(mounts);
            }
            let served = tokio::time::timeout(SERVED_WITHIN, self.served_mounts()).await;
            // The guest may have stopped meanwhile, and its keeper be stuck or of an older version.
            if let Ok(Ok(served)) = served {
                mounts.iter_mut().for_each(|mount| mount.add(&served));
            }
            Ok(mounts)
        })
    }

    async fn served_mounts(&self) -> Result<Vec<ServedMount>> {
        match self.route().await? {
            Route::Here(local) => Ok(local.status().hub()?.mounts().served().await),
            Route::Keeper(connection) => connection.mounts().await,
            Route::Nowhere(_) => Ok(Vec::new()),
        }
    }

    /// What its screen shows.
    pub(crate) fn picture(&self) -> Boxed<'_, Result<Picture>> {
        Box::pin(async move {
            match self.route().await? {
                Route::Here(local) => local.ask(TakePicture {}).await,
                Route::Keeper(connection) => connection.picture().await,
                Route::Nowhere(state) => Err(self.wrong_state(&state, Verb::Use)),
            }
        })
    }

    /// A viewer's connection to the machine that runs now.
    pub(crate) fn open_view(&self) -> Boxed<'_, Result<UnixStream>> {
        Box::pin(async move {
            match self.route().await? {
                Route::Here(local) => local.ask(OpenView {}).await,
                Route::Keeper(connection) => connection.view().await,
                Route::Nowhere(state) => Err(self.wrong_state(&state, Verb::Use)),
            }
        })
    }

    /// The record of what was asked for.
    pub(crate) fn record(&self) -> &SandboxRecord {
        &self.record
    }

    /// What the sandbox uses.
    pub fn stats(&self) -> Boxed<'_, Result<Stats>> {
        Box::pin(async move {
            match self.route().await? {
                Route::Here(local) => keeper::stats(&self.host, &local).await,
                Route::Keeper(connection) => connection.stats().await,
                Route::Nowhere(state) => Err(self.wrong_state(&state, Verb::Use)),
            }
        })
    }

    /// What the guest has used, oldest first, and what it uses now. Its keeper takes samples from
    /// the first call on: every 5 s for some minutes after a call, then one a minute. Without a
    /// keeper, only the sample of now.
    pub async fn samples(&self) -> Result<Vec<Sample>> {
        match self.route().await? {
            Route::Here(local) => keeper::sample(&local).await.map(|sample| vec![sample]),
            Route::Keeper(connection) => connection.samples().await,
            Route::Nowhere(state) => Err(self.wrong_state(&state, Verb::Use)),
        }
    }

    /// What `run` runs: the image's entry point, or another, with `args` instead of the image's
    /// own. Without either, a shell.
    pub fn main_command(
        &self,
        args: Vec<OsString>,
        entrypoint: Option<Vec<OsString>>,
    ) -> Result<Vec<OsString>> {
        in_place(|| main_command(&self.host.inner, &self.record, args, entrypoint))
    }

    /// Whether the image names a command to run.
    pub fn has_entrypoint(&self) -> Result<bool> {
        in_place(|| has_entrypoint(&self.host.inner, &self.record))
    }

    /// Shuts the guest down and syncs its disk. `grace` is what its processes get to end by
    /// themselves: without it 10 s, and 90 s where the image's own init ends them. Waits for a stop
    /// that is under way.
    pub async fn stop(&self, grace: Option<Duration>) -> Result<()> {
        let grace_ms = as_ms(grace);
        self.ask(Stop { grace_ms }).await
    }

    /// Ends the machine at once, as if its plug were pulled, and interrupts the verb that is being
    /// carried out.
    pub async fn kill(&self) -> Result<()> {
        self.ask(Kill {}).await
    }

    /// Boots again after a stop.
    pub async fn start(&self, boot_timeout: Option<Duration>) -> Result<()> {
        let boot_timeout_ms = as_ms(boot_timeout);
        self.ask(Start { boot_timeout_ms }).await
    }

    /// Ends the machine, if it runs, and removes everything of the sandbox.
    pub fn remove(&self) -> Boxed<'_, Result<()>> {
        Box::pin(async move {
            if let Route::Nowhere(_) = self.route().await? {
                let owned = self.host.inner.own(self.id(), Verb::Remove).await?;
                return self.host.inner.remove(owned).await;
            }
            self.ask(Remove {}).await
        })
    }

    /// Takes a state of memory, disk and processes; the guest continues. Without a tag, the next
    /// number serves as one. A tag that is taken is refused, unless it is to be replaced.
    pub async fn checkpoint(&self, tag: Option<&str>, replace: Replace) -> Result<Checkpoint> {
        let tag = tag.map(str::to_owned);
        self.ask(TakeCheckpoint { tag, replace }).await
    }

    /// Goes to a state, by tag or id. The present is kept, so that this can be undone.
    pub async fn revert(&self, state: &str) -> Result<Reverted> {
        self.go_to(Goal::State(state.into())).await
    }

    /// Goes back by this number of states.
    pub async fn undo(&self, steps: usize) -> Result<Reverted> {
        self.go_to(Goal::Undo { steps }).await
    }

    /// Returns to the state that the last undo left.
    pub async fn redo(&self) -> Result<Reverted> {
        self.go_to(Goal::Redo).await
    }

    pub async fn go_to(&self, goal: Goal) -> Result<Reverted> {
        self.ask(goal).await
    }

    /// Its readable states, oldest first, and the errors of the others.
    pub fn states(&self) -> Result<(Vec<StateInfo>, Vec<Error>)> {
        self.host.states(self.id())
    }

    /// Removes states. No other state is touched.
    pub async fn forget(&self, which: Forget) -> Result<Forgotten> {
        self.ask(which).await
    }

    /// Writes everything to disk and ends the machine. A keeper stays while clients wait for the
    /// sandbox to continue.
    pub async fn pause(&self) -> Result<Paused> {
        self.ask(Pause {}).await
    }

    /// Continues exactly where it was paused.
    pub async fn resume(&self) -> Result<RestoreReport> {
        self.ask(Resume {}).await
    }

    /// Sets when the running sandbox expires: so long from now, or never. What happens then is
    /// chosen at its creation; without a choice, it is removed.
    pub async fn expire(&self, after: Option<Duration>) -> Result<()> {
        let after_ms = as_ms(after);
        after_ms.map_or(Ok(()), check_expiry)?;
        self.ask(Expire { after_ms }).await
    }

    /// Mounts a directory of the host in the running guest.
    pub async fn mount(&self, spec: MountSpec) -> Result<()> {
        self.ask(spec).await
    }

    /// Unmounts the directory at a path of the guest.
    pub async fn unmount(&self, path: &str, in_use: InUse) -> Result<()> {
        let path = path.to_owned();
        self.ask(Unmount { path, in_use }).await
    }

    /// Borrows a state.
    pub(crate) fn borrow(&self, wanted: Wanted) -> Boxed<'_, Result<Loan>> {
        Box::pin(async move {
            let local = match self.route().await? {
                Route::Here(local) => local,
                Route::Keeper(connection) => {
                    let (lent, connection) = connection.lend(wanted).await?;
                    let held = in_place(|| self.host.inner.hold_state(self.id(), &lent.state))?;
                    return Ok(Loan::of_keeper(lent, connection, held));
                }
                Route::Nowhere(_) => self.host.adopt(self.id(), wanted.verb()).await?,
            };
            let lent = local.ask(wanted).await?;
            Ok(Loan::of_driver(lent, local))
        })
    }

    /// The error of a sandbox that is still there, although it was to be saved and removed.
    pub(crate) fn unsaved(&self, left: SandboxInfo) -> Option<Error> {
        let reason = match left.save_failed {
            Some(reason) => Unsaved::Failed { reason },
            None => Unsaved::Phase(left.state),
        };
        Some(Error::StillUnsaved {
            name: self.name().to_owned(),
            target: left.save_on_stop?,
            reason,
        })
    }

    /// For tests: greets the agent again, as after a break of the link.
    #[doc(hidden)]
    pub async fn break_link(&self) -> Result<()> {
        match self.here() {
            Some(local) => local.status().hub()?.resync().await,
            None => return Err(self.gone()),
        }
        Ok(())
    }

    pub(crate) async fn ask<A: Anywhere + Perform>(&self, ask: A) -> Result<A::Answer> {
        match self.route().await? {
            Route::Here(local) => local.ask(ask).await,
            Route::Keeper(connection) if A::AT_REST == AtRest::Starts => {
                self.ask_or_start(connection, ask).await
            }
            Route::Keeper(connection) => connection.ask(ask).await,
            Route::Nowhere(state) => match A::AT_REST {
                AtRest::Refused => Err(self.wrong_state(&state, ask.verb())),
                AtRest::Brief => {
                    let local = self.host.adopt(self.id(), ask.verb()).await?;
                    local.ask(ask).await
                }
                AtRest::Starts => self.ask_to_start(ask).await,
            },
        }
    }

    /// Asks a keeper for a verb that also starts a sandbox at rest. If the keeper is about to end
    /// because its sandbox rests now, the sandbox is started anew.
    async fn ask_or_start<A: Anywhere + Perform>(
        &self,
        connection: Connection,
        ask: A,
    ) -> Result<A::Answer> {
        let answered = connection.ask(ask.clone()).await;
        let is_left = match &answered {
            Err(Error::Keeper { .. }) => true,
            Err(error) => error.code() == Some(Code::SandboxBusy),
            Ok(_) => false,
        };
        let rests = || matches!(self.state().phase, Some(Phase::Paused | Phase::Stopped));
        if is_left && rests() {
            self.ask_to_start(ask).await
        } else {
            answered
        }
    }

    /// Starts a sandbox that no process runs, in this process or in a keeper.
    async fn ask_to_start<A: Anywhere + Perform>(&self, ask: A) -> Result<A::Answer> {
        let RunIn::Keeper(program) = &self.host.inner.config.run_in else {
            let local = self.host.adopt(self.id(), ask.verb()).await?;
            let answer = local.ask(ask).await?;
            // Another handle may have started it meanwhile; then it is the same driver.
            drop(self.local.set(local));
            return Ok(answer);
        };
        let task = Task::Order {
            reference: self.id().to_owned(),
            order: ask.into(),
        };
        let name = self.name().to_owned();
        let starting = self
            .host
            .clone()
            .start_keeper(program.clone(), task, None, name);
        let mut lease = starting.await?;
        let ready = lease.ready().await?;
        lease.release().await?;
        let answer = serde_json::from_value(ready.answer);
        answer.map_err(|e| Error::Keeper {
            name: self.name().to_owned(),
            source: e.into(),
        })
    }

    /// To wait for the end of a sandbox of this process after the last handle is dropped.
    pub(crate) fn weak(&self) -> Option<WeakLocal> {
        self.here().map(|local| local.downgrade())
    }

    fn here(&self) -> Option<Local> {
        if let Some(local) = self.local.get() {
            return Some(local.clone());
        }
        self.host.local(&self.record.id)
    }

    fn route(&self) -> Boxed<'_, Result<Route>> {
        Box::pin(async move {
            if let Some(local) = self.here() {
                return if local.is_driven() {
                    Ok(Route::Here(local))
                } else {
                    Err(self.gone())
                };
            }
            if let Some(keeper) = &self.keeper
                && let Ok(connection) = keeper.try_connect().await
            {
                return Ok(Route::Keeper(connection));
            }
            let (dir, state) = in_place(|| self.host.inner.settled(self.id()))?;
            let keeper = Keeper::of(&dir);
            if state.phase == Phase::Running {
                return keeper.connect().await.map(Route::Keeper);
            }
            // A paused sandbox may have a keeper, and so has one that is about to stop.
            Ok(match keeper.try_connect().await {
                Ok(connection) if state.phase != Phase::Creating => Route::Keeper(connection),
                _ => Route::Nowhere(state),
            })
        })
    }

    fn gone(&self) -> Error {
        Error::NoSandbox {
            name: self.name().to_owned(),
        }
    }

    fn wrong_state(&self, state: &StateRecord, verb: Verb) -> Error {
        Error::WrongState {
            name: self.name().to_owned(),
            phase: state.phase,
            reason: state.further_reason(),
            verb,
        }
    }
}
