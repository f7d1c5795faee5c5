//! Saves a state of a sandbox as a snapshot.
//!
//! ```text
//!   borrow a state ──► the store's snapshot: layers shared, digests, one rename ──► a name
//!                                                                            └────► a directory, whole in itself
//! ```
//!
//! Always: the guest continues; only a save with memory stops it, for the moment of the capture.
//! The snapshot that had the name before stays whole until the new snapshot is complete. When it
//! fails: the name is as it was, and nothing of the save is left.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use sandtree_store::{Consistency, SandboxDir, SaveTarget, Snapshot};
use serde::{Deserialize, Serialize};

use crate::blocking::in_place;
use crate::boxed::Boxed;
use crate::degradation::Degradation;
use crate::error::{Error, Result};
use crate::inner::Inner;
use crate::order::{LentState, Wanted};
use crate::progress::Progress;
use crate::publish::{Published, Publishing};
use crate::reference::Reference;
use crate::sandbox::Sandbox;
use crate::states::{Forget, Replace, ms};

/// What to save, and as what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveSpec {
    pub target: SaveTarget,
    /// Whether the new snapshot, once it is complete, may replace the existing one of that name.
    pub replace: Replace,
    /// With memory and processes: a sandbox made from the snapshot continues exactly there.
    pub memory: bool,
    /// A state by tag or id, with its memory if it has one. `None`: the present.
    pub from: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// Stored compressed. Sandboxes made from the snapshot take longer to start.
    pub compress: bool,
    /// Removes the sandbox's states after the save.
    pub delete_checkpoints: bool,
}

impl SaveSpec {
    /// The disk alone, under a name or, with a `/` in it, in a directory: an absolute path.
    pub fn new(target: &str) -> Result<Self> {
        Ok(Self {
            target: parse_target(target)?,
            replace: Replace::No,
            memory: false,
            from: None,
            labels: BTreeMap::new(),
            compress: false,
            delete_checkpoints: false,
        })
    }
}

/// A name, or the absolute path of a directory.
pub fn parse_target(text: &str) -> Result<SaveTarget> {
    match Reference::parse(text)? {
        Reference::Name(name) => Ok(SaveTarget::Name(name)),
        Reference::Path(path) if path.is_absolute() => Ok(SaveTarget::Dir(path)),
        Reference::Path(path) => Err(Error::invalid(
            "directory of a snapshot",
            path.display(),
            "an absolute path",
        )),
        Reference::Digest(digest) => Err(Error::invalid(
            "snapshot name",
            digest,
            "a digest names content",
        )),
    }
}

/// A label, from `key=value`. The store checks the key and the value.
pub fn parse_label(text: &str) -> Result<(String, String)> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| Error::invalid("label", text, "KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// The result of a save.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Saved {
    pub digest: String,
    pub name: Option<String>,
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub path: Option<PathBuf>,
    pub consistency: Consistency,
    pub memory: bool,
    /// The size of all files of the snapshot.
    pub bytes: u64,
    pub degraded: Vec<Degradation>,
    /// How long the guest was stopped.
    pub pause_ms: f64,
    pub total_ms: f64,
    /// The states that `delete_checkpoints` removed.
    pub removed: Vec<String>,
}

impl Sandbox {
    /// Saves the sandbox as a snapshot, whichever process runs it, if any does.
    pub fn save(&self, spec: SaveSpec, progress: Progress) -> Boxed<'_, Result<Saved>> {
        Box::pin(async move {
            let began = Instant::now();
            let host = &self.host().inner;
            let dir = in_place(|| host.find(self.id()))?;
            in_place(|| host.check_free(&spec.target, spec.replace, Some(dir.id())))?;
            let loan = self.borrow(wanted(&spec)).await?;
            let published = host.save_lent(dir, &spec, &loan.lent, progress).await;
            let lent = loan.lent.clone();
            loan.give_back().await;
            let snapshot = published?.keep();
            let mut saved = Saved::new(&spec, &snapshot, lent, began);
            if spec.delete_checkpoints {
                saved.removed = self.forget(Forget::All).await?.states;
            }
            Ok(saved)
        })
    }
}

impl Saved {
    fn new(spec: &SaveSpec, snapshot: &Snapshot, lent: LentState, began: Instant) -> Self {
        let (name, path) = match &spec.target {
            SaveTarget::Name(name) => (Some(name.to_string()), None),
            SaveTarget::Dir(path) => (None, Some(path.clone())),
        };
        Self {
            digest: snapshot.digest.to_string(),
            name,
            path,
            consistency: lent.consistency,
            memory: snapshot.manifest.memory.is_some(),
            bytes: snapshot.bytes(),
            degraded: lent.degraded,
            pause_ms: lent.pause_ms,
            total_ms: ms(began.elapsed()),
            removed: Vec::new(),
        }
    }
}

fn wanted(spec: &SaveSpec) -> Wanted {
    match &spec.from {
        Some(state) => Wanted::State(state.clone()),
        None if spec.memory => Wanted::Memory,
        None => Wanted::Disk,
    }
}

impl Inner {
    async fn save_lent(
        self: &Arc<Self>,
        dir: SandboxDir,
        spec: &SaveSpec,
        lent: &LentState,
        progress: Progress,
    ) -> Result<Published> {
        let publishing = Publishing {
            target: spec.target.clone(),
            replace: spec.replace.is_yes(),
            labels: spec.labels.clone(),
            compress: spec.compress,
        };
        self.publish(dir, publishing, lent, progress).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_goes_to_a_name_or_to_an_absolute_path() {
        let name = "env".parse().unwrap();
        assert_eq!(parse_target("env").unwrap(), SaveTarget::Name(name));
        let dir = SaveTarget::Dir("/srv/env".into());
        assert_eq!(parse_target("/srv/env").unwrap(), dir);
        for refused in ["./env", "a/b", &"ab".repeat(32)] {
            assert!(parse_target(refused).is_err(), "{refused}");
        }
    }
}
