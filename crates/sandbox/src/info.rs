//! The information about a sandbox that needs no answer of its guest.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use sandtree_store::{
    DisplaySize, Ended, Expiry, Network, Phase, PublishedPort, SandboxDir, StateRecord,
};
use serde::{Deserialize, Serialize};

use crate::degradation::Degradation;
use crate::mounts::MountInfo;

/// A sandbox as `ps` and `inspect` show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SandboxInfo {
    pub id: String,
    pub name: String,
    pub state: Phase,
    /// For people. Decisions depend on `ended`.
    pub reason: Option<String>,
    /// How its last machine ended.
    pub ended: Option<Ended>,
    pub image: String,
    pub image_digest: String,
    /// The snapshot it was made from.
    pub snapshot: Option<String>,
    pub arch: String,
    pub accelerator: Option<String>,
    pub qemu_version: Option<String>,
    pub qemu_pid: Option<u32>,
    pub keeper_pid: Option<u32>,
    pub memory_bytes: u64,
    pub cpus: u32,
    pub disk_bytes: u64,
    pub network: Network,
    pub ports: Vec<PublishedPort>,
    pub auto_remove: bool,
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub memory_dir: Option<PathBuf>,
    pub memory_mode: Option<String>,
    pub auto_checkpoint: Option<u32>,
    pub cpu: Option<String>,
    /// The size of the screen that it was created with, if it has one.
    #[serde(default)]
    pub display: Option<DisplaySize>,
    /// Whether the guest's flushes reach the host's disk.
    pub durable: bool,
    /// What it is saved as when it stops.
    pub save_on_stop: Option<String>,
    /// Why the save failed.
    pub save_failed: Option<String>,
    /// Directories of the host in the guest.
    #[serde(default)]
    pub mounts: Vec<MountInfo>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What happens after it has run for some time.
    #[serde(default)]
    pub expiry: Option<Expiry>,
    /// When it expires, while it runs: RFC 3339, in UTC.
    #[serde(default)]
    pub expires_at: Option<String>,
    #[serde(skip)]
    pub expires_at_unix_ms: Option<u64>,
    /// What works worse than it could, and why.
    pub degraded: Vec<Degradation>,
    /// RFC 3339, in UTC.
    pub created_at: String,
    #[serde(skip)]
    pub created_at_unix_ms: u64,
}

impl SandboxInfo {
    pub(crate) fn new(dir: &SandboxDir, state: &StateRecord) -> Self {
        let record = dir.record();
        Self {
            id: record.id.to_string(),
            name: record.name.to_string(),
            state: state.phase,
            reason: state.reason.clone(),
            ended: state.ended,
            image: record.image.to_string(),
            image_digest: record.image_digest.to_string(),
            snapshot: record.snapshot.as_ref().map(ToString::to_string),
            arch: record.arch.to_string(),
            accelerator: state.accelerator.clone(),
            qemu_version: state.qemu_version.clone(),
            qemu_pid: state.pids.qemu,
            keeper_pid: state.pids.keeper,
            memory_bytes: record.memory_bytes,
            cpus: record.cpus,
            disk_bytes: record.disk_bytes,
            network: record.network,
            ports: record.ports.clone(),
            auto_remove: record.auto_remove,
            memory_dir: record.memory_dir.clone(),
            memory_mode: record.memory_mode.clone(),
            auto_checkpoint: record.auto_checkpoint,
            cpu: record.cpu.clone(),
            display: record.display,
            durable: record.durable,
            save_on_stop: record
                .save_on_stop
                .as_ref()
                .map(|save| save.target.to_string()),
            save_failed: state.save_failed.clone(),
            mounts: mounts(dir),
            labels: record.labels.clone(),
            expiry: record.expiry,
            expires_at: state.expires_at_unix_ms.map(rfc3339),
            expires_at_unix_ms: state.expires_at_unix_ms,
            degraded: Degradation::list(&state.degraded),
            created_at: rfc3339(record.created_at_unix_ms),
            created_at_unix_ms: record.created_at_unix_ms,
        }
    }

    /// Whether a power loss or a crash of the host may have damaged the sandbox's disk without any
    /// sign.
    pub fn may_be_torn(&self) -> bool {
        !self.durable && self.state == Phase::Crashed && self.ended == Some(Ended::HostWentDown)
    }

    /// The reason, where the phase does not say it by itself.
    pub fn further_reason(&self) -> Option<&str> {
        self.reason
            .as_deref()
            .filter(|_| self.ended != Some(Ended::Stopped))
    }

    pub fn is_running(&self) -> bool {
        self.state == Phase::Running
    }
}

/// The mounts of the present.
fn mounts(dir: &SandboxDir) -> Vec<MountInfo> {
    let points = dir.head().map(|head| head.mounts).unwrap_or_default();
    if points.is_empty() {
        return Vec::new();
    }
    let directories = dir.host_directories().unwrap_or_default();
    let shown = points.iter();
    shown
        .map(|point| MountInfo::new(point, &directories))
        .collect()
}

pub(crate) fn rfc3339(unix_ms: u64) -> String {
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(unix_ms)).to_string()
}
