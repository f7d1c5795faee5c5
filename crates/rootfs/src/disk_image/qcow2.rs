//! Reads a qcow2 image of version 2 or 3: a whole disk, or what an overlay has of one.
//!
//! Always: a table is as long as the disk's size requires and lies in the file, and so does every
//! cluster. A compressed cluster decompresses to exactly one cluster. Internal snapshots are
//! ignored: the disk is read as a machine would see it at its next start. Memory holds the L1
//! table, one L2 table and one decompressed cluster.

mod checks;
mod unpack;

use std::cell::RefCell;
use std::rc::Rc;

use sandtree_disk::qcow2::{Compressed, L1_OFFSET_AT, L1Entry, L2Entry, Layout};

use super::DiskLimits;
use super::error::{DiskError, Qcow2Damage};
use super::source::{Raw, Run, check_size};
use checks::Accepted;
pub(super) use checks::Below;

#[derive(Debug)]
pub(super) struct Qcow2 {
    file: Raw,
    header: Accepted,
    l1: Vec<u64>,
    /// The L2 table that was used last.
    table: RefCell<Option<Rc<Table>>>,
    /// The cluster that was decompressed last.
    unpacked: RefCell<Option<(Compressed, Rc<[u8]>)>>,
}

/// An L2 table.
#[derive(Debug)]
struct Table {
    /// The index of its L1 entry.
    index: u64,
    offset: u64,
    entries: Vec<u64>,
}

/// What an image has for a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// Nothing: in an overlay, the layer below has the content.
    Absent,
    Zero,
    Data,
}

impl Qcow2 {
    pub(super) fn open(file: Raw, limits: DiskLimits, below: Below) -> Result<Self, DiskError> {
        let header = checks::accept(&file, below)?;
        let layout = &header.layout;
        check_size(layout.size, limits)?;
        checks::check_l1(layout)?;
        let reference = Reference::new(L1_OFFSET_AT, layout.l1_offset);
        let l1 = read_table(&file, layout, reference, layout.l1_entries_needed())?;
        Ok(Self {
            file,
            header,
            l1,
            table: RefCell::default(),
            unpacked: RefCell::default(),
        })
    }

    /// The size of the disk.
    pub(super) fn bytes(&self) -> u64 {
        self.header.layout.size
    }

    /// The size of the table that stays in memory.
    pub(super) fn table_bytes(&self) -> usize {
        self.l1.len() * 8
    }

    fn cluster_bytes(&self) -> u64 {
        self.header.layout.cluster.bytes()
    }

    /// How much of the disk one L2 table describes.
    fn span(&self) -> u64 {
        self.header.layout.cluster.l2_span()
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DiskError> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let in_cluster = at % self.cluster_bytes();
            let left = (self.cluster_bytes() - in_cluster).min((into.len() - done) as u64);
            let part = &mut into[done..done + left as usize];
            match self.cluster(at)? {
                L2Entry::Unallocated | L2Entry::Zero { .. } => part.fill(0),
                L2Entry::Data(place) => self.file.read(place + in_cluster, part)?,
                L2Entry::Compressed(compressed) => {
                    let cluster = self.unpack(compressed)?;
                    part.copy_from_slice(&cluster[in_cluster as usize..][..part.len()]);
                }
            }
            done += part.len();
        }
        Ok(())
    }

    pub(super) fn run(&self, at: u64) -> Result<Run, DiskError> {
        let (end, presence) = self.presence(at)?;
        Ok(Run {
            end,
            is_data: presence == Presence::Data,
        })
    }

    /// The end of consecutive clusters of one kind, at most those of one L2 table, so that a call
    /// never takes long.
    pub(super) fn presence(&self, at: u64) -> Result<(u64, Presence), DiskError> {
        let index = at / self.span();
        let table_end = ((index + 1) * self.span()).min(self.bytes());
        let Some(table) = self.l2(index)? else {
            return Ok((table_end, Presence::Absent));
        };
        let first = (at % self.span() / self.cluster_bytes()) as usize;
        let presence = self.presence_of(table.entries[first]);
        let same = table.entries[first..]
            .iter()
            .take_while(|entry| self.presence_of(**entry) == presence)
            .count();
        let end = index * self.span() + (first + same) as u64 * self.cluster_bytes();
        Ok((end.min(table_end), presence))
    }

    /// A damaged entry counts as data, so that the read reports it.
    fn presence_of(&self, entry: u64) -> Presence {
        match self.entry(0, entry) {
            Ok(L2Entry::Unallocated) => Presence::Absent,
            Ok(L2Entry::Zero { .. }) => Presence::Zero,
            Ok(L2Entry::Data(_) | L2Entry::Compressed(_)) | Err(_) => Presence::Data,
        }
    }

    /// Parses an L2 entry. `at` is its place in the file.
    fn entry(&self, at: u64, entry: u64) -> Result<L2Entry, Qcow2Damage> {
        let parsed = L2Entry::parse(entry, self.header.version, self.header.layout.cluster);
        let parsed = parsed.map_err(|_| Qcow2Damage::Reserved { at })?;
        let (L2Entry::Zero {
            allocated: Some(offset),
        }
        | L2Entry::Data(offset)) = parsed
        else {
            return Ok(parsed);
        };
        if offset.is_multiple_of(self.cluster_bytes()) {
            return Ok(parsed);
        }
        Err(Qcow2Damage::Unaligned { at, offset })
    }

    /// The entry for the cluster at a place on the disk. Its data is inside the file.
    fn cluster(&self, at: u64) -> Result<L2Entry, DiskError> {
        let Some(table) = self.l2(at / self.span())? else {
            return Ok(L2Entry::Unallocated);
        };
        let number = at % self.span() / self.cluster_bytes();
        let entry_at = table.offset + number * 8;
        let cluster = self.entry(entry_at, table.entries[number as usize])?;
        match cluster {
            // Only the part of the last cluster that belongs to the disk must be in the file.
            L2Entry::Data(place) => {
                let start = at - at % self.cluster_bytes();
                let needed = (self.bytes() - start).min(self.cluster_bytes());
                require_inside(&self.file, Reference::new(entry_at, place), needed)?;
            }
            // The entry has its length in sectors, and the file may end within the last one.
            L2Entry::Compressed(compressed) => {
                let reference = Reference::new(entry_at, compressed.offset);
                require_inside(&self.file, reference, 1)?;
            }
            L2Entry::Unallocated | L2Entry::Zero { .. } => {}
        }
        Ok(cluster)
    }

    /// An L2 table, if it exists, with the entries for the size of the disk.
    fn l2(&self, index: u64) -> Result<Option<Rc<Table>>, DiskError> {
        let last = self.table.borrow();
        if let Some(table) = last.as_ref().filter(|table| table.index == index) {
            return Ok(Some(Rc::clone(table)));
        }
        drop(last);
        let layout = &self.header.layout;
        let at = layout.l1_offset + index * 8;
        let entry = L1Entry::parse(self.l1[index as usize]);
        let offset = match entry.map_err(|_| Qcow2Damage::Reserved { at })? {
            L1Entry::Unallocated => return Ok(None),
            L1Entry::Table(offset) => offset,
        };
        let on_disk = (self.bytes() - index * self.span()).min(self.span());
        let needed = on_disk.div_ceil(self.cluster_bytes());
        let table = Rc::new(Table {
            index,
            offset,
            entries: read_table(&self.file, layout, Reference::new(at, offset), needed)?,
        });
        *self.table.borrow_mut() = Some(Rc::clone(&table));
        Ok(Some(table))
    }

    fn unpack(&self, compressed: Compressed) -> Result<Rc<[u8]>, DiskError> {
        let last = self.unpacked.borrow();
        if let Some((_, cluster)) = last.as_ref().filter(|(of, _)| *of == compressed) {
            return Ok(Rc::clone(cluster));
        }
        drop(last);
        let offset = compressed.offset;
        let mut input = vec![0; compressed.bytes.min(self.file.bytes() - offset) as usize];
        self.file.read(offset, &mut input)?;
        let bytes = self.cluster_bytes() as usize;
        let cluster = unpack::cluster(self.header.compression, &input, bytes);
        let cluster: Rc<[u8]> = cluster.ok_or(Qcow2Damage::Compressed { offset })?.into();
        *self.unpacked.borrow_mut() = Some((compressed, Rc::clone(&cluster)));
        Ok(cluster)
    }
}

/// An offset, and its place in the file.
#[derive(Clone, Copy)]
struct Reference {
    at: u64,
    offset: u64,
}

impl Reference {
    fn new(at: u64, offset: u64) -> Self {
        Self { at, offset }
    }
}

fn read_table(
    file: &Raw,
    layout: &Layout,
    reference: Reference,
    entries: u64,
) -> Result<Vec<u64>, DiskError> {
    let Reference { at, offset } = reference;
    if !offset.is_multiple_of(layout.cluster.bytes()) {
        return Err(Qcow2Damage::Unaligned { at, offset }.into());
    }
    require_inside(file, reference, entries * 8)?;
    let mut bytes = vec![0; entries as usize * 8];
    file.read(offset, &mut bytes)?;
    let (entries, _) = bytes.as_chunks();
    Ok(entries
        .iter()
        .map(|entry| u64::from_be_bytes(*entry))
        .collect())
}

fn require_inside(file: &Raw, reference: Reference, bytes: u64) -> Result<(), Qcow2Damage> {
    let Reference { at, offset } = reference;
    let inside = offset
        .checked_add(bytes)
        .is_some_and(|end| end <= file.bytes());
    if inside {
        Ok(())
    } else {
        Err(Qcow2Damage::Beyond { at, offset })
    }
}
