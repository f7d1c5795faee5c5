//! Sealing: from "in the page cache" to "survives a power loss".
//!
//! ```text
//! every file read-only, synced ──► its digest ──► every directory synced ──► sealed.json, synced
//! ```
//!
//! Always: `sealed.json` is the last thing written. A layer that an earlier seal knows is neither
//! synced nor read again: layers never change, and their ids are never reused. When it fails: a
//! file whose sync failed is doubtful from then on, and no state that has it is ever sealed.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::StateSource;
use crate::record::Record;
use crate::{Digest, Error, publish, record};

/// Digests by the name that a file has in `sealed.json`.
pub(crate) type Digests = BTreeMap<String, Digest>;

/// `sealed.json`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sealed {
    pub schema: u64,
    pub files: Digests,
}

impl Sealed {
    pub(crate) fn new(files: Digests) -> Self {
        Self {
            schema: <Self as Record>::SCHEMA,
            files,
        }
    }

    /// What it knows of layers, which other states may have, too.
    pub(crate) fn layers(self) -> impl Iterator<Item = (String, Digest)> {
        self.files
            .into_iter()
            .filter(|(name, _)| name.starts_with("disks/") || name.starts_with("memory/"))
    }
}

impl Record for Sealed {
    const SCHEMA: u64 = 1;
}

impl StateSource {
    /// Makes all of it durable, then says so. Done already is done.
    pub(crate) fn seal(&self, known: &Digests) -> Result<(), Error> {
        if self.is_sealed()? {
            return Ok(());
        }
        // What an earlier seal knows is durable already.
        for (_, path) in self
            .members()?
            .iter()
            .filter(|(name, _)| !known.contains_key(name))
        {
            self.files.settle_file(path)?;
        }
        let sealed = Sealed::new(self.digests(known)?);
        self.sync_dirs()?;
        publish::replace(
            &self.files,
            &self.places().own.join("sealed.json"),
            &record::canonical(&sealed),
        )
    }

    pub(crate) fn digests(&self, known: &Digests) -> Result<Digests, Error> {
        let digest = |(name, path): (String, PathBuf)| match known.get(&name) {
            Some(digest) => Ok((name, digest.clone())),
            None => self.files.digest(&path).map(|(digest, _)| (name, digest)),
        };
        self.members()?.into_iter().map(digest).collect()
    }

    fn sync_dirs(&self) -> Result<(), Error> {
        let places = self.places();
        publish::sync_dirs(&self.files, &places.own)?;
        self.files.sync_dir(&places.disks)?;
        if !self.manifest().memory.layers().is_empty() {
            self.files.sync_dir(&places.memory)?;
        }
        self.files.sync_dir(publish::parent(&places.own))
    }
}
