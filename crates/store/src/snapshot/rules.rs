//! The bounds of a manifest: what `parse` refuses although it is JSON of the right form.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::manifest::{CaptureRecord, MemoryKind, Settings, SnapshotManifest, SnapshotMemory};
use crate::blob::Blob;
use crate::damage::manifest::ManifestError;
use crate::disk::overlay;
use crate::fs::MAX_RECORD_BYTES;
use crate::{Digest, LayerId, MachineRecord, MountPoint, memory};

/// Above this, a number is not the same in every JSON reader.
const MAX_NUMBER: u64 = (1 << 53) - 1;
const MAX_LAYERS: usize = 512;
const MAX_OUTPUTS: usize = 4096;
const MAX_LABELS: usize = 64;
const MAX_LABEL_BYTES: usize = 4096;
const MAX_KEY_BYTES: usize = 63;
const MAX_PATH_BYTES: usize = 1024;
const MAX_TEXT_BYTES: usize = 4096;
const MAX_QEMU_ARGS: usize = 256;
const MAX_CPU_FEATURES: usize = 1024;
const MAX_PORTS: usize = 64;
const MAX_MOUNTS: usize = 64;
const CPUS: RangeInclusive<u32> = 1..=64;
const MIB: u64 = 1 << 20;
pub(crate) const MAX_DEGRADED: usize = 64;

type Checked = Result<(), ManifestError>;

pub(crate) fn check(manifest: &SnapshotManifest) -> Checked {
    require(
        manifest.schema == SnapshotManifest::SCHEMA,
        "schema",
        "this program writes schema 1",
    )?;
    require(
        manifest.requires == manifest.features(),
        "requires",
        "it must be what the content asks for, sorted",
    )?;
    require(
        manifest.created_at_unix_ms <= MAX_NUMBER,
        "created_at_unix_ms",
        "it is 2^53 or more",
    )?;
    check_labels(&manifest.labels)?;
    check_settings(&manifest.settings)?;
    check_capture(&manifest.capture)?;
    check_mounts(&manifest.mounts)?;
    check_disk(manifest)?;
    manifest
        .memory
        .as_ref()
        .map_or(Ok(()), |memory| check_memory(manifest, memory))?;
    check_blobs(manifest)
}

/// `[a-z0-9][a-z0-9._/-]{0,62}` and a text.
pub(crate) fn check_labels(labels: &BTreeMap<String, String>) -> Checked {
    require(labels.len() <= MAX_LABELS, "labels", "64 are the most")?;
    for (key, value) in labels {
        let field = || {
            format!(
                "label {:?}",
                key.chars().take(MAX_KEY_BYTES).collect::<String>()
            )
        };
        let allowed =
            |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'/' | b'-');
        let starts = key
            .bytes()
            .next()
            .is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        let fine = starts && key.len() <= MAX_KEY_BYTES && key.bytes().all(allowed);
        require(fine, field(), "a label is [a-z0-9][a-z0-9._/-]{0,62}")?;
        require(
            value.len() <= MAX_LABEL_BYTES,
            field(),
            "4096 bytes are the most",
        )?;
        // A text may have lines; nothing else in it moves the cursor of a terminal.
        let printable = value.chars().all(|char| char == '\n' || !char.is_control());
        require(printable, field(), "it has control characters")?;
    }
    Ok(())
}

fn check_settings(settings: &Settings) -> Checked {
    check_ram(settings.memory_bytes, "settings.memory_bytes")?;
    check_disk_bytes(settings.disk_bytes, "settings.disk_bytes")?;
    check_cpus(settings.cpus, "settings.cpus")?;
    require(
        settings.ports.len() <= MAX_PORTS,
        "settings.ports",
        "64 are the most",
    )?;
    check_texts(&settings.cpu, 1, "settings.cpu")?;
    check_texts(&settings.memory_mode, 1, "settings.memory_mode")?;
    check_texts(&settings.qemu_args, MAX_QEMU_ARGS, "settings.qemu_args")
}

fn check_capture(capture: &CaptureRecord) -> Checked {
    check_texts(&capture.mode, 1, "capture.mode")?;
    check_texts(&capture.degraded, MAX_DEGRADED, "capture.degraded")
}

fn check_mounts(mounts: &[MountPoint]) -> Checked {
    let paths = mounts.iter().map(|mount| &mount.path);
    check_texts(paths, MAX_MOUNTS, "mounts")?;
    for (at, mount) in mounts.iter().enumerate() {
        let is_absolute = mount.path.starts_with('/') && mount.path.len() <= MAX_PATH_BYTES;
        require(is_absolute, "mounts", "each has an absolute path")?;
        let earlier = &mounts[..at];
        let is_new = earlier.iter().all(|other| other.id != mount.id);
        require(is_new, "mounts", "each has a number of its own")?;
    }
    Ok(())
}

fn check_machine(machine: &MachineRecord, settings: &Settings) -> Checked {
    require(
        machine.display == settings.display,
        "memory.machine.display",
        "it must be that of the settings",
    )?;
    let texts = [
        &machine.machine_type,
        &machine.cpu,
        &machine.accelerator,
        &machine.qemu_version,
    ];
    check_texts(texts, texts.len(), "memory.machine")?;
    check_cpus(machine.cpus, "memory.machine.cpus")?;
    check_texts(
        &machine.qemu_args,
        MAX_QEMU_ARGS,
        "memory.machine.qemu_args",
    )?;
    check_texts(
        &machine.cpu_features,
        MAX_CPU_FEATURES,
        "memory.machine.cpu_features",
    )?;
    require(
        machine.cpu_features.is_sorted(),
        "memory.machine.cpu_features",
        "they must be sorted",
    )
}

/// So many texts at most, of one line each.
fn check_texts<'a>(
    texts: impl IntoIterator<Item = &'a String>,
    most: usize,
    field: &str,
) -> Checked {
    for (at, text) in texts.into_iter().enumerate() {
        require(at < most, field, &format!("{most} are the most"))?;
        require(
            text.len() <= MAX_TEXT_BYTES,
            field,
            "a text of 4096 bytes is the longest",
        )?;
        require(
            !text.contains(char::is_control),
            field,
            "it has control characters",
        )?;
    }
    Ok(())
}

fn check_cpus(cpus: u32, field: &str) -> Checked {
    require(CPUS.contains(&cpus), field, "1 to 64 are possible")
}

fn check_ram(bytes: u64, field: &str) -> Checked {
    memory::check_ram(bytes).or_else(|rule| refuse(field, rule))?;
    require(
        bytes.is_multiple_of(MIB),
        field,
        "it must be a whole number of MiB",
    )
}

fn check_disk(manifest: &SnapshotManifest) -> Checked {
    let disk = &manifest.disk;
    check_disk_bytes(disk.bytes, "disk.bytes")?;
    let word = !disk.file_system.is_empty()
        && disk
            .file_system
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric());
    require(
        word && disk.file_system.len() <= 32,
        "disk.file_system",
        "it is no name of a file system",
    )?;
    check_stack(&disk.layers, "disk.layers")
}

fn check_memory(manifest: &SnapshotManifest, memory: &SnapshotMemory) -> Checked {
    check_ram(memory.bytes, "memory.bytes")?;
    require(
        memory.bytes == manifest.settings.memory_bytes,
        "memory.bytes",
        "it is not what the settings say",
    )?;
    check_stack(&memory.layers, "memory.layers")?;
    let fits = (memory.kind == MemoryKind::Layers) != memory.layers.is_empty();
    require(
        fits,
        "memory.layers",
        "a stream has none, and layers are at least one",
    )?;
    require(
        memory.devices.bytes > 0,
        "memory.devices",
        "it must hold something",
    )?;
    let readable = |blob: &Blob| blob.bytes > 0 && blob.bytes <= MAX_RECORD_BYTES;
    require(
        memory.commands.as_ref().is_none_or(readable),
        "memory.commands",
        "16 MiB are the most",
    )?;
    require(
        memory.machine.arch == manifest.arch,
        "memory.machine",
        "it is of another architecture",
    )?;
    check_machine(&memory.machine, &manifest.settings)?;
    check_outputs(memory)
}

fn check_outputs(memory: &SnapshotMemory) -> Checked {
    require(
        memory.outputs.len() <= MAX_OUTPUTS,
        "memory.outputs",
        "4096 are the most",
    )?;
    for path in memory.outputs.keys() {
        let field = || format!("output {:?}", path.chars().take(80).collect::<String>());
        let fine = path.len() <= MAX_PATH_BYTES && path.split('/').all(is_harmless);
        require(fine, field(), "it is no path of harmless names")?;
        // One that is a file and a directory at once could not be made.
        let below = format!("{path}/");
        let behind = memory.outputs.range::<String, _>(&below..).next();
        require(
            behind.is_none_or(|(next, _)| !next.starts_with(&below)),
            field(),
            "it is a directory, too",
        )?;
    }
    Ok(())
}

/// A file name that means the same everywhere.
fn is_harmless(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    !name.is_empty() && name.len() <= 255 && !name.starts_with('.') && name.bytes().all(allowed)
}

/// Layers on top of each other become files that are named by the first digits of their digests.
fn check_stack(layers: &[Blob], field: &str) -> Checked {
    require(layers.len() <= MAX_LAYERS, field, "512 layers are the most")?;
    let mut seen = std::collections::BTreeSet::new();
    for layer in layers {
        require(layer.bytes > 0, field, "a layer must hold something")?;
        require(
            seen.insert(LayerId::of(&layer.digest)),
            field,
            "two layers would have one name",
        )?;
    }
    Ok(())
}

/// One content has one length, and all together are a number.
fn check_blobs(manifest: &SnapshotManifest) -> Checked {
    let mut lengths: BTreeMap<&Digest, u64> = BTreeMap::new();
    let mut total = 0u64;
    for blob in manifest.all_blobs() {
        let known = *lengths.entry(&blob.digest).or_insert(blob.bytes);
        require(
            known == blob.bytes,
            format!("blob {}", blob.digest),
            "it has two lengths",
        )?;
        let sum = total
            .checked_add(blob.bytes)
            .filter(|sum| *sum <= MAX_NUMBER);
        total = sum.map_or_else(
            || refuse("size", "all blobs together have 2^53 bytes or more"),
            Ok,
        )?;
    }
    let mut names: BTreeMap<LayerId, &Digest> = BTreeMap::new();
    for digest in lengths.into_keys() {
        let first = *names.entry(LayerId::of(digest)).or_insert(digest);
        require(
            first == digest,
            format!("blob {digest}"),
            "another one begins with the same 16 digits",
        )?;
    }
    Ok(())
}

fn check_disk_bytes(bytes: u64, field: &str) -> Checked {
    overlay::check_size(bytes).or_else(|rule| refuse(field, rule))
}

fn require(fine: bool, field: impl Into<String>, rule: &str) -> Checked {
    if fine { Ok(()) } else { refuse(field, rule) }
}

fn refuse<T>(field: impl Into<String>, rule: &str) -> Result<T, ManifestError> {
    Err(ManifestError::Invalid {
        field: field.into(),
        rule: rule.to_owned(),
    })
}
