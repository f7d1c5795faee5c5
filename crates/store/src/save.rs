//! Saving: a state of a sandbox becomes a snapshot.
//!
//! ```text
//! each file of the state: its digest, known from a seal or found out ──► linked into staging, or compressed there
//!                     ──► manifest ──► published (see `assembly`)
//! ```
//!
//! Layers without effect are left out, so that two saves of an unchanged sandbox share everything:
//! overlays without a cluster, and a layer that occurs again further up, which hides it.
//!
//! Always: nothing of the sandbox changes but the mode of its layers, which become read-only. A
//! layer that a seal knows is not read again unless it is compressed; whether it is still what the
//! seal says, `verify` finds out.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;

use crate::blob::Blob;
use crate::disk::overlay;
use crate::fs::{Output, io_error};
use crate::snapshot::{
    Assembly, CaptureRecord, Consistency, DiskFormat, ImageReference, MemoryKind, Pinned, Settings,
    SnapshotDisk, SnapshotManifest, SnapshotMemory, Target, rules,
};
use crate::state::{Digests, disk_file, memory_file};
use crate::{
    Digest, Error, LayerId, MemoryState, Progress, SandboxDir, SandboxRecord, StateId, StateSource,
    Store, progress, record,
};

/// What the guest's own file system is, on every image there is.
const FILE_SYSTEM: &str = "ext4";
const COMPRESSION_LEVEL: i32 = 3;
const MAX_NOTE_BYTES: usize = 1024;

/// What the maker of a save says; the store finds out the rest.
#[derive(Debug, Clone)]
pub struct SaveSpec {
    pub labels: BTreeMap<String, String>,
    pub consistency: Consistency,
    /// The snapshot that the sandbox began from.
    pub parent: Option<Digest>,
    pub created_at_unix_ms: u64,
    pub compress: bool,
    /// Leaves out the memory of the state.
    pub disk_only: bool,
    /// What was done in a lesser way than asked for, and why.
    pub degraded: Vec<String>,
    /// A machine runs that wrote these overlays and may still have them open: what a seal says of
    /// them is not believed.
    pub writer_runs: bool,
}

/// Refuses labels that a snapshot or a sandbox cannot have.
pub fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Error> {
    rules::check_labels(labels).map_err(Error::Labels)
}

impl Store {
    /// Publishes a state of a sandbox as a snapshot.
    pub fn save(
        &self,
        from: &SandboxDir,
        state: &StateId,
        spec: &SaveSpec,
        target: Target<'_>,
        progress: &dyn Progress,
    ) -> Result<Pinned, Error> {
        self.check_target(target, Some(from.id()))?;
        check_labels(&spec.labels)?;
        let saving = Saving::new(self, from, from.state_source(state)?, spec, progress)?;
        let manifest = saving.manifest(from.record())?;
        progress::check(progress)?;
        saving.assembly.publish(manifest, target, Some(from.id()))
    }
}

struct Saving<'a> {
    store: &'a Store,
    source: StateSource,
    /// The layers of its disk that hold something.
    disk: Vec<LayerId>,
    /// Of files that a seal knows, by their names there.
    known: Digests,
    spec: &'a SaveSpec,
    progress: &'a dyn Progress,
    assembly: Assembly<'a>,
}

impl<'a> Saving<'a> {
    fn new(
        store: &'a Store,
        from: &SandboxDir,
        source: StateSource,
        spec: &'a SaveSpec,
        progress: &'a dyn Progress,
    ) -> Result<Self, Error> {
        let mut known = from.known_digests()?;
        known.extend(
            source
                .sealed()?
                .map(|sealed| sealed.files)
                .unwrap_or_default(),
        );
        let disk = written_layers(store, &source)?;
        let saving = Self {
            store,
            source,
            disk,
            known,
            spec,
            progress,
            assembly: Assembly::new(store)?,
        };
        progress.begin(saving.bytes_to_read()?);
        Ok(saving)
    }

    /// Files that no seal knows are read for their digest, and all of them to be compressed.
    fn bytes_to_read(&self) -> Result<u64, Error> {
        let mut total = 0;
        for (member, path) in self
            .source
            .members()?
            .iter()
            .filter(|(member, _)| self.is_wanted(member))
        {
            let is_read = !self.known.contains_key(member)
                || (self.is_read_again(member) && !self.spec.compress);
            let times = u64::from(is_read) + u64::from(self.spec.compress);
            total += times * self.store.files.len(path)?;
        }
        Ok(total)
    }

    fn is_wanted(&self, member: &str) -> bool {
        match member.strip_prefix("disks/") {
            Some(file) => self.disk.iter().any(|layer| disk_file(layer) == file),
            None => !self.spec.disk_only && member != "manifest.json",
        }
    }

    fn manifest(&self, record: &SandboxRecord) -> Result<SnapshotManifest, Error> {
        let state = self.source.manifest();
        let spec = self.spec;
        let disk = SnapshotDisk {
            format: DiskFormat::Qcow2,
            file_system: FILE_SYSTEM.to_owned(),
            bytes: state.disk_bytes,
            layers: self.disk_layers()?,
        };
        let memory = if spec.disk_only { None } else { self.memory()? };
        let mode = state.mode.clone().filter(|_| memory.is_some());
        let capture = CaptureRecord {
            mode,
            consistency: spec.consistency,
            degraded: notes(&spec.degraded),
        };
        let mut manifest = SnapshotManifest {
            schema: SnapshotManifest::SCHEMA,
            requires: Vec::new(),
            created_at_unix_ms: spec.created_at_unix_ms,
            parent: spec.parent.clone(),
            labels: spec.labels.clone(),
            image: ImageReference {
                name: record.image.clone(),
                digest: record.image_digest.clone(),
                kernel: record.kernel_digest.clone(),
            },
            arch: record.arch,
            settings: settings(record),
            disk,
            memory,
            capture,
            mounts: state.mounts.clone(),
        };
        manifest.requires = manifest.features();
        Ok(manifest)
    }

    fn disk_layers(&self) -> Result<Vec<Blob>, Error> {
        let layers = self.disk.iter();
        let layers = layers.map(|id| {
            self.take(
                &format!("disks/{}", disk_file(id)),
                &self.source.disk_layer(id),
            )
        });
        Ok(without_hidden(layers.collect::<Result<_, _>>()?))
    }

    fn memory(&self) -> Result<Option<SnapshotMemory>, Error> {
        let state = self.source.manifest();
        let kind = match state.memory {
            MemoryState::None => return Ok(None),
            MemoryState::Layers { .. } => MemoryKind::Layers,
            MemoryState::Stream => MemoryKind::Stream,
        };
        let layers = state.memory.layers().iter();
        let layers = layers.map(|id| {
            self.take(
                &format!("memory/{}", memory_file(id)),
                &self.source.memory_layer(id),
            )
        });
        let unknown =
            || Error::corrupt(self.source.devices(), "nothing says which machine it is of");
        Ok(Some(SnapshotMemory {
            bytes: state.ram_bytes,
            kind,
            layers: without_hidden(layers.collect::<Result<_, _>>()?),
            devices: self.take("devices", &self.source.devices())?,
            machine: state.machine.clone().ok_or_else(unknown)?,
            commands: self.commands()?,
            outputs: self.outputs()?,
        }))
    }

    fn commands(&self) -> Result<Option<Blob>, Error> {
        let commands = &self.source.manifest().execs;
        if commands.is_empty() {
            return Ok(None);
        }
        let bytes = record::canonical(commands);
        let blob = Blob {
            digest: Digest::of(&bytes),
            bytes: bytes.len() as u64,
        };
        if !self.assembly.has(&blob)? {
            self.store
                .files
                .create(&self.assembly.plain(&blob.digest), &bytes)?;
        }
        Ok(Some(blob))
    }

    fn outputs(&self) -> Result<BTreeMap<String, Blob>, Error> {
        let members = self.source.members()?.into_iter();
        let outputs = members
            .filter_map(|(member, path)| Some((member.strip_prefix("execs/")?.to_owned(), path)));
        outputs
            .map(|(name, path)| Ok((name.clone(), self.take(&format!("execs/{name}"), &path)?)))
            .collect()
    }

    /// Stages a file of the state, and returns its digest and size.
    fn take(&self, member: &str, path: &Path) -> Result<Blob, Error> {
        let blob = match self.known.get(member) {
            Some(digest) => Blob {
                digest: digest.clone(),
                bytes: self.store.files.len(path)?,
            },
            None => {
                let mut file = self.store.files.open(path)?;
                progress::read_through(path, &mut *file, self.progress, &mut |_| Ok(()))?
            }
        };
        match (self.assembly.has(&blob)?, self.spec.compress) {
            (true, true) => self.progress.advance(blob.bytes),
            (true, false) => {}
            (false, true) => self.compress(path, &blob)?,
            (false, false) => self.link(member, path, &blob)?,
        }
        Ok(blob)
    }

    fn link(&self, member: &str, path: &Path, blob: &Blob) -> Result<(), Error> {
        let files = &self.store.files;
        if !self.known.contains_key(member) {
            files.settle_file(path)?;
        } else if self.is_read_again(member) {
            let mut file = files.open(path)?;
            let found = progress::read_through(path, &mut *file, self.progress, &mut |_| Ok(()))?;
            require_sealed(path, &found, blob)?;
        }
        files.share(path, &self.assembly.plain(&blob.digest))
    }

    /// Whether somebody may have written to a file since its seal.
    fn is_read_again(&self, member: &str) -> bool {
        self.spec.writer_runs && member.starts_with("disks/")
    }

    fn compress(&self, path: &Path, blob: &Blob) -> Result<(), Error> {
        let target = self.assembly.compressed(&blob.digest);
        let failed = |error| io_error("write", &target)(error);
        let mut encoder = encoder(self.store.files.output(&target)?, blob.bytes).map_err(failed)?;
        let mut file = self.store.files.open(path)?;
        let mut write = |piece: &[u8]| encoder.write_all(piece).map_err(failed);
        let found = progress::read_through(path, &mut *file, self.progress, &mut write)?;
        require_sealed(path, &found, blob)?;
        encoder.finish().map_err(failed)?.finish()
    }
}

fn require_sealed(path: &Path, found: &Blob, blob: &Blob) -> Result<(), Error> {
    if found == blob {
        Ok(())
    } else {
        Err(Error::corrupt(
            path,
            format!("its content is not {}, as its seal says", blob.digest),
        ))
    }
}

/// One frame, whose header holds the length of its content.
fn encoder(output: Output, bytes: u64) -> io::Result<zstd::Encoder<'static, Output>> {
    let mut encoder = zstd::Encoder::new(output, COMPRESSION_LEVEL)?;
    encoder.set_pledged_src_size(Some(bytes))?;
    encoder.include_checksum(true)?;
    Ok(encoder)
}

/// The layers of a state's disk without overlays that hold nothing.
fn written_layers(store: &Store, source: &StateSource) -> Result<Vec<LayerId>, Error> {
    let mut written = Vec::new();
    for layer in &source.manifest().disk {
        let path = source.disk_layer(layer);
        let mut file = store.files.open(&path)?;
        if !overlay::is_empty(&mut *file).map_err(io_error("read", &path))? {
            written.push(layer.clone());
        }
    }
    Ok(written)
}

/// Notes as a manifest may hold them. They may quote what other programs say, over many lines.
fn notes(texts: &[String]) -> Vec<String> {
    texts
        .iter()
        .take(rules::MAX_DEGRADED)
        .map(|text| one_line(text))
        .collect()
}

fn one_line(text: &str) -> String {
    let lines = text
        .split(char::is_control)
        .map(str::trim)
        .filter(|line| !line.is_empty());
    let mut line = lines.collect::<Vec<_>>().join(" ");
    let fits = |end: &usize| *end <= MAX_NOTE_BYTES && line.is_char_boundary(*end);
    line.truncate((0..=line.len()).rev().find(fits).unwrap_or(0));
    line
}

/// A layer that occurs again further up is hidden by that copy.
fn without_hidden(layers: Vec<Blob>) -> Vec<Blob> {
    let mut above = BTreeSet::new();
    let mut kept: Vec<Blob> = layers
        .into_iter()
        .rev()
        .filter(|layer| above.insert(layer.digest.clone()))
        .collect();
    kept.reverse();
    kept
}

fn settings(record: &SandboxRecord) -> Settings {
    Settings {
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        disk_bytes: record.disk_bytes,
        network: record.network,
        accel: record.accel,
        cpu: record.cpu.clone(),
        display: record.display,
        qemu_args: record.qemu_args.clone(),
        ports: record.ports.clone(),
        memory_mode: record.memory_mode.clone(),
        auto_checkpoint: record.auto_checkpoint,
    }
}
