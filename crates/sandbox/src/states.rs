//! The states of a sandbox: how they are read, and the public types of checkpoint, revert, pause
//! and forget.

use std::time::Duration;

use sandtree_store::{Phase, SandboxDir, StateId, StateKind, StateManifest, StateRecord};
use serde::{Deserialize, Serialize};

use crate::degradation::Degradation;
use crate::error::{Error, Result, store_error};
use crate::info::rfc3339;

/// The states of a sandbox in the order of their capture, each with its present kind. A manifest
/// never changes, so the manifest of a pause has the kind `Paused` for ever; but a sandbox is
/// paused in one state at most, and has left every other one.
pub(crate) fn as_they_are(
    record: &StateRecord,
    mut states: Vec<StateManifest>,
) -> Vec<StateManifest> {
    let paused_in = paused_in(record, &states);
    let was_left = |state: &&mut StateManifest| {
        state.kind == StateKind::Paused && Some(&state.id) != paused_in.as_ref()
    };
    states
        .iter_mut()
        .filter(was_left)
        .for_each(|state| state.kind = StateKind::Left);
    states
}

/// The state that a paused sandbox continues from. The records of older programs do not name it;
/// then it is the newest state of that kind.
pub(crate) fn paused_in(record: &StateRecord, states: &[StateManifest]) -> Option<StateId> {
    if record.phase != Phase::Paused {
        return None;
    }
    let newest = || {
        states
            .iter()
            .rfind(|state| state.kind == StateKind::Paused)
            .map(|state| state.id.clone())
    };
    record.paused_in.clone().or_else(newest)
}

/// The readable states of a sandbox, each with its present kind, and the errors of the others.
pub(crate) fn of(dir: &SandboxDir) -> Result<(Vec<StateManifest>, Vec<Error>)> {
    let states = dir
        .states()
        .map_err(store_error("list the states of a sandbox"))?;
    // After the states: a pause publishes its state before it records it.
    let record = dir.state().map_err(store_error("read a sandbox's state"))?;
    let unreadable = states
        .unreadable
        .into_iter()
        .map(|state| store_error("read a state")(state.error))
        .collect();
    Ok((as_they_are(&record, states.readable), unreadable))
}

/// One state of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct StateInfo {
    pub id: String,
    pub tag: Option<String>,
    pub kind: StateKind,
    /// The state the sandbox stood on when this one was taken; it may be gone.
    pub parent: Option<String>,
    /// RFC 3339, in UTC.
    pub created_at: String,
    pub created_at_unix_ms: u64,
    /// What this state added to the disk.
    pub memory_bytes: u64,
    pub disk_bytes: u64,
    pub mode: Option<String>,
    pub degraded: Vec<Degradation>,
    /// Whether the sandbox stands on it now.
    pub current: bool,
    pub durability: Durability,
}

/// Whether a state outlives a power loss of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    Durable,
    /// It is being written out, or will be when its sandbox is next taken up.
    NotYet,
    /// A file of it could not be synced. It can be used until the host goes down.
    Failed,
}

impl Durability {
    fn of(dir: &SandboxDir, state: &StateId) -> Self {
        if matches!(dir.is_sealed(state), Ok(true)) {
            return Self::Durable;
        }
        match dir.is_doubtful(state) {
            Ok(true) => Self::Failed,
            _ => Self::NotYet,
        }
    }
}

impl StateInfo {
    pub(crate) fn new(
        dir: &SandboxDir,
        manifest: &StateManifest,
        current: Option<&StateId>,
    ) -> Self {
        Self {
            durability: Durability::of(dir, &manifest.id),
            id: manifest.id.to_string(),
            tag: manifest.tag.as_ref().map(ToString::to_string),
            kind: manifest.kind,
            parent: manifest.parent.as_ref().map(ToString::to_string),
            created_at: rfc3339(manifest.created_at_unix_ms),
            created_at_unix_ms: manifest.created_at_unix_ms,
            memory_bytes: manifest.memory_layer_bytes,
            disk_bytes: manifest.disk_layer_bytes,
            mode: manifest.mode.clone(),
            degraded: Degradation::list(&manifest.degraded),
            current: current == Some(&manifest.id),
        }
    }
}

/// Whether the new state may take a tag from an existing state. The existing state is removed when
/// the new one is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replace {
    Yes,
    No,
}

impl Replace {
    pub fn is_yes(self) -> bool {
        self == Self::Yes
    }
}

impl From<bool> for Replace {
    fn from(yes: bool) -> Self {
        if yes { Self::Yes } else { Self::No }
    }
}

/// The result of a checkpoint, and its cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Checkpoint {
    pub tag: Option<String>,
    pub id: String,
    pub mode: String,
    /// What worked worse than it could, and why.
    pub degraded: Vec<Degradation>,
    /// How long the guest was stopped.
    pub pause_ms: f64,
    pub total_ms: f64,
    pub memory_bytes: u64,
    pub disk_bytes: u64,
}

/// The result of going to another state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Reverted {
    pub id: String,
    pub tag: Option<String>,
    /// The state that keeps the sandbox as it was before.
    pub left: Option<String>,
    /// Why the sandbox as it was before could not be kept.
    pub dropped: Option<String>,
    #[serde(flatten)]
    pub restore: RestoreReport,
}

/// How a restore went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RestoreReport {
    pub degraded: Vec<Degradation>,
    /// Hooks in the guest that failed, with their messages.
    pub hooks_failed: Vec<String>,
    /// Whether QEMU was started ahead of it.
    #[serde(default)]
    pub from_spare: bool,
    /// From the beginning of the restore until the guest ran. A revert also captures the present,
    /// which only its total includes.
    pub running_ms: f64,
    /// Until its agent had acknowledged.
    pub acknowledged_ms: f64,
    pub total_ms: f64,
}

/// The result of a pause.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Paused {
    /// Whether clients wait for the sandbox to continue. If not, its keeper ends, too.
    pub awaited: bool,
    pub mode: String,
    pub degraded: Vec<Degradation>,
    pub total_ms: f64,
    pub memory_bytes: u64,
    pub disk_bytes: u64,
}

/// Which states to remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Forget {
    /// By tag or id.
    These(Vec<String>),
    All,
    /// All but this many of the newest.
    AllBut(usize),
}

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Forgotten {
    pub states: Vec<String>,
    /// The bytes on the disk that were freed, because nothing else uses them.
    pub freed_bytes: u64,
}

/// A way to another state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// By tag or id.
    State(String),
    Undo {
        steps: usize,
    },
    Redo,
}

pub(crate) fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use sandtree_store::{MemoryState, Notes};

    use super::*;

    fn state(number: u64, kind: StateKind) -> StateManifest {
        StateManifest {
            schema: StateManifest::SCHEMA,
            id: format!("{number:016x}").parse().unwrap(),
            kind,
            tag: None,
            parent: None,
            created_at_unix_ms: 0,
            sequence: number,
            boot_id: String::new(),
            disk: Vec::new(),
            disk_bytes: 0,
            memory: MemoryState::None,
            ram_bytes: 0,
            mode: None,
            degraded: Notes::default(),
            memory_layer_bytes: 0,
            disk_layer_bytes: 0,
            pause_us: 0,
            machine: None,
            execs: Vec::new(),
            mounts: Vec::new(),
        }
    }

    fn kinds(record: &StateRecord) -> Vec<StateKind> {
        let kinds = [StateKind::Checkpoint, StateKind::Paused, StateKind::Paused];
        let states = (1..)
            .zip(kinds)
            .map(|(number, kind)| state(number, kind))
            .collect();
        as_they_are(record, states)
            .into_iter()
            .map(|state| state.kind)
            .collect()
    }

    #[test]
    fn a_sandbox_is_paused_in_the_state_that_its_record_names_and_has_left_every_other() {
        use StateKind::{Checkpoint, Left, Paused};
        let mut record = StateRecord::new(Phase::Running, 0);
        assert_eq!(kinds(&record), [Checkpoint, Left, Left]);
        record.phase = Phase::Paused;
        assert_eq!(
            kinds(&record),
            [Checkpoint, Left, Paused],
            "of an older program's record, the newest"
        );
        record.paused_in = Some(state(2, Paused).id);
        assert_eq!(kinds(&record), [Checkpoint, Paused, Left]);
        record.paused_in = Some(state(9, Paused).id);
        assert_eq!(
            kinds(&record),
            [Checkpoint, Left, Left],
            "one that is gone is not replaced by another"
        );
    }
}
