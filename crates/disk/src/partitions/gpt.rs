//! The GUID partition table: a header in the second sector and a copy in the last, each with its
//! own entries and checksums.
//!
//! ```text
//!  header   0 "EFI PART"  12 header length  16 its CRC  24 this sector  32 the other header's  72 first of the entries
//!          80 how many  84 length of each  88 their CRC
//!  entry    0 type  16 id  32 first sector  40 last sector  48 attributes  56 name
//! ```

use super::{Error, Partition, Role, on_disk};
use crate::blocks::Blocks;
use crate::fields::Le;

const MAGIC: &[u8] = b"EFI PART";
const SECTOR_SIZES: [u64; 2] = [512, 4096];
const HEADER_LEN: usize = 92;
const ENTRY_LEN: u32 = 128;
/// The usual table has 128 entries of 128 bytes: 16 KiB.
const MAX_ENTRIES_BYTES: u64 = 1 << 20;
const MAX_ENTRY_LEN: u32 = 4096;

/// Types as they are stored: the first three groups of a GUID are little-endian.
const EMPTY: [u8; 16] = [0; 16];
const ROOTS: [[u8; 16]; 2] = [
    // 4f68bce3-e8cd-4db1-96e7-fbcaf984b709: x86-64.
    [
        0xe3, 0xbc, 0x68, 0x4f, 0xcd, 0xe8, 0xb1, 0x4d, 0x96, 0xe7, 0xfb, 0xca, 0xf9, 0x84, 0xb7,
        0x09,
    ],
    // b921b045-1df0-41c3-af44-4c6f280d3fae: 64-bit ARM.
    [
        0x45, 0xb0, 0x21, 0xb9, 0xf0, 0x1d, 0xc3, 0x41, 0xaf, 0x44, 0x4c, 0x6f, 0x28, 0x0d, 0x3f,
        0xae,
    ],
];

/// Why a copy of the table cannot be used.
type Damage = &'static str;

/// Whether the disk starts with a GPT, in sectors of any size.
pub(super) fn has_magic(start: &[u8]) -> bool {
    SECTOR_SIZES.iter().any(|sector| {
        start
            .get(*sector as usize..)
            .is_some_and(|at| at.starts_with(MAGIC))
    })
}

pub(super) fn is_primary_intact(disk: &dyn Blocks) -> Result<bool, Error> {
    for sector in SECTOR_SIZES {
        if copy(disk, sector, 1)?.is_ok() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The partitions of the first copy or, if that is damaged, of the second.
pub(super) fn read(disk: &dyn Blocks) -> Result<Vec<Partition>, Error> {
    let [usual, large] = SECTOR_SIZES;
    let damage = match read_with(disk, usual)? {
        Ok(partitions) => return Ok(partitions),
        Err(damage) => damage,
    };
    // If neither size fits, the error is about the usual one.
    read_with(disk, large)?.map_err(|_| damage)
}

/// The partitions of a table in sectors of this size. The inner error says how both copies are
/// damaged.
fn read_with(disk: &dyn Blocks, sector: u64) -> Result<Result<Vec<Partition>, Error>, Error> {
    let primary = match copy(disk, sector, 1)? {
        Ok(partitions) => return Ok(Ok(partitions)),
        Err(damage) => damage,
    };
    let last = (disk.bytes() / sector).saturating_sub(1);
    let backup = match copy(disk, sector, last)? {
        Ok(partitions) => return Ok(Ok(partitions)),
        Err(damage) => damage,
    };
    Ok(Err(Error::Gpt { primary, backup }))
}

/// The copy of the table whose header is in sector `number`.
fn copy(
    disk: &dyn Blocks,
    sector: u64,
    number: u64,
) -> Result<Result<Vec<Partition>, Damage>, Error> {
    let mut bytes = vec![0; sector as usize];
    let end = number
        .checked_add(1)
        .and_then(|next| next.checked_mul(sector));
    if end.is_none_or(|end| end > disk.bytes()) {
        return Ok(Err("its header is outside the disk"));
    }
    disk.read_at(number * sector, &mut bytes)
        .map_err(Error::Io)?;
    let header = match Header::parse(&bytes, number, sector, disk.bytes()) {
        Ok(header) => header,
        Err(damage) => return Ok(Err(damage)),
    };
    let mut entries = vec![0; header.entries_bytes];
    disk.read_at(header.entries_start, &mut entries)
        .map_err(Error::Io)?;
    if crc32fast::hash(&entries) != header.entries_crc {
        return Ok(Err("its entries have a wrong checksum"));
    }
    let numbered = (1..).zip(entries.chunks_exact(header.entry_len));
    Ok(Ok(numbered
        .filter_map(|(number, entry)| partition(number, entry, sector, disk.bytes()))
        .collect()))
}

struct Header {
    entries_start: u64,
    /// At most [`MAX_ENTRIES_BYTES`], all of them on the disk.
    entries_bytes: usize,
    entry_len: usize,
    entries_crc: u32,
}

impl Header {
    fn parse(bytes: &[u8], number: u64, sector: u64, disk_bytes: u64) -> Result<Self, Damage> {
        let fields = Le(bytes);
        require(bytes.starts_with(MAGIC), "the header is missing")?;
        let len = fields.u32(12) as usize;
        require(
            (HEADER_LEN..=bytes.len()).contains(&len),
            "its header has an invalid length",
        )?;
        let mut covered = bytes[..len].to_vec();
        covered[16..20].fill(0);
        require(
            crc32fast::hash(&covered) == fields.u32(16),
            "its header has a wrong checksum",
        )?;
        require(
            fields.u64(24) == number,
            "its header belongs to another sector",
        )?;
        let entry_len = fields.u32(84);
        let fits = (ENTRY_LEN..=MAX_ENTRY_LEN).contains(&entry_len) && entry_len.is_multiple_of(8);
        require(fits, "its entries have an invalid length")?;
        let entries_bytes = u64::from(fields.u32(80)) * u64::from(entry_len);
        require(
            entries_bytes <= MAX_ENTRIES_BYTES,
            "it has too many entries",
        )?;
        let start = fields.u64(72).checked_mul(sector);
        let start = start.filter(|start| {
            start
                .checked_add(entries_bytes)
                .is_some_and(|end| end <= disk_bytes)
        });
        Ok(Self {
            entries_start: start.ok_or("its entries are outside the disk")?,
            entries_bytes: entries_bytes as usize,
            entry_len: entry_len as usize,
            entries_crc: fields.u32(88),
        })
    }
}

fn partition(number: u32, entry: &[u8], sector: u64, disk_bytes: u64) -> Option<Partition> {
    let fields = Le(entry);
    let kind = &entry[..16];
    if kind == EMPTY {
        return None;
    }
    let first = fields.u64(32);
    let last = fields.u64(40);
    let sectors = last.checked_sub(first)?.checked_add(1)?;
    let (start, bytes) = on_disk(
        first.checked_mul(sector)?,
        sectors.saturating_mul(sector),
        disk_bytes,
    )?;
    let role = if ROOTS.iter().any(|root| kind == root) {
        Role::Root
    } else {
        Role::Other
    };
    Some(Partition {
        number,
        start,
        bytes,
        role,
    })
}

fn require(fine: bool, damage: Damage) -> Result<(), Damage> {
    if fine { Ok(()) } else { Err(damage) }
}
