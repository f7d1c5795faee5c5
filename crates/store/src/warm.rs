//! Warm images: captured boots, by a key that the caller computes from everything that shapes one.
//!
//! Always: a warm image is sealed and durable before it is seen. Whoever made one first wins; which of two equal ones
//! it is does not matter.

use std::path::Path;

use crate::fs::optional;
use crate::publish::{Published, Staged};
use crate::record::canonical;
use crate::state::{Digests, Places, Sealed};
use crate::{Digest, Error, SandboxDir, SandboxId, StateId, StateSource, Store};

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
        Ok(entries.iter().filter_map(|entry| entry.name.to_str()?.parse().ok()).collect())
    }

    /// Makes a state of a sandbox a warm image, by links.
    pub fn publish_warm(&self, key: &Digest, from: &SandboxDir, state: &StateId) -> Result<Published, Error> {
        let (source, staged) = (from.state_source(state)?, self.stage()?);
        let tree = places(staged.path());
        self.files.create_dir(&tree.disks)?;
        self.files.create_dir(&tree.memory)?;
        for (name, path) in source.members()?.into_iter().filter(|(name, _)| !name.starts_with("execs/")) {
            self.files.share(&path, &tree.own.join(name))?;
        }
        self.files.share_tree(&source.execs(), &tree.own.join("execs"))?;
        self.write_seal(tree, &from.known_digests()?)?;
        staged.publish(&self.layout.warm(key))
    }

    /// Publishing makes it durable, so the seal can be written before.
    fn write_seal(&self, tree: Places, known: &Digests) -> Result<(), Error> {
        let path = tree.own.join("sealed.json");
        let digests = StateSource::read(&self.files, tree)?.digests(known)?;
        self.files.create(&path, &canonical(&Sealed::new(digests)))
    }

    /// Removes a warm image. Sandboxes made from it have links of their own. Doing it again is no error.
    pub fn remove_warm(&self, key: &Digest) -> Result<(), Error> {
        let shell = Staged::shell(&self.files, &self.layout, &SandboxId::random()?)?;
        optional(self.files.rename_noreplace(&self.layout.warm(key), shell.path()))?;
        self.files.sync_dir(&self.layout.warm_dir())?;
        shell.discard()
    }
}

fn places(dir: &Path) -> Places {
    Places { own: dir.to_owned(), disks: dir.join("disks"), memory: dir.join("memory") }
}
