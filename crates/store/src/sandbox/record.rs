//! What is written about a sandbox itself: `sandbox.json` and `state.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::choice::{AccelChoice, DisplaySize, Network, PublishedPort};
use crate::image::Arch;
use crate::note::Notes;
use crate::record::Record;
use crate::{BatchId, Digest, Name, SandboxId, StateId};

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
    /// An existing directory that holds its memory layers, in a directory of the sandbox's own.
    #[serde(default)]
    pub memory_dir: Option<PathBuf>,
    /// Which pages a capture takes, if one way was asked for.
    #[serde(default)]
    pub memory_mode: Option<String>,
    /// How many automatic checkpoints it keeps.
    #[serde(default)]
    pub auto_checkpoint: Option<u32>,
    /// The snapshot it was made from.
    #[serde(default)]
    pub snapshot: Option<Digest>,
    /// The processor model, if one was asked for.
    #[serde(default)]
    pub cpu: Option<String>,
    /// What it is saved as when it stops.
    #[serde(default)]
    pub save_on_stop: Option<SaveOnStop>,
    /// The guest's flushes are passed on to the host's disk.
    #[serde(default)]
    pub durable: bool,
    /// The environment of every command, in addition to that of its image.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Whether its guest may run guests of its own by KVM.
    #[serde(default)]
    pub nested: bool,
    /// The batch it was created in: while it is `creating`, it exists if the batch is committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchId>,
    /// The user's notes, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What happens after it has run for some time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiry: Option<Expiry>,
    /// The size of the screen, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<DisplaySize>,
}

/// The end of a sandbox after a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Expiry {
    /// Counts anew from each start and resume.
    pub after_ms: u64,
    pub action: ExpiryAction,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExpiryAction {
    #[default]
    Remove,
    /// Memory and processes are kept.
    Pause,
    /// The disk is kept.
    Stop,
}

/// A save that is due when a sandbox stops, whatever way it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveOnStop {
    pub target: SaveTarget,
    /// What has that name by then goes.
    pub replace: bool,
    pub labels: BTreeMap<String, String>,
    pub compress: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveTarget {
    Name(Name),
    Dir(PathBuf),
}

impl fmt::Display for SaveTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Dir(path) => path.display().fmt(f),
        }
    }
}

impl SandboxRecord {
    pub const SCHEMA: u64 = 1;

    /// The directory of its own in its memory directory.
    pub(crate) fn own_memory_dir(&self) -> Option<PathBuf> {
        self.memory_dir
            .as_ref()
            .map(|dir| dir.join(self.id.as_str()))
    }
}

impl Record for SandboxRecord {
    const SCHEMA: u64 = Self::SCHEMA;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Not yet a sandbox: if its owner dies now, it is removed.
    Creating,
    Starting,
    Running,
    Stopping,
    Stopped,
    /// Without a machine, and a state holds where it was.
    Paused,
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
            Phase::Paused => "paused",
            Phase::Crashed => "crashed",
        })
    }
}

/// How a machine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// It was stopped by request.
    Stopped,
    /// It was killed by request.
    Killed,
    PoweredOff,
    Rebooted,
    Panicked,
    /// QEMU ended by itself.
    QemuEnded,
    /// A defect of this program took its machine.
    Defect,
    /// The process that ran it is gone.
    OwnerDied,
    /// The host went down while it ran.
    HostWentDown,
    /// A way that a newer program knows.
    #[serde(other)]
    Unknown,
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
    /// For people. Decisions depend on `ended`.
    pub reason: Option<String>,
    /// How its last machine ended. Records of older programs do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Ended>,
    /// The host boot it was written in: under another one, every process of it is gone.
    pub boot_id: Option<String>,
    pub pids: Pids,
    /// What its machine runs on, while it has one.
    #[serde(default)]
    pub accelerator: Option<String>,
    #[serde(default)]
    pub qemu_version: Option<String>,
    pub since_unix_ms: u64,
    /// What its machine does in a lesser way than it could, and why.
    #[serde(flatten)]
    pub degraded: Notes,
    /// Its disk was synced after its last write.
    pub clean: bool,
    /// The state it is paused in. Records of older programs do not name it.
    #[serde(default)]
    pub paused_in: Option<StateId>,
    /// What it was saved as when it last stopped.
    #[serde(default)]
    pub saved: Option<Digest>,
    /// Why it was not, though it was to be.
    #[serde(default)]
    pub save_failed: Option<String>,
    /// When it expires, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix_ms: Option<u64>,
}

impl StateRecord {
    pub const SCHEMA: u64 = 1;

    pub fn new(phase: Phase, since_unix_ms: u64) -> Self {
        let schema = Self::SCHEMA;
        let pids = Pids::default();
        let accelerator = None;
        let qemu_version = None;
        Self {
            schema,
            phase,
            reason: None,
            ended: None,
            boot_id: None,
            pids,
            accelerator,
            qemu_version,
            since_unix_ms,
            degraded: Notes::default(),
            clean: false,
            paused_in: None,
            saved: None,
            save_failed: None,
            expires_at_unix_ms: None,
        }
    }

    /// The reason, where the phase does not say it by itself.
    pub fn further_reason(&self) -> Option<String> {
        self.reason
            .clone()
            .filter(|_| self.ended != Some(Ended::Stopped))
    }

    /// The record that follows this one: nothing stays but what it was last saved as.
    pub fn followed_by(&self, phase: Phase, since_unix_ms: u64) -> Self {
        Self {
            saved: self.saved.clone(),
            ..Self::new(phase, since_unix_ms)
        }
    }
}

impl Record for StateRecord {
    const SCHEMA: u64 = Self::SCHEMA;
}
