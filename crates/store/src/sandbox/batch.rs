//! Batches: several sandboxes that exist together or not at all.
//!
//! ```text
//! begin    stage B = staging/<batch>, locked ──► create sandboxes whose records name the batch (phase `creating`)
//! commit   B/committed, sync B, sync staging      from here on all of them exist
//! finish   every sandbox sets another phase ──► remove B
//! ```
//!
//! Always: one file decides. Without it, a sandbox of the batch that is still `creating` when its
//! owner is gone is removed by the next open; with it, the sandbox stays, as crashed.
//! When it fails: B is removed with the batch, or by the next open once none of its sandboxes is
//! `creating`.

use super::{Phase, SandboxDir, StateRecord};
use crate::publish::Staged;
use crate::{BatchId, Error, Store};

const COMMITTED: &str = "committed";

/// The commit point of several sandboxes. Dropped before [`commit`](Self::commit), none of them
/// stays.
#[derive(Debug)]
pub struct Batch {
    id: BatchId,
    /// `None` once the batch is committed and its directory has been left to the next open.
    staged: Option<Staged>,
    is_committed: bool,
}

impl Batch {
    pub fn id(&self) -> &BatchId {
        &self.id
    }

    /// From here on all sandboxes of the batch exist, whatever happens to their owners.
    pub fn commit(&mut self) -> Result<(), Error> {
        let staged = self.staged.as_ref().expect("a batch is finished once");
        staged.mark(COMMITTED)?;
        self.is_committed = true;
        Ok(())
    }

    /// Removes the batch, once no sandbox of it is `creating` any more.
    pub fn finish(mut self) -> Result<(), Error> {
        self.staged.take().map_or(Ok(()), Staged::discard)
    }
}

impl Drop for Batch {
    /// A committed batch stays on disk: its sandboxes may still be `creating`.
    fn drop(&mut self) {
        if let Some(staged) = self.staged.take_if(|_| self.is_committed) {
            staged.keep();
        }
    }
}

impl Store {
    pub fn begin_batch(&self) -> Result<Batch, Error> {
        let id = BatchId::random()?;
        let staged = Staged::shell(&self.files, &self.layout, &id.as_staged())?;
        self.files.sync_dir(&self.layout.staging())?;
        Ok(Batch {
            id,
            staged: Some(staged),
            is_committed: false,
        })
    }

    /// Whether the sandboxes of a batch exist. `false` also after [`Batch::finish`], when none of
    /// them is `creating` any more.
    pub fn is_committed(&self, batch: &BatchId) -> Result<bool, Error> {
        let mark = self.layout.staging().join(batch.as_str()).join(COMMITTED);
        Ok(self.files.kind(&mark)?.is_some())
    }

    /// Whether a staging directory without an owner is a committed batch.
    pub(crate) fn is_batch(&self, staged: &Staged) -> Result<bool, Error> {
        Ok(self.files.kind(&staged.mark_path(COMMITTED))?.is_some())
    }

    /// Whether a sandbox of a committed batch is still `creating`, or cannot be read.
    pub(crate) fn is_needed(&self, batch: &BatchId) -> Result<bool, Error> {
        let needs_it = |sandbox: SandboxDir| {
            let is_member = sandbox.record().batch.as_ref() == Some(batch);
            let is_creating = |state: StateRecord| state.phase == Phase::Creating;
            is_member && sandbox.state().map_or(true, is_creating)
        };
        let listed = self.sandboxes()?.into_iter();
        Ok(listed
            .filter_map(|listed| listed.sandbox.ok())
            .any(needs_it))
    }
}
