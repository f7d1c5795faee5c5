//! Making a sandbox from a snapshot.
//!
//! It gets a link to every layer of the snapshot, under the name [`LayerId::of`], or the layer
//! itself where the pool has it compressed; so it needs nothing of the snapshot any more. With
//! memory, it also gets the snapshot as a state of its own, whole and sealed and not listed: its
//! machine continues from it once.
//!
//! Always: what is decompressed has the digest it must have. What is linked has the right size, and
//! is otherwise taken as it is: machines check the structure of what they use, `verify` every byte.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::SandboxRecord;
use crate::blob::Blob;
use crate::fs::MAX_RECORD_BYTES;
use crate::note::Notes;
use crate::publish;
use crate::record::canonical;
use crate::snapshot::{Form, MemoryKind, SnapshotMemory};
use crate::state::{Digests, Sealed, disk_file, memory_file};
use crate::{
    Digest, Error, LayerId, MemoryState, Silent, Snapshot, StateKind, StateManifest, Store,
    progress,
};

/// Where the parts of a snapshot go in a sandbox that is being made.
struct Unpacking<'a> {
    store: &'a Store,
    snapshot: &'a Snapshot,
    tree: &'a Path,
    memory: PathBuf,
}

impl Store {
    pub(super) fn unpack(
        &self,
        tree: &Path,
        record: &SandboxRecord,
        snapshot: &Snapshot,
        with_memory: bool,
    ) -> Result<(), Error> {
        let memory = record
            .own_memory_dir()
            .unwrap_or_else(|| tree.join("memory"));
        let unpacking = Unpacking {
            store: self,
            snapshot,
            tree,
            memory,
        };
        let mut layers = unpacking.disk_layers()?;
        if with_memory {
            let memory = snapshot.manifest.memory.as_ref().ok_or(Error::NoMemory)?;
            layers.extend(unpacking.memory_layers(memory)?);
            unpacking.state(memory, layers.clone())?;
        }
        unpacking.keep_digests(layers)?;
        [&tree.join("disks"), &unpacking.memory, tree]
            .into_iter()
            .try_for_each(|dir| self.files.sync_dir(dir))
    }

    /// Gives a file of a snapshot another name; a copy of its own where the pool has it compressed.
    fn place(&self, blob: &Blob, to: &Path) -> Result<(), Error> {
        match self.blob_path(blob)? {
            (path, Form::Plain) => self.files.share(&path, to),
            (path, Form::Compressed) => self.decompress(&path, blob, to),
        }
    }

    pub(crate) fn decompress(&self, path: &Path, blob: &Blob, to: &Path) -> Result<(), Error> {
        let mut output = self.files.output(to)?;
        // One byte more detects a file that is too long, and bounds a hostile one.
        let mut content = self.open_blob(blob)?.take(blob.bytes + 1);
        let found =
            progress::read_through(path, &mut content, &Silent, &mut |piece| output.add(piece))?;
        if found != *blob {
            return Err(Error::corrupt(path, "its content has another digest"));
        }
        output.finish()?;
        self.files.seal(to)?;
        self.files.sync_file(to)
    }
}

impl Unpacking<'_> {
    fn disk_layers(&self) -> Result<Digests, Error> {
        let layers = self.snapshot.manifest.disk.layers.iter();
        layers
            .map(|blob| self.layer(blob, "disks", &self.tree.join("disks"), disk_file))
            .collect()
    }

    fn memory_layers(&self, memory: &SnapshotMemory) -> Result<Digests, Error> {
        memory
            .layers
            .iter()
            .map(|blob| self.layer(blob, "memory", &self.memory, memory_file))
            .collect()
    }

    /// Places a layer, and returns its digest under its name in a seal.
    fn layer(
        &self,
        blob: &Blob,
        part: &str,
        dir: &Path,
        file: fn(&LayerId) -> String,
    ) -> Result<(String, Digest), Error> {
        let name = file(&LayerId::of(&blob.digest));
        self.store.place(blob, &dir.join(&name))?;
        Ok((format!("{part}/{name}"), blob.digest.clone()))
    }

    /// The snapshot as a state: durable before its seal says so.
    fn state(&self, memory: &SnapshotMemory, layers: Digests) -> Result<(), Error> {
        let files = &self.store.files;
        let states = self.tree.join("states");
        let dir = states.join(self.snapshot.state_id().as_str());
        files.create_dir(&dir)?;
        let manifest = canonical(&self.state_manifest(memory)?);
        files.create(&dir.join("manifest.json"), &manifest)?;
        self.store.place(&memory.devices, &dir.join("devices"))?;
        let outputs = self.outputs(memory, &dir.join("execs"))?;
        let own = [
            ("manifest.json".to_owned(), Digest::of(&manifest)),
            ("devices".to_owned(), memory.devices.digest.clone()),
        ];
        let sealed = Sealed::new(layers.into_iter().chain(own).chain(outputs).collect());
        files.create(&dir.join("sealed.json"), &canonical(&sealed))?;
        publish::sync_tree(files, &dir)?;
        files.sync_dir(&states)?;
        files.share_tree(&dir.join("execs"), &self.tree.join("execs-of-origin"))
    }

    fn outputs(&self, memory: &SnapshotMemory, dir: &Path) -> Result<Digests, Error> {
        self.store.files.create_dir(dir)?;
        let mut digests = Digests::new();
        for (path, blob) in &memory.outputs {
            let target = dir.join(path);
            self.ensure_dirs(dir, publish::parent(&target))?;
            self.store.place(blob, &target)?;
            digests.insert(format!("execs/{path}"), blob.digest.clone());
        }
        Ok(digests)
    }

    /// Creates the directories between `top`, which exists, and `dir`, which is below it or equal
    /// to it.
    fn ensure_dirs(&self, top: &Path, dir: &Path) -> Result<(), Error> {
        if dir != top {
            self.ensure_dirs(top, publish::parent(dir))?;
            self.store.files.ensure_dir(dir)?;
        }
        Ok(())
    }

    fn state_manifest(&self, memory: &SnapshotMemory) -> Result<StateManifest, Error> {
        let manifest = &self.snapshot.manifest;
        let ids = |layers: &[Blob]| {
            layers
                .iter()
                .map(|layer| LayerId::of(&layer.digest))
                .collect()
        };
        Ok(StateManifest {
            schema: StateManifest::SCHEMA,
            id: self.snapshot.state_id(),
            kind: StateKind::Save,
            tag: None,
            parent: None,
            created_at_unix_ms: manifest.created_at_unix_ms,
            sequence: 0,
            // A sealed state is good in every boot.
            boot_id: String::new(),
            disk: ids(&manifest.disk.layers),
            disk_bytes: manifest.disk.bytes,
            memory: match memory.kind {
                MemoryKind::Layers => MemoryState::Layers {
                    layers: ids(&memory.layers),
                },
                MemoryKind::Stream => MemoryState::Stream,
            },
            ram_bytes: memory.bytes,
            mode: manifest.capture.mode.clone(),
            degraded: Notes::from_texts(&manifest.capture.degraded),
            memory_layer_bytes: 0,
            disk_layer_bytes: 0,
            pause_us: 0,
            machine: Some(memory.machine.clone()),
            execs: memory
                .commands
                .as_ref()
                .map_or(Ok(Vec::new()), |blob| self.commands(blob))?,
            mounts: manifest.mounts.clone(),
        })
    }

    /// Small, and trusted by the code that serves commands: read whole and checked.
    fn commands(&self, blob: &Blob) -> Result<Vec<serde_json::Value>, Error> {
        let (path, _) = self.store.blob_path(blob)?;
        let mut bytes = Vec::new();
        let mut content = self.store.open_blob(blob)?.take(MAX_RECORD_BYTES + 1);
        let mut keep = |piece: &[u8]| {
            bytes.extend_from_slice(piece);
            Ok(())
        };
        if progress::read_through(&path, &mut content, &Silent, &mut keep)? != *blob {
            return Err(Error::corrupt(path, "its content has another digest"));
        }
        serde_json::from_slice(&bytes).map_err(|error| Error::corrupt(path, error))
    }

    /// What the manifest knows of layers need not be found out again by the seals of the new
    /// sandbox.
    fn keep_digests(&self, layers: Digests) -> Result<(), Error> {
        let path = self.tree.join("origin.json");
        self.store
            .files
            .create(&path, &canonical(&Sealed::new(layers)))?;
        self.store.files.sync_file(&path)
    }
}
