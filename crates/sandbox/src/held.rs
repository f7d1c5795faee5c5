//! A snapshot that stays in the store while it is used.

use std::ops::Deref;
use std::sync::Arc;

use sandtree_store::{Pinned, Snapshot};

use crate::inner::Inner;

/// A snapshot that stays in the store as long as this. A temporary snapshot is removed with it.
#[derive(Debug)]
pub(crate) struct Held {
    /// `None` after the release.
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

    /// The snapshot outlives this, until a gc removes it.
    pub fn into_lasting(mut self) -> Self {
        self.only_here = None;
        self
    }

    /// A snapshot that was imported or made for one use.
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
            tracing::warn!(%error, "an unused snapshot stays until the next gc");
        }
    }
}
