//! Folds several overlays into one.
//!
//! ```text
//! header | refcount table | L1 table | L2 table, its data clusters | L2 table, … | refcount blocks
//! ```
//!
//! The new overlay is written from front to back. Every cluster of it is used once and counted
//! once, so nothing needs to be freed and nothing leaks. Data is shared with the layers
//! (FICLONERANGE) where the file system supports it, and copied elsewhere. Cloning ranges, rather
//! than the largest layer as a whole, shares the data of *all* layers and none of the data that
//! newer layers replaced.
//!
//! Each cluster comes from the newest layer that has it. A zero cluster hides the layers below and
//! stays a zero cluster. A cluster that no layer has stays unallocated, and so comes from the layer
//! below the result.
//!
//! Sizes: disks only grow. So no layer may be smaller than the one below it, and the disk below the
//! bottom layer must not be larger than that layer. The result has the size of the newest layer. A
//! layer that ends before a cluster reads as zeros there, and so does everything below it, because
//! it is no larger: an unallocated cluster in the result has the same meaning. In the cluster where
//! such a layer ends, bytes after its end read as zeros, too, and are written as zeros.
//!
//! Always: the layers are hostile. An entry that points outside its file ends the fold, and so does
//! a layer that refers to more clusters than its file has: apart from tables, the result is never
//! larger than all layers together. Refcounts of the layers are not read. The header is written
//! last, so an incomplete result is not a qcow2 file. Memory holds the L1 tables and one L2 table
//! of each layer. Nothing is synced.
//!
//! When it fails: the file is useless, and its owner removes it.

mod clone;
mod output;
#[cfg(test)]
mod tests;

use std::fs::File;

use super::layer::{Layer, pick};
use super::overlay::L2_SPAN;
use crate::Error;
use output::Output;

/// The result of a fold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Folded {
    /// The length of the new file.
    pub bytes: u64,
    /// The data is shared with the layers by the file system, not copied.
    pub cloned: bool,
}

/// Writes one overlay that is equal to all `layers`, bottom first, into `out`, an empty file.
pub fn fold(layers: &[File], out: &File) -> Result<Folded, Error> {
    let layers = layers
        .iter()
        .enumerate()
        .map(|(index, file)| Layer::open(index, file));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let size = folded_size(&layers)?;
    let mut output = Output::new(out, size, &layers)?;
    for table in 0..size.div_ceil(L2_SPAN) {
        if let Some(clusters) = pick(&layers, table)? {
            output.add_table(table, &clusters)?;
        }
    }
    output.finish()
}

fn folded_size(layers: &[Layer<&File>]) -> Result<u64, Error> {
    let newest = layers.last().ok_or(Error::DiskFold {
        rule: "there are none",
    })?;
    if !layers.is_sorted_by_key(Layer::size) {
        return Err(Error::DiskFold {
            rule: "one is smaller than the one below it",
        });
    }
    Ok(newest.size())
}
