//! Runs of pages: the engine's byte runs, the store's page runs, and their union. Pure.

use sandtree_engine::ByteRun;
use sandtree_store::memory::{PAGE, PageRun};

pub(crate) fn from_bytes(runs: &[ByteRun]) -> Vec<PageRun> {
    runs.iter()
        .map(|run| PageRun {
            first: run.offset / PAGE,
            count: run.bytes / PAGE,
        })
        .collect()
}

pub(crate) fn to_bytes(runs: &[PageRun]) -> Vec<ByteRun> {
    runs.iter()
        .map(|run| ByteRun {
            offset: run.first * PAGE,
            bytes: run.count * PAGE,
        })
        .collect()
}

pub(crate) fn total_bytes(runs: &[PageRun]) -> u64 {
    runs.iter().map(|run| run.count * PAGE).sum()
}

/// The union of both, as ascending runs that do not touch.
pub(crate) fn union(mut runs: Vec<PageRun>, more: &[PageRun]) -> Vec<PageRun> {
    runs.extend_from_slice(more);
    runs.sort_by_key(|run| run.first);
    let mut joined: Vec<PageRun> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last) if run.first <= last.first + last.count => {
                last.count = last.count.max(run.first + run.count - last.first);
            }
            _ => joined.push(run),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn pages(runs: &[PageRun]) -> BTreeSet<u64> {
        runs.iter()
            .flat_map(|run| run.first..run.first + run.count)
            .collect()
    }

    prop_compose! {
        fn run()(first in 0u64..50, count in 1u64..9) -> PageRun {
            PageRun { first, count }
        }
    }

    proptest! {
        #[test]
        fn a_union_has_every_page_once(
            a in prop::collection::vec(run(), 0..12),
            b in prop::collection::vec(run(), 0..12),
        ) {
            let joined = union(a.clone(), &b);
            let expected: BTreeSet<u64> = pages(&a).union(&pages(&b)).copied().collect();
            prop_assert_eq!(pages(&joined), expected.clone());
            prop_assert_eq!(total_bytes(&joined), expected.len() as u64 * PAGE);
            let is_apart = |pair: &[PageRun]| pair[0].first + pair[0].count < pair[1].first;
            prop_assert!(joined.windows(2).all(is_apart));
        }
    }
}
