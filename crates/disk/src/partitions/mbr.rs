//! The master boot record: a partition table of four entries in the first sector.

use super::{Partition, Role, SECTOR, on_disk};
use crate::fields::Le;

const TABLE_AT: usize = 446;
const ENTRY_LEN: usize = 16;
const SIGNATURE_AT: usize = 510;

const EMPTY: u8 = 0;
/// The disk has a GPT.
const PROTECTIVE: u8 = 0xee;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
/// Not bootable, or bootable.
const STATUS: [u8; 2] = [0, 0x80];

#[derive(Debug)]
pub(super) struct Mbr {
    entries: [Entry; 4],
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    status: u8,
    kind: u8,
    first: u32,
    sectors: u32,
}

impl Mbr {
    /// Parses the table in the first sector. The signature alone proves nothing: boot code has it,
    /// too.
    pub(super) fn parse(start: &[u8]) -> Option<Self> {
        let sector = start.get(..SECTOR as usize)?;
        let entries =
            std::array::from_fn(|index| Entry::parse(&sector[TABLE_AT + index * ENTRY_LEN..]));
        let is_table = sector[SIGNATURE_AT..] == [0x55, 0xaa]
            && entries.iter().all(|entry| STATUS.contains(&entry.status))
            && entries
                .iter()
                .any(|entry| entry.kind != EMPTY && entry.sectors > 0);
        is_table.then_some(Self { entries })
    }

    pub(super) fn is_protective(&self) -> bool {
        self.entries.iter().any(|entry| entry.kind == PROTECTIVE)
    }

    pub(super) fn partitions(&self, disk_bytes: u64) -> Vec<Partition> {
        let used = (1..)
            .zip(&self.entries)
            .filter(|(_, entry)| entry.kind != EMPTY);
        used.filter_map(|(number, entry)| {
            let first = u64::from(entry.first) * SECTOR;
            let bytes = u64::from(entry.sectors) * SECTOR;
            let (start, bytes) = on_disk(first, bytes, disk_bytes)?;
            let role = if EXTENDED.contains(&entry.kind) {
                Role::Extended
            } else {
                Role::Other
            };
            Some(Partition {
                number,
                start,
                bytes,
                role,
            })
        })
        .collect()
    }
}

impl Entry {
    fn parse(bytes: &[u8]) -> Self {
        let fields = Le(bytes);
        Self {
            status: bytes[0],
            kind: bytes[4],
            first: fields.u32(8),
            sectors: fields.u32(12),
        }
    }
}
