//! Which page comes from where: the pure part of putting layers on top of each other.

use super::{DataRun, Layer, Mapping, PAGE, PageRun};

/// What is to be mapped over zeros to get the memory that `layers`, bottom first, make together. In
/// ascending order; the newest layer wins, pages that are zero are left out, and neighbours that go
/// on in one file are one mapping.
pub fn plan<'a>(layers: impl IntoIterator<Item = &'a Layer>) -> Vec<Mapping> {
    layers
        .into_iter()
        .enumerate()
        .fold(Vec::new(), |below, (index, layer)| {
            lay_over(below, layer, index)
        })
}

/// One step through `below` and the layer's runs, both in order.
fn lay_over(below: Vec<Mapping>, layer: &Layer, index: usize) -> Vec<Mapping> {
    let mut merged = Vec::with_capacity(below.len() + layer.data.len());
    let mut lower = below.into_iter();
    let mut rest = lower.next();
    for (pages, file_offset) in runs(layer) {
        while let Some(piece) = rest.filter(|piece| piece.first_page < pages.first) {
            add(&mut merged, until(piece, pages.first));
            rest = from(piece, pages.first).or_else(|| lower.next());
        }
        while let Some(hidden) = rest.filter(|piece| piece.first_page < pages.end()) {
            rest = from(hidden, pages.end()).or_else(|| lower.next());
        }
        if let Some(file_offset) = file_offset {
            let mapping = Mapping {
                first_page: pages.first,
                pages: pages.count,
                layer: index,
                file_offset,
            };
            add(&mut merged, mapping);
        }
    }
    rest.into_iter()
        .chain(lower)
        .for_each(|piece| add(&mut merged, piece));
    merged
}

/// All runs of a layer in ascending order; a zero run has no place in the file.
pub(super) fn runs(layer: &Layer) -> impl Iterator<Item = (PageRun, Option<u64>)> {
    let mut data = layer
        .data
        .iter()
        .map(|DataRun { pages, file_offset }| (*pages, Some(*file_offset)))
        .peekable();
    let mut zero = layer.zero.iter().map(|pages| (*pages, None)).peekable();
    std::iter::from_fn(move || match (data.peek(), zero.peek()) {
        (Some((data_pages, _)), Some((zero_pages, _))) if zero_pages.first < data_pages.first => {
            zero.next()
        }
        (Some(_), _) => data.next(),
        (None, _) => zero.next(),
    })
}

fn add(mappings: &mut Vec<Mapping>, next: Mapping) {
    let goes_on = |last: &&mut Mapping| {
        let place = (last.layer, last.end(), last.file_offset + last.pages * PAGE);
        place == (next.layer, next.first_page, next.file_offset)
    };
    match mappings.last_mut().filter(goes_on) {
        Some(last) => last.pages += next.pages,
        None => mappings.push(next),
    }
}

/// The part of a mapping before `page`.
fn until(mapping: Mapping, page: u64) -> Mapping {
    Mapping {
        pages: mapping.end().min(page) - mapping.first_page,
        ..mapping
    }
}

/// The part of a mapping from `page` on, if there is one.
fn from(mapping: Mapping, page: u64) -> Option<Mapping> {
    let skipped = page.saturating_sub(mapping.first_page);
    (skipped < mapping.pages).then(|| Mapping {
        first_page: mapping.first_page + skipped,
        pages: mapping.pages - skipped,
        file_offset: mapping.file_offset + skipped * PAGE,
        ..mapping
    })
}

/// Joins ascending runs that touch, and then over the smallest gaps until at most `max_runs` (and
/// at least one) are left. What is in such a gap is part of a run from then on.
pub fn coalesce(mut runs: Vec<PageRun>, max_runs: usize) -> Vec<PageRun> {
    let touching = runs
        .windows(2)
        .filter(|pair| pair[0].end() == pair[1].first)
        .count();
    let excess = runs.len().saturating_sub(max_runs.max(1));
    let mut joined = smallest_gaps(&runs, touching.max(excess)).into_iter();
    runs.dedup_by(|next, run| {
        let join = joined.next().is_some_and(|join| join);
        if join {
            run.count = next.end() - run.first;
        }
        join
    });
    runs
}

/// For the gap behind each run: is it one of the `wanted` smallest? Of equal ones the first are
/// taken.
fn smallest_gaps(runs: &[PageRun], wanted: usize) -> Vec<bool> {
    let gap = |(index, pair): (usize, &[PageRun])| (pair[1].first - pair[0].end(), index);
    let mut gaps: Vec<_> = runs.windows(2).enumerate().map(gap).collect();
    if wanted < gaps.len() {
        gaps.select_nth_unstable(wanted);
    }
    let mut chosen = vec![false; gaps.len()];
    gaps[..wanted]
        .iter()
        .for_each(|(_, index)| chosen[*index] = true);
    chosen
}
