//! What can go wrong with a disk image. Each message states its own fact; the source is printed by
//! whoever prints the chain.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

#[derive(Debug, Error)]
pub enum DiskError {
    #[error("cannot {doing} {}", path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a file", .0.display())]
    NotAFile(PathBuf),
    #[error("the disk has {bytes} bytes, more than the {limit_bytes} that are allowed")]
    TooLarge { bytes: u64, limit_bytes: u64 },
    #[error("the file system has more than the {limit_bytes} bytes of data that are allowed")]
    TooMuchData { limit_bytes: u64 },
    #[error("the qcow2 image has {0}, which cannot be taken")]
    Refused(Qcow2Refused),
    #[error("the qcow2 image is damaged: {0}")]
    Damaged(Qcow2Damage),
    #[error(
        "both copies of the disk's GPT are damaged: in the first, {primary}; in the second, {backup}"
    )]
    Gpt {
        primary: &'static str,
        backup: &'static str,
    },
    #[error("the file system is damaged: {0}")]
    FileSystem(&'static str),
    #[error("the file system has {bytes} bytes, and there are only {available_bytes} for it")]
    FileSystemBeyond { bytes: u64, available_bytes: u64 },
    #[error("the root file system is {0}; only ext4 can be taken")]
    OtherFileSystem(&'static str),
    #[error("there is neither a file system nor a partition table on the disk")]
    Unknown,
    #[error("no partition has a root file system: {}", listed(.0))]
    NoRoot(Vec<FoundPartition>),
    #[error("several partitions could be the root file system: {}", listed(.0))]
    SeveralRoots(Vec<FoundPartition>),
    #[error("the import was given up")]
    GivenUp,
}

impl DiskError {
    pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            doing,
            path: path.to_owned(),
            source,
        }
    }
}

impl From<Qcow2Damage> for DiskError {
    fn from(damage: Qcow2Damage) -> Self {
        Self::Damaged(damage)
    }
}

impl From<Qcow2Refused> for DiskError {
    fn from(refused: Qcow2Refused) -> Self {
        Self::Refused(refused)
    }
}

/// What a qcow2 image may have and we do not read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Qcow2Refused {
    #[error("version {0}")]
    Version(u32),
    #[error("a backing file, {0:?}")]
    BackingFile(String),
    #[error("an external data file")]
    ExternalData,
    #[error("encryption")]
    Encryption,
    #[error("extended L2 entries")]
    ExtendedL2,
    #[error("a mark that it was not closed")]
    Dirty,
    #[error("a mark that it is corrupt")]
    Corrupt,
    #[error("features with the bits {0:#x}")]
    Features(u64),
    #[error("compression of type {0}")]
    Compression(u8),
}

/// What is wrong with a qcow2 image. `at` is the place in the file that says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Qcow2Damage {
    #[error("it is shorter than its header")]
    Short,
    #[error("its clusters have 2^{0} bytes")]
    ClusterBits(u32),
    #[error("its header has {0} bytes")]
    HeaderBytes(u32),
    #[error("its L1 table has {entries} entries for {bytes} bytes")]
    L1Entries { entries: u32, bytes: u64 },
    #[error("the entry at {at} has reserved bits")]
    Reserved { at: u64 },
    #[error("the offset {offset} at {at} is not at the beginning of a cluster")]
    Unaligned { at: u64, offset: u64 },
    #[error("the offset {offset} at {at} is outside of the file")]
    Beyond { at: u64, offset: u64 },
    #[error("the compressed cluster at {offset} cannot be unpacked")]
    Compressed { offset: u64 },
}

/// A partition, and what there is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundPartition {
    /// As Linux counts them, from 1 on.
    pub number: u32,
    pub bytes: u64,
    pub what: &'static str,
}

impl fmt::Display for FoundPartition {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "partition {} has {} ({} bytes)",
            self.number, self.what, self.bytes
        )
    }
}

fn listed(found: &[FoundPartition]) -> String {
    if found.is_empty() {
        return "there are none".into();
    }
    found
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}
