//! What the memory and the disk of a machine stand on.

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
    /// The runs of all layers together: a restore makes at most this many mappings from them.
    runs: usize,
}

impl Ground {
    /// The ground of a machine that was restored from these layers; a booted machine has none.
    pub fn new(layers: Vec<LayerId>, runs: usize) -> Self {
        Self {
            at_start: layers.len(),
            layers: Some(layers),
            carried: Vec::new(),
            prepared: None,
            runs,
        }
    }

    /// The ground of a machine that was restored from QEMU's own stream.
    pub fn without_layers() -> Self {
        Self {
            layers: None,
            at_start: 0,
            carried: Vec::new(),
            prepared: None,
            runs: 0,
        }
    }

    pub fn held(&self) -> Vec<LayerId> {
        self.layers.clone().unwrap_or_default()
    }

    pub fn runs(&self) -> usize {
        self.runs
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
        let Some(layers) = self
            .layers
            .as_mut()
            .filter(|layers| layers.starts_with(old))
        else {
            return;
        };
        layers.splice(..old.len(), [new]);
        self.at_start = self.at_start.max(old.len()) - old.len() + 1;
        self.runs = self.runs.saturating_sub(runs.before) + runs.after;
    }
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
        self.runs += layer.layer.pieces();
        self.layers.get_or_insert_default().push(layer.id.clone());
    }

    /// Puts the machine on a new layer, which holds everything that was carried or tracked.
    pub fn stand_on(&mut self, layer: &NewLayer, covers: Covers) {
        self.carried.clear();
        match covers {
            Covers::Everything => {
                self.layers = Some(Vec::new());
                self.at_start = 0;
            }
            // The new layer replaces the layers that held part of it.
            Covers::SinceStart => self.layers.get_or_insert_default().truncate(self.at_start),
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
