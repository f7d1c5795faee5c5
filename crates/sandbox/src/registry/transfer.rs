//! Work with a registry on threads of its own, while another tells how far it is and notices who
//! gives up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use sandtree_registry::{self as registry, Cancelled, Client, Descriptor};
use sandtree_store as store;

use crate::image::{self, Progress, Stage, Watch};

/// How often someone who gives up is noticed.
pub(super) const POLL: Duration = Duration::from_millis(100);

/// Does one piece of work on another thread, and gives it up with whoever waits for it.
pub(super) fn while_wanted<T: Send>(
    client: &Client,
    stage: Stage,
    watch: &mut Watch<'_>,
    work: impl FnOnce(registry::Watch<'_>) -> Result<T, image::Error> + Send,
) -> Result<T, image::Error> {
    let mut answer = None;
    counted(client, stage, &[], watch, |told| {
        answer = Some(work(told)?);
        Ok(())
    })?;
    answer.ok_or(image::Error::GivenUp)
}

/// Does a transfer on another thread while this one tells how far it is; how many bytes were moved.
pub(super) fn counted(
    client: &Client,
    stage: Stage,
    layers: &[Descriptor],
    watch: &mut Watch<'_>,
    transfer: impl FnOnce(registry::Watch<'_>) -> Result<(), image::Error> + Send,
) -> Result<u64, image::Error> {
    let total_bytes = layers
        .iter()
        .map(|layer| layer.size)
        .reduce(u64::saturating_add);
    let (moved, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    let told = |bytes| {
        moved.fetch_add(bytes, Ordering::Relaxed);
        if stopped.load(Ordering::Relaxed) {
            Err(Cancelled)
        } else {
            Ok(())
        }
    };
    std::thread::scope(|scope| {
        let (done, over) = mpsc::channel::<()>();
        let transferring = scope.spawn(|| {
            let _done = done;
            transfer(&told)
        });
        while over.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
            let done_bytes = moved.load(Ordering::Relaxed);
            if watch(Progress {
                stage,
                done_bytes,
                total_bytes,
            })
            .is_err()
            {
                stopped.store(true, Ordering::Relaxed);
                client.cancel();
            }
        }
        transferring.join().expect("a transfer does not panic")
    })?;
    if stopped.load(Ordering::Relaxed) {
        Err(image::Error::GivenUp)
    } else {
        Ok(moved.into_inner())
    }
}

/// What the store tells and asks, for whoever watches a transfer.
pub(super) struct Told<'a>(pub registry::Watch<'a>);

impl store::Progress for Told<'_> {
    fn begin(&self, _total_bytes: u64) {}

    fn advance(&self, bytes: u64) {
        if (self.0)(bytes).is_err() {
            tracing::debug!("a transfer was given up; whoever works for it asks next");
        }
    }

    fn is_cancelled(&self) -> bool {
        (self.0)(0).is_err()
    }
}
