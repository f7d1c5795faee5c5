//! What a driver does for saves: it lends states, and saves a sandbox with `save_on_stop` when it
//! stops.
//!
//! Always: a state that the driver makes for a borrower is not listed, and is removed when the
//! borrower returns it. The driver saves a stopped sandbox before it reports the stop, so that a
//! client that sees the stop can rely on the save. When it fails: a sandbox that could not be saved
//! stays, and its state says why.

use crate::degradation::Degradation;
use crate::publish;
use sandtree_store::{Consistency, LayerId, Phase, StateId, StateKind, StateManifest, StateRecord};

use super::Driver;
use crate::capture::{After, CapturedDisk, as_after_power_cut};
use crate::error::{Error, Result, store_error};
use crate::manifest::{bare_manifest, publish_bare};
use crate::order::{LentState, Wanted};
use crate::start::check_disk;
use crate::states::ms;

impl Driver {
    pub(super) async fn lend(&mut self, wanted: Wanted) -> Result<LentState> {
        let lent = match (self.state.phase, wanted) {
            (_, Wanted::State(reference)) => self.host.promoted(self.owned(), &reference),
            (Phase::Running, Wanted::Disk) => self.lend_disk().await,
            (Phase::Running, Wanted::Copies) => self.lend_memory(StateKind::Fork).await,
            (Phase::Running, Wanted::Memory) => self.lend_memory(StateKind::Save).await,
            (Phase::Paused, wanted) => self.lend_paused(&wanted),
            (phase, Wanted::Memory) => Err(Error::NoMemory {
                name: self.name(),
                phase,
            }),
            (_, Wanted::Copies | Wanted::Disk) => self.lend_resting(),
        }?;
        *self.loans.entry(lent.state.clone()).or_default() += 1;
        Ok(lent)
    }

    /// Whether this driver lent the state, or an earlier driver did and the borrower still holds
    /// it. A state that cannot be checked counts as lent.
    pub(super) fn is_lent(&self, state: &StateId) -> bool {
        self.loans.contains_key(state.as_str()) || self.dir().is_held(state).unwrap_or(true)
    }

    /// Ends one loan of a state. The last one removes a state that was made for its borrower, and a
    /// state that the sandbox was paused in, if the sandbox was resumed meanwhile.
    pub(super) fn take_back(&mut self, state: &str) -> Result<()> {
        if let Some(loans) = self.loans.get_mut(state) {
            *loans -= 1;
            if *loans > 0 {
                return Ok(());
            }
            self.loans.remove(state);
        }
        let recorded = self.dir().states().map_err(store_error("list states"))?;
        let is_done_with = |manifest: &StateManifest| {
            let was_taken_for_it = matches!(manifest.kind, StateKind::Fork | StateKind::Save);
            manifest.id.as_str() == state
                && (was_taken_for_it || self.removed_on_return.contains(&manifest.id))
        };
        let states: Vec<StateId> = recorded
            .readable
            .into_iter()
            .filter(is_done_with)
            .map(|manifest| manifest.id)
            .collect();
        self.removed_on_return
            .retain(|removed| !states.contains(removed));
        self.remove_states(&states)
    }

    async fn lend_memory(&mut self, kind: StateKind) -> Result<LentState> {
        let captured = self.capture(kind, None, After::Continue).await?;
        self.fold_if_deep();
        Ok(LentState {
            state: captured.manifest.id.to_string(),
            pause_ms: ms(captured.pause),
            degraded: Degradation::list(&captured.manifest.degraded),
            consistency: Consistency::Exact,
            disk_only: false,
        })
    }

    async fn lend_disk(&mut self) -> Result<LentState> {
        let CapturedDisk {
            manifest,
            consistency,
        } = self.capture_disk(StateKind::Save).await?;
        self.fold_if_deep();
        Ok(LentState {
            state: manifest.id.to_string(),
            pause_ms: 0.0,
            degraded: Degradation::list(&manifest.degraded),
            consistency,
            disk_only: true,
        })
    }

    fn lend_paused(&self, wanted: &Wanted) -> Result<LentState> {
        let disk_only = *wanted == Wanted::Disk;
        let (consistency, degraded) = if disk_only {
            (Consistency::Crash, vec![Degradation::UnwrittenData {}])
        } else {
            (Consistency::Exact, Vec::new())
        };
        let state = self.paused_state()?.to_string();
        Ok(LentState {
            state,
            pause_ms: 0.0,
            degraded,
            consistency,
            disk_only,
        })
    }

    fn lend_resting(&self) -> Result<LentState> {
        check_disk(self.owned())?;
        let disk = self.set_disk_aside()?;
        let consistency = publish::disk_consistency(&self.host, self.owned(), &disk)?;
        let bare = bare_manifest(self.record_of(), &self.head()?, StateKind::Save)?;
        let manifest = StateManifest { disk, ..bare };
        publish_bare(self.owned(), &manifest)?;
        let cut = (consistency == Consistency::Crash)
            .then(|| as_after_power_cut("its guest was not shut down"));
        let state = manifest.id.to_string();
        let degraded = cut.into_iter().collect();
        Ok(LentState {
            state,
            pause_ms: 0.0,
            degraded,
            consistency,
            disk_only: true,
        })
    }

    /// Returns the layers of a disk that no machine uses. Later writes go into another overlay: the
    /// sandbox shares these layers with their borrower, and never writes to them again.
    fn set_disk_aside(&self) -> Result<Vec<LayerId>> {
        let owned = self.owned();
        let mut head = self.head()?;
        let active = head
            .active()
            .cloned()
            .expect("a head that was read has a disk");
        if owned
            .is_empty_overlay(&active)
            .map_err(store_error("read an overlay"))?
        {
            head.disk.pop();
            return Ok(head.disk);
        }
        let disk = head.disk.clone();
        let bytes = owned
            .disk_bytes(&active)
            .map_err(store_error("read an overlay"))?;
        let fresh = owned
            .create_disk(bytes)
            .map_err(store_error("make an overlay"))?;
        // The head that lists the overlay is durable, so the overlay must be durable, too.
        owned
            .sync_overlay(&fresh)
            .map_err(store_error("sync an overlay"))?;
        head.disk.push(fresh);
        self.set_head(&head)?;
        Ok(disk)
    }

    /// Saves a sandbox that has just stopped, if its record asks for that, and only then records
    /// that it has stopped.
    pub(super) async fn save_stopped(&mut self, stopped: StateRecord) -> Result<()> {
        let wish = self.record_of().save_on_stop.clone();
        let Some(wish) = wish.filter(|_| self.saves_on_stop()) else {
            return Ok(());
        };
        let saved = match self.lend_resting() {
            Ok(lent) => {
                let saved = publish::on_stop(
                    &self.host,
                    self.owned(),
                    &wish,
                    &lent,
                    stopped.saved.as_ref(),
                )
                .await;
                if let Err(error) = self.take_back(&lent.state) {
                    tracing::warn!(%error, "a state that was saved stays until its sandbox is next opened");
                }
                saved
            }
            Err(error) => Err(error),
        };
        let (state, saved) = match saved {
            Ok(digest) => (
                StateRecord {
                    saved: Some(digest),
                    ..stopped
                },
                Ok(()),
            ),
            Err(source) => {
                let name = self.name();
                let target = wish.target.to_string();
                let save_failed = Some(source.one_line());
                let failed = Error::NotSaved {
                    name,
                    target,
                    source: Box::new(source),
                };
                (
                    StateRecord {
                        save_failed,
                        ..stopped
                    },
                    Err(failed),
                )
            }
        };
        let written = self.write(state);
        saved.and(written)
    }
}
