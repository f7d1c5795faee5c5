//! Reads a disk as its guest sees it: a raw root file system and the overlays above it.
//!
//! Each cluster comes from the newest overlay that has it, or else from the root file system. A
//! zero cluster hides the layers below. Bytes after the end of a smaller part read as zeros.
//!
//! Always: read only. Overlays are checked completely when the chain is opened, and again at every
//! entry that is followed. Tables are read on demand and few are cached, so memory does not grow
//! with the disk. The caller ensures that the parts do not change meanwhile.

mod raw;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::check::{self, Verdict};
use super::layer::{Layer, Picked, pick};
use super::overlay::{CLUSTER, L2_SPAN};
use crate::Error;
use crate::fs::io_error;

/// How many merged L2 tables are cached: each has 192 KiB and spans 512 MiB of disk.
const MAX_TABLES: usize = 64;
/// Beyond this many, ranges that can differ are joined across the gaps between them.
const MAX_RANGES: usize = 1 << 18;
const CLUSTERS_PER_TABLE: u64 = L2_SPAN / CLUSTER;

/// The origins of the clusters of one L2 table. None: no overlay has any of them.
type Table = Option<Arc<[Picked]>>;

/// A disk that can be read.
#[derive(Debug)]
pub struct Chain {
    base: File,
    /// The visible part of the root file system.
    base_bytes: u64,
    layers: Vec<Layer<File>>,
    /// The identity of the root file system, then those of the layers, bottom first.
    identities: Vec<Identity>,
    bytes: u64,
    tables: Mutex<HashMap<u64, Table>>,
}

/// The origin of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    Base,
    /// It is not stored, and reads as zeros.
    Zero,
    /// This offset of a layer's file. The bottom layer is layer 0.
    Layer {
        layer: usize,
        offset: u64,
    },
}

/// Two parts with equal identities have equal content.
#[derive(Debug)]
struct Identity {
    device: u64,
    inode: u64,
    /// From the caller, such as a digest.
    given: Option<String>,
}

impl Identity {
    fn of(file: &File, path: &Path) -> Result<Self, Error> {
        let metadata = file.metadata().map_err(io_error("look at", path))?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            given: None,
        })
    }

    fn is(&self, other: &Self) -> bool {
        let is_given = self.given.is_some() && self.given == other.given;
        is_given || (self.device, self.inode) == (other.device, other.inode)
    }
}

impl Chain {
    /// Opens a root file system and the overlays above it, bottom first.
    pub fn open(base: &Path, layers: &[PathBuf]) -> Result<Self, Error> {
        let file = File::open(base).map_err(io_error("open", base))?;
        let raw_bytes = file.metadata().map_err(io_error("look at", base))?.len();
        let mut identities = vec![Identity::of(&file, base)?];
        let mut opened = Vec::new();
        for (index, path) in layers.iter().enumerate() {
            let layer = open_layer(index, path)?;
            identities.push(Identity::of(layer.file(), path)?);
            opened.push(layer);
        }
        if !opened.is_sorted_by_key(Layer::size) {
            return Err(Error::DiskChain {
                rule: "one is smaller than the one below it",
            });
        }
        let base_bytes = opened
            .first()
            .map_or(raw_bytes, |lowest| raw_bytes.min(lowest.size()));
        let bytes = opened.last().map_or(raw_bytes, Layer::size);
        Ok(Self {
            base: file,
            base_bytes,
            layers: opened,
            identities,
            bytes,
            tables: Mutex::default(),
        })
    }

    /// Sets identities for the content of the parts, such as digests. Parts of two chains with
    /// equal identities are then known to be equal even if they are different files.
    pub fn with_identities(mut self, base: &str, layers: &[String]) -> Self {
        let given = std::iter::once(base).chain(layers.iter().map(String::as_str));
        for (identity, given) in self.identities.iter_mut().zip(given) {
            identity.given = Some(given.to_owned());
        }
        self
    }

    /// The same disk, extended with zeros.
    pub(crate) fn extended_to(mut self, bytes: u64) -> Result<Self, Error> {
        if bytes < self.bytes {
            return Err(Error::DiskChain {
                rule: "the disk is smaller than they are",
            });
        }
        self.bytes = bytes;
        Ok(self)
    }

    /// The size of the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads what the guest would read at `offset`. All of it must be on the disk.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let end = offset
            .checked_add(into.len() as u64)
            .filter(|end| *end <= self.bytes);
        if end.is_none() {
            return Err(Error::layer_io("read a disk", offset)(
                io::ErrorKind::UnexpectedEof.into(),
            ));
        }
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let in_cluster = (CLUSTER - at % CLUSTER).min(rest.len() as u64);
            let (piece, behind) = rest.split_at_mut(in_cluster as usize);
            self.read_piece(at, piece)?;
            at += in_cluster;
            rest = behind;
        }
        Ok(())
    }

    /// The origin of the cluster with this number.
    pub fn origin_of(&self, cluster: u64) -> Result<Where, Error> {
        let table = self.table(cluster / CLUSTERS_PER_TABLE)?;
        Ok(self.place(&table, cluster))
    }

    /// Reads a piece of one cluster.
    fn read_piece(&self, at: u64, into: &mut [u8]) -> Result<(), Error> {
        let (file, visible, from) = match self.origin_of(at / CLUSTER)? {
            Where::Zero => {
                into.fill(0);
                return Ok(());
            }
            Where::Base => (&self.base, self.base_bytes, at),
            Where::Layer { layer, offset } => {
                let layer = &self.layers[layer];
                (layer.file(), layer.size(), offset + at % CLUSTER)
            }
        };
        let visible = visible.saturating_sub(at).min(into.len() as u64);
        let (stored, behind) = into.split_at_mut(visible as usize);
        behind.fill(0);
        read_or_zero(file, stored, from).map_err(Error::layer_io("read a disk", at))
    }

    fn place(&self, table: &Table, cluster: u64) -> Where {
        let picked = table
            .as_ref()
            .map(|table| table[(cluster % CLUSTERS_PER_TABLE) as usize]);
        match picked.unwrap_or(Picked::Below) {
            Picked::Below if cluster * CLUSTER < self.base_bytes => Where::Base,
            Picked::Below | Picked::Zero => Where::Zero,
            Picked::Data { layer, offset } => Where::Layer { layer, offset },
        }
    }

    fn table(&self, index: u64) -> Result<Table, Error> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = tables.get(&index) {
            return Ok(table.clone());
        }
        let table: Table = pick(&self.layers, index)?.map(Arc::from);
        if tables.len() == MAX_TABLES {
            tables.clear();
        }
        tables.insert(index, table.clone());
        Ok(table)
    }
}

fn open_layer(index: usize, path: &Path) -> Result<Layer<File>, Error> {
    if let Verdict::Corrupt(damage) = check::file(path)? {
        return Err(Error::DiskLayer {
            layer: index,
            damage,
        });
    }
    Layer::open(index, File::open(path).map_err(io_error("open", path))?)
}

/// Reads zeros after the end of the file: the last cluster of an overlay may be incomplete.
fn read_or_zero(file: &File, mut into: &mut [u8], mut from: u64) -> io::Result<()> {
    while !into.is_empty() {
        match file.read_at(into, from) {
            Ok(0) => {
                into.fill(0);
                return Ok(());
            }
            Ok(bytes) => {
                into = &mut into[bytes..];
                from += bytes as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The byte ranges in which two disks can differ, sorted and without overlap. Outside of them both
/// disks are equal.
///
/// The result follows from the origins of the clusters alone; no data is read. The less the chains
/// share, the more ranges there are.
pub fn changed(a: &Chain, b: &Chain) -> Result<Vec<Range<u64>>, Error> {
    let comparison = Comparison::new(a, b);
    let both = a.bytes.min(b.bytes);
    let mut ranges = Vec::new();
    for table in 0..both.div_ceil(L2_SPAN) {
        comparison.add_table(table, both, &mut ranges)?;
    }
    add(&mut ranges, both..a.bytes.max(b.bytes));
    Ok(ranges)
}

struct Comparison<'a> {
    a: &'a Chain,
    b: &'a Chain,
    /// A number for each part of `a` and of `b`. Equal parts have equal numbers.
    parts_of_a: Vec<usize>,
    parts_of_b: Vec<usize>,
}

impl<'a> Comparison<'a> {
    fn new(a: &'a Chain, b: &'a Chain) -> Self {
        let all: Vec<_> = a.identities.iter().chain(&b.identities).collect();
        let first = |identity: &Identity| {
            all.iter()
                .position(|other| other.is(identity))
                .unwrap_or(all.len())
        };
        let numbers = |chain: &Chain| chain.identities.iter().map(first).collect();
        Self {
            a,
            b,
            parts_of_a: numbers(a),
            parts_of_b: numbers(b),
        }
    }

    /// Adds the ranges that can differ in the span of one L2 table, up to byte `end` of the disk.
    fn add_table(&self, table: u64, end: u64, ranges: &mut Vec<Range<u64>>) -> Result<(), Error> {
        let of_a = self.a.table(table)?;
        let of_b = self.b.table(table)?;
        if of_a.is_none() && of_b.is_none() && self.has_same_base() {
            return Ok(());
        }
        let first = table * CLUSTERS_PER_TABLE;
        let last = end.div_ceil(CLUSTER).min(first + CLUSTERS_PER_TABLE);
        for cluster in first..last {
            let in_a = self.a.place(&of_a, cluster);
            let in_b = self.b.place(&of_b, cluster);
            if !self.is_same(cluster, in_a, in_b) {
                let range = cluster * CLUSTER..((cluster + 1) * CLUSTER).min(end);
                add(ranges, range);
            }
        }
        Ok(())
    }

    fn has_same_base(&self) -> bool {
        self.parts_of_a[0] == self.parts_of_b[0] && self.a.base_bytes == self.b.base_bytes
    }

    fn is_same(&self, cluster: u64, in_a: Where, in_b: Where) -> bool {
        match (in_a, in_b) {
            (Where::Zero, Where::Zero) => true,
            (Where::Base, Where::Base) => self.is_base_same(cluster),
            (
                Where::Layer {
                    layer: a,
                    offset: at_a,
                },
                Where::Layer {
                    layer: b,
                    offset: at_b,
                },
            ) => self.parts_of_a[a + 1] == self.parts_of_b[b + 1] && at_a == at_b,
            _ => false,
        }
    }

    /// The two chains may show different lengths of the same file.
    fn is_base_same(&self, cluster: u64) -> bool {
        let visible = self.a.base_bytes.min(self.b.base_bytes);
        self.parts_of_a[0] == self.parts_of_b[0]
            && (self.a.base_bytes == self.b.base_bytes || (cluster + 1) * CLUSTER <= visible)
    }
}

fn add(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    if range.is_empty() {
        return;
    }
    let is_full = ranges.len() >= MAX_RANGES;
    match ranges.last_mut() {
        Some(last) if is_full || last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}
