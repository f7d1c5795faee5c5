//! Transfers of many blobs at a time.

use std::collections::HashSet;
use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::client::Client;
use crate::document::Descriptor;
use crate::error::Error;
use crate::pull::BlobTarget;
use crate::watch::{Cancelled, Watch};

/// Does the work for every item, on at most so many threads. The first error is returned, and ends
/// the others at their next byte. The watch receives the bytes of all items.
pub fn parallel<T: Sync>(
    threads: NonZeroUsize,
    items: &[T],
    watch: Watch,
    work: &(dyn Fn(&T, Watch) -> Result<(), Error> + Sync),
) -> Result<(), Error> {
    let next = AtomicUsize::new(0);
    let stopped = AtomicBool::new(false);
    let first = Mutex::new(None);
    let guarded = |bytes| {
        if stopped.load(Ordering::Relaxed) {
            Err(Cancelled)
        } else {
            watch(bytes)
        }
    };
    let worker = || {
        while !stopped.load(Ordering::Relaxed) {
            let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            if let Err(error) = work(item, &guarded) {
                let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                stopped.store(true, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.get().min(items.len()) {
            scope.spawn(worker);
        }
        worker();
    });
    first
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .map_or(Ok(()), Err)
}

/// Fetches blobs, each to a target of its own. A digest that appears twice is fetched once.
pub fn fetch_all<T: BlobTarget>(
    client: &Client,
    repository: &str,
    descriptors: &[Descriptor],
    threads: NonZeroUsize,
    target: &(dyn Fn(&Descriptor) -> io::Result<T> + Sync),
    watch: Watch,
) -> Result<(), Error> {
    let mut seen = HashSet::new();
    let mut wanted = descriptors
        .iter()
        .filter(|descriptor| seen.insert(descriptor.digest))
        .collect::<Vec<_>>();
    // A large blob that started last would keep only one thread busy at the end.
    wanted.sort_by_key(|descriptor| std::cmp::Reverse(descriptor.size));
    parallel(threads, &wanted, watch, &|descriptor, watch| {
        let opened = target(descriptor);
        let mut to = opened
            .map_err(|source| Error::io("open", format!("blob {}", descriptor.digest), source))?;
        client.blob(repository, descriptor, &mut to, watch)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    const THREE: NonZeroUsize = NonZeroUsize::new(3).unwrap();

    #[test]
    fn all_items_are_processed_and_their_bytes_summed() {
        let sum = AtomicU64::new(0);
        let watch = |bytes| {
            sum.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        };
        let items = (1..=100).collect::<Vec<u64>>();
        parallel(THREE, &items, &watch, &|item, watch| Ok(watch(*item)?)).unwrap();
        assert_eq!(sum.into_inner(), 5050);
    }

    #[test]
    fn the_first_error_ends_the_others_and_is_returned() {
        let items = [0, 1, 2];
        let error = parallel(THREE, &items, &|_| Ok(()), &|item, watch| {
            if *item == 1 {
                return Err(Error::reference("x", "this one fails"));
            }
            loop {
                watch(0)?;
                thread::yield_now();
            }
        });
        assert!(matches!(error, Err(Error::Reference { .. })), "{error:?}");
    }
}
