//! Why a file is not a qcow2 overlay that the store can use.

use thiserror::Error as ThisError;

/// Why an overlay cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum Damage {
    #[error("it is shorter than a qcow2 header")]
    Short,
    #[error("it is not a qcow2 file")]
    NotQcow2,
    #[error("its qcow2 version is {0}")]
    Version(u32),
    #[error("clusters of 2^{0} bytes")]
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
    #[error("its refcount table is impossibly large")]
    RefcountTableSize,
    #[error("a table entry at {at:#x} has reserved bits set")]
    Reserved { at: u64 },
    #[error("{offset:#x}, referred to at {at:#x}, is not the beginning of a cluster")]
    Unaligned { at: u64, offset: u64 },
    #[error("{offset:#x}, referred to at {at:#x}, is beyond the end of the file")]
    Beyond { at: u64, offset: u64 },
    #[error("the cluster at {offset:#x} is used twice")]
    Shared { offset: u64 },
    #[error("the cluster at {offset:#x} is in use and counted as free")]
    Uncounted { offset: u64 },
}
