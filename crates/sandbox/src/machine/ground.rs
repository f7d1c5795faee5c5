//! What the memory and the disk of a machine stand on.

use std::collections::BTreeMap;
use std::ops::Range;

use sandtree_engine::PreparedOverlay;
use sandtree_store::LayerId;
use sandtree_store::memory::{Layer, PageRun};

use crate::pages;

/// What a live machine stands on.
#[derive(Debug)]
pub(crate) struct Ground {
    /// The memory layers below the machine's own writes, bottom first. `None`: no layer can be put
    /// on them, so the next capture takes all of memory.
    pub layers: Option<Vec<LayerId>>,
    /// How many of them there were when its process started.
    pub at_start: usize,
    /// Pages that a failed capture has taken out of the tracking.
    pub carried: Vec<PageRun>,
    /// An overlay that is ready to be switched to.
    pub prepared: Option<(LayerId, PreparedOverlay)>,
    /// The runs of the layers of its start together.
    runs_at_start: usize,
    /// The runs of each later layer.
    runs: BTreeMap<LayerId, usize>,
}

impl Ground {
    /// The ground of a machine that was restored from these layers; a booted machine has none.
    pub fn new(layers: Vec<LayerId>, runs: usize) -> Self {
        Self {
            at_start: layers.len(),
            layers: Some(layers),
            carried: Vec::new(),
            prepared: None,
            runs_at_start: runs,
            runs: BTreeMap::new(),
        }
    }

    /// The ground of a machine that was restored from QEMU's own stream.
    pub fn without_layers() -> Self {
        Self {
            layers: None,
            at_start: 0,
            carried: Vec::new(),
            prepared: None,
            runs_at_start: 0,
            runs: BTreeMap::new(),
        }
    }

    pub fn held(&self) -> Vec<LayerId> {
        self.layers.clone().unwrap_or_default()
    }

    /// The runs of all layers together: a restore makes at most this many mappings from them.
    pub fn runs(&self) -> usize {
        self.runs_at_start + self.runs.values().sum::<usize>()
    }

    /// Returns the layers of a head's disk below the layer that the guest writes to. The guest
    /// writes to the last layer, or to the last but one, if the last is only prepared.
    pub fn frozen<'a>(&self, disk: &'a [LayerId]) -> &'a [LayerId] {
        let written = 1 + usize::from(self.prepared.is_some());
        &disk[..disk.len().saturating_sub(written)]
    }

    /// Replaces layers by the one layer that they were folded into, if the machine still stands on
    /// them. Layers that were captured meanwhile stay, and so do their runs.
    pub fn replace(&mut self, old: &[LayerId], new: LayerId, runs: Folded) {
        let Some(layers) = &mut self.layers else {
            return;
        };
        let Some(folded) = position(layers, old) else {
            return;
        };
        // A layer that holds one from the start of the process counts as such: those above it hold
        // only newer pages.
        if self.at_start > folded.start {
            self.at_start = self.at_start.max(folded.end) - old.len() + 1;
        }
        layers.splice(folded, [new.clone()]);
        let later = old.iter().filter_map(|layer| self.runs.remove(layer));
        let of_start = runs.before.saturating_sub(later.sum());
        self.runs_at_start = self.runs_at_start.saturating_sub(of_start);
        self.runs.insert(new, runs.after);
    }
}

/// Where layers stand among others, next to each other.
pub(crate) fn position(layers: &[LayerId], wanted: &[LayerId]) -> Option<Range<usize>> {
    let mut places = layers.windows(wanted.len().max(1));
    let start = places.position(|window| window == wanted)?;
    Some(start..start + wanted.len())
}

/// How many runs layers had before they were folded into one, and how many that one has.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Folded {
    pub before: usize,
    pub after: usize,
}

/// A memory layer that was just written.
pub(crate) struct NewLayer {
    pub id: LayerId,
    pub layer: Layer,
}

/// Which pages a layer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Covers {
    /// All of memory.
    Everything,
    /// All that was written since the process started.
    SinceStart,
    /// All that was written since the layer below it.
    SinceLast,
}

impl Ground {
    /// Keeps pages that a capture took out of the tracking and could not write.
    pub fn carry(&mut self, runs: &[PageRun]) {
        self.carried = pages::union(std::mem::take(&mut self.carried), runs);
    }

    pub fn push(&mut self, layer: &NewLayer) {
        self.runs.insert(layer.id.clone(), layer.layer.pieces());
        self.layers.get_or_insert_default().push(layer.id.clone());
    }

    /// Puts the machine on a new layer, which holds everything that was carried or tracked.
    pub fn stand_on(&mut self, layer: &NewLayer, covers: Covers) {
        self.carried.clear();
        match covers {
            Covers::Everything => {
                self.lose_layers();
                self.layers = Some(Vec::new());
            }
            // The new layer replaces the layers that held part of it.
            Covers::SinceStart => {
                let layers = self.layers.get_or_insert_default();
                layers.truncate(self.at_start);
                self.runs.retain(|layer, _| layers.contains(layer));
            }
            Covers::SinceLast => {}
        }
        self.push(layer);
    }

    /// The layers that a new one is put on.
    pub fn below(&self, covers: Covers) -> &[LayerId] {
        let layers = self.layers.as_deref().unwrap_or_default();
        match covers {
            Covers::Everything => &[],
            Covers::SinceStart => &layers[..self.at_start.min(layers.len())],
            Covers::SinceLast => layers,
        }
    }

    /// Forgets the layers: the next capture takes all of memory.
    pub fn lose_layers(&mut self) {
        self.layers = None;
        self.at_start = 0;
        self.runs_at_start = 0;
        self.runs.clear();
        self.carried.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids<const N: usize>() -> [LayerId; N] {
        std::array::from_fn(|_| LayerId::random().expect("there is randomness"))
    }

    #[test]
    fn a_layer_is_put_on_those_that_it_does_not_replace() {
        let [a, b, since] = ids();
        let mut ground = Ground::new(vec![a.clone(), b.clone()], 2);
        ground.layers.get_or_insert_default().push(since.clone());
        assert_eq!(
            ground.below(Covers::SinceLast),
            [a.clone(), b.clone(), since]
        );
        assert_eq!(ground.below(Covers::SinceStart), [a, b]);
        assert_eq!(ground.below(Covers::Everything), []);
        ground.lose_layers();
        assert_eq!(ground.below(Covers::SinceStart), []);
    }

    #[test]
    fn a_fold_leaves_the_runs_of_its_result_and_of_later_layers() {
        let [a, b, later, folded] = ids();
        let mut ground = Ground::new(vec![a.clone(), b.clone(), later.clone()], 90 + 7);
        let runs = Folded {
            before: 90,
            after: 40,
        };
        ground.replace(&[a, b], folded.clone(), runs);
        assert_eq!(ground.held(), [folded, later]);
        assert_eq!(ground.runs(), 40 + 7);
    }

    #[test]
    fn layers_that_are_replaced_take_their_runs_along() {
        let [start, first, second] = ids();
        let mut ground = Ground::new(vec![start], 5);
        for id in [first, second] {
            let layer = Layer {
                ram_bytes: 4096,
                data: Vec::new(),
                zero: vec![PageRun { first: 0, count: 1 }],
                data_bytes: 0,
            };
            ground.stand_on(&NewLayer { id, layer }, Covers::SinceStart);
            assert_eq!(ground.runs(), 5 + 1);
        }
        ground.lose_layers();
        assert_eq!(ground.runs(), 0);
    }

    #[test]
    fn a_fold_above_the_bottom_leaves_what_is_below_it() {
        let [a, b, c, d, folded] = ids();
        let layers = [&a, &b, &c, &d].map(Clone::clone);
        let runs = Folded::default();
        // How many layers a process started with, and with how many it did after the fold.
        for (at_start, after) in [(1, 1), (2, 2), (3, 2), (4, 3)] {
            let mut ground = Ground::new(layers.to_vec(), 0);
            ground.at_start = at_start;
            ground.replace(&[b.clone(), c.clone()], folded.clone(), runs);
            assert_eq!(ground.held(), [a.clone(), folded.clone(), d.clone()]);
            assert_eq!(ground.at_start, after);
        }
    }

    #[test]
    fn a_fold_of_what_a_machine_does_not_stand_on_changes_nothing() {
        let [a, b, folded] = ids();
        let mut ground = Ground::new(vec![a.clone()], 5);
        let runs = Folded {
            before: 3,
            after: 1,
        };
        ground.replace(&[b], folded, runs);
        assert_eq!(ground.held(), [a]);
        assert_eq!(ground.runs(), 5);
    }
}
