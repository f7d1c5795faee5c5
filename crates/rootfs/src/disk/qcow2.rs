//! qcow2, versions 2 and 3, read alone and only read.
//!
//! ```text
//!  place on the disk ──► L1 entry ──► L2 table ──► L2 entry ──► nothing | zeros | a cluster | a packed cluster
//! ```
//!
//! Always: a table is as long as the disk's size asks for and lies in the file, and so does every
//! cluster. A packed cluster unpacks to exactly one cluster. Internal snapshots are not looked at:
//! what is read is the state that a machine would go on with. In memory are the L1 table, one L2
//! table and one unpacked cluster.

mod entry;
mod header;
mod unpack;

use std::cell::RefCell;
use std::rc::Rc;

pub(super) use header::MAGIC;

use super::source::{Raw, Run, check_size};
use super::{DiskError, DiskLimits, Qcow2Damage};
use entry::{Cluster, Packed};
use header::Header;

#[derive(Debug)]
pub(super) struct Qcow2 {
    file: Raw,
    header: Header,
    l1: Vec<u64>,
    /// The L2 table that was used last, with the index of its L1 entry.
    table: RefCell<Option<(u64, Rc<[u64]>)>>,
    /// The cluster that was unpacked last.
    unpacked: RefCell<Option<(Packed, Rc<[u8]>)>>,
}

impl Qcow2 {
    pub(super) fn open(file: Raw, limits: DiskLimits) -> Result<Self, DiskError> {
        let header = Header::read(&file)?;
        check_size(header.bytes, limits)?;
        header.check_l1()?;
        let l1 = table(
            &file,
            &header,
            header::L1_OFFSET_AT,
            header.l1_offset,
            header.l1_entries_needed(),
        )?;
        Ok(Self {
            file,
            header,
            l1,
            table: RefCell::default(),
            unpacked: RefCell::default(),
        })
    }

    /// Of the disk.
    pub(super) fn bytes(&self) -> u64 {
        self.header.bytes
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DiskError> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let in_cluster = at % self.header.cluster_bytes();
            let left = (self.header.cluster_bytes() - in_cluster).min((into.len() - done) as u64);
            let part = &mut into[done..done + left as usize];
            match self.cluster(at)? {
                Cluster::Nothing | Cluster::Zero => part.fill(0),
                Cluster::Data(place) => self.file.read(place + in_cluster, part)?,
                Cluster::Packed(packed) => {
                    let cluster = self.unpack(packed)?;
                    part.copy_from_slice(&cluster[in_cluster as usize..][..part.len()]);
                }
            }
            done += part.len();
        }
        Ok(())
    }

    /// Clusters of one kind that follow each other, in one L2 table at most: so whoever asks is
    /// never away for long.
    pub(super) fn run(&self, at: u64) -> Result<Run, DiskError> {
        let (cluster_bytes, span) = (self.header.cluster_bytes(), self.header.l2_span());
        let index = at / span;
        let table_end = ((index + 1) * span).min(self.bytes());
        let Some(entries) = self.l2(index)? else {
            return Ok(Run {
                end: table_end,
                is_data: false,
            });
        };
        let first = (at % span / cluster_bytes) as usize;
        let has_bytes = |entry: &u64| entry::has_bytes(*entry, &self.header);
        let is_data = has_bytes(&entries[first]);
        let same = entries[first..]
            .iter()
            .take_while(|entry| has_bytes(entry) == is_data)
            .count();
        let end = index * span + (first + same) as u64 * cluster_bytes;
        Ok(Run {
            end: end.min(table_end),
            is_data,
        })
    }

    /// What the cluster is that a place on the disk belongs to.
    fn cluster(&self, at: u64) -> Result<Cluster, DiskError> {
        let (cluster_bytes, span) = (self.header.cluster_bytes(), self.header.l2_span());
        let index = at / span;
        let Some(entries) = self.l2(index)? else {
            return Ok(Cluster::Nothing);
        };
        let number = at % span / cluster_bytes;
        let entry_at = entry::place(self.l1[index as usize]) + number * 8;
        let cluster = entry::l2(entry_at, entries[number as usize], &self.header)?;
        match cluster {
            // Of the last cluster only what the disk has must be there.
            Cluster::Data(place) => {
                let needed = (self.bytes() - (at - at % cluster_bytes)).min(cluster_bytes);
                require_inside(&self.file, entry_at, place, needed)?;
            }
            // How much it needs is known in sectors only, and the last one may be cut.
            Cluster::Packed(packed) => require_inside(&self.file, entry_at, packed.offset, 1)?,
            Cluster::Nothing | Cluster::Zero => {}
        }
        Ok(cluster)
    }

    /// The entries of an L2 table that are about the disk, if there is that table.
    fn l2(&self, index: u64) -> Result<Option<Rc<[u64]>>, DiskError> {
        if let Some((_, entries)) = self.table.borrow().as_ref().filter(|(of, _)| *of == index) {
            return Ok(Some(Rc::clone(entries)));
        }
        let at = self.header.l1_offset + index * 8;
        let Some(offset) = entry::l1(at, self.l1[index as usize])? else {
            return Ok(None);
        };
        let span = self.header.l2_span();
        let on_disk = (self.bytes() - index * span)
            .min(span)
            .div_ceil(self.header.cluster_bytes());
        let entries: Rc<[u64]> = table(&self.file, &self.header, at, offset, on_disk)?.into();
        *self.table.borrow_mut() = Some((index, Rc::clone(&entries)));
        Ok(Some(entries))
    }

    fn unpack(&self, packed: Packed) -> Result<Rc<[u8]>, DiskError> {
        if let Some((_, cluster)) = self
            .unpacked
            .borrow()
            .as_ref()
            .filter(|(of, _)| *of == packed)
        {
            return Ok(Rc::clone(cluster));
        }
        let mut input = vec![0; packed.bytes.min(self.file.bytes() - packed.offset) as usize];
        self.file.read(packed.offset, &mut input)?;
        let cluster = unpack::cluster(
            self.header.compression,
            &input,
            self.header.cluster_bytes() as usize,
        );
        let cluster: Rc<[u8]> = cluster
            .ok_or(Qcow2Damage::Compressed {
                offset: packed.offset,
            })?
            .into();
        *self.unpacked.borrow_mut() = Some((packed, Rc::clone(&cluster)));
        Ok(cluster)
    }
}

/// The entries of a table that is referred to at `at`.
fn table(
    file: &Raw,
    header: &Header,
    at: u64,
    offset: u64,
    entries: u64,
) -> Result<Vec<u64>, DiskError> {
    if !offset.is_multiple_of(header.cluster_bytes()) {
        return Err(Qcow2Damage::Unaligned { at, offset }.into());
    }
    require_inside(file, at, offset, entries * 8)?;
    let mut bytes = vec![0; entries as usize * 8];
    file.read(offset, &mut bytes)?;
    let (entries, _) = bytes.as_chunks();
    Ok(entries
        .iter()
        .map(|entry| u64::from_be_bytes(*entry))
        .collect())
}

fn require_inside(file: &Raw, at: u64, offset: u64, bytes: u64) -> Result<(), Qcow2Damage> {
    let inside = offset
        .checked_add(bytes)
        .is_some_and(|end| end <= file.bytes());
    if inside {
        Ok(())
    } else {
        Err(Qcow2Damage::Beyond { at, offset })
    }
}
