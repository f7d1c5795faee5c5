//! A snapshot that stays in the store while it is used.

use std::ops::Deref;
use std::sync::Arc;

use sandtree_store::{Pinned, Snapshot};

use crate::inner::Inner;

/// A snapshot that stays while this lives. One that is in the store for this use only goes with it.
#[derive(Debug)]
pub(crate) struct Held {
    /// Nothing once it is let go.
    pinned: Option<Pinned>,
    only_here: Option<Arc<Inner>>,
}

impl Held {
    pub fn lasting(pinned: Pinned) -> Self {
        Self {
            pinned: Some(pinned),
            only_here: None,
        }
    }

    /// It stays when this goes, until a gc takes it.
    pub fn into_lasting(mut self) -> Self {
        self.only_here = None;
        self
    }

    /// Brought into the store, or made, for one use.
    pub fn for_one_use(pinned: Pinned, host: &Arc<Inner>) -> Self {
        Self {
            pinned: Some(pinned),
            only_here: Some(host.clone()),
        }
    }
}

impl Deref for Held {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        self.pinned
            .as_ref()
            .expect("it is there until it is let go")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let (Some(host), Some(pinned)) = (self.only_here.take(), self.pinned.take()) else {
            return;
        };
        if let Err(error) = host.store.let_go(pinned) {
            tracing::warn!(%error, "a snapshot that nobody needs stays until the next gc");
        }
    }
}
