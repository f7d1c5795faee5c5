//! Making a sandbox: from its image, from a state, or from a snapshot (see `unpack`).
//!
//! From a state, it gets links to every layer that the state lists and an overlay of its own on
//! top, so it needs nothing of where it came from any more. The layers themselves are not synced
//! here: a sealed state's are durable already, and a machine that continues from another state
//! would not outlive a power loss either.

use std::io;
use std::path::Path;

use super::known::Known;
use super::{Owned, Phase, SandboxDir, SandboxRecord, StateRecord};
use crate::disk::overlay;
use crate::fs::{Kind, Lock, cannot_link};
use crate::publish::{self, Staged};
use crate::record::canonical;
use crate::state::{Sealed, disk_file, memory_file};
use crate::{Error, Head, LayerId, SandboxId, Snapshot, StateSource, Store};

/// What a sandbox begins as.
#[derive(Debug, Clone, Copy)]
pub enum Origin<'a> {
    /// Its image, with nothing written yet.
    Image,
    State(&'a StateSource),
    /// The disk of a snapshot; with `memory`, also a state to continue from,
    /// [`Snapshot::state_id`].
    Snapshot {
        snapshot: &'a Snapshot,
        memory: bool,
    },
}

impl Origin<'_> {
    fn disk_bytes(&self, record: &SandboxRecord) -> u64 {
        match self {
            Self::Image => record.disk_bytes,
            Self::State(source) => source.manifest().disk_bytes,
            // A machine that continues from its memory knows the size of its disk.
            Self::Snapshot {
                snapshot,
                memory: true,
            } => snapshot.manifest.disk.bytes,
            Self::Snapshot { memory: false, .. } => record.disk_bytes,
        }
    }

    /// A disk is never cut.
    fn check_disk(&self, record: &SandboxRecord) -> Result<(), Error> {
        match self {
            Self::Snapshot { snapshot, .. } if record.disk_bytes < snapshot.manifest.disk.bytes => {
                Err(Error::DiskSize {
                    bytes: record.disk_bytes,
                    rule: "the disk of the snapshot is larger",
                })
            }
            _ => Ok(()),
        }
    }

    /// The head of a sandbox whose own overlay is `active`.
    fn head(&self, active: LayerId) -> Head {
        match self {
            Self::Image => Head::new(None, vec![active]),
            Self::State(source) => {
                let manifest = source.manifest();
                let disk = manifest.disk.iter().cloned().chain([active]).collect();
                Head {
                    mounts: manifest.mounts.clone(),
                    ..Head::new(manifest.listed_ancestor().cloned(), disk)
                }
            }
            Self::Snapshot { snapshot, .. } => {
                let layers = snapshot
                    .manifest
                    .disk
                    .layers
                    .iter()
                    .map(|layer| LayerId::of(&layer.digest));
                Head {
                    mounts: snapshot.manifest.mounts.clone(),
                    ..Head::new(None, layers.chain([active]).collect())
                }
            }
        }
    }
}

impl Store {
    /// Makes a sandbox in phase `Creating`, with an overlay of its own, and claims its name.
    pub fn create_sandbox(
        &self,
        record: SandboxRecord,
        origin: Origin<'_>,
    ) -> Result<Owned, Error> {
        self.check_asked_for(&record)?;
        origin.check_disk(&record)?;
        let staged = Staged::new(&self.files, &self.layout, &record.id)?;
        let lock = match self.fill(&staged, &record, origin) {
            Ok(lock) => lock,
            Err(error) => return Err(self.undo(&record, staged, error)),
        };
        if let Err(error) = self.show(staged.path(), &record) {
            return Err(self.undo(&record, staged, error));
        }
        let path = self.layout.sandbox(&record.id);
        let dir = SandboxDir {
            path,
            record,
            files: self.files.clone(),
            known: Known::default(),
        };
        Ok(Owned::new(dir, Some(staged), lock))
    }

    fn check_asked_for(&self, record: &SandboxRecord) -> Result<(), Error> {
        // A reference is a name or an id: one that could be both would hide a sandbox from those
        // who ask for its id.
        if record.name.as_str() != record.id.as_str()
            && record.name.as_str().parse::<SandboxId>().is_ok()
        {
            return Err(Error::NameIsAnId {
                name: record.name.clone(),
            });
        }
        if let Some(holder) = self.holder(&record.name)? {
            return Err(Error::NameTaken {
                name: record.name.clone(),
                holder,
            });
        }
        self.check_memory_dir(record)
    }

    /// Whatever has the sandbox's name there now is not ours, and must not be taken for it later.
    fn check_memory_dir(&self, record: &SandboxRecord) -> Result<(), Error> {
        let (Some(dir), Some(own)) = (&record.memory_dir, record.own_memory_dir()) else {
            return Ok(());
        };
        let rule = if !dir.is_absolute() {
            "it is not an absolute path"
        } else if self.files.kind(dir)? != Some(Kind::Dir) {
            "it is not an existing directory"
        } else if self.files.kind(&own)?.is_some() {
            "something has the id of the new sandbox there"
        } else {
            return Ok(());
        };
        Err(Error::MemoryDir {
            path: dir.clone(),
            rule,
        })
    }

    fn undo(&self, record: &SandboxRecord, staged: Staged, error: Error) -> Error {
        publish::left_for_next_open(self.discard(record, staged));
        error
    }

    fn fill(
        &self,
        staged: &Staged,
        record: &SandboxRecord,
        origin: Origin<'_>,
    ) -> Result<Lock, Error> {
        let tree = staged.path();
        // Visible only when whole: collecting images looks for what sandboxes in the making
        // need.
        publish::create_whole(&self.files, &tree.join("sandbox.json"), &canonical(record))?;
        self.make_memory_dir(staged, record)?;
        let state = StateRecord::new(Phase::Creating, record.created_at_unix_ms);
        self.files
            .create(&tree.join("state.json"), &canonical(&state))?;
        self.files
            .create(&tree.join("claim"), format!("{}\n", record.id).as_bytes())?;
        self.files.create_dir(&tree.join("execs"))?;
        self.files.create_dir(&tree.join("states"))?;
        self.fill_disk(tree, record, origin)?;
        let lock = self
            .files
            .try_lock(&tree.join("lock"))?
            .ok_or_else(|| Error::Busy {
                id: record.id.clone(),
            })?;
        publish::sync_tree(&self.files, tree)?;
        match origin {
            Origin::Image => {}
            Origin::State(source) => self.share(tree, record, source)?,
            Origin::Snapshot { snapshot, memory } => self.unpack(tree, record, snapshot, memory)?,
        }
        self.files.sync_dir(&self.layout.staging())?;
        Ok(lock)
    }

    /// The record that names a directory outside the store is durable before there is one.
    fn make_memory_dir(&self, staged: &Staged, record: &SandboxRecord) -> Result<(), Error> {
        let Some(own) = record.own_memory_dir() else {
            return self.files.create_dir(&staged.path().join("memory"));
        };
        staged.announce()?;
        self.files.create_dir(&own)?;
        self.files.sync_dir(publish::parent(&own))
    }

    fn fill_disk(
        &self,
        tree: &Path,
        record: &SandboxRecord,
        origin: Origin<'_>,
    ) -> Result<(), Error> {
        let disks = tree.join("disks");
        let active = LayerId::random()?;
        self.files.create_dir(&disks)?;
        self.files.create(
            &disks.join(disk_file(&active)),
            &overlay::empty(origin.disk_bytes(record))?,
        )?;
        self.files
            .create(&tree.join("head.json"), &canonical(&origin.head(active)))
    }

    fn share(
        &self,
        tree: &Path,
        record: &SandboxRecord,
        source: &StateSource,
    ) -> Result<(), Error> {
        let disks = tree.join("disks");
        let memory = record
            .own_memory_dir()
            .unwrap_or_else(|| tree.join("memory"));
        for layer in &source.manifest().disk {
            self.files
                .share(&source.disk_layer(layer), &disks.join(disk_file(layer)))?;
        }
        for layer in source.manifest().memory.layers() {
            self.files.share(
                &source.memory_layer(layer),
                &memory.join(memory_file(layer)),
            )?;
        }
        self.files
            .share_tree(&source.execs(), &tree.join("execs-of-origin"))?;
        self.keep_digests(tree, source)?;
        [&disks, &memory, tree]
            .into_iter()
            .try_for_each(|dir| self.files.sync_dir(dir))
    }

    /// What the origin's seal knows of layers need not be found out again by the seals of the new
    /// sandbox.
    fn keep_digests(&self, tree: &Path, source: &StateSource) -> Result<(), Error> {
        let Some(sealed) = source.sealed()? else {
            return Ok(());
        };
        let path = tree.join("origin.json");
        self.files
            .create(&path, &canonical(&Sealed::new(sealed.layers().collect())))?;
        self.files.sync_file(&path)
    }

    /// The two steps after which others see the sandbox: directory, then name.
    fn show(&self, tree: &Path, record: &SandboxRecord) -> Result<(), Error> {
        let dir = self.layout.sandbox(&record.id);
        self.files.rename_noreplace(tree, &dir)?;
        self.files.sync_dir(&self.layout.sandboxes())?;
        self.claim(&dir, record)
    }

    /// Makes a name that must not be there yet, with its content or not at all.
    fn point(&self, dir: &Path, target: &Path) -> Result<(), Error> {
        let claim = dir.join("claim");
        match self.files.hard_link(&claim, target) {
            Err(error) if cannot_link(&error) => {
                let copy = dir.join("claim.new");
                self.files.remove_tree(&copy)?;
                self.files.create(&copy, &self.files.read(&claim)?)?;
                self.files.sync_file(&copy)?;
                self.files.rename_noreplace(&copy, target)
            }
            linked => linked,
        }
    }

    fn claim(&self, dir: &Path, record: &SandboxRecord) -> Result<(), Error> {
        let target = self.layout.sandbox_name(&record.name);
        loop {
            match self.point(dir, &target) {
                Err(error) if error.io_kind() == Some(io::ErrorKind::AlreadyExists) => {}
                linked => {
                    return linked.and_then(|()| self.files.sync_dir(&self.layout.sandbox_names()));
                }
            }
            match self.holder(&record.name)? {
                Some(holder) => {
                    return Err(Error::NameTaken {
                        name: record.name.clone(),
                        holder,
                    });
                }
                None => self.release_if(&record.name, |holder| Ok(!self.is_sandbox(holder)?))?,
            }
        }
    }
}
