//! How a sandbox goes to another state: a stopped machine is loaded with it, on a disk of its own,
//! and takes the place of the present one.
//!
//! ```text
//!   revert:  present  --capture--> state it leaves   \
//!            target   --load-----> Arrival           /--> head written --> continued --> old machine ends
//! ```
//!
//! Always: an arrival needs nothing of the present, so it is loaded while the present is captured.
//! When it fails, or is dropped: its machine ends, and the next collection removes its overlay,
//! which no head lists.

use std::time::Instant;

use sandtree_engine::{Machine, Spare};
use sandtree_store::{Head, LayerId, MemoryState, Owned, Phase, StateId, StateKind, StateManifest};

use super::Driver;
use super::states::capturing;
use crate::capture::{After, Purpose};
use crate::error::{Error, Result, store_error};
use crate::fold;
use crate::inner::Inner;
use crate::machine::boot::Boot;
use crate::machine::identity::{self, Belongs};
use crate::machine::mounts::mount_all;
use crate::machine::restore::{
    self, Checked, Connections, HubChoice, Loaded, Loading, RestoreTimes, Restored,
};
use crate::machine::running::{self, Running};
use crate::manifest::{bare_manifest, publish_bare};
use crate::start::{self, check_disk, running_state};
use crate::verb::Verb;

/// How many states that reverts left are kept; the oldest are removed first.
const LEFT_MAX: usize = 32;

pub(super) struct Arrival {
    pub manifest: StateManifest,
    /// The state's layers, and an overlay of its own on top.
    pub disk: Vec<LayerId>,
    /// `None` for a state without memory: its guest boots.
    pub loaded: Option<Loaded>,
}

impl Arrival {
    async fn load(
        host: &Inner,
        owned: &Owned,
        state: Checked,
        spare: Option<Spare>,
    ) -> Result<Self> {
        let manifest = state.manifest().clone();
        let overlay = owned
            .create_disk(manifest.disk_bytes)
            .map_err(store_error("make an overlay"))?;
        owned
            .sync_overlay(&overlay)
            .map_err(store_error("sync an overlay"))?;
        let disk: Vec<LayerId> = manifest.disk.iter().cloned().chain([overlay]).collect();
        let disk = fold::shallow(owned, &disk).await?;
        let loaded = if matches!(manifest.memory, MemoryState::None) {
            None
        } else {
            let loading = Loading {
                host,
                owned,
                disk: &disk,
                spare,
            };
            Some(restore::load(loading, state).await?)
        };
        Ok(Self {
            manifest,
            disk,
            loaded,
        })
    }
}

/// The machine that a step to another state has left. It is killed, and its process may still be
/// ending.
#[must_use = "its end is awaited"]
pub(super) struct Old(Option<Machine>);

impl Old {
    pub async fn ended(self) {
        if let Some(machine) = self.0 {
            super::kill_or_warn(&machine).await;
        }
    }
}

/// With less free space than this, a restore uses the sandbox's reserve.
const LITTLE_BYTES: u64 = 4 << 20;

impl Driver {
    /// Makes a state of the present, and loads the machine that will take its place. It does both
    /// at once, unless the store is nearly full: then the capture comes first, so that the machine
    /// gets the space that the capture does not need.
    pub(super) async fn leave_and_load(
        &mut self,
        target: Checked,
    ) -> (Result<Option<StateId>>, Result<Arrival>) {
        if self.running.is_none() || self.is_store_full() {
            let kept = self.keep_present().await;
            if let Err(error) = self.release_reserve_if_full() {
                return (kept, Err(error));
            }
            return (kept, self.load(target).await);
        }
        let deep = self.wait_if_too_deep().await;
        let spare = self.spare.take();
        let host = self.host.clone();
        let owned = self.owned.as_ref().expect("the driver runs while it owns");
        let running = self.running.as_mut().expect("it was just looked at");
        let leave = async {
            deep?;
            let purpose = Purpose {
                kind: StateKind::Left,
                tag: None,
                after: After::StayStopped,
            };
            capturing(&host, owned, running)?.take(purpose).await
        };
        let (taken, arrival) = tokio::join!(leave, Arrival::load(&host, owned, target, spare));
        let arrival = arrival.inspect_err(|_| self.forget_arrival());
        let kept = self.captured(taken).await;
        let kept = kept.map(|captured| Some(captured.manifest.id));
        match self.release_reserve_if_full() {
            Ok(()) => (kept, arrival),
            Err(error) => (kept, Err(error)),
        }
    }

    pub(super) async fn load(&self, state: Checked) -> Result<Arrival> {
        let arrival = Arrival::load(&self.host, self.owned(), state, None).await;
        arrival.inspect_err(|_| self.forget_arrival())
    }

    /// Removes the overlay of an arrival that failed: no head lists it.
    fn forget_arrival(&self) {
        self.collect();
    }

    fn is_store_full(&self) -> bool {
        let free = self.host.store.disk_free_bytes();
        free.is_ok_and(|free| free < LITTLE_BYTES)
    }

    pub(super) fn release_reserve_if_full(&self) -> Result<()> {
        if !self.is_store_full() {
            return Ok(());
        }
        let released = self.owned().release_reserve();
        released.map_err(store_error("give its reserve back"))
    }

    /// Makes a state of the present before the sandbox leaves it. A running machine stays stopped
    /// afterwards.
    async fn keep_present(&mut self) -> Result<Option<StateId>> {
        if self.running.is_some() {
            let captured = self
                .capture(StateKind::Left, None, After::StayStopped)
                .await?;
            return Ok(Some(captured.manifest.id));
        }
        match self.state.phase {
            Phase::Paused => self.paused_state().map(Some),
            _ => self.keep_disk().map(Some),
        }
    }

    /// Makes a state of a sandbox without a machine: its disk alone.
    fn keep_disk(&self) -> Result<StateId> {
        let owned = self.owned();
        let head = self.head()?;
        check_disk(owned)?;
        let manifest = bare_manifest(owned.record(), &head, StateKind::Left)?;
        publish_bare(owned, &manifest)?;
        Ok(manifest.id)
    }

    /// Seals and freezes the state that a revert left, and removes the oldest such states. The
    /// revert is finished, so a failure here is only logged.
    pub(super) fn keep_left(&mut self, left: &StateId) {
        self.seal_later(left);
        if let Err(error) = self
            .freeze(left)
            .and_then(|()| self.prune(StateKind::Left, LEFT_MAX))
        {
            tracing::warn!(%error, "states that reverts left are not in order");
        }
    }

    /// Freezes the uppermost overlay of a state: nothing writes to it any more. For a state without
    /// a machine, that is true only once the sandbox has left it.
    fn freeze(&self, state: &StateId) -> Result<()> {
        let disk = self.source(state)?.manifest().disk.clone();
        let active = disk.last().map(|id| self.owned().freeze_disk(id));
        active
            .unwrap_or(Ok(()))
            .map_err(store_error("seal an overlay"))
    }

    /// Brings up the machine of an arrival. The head lists the machine's disk before its guest can
    /// write to it.
    pub(super) async fn arrive(
        &mut self,
        arrival: Arrival,
        moved: impl FnOnce(&mut Head),
        hub: HubChoice,
    ) -> Result<(Restored, StateManifest)> {
        let before = self.head()?;
        let mut head = before.clone();
        head.disk = arrival.disk;
        head.mounts = arrival.manifest.mounts.clone();
        moved(&mut head);
        self.head_before = Some(before);
        match self.bring_up(arrival.loaded, head, hub).await {
            Ok(restored) => Ok((restored, arrival.manifest)),
            Err(error) => {
                self.restore_head();
                Err(error)
            }
        }
    }

    /// Writes the earlier head back, if a step to another state was not finished.
    pub(super) fn restore_head(&mut self) {
        let Some(before) = self.head_before.take() else {
            return;
        };
        match self.set_head(&before) {
            Ok(()) => {
                self.collect();
            }
            // No collection: the head on disk does not list the old machine's layers.
            Err(error) => {
                tracing::error!(%error, "where a sandbox stands cannot be written back")
            }
        }
    }

    /// Refuses to leave the present once the verb is interrupted.
    fn check_interrupted(&self) -> Result<()> {
        match self.interrupted.get() {
            None => Ok(()),
            Some(by) => Err(Error::Interrupted {
                name: self.name(),
                verb: Verb::Revert,
                by,
            }),
        }
    }

    async fn bring_up(
        &self,
        loaded: Option<Loaded>,
        head: Head,
        hub: HubChoice,
    ) -> Result<Restored> {
        let host = &self.host;
        let owned = self.owned();
        self.check_interrupted()?;
        self.set_head(&head)?;
        if let Some(loaded) = loaded {
            let connections = Connections {
                hub,
                belongs: Belongs::Here,
            };
            return loaded.continue_guest(host, owned, connections).await;
        }
        let began = Instant::now();
        let boot = Boot {
            disk: &head.disk,
            identity: identity::identity(owned.record()),
            timeout: None,
        };
        let mut running = start::boot(host, owned, start::From::KernelState, boot).await?;
        mount_all(owned, &mut running).await?;
        start::service(host, owned, &mut running).await?;
        let times = RestoreTimes {
            running: began.elapsed(),
            acknowledged: began.elapsed(),
        };
        Ok(Restored {
            running,
            times,
            from_spare: false,
            hooks: Vec::new(),
        })
    }

    /// Continues the old machine after a step that failed, and removes the state `left` that was
    /// made of the present. A paused sandbox keeps it: that state is the one it is paused in.
    pub(super) async fn stay(&mut self, left: Option<StateId>) {
        self.continue_machine().await;
        let left = if self.state.phase == Phase::Paused {
            None
        } else {
            left
        };
        if let Err(error) = self.remove_states(&Vec::from_iter(left)) {
            tracing::warn!(%error, "what a failed revert kept cannot be removed");
        }
    }

    pub(super) async fn continue_machine(&self) {
        let Some(running) = &self.running else { return };
        if let Err(error) = running.machine.cont().await {
            tracing::error!(%error, "a machine does not continue");
        }
        running.hub.mounts().go();
    }

    /// Kills the old machine once the new one is up, and reports the reason to its waiting clients.
    /// The process takes some milliseconds to end, in which the driver can do other work.
    pub(super) async fn leave_old(&mut self, target: &StateManifest) -> Old {
        let reason = format!("the sandbox was reverted to {}", restore::label(target));
        if let Some((hub, _)) = self.kept.take() {
            hub.close(reason.clone()).await;
        }
        let Some(running) = self.running.take() else {
            return Old(None);
        };
        running.machine.kill_now();
        drop(running.forwards);
        running.hub.close(reason).await;
        Old(Some(running.machine))
    }

    /// Makes a machine that was brought up the machine of the sandbox. The step cannot be undone
    /// any more, so a failure to record it, on a full disk, is only logged.
    pub(super) fn take_over(&mut self, running: Running) {
        self.head_before = None;
        let state = running_state(&running, self.record_of(), Some(&self.state));
        if let Err(error) = running::clear_execs(self.dir(), Some(&running.execs)) {
            tracing::warn!(%error, "the output of commands that are gone cannot be removed");
        }
        self.running = Some(running);
        self.stalled = false;
        self.agent_gone = None;
        self.seen = self.activity_now();
        if let Err(error) = self.record(state) {
            tracing::warn!(%error, "that a sandbox runs cannot be recorded");
        }
        self.collect();
        self.take_reserve();
    }

    /// Reserves space for a later restore, if the store has room. If not, the driver tries again
    /// when the sandbox is next restored or opened.
    pub(super) fn take_reserve(&self) {
        let has_room = self
            .host
            .store
            .disk_free_bytes()
            .is_ok_and(|free| free > LITTLE_BYTES);
        if let Some(Err(error)) = has_room.then(|| self.owned().take_reserve()) {
            tracing::debug!(%error, "no reserve for a store that is full");
        }
    }
}
