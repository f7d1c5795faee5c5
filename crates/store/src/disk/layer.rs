//! Reads one layer of a disk, and finds the layer from which a cluster comes.
//!
//! Always: tables are hostile. An entry that refers to a place outside the file is an error.

use std::borrow::Borrow;
use std::fs::File;
use std::os::unix::fs::FileExt;

use sandtree_disk::qcow2::{ClusterSize, L1_OFFSET_AT, Layout};

use super::entry::{self, L2Entry};
use super::header;
use super::overlay::{CLUSTER, L2_SPAN};
use crate::Error;
use crate::damage::disk::{Damage, require};

/// The origin of one cluster of the guest's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Picked {
    Below,
    Zero,
    Data { layer: usize, offset: u64 },
}

/// A layer, read through a file that it owns or borrows.
#[derive(Debug)]
pub(super) struct Layer<F> {
    file: F,
    /// The length of the file.
    pub len: u64,
    index: usize,
    layout: Layout,
    /// As many entries as the size requires; further ones are not part of the disk.
    l1: Vec<u64>,
}

impl<F: Borrow<File>> Layer<F> {
    pub(super) fn open(index: usize, file: F) -> Result<Self, Error> {
        let damaged = |damage| Error::DiskLayer {
            layer: index,
            damage,
        };
        let len = file
            .borrow()
            .metadata()
            .map_err(Error::layer_io("measure a disk layer", 0))?
            .len();
        require(len >= header::LEN as u64, Damage::Short).map_err(damaged)?;
        let mut bytes = [0; header::LEN];
        read_at(file.borrow(), &mut bytes, 0)?;
        let layout = header::parse(&bytes)
            .and_then(check_tables)
            .map_err(damaged)?;
        let mut layer = Self {
            file,
            len,
            index,
            layout,
            l1: Vec::new(),
        };
        let needed = layout.l1_entries_needed() as usize;
        layer.l1 = layer.table(L1_OFFSET_AT, layout.l1_offset, needed)?;
        Ok(layer)
    }

    pub(super) fn file(&self) -> &File {
        self.file.borrow()
    }

    /// The size of the disk.
    pub(super) fn size(&self) -> u64 {
        self.layout.size
    }

    /// The origins of the clusters of one L2 table, if this layer has that table.
    pub(super) fn clusters(&self, table: u64) -> Result<Option<Vec<Picked>>, Error> {
        let Some(entry) = self.l1.get(table as usize) else {
            return Ok(None);
        };
        let at = self.layout.l1_offset + table * 8;
        let Some(offset) = entry::l1(at, *entry).map_err(|damage| self.damaged(damage))? else {
            return Ok(None);
        };
        let on_disk = (self.size() - table * L2_SPAN)
            .div_ceil(CLUSTER)
            .min(CLUSTER / 8);
        let entries = self.table(at, offset, on_disk as usize)?;
        let places = (offset..).step_by(8).zip(entries);
        let mut clusters = places
            .map(|(at, entry)| self.picked(at, entry))
            .collect::<Result<Vec<_>, _>>()?;
        clusters.resize((CLUSTER / 8) as usize, Picked::Below);
        Ok(Some(clusters))
    }

    fn picked(&self, at: u64, entry: u64) -> Result<Picked, Error> {
        let entry = entry::l2(at, entry, self.layout.cluster);
        match entry.map_err(|damage| self.damaged(damage))? {
            L2Entry::Below => Ok(Picked::Below),
            L2Entry::Zero(_) => Ok(Picked::Zero),
            L2Entry::Data(offset) => {
                self.require_inside(at, offset, 1)?;
                Ok(Picked::Data {
                    layer: self.index,
                    offset,
                })
            }
        }
    }

    /// Checks how many bytes were taken from the file: more than it has means that a cluster is
    /// used twice.
    pub(super) fn check_taken(&self, bytes: u64, offset: u64) -> Result<(), Error> {
        let all = self.len.next_multiple_of(CLUSTER);
        require(bytes <= all, Damage::Shared { offset }).map_err(|damage| self.damaged(damage))
    }

    /// Reads a table. The reference to it is at `at`.
    fn table(&self, at: u64, offset: u64, entries: usize) -> Result<Vec<u64>, Error> {
        let mut bytes = vec![0; entries * 8];
        self.require_inside(at, offset, bytes.len() as u64)?;
        read_at(self.file(), &mut bytes, offset)?;
        let (entries, _) = bytes.as_chunks();
        Ok(entries
            .iter()
            .map(|entry| u64::from_be_bytes(*entry))
            .collect())
    }

    fn require_inside(&self, at: u64, offset: u64, bytes: u64) -> Result<(), Error> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.len);
        require(
            offset.is_multiple_of(CLUSTER),
            Damage::Unaligned { at, offset },
        )
        .and_then(|()| require(inside, Damage::Beyond { at, offset }))
        .map_err(|damage| self.damaged(damage))
    }

    fn damaged(&self, damage: Damage) -> Error {
        Error::DiskLayer {
            layer: self.index,
            damage,
        }
    }
}

/// The origins of the clusters of one L2 table: for each, the newest of `layers` (bottom first)
/// that has it. `None`: no layer has any of them.
pub(super) fn pick<F: Borrow<File>>(
    layers: &[Layer<F>],
    table: u64,
) -> Result<Option<Vec<Picked>>, Error> {
    let mut picked = None;
    for layer in layers.iter().rev() {
        let Some(found) = layer.clusters(table)? else {
            continue;
        };
        match &mut picked {
            None => picked = Some(found),
            Some(picked) => fill(picked, &found),
        }
    }
    Ok(picked.filter(|clusters| clusters.iter().any(|cluster| *cluster != Picked::Below)))
}

fn fill(picked: &mut [Picked], below: &[Picked]) {
    for (cluster, found) in picked
        .iter_mut()
        .zip(below)
        .filter(|(cluster, _)| **cluster == Picked::Below)
    {
        *cluster = *found;
    }
}

/// Accepts only the cluster size of our overlays: with others, clusters would have to be cut and
/// joined.
fn check_tables(layout: Layout) -> Result<Layout, Damage> {
    let cluster = layout.cluster;
    require(
        cluster == ClusterSize::KIB_64,
        Damage::ClusterBits(cluster.bits()),
    )?;
    header::check_l1_size(&layout)?;
    Ok(layout)
}

pub(super) fn read_at(file: &File, into: &mut [u8], offset: u64) -> Result<(), Error> {
    file.read_exact_at(into, offset)
        .map_err(Error::layer_io("read a disk layer", offset))
}
