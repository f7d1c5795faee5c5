//! Capturing the disk alone, while the guest runs.
//!
//! ```text
//!   prepare the next overlay -> guest: write out, trim, freeze -> switch the disk -> guest: thaw
//!     -> leave out a layer that adds nothing -> publish
//! ```
//!
//! Always: the machine is never stopped. The guest thaws on every path, by itself if no request to
//! thaw arrives. When it fails: a guest that cannot freeze is captured as it is, as after a power
//! cut, and the state says so.

use std::fmt::Display;
use std::time::Duration;

use sandtree_diff::is_same_but_for_notes;
use sandtree_store::disk::changed;
use sandtree_store::{Consistency, LayerId, StateKind, StateManifest};
use tracing::{Instrument, debug_span};

use super::Capture;
use crate::chain::Disk;
use crate::chain::diff_error;
use crate::degradation::Degradation;
use crate::error::{Error, Result, engine_error, store_error};
use crate::fault::Step;
use crate::manifest::{bare_manifest, publish_bare};

/// How long a guest stays frozen if no request to thaw arrives.
const FROZEN_LONGEST: Duration = Duration::from_secs(10);

/// How long a guest may take to answer a ping. A guest that answers it may have much to write out,
/// and gets more time for that.
const HEARS_WITHIN: Duration = Duration::from_secs(10);

/// A layer that changes more than this is kept without a look at whether it adds anything.
const LOOKED_THROUGH_BYTES: u64 = 4 << 20;

/// A published state of the disk alone.
#[derive(Debug, Clone)]
pub(crate) struct CapturedDisk {
    pub manifest: StateManifest,
    pub consistency: Consistency,
}

impl Capture<'_> {
    pub async fn take_disk(&mut self, kind: StateKind) -> Result<CapturedDisk> {
        let damage = self.disk_damage();
        let deaf = self
            .heard(self.running.guest.ping_within(HEARS_WITHIN))
            .await
            .err();
        let below = self
            .prepare_overlay()
            .instrument(debug_span!("prepare"))
            .await?;
        self.host
            .reach(Step::CapturePrepared, Some(&self.running.machine))?;
        let unfrozen = match deaf {
            None => self.switch_frozen().await?,
            Some(error) => self.switch_unfrozen(&error).await?,
        };
        self.give_up_writing(below.last()).await;
        let degraded: Vec<Degradation> =
            damage.clone().into_iter().chain(unfrozen.clone()).collect();
        let disk = match damage {
            Some(_) => vec![self.copy_disk().await?],
            None => below,
        };
        let consistency = if unfrozen.is_none() {
            Consistency::Frozen
        } else {
            Consistency::Crash
        };
        let disk = if unfrozen.is_none() {
            self.essential(disk)
        } else {
            disk
        };
        let manifest = self.publish_disk(kind, disk, degraded)?;
        Ok(CapturedDisk {
            manifest,
            consistency,
        })
    }

    /// Leaves out the uppermost layer if the disk is the same without it: a guest that wrote
    /// nothing since its last freeze has only noted the freeze and the thaw. So two saves of an
    /// unchanged sandbox share every layer.
    fn essential(&self, mut disk: Vec<LayerId>) -> Vec<LayerId> {
        match tokio::task::block_in_place(|| self.adds_nothing(&disk)) {
            Ok(false) => {}
            Ok(true) => {
                disk.pop();
            }
            Err(error) => {
                tracing::warn!(%error, "a layer cannot be compared with the one below; it is kept")
            }
        }
        disk
    }

    /// Waits for the guest's answer. Fails if the machine ends before that.
    async fn heard<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            answer = asked => answer,
            exit = self.machine().exited() => {
                Err(engine_error("carry a request to the guest")(sandtree_engine::Error::Died { exit }))
            }
        }
    }

    fn adds_nothing(&self, disk: &[LayerId]) -> Result<bool> {
        let Some((_, below)) = disk.split_last() else {
            return Ok(false);
        };
        let with = self.host.chain(self.owned, disk)?;
        let without = self.host.chain(self.owned, below)?;
        let ranges = changed(&without, &with).map_err(store_error("compare two disks"))?;
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        if bytes > LOOKED_THROUGH_BYTES {
            return Ok(false);
        }
        is_same_but_for_notes(&Disk(&without), &Disk(&with), &ranges).map_err(diff_error)
    }

    /// Switches the disk while the guest keeps it frozen. If the guest did not, returns why.
    async fn switch_frozen(&mut self) -> Result<Option<Degradation>> {
        let guest = self.running.guest.clone();
        let frozen = self
            .heard(guest.freeze(FROZEN_LONGEST))
            .instrument(debug_span!("freeze"))
            .await;
        let switched = self.switch().await;
        // After a freeze that failed, too: the guest may be frozen, and only its answer lost.
        let thawed = self
            .heard(guest.thaw())
            .instrument(debug_span!("thaw"))
            .await;
        switched?;
        Ok(match (frozen, thawed) {
            (Ok(()), Ok(true)) => None,
            (Ok(()), Ok(false)) => Some(as_after_power_cut("the guest thawed before it was saved")),
            (Err(error), _) | (_, Err(error)) => Some(as_after_power_cut(error)),
        })
    }

    /// Switches the disk of a guest that does not answer, and returns that as a degradation.
    async fn switch_unfrozen(&mut self, deaf: &Error) -> Result<Option<Degradation>> {
        self.switch().await?;
        Ok(Some(as_after_power_cut(deaf)))
    }

    async fn switch(&mut self) -> Result<()> {
        self.host
            .reach(Step::SaveFrozen, Some(&self.running.machine))?;
        self.pivot().await
    }

    fn publish_disk(
        &self,
        kind: StateKind,
        disk: Vec<LayerId>,
        degraded: Vec<Degradation>,
    ) -> Result<StateManifest> {
        disk.last()
            .map_or(Ok(()), |id| self.owned.freeze_disk(id))
            .map_err(store_error("seal an overlay"))?;
        let manifest = StateManifest {
            disk,
            degraded: Degradation::notes(&degraded),
            ..bare_manifest(self.owned.record(), &self.head()?, kind)?
        };
        self.host
            .reach(Step::CapturePublish, Some(&self.running.machine))?;
        publish_bare(self.owned, &manifest)?;
        Ok(manifest)
    }
}

pub(crate) fn as_after_power_cut(why: impl Display) -> Degradation {
    Degradation::DiskNotFrozen {
        reason: why.to_string(),
    }
}
