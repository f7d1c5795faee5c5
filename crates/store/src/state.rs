//! States: captured moments of a sandbox, as layers.
//!
//! ```text
//! manifest.json ──► devices                       one small file, or QEMU's whole stream
//!               ──► execs/                        what commands had written by then
//!               ──► disk layers, memory layers    shared with other states and sandboxes by hard link
//! sealed.json       the digest of each of these; there once all of them are durable
//! ```
//!
//! Always: nothing of a state changes once it is published. A layer is shared by link, so its link
//! count is what keeps it: removing a state or a sandbox never touches another. A state that is not
//! sealed does not outlive the host's boot.

mod seal;
mod source;

use serde::{Deserialize, Serialize};

pub(crate) use seal::{Digests, Sealed};
pub(crate) use source::Places;
pub use source::StateSource;

use crate::image::Arch;
use crate::note::Notes;
use crate::record::Record;
use crate::{DisplaySize, LayerId, MountPoint, Network, StateId, Tag};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// Asked for by the user.
    Checkpoint,
    /// Taken by itself.
    Auto,
    /// Where the sandbox was when it was reverted.
    Left,
    /// Where the sandbox continues when it is resumed.
    Paused,
    /// What forks are made from; gone when they are.
    Fork,
    /// What a warm image is made from; gone when it is.
    Warm,
    /// What a snapshot is made from, or what a sandbox made from a snapshot continues from; removed
    /// afterwards.
    Save,
}

impl StateKind {
    /// Whether users see such states. Others are temporary, and are removed when no work needs
    /// them.
    pub fn is_listed(self) -> bool {
        match self {
            Self::Checkpoint | Self::Auto | Self::Left | Self::Paused => true,
            Self::Fork | Self::Warm | Self::Save => false,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MemoryState {
    /// The disk alone: a machine boots from it.
    None,
    /// Bottom first.
    Layers { layers: Vec<LayerId> },
    /// In `devices`, as QEMU's own migration stream.
    Stream,
}

impl MemoryState {
    pub fn layers(&self) -> &[LayerId] {
        match self {
            Self::Layers { layers } => layers,
            Self::None | Self::Stream => &[],
        }
    }
}

/// What a machine must be like to continue from a state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineRecord {
    pub arch: Arch,
    pub machine_type: String,
    pub cpu: String,
    pub accelerator: String,
    pub qemu_version: String,
    pub cpus: u32,
    pub network: Network,
    pub qemu_args: Vec<String>,
    /// What its processor can do, as its engine names it; sorted. Empty where it is unknown.
    #[serde(default)]
    pub cpu_features: Vec<String>,
    /// The rate of the time-stamp counter, where the guest reads the host's: under emulation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tsc_khz: Option<u64>,
    /// Its network device does not ask the guest to announce its address after a restore. Machines
    /// of older programs do.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub silent_network: bool,
    /// It has a port for directories of the host. Machines of older programs have none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mounts_port: bool,
    /// The size of the screen that it was started with, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<DisplaySize>,
}

/// `manifest.json`: what a state consists of. Never changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateManifest {
    pub schema: u64,
    pub id: StateId,
    pub kind: StateKind,
    pub tag: Option<Tag>,
    pub parent: Option<StateId>,
    pub created_at_unix_ms: u64,
    /// Its place among the states of its sandbox, which no clock decides: greater than that of
    /// every state that was there when it was published. Those of older programs have 0, and among
    /// them the time decides.
    #[serde(default)]
    pub sequence: u64,
    /// The host's boot it was captured in: under another one, only a sealed state can be relied on.
    pub boot_id: String,
    /// Bottom first, without the root file system below them; all frozen.
    pub disk: Vec<LayerId>,
    /// The size that the guest sees.
    pub disk_bytes: u64,
    pub memory: MemoryState,
    pub ram_bytes: u64,
    /// Which pages were captured, where there was a choice.
    pub mode: Option<String>,
    /// What was done in a lesser way than asked for, and why.
    #[serde(flatten)]
    pub degraded: Notes,
    pub memory_layer_bytes: u64,
    pub disk_layer_bytes: u64,
    pub pause_us: u64,
    /// What it needs to continue; a state without memory needs nothing.
    pub machine: Option<MachineRecord>,
    /// The commands of that moment, as the hub describes them. Their output is below
    /// `execs/`.
    pub execs: Vec<serde_json::Value>,
    /// Where its guest has directories of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<MountPoint>,
}

impl StateManifest {
    pub const SCHEMA: u64 = 1;

    /// States in the order of their capture.
    pub(crate) fn order(&self) -> impl Ord + '_ {
        (self.sequence, self.created_at_unix_ms, &self.id)
    }

    /// The state that users see a continuation of this one under.
    pub(crate) fn listed_ancestor(&self) -> Option<&StateId> {
        if self.kind.is_listed() {
            Some(&self.id)
        } else {
            self.parent.as_ref()
        }
    }
}

impl Record for StateManifest {
    const SCHEMA: u64 = Self::SCHEMA;
}

pub(crate) fn disk_file(layer: &LayerId) -> String {
    format!("{layer}.qcow2")
}

pub(crate) fn memory_file(layer: &LayerId) -> String {
    format!("{layer}.mem")
}
