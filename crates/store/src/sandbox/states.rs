//! The head and the states of a sandbox.
//!
//! ```text
//! layer files written ──► stage_state, its files written ──► set_head (the captured overlay is no longer active)
//!                     ──► publish_state: seen, not durable ──► seal_state: durable
//! remove_state: states/<id> becomes states/.<id>, sync ──► removed; its layers are left for `collect`
//! ```
//!
//! Always: under its final name a state is complete for every process that looks. The head on disk
//! never lists a layer that is not in `disks/`. Layers that nothing lists are garbage, not damage.
//!
//! When it fails: a state that was not published leaves a name that starts with '.', or nothing.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use super::{Owned, SandboxDir};
use crate::disk::{check, header, overlay};
use crate::fs::{Entry, Files, Kind, Lock, io_error, optional};
use crate::state::{Digests, Places, Sealed, disk_file, memory_file};
use crate::{Error, Head, LayerId, StateId, StateManifest, StateSource, publish, record};

/// Enough for an overlay, a head, and what a guest writes before there is room again.
const RESERVE_BYTES: usize = 1 << 20;

/// The beginning of the name of a file that a process has locked which uses the state.
const HELD: &str = "held.";

/// Every state of a sandbox.
#[derive(Debug, Default)]
pub struct States {
    /// In the order of their capture.
    pub readable: Vec<StateManifest>,
    /// By id.
    pub unreadable: Vec<UnreadableState>,
}

/// A state that exists and cannot be read, and why.
#[derive(Debug)]
pub struct UnreadableState {
    pub id: StateId,
    pub error: Error,
}

/// A layer of the head that cannot be used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedLayer {
    pub layer: LayerId,
    pub damage: check::Damage,
}

/// An overlay in the making, under the name it keeps.
#[derive(Debug)]
pub struct NewOverlay {
    files: Files,
    id: LayerId,
    path: PathBuf,
    file: File,
}

impl NewOverlay {
    pub fn id(&self) -> &LayerId {
        &self.id
    }

    /// To write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Makes everything written to it durable. Its name is durable with the next head.
    pub fn sync(&self) -> Result<(), Error> {
        self.files.sync_file(&self.path)
    }

    pub fn discard(self) -> Result<(), Error> {
        self.files.remove_tree(&self.path)
    }
}

/// A state that stays while this lives, whatever becomes of the sandbox's owner.
#[derive(Debug)]
pub struct HeldState {
    files: Files,
    mark: PathBuf,
    _lock: Lock,
}

impl Drop for HeldState {
    fn drop(&mut self) {
        // A mark that is not locked means nothing.
        publish::left_for_next_open(self.files.remove_file(&self.mark));
    }
}

/// A state in the making. Dropping it removes it.
#[derive(Debug)]
pub struct StagedState {
    files: Files,
    path: PathBuf,
    published: bool,
    /// While it lives, `collect` leaves unfinished states alone.
    _staging: Arc<()>,
}

impl StagedState {
    /// The directory to put `devices` and `execs/` in.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StagedState {
    fn drop(&mut self) {
        if !self.published {
            publish::left_for_next_open(self.files.remove_tree(&self.path));
        }
    }
}

impl SandboxDir {
    pub fn head(&self) -> Result<Head, Error> {
        let path = self.path.join("head.json");
        let head: Head = record::read(&self.files, &path)?;
        if head.disk.is_empty() {
            return Err(Error::corrupt(path, "it lists no disk"));
        }
        Ok(head)
    }

    pub fn disk_layer(&self, layer: &LayerId) -> PathBuf {
        self.disks().join(disk_file(layer))
    }

    pub fn memory_layer(&self, layer: &LayerId) -> PathBuf {
        self.memory().join(memory_file(layer))
    }

    /// The size of the disk that a guest sees through an overlay.
    pub fn disk_bytes(&self, layer: &LayerId) -> Result<u64, Error> {
        let path = self.disk_layer(layer);
        let start = self.files.read_start::<{ header::LEN }>(&path)?;
        let layout = header::parse(&start).map_err(|damage| Error::corrupt(path, damage))?;
        Ok(layout.size)
    }

    /// Whether nothing was ever written to an overlay.
    pub fn is_empty_overlay(&self, layer: &LayerId) -> Result<bool, Error> {
        let path = self.disk_layer(layer);
        overlay::is_empty(&mut *self.files.open(&path)?).map_err(io_error("read", &path))
    }

    /// Whether an overlay can be used, as it must be asked after a power loss. Reads its tables,
    /// not its data.
    pub fn check_overlay(&self, layer: &LayerId) -> Result<check::Verdict, Error> {
        check::file(&self.disk_layer(layer))
    }

    /// The layers of the head that cannot be used. Reads their tables, not their data.
    pub fn check_chain(&self) -> Result<Vec<DamagedLayer>, Error> {
        let mut damaged = Vec::new();
        for layer in self.head()?.disk {
            if let check::Verdict::Corrupt(damage) = self.check_overlay(&layer)? {
                damaged.push(DamagedLayer { layer, damage });
            }
        }
        Ok(damaged)
    }

    pub fn states(&self) -> Result<States, Error> {
        let mut found = States::default();
        let ids = self.state_ids()?;
        self.known.keep(&ids);
        for id in ids {
            match self.listed_manifest(&id) {
                Ok(manifest) => found.readable.push(manifest),
                // One that went between the listing and the look was removed, which is no news.
                Err(Error::UnknownState { .. }) => {}
                Err(error) => found.unreadable.push(UnreadableState { id, error }),
            }
        }
        found.readable.sort_by(|a, b| a.order().cmp(&b.order()));
        Ok(found)
    }

    fn listed_manifest(&self, id: &StateId) -> Result<StateManifest, Error> {
        let file = optional(self.files.stat(&self.state_path(id).join("manifest.json")))?;
        let Some(file) = file else {
            return self.manifest(id);
        };
        if let Some(manifest) = self.known.get(id, file) {
            return Ok(manifest);
        }
        let manifest = self.manifest(id)?;
        self.known.add(file, &manifest);
        Ok(manifest)
    }

    pub fn manifest(&self, id: &StateId) -> Result<StateManifest, Error> {
        Ok(self.state_source(id)?.manifest().clone())
    }

    /// A state with its files, as machines and other sandboxes are made from it.
    pub fn state_source(&self, id: &StateId) -> Result<StateSource, Error> {
        let own = self.state_path(id);
        if self.files.kind(&own)?.is_none() {
            return Err(Error::UnknownState {
                sandbox: self.id().clone(),
                state: id.clone(),
            });
        }
        let source = StateSource::read(
            &self.files,
            Places {
                own,
                disks: self.disks(),
                memory: self.memory(),
            },
        )?;
        if source.manifest().id != *id {
            let found = &source.manifest().id;
            return Err(Error::corrupt(
                self.state_path(id),
                format!("it holds the manifest of {found}"),
            ));
        }
        Ok(source)
    }

    pub fn state_devices(&self, id: &StateId) -> PathBuf {
        self.state_path(id).join("devices")
    }

    /// Whether a state survives a power loss.
    pub fn is_sealed(&self, id: &StateId) -> Result<bool, Error> {
        Ok(self
            .sealed(&self.state_path(id).join("sealed.json"))?
            .is_some())
    }

    /// Keeps a state from being removed by an owner that does not know who uses it: the lock is
    /// this process's, and ends with it.
    pub fn hold_state(&self, id: &StateId) -> Result<HeldState, Error> {
        let own = self.state_path(id);
        let mark = own.join(format!("{HELD}{}", StateId::random()?));
        let lock = optional(self.files.lock(&mark))?;
        // One that went meanwhile took the mark along.
        let lock = lock.filter(|_| matches!(self.files.kind(&own), Ok(Some(_))));
        let unknown = || Error::UnknownState {
            sandbox: self.id().clone(),
            state: id.clone(),
        };
        Ok(HeldState {
            _lock: lock.ok_or_else(unknown)?,
            files: self.files.clone(),
            mark,
        })
    }

    /// Whether a process that lives holds a state.
    pub fn is_held(&self, id: &StateId) -> Result<bool, Error> {
        let own = self.state_path(id);
        let is_mark = |entry: &Entry| {
            let name = entry.name.to_str();
            name.is_some_and(|name| name.starts_with(HELD))
        };
        let mut entries = optional(self.files.list(&own))?.unwrap_or_default();
        entries.retain(is_mark);
        for mark in entries {
            let lock = optional(self.files.try_lock(&own.join(mark.name)))?;
            if let Some(None) = lock {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a file of a state could not be synced: it will never be sealed.
    pub fn is_doubtful(&self, id: &StateId) -> Result<bool, Error> {
        self.state_source(id)?.is_doubtful()
    }

    /// Whether a memory layer could not be synced: no state that lists it can be sealed.
    pub fn is_doubtful_memory(&self, layer: &LayerId) -> Result<bool, Error> {
        self.files.is_doubtful(&self.memory_layer(layer))
    }

    /// Whether an overlay could not be synced: no state that lists it can be sealed.
    pub fn is_doubtful_disk(&self, layer: &LayerId) -> Result<bool, Error> {
        self.files.is_doubtful(&self.disk_layer(layer))
    }

    fn sealed(&self, path: &Path) -> Result<Option<Sealed>, Error> {
        optional(record::read(&self.files, path))
    }

    pub(super) fn disks(&self) -> PathBuf {
        self.path.join("disks")
    }

    pub(super) fn memory(&self) -> PathBuf {
        self.record
            .own_memory_dir()
            .unwrap_or_else(|| self.path.join("memory"))
    }

    pub(super) fn states_dir(&self) -> PathBuf {
        self.path.join("states")
    }

    fn state_path(&self, id: &StateId) -> PathBuf {
        self.states_dir().join(id.as_str())
    }

    fn hidden_state_path(&self, id: &StateId) -> PathBuf {
        self.states_dir().join(format!(".{id}"))
    }

    fn state_ids(&self) -> Result<Vec<StateId>, Error> {
        let entries = self.files.list(&self.states_dir())?;
        Ok(entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse().ok())
            .collect())
    }

    /// The digests of layers that earlier seals found out. One that cannot be read is found out
    /// again.
    pub(crate) fn known_digests(&self) -> Result<Digests, Error> {
        let read = |path: &Path| self.sealed(path).ok().flatten();
        let of_state = |id: &StateId| read(&self.state_path(id).join("sealed.json"));
        let mut digests = self.known.digests(&self.state_ids()?, of_state);
        let origin = read(&self.path.join("origin.json"));
        digests.extend(origin.into_iter().flat_map(Sealed::layers));
        Ok(digests)
    }
}

impl Owned {
    /// Replaces the head: a crash leaves the old one or the new one, and every layer of it.
    pub fn set_head(&self, head: &Head) -> Result<(), Error> {
        self.files.sync_dir(&self.disks())?;
        publish::replace(
            &self.files,
            &self.path.join("head.json"),
            &record::canonical(head),
        )
    }

    /// The head to start a machine from. Its active overlay is this sandbox's alone: one that a
    /// state lists or another sandbox has, because a capture was interrupted before it set the
    /// head, gets a fresh overlay on top.
    pub fn writable_head(&self) -> Result<Head, Error> {
        let mut head = self.head()?;
        let Some(active) = head.active() else {
            return Ok(head);
        };
        if self.is_frozen(active)? {
            let fresh = self.create_disk(self.disk_bytes(active)?)?;
            // The head is durable from then on, and so must be what it lists.
            self.sync_overlay(&fresh)?;
            head.disk.push(fresh);
            self.set_head(&head)?;
        }
        Ok(head)
    }

    fn is_frozen(&self, layer: &LayerId) -> Result<bool, Error> {
        let states = self.states()?;
        // A state that cannot be read may list it.
        let listed = !states.unreadable.is_empty()
            || states
                .readable
                .iter()
                .any(|state| state.disk.contains(layer));
        Ok(listed || self.files.links(&self.disk_layer(layer))? > 1)
    }

    /// Creates another empty overlay. Not synced: an overlay is checked after a power
    /// loss anyway.
    pub fn create_disk(&self, disk_bytes: u64) -> Result<LayerId, Error> {
        let layer = LayerId::random()?;
        self.files
            .create(&self.disk_layer(&layer), &overlay::empty(disk_bytes)?)?;
        Ok(layer)
    }

    /// Takes a little of the disk in advance, for a way back from a store that is full.
    pub fn take_reserve(&self) -> Result<(), Error> {
        if self.files.kind(&self.reserve())?.is_some() {
            return Ok(());
        }
        // Not zeros: those would be a hole.
        let taken = self
            .files
            .create(&self.reserve(), &vec![0xff; RESERVE_BYTES]);
        if taken.is_err() {
            self.release_reserve()?;
        }
        taken
    }

    /// Gives that back. None being there is fine.
    pub fn release_reserve(&self) -> Result<(), Error> {
        self.files.remove_tree(&self.reserve())
    }

    fn reserve(&self) -> PathBuf {
        self.path.join("reserve")
    }

    /// A new overlay to write, under the name it keeps. Until the head or a state lists it, it is
    /// garbage.
    pub fn new_overlay(&self) -> Result<NewOverlay, Error> {
        let id = LayerId::random()?;
        let path = self.disk_layer(&id);
        Ok(NewOverlay {
            file: self.files.new_file(&path)?,
            files: self.files.clone(),
            id,
            path,
        })
    }

    /// Removes an overlay that no machine has written to. One that the head lists stays: a head
    /// whose last sync failed may be the one on disk.
    pub fn discard_disk(&self, layer: &LayerId) -> Result<(), Error> {
        if self.head()?.disk.contains(layer) {
            return Ok(());
        }
        self.files.remove_tree(&self.disk_layer(layer))
    }

    /// Makes an overlay read-only: it is a layer now.
    pub fn freeze_disk(&self, layer: &LayerId) -> Result<(), Error> {
        self.files.seal(&self.disk_layer(layer))
    }

    /// Makes everything written to an overlay durable.
    pub fn sync_overlay(&self, layer: &LayerId) -> Result<(), Error> {
        self.files.sync_file(&self.disk_layer(layer))
    }

    /// Makes everything written to the disk durable.
    pub fn sync_disks(&self) -> Result<(), Error> {
        self.head()?
            .disk
            .iter()
            .try_for_each(|layer| self.sync_overlay(layer))?;
        self.files.sync_dir(&self.disks())
    }

    /// A new memory layer to write, under the name it keeps. Until a state lists it, it is garbage.
    pub fn memory_file(&self) -> Result<(LayerId, File), Error> {
        self.ensure_memory()?;
        let layer = LayerId::random()?;
        let path = self.memory_layer(&layer);
        Ok((layer, self.files.new_file(&path)?))
    }

    /// Links the memory layers of a state that is not of this sandbox, for a machine that continues
    /// from it. Until a state lists them, they are garbage.
    pub fn adopt_memory(&self, source: &StateSource) -> Result<(), Error> {
        self.ensure_memory()?;
        for layer in source.manifest().memory.layers() {
            let to = self.memory_layer(layer);
            // An earlier machine of this sandbox may have continued from the same state.
            if self.files.kind(&to)?.is_some() {
                continue;
            }
            if let Err(error) = self.files.share(&source.memory_layer(layer), &to) {
                // A part of a copy under this name would be taken for the layer. If it cannot be
                // removed either, the check of the layer finds it.
                drop(self.files.remove_file(&to));
                return Err(error);
            }
        }
        self.files.sync_dir(&self.memory())?;
        self.know_digests(source)
    }

    /// Keeps what the seal of another state knows of its layers, so that the seals of this sandbox
    /// do not find it out again.
    fn know_digests(&self, source: &StateSource) -> Result<(), Error> {
        let Some(sealed) = source.sealed()? else {
            return Ok(());
        };
        let path = self.path.join("origin.json");
        // One that cannot be read is found out again.
        let before = self.sealed(&path).ok().flatten();
        let before = before.into_iter().flat_map(Sealed::layers);
        let known: Digests = before.chain(sealed.layers()).collect();
        publish::replace(&self.files, &path, &record::canonical(&Sealed::new(known)))
    }

    /// Removes a memory layer that could not be written, and that nothing lists.
    pub fn discard_memory(&self, layer: &LayerId) -> Result<(), Error> {
        self.files.remove_tree(&self.memory_layer(layer))
    }

    /// A file in the memory directory without a name: it goes when it is closed.
    pub fn unnamed_memory(&self) -> Result<File, Error> {
        let (layer, file) = self.memory_file()?;
        self.discard_memory(&layer)?;
        Ok(file)
    }

    /// A memory directory may be in a file system that does not outlive the host's boot.
    fn ensure_memory(&self) -> Result<(), Error> {
        let memory = self.memory();
        if self.files.kind(&memory)? == Some(Kind::Dir) {
            // Another user could have created the directory first after a boot, and would read or
            // write the memory of the guest.
            let rule = "the sandbox's own directory belongs to somebody else, or others may write to it; remove it";
            return if self.files.stat(&memory)?.own {
                Ok(())
            } else {
                Err(Error::MemoryDir { path: memory, rule })
            };
        }
        self.files.create_dir(&memory)?;
        self.files.sync_dir(publish::parent(&memory))
    }

    /// A directory inside the sandbox to make a state in.
    pub fn stage_state(&self) -> Result<StagedState, Error> {
        let path = self.hidden_state_path(&StateId::random()?);
        self.files.create_dir(&path)?;
        Ok(StagedState {
            files: self.files.clone(),
            path,
            published: false,
            _staging: self.staging.clone(),
        })
    }

    /// Shows a state to everyone, as the newest. It is whole, and not durable before it is sealed.
    pub fn publish_state(
        &self,
        mut staged: StagedState,
        manifest: StateManifest,
    ) -> Result<StateManifest, Error> {
        let manifest = StateManifest {
            sequence: self.next_sequence()?,
            ..manifest
        };
        let path = staged.path.join("manifest.json");
        self.files.create(&path, &record::canonical(&manifest))?;
        self.files
            .rename_noreplace(&staged.path, &self.state_path(&manifest.id))?;
        staged.published = true;
        Ok(manifest)
    }

    /// One more than that of every state: a number of a state that is gone may be given again,
    /// since nothing is left to compare with. Only the first look reads all manifests.
    fn next_sequence(&self) -> Result<u64, Error> {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let last = match *newest {
            Some(last) => last,
            None => self.newest_sequence()?,
        };
        let next = last.saturating_add(1);
        *newest = Some(next);
        Ok(next)
    }

    fn newest_sequence(&self) -> Result<u64, Error> {
        let states = self.states()?.readable;
        Ok(states.iter().map(|state| state.sequence).max().unwrap_or(0))
    }

    /// Makes a state durable with all of its layers, and records their digests. Takes as long as
    /// writing them does; for a background thread of the owner. A state removed
    /// meanwhile is an error and nothing else.
    pub fn seal_state(dir: &SandboxDir, id: &StateId) -> Result<(), Error> {
        dir.state_source(id)?.seal(&dir.known_digests()?)
    }

    /// Removes a state, readable or not. Its layers are left for `collect`. Doing it again is no
    /// error.
    pub fn remove_state(&self, id: &StateId) -> Result<(), Error> {
        let hidden = self.hidden_state_path(id);
        optional(self.files.rename_noreplace(&self.state_path(id), &hidden))?;
        // It must not come back without its files, or once its layers are collected.
        self.files.sync_dir(&self.states_dir())?;
        self.files.remove_tree(&hidden)
    }

    /// Removes the states that users do not see, as for a sandbox whose last owner died while it
    /// forked. One that a process holds stays.
    pub fn remove_unlisted(&self) -> Result<Vec<StateId>, Error> {
        let mut removed = Vec::new();
        for state in self.states()?.readable {
            if state.kind.is_listed() || self.is_held(&state.id)? {
                continue;
            }
            self.remove_state(&state.id)?;
            removed.push(state.id);
        }
        Ok(removed)
    }
}
