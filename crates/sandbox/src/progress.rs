//! How far long work is, and how it is given up: work on files runs on a thread, and whoever waits
//! for it may stop.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sandtree_store as store;

/// Told of every step of long work.
#[derive(Clone)]
pub struct Progress {
    told: Arc<dyn Fn(Advance) + Send + Sync>,
}

/// A step of long work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    /// So many bytes are to be read or written in all, as far as known.
    Begin {
        total_bytes: u64,
    },
    Bytes(u64),
}

impl Progress {
    pub fn new(told: impl Fn(Advance) + Send + Sync + 'static) -> Self {
        Self {
            told: Arc::new(told),
        }
    }

    pub fn silent() -> Self {
        Self::new(|_| {})
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// Work that is given up when nobody waits for it any more.
pub(crate) struct Watched {
    progress: Progress,
    given_up: Arc<AtomicBool>,
}

/// Somebody waits for work on a thread. Dropped, nobody does.
pub(crate) struct Waiting(Arc<AtomicBool>);

impl Waiting {
    /// For whoever waits, and what the work looks at.
    pub fn new() -> (Self, Arc<AtomicBool>) {
        let given_up = Arc::new(AtomicBool::new(false));
        (Self(given_up.clone()), given_up)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Watched {
    pub async fn run<T: Send + 'static>(
        progress: Progress,
        work: impl FnOnce(&dyn store::Progress) -> T + Send + 'static,
    ) -> T {
        let (_waiting, given_up) = Waiting::new();
        let watched = Watched { progress, given_up };
        crate::blocking::blocking(move || work(&watched)).await
    }
}

impl store::Progress for Watched {
    fn begin(&self, total_bytes: u64) {
        (self.progress.told)(Advance::Begin { total_bytes });
    }

    fn advance(&self, bytes: u64) {
        (self.progress.told)(Advance::Bytes(bytes));
    }

    fn is_cancelled(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }
}
