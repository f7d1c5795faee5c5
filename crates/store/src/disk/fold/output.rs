//! Writes the new overlay from front to back.

use std::fs::File;
use std::os::unix::fs::FileExt;

use sandtree_disk::qcow2::{COPIED, ClusterSize, Layout, READS_AS_ZERO};

use super::super::layer::{Layer, Picked, read_at};
use super::super::overlay::{CLUSTER, L2_SPAN};
use super::{Folded, clone};
use crate::Error;

const REFCOUNT_TABLE: u64 = CLUSTER;
const L1_OFFSET: u64 = 2 * CLUSTER;
const COUNTS_PER_BLOCK: u64 = CLUSTER / 2;
/// How many clusters one cluster of refcount table can count: 16 TiB of file.
const MAX_CLUSTERS: u64 = CLUSTER / 8 * COUNTS_PER_BLOCK;
/// How much is copied at once.
const PIECE: u64 = 1 << 20;

pub(super) struct Output<'a> {
    file: &'a File,
    layers: &'a [Layer<&'a File>],
    /// How many bytes were taken from each layer.
    taken: Vec<u64>,
    size: u64,
    l1: Vec<u64>,
    /// Everything before this offset is in use.
    end: u64,
    transfer: Transfer,
    piece: Vec<u8>,
}

/// How data is transferred from a layer into the new file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Transfer {
    Untried,
    Clone,
    /// The file system cannot clone between these files.
    Copy,
}

/// Consecutive clusters in one layer that are also consecutive on the guest's disk.
struct Extent {
    layer: usize,
    from: u64,
    to: u64,
    bytes: u64,
    guest_offset: u64,
}

impl<'a> Output<'a> {
    pub(super) fn new(
        file: &'a File,
        size: u64,
        layers: &'a [Layer<&'a File>],
    ) -> Result<Self, Error> {
        let metadata = file.metadata();
        let metadata = metadata.map_err(Error::layer_io("measure a new layer", 0))?;
        if metadata.len() != 0 {
            return Err(Error::NotEmpty);
        }
        let l1 = vec![0; size.div_ceil(L2_SPAN) as usize];
        let end = L1_OFFSET + (l1.len() as u64 * 8).next_multiple_of(CLUSTER);
        let taken = vec![0; layers.len()];
        Ok(Self {
            file,
            layers,
            taken,
            size,
            l1,
            end,
            transfer: Transfer::Untried,
            piece: Vec::new(),
        })
    }

    /// Writes the data of one L2 table, then the table.
    pub(super) fn add_table(&mut self, table: u64, clusters: &[Picked]) -> Result<(), Error> {
        let l2_offset = self.end;
        self.end += CLUSTER;
        self.l1[table as usize] = l2_offset | COPIED;
        let (entries, extents) = lay_out(clusters, table * L2_SPAN, self.end);
        for extent in extents {
            self.transfer(&extent)?;
            self.end += extent.bytes;
        }
        self.write(&entries, l2_offset)
    }

    /// Writes L1 table and refcounts, then the header.
    pub(super) fn finish(mut self) -> Result<Folded, Error> {
        let l1: Vec<u8> = self
            .l1
            .iter()
            .flat_map(|entry| entry.to_be_bytes())
            .collect();
        self.write(&l1, L1_OFFSET)?;
        self.write_refcounts()?;
        self.file
            .set_len(self.end)
            .map_err(Error::layer_io("set the length of a folded disk", self.end))?;
        let layout = Layout {
            cluster: ClusterSize::KIB_64,
            size: self.size,
            l1_entries: self.l1.len() as u32,
            l1_offset: L1_OFFSET,
            refcount_table_offset: REFCOUNT_TABLE,
            refcount_table_clusters: 1,
        };
        self.write(&layout.to_header(), 0)?;
        Ok(Folded {
            bytes: self.end,
            cloned: self.transfer == Transfer::Clone,
        })
    }

    /// Counts every cluster of the file once, including those of the refcount blocks.
    fn write_refcounts(&mut self) -> Result<(), Error> {
        let used = self.end / CLUSTER;
        let blocks = used.div_ceil(COUNTS_PER_BLOCK - 1);
        if used + blocks > MAX_CLUSTERS {
            return Err(Error::DiskFold {
                rule: "the result would be larger than 16 TiB",
            });
        }
        let first = self.end;
        self.end += blocks * CLUSTER;
        let offsets: Vec<u8> = (0..blocks)
            .flat_map(|block| (first + block * CLUSTER).to_be_bytes())
            .collect();
        self.write(&offsets, REFCOUNT_TABLE)?;
        for block in 0..blocks {
            let counted = (used + blocks - block * COUNTS_PER_BLOCK).min(COUNTS_PER_BLOCK);
            let counts = 1u16.to_be_bytes().repeat(counted as usize);
            self.write(&counts, first + block * CLUSTER)?;
        }
        Ok(())
    }

    fn transfer(&mut self, extent: &Extent) -> Result<(), Error> {
        let layer = &self.layers[extent.layer];
        self.taken[extent.layer] += extent.bytes;
        layer.check_taken(self.taken[extent.layer], extent.from)?;
        // The last cluster of a layer's file may be incomplete, and only whole blocks can be
        // cloned.
        let whole = extent
            .bytes
            .min((layer.len - extent.from) / CLUSTER * CLUSTER);
        let cloned = self.clone(layer, extent, whole)?;
        self.copy(layer, extent, cloned)?;
        self.clear_behind_end(layer, extent)
    }

    /// Clones `bytes` of the extent. Returns how many were cloned: all or none.
    fn clone(&mut self, layer: &Layer<&File>, extent: &Extent, bytes: u64) -> Result<u64, Error> {
        if self.transfer == Transfer::Copy || bytes == 0 {
            return Ok(0);
        }
        let range = clone::Range {
            from: extent.from,
            bytes,
            to: extent.to,
        };
        let cloned = clone::range(layer.file(), self.file, range);
        match cloned.map_err(Error::layer_io("clone a part of a disk layer", extent.from))? {
            clone::Cloned::Yes => self.transfer = Transfer::Clone,
            clone::Cloned::CannotBe => self.transfer = Transfer::Copy,
        }
        Ok(if self.transfer == Transfer::Clone {
            bytes
        } else {
            0
        })
    }

    /// Copies an extent from `done` on. Bytes after the end of the layer's file are zeros, as for
    /// QEMU.
    fn copy(&mut self, layer: &Layer<&File>, extent: &Extent, done: u64) -> Result<(), Error> {
        let bytes = extent.bytes.min(layer.len - extent.from);
        for start in (done..bytes).step_by(PIECE as usize) {
            self.piece.resize(PIECE.min(bytes - start) as usize, 0);
            read_at(layer.file(), &mut self.piece, extent.from + start)?;
            self.write(&self.piece, extent.to + start)?;
        }
        Ok(())
    }

    fn clear_behind_end(&self, layer: &Layer<&File>, extent: &Extent) -> Result<(), Error> {
        let kept = layer.size().saturating_sub(extent.guest_offset);
        let behind = extent.bytes.saturating_sub(kept);
        if behind == 0 {
            Ok(())
        } else {
            self.write(&vec![0; behind as usize], extent.to + kept)
        }
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(Error::layer_io("write a folded disk", offset))
    }
}

/// The L2 table for these clusters, and the extents that follow it from `end` on.
fn lay_out(clusters: &[Picked], guest_offset: u64, mut end: u64) -> (Vec<u8>, Vec<Extent>) {
    let mut entries = Vec::with_capacity(CLUSTER as usize);
    let mut extents = Vec::new();
    for (guest_offset, cluster) in (guest_offset..).step_by(CLUSTER as usize).zip(clusters) {
        let entry = match *cluster {
            Picked::Below => 0,
            Picked::Zero => READS_AS_ZERO,
            Picked::Data { layer, offset } => {
                add(
                    &mut extents,
                    Extent {
                        layer,
                        from: offset,
                        to: end,
                        bytes: CLUSTER,
                        guest_offset,
                    },
                );
                end += CLUSTER;
                (end - CLUSTER) | COPIED
            }
        };
        entries.extend(entry.to_be_bytes());
    }
    (entries, extents)
}

/// Adds a cluster: to the last extent if it continues that one, else as a new extent.
fn add(extents: &mut Vec<Extent>, next: Extent) {
    let follows = |last: &&mut Extent| {
        let end = (
            last.layer,
            last.from + last.bytes,
            last.guest_offset + last.bytes,
        );
        end == (next.layer, next.from, next.guest_offset)
    };
    match extents.last_mut().filter(follows) {
        Some(last) => last.bytes += CLUSTER,
        None => extents.push(next),
    }
}
