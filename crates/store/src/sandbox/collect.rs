//! Removing the layers of a sandbox that nothing lists any more.
//!
//! Always: what the head, a state, or the caller lists stays. A state that cannot be read may list
//! anything, so with one of those, nothing goes. Only files that are named like layers are ever
//! removed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Owned, States, UnreadableState};
use crate::fs::{Entry, optional};
use crate::{Error, LayerId};

/// What `collect` did.
#[derive(Debug, Default)]
pub struct Collected {
    pub files: u64,
    /// What the file system got back: of a layer that other sandboxes have, nothing.
    pub bytes: u64,
    /// Why nothing was removed, if these are any.
    pub unreadable: Vec<UnreadableState>,
}

impl Owned {
    /// Removes layers that neither the head nor a state nor `held` lists, and what is left of
    /// unfinished states.
    pub fn collect(&self, held: &[LayerId]) -> Result<Collected, Error> {
        self.remove_unfinished()?;
        let States {
            readable,
            unreadable,
        } = self.states()?;
        if !unreadable.is_empty() {
            return Ok(Collected {
                unreadable,
                ..Collected::default()
            });
        }
        let head = self.head()?;
        let of_states = readable
            .iter()
            .flat_map(|state| state.disk.iter().chain(state.memory.layers()));
        let listed: HashSet<&LayerId> = head.disk.iter().chain(of_states).chain(held).collect();
        let mut garbage = self.unlisted(&self.disks(), ".qcow2", &listed)?;
        garbage.extend(self.unlisted(&self.memory(), ".mem", &listed)?);
        self.remove_layers(garbage)
    }

    fn unlisted(
        &self,
        dir: &Path,
        suffix: &str,
        listed: &HashSet<&LayerId>,
    ) -> Result<Vec<PathBuf>, Error> {
        // A memory directory goes with its file system.
        let entries = optional(self.files.list(dir))?.unwrap_or_default();
        let layer = |name: &str| name.strip_suffix(suffix)?.parse::<LayerId>().ok();
        let is_garbage = |name: &str| layer(name).is_some_and(|layer| !listed.contains(&layer));
        let garbage = entries
            .iter()
            .filter(|entry| entry.name.to_str().is_some_and(is_garbage));
        Ok(garbage.map(|entry| dir.join(&entry.name)).collect())
    }

    fn remove_layers(&self, garbage: Vec<PathBuf>) -> Result<Collected, Error> {
        let mut collected = Collected::default();
        if garbage.is_empty() {
            return Ok(collected);
        }
        // No head and no state that lists them may come back after a power loss.
        self.files.sync_dir(&self.states_dir())?;
        self.files.sync_dir(&self.path)?;
        for path in garbage {
            let bytes = if self.files.links(&path)? == 1 {
                self.files.len(&path)?
            } else {
                0
            };
            self.files.remove_file(&path)?;
            collected.files += 1;
            collected.bytes += bytes;
        }
        Ok(collected)
    }

    /// While a state is being staged, its directory cannot be distinguished from those that a dead
    /// owner left.
    fn remove_unfinished(&self) -> Result<(), Error> {
        if Arc::strong_count(&self.staging) > 1 {
            return Ok(());
        }
        let entries = self.files.list(&self.states_dir())?;
        let is_hidden = |entry: &&Entry| {
            entry
                .name
                .to_str()
                .is_some_and(|name| name.starts_with('.'))
        };
        let hidden: Vec<_> = entries.iter().filter(is_hidden).collect();
        if hidden.is_empty() {
            return Ok(());
        }
        // One of them may be a state that was hidden by a rename, and must not come back without
        // its files.
        self.files.sync_dir(&self.states_dir())?;
        hidden
            .iter()
            .try_for_each(|entry| self.files.remove_tree(&self.states_dir().join(&entry.name)))
    }
}
