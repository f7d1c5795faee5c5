//! Why an overlay cannot be used.

use thiserror::Error as ThisError;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum Damage {
    #[error("it is shorter than a qcow2 header")]
    Short,
    #[error("it is not a qcow2 file")]
    NotQcow2,
    #[error("its qcow2 version is {0}")]
    Version(u32),
    #[error("its clusters have 2^{0} bytes")]
    ClusterBits(u32),
    #[error("QEMU marked it as corrupt")]
    MarkedCorrupt,
    #[error("it is marked dirty")]
    MarkedDirty,
    #[error("it needs features this program does not know (bits {0:#x})")]
    Feature(u64),
    #[error("it has {0}")]
    Unexpected(&'static str),
    #[error("its L1 table does not fit its size")]
    L1Size,
    #[error("its refcount table is too large")]
    RefcountTableSize,
    #[error("a table entry at {at:#x} has reserved bits set")]
    Reserved { at: u64 },
    #[error("the offset {offset:#x} at {at:#x} is not a multiple of the cluster size")]
    Unaligned { at: u64, offset: u64 },
    #[error("the offset {offset:#x} at {at:#x} is beyond the end of the file")]
    Beyond { at: u64, offset: u64 },
    #[error("the cluster at {offset:#x} is used twice")]
    Shared { offset: u64 },
    #[error("the cluster at {offset:#x} is in use but counted as free")]
    Uncounted { offset: u64 },
}

pub(crate) fn require(fine: bool, damage: Damage) -> Result<(), Damage> {
    if fine { Ok(()) } else { Err(damage) }
}
