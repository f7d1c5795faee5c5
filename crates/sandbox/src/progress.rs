//! The progress of long work, and its cancellation: work on files runs on a thread, and the caller
//! may stop waiting for it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

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

    /// As [`run`](Self::run), but a caller that stops waiting is blocked until the work has ended,
    /// and its result is dropped.
    pub async fn run_to_end<T: Send + 'static>(
        progress: Progress,
        work: impl FnOnce(&dyn store::Progress) -> T + Send + 'static,
    ) -> T {
        // Dropped in the reverse order: the work is cancelled before its end is awaited.
        let (working, _until_ended) = UntilEnded::new();
        let running = Self::run(progress, move |progress| (work(progress), working));
        let (done, _working) = running.await;
        done
    }
}

/// Blocks in its drop until the [`Working`] is dropped.
struct UntilEnded(Receiver<()>);

struct Working {
    _ended: SyncSender<()>,
}

impl UntilEnded {
    fn new() -> (Working, Self) {
        let (ended, until) = sync_channel(0);
        (Working { _ended: ended }, Self(until))
    }
}

impl Drop for UntilEnded {
    fn drop(&mut self) {
        // Nothing is ever sent.
        while self.0.recv().is_ok() {}
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
