//! Sandboxes at rest: a directory, a name that points at it, and a lock that says who owns it.
//!
//! ```text
//! create   stage S = staging/<id>, locked ──► fill S/tree, lock it ──► sync tree, link the layers of its origin, sync
//!          ──► S/tree becomes sandboxes/<id>, sync ──► link its claim as names/sandboxes/<name>, sync
//!          ──► (the caller boots it) ──► set_state(anything but creating) ──► remove S
//! remove   stage S, sync ──► sandboxes/<id> becomes S/tree, sync ──► unlink the name if it is still ours, sync
//!          ──► remove its part of a memory directory, sync ──► remove S
//! ```
//!
//! Always: a name comes into being after its sandbox, and S outlives every half-made state, so the
//! next open after a crash finds S and needs to look nowhere else. A sandbox is owned from the
//! moment it can be seen. Only its owner changes it, by types: [`Owned`] holds the lock. A
//! directory `DIR/<id>` outside the store exists only while a durable record in S or in
//! `sandboxes/` names it.
//!
//! When it fails: a failed `create` has undone itself. Where undoing fails, too, S stays, its lock
//! is free, and the next open removes sandbox and name. A failed `remove` has left the sandbox
//! whole, or is completed by the next open.

mod batch;
mod collect;
mod create;
mod known;
mod mounts;
mod record;
mod states;
mod unpack;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub use batch::Batch;
pub use collect::Collected;
pub use create::Origin;
pub use record::{
    Ended, Expiry, ExpiryAction, Phase, Pids, SandboxRecord, SaveOnStop, SaveTarget, StateRecord,
};
pub use states::{DamagedLayer, HeldState, NewOverlay, StagedState, States, UnreadableState};

use self::known::Known;
use crate::fs::{Files, Kind, Lock, optional};
use crate::publish::{self, Staged};
use crate::{Error, Name, SandboxId, Store, lock};

/// A sandbox's directory and what it was made as.
#[derive(Debug, Clone)]
pub struct SandboxDir {
    path: PathBuf,
    record: SandboxRecord,
    files: Files,
    known: Known,
}

/// A directory below `sandboxes/`; one that cannot be read is listed with the reason.
#[derive(Debug)]
pub struct ListedSandbox {
    pub id: SandboxId,
    pub sandbox: Result<SandboxDir, Error>,
}

/// A sandbox of which this process is the owner, until dropped.
#[derive(Debug)]
pub struct Owned {
    dir: SandboxDir,
    /// What a crash during creation is recognised by; gone once the sandbox has left `Creating`.
    birth: Option<Staged>,
    /// As many more references as there are states being staged.
    staging: Arc<()>,
    /// The number of the newest state, once it was looked up: only the owner publishes states.
    newest: Mutex<Option<u64>>,
    _lock: Lock,
}

impl SandboxDir {
    pub fn id(&self) -> &SandboxId {
        &self.record.id
    }

    pub fn record(&self) -> &SandboxRecord {
        &self.record
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    #[cfg(test)]
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    pub fn console(&self) -> PathBuf {
        self.path.join("console.log")
    }

    pub fn execs(&self) -> PathBuf {
        self.path.join("execs")
    }

    pub fn keeper_socket(&self) -> PathBuf {
        self.path.join("keeper.sock")
    }

    /// What the commands had written that were running in the state it was made from.
    pub fn execs_of_origin(&self) -> PathBuf {
        self.path.join("execs-of-origin")
    }

    pub fn state(&self) -> Result<StateRecord, Error> {
        crate::record::read(&self.files, &self.path.join("state.json"))
    }
}

impl Store {
    /// The sandbox a name points at. A name whose sandbox is gone is free.
    fn holder(&self, name: &Name) -> Result<Option<SandboxId>, Error> {
        match self.pointed_at(name)? {
            Some(id) if self.is_sandbox(&id)? => Ok(Some(id)),
            _ => Ok(None),
        }
    }

    fn pointed_at(&self, name: &Name) -> Result<Option<SandboxId>, Error> {
        let path = self.layout.sandbox_name(name);
        let Some(bytes) = self.files.read_if_exists(&path)? else {
            return Ok(None);
        };
        let text = std::str::from_utf8(&bytes).map_err(|error| Error::corrupt(&path, error))?;
        text.trim_end()
            .parse()
            .map(Some)
            .map_err(|error| Error::corrupt(&path, error))
    }

    fn is_sandbox(&self, id: &SandboxId) -> Result<bool, Error> {
        Ok(self.files.kind(&self.layout.sandbox(id))? == Some(Kind::Dir))
    }

    /// Takes a name away from the sandbox it points at, if that sandbox deserves it.
    ///
    /// Names are only unlinked under the store's lock and only appear by link, which replaces
    /// nothing: what was looked at is what is unlinked.
    fn release_if(
        &self,
        name: &Name,
        deserved: impl Fn(&SandboxId) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let _store = lock::store(&self.files, &self.layout)?;
        let Some(holder) = self.pointed_at(name)? else {
            return Ok(());
        };
        if deserved(&holder)? {
            self.files.remove_file(&self.layout.sandbox_name(name))?;
            self.files.sync_dir(&self.layout.sandbox_names())?;
        }
        Ok(())
    }

    /// Removes a sandbox, whatever of it exists, through a staging directory of its own.
    fn discard(&self, record: &SandboxRecord, shell: Staged) -> Result<(), Error> {
        let gone = self
            .hide(&record.id, &shell)
            .and_then(|()| self.forget(record));
        if gone.is_err() {
            shell.keep();
        }
        gone
    }

    /// Removes what a hidden sandbox has outside its own directory.
    fn forget(&self, record: &SandboxRecord) -> Result<(), Error> {
        self.release_if(&record.name, |holder| Ok(*holder == record.id))?;
        let (Some(dir), Some(own)) = (&record.memory_dir, record.own_memory_dir()) else {
            return Ok(());
        };
        // A directory that is not there is one of a file system that is not mounted, or went with
        // the last boot.
        if self.files.kind(dir)? != Some(Kind::Dir) {
            return Ok(());
        }
        self.files.remove_tree(&own)?;
        self.files.sync_dir(dir)
    }

    fn hide(&self, id: &SandboxId, shell: &Staged) -> Result<(), Error> {
        self.files.sync_dir(&self.layout.staging())?;
        optional(
            self.files
                .rename_noreplace(&self.layout.sandbox(id), shell.path()),
        )?;
        self.files.sync_dir(&self.layout.sandboxes())
    }

    /// Completes what a staging directory without a maker was for. True if it was a sandbox.
    pub(crate) fn finish_interrupted(
        &self,
        id: &SandboxId,
        staged: &Staged,
    ) -> Result<bool, Error> {
        if let Some(record) = self.explained(id, &staged.path().join("sandbox.json"))? {
            self.forget(&record)?;
            return Ok(true);
        }
        if !self.is_sandbox(id)? {
            return Ok(false);
        }
        let sandbox = self.sandbox_by_id(id)?;
        let state = sandbox.state()?;
        if state.phase != Phase::Creating {
            // Its creation is over once that is durable, and not before.
            self.files.sync_dir(&sandbox.path)?;
            return Ok(false);
        }
        let lock = lock::try_sandbox(&self.files, &self.layout, id)?
            .ok_or_else(|| Error::Busy { id: id.clone() })?;
        if let Some(batch) = &sandbox.record.batch
            && self.is_committed(batch)?
        {
            let crashed = StateRecord {
                phase: Phase::Crashed,
                reason: Some("the process that created it died".into()),
                ..state
            };
            Owned::new(sandbox, None, lock).set_state(&crashed)?;
            return Ok(false);
        }
        self.hide(id, staged)?;
        self.forget(&sandbox.record)?;
        Ok(true)
    }

    /// A record in staging; one that is not whole was never synced, so its sandbox has nothing
    /// outside of it.
    fn explained(&self, id: &SandboxId, path: &Path) -> Result<Option<SandboxRecord>, Error> {
        match crate::record::read::<SandboxRecord>(&self.files, path) {
            Err(Error::Corrupt { .. }) => Ok(None),
            Ok(record) if record.id != *id => Err(Error::corrupt(
                path,
                format!("it is the record of {}", record.id),
            )),
            record => optional(record),
        }
    }

    pub fn sandbox_by_id(&self, id: &SandboxId) -> Result<SandboxDir, Error> {
        let path = self.layout.sandbox(id);
        let record: Option<SandboxRecord> =
            optional(crate::record::read(&self.files, &path.join("sandbox.json")))?;
        let record = record.ok_or_else(|| Error::UnknownSandbox {
            reference: id.to_string(),
        })?;
        if record.id != *id {
            return Err(Error::corrupt(
                path,
                format!("it holds the record of {}", record.id),
            ));
        }
        Ok(SandboxDir {
            path,
            record,
            files: self.files.clone(),
            known: Known::default(),
        })
    }

    pub fn sandbox(&self, name: &Name) -> Result<SandboxDir, Error> {
        let unknown = || Error::UnknownSandbox {
            reference: name.to_string(),
        };
        self.sandbox_by_id(&self.holder(name)?.ok_or_else(unknown)?)
    }

    /// By name, or else by id: what a user types.
    pub fn find_sandbox(&self, reference: &Name) -> Result<SandboxDir, Error> {
        match self.sandbox(reference) {
            Err(Error::UnknownSandbox { reference }) => match reference.parse() {
                Ok(id) => self.sandbox_by_id(&id),
                Err(_) => Err(Error::UnknownSandbox { reference }),
            },
            found => found,
        }
    }

    /// What is in `sandboxes/` under the name of an id.
    pub(crate) fn sandbox_ids(&self) -> Result<Vec<SandboxId>, Error> {
        let entries = self.files.list(&self.layout.sandboxes())?;
        Ok(entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse().ok())
            .collect())
    }

    /// Every sandbox, by id.
    pub fn sandboxes(&self) -> Result<Vec<ListedSandbox>, Error> {
        let listed = self.sandbox_ids()?.into_iter().map(|id| ListedSandbox {
            sandbox: self.sandbox_by_id(&id),
            id,
        });
        // One that went between the listing and the look was removed, which is no news.
        Ok(listed
            .filter(|listed| !matches!(listed.sandbox, Err(Error::UnknownSandbox { .. })))
            .collect())
    }

    /// Becomes the owner. `None` when another process is, or the sandbox has just gone.
    pub fn try_own(&self, sandbox: &SandboxDir) -> Result<Option<Owned>, Error> {
        let lock = lock::try_sandbox(&self.files, &self.layout, sandbox.id())?;
        Ok(lock.map(|lock| Owned::new(sandbox.clone(), None, lock)))
    }

    /// Removes a sandbox with its name. Nothing of it is left, and doing it again is no error.
    pub fn remove_sandbox(&self, mut owned: Owned) -> Result<(), Error> {
        let shell = match owned.birth.take() {
            Some(birth) => birth,
            None => Staged::shell(&self.files, &self.layout, owned.id())?,
        };
        self.discard(&owned.record, shell)
    }
}

impl Owned {
    fn new(dir: SandboxDir, birth: Option<Staged>, lock: Lock) -> Self {
        Self {
            dir,
            birth,
            staging: Arc::default(),
            newest: Mutex::default(),
            _lock: lock,
        }
    }

    /// Replaces the state: a crash leaves the old one or the new one.
    pub fn set_state(&mut self, state: &StateRecord) -> Result<(), Error> {
        publish::replace(
            &self.files,
            &self.path.join("state.json"),
            &crate::record::canonical(state),
        )?;
        if state.phase != Phase::Creating {
            self.birth = None;
        }
        Ok(())
    }
}

impl Deref for Owned {
    type Target = SandboxDir;

    fn deref(&self) -> &SandboxDir {
        &self.dir
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(birth) = self.birth.take() {
            birth.keep();
        }
    }
}
