//! Folds layers in the background: later states stand on one layer instead of many. Existing states
//! keep their layers.
//!
//! ```text
//!   machine stands on  a b c d … x   --fold-->  a [b…x] y z      y, z: captured during the fold
//! ```
//!
//! A layer at the bottom that is larger than all above it is not folded: see [`fold::begin_of`].
//!
//! Always: a fold does not stop the guest, and changes no existing layer.
//! When it fails: the layers stay as they are, and the next capture tries again.

use std::fs::File;

use sandtree_store::LayerId;
use sandtree_store::memory::{self, Gaps, Layer, MemoryWriter};
use tokio::task::JoinHandle;

use super::Driver;
use crate::blocking::blocking;
use crate::error::{Error, Result, engine_error, store_error};
use crate::files::open;
use crate::fold::{self, DISK_LAYERS, DiskFold};
use crate::machine::ground::{Folded, position};
use crate::machine::running::Running;

/// More memory layers than this are folded.
const MEMORY_LAYERS: usize = 24;
/// Layers with more pieces of memory than this are folded: each piece is a mapping in every machine
/// that is restored from them.
const MAPPINGS: usize = 8192;
/// At these depths a capture waits for the fold: a machine has a limited number of descriptors.
const MEMORY_LAYERS_MAX: usize = 56;
const DISK_LAYERS_MAX: usize = 40;
/// A machine with more overlays than this could not be restored.
const DISK_LAYERS_LAST: usize = 45;

/// A fold that runs in the background.
#[derive(Debug)]
pub(super) struct Folding {
    what: What,
    /// The layers that are folded, bottom first.
    old: Vec<LayerId>,
    new: LayerId,
    work: JoinHandle<Result<Folded>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Memory,
    Disk,
}

impl Folding {
    /// The layers that must not be collected while the fold runs.
    pub fn held(&self) -> Vec<LayerId> {
        self.old.iter().chain([&self.new]).cloned().collect()
    }

    /// Waits until the fold has stopped writing. The next collection removes its result, which no
    /// head and no state lists.
    pub async fn give_up(self) {
        if let Ok(Err(error)) = self.work.await {
            tracing::debug!(%error, "a fold failed; its result is not needed any more");
        }
    }

    /// Waits for the end of the fold. A caller that stops waiting may call it again.
    pub async fn done(&mut self) -> Result<Folded> {
        match (&mut self.work).await {
            Ok(folded) => folded,
            Err(error) => Err(Error::io("fold", "layers", error.into())),
        }
    }
}

impl Driver {
    /// Begins a fold if the machine stands on too many layers and no fold is running.
    pub(super) fn fold_if_deep(&mut self) {
        if self.folding.is_some() {
            return;
        }
        match self.begin_fold() {
            Ok(folding) => self.folding = folding,
            Err(error) => tracing::warn!(%error, "layers cannot be folded now"),
        }
    }

    fn begin_fold(&self) -> Result<Option<Folding>> {
        let Some(running) = &self.running else {
            return Ok(None);
        };
        let layers = running.ground.held();
        // A fold of all layers has the fewest pieces.
        if running.ground.runs() > MAPPINGS && !layers.is_empty() {
            return self.begin_memory_fold(&layers, Gaps::Zero).map(Some);
        }
        if layers.len() > MEMORY_LAYERS {
            let files = layers.iter().map(|id| self.dir().memory_layer(id));
            let begin = fold::begin_of(files)?;
            let gaps = if begin == 0 { Gaps::Zero } else { Gaps::Below };
            return self.begin_memory_fold(&layers[begin..], gaps).map(Some);
        }
        let head = self.head()?;
        let frozen = running.ground.frozen(&head.disk);
        if frozen.len() > DISK_LAYERS {
            let begin = fold::begin_disk(self.owned(), frozen)?;
            return self.begin_disk_fold(frozen[begin..].to_vec()).map(Some);
        }
        Ok(None)
    }

    fn begin_memory_fold(&self, old: &[LayerId], gaps: Gaps) -> Result<Folding> {
        let (new, file) = self
            .owned()
            .memory_file()
            .map_err(store_error("make a memory layer"))?;
        let files = old
            .iter()
            .map(|id| open(&self.dir().memory_layer(id)))
            .collect::<Result<Vec<_>>>()?;
        let work = tokio::spawn(blocking(move || fold_memory(files, gaps, file)));
        Ok(Folding {
            what: What::Memory,
            old: old.to_vec(),
            new,
            work,
        })
    }

    fn begin_disk_fold(&self, old: Vec<LayerId>) -> Result<Folding> {
        let fold = DiskFold::new(self.owned(), &old)?;
        let new = fold.id().clone();
        Ok(Folding {
            what: What::Disk,
            old,
            new,
            work: tokio::spawn(blocking(move || fold.write().map(|()| Folded::default()))),
        })
    }

    /// Puts the machine on the result of a fold that has ended. Returns whether the result could be
    /// used; if not, the next capture tries again.
    pub(super) async fn folded(&mut self, folded: Result<Folded>) -> bool {
        let Some(folding) = self.folding.take() else {
            return false;
        };
        let used = match folded {
            Ok(runs) => self.stand_on_folded(&folding, runs).await,
            Err(error) => Err(error),
        };
        self.collect();
        if let Err(error) = used {
            tracing::warn!(%error, "layers could not be folded");
            return false;
        }
        // There may be too many layers of the other kind, too.
        self.fold_if_deep();
        true
    }

    async fn stand_on_folded(&mut self, folding: &Folding, runs: Folded) -> Result<()> {
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        match folding.what {
            What::Memory => running
                .ground
                .replace(&folding.old, folding.new.clone(), runs),
            What::Disk => self.rebase(folding).await?,
        }
        Ok(())
    }

    async fn rebase(&self, folding: &Folding) -> Result<()> {
        let mut head = self.head()?;
        let Some(folded) = position(&head.disk, &folding.old) else {
            return Ok(());
        };
        head.disk.splice(folded, [folding.new.clone()]);
        self.owned()
            .freeze_disk(&folding.new)
            .map_err(store_error("seal an overlay"))?;
        let Running {
            machine, ground, ..
        } = self.running.as_ref().expect("it was looked at");
        let below = ground.frozen(&head.disk).iter();
        let files = below
            .map(|id| open(&self.dir().disk_layer(id)))
            .collect::<Result<_>>()?;
        machine
            .rebase(files)
            .await
            .map_err(engine_error("stand on folded overlays"))?;
        self.set_head(&head)
    }

    /// Waits for folds before a capture that would add one layer too many. Fails if the disk still
    /// has too many.
    pub(super) async fn wait_if_too_deep(&mut self) -> Result<()> {
        let memory = self
            .running
            .as_ref()
            .map_or(0, |running| running.ground.held().len());
        if memory < MEMORY_LAYERS_MAX && self.head()?.disk.len() < DISK_LAYERS_MAX {
            return Ok(());
        }
        self.fold_if_deep();
        while let Some(folding) = &mut self.folding {
            let done = folding.done().await;
            if !self.folded(done).await {
                break;
            }
        }
        if self.head()?.disk.len() < DISK_LAYERS_LAST {
            Ok(())
        } else {
            Err(Error::TooDeep {
                name: self.name(),
                layers: self.head()?.disk.len(),
                source: None,
            })
        }
    }
}

fn fold_memory(files: Vec<File>, gaps: Gaps, out: File) -> Result<Folded> {
    let read = |file: File| Layer::read(&file).map(|layer| (layer, file));
    let layers = files
        .into_iter()
        .map(read)
        .collect::<std::result::Result<Vec<_>, _>>();
    let layers = layers.map_err(store_error("read a memory layer"))?;
    let ram_bytes = layers.first().map_or(0, |(layer, _)| layer.ram_bytes);
    let writer = MemoryWriter::new(out, ram_bytes).map_err(store_error("write a memory layer"))?;
    let before = layers.iter().map(|(layer, _)| layer.pieces()).sum();
    let folded = memory::fold(&layers, gaps, writer).map_err(store_error("fold memory layers"))?;
    Ok(Folded {
        before,
        after: folded.pieces(),
    })
}
