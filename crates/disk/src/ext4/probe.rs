//! Recognises a file system by its superblock, and reads its size, state and name.
//!
//! Unlike the reader, this accepts features that it does not know: a file system can be copied
//! without understanding its structures.

use thiserror::Error as ThisError;

use super::format::{
    MAX_LOG_BLOCK_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, incompatible,
};
use crate::fields::Le;

const OFFSET: usize = SUPERBLOCK_OFFSET as usize;
const MAX_REVISION: u32 = 1;
const STATE_VALID: u16 = 1;
const STATE_ERRORS: u16 = 2;

/// Why a superblock cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum Damage {
    #[error("it is only an external journal")]
    ExternalJournal,
    #[error("its block size is invalid")]
    BlockSize,
    #[error("its number of blocks is invalid")]
    Blocks,
}

/// The facts about a file system that a copy of it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The size of the file system.
    pub bytes: u64,
    /// It was unmounted, and no errors are recorded.
    pub is_clean: bool,
    pub uuid: [u8; 16],
    pub label: Option<String>,
}

/// Whether a disk starts with the magic number of ext2, ext3 or ext4.
pub fn has_magic(start: &[u8]) -> bool {
    let magic = start.get(OFFSET + 56..OFFSET + 58);
    magic == Some(&SUPERBLOCK_MAGIC.to_le_bytes())
}

/// Whether a disk starts with a plausible superblock: other files may have the two bytes of the
/// magic number in that place as well.
pub fn has_superblock(start: &[u8]) -> bool {
    let Some(fields) = start.get(OFFSET..OFFSET + SUPERBLOCK_BYTES).map(Le) else {
        return false;
    };
    let inodes = fields.u32(0);
    let blocks = fields.u32(4);
    let log_block_bytes = fields.u32(24);
    let revision = fields.u32(76);
    has_magic(start)
        && inodes > 0
        && blocks > 0
        && log_block_bytes <= MAX_LOG_BLOCK_BYTES
        && revision <= MAX_REVISION
}

impl Summary {
    /// Parses the superblock in the first 2 KiB or more of a file system.
    pub fn parse(start: &[u8]) -> Result<Self, Damage> {
        let superblock = &start[OFFSET..OFFSET + SUPERBLOCK_BYTES];
        let fields = Le(superblock);
        let incompatible = fields.u32(96);
        let state = fields.u16(58);
        if incompatible & incompatible::JOURNAL_DEVICE != 0 {
            return Err(Damage::ExternalJournal);
        }
        let is_unmounted = incompatible & incompatible::RECOVER == 0 && state & STATE_VALID != 0;
        let label = superblock[120..136].split(|byte| *byte == 0).next();
        let label = String::from_utf8_lossy(label.unwrap_or_default()).into_owned();
        Ok(Self {
            bytes: bytes(fields, incompatible)?,
            is_clean: is_unmounted && state & STATE_ERRORS == 0,
            uuid: superblock[104..120].try_into().expect("sixteen bytes"),
            label: Some(label).filter(|label| !label.is_empty()),
        })
    }
}

fn bytes(fields: Le<'_>, incompatible: u32) -> Result<u64, Damage> {
    let log_block_bytes = fields.u32(24);
    if log_block_bytes > MAX_LOG_BLOCK_BYTES {
        return Err(Damage::BlockSize);
    }
    let blocks = if incompatible & incompatible::IS_64BIT != 0 {
        fields.halves(4, 336)
    } else {
        fields.u32(4).into()
    };
    let bytes = blocks.checked_mul(1024 << log_block_bytes);
    bytes
        .filter(|bytes| (2048..1 << 62).contains(bytes))
        .ok_or(Damage::Blocks)
}
