//! `manifest.json` of a snapshot: its parts, and by its digest its identity.
//!
//! Always: canonical JSON (RFC 8785), all fields present; the SHA-256 of these bytes is the
//! snapshot's identity. It holds the digest of every byte that belongs to the snapshot and no path
//! of the host. A parsed `SnapshotManifest` keeps every bound, so no caller needs to check one
//! again; the bytes may be hostile.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::rules;
use crate::blob::Blob;
use crate::damage::manifest::ManifestError;
use crate::image::Arch;
use crate::{
    AccelChoice, Digest, DisplaySize, MachineRecord, MountPoint, Name, Network, PublishedPort,
    record,
};

/// Far more than any manifest of ours has.
pub(super) const MAX_MANIFEST_BYTES: usize = 1 << 20;

/// What a reader must know to use a snapshot.
pub(super) const MEMORY_LAYERS: &str = "memory-layers";
pub(super) const MEMORY_STREAM: &str = "memory-stream";
const TSC_RATE: &str = "tsc-rate";
const SILENT_NETWORK: &str = "silent-network";
const MOUNTS: &str = "mounts";
const MOUNTS_PORT: &str = "mounts-port";
pub(super) const COMMANDS: &str = "commands";
const DISPLAY: &str = "display";
const KNOWN_FEATURES: [&str; 8] = [
    COMMANDS,
    DISPLAY,
    MEMORY_LAYERS,
    MEMORY_STREAM,
    SILENT_NETWORK,
    MOUNTS,
    MOUNTS_PORT,
    TSC_RATE,
];

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotManifest {
    pub schema: u64,
    /// The features a reader must know, sorted.
    pub requires: Vec<String>,
    pub created_at_unix_ms: u64,
    /// The snapshot that its sandbox began from. It may be gone.
    pub parent: Option<Digest>,
    pub labels: BTreeMap<String, String>,
    pub image: ImageReference,
    pub arch: Arch,
    pub settings: Settings,
    pub disk: SnapshotDisk,
    /// Without it, a machine begins by a fresh boot.
    pub memory: Option<SnapshotMemory>,
    pub capture: CaptureRecord,
    /// Where its guest has directories of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<MountPoint>,
}

/// What lies below the disk, and what it boots with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageReference {
    /// What the image was called when the sandbox was made. The digest decides.
    pub name: Name,
    pub digest: Digest,
    pub kernel: Digest,
}

/// What the sandbox was asked to be: the defaults of those made from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    pub memory_bytes: u64,
    pub cpus: u32,
    pub disk_bytes: u64,
    pub network: Network,
    pub accel: AccelChoice,
    /// The processor model, if one was asked for.
    pub cpu: Option<String>,
    pub qemu_args: Vec<String>,
    pub ports: Vec<PublishedPort>,
    pub memory_mode: Option<String>,
    pub auto_checkpoint: Option<u32>,
    /// The size of the screen, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<DisplaySize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskFormat {
    Qcow2,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotDisk {
    pub format: DiskFormat,
    pub file_system: String,
    /// The size that the guest sees.
    pub bytes: u64,
    /// Bottom first, without the root file system below them.
    pub layers: Vec<Blob>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    Layers,
    /// In `devices`, as QEMU's own migration stream.
    Stream,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotMemory {
    /// Of the guest's memory.
    pub bytes: u64,
    pub kind: MemoryKind,
    /// Bottom first.
    pub layers: Vec<Blob>,
    pub devices: Blob,
    pub machine: MachineRecord,
    /// A JSON array: the commands of that moment.
    pub commands: Option<Blob>,
    /// What they had written, by path below `execs/`.
    pub outputs: BTreeMap<String, Blob>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureRecord {
    /// Which pages were captured, where there was a choice.
    pub mode: Option<String>,
    pub consistency: Consistency,
    /// What was done in a lesser way than asked for, and why.
    pub degraded: Vec<String>,
}

/// What is known of the file system on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Consistency {
    /// Memory and disk are of one moment.
    Exact,
    /// The guest had frozen its file systems.
    Frozen,
    /// The guest had shut down.
    Stopped,
    /// As after a power cut: the journal is replayed.
    Crash,
}

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Frozen => "frozen",
            Self::Stopped => "stopped",
            Self::Crash => "crash",
        })
    }
}

/// What is looked at before anything else, so that a later schema or feature is refused by its
/// name.
#[derive(Deserialize)]
struct Preface {
    schema: u64,
    #[serde(default)]
    requires: Vec<String>,
}

impl SnapshotManifest {
    pub const SCHEMA: u64 = 1;

    /// Parses bytes that may be hostile. Returns the manifest and its digest.
    pub fn parse(bytes: &[u8]) -> Result<(Self, Digest), ManifestError> {
        if bytes.len() > MAX_MANIFEST_BYTES {
            return Err(ManifestError::TooLarge { bytes: bytes.len() });
        }
        Preface::check(bytes)?;
        let manifest: Self = from_json(bytes)?;
        manifest.check()?;
        if manifest.to_bytes() == bytes {
            Ok((manifest, Digest::of(bytes)))
        } else {
            Err(ManifestError::NotCanonical)
        }
    }

    /// The canonical bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        record::canonical(self)
    }

    /// Whether it keeps every rule that `parse` demands.
    pub(crate) fn check(&self) -> Result<(), ManifestError> {
        rules::check(self)
    }

    /// The features that its content asks of a reader, sorted.
    pub(crate) fn features(&self) -> Vec<String> {
        let points = (!self.mounts.is_empty()).then_some(MOUNTS);
        let display = self.settings.display.map(|_| DISPLAY);
        let Some(memory) = &self.memory else {
            let features = display.into_iter().chain(points);
            return features.map(str::to_owned).collect();
        };
        let kind = match memory.kind {
            MemoryKind::Layers => MEMORY_LAYERS,
            MemoryKind::Stream => MEMORY_STREAM,
        };
        let commands = memory.commands.as_ref().map(|_| COMMANDS);
        let rate = memory.machine.tsc_khz.map(|_| TSC_RATE);
        let silent = memory.machine.silent_network.then_some(SILENT_NETWORK);
        let mounts = memory.machine.mounts_port.then_some(MOUNTS_PORT);
        commands
            .into_iter()
            .chain(display)
            .chain([kind])
            .chain(points)
            .chain(mounts)
            .chain(silent)
            .chain(rate)
            .map(str::to_owned)
            .collect()
    }

    /// Every blob in the order of the manifest: disk, memory layers, devices, commands, outputs.
    pub(crate) fn all_blobs(&self) -> impl Iterator<Item = &Blob> {
        self.disk
            .layers
            .iter()
            .chain(self.memory.iter().flat_map(SnapshotMemory::blobs))
    }
}

impl SnapshotMemory {
    fn blobs(&self) -> impl Iterator<Item = &Blob> {
        self.layers
            .iter()
            .chain([&self.devices])
            .chain(&self.commands)
            .chain(self.outputs.values())
    }
}

impl Preface {
    fn check(bytes: &[u8]) -> Result<(), ManifestError> {
        let Self { schema, requires } = from_json(bytes)?;
        if schema != SnapshotManifest::SCHEMA {
            return Err(ManifestError::Schema {
                found: schema,
                known: SnapshotManifest::SCHEMA,
            });
        }
        match requires
            .into_iter()
            .find(|feature| !KNOWN_FEATURES.contains(&feature.as_str()))
        {
            Some(feature) => Err(ManifestError::Requires {
                feature: feature.chars().take(80).collect(),
            }),
            None => Ok(()),
        }
    }
}

fn from_json<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ManifestError> {
    serde_json::from_slice(bytes).map_err(|error| ManifestError::NotAManifest(error.to_string()))
}
