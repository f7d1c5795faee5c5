//! Sandboxes at rest: a directory, a name that points at it, and a lock that says who owns it.
//!
//! ```text
//! create   stage S = staging/<id>, locked ──► fill S/tree, lock it ──► sync tree, staging
//!          ──► S/tree becomes sandboxes/<id>, sync ──► link its claim as names/sandboxes/<name>, sync
//!          ──► (the caller boots it) ──► set_state(anything but creating) ──► remove S
//! remove   stage S, sync ──► sandboxes/<id> becomes S/tree, sync ──► unlink the name if it is still ours, sync ──► remove S
//! ```
//!
//! Always: a name comes into being after its sandbox, and S outlives every half-made state, so whoever opens the store
//! after a crash finds S and needs to look nowhere else. A sandbox is owned from the moment it can be seen. Only its
//! owner changes it, by types: [`Owned`] holds the lock.
//!
//! When it fails: a failed `create` has undone itself. Where undoing fails, too (a failed sync forbids it), S stays,
//! its lock is free, and the next open removes sandbox and name. A failed `remove` has left the sandbox whole, or is
//! completed by the next open.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::disk::{check, overlay};
use crate::fs::{Kind, Lock, optional};
use crate::image::Arch;
use crate::publish::{self, Staged};
use crate::record::{self, Record};
use crate::{Digest, Error, Name, SandboxId, Store, lock};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    None,
    Isolated,
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccelChoice {
    Auto,
    Kvm,
    Tcg,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedPort {
    pub host: u16,
    pub guest: u16,
}

/// `sandbox.json`: what was asked for. Never changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRecord {
    pub schema: u64,
    pub id: SandboxId,
    pub name: Name,
    pub image: Name,
    pub image_digest: Digest,
    pub kernel_digest: Digest,
    pub arch: Arch,
    pub memory_bytes: u64,
    pub cpus: u32,
    pub disk_bytes: u64,
    pub network: Network,
    pub accel: AccelChoice,
    pub qemu_args: Vec<String>,
    pub ports: Vec<PublishedPort>,
    pub created_at_unix_ms: u64,
    pub auto_remove: bool,
}

impl SandboxRecord {
    pub const SCHEMA: u64 = 1;
}

impl Record for SandboxRecord {
    const SCHEMA: u64 = Self::SCHEMA;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Not yet a sandbox: if its owner dies now, it is removed.
    Creating,
    Starting,
    Running,
    Stopping,
    Stopped,
    /// The machine ended by itself.
    Crashed,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Creating => "creating",
            Phase::Starting => "starting",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
            Phase::Stopped => "stopped",
            Phase::Crashed => "crashed",
        })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pids {
    pub keeper: Option<u32>,
    pub qemu: Option<u32>,
}

/// `state.json`: what became of it. Replaced as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateRecord {
    pub schema: u64,
    pub phase: Phase,
    pub reason: Option<String>,
    /// The host boot it was written in: under another one, every process of it is gone.
    pub boot_id: Option<String>,
    pub pids: Pids,
    /// What its machine runs on, while it has one.
    #[serde(default)]
    pub accelerator: Option<String>,
    #[serde(default)]
    pub qemu_version: Option<String>,
    pub since_unix_ms: u64,
    /// The overlay was synced after its last write.
    pub clean: bool,
}

impl StateRecord {
    pub const SCHEMA: u64 = 1;

    pub fn new(phase: Phase, since_unix_ms: u64) -> Self {
        let (schema, pids) = (Self::SCHEMA, Pids::default());
        let (accelerator, qemu_version) = (None, None);
        Self {
            schema,
            phase,
            reason: None,
            boot_id: None,
            pids,
            accelerator,
            qemu_version,
            since_unix_ms,
            clean: false,
        }
    }
}

impl Record for StateRecord {
    const SCHEMA: u64 = Self::SCHEMA;
}

/// A sandbox's directory and what it was made as.
#[derive(Debug, Clone)]
pub struct SandboxDir {
    path: PathBuf,
    record: SandboxRecord,
    files: crate::fs::Files,
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

    pub fn console(&self) -> PathBuf {
        self.path.join("console.log")
    }

    pub fn execs(&self) -> PathBuf {
        self.path.join("execs")
    }

    pub fn keeper_socket(&self) -> PathBuf {
        self.path.join("keeper.sock")
    }

    pub fn overlay(&self, index: u32) -> PathBuf {
        self.path.join(format!("overlay-{index}.qcow2"))
    }

    pub fn state(&self) -> Result<StateRecord, Error> {
        record::read(&self.files, &self.path.join("state.json"))
    }

    /// Whether an overlay can be used, as it must be asked after a power loss. Reads its tables, not its data.
    pub fn check_overlay(&self, index: u32) -> Result<check::Verdict, Error> {
        check::file(&self.overlay(index))
    }
}

impl Store {
    /// Makes a sandbox in phase `Creating`, with its first overlay, and claims its name.
    pub fn create_sandbox(&self, record: SandboxRecord) -> Result<Owned, Error> {
        // A reference is a name or an id: one that could be both would hide a sandbox from those who ask for its id.
        if record.name.as_str() != record.id.as_str() && record.name.as_str().parse::<SandboxId>().is_ok() {
            return Err(Error::NameIsAnId { name: record.name });
        }
        if let Some(holder) = self.holder(&record.name)? {
            return Err(Error::NameTaken { name: record.name, holder });
        }
        let staged = Staged::new(&self.files, &self.layout, &record.id)?;
        let lock = self.fill(staged.path(), &record)?;
        publish::sync_tree(&self.files, staged.path())?;
        self.files.sync_dir(&self.layout.staging())?;
        if let Err(error) = self.show(staged.path(), &record) {
            publish::left_for_next_open(self.discard(&record.id, &record.name, staged));
            return Err(error);
        }
        let path = self.layout.sandbox(&record.id);
        let dir = SandboxDir { path, record, files: self.files.clone() };
        Ok(Owned { dir, birth: Some(staged), _lock: lock })
    }

    fn fill(&self, tree: &Path, sandbox: &SandboxRecord) -> Result<Lock, Error> {
        let state = StateRecord::new(Phase::Creating, sandbox.created_at_unix_ms);
        self.files.create(&tree.join("sandbox.json"), &record::canonical(sandbox))?;
        self.files.create(&tree.join("state.json"), &record::canonical(&state))?;
        self.files.create(&tree.join("claim"), format!("{}\n", sandbox.id).as_bytes())?;
        self.files.create(&tree.join("overlay-0.qcow2"), &overlay::empty(sandbox.disk_bytes)?)?;
        self.files.create_dir(&tree.join("execs"))?;
        self.files.try_lock(&tree.join("lock"))?.ok_or_else(|| Error::Busy { id: sandbox.id.clone() })
    }

    /// The two steps after which others see the sandbox: directory, then name.
    fn show(&self, tree: &Path, record: &SandboxRecord) -> Result<(), Error> {
        let dir = self.layout.sandbox(&record.id);
        self.files.rename_noreplace(tree, &dir)?;
        self.files.sync_dir(&self.layout.sandboxes())?;
        self.claim(&dir, record)
    }

    fn claim(&self, dir: &Path, record: &SandboxRecord) -> Result<(), Error> {
        let target = self.layout.sandbox_name(&record.name);
        loop {
            match self.files.hard_link(&dir.join("claim"), &target) {
                Err(error) if error.io_kind() == Some(io::ErrorKind::AlreadyExists) => {}
                linked => return linked.and_then(|()| self.files.sync_dir(&self.layout.sandbox_names())),
            }
            match self.holder(&record.name)? {
                Some(holder) => return Err(Error::NameTaken { name: record.name.clone(), holder }),
                None => self.release_if(&record.name, |holder| Ok(!self.is_sandbox(holder)?))?,
            }
        }
    }

    /// The sandbox a name points at. A name whose sandbox is gone is free.
    fn holder(&self, name: &Name) -> Result<Option<SandboxId>, Error> {
        match self.pointed_at(name)? {
            Some(id) if self.is_sandbox(&id)? => Ok(Some(id)),
            _ => Ok(None),
        }
    }

    fn pointed_at(&self, name: &Name) -> Result<Option<SandboxId>, Error> {
        let path = self.layout.sandbox_name(name);
        let Some(bytes) = self.files.read_if_exists(&path)? else { return Ok(None) };
        let text = std::str::from_utf8(&bytes).map_err(|error| Error::corrupt(&path, error))?;
        text.trim_end().parse().map(Some).map_err(|error| Error::corrupt(&path, error))
    }

    fn is_sandbox(&self, id: &SandboxId) -> Result<bool, Error> {
        Ok(self.files.kind(&self.layout.sandbox(id))? == Some(Kind::Dir))
    }

    /// Takes a name away from the sandbox it points at, if that sandbox deserves it.
    ///
    /// Names are only unlinked under the store's lock and only appear by link, which replaces nothing: what was looked
    /// at is what is unlinked.
    fn release_if(&self, name: &Name, deserved: impl Fn(&SandboxId) -> Result<bool, Error>) -> Result<(), Error> {
        let _store = lock::store(&self.files, &self.layout)?;
        let Some(holder) = self.pointed_at(name)? else { return Ok(()) };
        if deserved(&holder)? {
            self.files.remove_file(&self.layout.sandbox_name(name))?;
            self.files.sync_dir(&self.layout.sandbox_names())?;
        }
        Ok(())
    }

    /// Removes a sandbox, whatever of it exists, through a staging directory of its own.
    fn discard(&self, id: &SandboxId, name: &Name, shell: Staged) -> Result<(), Error> {
        let hidden = self.hide(id, &shell).and_then(|()| self.release_if(name, |holder| Ok(holder == id)));
        if hidden.is_err() {
            shell.keep();
        }
        hidden
    }

    fn hide(&self, id: &SandboxId, shell: &Staged) -> Result<(), Error> {
        self.files.sync_dir(&self.layout.staging())?;
        optional(self.files.rename_noreplace(&self.layout.sandbox(id), shell.path()))?;
        self.files.sync_dir(&self.layout.sandboxes())
    }

    /// Completes what a staging directory without a maker was for. True if it was a sandbox.
    pub(crate) fn finish_interrupted(&self, id: &SandboxId, staged: &Staged) -> Result<bool, Error> {
        if let Some(record) = self.explained(&staged.path().join("sandbox.json"))? {
            self.release_if(&record.name, |holder| Ok(holder == id))?;
            return Ok(true);
        }
        if !self.is_sandbox(id)? {
            return Ok(false);
        }
        let sandbox = self.sandbox_by_id(id)?;
        if sandbox.state()?.phase != Phase::Creating {
            return Ok(false);
        }
        let _lock = lock::try_sandbox(&self.files, &self.layout, id)?.ok_or_else(|| Error::Busy { id: id.clone() })?;
        self.hide(id, staged)?;
        self.release_if(&sandbox.record.name, |holder| Ok(holder == id))?;
        Ok(true)
    }

    /// A record in staging; one that is not whole was never synced, so no name can point at its sandbox.
    fn explained(&self, path: &Path) -> Result<Option<SandboxRecord>, Error> {
        match record::read(&self.files, path) {
            Err(Error::Corrupt { .. }) => Ok(None),
            record => optional(record),
        }
    }

    pub fn sandbox_by_id(&self, id: &SandboxId) -> Result<SandboxDir, Error> {
        let path = self.layout.sandbox(id);
        let record: Option<SandboxRecord> = optional(record::read(&self.files, &path.join("sandbox.json")))?;
        let record = record.ok_or_else(|| Error::UnknownSandbox { reference: id.to_string() })?;
        if record.id != *id {
            return Err(Error::corrupt(path, format!("it holds the record of {}", record.id)));
        }
        Ok(SandboxDir { path, record, files: self.files.clone() })
    }

    pub fn sandbox(&self, name: &Name) -> Result<SandboxDir, Error> {
        let unknown = || Error::UnknownSandbox { reference: name.to_string() };
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

    /// Every sandbox, by id.
    pub fn sandboxes(&self) -> Result<Vec<ListedSandbox>, Error> {
        let entries = self.files.list(&self.layout.sandboxes())?;
        let ids = entries.iter().filter_map(|entry| entry.name.to_str()?.parse::<SandboxId>().ok());
        let listed = ids.map(|id| ListedSandbox { sandbox: self.sandbox_by_id(&id), id });
        // One that went between the listing and the look was removed, which is no news.
        Ok(listed.filter(|listed| !matches!(listed.sandbox, Err(Error::UnknownSandbox { .. }))).collect())
    }

    /// Becomes the owner. `None` when another process is, or the sandbox has just gone.
    pub fn try_own(&self, sandbox: &SandboxDir) -> Result<Option<Owned>, Error> {
        let lock = lock::try_sandbox(&self.files, &self.layout, sandbox.id())?;
        Ok(lock.map(|lock| Owned { dir: sandbox.clone(), birth: None, _lock: lock }))
    }

    /// Removes a sandbox with its name. Nothing of it is left, and doing it again is no error.
    pub fn remove_sandbox(&self, mut owned: Owned) -> Result<(), Error> {
        let SandboxRecord { id, name, .. } = owned.record.clone();
        let shell = match owned.birth.take() {
            Some(birth) => birth,
            None => Staged::shell(&self.files, &self.layout, &id)?,
        };
        self.discard(&id, &name, shell)
    }
}

impl Owned {
    /// Replaces the state: a crash leaves the old one or the new one.
    pub fn set_state(&mut self, state: &StateRecord) -> Result<(), Error> {
        publish::replace(&self.files, &self.path.join("state.json"), &record::canonical(state))?;
        if state.phase != Phase::Creating {
            self.birth = None;
        }
        Ok(())
    }

    /// Makes an empty overlay beside the others. Not synced: an overlay is checked after a power loss anyway.
    pub fn create_overlay(&self, index: u32) -> Result<PathBuf, Error> {
        let path = self.overlay(index);
        self.files.create(&path, &overlay::empty(self.record.disk_bytes)?)?;
        Ok(path)
    }

    /// Makes everything written to an overlay durable.
    pub fn sync_overlay(&self, index: u32) -> Result<(), Error> {
        self.files.sync_file(&self.overlay(index))
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
