//! Transfers on threads of their own, while the job's thread reports progress and notices that the
//! job is cancelled.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use sandtree_registry::{self as registry, Cancelled, Client, Descriptor};
use sandtree_store as store;

use crate::error::{Error, Result};
use crate::job::{Job, Progress, Stage};

/// How often a transfer reports, and notices that its job is cancelled.
pub(crate) const POLL: Duration = Duration::from_millis(100);

/// The size of all layers together.
pub(crate) fn total_bytes<'a>(layers: impl IntoIterator<Item = &'a Descriptor>) -> u64 {
    let sizes = layers.into_iter().map(|layer| layer.size);
    sizes.fold(0, u64::saturating_add)
}

/// The progress of a transfer: written by its threads, read by the job's thread.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    moved_bytes: AtomicU64,
    stopped: AtomicBool,
}

impl Counter {
    /// Counts bytes that were moved. Fails once the transfer is stopped.
    pub fn add(&self, bytes: u64) -> Result<(), Cancelled> {
        self.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
        if self.is_stopped() {
            return Err(Cancelled);
        }
        Ok(())
    }

    pub fn bytes(&self) -> u64 {
        self.moved_bytes.load(Ordering::Relaxed)
    }

    /// Ends the transfer at its next byte, and the requests that wait for one.
    pub fn stop(&self, client: &Client) {
        self.stopped.store(true, Ordering::Relaxed);
        client.cancel();
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// Does one piece of work on another thread, and stops it if the job is cancelled.
pub(crate) fn on_thread<T: Send>(
    job: &mut Job<'_>,
    client: &Client,
    stage: Stage,
    work: impl FnOnce(registry::Watch<'_>) -> Result<T> + Send,
) -> Result<T> {
    let mut answer = None;
    let transfer = Transfer {
        client,
        stage,
        layers: &[],
    };
    transfer.run(job, |watch| {
        answer = Some(work(watch)?);
        Ok(())
    })?;
    answer.ok_or(Error::Cancelled)
}

/// A transfer of layers.
pub(crate) struct Transfer<'a> {
    pub client: &'a Client,
    pub stage: Stage,
    /// The layers that are transferred, for the total.
    pub layers: &'a [Descriptor],
}

impl Transfer<'_> {
    /// Does the transfer on another thread, and stops it if the job is cancelled. Returns how many
    /// bytes were moved.
    pub fn run(
        &self,
        job: &mut Job<'_>,
        work: impl FnOnce(registry::Watch<'_>) -> Result<()> + Send,
    ) -> Result<u64> {
        let counter = Counter::default();
        std::thread::scope(|scope| {
            let (done, over) = mpsc::channel::<()>();
            let working = scope.spawn(|| {
                // Dropped at the end, however the work ends, which ends the loop below.
                let _done = done;
                work(&|bytes| counter.add(bytes))
            });
            while over.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
                if self.report(job, &counter).is_err() {
                    counter.stop(self.client);
                }
            }
            working.join().expect("a transfer does not panic")
        })?;
        if counter.is_stopped() {
            return Err(Error::Cancelled);
        }
        Ok(counter.bytes())
    }

    fn report(&self, job: &mut Job<'_>, counter: &Counter) -> Result<()> {
        let is_counted = !self.layers.is_empty();
        job.report(Progress {
            stage: self.stage,
            done_bytes: counter.bytes(),
            total_bytes: is_counted.then(|| total_bytes(self.layers)),
        })
    }
}

/// Lets the store report to, and be cancelled by, a transfer's watch.
pub(crate) struct StoreProgress<'a>(pub registry::Watch<'a>);

impl store::Progress for StoreProgress<'_> {
    fn begin(&self, _total_bytes: u64) {}

    fn advance(&self, bytes: u64) {
        if (self.0)(bytes).is_err() {
            tracing::debug!("a transfer is cancelled; the store notices when it asks next");
        }
    }

    fn is_cancelled(&self) -> bool {
        (self.0)(0).is_err()
    }
}
