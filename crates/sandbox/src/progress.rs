//! The progress of long work, and its cancellation: work on files runs on a thread, and the caller
//! may stop waiting for it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sandtree_store as store;

/// Receives every step of long work.
#[derive(Clone)]
pub struct Progress {
    told: Arc<dyn Fn(Advance) + Send + Sync>,
}

/// A step of long work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    /// The total number of bytes to read or write, as far as known.
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

/// Work that is cancelled when its caller stops waiting.
pub(crate) struct Watched {
    progress: Progress,
    given_up: Arc<AtomicBool>,
}

/// The caller that waits for work on a thread. Dropping it cancels the work.
pub(crate) struct Waiting(Arc<AtomicBool>);

impl Waiting {
    /// The waiting caller, and the flag that the work checks.
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
