//! Keeping the state of a temporary machine as a warm state: a warm image or a kernel state.
//!
//! Always: the state has no identity. The number of warm states in a store is limited, for each of
//! the two kinds: a kernel state is not removed because of images, which are booted from it.

use sandtree_engine as engine;
use sandtree_store::{
    Digest, Owned, SandboxId, SandboxRecord, StateKind, StateSource, WarmOf, WarmRecord,
};
use std::collections::BTreeMap;

use crate::capture::{After, Capture, Purpose};
use crate::error::{Error, ErrorKind, Result, store_error};
use crate::inner::Inner;
use crate::machine::running::Running;
use crate::mode::MemoryMode;
use crate::names::parse_name;

/// The number of warm states of each kind that a store keeps. Each has the memory that a guest has
/// written when it has booted, some 60 MiB.
const WARM_MAX: usize = 8;

/// A state that is to be kept.
pub(crate) struct Warm {
    pub key: Digest,
    pub of: WarmOf,
}

/// The record of a temporary machine for sandboxes like this one, without an identity.
pub(crate) fn temporary(like: &SandboxRecord, disk_bytes: u64) -> Result<SandboxRecord> {
    let id = SandboxId::random().map_err(store_error("make an id"))?;
    let name = parse_name("sandbox name", id.as_str())?;
    let ports = Vec::new();
    let like = like.clone();
    Ok(SandboxRecord {
        id,
        name,
        disk_bytes,
        ports,
        memory_dir: None,
        memory_mode: None,
        auto_checkpoint: None,
        snapshot: None,
        save_on_stop: None,
        batch: None,
        env: BTreeMap::new(),
        labels: BTreeMap::new(),
        expiry: None,
        ..like
    })
}

/// Captures a temporary machine, which stays stopped, and publishes its state.
pub(crate) async fn keep(
    host: &Inner,
    owned: &Owned,
    running: &mut Running,
    warm: Warm,
) -> Result<StateSource> {
    let record = owned.record();
    let accelerator = running.record.accelerator.clone();
    let mut capture = Capture {
        host,
        owned,
        running,
        wanted: MemoryMode::WriteProtect,
        disk_bytes: record.disk_bytes,
    };
    let purpose = Purpose {
        kind: StateKind::Warm,
        tag: None,
        after: After::StayStopped,
    };
    let manifest = capture.take(purpose).await?.manifest;
    let Warm { key, of } = warm;
    let described = WarmRecord {
        schema: WarmRecord::SCHEMA,
        of,
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        network: record.network,
        accelerator,
    };
    let published = tokio::task::block_in_place(|| {
        host.store
            .publish_warm(&key, &described, owned, &manifest.id)
    });
    published.map_err(store_error("keep a warm state"))?;
    prune(host, &key, &described.of)?;
    let kept = host
        .store
        .warm(&key)
        .map_err(store_error("read a warm state"))?;
    kept.ok_or_else(|| Error::NoState {
        name: record.name.to_string(),
        state: key.to_string(),
    })
}

/// Removes the oldest warm states of one kind above the limit. Most likely, they are of images,
/// QEMUs, agents and shapes that are no longer used. A warm state that is needed again is made
/// again.
fn prune(host: &Inner, but: &Digest, like: &WarmOf) -> Result<()> {
    let mut others = Vec::new();
    for key in host
        .store
        .warm_keys()
        .map_err(store_error("list warm states"))?
    {
        // One that does not say of what it is counts as an image's.
        let record = host.store.warm_record(&key).ok().flatten();
        let is_kernel = record.is_some_and(|record| record.of.kernel().is_some());
        if key == *but || is_kernel != like.kernel().is_some() {
            continue;
        }
        // A warm state that cannot be read is removed first.
        let made = host
            .store
            .warm(&key)
            .ok()
            .flatten()
            .map_or(0, |state| state.manifest().created_at_unix_ms);
        others.push((made, key));
    }
    others.sort();
    let excess = others.len().saturating_sub(WARM_MAX - 1);
    let removed = others
        .iter()
        .take(excess)
        .try_for_each(|(_, key)| host.store.remove_warm(key));
    removed.map_err(store_error("remove a warm state"))
}

/// Whether a boot may succeed where the state failed. If something killed the machine, as the
/// kernel does when memory is short, the error says nothing about the state.
pub(crate) fn is_about_the_state(error: &Error) -> bool {
    match error {
        Error::Engine { source, .. } => !was_killed(source),
        other => matches!(
            other.kind(),
            ErrorKind::Corrupt | ErrorKind::Unsupported | ErrorKind::Guest
        ),
    }
}

fn was_killed(error: &engine::Error) -> bool {
    match error {
        engine::Error::Start { exit } | engine::Error::Died { exit } => exit.is_kill(),
        _ => false,
    }
}
