//! Warm states: captured boots, by a key that the caller computes from everything that shapes one.
//! A warm image is of an image; a kernel state is of a kernel that has no root yet.
//!
//! Always: a warm state is sealed and durable before it is seen. The first process that publishes
//! one wins; two with the same key are equal. It keeps nothing: one whose image or kernel nothing
//! else reaches is garbage.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::fs::optional;
use crate::publish::{Published, Staged};
use crate::record::{self, Record, canonical};
use crate::state::{Digests, Places, Sealed};
use crate::{Digest, Error, Network, SandboxDir, SandboxId, StateId, StateSource, Store};

/// `warm/<key>/warm.json`: what the key was made of, as far as people want to know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmRecord {
    pub schema: u64,
    #[serde(flatten)]
    pub of: WarmOf,
    pub memory_bytes: u64,
    pub cpus: u32,
    pub network: Network,
    /// `kvm` or `tcg`.
    pub accelerator: String,
}

/// What was booted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmOf {
    /// The whole image.
    Image(Digest),
    /// The kernel alone, without a root.
    Kernel(Digest),
}

impl WarmOf {
    pub fn image(&self) -> Option<&Digest> {
        match self {
            Self::Image(image) => Some(image),
            Self::Kernel(_) => None,
        }
    }

    pub fn kernel(&self) -> Option<&Digest> {
        match self {
            Self::Image(_) => None,
            Self::Kernel(kernel) => Some(kernel),
        }
    }
}

impl WarmRecord {
    pub const SCHEMA: u64 = 1;
}

impl Record for WarmRecord {
    const SCHEMA: u64 = Self::SCHEMA;
}

/// A warm image in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WarmSummary {
    pub key: Digest,
    /// Those of older programs have none.
    pub record: Option<WarmRecord>,
    /// What it takes on disk. What sandboxes share with it counts, too.
    pub bytes: u64,
    pub created_at_unix_ms: u64,
    /// Why it cannot be used.
    pub unreadable: Option<String>,
}

impl Store {
    /// The warm image under `key`, if there is one.
    pub fn warm(&self, key: &Digest) -> Result<Option<StateSource>, Error> {
        let dir = self.layout.warm(key);
        match self.files.kind(&dir)? {
            Some(_) => StateSource::read(&self.files, places(&dir)).map(Some),
            None => Ok(None),
        }
    }

    /// Every key that has a warm image.
    pub fn warm_keys(&self) -> Result<Vec<Digest>, Error> {
        let entries = self.files.list(&self.layout.warm_dir())?;
        Ok(entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse().ok())
            .collect())
    }

    /// Every warm image, by key.
    pub fn warm_list(&self) -> Result<Vec<WarmSummary>, Error> {
        let summaries = self
            .warm_keys()?
            .into_iter()
            .map(|key| self.summarize_warm(key));
        Ok(summaries
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .flatten()
            .collect())
    }

    /// One that went since it was listed is no news.
    fn summarize_warm(&self, key: Digest) -> Result<Option<WarmSummary>, Error> {
        let state = self.warm(&key);
        let record = self.warm_record(&key);
        if self.files.kind(&self.layout.warm(&key))?.is_none() {
            return Ok(None);
        }
        let trouble = [state.as_ref().err(), record.as_ref().err()]
            .into_iter()
            .flatten()
            .next();
        Ok(Some(WarmSummary {
            unreadable: trouble.map(Error::to_string),
            record: record.ok().flatten(),
            bytes: self.bytes_on_disk(&self.layout.warm(&key))?,
            created_at_unix_ms: state
                .ok()
                .flatten()
                .map_or(0, |state| state.manifest().created_at_unix_ms),
            key,
        }))
    }

    /// What a warm image says of itself, if it does.
    pub fn warm_record(&self, key: &Digest) -> Result<Option<WarmRecord>, Error> {
        optional(record::read(
            &self.files,
            &self.layout.warm(key).join("warm.json"),
        ))
    }

    /// Makes a state of a sandbox a warm image, by links.
    pub fn publish_warm(
        &self,
        key: &Digest,
        record: &WarmRecord,
        from: &SandboxDir,
        state: &StateId,
    ) -> Result<Published, Error> {
        let source = from.state_source(state)?;
        let staged = self.stage()?;
        let tree = places(staged.path());
        self.files.create_dir(&tree.disks)?;
        self.files.create_dir(&tree.memory)?;
        for (name, path) in source
            .members()?
            .into_iter()
            .filter(|(name, _)| !name.starts_with("execs/"))
        {
            self.files.share(&path, &tree.own.join(name))?;
        }
        self.files
            .share_tree(&source.execs(), &tree.own.join("execs"))?;
        self.files
            .create(&tree.own.join("warm.json"), &canonical(record))?;
        self.write_seal(tree, &from.known_digests()?)?;
        staged.publish(&self.layout.warm(key))
    }

    /// Publishing makes it durable, so the seal can be written before.
    fn write_seal(&self, tree: Places, known: &Digests) -> Result<(), Error> {
        let path = tree.own.join("sealed.json");
        let digests = StateSource::read(&self.files, tree)?.digests(known)?;
        self.files.create(&path, &canonical(&Sealed::new(digests)))
    }

    /// Removes a warm image. Sandboxes made from it have links of their own. Doing it again is no
    /// error.
    pub fn remove_warm(&self, key: &Digest) -> Result<(), Error> {
        let shell = Staged::shell(&self.files, &self.layout, &SandboxId::random()?)?;
        optional(
            self.files
                .rename_noreplace(&self.layout.warm(key), shell.path()),
        )?;
        match self.files.sync_dir(&self.layout.warm_dir()) {
            Ok(()) => shell.discard(),
            Err(error) => {
                // A rename that is not durable yet must not be followed by a removal.
                shell.keep();
                Err(error)
            }
        }
    }
}

fn places(dir: &Path) -> Places {
    Places {
        own: dir.to_owned(),
        disks: dir.join("disks"),
        memory: dir.join("memory"),
    }
}
