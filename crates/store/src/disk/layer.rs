//! One layer of a disk, read; and what layers on top of each other make of a cluster.
//!
//! Always: nothing that a table says is believed. What an entry refers to is inside the file, or an
//! error.

use std::borrow::Borrow;
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::check::Damage;
use super::entry::{self, L2Entry};
use super::header::{self, Header, require};
use super::overlay::{CLUSTER, CLUSTER_BITS, L2_SPAN};
use crate::Error;

/// Where one cluster of the guest's disk comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Picked {
    Below,
    Zero,
    Data { layer: usize, offset: u64 },
}

/// Read through a file that it owns or borrows.
#[derive(Debug)]
pub(super) struct Layer<F> {
    file: F,
    /// The length of the file.
    pub len: u64,
    index: usize,
    header: Header,
    /// As many entries as the size asks for: what stands behind them is not part of the disk.
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
        let header = Header::parse(&bytes)
            .and_then(check_tables)
            .map_err(damaged)?;
        let mut layer = Self {
            file,
            len,
            index,
            header,
            l1: Vec::new(),
        };
        layer.l1 = layer.table(40, header.l1_offset, header.size.div_ceil(L2_SPAN) as usize)?;
        Ok(layer)
    }

    pub(super) fn file(&self) -> &File {
        self.file.borrow()
    }

    /// The size of the disk.
    pub(super) fn size(&self) -> u64 {
        self.header.size
    }

    /// What this layer says about the clusters of one L2 table, if it has that table.
    pub(super) fn clusters(&self, table: u64) -> Result<Option<Vec<Picked>>, Error> {
        let Some(entry) = self.l1.get(table as usize) else {
            return Ok(None);
        };
        let at = self.header.l1_offset + table * 8;
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
        match entry::l2(at, entry).map_err(|damage| self.damaged(damage))? {
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

    /// More than there is in the file can only be given by giving something twice.
    pub(super) fn check_taken(&self, bytes: u64, offset: u64) -> Result<(), Error> {
        let all = self.len.next_multiple_of(CLUSTER);
        require(bytes <= all, Damage::Shared { offset }).map_err(|damage| self.damaged(damage))
    }

    /// The entries of a table that is referred to at `at`.
    fn table(&self, at: u64, offset: u64, entries: usize) -> Result<Vec<u64>, Error> {
        let mut bytes = vec![0; entries * 8];
        self.require_inside(at, offset, bytes.len() as u64)?;
        read_at(self.file(), &mut bytes, offset)?;
        Ok(bytes
            .chunks_exact(8)
            .map(|entry| u64::from_be_bytes(entry.try_into().expect("eight bytes")))
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

/// Where each cluster of one L2 table comes from, the newest of `layers` (bottom first) that has
/// it; nothing if none has any of them.
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

/// Other cluster sizes would have to be cut and joined; our overlays have one.
fn check_tables(header: Header) -> Result<Header, Damage> {
    require(
        header.cluster_bits == CLUSTER_BITS,
        Damage::ClusterBits(header.cluster_bits),
    )?;
    header.check_l1_size()?;
    Ok(header)
}

pub(super) fn read_at(file: &File, into: &mut [u8], offset: u64) -> Result<(), Error> {
    file.read_exact_at(into, offset)
        .map_err(Error::layer_io("read a disk layer", offset))
}
