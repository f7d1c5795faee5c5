//! Pins: they keep a snapshot, an image or a kernel while a process works with it, named or not.
//!
//! A pin is a file in a locked staging directory. It says what it holds, and goes with its holder.
//!
//! Always: a pin is written under the store's lock, and `gc` reads every pin under that lock before
//! it removes anything: what is seen and pinned in one hold of the lock stays.

use std::ops::Deref;

use super::Snapshot;
use crate::pin::Pin;
use crate::publish::Staged;
use crate::{Digest, Error, SandboxId, Store, lock};

/// A snapshot that stays while this lives.
#[derive(Debug)]
pub struct Pinned {
    snapshot: Snapshot,
    _held: Staged,
}

impl Pinned {
    pub(super) fn new(snapshot: Snapshot, held: Staged) -> Self {
        Self {
            snapshot,
            _held: held,
        }
    }
}

impl Deref for Pinned {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        &self.snapshot
    }
}

impl Store {
    /// Keeps a snapshot, named or not, while the result lives.
    pub fn pin(&self, digest: &Digest) -> Result<Pinned, Error> {
        let shell = Staged::shell(&self.files, &self.layout, &SandboxId::random()?)?;
        let _store = lock::store(&self.files, &self.layout)?;
        shell.write_pin(&Pin::Snapshot(digest.clone()))?;
        Ok(Pinned::new(self.snapshot(digest)?, shell))
    }

    /// Releases a snapshot; one without a name is removed at once.
    pub fn let_go(&self, pinned: Pinned) -> Result<(), Error> {
        let digest = pinned.digest.clone();
        drop(pinned);
        self.collect_snapshot(&digest)
    }
}
