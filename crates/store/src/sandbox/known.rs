//! Manifests and seals of states that this process has read. Neither ever changes, so the list of a
//! sandbox's states and the next seal read only those of new states.
//!
//! Always: a manifest is known only while its file is the one that was read. A restore reads the
//! manifest from its file.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::fs::Stat;
use crate::state::{Digests, Sealed};
use crate::{StateId, StateManifest};

/// Some kilobytes each.
const KNOWN_MAX: usize = 1024;

/// Shared by all copies of a [`SandboxDir`](super::SandboxDir).
#[derive(Debug, Clone, Default)]
pub(super) struct Known(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    manifests: Mutex<BTreeMap<StateId, Entry>>,
    seals: Mutex<Seals>,
}

/// The digests of layers that seals have.
#[derive(Debug, Default)]
struct Seals {
    read: BTreeSet<StateId>,
    layers: Digests,
}

#[derive(Debug)]
struct Entry {
    file: Stat,
    manifest: StateManifest,
}

impl Known {
    pub fn get(&self, id: &StateId, file: Stat) -> Option<StateManifest> {
        let entries = self.lock();
        let entry = entries.get(id).filter(|entry| entry.file == file)?;
        Some(entry.manifest.clone())
    }

    pub fn add(&self, file: Stat, manifest: &StateManifest) {
        let mut entries = self.lock();
        if entries.len() < KNOWN_MAX || entries.contains_key(&manifest.id) {
            let manifest = manifest.clone();
            entries.insert(manifest.id.clone(), Entry { file, manifest });
        }
    }

    /// Forgets all states but these.
    pub fn keep(&self, ids: &[StateId]) {
        let ids: BTreeSet<&StateId> = ids.iter().collect();
        self.lock().retain(|id, _| ids.contains(id));
    }

    /// The digests that the seals of these states have. `read` reads the seal of a state; one that
    /// does not exist yet is read again.
    pub fn digests(&self, ids: &[StateId], read: impl Fn(&StateId) -> Option<Sealed>) -> Digests {
        let mut seals = self.0.seals.lock().unwrap_or_else(PoisonError::into_inner);
        // Most of them are those of states that are gone.
        if seals.read.len() > KNOWN_MAX + 2 * ids.len() {
            *seals = Seals::default();
        }
        for id in ids {
            if seals.read.contains(id) {
                continue;
            }
            if let Some(sealed) = read(id) {
                seals.layers.extend(sealed.layers());
                seals.read.insert(id.clone());
            }
        }
        seals.layers.clone()
    }

    /// A thread that panicked leaves nothing half done here.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<StateId, Entry>> {
        let manifests = self.0.manifests.lock();
        manifests.unwrap_or_else(PoisonError::into_inner)
    }
}
