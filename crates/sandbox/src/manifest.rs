//! States of a disk without a machine.

use sandtree_store::{
    Head, MemoryState, Notes, Owned, SandboxRecord, StateId, StateKind, StateManifest,
};

use crate::error::{Result, store_error};
use crate::moment::{boot_id, now_unix_ms};

/// The manifest of a sandbox's disk, without a machine.
pub(crate) fn bare_manifest(
    record: &SandboxRecord,
    head: &Head,
    kind: StateKind,
) -> Result<StateManifest> {
    Ok(StateManifest {
        schema: StateManifest::SCHEMA,
        id: StateId::random().map_err(store_error("make an id"))?,
        kind,
        tag: None,
        parent: head.parent.clone(),
        created_at_unix_ms: now_unix_ms(),
        sequence: 0,
        boot_id: boot_id(),
        disk: head.disk.clone(),
        disk_bytes: record.disk_bytes,
        memory: MemoryState::None,
        ram_bytes: record.memory_bytes,
        mode: None,
        degraded: Notes::default(),
        memory_layer_bytes: 0,
        disk_layer_bytes: 0,
        pause_us: 0,
        machine: None,
        execs: Vec::new(),
        mounts: head.mounts.clone(),
    })
}

/// Shows a state of a sandbox's disk, without a machine, to everyone.
pub(crate) fn publish_bare(owned: &Owned, manifest: &StateManifest) -> Result<()> {
    let staged = owned.stage_state().map_err(store_error("begin a state"))?;
    owned
        .publish_state(staged, manifest.clone())
        .map(drop)
        .map_err(store_error("publish a state"))
}
