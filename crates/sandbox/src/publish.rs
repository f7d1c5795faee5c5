//! Publishing a state as a snapshot, under a name or in a directory.
//!
//! Always: the earlier snapshot of a name stays whole until the new one is complete. When it fails,
//! or its caller stops waiting: the name is unchanged, and nothing of the snapshot is left. A
//! snapshot that replaced another one stays.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use sandtree_store::{
    self as store, Consistency, Digest, LayerId, MemoryState, Name, Named, Phase, Pinned,
    SandboxDir, SandboxId, SaveOnStop, SaveTarget, Snapshot, StateId, StateManifest, Target,
};

use crate::chain::Disk;
use crate::degradation::Degradation;
use crate::error::{Error, NameHolder, Result, store_error};
use crate::fault::Step;
use crate::held::Held;
use crate::image::is_built_in;
use crate::inner::Inner;
use crate::machine::restore::check_written;
use crate::moment::now_unix_ms;
use crate::order::LentState;
use crate::progress::{Progress, Watched};
use crate::states::Replace;

/// How a state becomes a snapshot.
pub(crate) struct Publishing {
    pub target: SaveTarget,
    pub replace: bool,
    pub labels: BTreeMap<String, String>,
    pub compress: bool,
}

impl Publishing {
    /// `save` writes the snapshot into the store.
    fn publish(
        &self,
        host: &Inner,
        progress: &dyn store::Progress,
        save: impl FnOnce(Target<'_>) -> Result<Pinned, store::Error>,
    ) -> Result<Snapshot, store::Error> {
        match &self.target {
            SaveTarget::Name(name) => {
                let target = Target::Name {
                    name,
                    replace: self.replace,
                };
                let pinned = host.replacing(name, || save(target))?;
                Ok(Snapshot::clone(&pinned))
            }
            SaveTarget::Dir(path) => {
                let pinned = save(Target::Unnamed)?;
                let written = host.store.export_dir(&pinned, path, self.replace, progress);
                let snapshot = Snapshot::clone(&pinned);
                // The directory is complete, or nothing is left.
                written.and(host.store.let_go(pinned)).map(|()| snapshot)
            }
        }
    }
}

/// A snapshot that was published. Dropping it before [`keep`](Self::keep) removes it again, unless
/// it replaced another one.
pub(crate) struct Published {
    host: Arc<Inner>,
    target: SaveTarget,
    snapshot: Snapshot,
    is_kept: bool,
}

impl Published {
    pub fn keep(mut self) -> Snapshot {
        self.is_kept = true;
        self.snapshot.clone()
    }

    fn remove(&self) -> Result<(), store::Error> {
        let store = &self.host.store;
        match &self.target {
            SaveTarget::Dir(path) => store::Store::remove_dir_snapshot(path),
            SaveTarget::Name(name) => match store.named(name)? {
                Some(Named::Snapshot(digest)) if digest == self.snapshot.digest => {
                    store.remove_snapshot_name(name).map(drop)
                }
                // Another program has moved the name meanwhile.
                _ => Ok(()),
            },
        }
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        if !self.is_kept
            && let Err(error) = self.remove()
        {
            tracing::warn!(%error, "a snapshot whose caller stopped waiting stays");
        }
    }
}

impl Inner {
    /// Refuses a taken name before anything is done for it. Publishing checks again. A name that is
    /// reserved for the saved sandbox is free to it.
    pub fn check_free(
        &self,
        target: &SaveTarget,
        replace: Replace,
        by: Option<&SandboxId>,
    ) -> Result<()> {
        let name = match target {
            SaveTarget::Name(name) => name,
            SaveTarget::Dir(path) => return check_dir(path, replace.is_yes()),
        };
        let taken = |by: &Named| {
            Err(Error::SnapshotNameTaken {
                name: name.to_string(),
                by: by.clone().into(),
            })
        };
        match self.store.named(name).map_err(store_error("read a name"))? {
            Some(Named::Snapshot(_)) if replace.is_yes() => Ok(()),
            Some(Named::Reserved(id)) if by == Some(&id) => Ok(()),
            Some(held) => taken(&held),
            None if is_built_in(name.as_str()) => Err(Error::invalid(
                "snapshot name",
                name,
                "an image is built in",
            )),
            None => Ok(()),
        }
    }

    /// An existing state.
    pub fn promoted(&self, dir: &SandboxDir, reference: &str) -> Result<LentState> {
        let manifest = self.listed_state(dir, reference)?;
        check_written(
            &dir.state_source(&manifest.id)
                .map_err(store_error("read a state"))?,
        )?;
        let consistency = match manifest.memory {
            MemoryState::None => disk_consistency(self, dir, &manifest.disk)?,
            _ => Consistency::Exact,
        };
        let state = manifest.id.to_string();
        let degraded = Degradation::list(&manifest.degraded);
        Ok(LentState {
            state,
            pause_ms: 0.0,
            degraded,
            consistency,
            disk_only: false,
        })
    }

    /// A state that users see, by tag or id.
    pub fn listed_state(&self, dir: &SandboxDir, reference: &str) -> Result<StateManifest> {
        let states = dir
            .states()
            .map_err(store_error("list the states of a sandbox"))?;
        let is_meant = |state: &StateManifest| {
            let tagged = state
                .tag
                .as_ref()
                .is_some_and(|tag| tag.as_str() == reference);
            state.kind.is_listed() && (tagged || state.id.as_str() == reference)
        };
        let no_state = || Error::NoState {
            name: dir.record().name.to_string(),
            state: reference.into(),
        };
        states
            .readable
            .into_iter()
            .rfind(is_meant)
            .ok_or_else(no_state)
    }

    pub async fn publish(
        self: &Arc<Self>,
        dir: SandboxDir,
        publishing: Publishing,
        lent: &LentState,
        progress: Progress,
    ) -> Result<Published> {
        self.reach(Step::SavePublish, None)?;
        let (state, spec) = saving(&dir, publishing.labels.clone(), publishing.compress, lent)?;
        let host = self.clone();
        let published = Watched::run_to_end(progress, move |progress| {
            let snapshot = publishing.publish(&host, progress, |target| {
                host.store.save(&dir, &state, &spec, target, progress)
            })?;
            Ok(Published {
                is_kept: publishing.replace,
                target: publishing.target,
                snapshot,
                host,
            })
        });
        published.await.map_err(name_error)
    }

    /// Moves a name to another snapshot. The earlier one is removed if it has no other name.
    pub fn replacing<T>(
        &self,
        name: &Name,
        give: impl FnOnce() -> Result<T, store::Error>,
    ) -> Result<T, store::Error> {
        let before = self.store.named(name)?;
        let given = give()?;
        if let Some(Named::Snapshot(digest)) = before
            && let Err(error) = self
                .store
                .pin(&digest)
                .and_then(|pinned| self.store.let_go(pinned))
        {
            tracing::warn!(%error, "a snapshot that was replaced stays until the next gc");
        }
        Ok(given)
    }

    /// A snapshot without a name, which exists as long as the result.
    pub async fn unnamed(
        self: &Arc<Self>,
        dir: SandboxDir,
        lent: &LentState,
        progress: Progress,
    ) -> Result<Held> {
        let (state, spec) = saving(&dir, BTreeMap::new(), false, lent)?;
        let host = self.clone();
        let saved = Watched::run(progress, move |progress| {
            host.store
                .save(&dir, &state, &spec, Target::Unnamed, progress)
        });
        Ok(Held::for_one_use(saved.await.map_err(name_error)?, self))
    }
}

/// The store's settings for a save.
fn saving(
    dir: &SandboxDir,
    labels: BTreeMap<String, String>,
    compress: bool,
    lent: &LentState,
) -> Result<(StateId, store::SaveSpec)> {
    let no_state = || Error::NoState {
        name: dir.record().name.to_string(),
        state: lent.state.clone(),
    };
    let spec = store::SaveSpec {
        labels,
        consistency: lent.consistency,
        parent: dir.record().snapshot.clone(),
        created_at_unix_ms: now_unix_ms(),
        compress,
        disk_only: lent.disk_only,
        degraded: Degradation::texts(&lent.degraded),
        writer_runs: dir
            .state()
            .map_err(store_error("read a sandbox's state"))?
            .phase
            == Phase::Running,
    };
    Ok((lent.state.parse().map_err(|_| no_state())?, spec))
}

/// A taken name is the user's error, not the store's.
pub(crate) fn name_error(error: store::Error) -> Error {
    match error {
        store::Error::NameInUse { name, holder } => Error::SnapshotNameTaken {
            name: name.to_string(),
            by: holder.into(),
        },
        error => store_error("save a snapshot")(error),
    }
}

/// Reserves, at the start, the name that a sandbox will be saved under when it stops. `before` is
/// its last save.
pub(crate) fn settle_target(host: &Inner, dir: &SandboxDir, before: Option<&Digest>) -> Result<()> {
    let Some(wish) = &dir.record().save_on_stop else {
        return Ok(());
    };
    if is_own(host, wish, before)? {
        return Ok(());
    }
    host.check_free(&wish.target, wish.replace.into(), Some(dir.id()))?;
    match &wish.target {
        SaveTarget::Name(name) => {
            match host.store.named(name).map_err(store_error("read a name"))? {
                // It will be replaced at the stop.
                Some(Named::Snapshot(_)) => Ok(()),
                _ => host.store.reserve_name(name, dir.id()).map_err(name_error),
            }
        }
        SaveTarget::Dir(path) => match std::fs::create_dir(path) {
            // It is the sandbox's own, from an earlier start; or it may be replaced.
            Err(error)
                if error.kind() == std::io::ErrorKind::AlreadyExists
                    && (before.is_some() || wish.replace) =>
            {
                Ok(())
            }
            made => made.map_err(|e| Error::io("make directory", path, e)),
        },
    }
}

/// A removed sandbox leaves no empty directory for its save.
pub(crate) fn release_target(dir: &SandboxDir) {
    if let Some(SaveOnStop {
        target: SaveTarget::Dir(path),
        ..
    }) = &dir.record().save_on_stop
    {
        // A directory that is not empty is not removed, as intended.
        drop(std::fs::remove_dir(path));
    }
}

/// Whether the target of a save has the sandbox's last save.
fn is_own(host: &Inner, wish: &SaveOnStop, before: Option<&Digest>) -> Result<bool> {
    let Some(before) = before else {
        return Ok(false);
    };
    Ok(match &wish.target {
        SaveTarget::Name(name) => {
            host.store.named(name).map_err(store_error("read a name"))?
                == Some(Named::Snapshot(before.clone()))
        }
        SaveTarget::Dir(path) => {
            store::Store::read_dir_snapshot(path).is_ok_and(|found| found.digest == *before)
        }
    })
}

/// Accepts a missing or empty directory, or a snapshot's that may be replaced.
fn check_dir(path: &Path, replace: bool) -> Result<()> {
    match path.read_dir().map(|mut entries| entries.next().is_none()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("look at", path, error)),
        Ok(true) => Ok(()),
        Ok(false) if replace && store::Store::read_dir_snapshot(path).is_ok() => Ok(()),
        Ok(false) if replace => Err(Error::invalid(
            "directory to save to",
            path.display(),
            "new, or empty, or one of a snapshot",
        )),
        Ok(false) => Err(Error::SnapshotNameTaken {
            name: path.display().to_string(),
            by: NameHolder::Files,
        }),
    }
}

/// Saves a sandbox that has just stopped. `before` is its last save.
pub(crate) async fn on_stop(
    host: &Arc<Inner>,
    dir: &SandboxDir,
    wish: &SaveOnStop,
    lent: &LentState,
    before: Option<&Digest>,
) -> Result<Digest> {
    let publishing = Publishing {
        target: wish.target.clone(),
        replace: wish.replace || is_own(host, wish, before)?,
        labels: wish.labels.clone(),
        compress: wish.compress,
    };
    let published = host
        .publish(dir.clone(), publishing, lent, Progress::silent())
        .await?;
    Ok(published.keep().digest)
}

/// The consistency of a disk without a machine: shut down, or as after a power cut. An unreadable
/// disk was not shut down.
pub(crate) fn disk_consistency(
    host: &Inner,
    dir: &SandboxDir,
    disk: &[LayerId],
) -> Result<Consistency> {
    let chain = host.chain(dir, disk)?;
    let is_clean = sandtree_diff::is_clean(&Disk(&chain)).unwrap_or(false);
    Ok(if is_clean {
        Consistency::Stopped
    } else {
        Consistency::Crash
    })
}
