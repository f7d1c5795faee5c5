//! What a driver does with states: takes them, returns to them, removes them, pauses in one.
//!
//! ```text
//!   Running --checkpoint--> Running            Running --pause--> Paused --resume--> Running
//!   any resting phase or Running --revert, undo, redo--> Running
//! ```
//!
//! Always: `revert` never changes the state it goes to, and brings the new machine up before the
//! old one ends. It keeps the present that it leaves as a state, too, if it can. When it fails: the
//! old machine continues, the head is as before, and the layers that the revert made are collected.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use sandtree_engine::{self as engine, Machine};
use sandtree_store::{
    Collected, Head, MountAccess, MountPoint, Owned, Phase, StateId, StateKind, StateManifest,
    StateRecord, StateSource, Tag,
};

use super::Driver;
use super::spare::Occasion;
use crate::blocking::blocking;
use crate::capture::{After, Capture, Captured, CapturedDisk, Purpose};
use crate::degradation::Degradation;
use crate::error::{Error, Result, StateUser, store_error};
use crate::history::{self, Step};
use crate::hub::Activity;
use crate::inner::Inner;
use crate::machine::ports;
use crate::machine::restore::{self, Checked, HubChoice};
use crate::machine::running::Running;
use crate::mode::MemoryMode;
use crate::moment::{boot_id, now_unix_ms};
use crate::states::{
    self, Checkpoint, Forget, Forgotten, Goal, Paused, Replace, RestoreReport, Reverted, ms,
};

/// How long the driver waits to learn that a machine has ended.
const GONE: Duration = Duration::from_secs(1);

impl Driver {
    pub(super) async fn checkpoint(
        &mut self,
        tag: Option<String>,
        replace: Replace,
    ) -> Result<Checkpoint> {
        let began = Instant::now();
        let tag = self.free_tag(tag, replace)?;
        let captured = self
            .capture(StateKind::Checkpoint, Some(tag.clone()), After::Continue)
            .await?;
        self.taken(&captured.manifest)?;
        let replaced =
            self.states_where(|m| m.tag.as_ref() == Some(&tag) && m.id != captured.manifest.id);
        if let Err(error) = replaced.and_then(|replaced| self.remove_states(&replaced)) {
            tracing::warn!(%error, "the checkpoint that had the tag cannot be removed");
        }
        self.wished = Some(Occasion::Checkpointed);
        Ok(captured.report(began.elapsed()))
    }

    /// The tag to use: the one asked for, if it is free, or the next number.
    fn free_tag(&self, tag: Option<String>, replace: Replace) -> Result<Tag> {
        let taken: BTreeSet<Tag> = self
            .states()?
            .into_iter()
            .filter_map(|manifest| manifest.tag)
            .collect();
        match tag {
            Some(tag) => {
                let tag: Tag = crate::names::parse_tag(&tag)?;
                if taken.contains(&tag) && !replace.is_yes() {
                    return Err(Error::TagTaken {
                        name: self.name(),
                        tag: tag.to_string(),
                    });
                }
                Ok(tag)
            }
            None => {
                let numbered =
                    (1..).map(|number| format!("c{number}").parse::<Tag>().expect("it is a tag"));
                Ok(numbered
                    .into_iter()
                    .find(|tag| !taken.contains(tag))
                    .expect("numbers do not run out"))
            }
        }
    }

    /// Adds a state of the present, which was just published, to the past as its newest state.
    fn taken(&mut self, manifest: &StateManifest) -> Result<()> {
        let mut head = self.head()?;
        history::taken(&mut head, manifest.id.clone());
        if let Err(error) = self.set_head(&head) {
            self.owned()
                .remove_state(&manifest.id)
                .map_err(store_error("remove a state"))?;
            return Err(error);
        }
        self.seal_later(&manifest.id);
        self.seen = self.activity_now();
        self.fold_if_deep();
        Ok(())
    }

    pub(super) async fn capture(
        &mut self,
        kind: StateKind,
        tag: Option<Tag>,
        after: After,
    ) -> Result<Captured> {
        self.wait_if_too_deep().await?;
        let host = self.host.clone();
        let mut capture = self.capturing(&host)?;
        let taken = capture.take(Purpose { kind, tag, after }).await;
        self.captured(taken).await
    }

    /// Explains why a capture failed, and continues the guest: it must run after every failure.
    pub(super) async fn captured(&self, taken: Result<Captured>) -> Result<Captured> {
        let error = match taken {
            Ok(captured) => return Ok(captured),
            Err(error) => error,
        };
        let running = self.running.as_ref().expect("only what runs is captured");
        let error = explained(&running.machine, error).await;
        self.continue_machine().await;
        Err(error)
    }

    /// Captures the disk alone, while the guest runs.
    pub(super) async fn capture_disk(&mut self, kind: StateKind) -> Result<CapturedDisk> {
        self.wait_if_too_deep().await?;
        let host = self.host.clone();
        let mut capture = self.capturing(&host)?;
        match capture.take_disk(kind).await {
            Err(error) => Err(explained(&capture.running.machine, error).await),
            taken => taken,
        }
    }

    fn capturing<'a>(&'a mut self, host: &'a Inner) -> Result<Capture<'a>> {
        let owned = self.owned.as_ref().expect("the driver runs while it owns");
        let running = self.running.as_mut().expect("only what runs is captured");
        capturing(host, owned, running)
    }
}

pub(super) fn capturing<'a>(
    host: &'a Inner,
    owned: &'a Owned,
    running: &'a mut Running,
) -> Result<Capture<'a>> {
    let wanted = match &owned.record().memory_mode {
        Some(mode) => mode.parse()?,
        None => MemoryMode::WriteProtect,
    };
    let disk_bytes = owned.record().disk_bytes;
    Ok(Capture {
        host,
        owned,
        running,
        wanted,
        disk_bytes,
    })
}

impl Driver {
    /// Takes the automatic checkpoint before a command starts.
    pub(super) async fn checkpoint_before_command(&mut self) -> Result<()> {
        let taken = self.auto_checkpoint().await;
        // The command is about to do something.
        self.seen = None;
        taken
    }

    async fn auto_checkpoint(&mut self) -> Result<()> {
        let now = self.activity_now();
        if self.running.is_none() {
            return Ok(());
        }
        if self.seen == now && now.is_some_and(|activity| !activity.busy) {
            return self.continue_from_here();
        }
        let captured = self.capture(StateKind::Auto, None, After::Continue).await?;
        self.taken(&captured.manifest)?;
        let bound = self.record_of().auto_checkpoint.unwrap_or(u32::MAX) as usize;
        if let Err(error) = self.prune(StateKind::Auto, bound) {
            tracing::warn!(%error, "automatic checkpoints beyond their number cannot be removed");
        }
        self.wished = Some(Occasion::Checkpointed);
        Ok(())
    }

    /// Uses the state that the sandbox stands on as the checkpoint before the next command: nothing
    /// has changed since.
    fn continue_from_here(&mut self) -> Result<()> {
        let mut head = self.head()?;
        if history::going_on(&mut head) {
            self.set_head(&head)
        } else {
            Ok(())
        }
    }

    pub(super) fn activity_now(&self) -> Option<Activity> {
        self.running.as_ref().map(|running| running.hub.activity())
    }

    /// Removes the oldest states of a kind, so that `keep` are left. States that are lent stay.
    pub(super) fn prune(&mut self, kind: StateKind, keep: usize) -> Result<()> {
        let mut states = self.states_where(|manifest| manifest.kind == kind)?;
        states.truncate(states.len().saturating_sub(keep));
        states.retain(|state| !self.is_lent(state));
        self.remove_states(&states)
    }

    /// Removes the unlisted states that an owner lent before it died: their borrowers are gone,
    /// too, or have their own links.
    pub(super) fn forget_hidden(&self) {
        if let Err(error) = self.owned().remove_unlisted() {
            tracing::warn!(%error, "an unused state cannot be removed");
        }
    }

    pub(super) async fn pause(&mut self) -> Result<Paused> {
        let began = Instant::now();
        self.write_changes_out().await;
        let manifest = self
            .capture(StateKind::Paused, None, After::StayStopped)
            .await?
            .manifest;
        let before = self.state.clone();
        let state = StateRecord {
            clean: true,
            paused_in: Some(manifest.id.clone()),
            ..self.state.followed_by(Phase::Paused, now_unix_ms())
        };
        // Before the machine ends: from here on the sandbox can be resumed, even if this process
        // dies.
        let recorded = match self.seal_now(&manifest.id).await {
            Ok(()) => self.write(state.clone()),
            failed => failed,
        };
        if let Err(error) = recorded {
            // On disk, too: the write of the paused state may have failed only in its last step.
            if let Err(second) = self.write(before) {
                tracing::warn!(error = %second, "that a sandbox still runs cannot be recorded");
            }
            self.stay(Some(manifest.id)).await;
            return Err(error);
        }
        self.spare.end().await;
        let running = self.running.take().expect("it was just captured");
        // This resets the connections of the host's ports. Their ends in the guest are reset when
        // the guest continues.
        drop(running.forwards);
        super::kill_or_warn(&running.machine).await;
        running.hub.suspend("the sandbox was paused".into()).await;
        match running.hub.clients() {
            0 => running.hub.close("the sandbox was paused".into()).await,
            _ => self.kept = Some((running.hub, running.execs)),
        }
        if let Err(error) = self.record(state) {
            tracing::warn!(%error, "a paused sandbox keeps a socket without a listener");
        }
        Ok(Paused {
            awaited: self.kept.is_some(),
            mode: manifest.mode.unwrap_or_default(),
            degraded: Degradation::list(&manifest.degraded),
            total_ms: ms(began.elapsed()),
            memory_bytes: manifest.memory_layer_bytes,
            disk_bytes: manifest.disk_layer_bytes,
        })
    }

    /// Makes the guest write its disk out if that holds the changes of a mount: `changes` and
    /// `apply` read them there, also while the sandbox is paused.
    async fn write_changes_out(&self) {
        let is_cow = |point: &MountPoint| point.access == MountAccess::CopyOnWrite;
        let has_changes = self.head().is_ok_and(|head| head.mounts.iter().any(is_cow));
        let Some(running) = self.running.as_ref().filter(|_| has_changes) else {
            return;
        };
        if let Err(error) = running.guest.sync().await {
            tracing::warn!(%error, "the last changes of a mount may not be on the disk");
        }
    }

    pub(super) async fn resume(&mut self) -> Result<RestoreReport> {
        let began = Instant::now();
        let paused = self.paused_state()?;
        let state = self.checked(&paused)?;
        let ports = ports::listen(&self.record_of().ports).await?;
        let hub = match &self.kept {
            Some((hub, execs)) => HubChoice::Kept {
                hub: hub.clone(),
                execs: execs.clone(),
            },
            None => HubChoice::New,
        };
        self.release_reserve_if_full()?;
        let arrival = self.load(state).await?;
        let (mut restored, _) = self.arrive(arrival, |_| {}, hub).await?;
        restored.running.forwards = ports::forward(&restored.running.guest, &ports)?;
        self.kept = None;
        let resumed = restored.report(began.elapsed());
        self.take_over(restored.running);
        self.wished = Some(Occasion::Started);
        if self.is_lent(&paused) {
            self.removed_on_return.insert(paused);
        } else if let Err(error) = self.remove_states(&[paused]) {
            tracing::warn!(%error, "the state that was resumed from cannot be removed");
        }
        Ok(resumed)
    }

    pub(super) fn paused_state(&self) -> Result<StateId> {
        let found = self.states_where(|manifest| manifest.kind == StateKind::Paused)?;
        let no_state = || Error::NoState {
            name: self.name(),
            state: "it was paused in".into(),
        };
        found.into_iter().next().ok_or_else(no_state)
    }

    pub(super) async fn go_to(&mut self, goal: Goal) -> Result<Reverted> {
        let began = Instant::now();
        let step = self.step(&self.head()?, goal)?;
        let target = self.checked(&step.target)?;
        let ports = match &self.running {
            Some(running) => running.listeners(),
            None => ports::listen(&self.record_of().ports).await?,
        };
        let (kept, arrival) = self.leave_and_load(target).await;
        let (left, dropped) = match kept {
            Ok(left) => (left, None),
            // The machine was killed: its disk is all there is of the present.
            Err(error) if self.interrupted.get().is_some() => return Err(error),
            Err(error) => (None, Some(error.one_line())),
        };
        let moved = |head: &mut Head| history::moved(head, &step, left.clone());
        let came = match arrival {
            Ok(arrival) => self.arrive(arrival, moved, HubChoice::New).await,
            Err(error) => Err(error),
        };
        let came = came.and_then(|(mut restored, target)| {
            restored.running.forwards = ports::forward(&restored.running.guest, &ports)?;
            Ok((restored, target))
        });
        let (restored, target) = match came {
            Ok(came) => came,
            Err(error) => {
                self.restore_head();
                self.stay(left).await;
                return Err(error);
            }
        };
        let old = self.leave_old(&target).await;
        let report = restored.report(began.elapsed());
        self.take_over(restored.running);
        if let Some(left) = &left {
            self.keep_left(left);
        }
        // Before the answer: its reader finds one machine.
        old.ended().await;
        self.wished = Some(Occasion::Reverted);
        Ok(Reverted {
            id: target.id.to_string(),
            tag: target.tag.as_ref().map(ToString::to_string),
            left: left.as_ref().map(ToString::to_string),
            dropped,
            restore: RestoreReport {
                total_ms: ms(began.elapsed()),
                ..report
            },
        })
    }

    fn step(&self, head: &Head, goal: Goal) -> Result<Step> {
        match goal {
            Goal::State(reference) => self.find_state(&reference).map(history::revert),
            Goal::Undo { steps } => history::undo(head, steps).ok_or_else(|| Error::NoWay {
                name: self.name(),
                way: "back",
                wanted: steps,
                possible: head.past.len(),
            }),
            Goal::Redo => history::redo(head).ok_or_else(|| Error::NoWay {
                name: self.name(),
                way: "forward",
                wanted: 1,
                possible: head.future.len(),
            }),
        }
    }

    fn find_state(&self, reference: &str) -> Result<StateId> {
        self.host
            .listed_state(self.dir(), reference)
            .map(|manifest| manifest.id)
    }

    pub(super) fn forget(&mut self, which: &Forget) -> Result<Forgotten> {
        let mut states: Vec<StateManifest> = self
            .states()?
            .into_iter()
            .filter(|m| m.kind.is_listed())
            .collect();
        let paused = if self.state.phase == Phase::Paused {
            Some(self.paused_state()?)
        } else {
            None
        };
        states.retain(|manifest| Some(&manifest.id) != paused.as_ref());
        let gone: Vec<StateId> = match which {
            Forget::These(references) => references
                .iter()
                .map(|r| self.find_state(r))
                .collect::<Result<_>>()?,
            Forget::All => states.into_iter().map(|manifest| manifest.id).collect(),
            Forget::AllBut(keep) => {
                states.retain(|manifest| manifest.kind == StateKind::Checkpoint);
                states.truncate(states.len().saturating_sub(*keep));
                states.into_iter().map(|manifest| manifest.id).collect()
            }
        };
        let gone: Vec<StateId> = BTreeSet::from_iter(gone).into_iter().collect();
        if let Some(paused) = paused.filter(|paused| gone.contains(paused)) {
            return Err(Error::StateInUse {
                state: paused.to_string(),
                by: StateUser::Paused,
            });
        }
        if let Some(lent) = gone.iter().find(|state| self.is_lent(state)) {
            return Err(Error::StateInUse {
                state: lent.to_string(),
                by: StateUser::Borrower,
            });
        }
        let freed_bytes = self.remove_states_counted(&gone)?.bytes;
        Ok(Forgotten {
            states: gone.iter().map(ToString::to_string).collect(),
            freed_bytes,
        })
    }

    pub(super) fn remove_states(&mut self, states: &[StateId]) -> Result<()> {
        self.remove_states_counted(states).map(drop)
    }

    /// Removes states, and returns what that freed. The head stops listing them before they are
    /// removed.
    fn remove_states_counted(&mut self, states: &[StateId]) -> Result<Collected> {
        if states.is_empty() {
            return Ok(Collected::default());
        }
        let mut head = self.head()?;
        states
            .iter()
            .for_each(|state| history::forget(&mut head, state));
        self.set_head(&head)?;
        for state in states {
            self.owned()
                .remove_state(state)
                .map_err(store_error("remove a state"))?;
        }
        Ok(self.collect())
    }

    /// Removes layers that nothing lists. The next collection tries again to remove a layer that
    /// cannot be removed now.
    pub(super) fn collect(&self) -> Collected {
        let mut held = self
            .running
            .as_ref()
            .map(|running| running.ground.held())
            .unwrap_or_default();
        held.extend(self.folding.iter().flat_map(super::fold::Folding::held));
        let collected = self.owned().collect(&held).unwrap_or_else(|error| {
            tracing::warn!(%error, "unused layers cannot be removed");
            Collected::default()
        });
        self.spare
            .end_without(|overlay| self.dir().disk_layer(overlay).exists());
        collected
    }

    /// The states as they are now, oldest first.
    pub(super) fn states(&self) -> Result<Vec<StateManifest>> {
        let states = self
            .dir()
            .states()
            .map_err(store_error("list the states of a sandbox"))?;
        for state in &states.unreadable {
            tracing::warn!(id = %state.id, error = %state.error, "a state cannot be read");
        }
        Ok(states::as_they_are(&self.state, states.readable))
    }

    pub(super) fn states_where(
        &self,
        is_wanted: impl Fn(&StateManifest) -> bool,
    ) -> Result<Vec<StateId>> {
        Ok(self
            .states()?
            .into_iter()
            .filter(is_wanted)
            .map(|manifest| manifest.id)
            .collect())
    }

    pub(super) fn source(&self, state: &StateId) -> Result<StateSource> {
        self.dir().state_source(state).map_err(|error| match error {
            sandtree_store::Error::UnknownState { .. } => Error::NoState {
                name: self.name(),
                state: state.to_string(),
            },
            source => store_error("read a state")(source),
        })
    }

    fn checked(&self, state: &StateId) -> Result<Checked> {
        restore::check(self.dir(), self.source(state)?)
    }

    pub(super) fn head(&self) -> Result<Head> {
        self.dir()
            .head()
            .map_err(store_error("read where a sandbox stands"))
    }

    pub(super) fn set_head(&self, head: &Head) -> Result<()> {
        self.owned()
            .set_head(head)
            .map_err(store_error("write where a sandbox stands"))
    }

    /// Begins to seal the states that an earlier owner did not seal before it died.
    pub(super) fn seal_unsealed(&mut self) {
        let is_unsealed =
            |state: &StateManifest| matches!(self.dir().is_sealed(&state.id), Ok(false));
        let unsealed = self
            .states_where(|state| state.boot_id == boot_id() && is_unsealed(state))
            .unwrap_or_default();
        unsealed.iter().for_each(|state| self.seal_later(state));
    }

    async fn seal_now(&self, state: &StateId) -> Result<()> {
        let dir = self.dir().clone();
        let state = state.clone();
        blocking(move || Owned::seal_state(&dir, &state))
            .await
            .map_err(store_error("write a state out"))
    }

    /// Makes a state durable in the background: it can be used before that.
    pub(super) fn seal_later(&mut self, state: &StateId) {
        let dir = self.dir().clone();
        let sealed = state.clone();
        self.sealing
            .begin(state.clone(), move || Owned::seal_state(&dir, &sealed));
    }
}

/// Replaces an I/O error of a machine that has ended by that end, which is most likely the cause.
async fn explained(machine: &Machine, error: Error) -> Error {
    let Error::Engine {
        operation,
        source: engine::Error::Io { .. },
    } = &error
    else {
        return error;
    };
    match tokio::time::timeout(GONE, machine.exited()).await {
        Ok(exit) => Error::Engine {
            operation,
            source: engine::Error::Died { exit },
        },
        Err(_) => error,
    }
}
