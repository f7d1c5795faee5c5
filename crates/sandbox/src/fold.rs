//! Folding a disk: the layers below the overlay that is written to become one.
//!
//! ```text
//!   a b c … x | y   --fold-->   [a…x] | y        y: what the next machine writes to
//! ```
//!
//! Here for a disk at rest, before a machine stands on it; beside a machine that runs, the driver
//! does it with the same [`DiskFold`].
//!
//! Always: no machine is started on a deeper disk than folding leaves, so generations of saves and
//! copies do not add up. Nothing that exists is changed: states keep the layers they list. What
//! nothing lists any more, the driver collects. When it fails: what was written is removed, and the
//! machine starts on the layers as they are, if it can have so many.

use std::fs::File;

use sandtree_engine::OVERLAYS_MAX;
use sandtree_store::{LayerId, NewOverlay, Owned, disk};

use crate::blocking::blocking;
use crate::error::{Error, Result, store_error};
use crate::files::open;

/// Layers below the active overlay beyond which they are folded.
pub(crate) const DISK_LAYERS: usize = 16;

/// A layer that is to be made of others.
#[derive(Debug)]
pub(crate) struct DiskFold {
    layers: Vec<File>,
    new: NewOverlay,
}

impl DiskFold {
    /// Of `old`, bottom first. Until the head lists its result, that is garbage.
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

    /// Takes as long as writing does. On a disk that is full, half a layer would only be in the
    /// way.
    pub fn write(self) -> Result<()> {
        let written = self.write_durably();
        if written.is_err()
            && let Err(error) = self.new.discard()
        {
            tracing::warn!(%error, "an unfinished overlay stays until the next collection");
        }
        written
    }

    /// The head that will list it is durable; so must it be.
    fn write_durably(&self) -> Result<()> {
        disk::fold::fold(&self.layers, self.new.file()).map_err(store_error("fold overlays"))?;
        self.new.sync().map_err(store_error("sync an overlay"))
    }
}

/// The layers of a sandbox's head, to start a machine on. If they were folded, the head says so.
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

/// The layers to start a machine on that are equal to `disk`, whose last is the one to write to.
pub(crate) async fn shallow(owned: &Owned, disk: &[LayerId]) -> Result<Vec<LayerId>> {
    let Some((active, below)) = disk
        .split_last()
        .filter(|(_, below)| below.len() > DISK_LAYERS)
    else {
        return Ok(disk.to_vec());
    };
    match folded(owned, below).await {
        Ok(new) => Ok(vec![new, active.clone()]),
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

async fn folded(owned: &Owned, old: &[LayerId]) -> Result<LayerId> {
    let fold = DiskFold::new(owned, old)?;
    let new = fold.id().clone();
    blocking(move || fold.write()).await?;
    owned
        .freeze_disk(&new)
        .map_err(store_error("seal an overlay"))?;
    Ok(new)
}

#[cfg(test)]
mod tests;
