//! Folding a disk: layers below the active overlay become one.
//!
//! ```text
//!   a b c … x | y   --fold-->   a [b…x] | y      y: what the next machine writes to
//! ```
//!
//! This module folds a disk at rest, before a machine starts on it. For a running machine, the
//! driver does it with the same [`DiskFold`].
//!
//! Always: no machine starts on a deeper disk than folding leaves, so generations of saves and
//! copies do not accumulate layers. Existing files do not change: states keep the layers that they
//! list. The driver removes layers that nothing lists. When it fails: the unfinished layer is
//! removed, and the machine starts on the unfolded layers, if it can have so many.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use sandtree_engine::OVERLAYS_MAX;
use sandtree_store::{LayerId, NewOverlay, Owned, disk};

use crate::blocking::blocking;
use crate::error::{Error, Result, store_error};
use crate::files::open;

/// The number of layers below the active overlay above which they are folded.
pub(crate) const DISK_LAYERS: usize = 16;
/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Where a fold of layers of these sizes, bottom first, begins: at the lowest layer that is not
/// larger than all above it together. So a large layer is not copied because there are many small
/// ones on top of it. At least half of the layers are folded.
fn begin(bytes: &[u64]) -> usize {
    let mut above = 0;
    let mut begin = bytes.len();
    for (at, layer) in bytes.iter().enumerate().rev() {
        if *layer <= above {
            begin = at;
        }
        above += layer;
    }
    if begin > bytes.len() / 2 { 0 } else { begin }
}

/// Where a fold of these files begins, by what they take on the disk.
pub(crate) fn begin_of(files: impl Iterator<Item = PathBuf>) -> Result<usize> {
    let size = |path: PathBuf| {
        let found = fs::metadata(&path).map_err(|error| Error::io("look at", path, error));
        Ok(found?.blocks() * BLOCK_BYTES)
    };
    let sizes: Vec<u64> = files.map(size).collect::<Result<_>>()?;
    Ok(begin(&sizes))
}

/// A fold that has not been written yet.
#[derive(Debug)]
pub(crate) struct DiskFold {
    layers: Vec<File>,
    new: NewOverlay,
}

impl DiskFold {
    /// Folds `old`, bottom first. Until the head lists the result, the result is garbage.
    pub fn new(owned: &Owned, old: &[LayerId]) -> Result<DiskFold> {
        let layers = old
            .iter()
            .map(|id| open(&owned.disk_layer(id)))
            .collect::<Result<_>>()?;
        let new = owned
            .new_overlay()
            .map_err(store_error("make an overlay"))?;
        Ok(DiskFold { layers, new })
    }

    pub fn id(&self) -> &LayerId {
        self.new.id()
    }

    /// Takes as long as writing does. On a full disk, an unfinished layer is removed.
    pub fn write(self) -> Result<()> {
        let written = self.write_durably();
        if written.is_err()
            && let Err(error) = self.new.discard()
        {
            tracing::warn!(%error, "an unfinished overlay stays until the next collection");
        }
        written
    }

    /// The head that will list the layer is durable, so the layer must be.
    fn write_durably(&self) -> Result<()> {
        disk::fold::fold(&self.layers, self.new.file()).map_err(store_error("fold overlays"))?;
        self.new.sync().map_err(store_error("sync an overlay"))
    }
}

/// The layers of a sandbox's head, for the start of a machine. If they were folded, the head is
/// updated.
pub(crate) async fn head(owned: &Owned) -> Result<Vec<LayerId>> {
    let mut head = owned
        .head()
        .map_err(store_error("read where a sandbox stands"))?;
    let disk = shallow(owned, &head.disk).await?;
    if disk != head.disk {
        head.disk = disk;
        owned
            .set_head(&head)
            .map_err(store_error("write where a sandbox stands"))?;
    }
    Ok(head.disk)
}

/// Layers with the same content as `disk`, for the start of a machine; the last one is the active
/// overlay.
pub(crate) async fn shallow(owned: &Owned, disk: &[LayerId]) -> Result<Vec<LayerId>> {
    let Some((active, below)) = disk
        .split_last()
        .filter(|(_, below)| below.len() > DISK_LAYERS)
    else {
        return Ok(disk.to_vec());
    };
    match folded(owned, below).await {
        Ok(mut disk) => {
            disk.push(active.clone());
            Ok(disk)
        }
        Err(error) if disk.len() <= OVERLAYS_MAX => {
            tracing::warn!(%error, layers = disk.len(), "the layers of a disk could not be folded");
            Ok(disk.to_vec())
        }
        Err(error) => {
            let name = owned.record().name.to_string();
            Err(Error::TooDeep {
                name,
                layers: disk.len(),
                source: Some(Box::new(error)),
            })
        }
    }
}

/// The layers that are left.
async fn folded(owned: &Owned, layers: &[LayerId]) -> Result<Vec<LayerId>> {
    let (kept, old) = layers.split_at(begin_disk(owned, layers)?);
    let fold = DiskFold::new(owned, old)?;
    let new = fold.id().clone();
    blocking(move || fold.write()).await?;
    owned
        .freeze_disk(&new)
        .map_err(store_error("seal an overlay"))?;
    Ok(kept.iter().cloned().chain([new]).collect())
}

/// Where a fold of these layers of a disk begins.
pub(crate) fn begin_disk(owned: &Owned, layers: &[LayerId]) -> Result<usize> {
    begin_of(layers.iter().map(|id| owned.disk_layer(id)))
}

#[cfg(test)]
mod tests;
