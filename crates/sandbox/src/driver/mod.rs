//! The driver: the one task that changes a sandbox.
//!
//! ```text
//!              create ok                      stop | kill
//!   Creating ------------> Running ------> Stopping ------> Stopped
//!      |                   ^  |  \                           |   |
//!      | fails:            |  |   \ guest powered off -----> |   |
//!      | undone            |  |                                  |
//!      v                   |  ` panic, QEMU gone --> Crashed     |
//!   (nothing)              |                            |        |
//!                          ` Starting <---- start ------+--------´
//!
//!   Running --pause--> Paused --resume--> Running       revert, undo, redo: from where nothing is under way, to Running
//!   remove: from where nothing is under way, to nothing
//! ```
//!
//! Which verb is legal in which phase is one table, in [`verb`](crate::verb).
//!
//! A driver may block on the disk: the runtime moves its other tasks to another thread meanwhile.
//!
//! `kill` and `remove` interrupt the verb that is being carried out: the machine ends at once, the
//! verb gets a moment to notice that, and answers with an error.
//!
//! Always: the driver writes a state to the disk before it reports the state. However the machine
//! ends, every waiting call in the guest returns the reason, and the overlay is synced before the
//! sandbox counts as stopped. A full host disk stops the guest, not the sandbox: the guest
//! continues when there is space. When it fails: if a state cannot be written, the caller of the
//! verb gets an error; the driver does not keep the machine running for that.

mod arrival;
mod carry;
mod expiry;
mod fold;
mod local;
mod perform;
mod save;
mod seals;
mod spare;
mod states;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandtree_engine::qmp::{Cont, QueryStatus};
use sandtree_engine::{Event, Events, Exit, Machine};
use sandtree_store::{
    Ended, Head, Init, Owned, Phase, SandboxDir, SandboxRecord, StateId, StateRecord,
};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use self::fold::Folding;
pub(crate) use self::local::{Drivers, Local, Perform, WeakLocal};
use self::local::{Job, Queue};
pub(crate) use self::perform::Commit;
use self::seals::{Seals, Unsealed};
use self::spare::{Occasion, SpareSlot};
use crate::blocking::may_block;
use crate::error::{Error, Result, engine_error, store_error};
use crate::files::remove_if_there;
use crate::hub::{Activity, Gate, Hub};
use crate::inner::Inner;
use crate::machine::ending::Ending;
use crate::machine::ground::Folded;
use crate::machine::running::Running;
use crate::moment::now_unix_ms;
use crate::publish;
use crate::start::{self, running_state};
use crate::status::Status;
use crate::verb::{Verb, permits};

/// How long a guest may take to end its processes, if the caller of `stop` gives no time.
const AGENT_GRACE: Duration = Duration::from_secs(10);
/// The same for an init that ends services in their order: systemd gives each service this time.
const IMAGE_INIT_GRACE: Duration = Duration::from_secs(90);
/// How long QEMU may take to end by itself after the command to quit.
const QUIT_DEADLINE: Duration = Duration::from_secs(10);
/// How long QEMU may take to end after it is killed.
const KILL_DEADLINE: Duration = Duration::from_secs(30);
/// A guest that shuts down ends its agent first. A guest that still runs this long after the end of
/// its agent has lost the agent.
const AGENT_MISSED: Duration = Duration::from_secs(5);
/// How often the driver looks for free space while its guest is stalled.
const STALL_CHECK: Duration = Duration::from_secs(1);
/// Free space at which a stalled guest continues.
const STALL_RESERVE: u64 = 32 << 20;

/// Whether a new sandbox exists for others yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existence {
    /// The sandbox is `creating` on disk until it is committed. Without a commit it is removed.
    Pending,
    Committed,
}

/// What a driver begins with.
pub(crate) struct Driven {
    pub owned: Owned,
    pub running: Option<Running>,
    pub state: StateRecord,
    pub existence: Existence,
}

/// Begins to drive a sandbox.
pub(crate) fn start(host: Arc<Inner>, driven: Driven) -> Local {
    let Driven {
        owned,
        running,
        state,
        existence,
    } = driven;
    let hub = running.as_ref().map(|running| &running.hub);
    let (status_tx, status) = watch::channel(Status::new(&owned, &state, hub));
    let (local, queue) = Local::new(status);
    let driver = Driver {
        host,
        owned: Some(owned),
        running,
        kept: None,
        state,
        existence,
        status: status_tx,
        stalled: false,
        agent_gone: None,
        seen: None,
        sealing: Seals::default(),
        spare: SpareSlot::default(),
        wished: None,
        folding: None,
        interrupted: Interruption::default(),
        rested: None,
        loans: BTreeMap::new(),
        removed_on_return: BTreeSet::new(),
        head_before: None,
        is_leaving: false,
    };
    tokio::spawn(may_block(driver.run(queue)));
    local
}

pub(crate) struct Driver {
    host: Arc<Inner>,
    /// `None` once the sandbox is removed.
    owned: Option<Owned>,
    running: Option<Running>,
    /// The hub of a paused sandbox with waiting clients, and the directory of its commands' output.
    kept: Option<(Hub, std::path::PathBuf)>,
    state: StateRecord,
    existence: Existence,
    status: watch::Sender<Status>,
    stalled: bool,
    /// When the agent closed its port, if it did.
    agent_gone: Option<Instant>,
    /// What had been done in the guest when the last state was taken.
    seen: Option<Activity>,
    /// States that are being made durable.
    sealing: Seals,
    /// A QEMU for the next revert.
    spare: SpareSlot,
    /// Why a spare is wanted; the driver begins to prepare one when the verb has answered.
    wished: Option<Occasion>,
    folding: Option<Folding>,
    /// What interrupts the job that is being carried out.
    interrupted: Interruption,
    /// When the last machine ended.
    rested: Option<Instant>,
    /// The states that are lent, and how many times.
    loans: BTreeMap<String, usize>,
    /// States that are removed when their borrowers return them.
    removed_on_return: BTreeSet<StateId>,
    /// The head before a step to another state, while the step is not finished.
    head_before: Option<Head>,
    /// Whether the socket of this keeper is gone because its sandbox rests. No client would
    /// find a machine that it starts.
    is_leaving: bool,
}

/// The verb that interrupts the running verb. It is shared, because the running verb borrows the
/// driver.
#[derive(Debug, Clone, Default)]
struct Interruption(Arc<Mutex<Option<Verb>>>);

impl Interruption {
    fn set(&self, by: Option<Verb>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = by;
    }

    fn get(&self) -> Option<Verb> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The timer of the checks for free space. The time counts from the last check, not from the last
/// turn of the driver's loop: a busy driver checks as often as an idle one.
struct StallCheck(Interval);

impl StallCheck {
    fn every(period: Duration) -> Self {
        let mut interval = tokio::time::interval(period);
        // Checks that were missed while the guest was not stalled are not made up for.
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self(interval)
    }

    async fn due(&mut self) {
        self.0.tick().await;
    }
}

enum Happening {
    Job(Option<Job>),
    Ended(Exit),
    Event(Event),
    StallCheck,
    AgentMissed,
    Gate(Gate),
    Folded(Result<Folded>),
    Sealed(Result<(), Unsealed>),
    Expired,
}

impl Driver {
    async fn run(mut self, mut queue: Queue) {
        self.forget_hidden();
        self.collect();
        self.seal_unsealed();
        self.take_reserve();
        self.wish_for_spare(Occasion::Started);
        let mut events = self.take_events();
        let mut gate = self.take_gate();
        let mut stall_check = StallCheck::every(STALL_CHECK);
        while self.owned.is_some() {
            // The last events of a machine that is gone are not about the next machine.
            events = events.filter(|_| self.running.is_some());
            let happening = tokio::select! {
                Some(job) = queue.urgent.recv() => Happening::Job(Some(job)),
                job = queue.jobs.recv() => Happening::Job(job),
                exit = exited(self.running.as_ref()) => Happening::Ended(exit),
                Some(event) = next_event(events.as_mut()) => Happening::Event(event),
                () = stall_check.due(), if self.stalled => Happening::StallCheck,
                () = missed(self.agent_gone) => Happening::AgentMissed,
                Some(asker) = next_asker(gate.as_mut()) => Happening::Gate(asker),
                folded = fold_done(self.folding.as_mut()) => Happening::Folded(folded),
                Some(sealed) = self.sealing.ended() => Happening::Sealed(sealed),
                () = expiry::reached(self.state.expires_at_unix_ms), if self.running.is_some() =>
                    Happening::Expired,
            };
            match happening {
                Happening::Job(Some(job)) => {
                    self.carry_out(job, &mut queue.urgent).await;
                    self.after_answer().await;
                    // A machine that was started has its own events and gate. A machine that
                    // continues keeps the earlier ones.
                    events = self.take_events().or(events);
                    gate = self.take_gate().or(gate);
                }
                // Every handle is gone.
                Happening::Job(None) => return self.let_go().await,
                Happening::Ended(exit) => self.ended(&exit).await,
                Happening::Event(event) => self.event(&event).await,
                Happening::StallCheck => self.look_for_space().await,
                Happening::AgentMissed => self.agent_missed().await,
                Happening::Gate(gate) => {
                    self.carry_out(Job::gate(gate), &mut queue.urgent).await;
                    self.after_answer().await;
                }
                Happening::Folded(folded) => {
                    self.folded(folded).await;
                }
                Happening::Sealed(sealed) => sealed.unwrap_or_else(Unsealed::report),
                Happening::Expired => self.carry_out(Job::expiry(), &mut queue.urgent).await,
            }
        }
    }

    /// Does what a verb leaves for the time after its answer.
    async fn after_answer(&mut self) {
        let Some(occasion) = self.wished.take() else {
            return;
        };
        let Some(running) = &self.running else { return };
        if let Err(error) = running.machine.close_unneeded().await {
            tracing::warn!(%error, "a machine keeps images open that it does not use");
        }
        self.wish_for_spare(occasion);
    }

    fn take_events(&mut self) -> Option<Events> {
        self.running
            .as_mut()
            .and_then(|running| running.events.take())
    }

    fn take_gate(&mut self) -> Option<mpsc::Receiver<Gate>> {
        self.running
            .as_mut()
            .and_then(|running| running.gate.take())
    }

    fn owned(&self) -> &Owned {
        self.owned.as_ref().expect("the driver runs while it owns")
    }

    fn dir(&self) -> &SandboxDir {
        self.owned()
    }

    fn record_of(&self) -> &SandboxRecord {
        self.owned().record()
    }

    fn permitted(&self, verb: Verb) -> Result<()> {
        let starts = matches!(verb, Verb::Start | Verb::Resume | Verb::Revert);
        if starts && self.is_leaving && self.running.is_none() {
            return Err(Error::Busy { name: self.name() });
        }
        if permits(self.state.phase, verb) {
            return Ok(());
        }
        Err(Error::WrongState {
            name: self.name(),
            phase: self.state.phase,
            reason: self.state.further_reason(),
            verb,
        })
    }

    fn name(&self) -> String {
        self.owned
            .as_ref()
            .map(|owned| owned.record().name.to_string())
            .unwrap_or_default()
    }

    /// Asks the guest to shut down, then QEMU to quit, then kills it.
    async fn stop(&mut self, grace: Option<Duration>) -> Result<()> {
        let grace = grace.unwrap_or_else(|| self.own_grace());
        if let Err(error) = self.enter(Phase::Stopping, None) {
            tracing::warn!(%error, "that a sandbox is stopping cannot be recorded");
        }
        let Some(running) = &self.running else {
            return Ok(());
        };
        let orderly = if self.stalled {
            false
        } else {
            shut_down(running, grace).await
        };
        if !orderly
            && running.machine.quit(QUIT_DEADLINE).await.is_err()
            && let Err(error) = killed(&running.machine).await
        {
            // Until QEMU is gone it may write, so the sandbox does not count as stopped yet.
            self.enter(Phase::Running, None)?;
            return Err(error);
        }
        self.rest(Ending::stopped(Ended::Stopped, "stopped")).await
    }

    fn own_grace(&self) -> Duration {
        let record = self
            .owned
            .as_ref()
            .expect("the driver runs while it owns")
            .record();
        match self.host.store.image_by_digest(&record.image_digest) {
            Ok(image) if image.record.init == Init::Agent => AGENT_GRACE,
            // For an image that cannot be read, too: a guest that is done sooner ends sooner.
            _ => IMAGE_INIT_GRACE,
        }
    }

    async fn kill(&mut self, reason: &str) -> Result<()> {
        if let Some(running) = &self.running {
            killed(&running.machine).await?;
        }
        self.rest(Ending::stopped(Ended::Killed, reason)).await
    }

    async fn start_again(&mut self, boot_timeout: Option<Duration>) -> Result<()> {
        let before = self.state.clone();
        publish::settle_target(&self.host, self.owned(), before.saved.as_ref())?;
        let owned = self.owned.as_mut().expect("the driver runs while it owns");
        match start::reboot(&self.host, owned, boot_timeout).await {
            Ok(running) => {
                let state = running_state(&running, self.record_of(), Some(&before));
                self.running = Some(running);
                self.wish_for_spare(Occasion::Started);
                self.collect();
                self.record(state)
            }
            Err(error) => {
                self.record(start::unsynced(&before))?;
                Err(error)
            }
        }
    }

    async fn remove(&mut self) -> Result<()> {
        if let Some(running) = &self.running {
            killed(&running.machine).await?;
        }
        if let Some(running) = self.running.take() {
            running.hub.close("it was removed".into()).await;
        }
        if let Some((hub, _)) = self.kept.take() {
            hub.close("it was removed".into()).await;
        }
        self.end_background().await;
        let owned = self.owned.take().expect("the driver runs while it owns");
        let removed = self.host.remove(owned).await;
        match &removed {
            Ok(()) => self.status.send_modify(|status| status.removed()),
            Err(error) => {
                let reason = format!("its removal failed: {}", error.one_line());
                self.status.send_modify(|status| status.crashed(reason));
            }
        }
        removed
    }

    /// The machine ended without being asked.
    async fn ended(&mut self, exit: &Exit) {
        let Some(running) = &mut self.running else {
            return;
        };
        running.console.drain().await;
        let ending = Ending::of(&running.machine, exit, &running.console);
        if let Err(error) = self.rest(ending).await {
            tracing::error!(%error, "the end of a machine cannot be recorded");
        }
    }

    async fn let_go(mut self) {
        if self.is_temporary() {
            if let Err(error) = self.remove().await {
                tracing::error!(%error, "a temporary sandbox cannot be removed");
            }
            return;
        }
        if self.running.is_some()
            && let Err(error) = self.kill("its owner let go of it").await
        {
            tracing::error!(%error, "the machine of a sandbox without an owner cannot be stopped");
        }
        self.end_background().await;
        if let Some((hub, _)) = self.kept.take() {
            hub.close("the sandbox is paused, and its keeper ends".into())
                .await;
        }
        let socket = self.owned.as_ref().map(|owned| owned.keeper_socket());
        if let Some(Err(error)) = socket.map(|socket| remove_if_there(&socket)) {
            tracing::warn!(%error, "a socket without a listener cannot be removed");
        }
    }

    /// Whether the sandbox is removed when its driver ends. A sandbox with `save_on_stop` stays: if
    /// its save failed, nothing else holds its data. A paused sandbox stays, too: it has not ended.
    fn is_temporary(&self) -> bool {
        if self.existence == Existence::Pending {
            return true;
        }
        let record = self.record_of();
        record.auto_remove && record.save_on_stop.is_none() && self.state.phase != Phase::Paused
    }

    /// Cleans up after a machine that is gone: makes its disk durable, records the end, saves the
    /// sandbox if its record asks for that, and reports the new state.
    async fn rest(&mut self, ending: Ending) -> Result<()> {
        self.stalled = false;
        self.agent_gone = None;
        self.rested = Some(Instant::now());
        let running = self.running.take();
        self.end_background().await;
        let synced = self.sync_disk().await;
        let state = StateRecord {
            reason: Some(ending.reason.clone()),
            ended: Some(ending.ended),
            clean: synced.is_ok(),
            ..self.state.followed_by(ending.phase, now_unix_ms())
        };
        // Until the sandbox is saved, it is stopping: a client that finds it stopped can rely on
        // the save.
        let saves = self.saves_on_stop();
        let phase = if saves { Phase::Stopping } else { state.phase };
        let written = self.write(StateRecord {
            phase,
            ..state.clone()
        });
        // Before the state is reported: a keeper ends when it sees the report, and the clients that
        // wait in the guest would get no answer.
        if let Some(running) = running {
            running.hub.close(ending.reason).await;
        }
        let saved = self.save_stopped(state).await;
        self.report();
        saved.and(synced).and(written)
    }

    fn saves_on_stop(&self) -> bool {
        self.existence == Existence::Committed && self.record_of().save_on_stop.is_some()
    }

    async fn sync_disk(&mut self) -> Result<()> {
        tokio::task::block_in_place(|| self.owned().sync_disks())
            .map_err(store_error("sync a sandbox's disk"))
    }

    /// Waits until all states are durable, and gives up the fold and the spare: the machine is
    /// gone.
    async fn end_background(&mut self) {
        self.spare.end().await;
        self.sealing.all_ended().await;
        if let Some(folding) = self.folding.take() {
            folding.give_up().await;
        }
    }

    fn enter(&mut self, phase: Phase, reason: Option<String>) -> Result<()> {
        self.record(StateRecord {
            phase,
            reason,
            since_unix_ms: now_unix_ms(),
            ..self.state.clone()
        })
    }

    fn record(&mut self, state: StateRecord) -> Result<()> {
        let written = self.write(state);
        self.report();
        written
    }

    fn write(&mut self, state: StateRecord) -> Result<()> {
        self.state = state;
        let owned = self.owned.as_mut().expect("the driver runs while it owns");
        let written = match self.existence {
            Existence::Pending => Ok(()),
            Existence::Committed => owned
                .set_state(&self.state)
                .map_err(store_error("write a sandbox's state")),
        };
        let is_served = self.host.serves_at_rest.load(Ordering::Relaxed);
        let unneeded = self.running.is_none() && self.kept.is_none() && !is_served;
        let unbound = if unneeded {
            let socket = owned.keeper_socket();
            self.is_leaving |= socket.exists();
            remove_if_there(&socket)
        } else {
            Ok(())
        };
        written.and(unbound)
    }

    fn report(&self) {
        let running = self.running.as_ref().map(|running| &running.hub);
        let hub = running.or(self.kept.as_ref().map(|(hub, _)| hub));
        self.status
            .send_replace(Status::new(self.owned(), &self.state, hub));
    }

    async fn event(&mut self, event: &Event) {
        match event {
            Event::BlockIoError { no_space: true, .. } => {
                tracing::warn!("the host's disk is full; the guest waits");
                self.stall(true);
            }
            // The lost event may have been that one.
            Event::Lost { .. } => self.look_for_stall().await,
            Event::Port { open } => self.agent_gone = (!open).then(Instant::now),
            _ => {}
        }
    }

    /// Asks QEMU whether it has stopped the guest because the disk is full: QEMU reports that in
    /// one event only, which may be lost.
    async fn look_for_stall(&mut self) {
        let Some(running) = &self.running else { return };
        let status = running.machine.qmp().run(QueryStatus {}).await;
        if status.is_ok_and(|status| status.status == "io-error") {
            self.stall(true);
        }
    }

    /// The guest continues without its agent: nothing in the guest can be reached, so the hub ends
    /// every open channel with the reason.
    async fn agent_missed(&mut self) {
        self.agent_gone = None;
        if let Some(running) = &self.running {
            running
                .hub
                .give_up("the agent in the guest ended".into())
                .await;
        }
    }

    fn stall(&mut self, stalled: bool) {
        self.stalled = stalled;
        self.status.send_modify(|status| status.stalled = stalled);
    }

    async fn look_for_space(&mut self) {
        let free = self.host.store.disk_free_bytes().unwrap_or(0);
        let Some(running) = &self.running else { return };
        if free < STALL_RESERVE {
            return;
        }
        let continues = match running.machine.qmp().run(QueryStatus {}).await {
            Ok(status) if status.running => true,
            Ok(_) => running.machine.qmp().run(Cont {}).await.is_ok(),
            Err(_) => false,
        };
        if continues {
            self.stall(false);
        }
    }
}

/// Kills a machine, and fails if it does not end: nothing else may use its files before that.
async fn killed(machine: &Machine) -> Result<()> {
    machine
        .kill_within(KILL_DEADLINE)
        .await
        .map(drop)
        .map_err(engine_error("end"))
}

/// Kills a machine that is not used any more, and logs a warning if it does not end.
async fn kill_or_warn(machine: &Machine) {
    if let Err(error) = machine.kill_within(KILL_DEADLINE).await {
        tracing::warn!(%error, "a machine that is not used any more does not end");
    }
}

async fn missed(agent_gone: Option<Instant>) {
    match agent_gone {
        Some(gone) => tokio::time::sleep_until(gone + AGENT_MISSED).await,
        None => std::future::pending().await,
    }
}

async fn exited(running: Option<&Running>) -> Exit {
    match running {
        Some(running) => running.machine.exited().await,
        None => std::future::pending().await,
    }
}

async fn next_asker(gate: Option<&mut mpsc::Receiver<Gate>>) -> Option<Gate> {
    match gate {
        Some(gate) => gate.recv().await,
        None => std::future::pending().await,
    }
}

async fn fold_done(folding: Option<&mut Folding>) -> Result<Folded> {
    match folding {
        Some(folding) => folding.done().await,
        None => std::future::pending().await,
    }
}

async fn next_event(events: Option<&mut Events>) -> Option<Event> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

/// Asks the guest to shut down. Returns whether the machine ended without force: the guest powered
/// off in time, or the machine was gone already.
async fn shut_down(running: &Running, grace: Duration) -> bool {
    let asked = tokio::select! {
        asked = running.guest.shutdown(grace) => asked,
        // The machine is gone, and no guest is left to answer.
        _ = running.machine.exited() => return true,
    };
    if let Err(error) = asked {
        tracing::warn!(%error, "the guest cannot be asked to shut down");
        return false;
    }
    let patience = grace + Duration::from_secs(15);
    tokio::time::timeout(patience, running.machine.exited())
        .await
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver whose every turn is shorter than the time between two looks.
    #[tokio::test(start_paused = true)]
    async fn a_busy_driver_looks_for_space_as_often_as_an_idle_one() {
        let began = Instant::now();
        let mut check = StallCheck::every(STALL_CHECK);
        let mut looks = 0;
        while began.elapsed() < 10 * STALL_CHECK {
            tokio::select! {
                () = check.due() => looks += 1,
                () = tokio::time::sleep(STALL_CHECK / 3) => {}
            }
        }
        assert!((10..=11).contains(&looks), "{looks} looks");
    }

    /// A guest that stalls after hours is looked at once, not once for every second before.
    #[tokio::test(start_paused = true)]
    async fn looks_that_were_not_needed_are_not_made_up_for() {
        let mut check = StallCheck::every(STALL_CHECK);
        tokio::time::advance(100 * STALL_CHECK).await;
        check.due().await;
        let next = tokio::time::timeout(STALL_CHECK / 2, check.due());
        assert!(next.await.is_err(), "the next look is made at once");
    }
}
