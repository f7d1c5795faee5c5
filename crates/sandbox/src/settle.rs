//! Corrects the recorded state of sandboxes whose process died, and takes sandboxes at rest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sandtree_store::{Ended, Owned, Phase, SandboxDir, StateRecord};

use crate::blocking::{blocking, in_place};
use crate::error::{Error, Result, store_error};
use crate::files::remove_if_there;
use crate::inner::Inner;
use crate::moment::{boot_id, now_unix_ms};
use crate::publish;
use crate::verb::{Verb, has_machine, permits};

/// How long a keeper may take to end once its sandbox rests: it waits for its clients.
const KEEPER_LEAVES: Duration = Duration::from_secs(5);

const KEEPER_POLL: Duration = Duration::from_millis(5);

impl Inner {
    /// A sandbox with its real state.
    pub fn settled(&self, reference: &str) -> Result<(SandboxDir, StateRecord)> {
        let dir = self.find(reference)?;
        self.settle(dir)?.ok_or_else(|| Error::NoSandbox {
            name: reference.into(),
        })
    }

    /// Corrects the state of a sandbox whose owner died: the lock is free, and the record says that
    /// the sandbox runs. `None`: the sandbox was to be removed at its end, and now it is removed.
    pub fn settle(&self, dir: SandboxDir) -> Result<Option<(SandboxDir, StateRecord)>> {
        let state = dir.state().map_err(store_error("read a sandbox's state"))?;
        if !has_machine(state.phase) {
            self.remove_dead_socket(&dir)?;
            return Ok(Some((dir, state)));
        }
        let Some(mut owned) = self
            .store
            .try_own(&dir)
            .map_err(store_error("lock a sandbox"))?
        else {
            return Ok(Some((dir, state)));
        };
        // The owner may have ended in good order between the first read and the lock.
        let state = dir.state().map_err(store_error("read a sandbox's state"))?;
        if !has_machine(state.phase) {
            return Ok(Some((dir, state)));
        }
        // A sandbox that was to be saved first stays, because nothing else holds its data.
        if dir.record().auto_remove && dir.record().save_on_stop.is_none() {
            self.store
                .remove_sandbox(owned)
                .map_err(store_error("remove a sandbox"))?;
            return Ok(None);
        }
        let save_failed = dir
            .record()
            .save_on_stop
            .as_ref()
            .map(|_| "its keeper was gone before it could".to_owned());
        let (ended, reason) = death(&state);
        let state = StateRecord {
            reason: Some(reason),
            ended: Some(ended),
            save_failed,
            ..state.followed_by(Phase::Crashed, now_unix_ms())
        };
        remove_if_there(&dir.keeper_socket())?;
        // If the write fails, on a full disk for example, the next call corrects the state again.
        if let Err(error) = owned.set_state(&state) {
            tracing::warn!(%error, "the end of a sandbox cannot be recorded");
        }
        Ok(Some((dir, state)))
    }

    /// Removes the socket of a keeper that died when its sandbox was at rest already.
    fn remove_dead_socket(&self, dir: &SandboxDir) -> Result<()> {
        let socket = dir.keeper_socket();
        if socket.symlink_metadata().is_err() {
            return Ok(());
        }
        // A keeper that lives has the lock.
        let owned = self.store.try_own(dir);
        match owned.map_err(store_error("lock a sandbox"))? {
            Some(_owned) => remove_if_there(&socket),
            None => Ok(()),
        }
    }

    /// Locks a sandbox that no process runs. A keeper holds the lock for a moment after its sandbox
    /// has stopped, so this waits for it.
    pub async fn own(&self, reference: &str, verb: Verb) -> Result<Owned> {
        let end = Instant::now() + KEEPER_LEAVES;
        loop {
            let (dir, state) = in_place(|| self.settled(reference))?;
            let name = dir.record().name.to_string();
            if !permits(state.phase, verb) || state.phase == Phase::Running {
                return Err(Error::WrongState {
                    name,
                    phase: state.phase,
                    reason: state.further_reason(),
                    verb,
                });
            }
            let owned = in_place(|| self.store.try_own(&dir));
            match owned.map_err(store_error("lock a sandbox"))? {
                Some(owned) => return Ok(owned),
                None if Instant::now() > end => return Err(Error::Busy { name }),
                None => tokio::time::sleep(KEEPER_POLL).await,
            }
        }
    }

    pub async fn remove(self: &Arc<Self>, owned: Owned) -> Result<()> {
        let host = self.clone();
        let removed = blocking(move || {
            publish::release_target(&owned);
            host.store.remove_sandbox(owned)
        });
        removed.await.map_err(store_error("remove a sandbox"))
    }
}

/// Why a sandbox's owner is gone, as far as its last state shows.
fn death(state: &StateRecord) -> (Ended, String) {
    match (&state.boot_id, state.pids.keeper) {
        (Some(boot), _) if *boot != boot_id() => {
            let reason = "the host went down while it ran";
            (Ended::HostWentDown, reason.into())
        }
        (_, Some(pid)) => {
            let reason = format!("its keeper, process {pid}, died");
            (Ended::OwnerDied, reason)
        }
        (_, None) => (Ended::OwnerDied, "the process that ran it died".into()),
    }
}
