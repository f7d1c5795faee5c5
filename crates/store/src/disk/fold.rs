//! Folding: many overlays on top of each other become one.
//!
//! ```text
//! header | refcount table | L1 table | L2 table, its data clusters | L2 table, … | refcount blocks
//! ```
//!
//! The new overlay is written from front to back: every cluster of it is used once and counted
//! once, so there is nothing to free and nothing to leak. Data is taken over by sharing it with the
//! layers (FICLONERANGE) where the file system can, else by copying. Cloning ranges rather than the
//! largest layer as a whole shares the data of *all* layers, and leaves none of what newer ones
//! replaced.
//!
//! For each cluster the newest layer that has it wins. A zero cluster hides what is below and stays
//! a zero cluster; what no layer has stays unallocated, and so comes from whatever the result lies
//! upon.
//!
//! Sizes: disks only grow, so no layer may be smaller than the one below it, and what the bottom
//! one lies upon must not be larger than it. The result has the size of the newest. A layer that
//! ends before a cluster reads as zeros there; so does everything below it, being no larger:
//! unallocated in the result means the same. In the cluster where such a layer ends, bytes behind
//! its end read as zeros, too, and are written as zeros.
//!
//! Always: the layers are not trusted. An entry that points outside its file ends the fold, and so
//! does a layer that gives more clusters than its file has: the result is never larger than they
//! are together, tables apart. Their refcounts are not read. The header is written last: what is
//! cut short is no qcow2 file. Memory is the L1 tables and one L2 table of each layer. Nothing is
//! synced.
//!
//! When it fails: the file is of no use and its owner removes it.

mod clone;
mod output;
#[cfg(test)]
mod tests;

use std::fs::File;

use super::layer::{Layer, pick};
use super::overlay::L2_SPAN;
use crate::Error;
use output::Output;

/// What folding made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Folded {
    /// The length of the new file.
    pub bytes: u64,
    /// Data is shared with the layers by the file system, rather than copied.
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
    match layers.is_sorted_by_key(Layer::size) {
        true => Ok(newest.size()),
        false => Err(Error::DiskFold {
            rule: "one is smaller than the one below it",
        }),
    }
}
