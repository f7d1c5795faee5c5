//! The superblock of an ext2, ext3 or ext4: as much of it as a copy needs.

use super::DiskError;

/// Where it is in a file system, and how long.
pub(super) const OFFSET: usize = 1024;
const LEN: usize = 1024;
const MAGIC: [u8; 2] = [0x53, 0xef];
const MAGIC_AT: usize = OFFSET + 56;

/// Of 1024 bytes.
const MAX_LOG_BLOCK_BYTES: u32 = 6;
const MAX_REVISION: u32 = 1;
const INCOMPATIBLE_RECOVER: u32 = 0x4;
const INCOMPATIBLE_JOURNAL_DEVICE: u32 = 0x8;
const INCOMPATIBLE_64BIT: u32 = 0x80;
const STATE_VALID: u16 = 1;
const STATE_ERRORS: u16 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Superblock {
    /// Of the whole file system.
    pub bytes: u64,
    pub is_clean: bool,
    pub uuid: [u8; 16],
    pub label: Option<String>,
}

/// Whether something starts like a file system of this kind.
pub(super) fn has_magic(start: &[u8]) -> bool {
    start.get(MAGIC_AT..MAGIC_AT + 2) == Some(&MAGIC)
}

/// The same, but from more than two bytes, which other files may have there as well.
pub(super) fn has_superblock(start: &[u8]) -> bool {
    let Some(fields) = start.get(OFFSET..OFFSET + LEN).map(Le) else {
        return false;
    };
    let (inodes, blocks, log_block_bytes, revision) =
        (fields.u32(0), fields.u32(4), fields.u32(24), fields.u32(76));
    has_magic(start)
        && inodes > 0
        && blocks > 0
        && log_block_bytes <= MAX_LOG_BLOCK_BYTES
        && revision <= MAX_REVISION
}

impl Superblock {
    /// The superblock in the beginning of a file system, of which there is at least 2 KiB.
    pub(super) fn parse(start: &[u8]) -> Result<Self, DiskError> {
        let fields = Le(&start[OFFSET..OFFSET + LEN]);
        let (incompatible, state) = (fields.u32(96), fields.u16(58));
        if incompatible & INCOMPATIBLE_JOURNAL_DEVICE != 0 {
            return Err(DiskError::FileSystem("it is only the journal of one"));
        }
        let is_unmounted = incompatible & INCOMPATIBLE_RECOVER == 0 && state & STATE_VALID != 0;
        let label = fields.0[120..136]
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        Ok(Self {
            bytes: bytes(&fields, incompatible)?,
            is_clean: is_unmounted && state & STATE_ERRORS == 0,
            uuid: fields.0[104..120].try_into().expect("sixteen bytes"),
            label: Some(String::from_utf8_lossy(label).into_owned())
                .filter(|label| !label.is_empty()),
        })
    }
}

fn bytes(fields: &Le<'_>, incompatible: u32) -> Result<u64, DiskError> {
    let log_block_bytes = fields.u32(24);
    if log_block_bytes > MAX_LOG_BLOCK_BYTES {
        return Err(DiskError::FileSystem("its block size is impossible"));
    }
    let high = if incompatible & INCOMPATIBLE_64BIT != 0 {
        fields.u32(336)
    } else {
        0
    };
    let blocks = u64::from(high) << 32 | u64::from(fields.u32(4));
    let bytes = blocks
        .checked_mul(1024 << log_block_bytes)
        .filter(|bytes| (2048..1 << 62).contains(bytes));
    bytes.ok_or(DiskError::FileSystem("its number of blocks is impossible"))
}

/// Little-endian numbers at fixed places.
pub(super) struct Le<'a>(pub &'a [u8]);

impl Le<'_> {
    pub(super) fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.0[at..at + 2].try_into().expect("two bytes"))
    }

    pub(super) fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().expect("four bytes"))
    }

    pub(super) fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }
}
