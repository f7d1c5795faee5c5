//! Errors of importing a disk image. Each message states its own fact; the caller prints the chain
//! of sources.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use sandtree_disk::ext4::probe;
use sandtree_disk::partitions;
use sandtree_disk::qcow2::HeaderError;
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
    #[error("the disk has {bytes} bytes; the limit is {limit_bytes}")]
    TooLarge { bytes: u64, limit_bytes: u64 },
    #[error("the file system has more data than the limit of {limit_bytes} bytes")]
    TooMuchData { limit_bytes: u64 },
    #[error("the qcow2 image has {0}, which is not supported")]
    Refused(Qcow2Refused),
    #[error("the qcow2 image is damaged: {0}")]
    Damaged(Qcow2Damage),
    #[error(transparent)]
    Partitions(partitions::Error),
    #[error("the file system is damaged: {0}")]
    FileSystem(probe::Damage),
    #[error(
        "the file system has {bytes} bytes, but its place on the disk has only {available_bytes}"
    )]
    FileSystemBeyond { bytes: u64, available_bytes: u64 },
    #[error("the root file system is {0}; only ext4 is supported")]
    OtherFileSystem(&'static str),
    #[error("the disk has neither a file system nor a partition table")]
    Unknown,
    #[error("no partition has a root file system: {}", listed(.0))]
    NoRoot(Vec<FoundPartition>),
    #[error("several partitions could be the root file system: {}", listed(.0))]
    SeveralRoots(Vec<FoundPartition>),
    #[error("{0} overlays are more than a disk may have")]
    TooManyOverlays(usize),
    #[error("the overlays were made on another disk than this base, or another version of it")]
    OtherBase,
    #[error("the import was stopped")]
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

    /// The error of our own that a reader of the disk passed on as an I/O error, if it was one.
    pub(super) fn from_read(error: io::Error) -> Result<Self, io::Error> {
        error.downcast::<Self>()
    }
}

impl From<partitions::Error> for DiskError {
    fn from(error: partitions::Error) -> Self {
        match error {
            partitions::Error::Io(source) => Self::from_read(source)
                .unwrap_or_else(|source| Self::Partitions(partitions::Error::Io(source))),
            error @ partitions::Error::Gpt { .. } => Self::Partitions(error),
        }
    }
}

impl From<probe::Damage> for DiskError {
    fn from(damage: probe::Damage) -> Self {
        Self::FileSystem(damage)
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

/// A feature of a qcow2 image that this program does not read.
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

/// Damage of a qcow2 image. `at` is the place in the file of the wrong value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Qcow2Damage {
    #[error(transparent)]
    Header(HeaderError),
    #[error("its L1 table has {entries} entries for {bytes} bytes")]
    L1Entries { entries: u32, bytes: u64 },
    #[error("the entry at {at} has reserved bits set")]
    Reserved { at: u64 },
    #[error("the offset {offset} at {at} is not a multiple of the cluster size")]
    Unaligned { at: u64, offset: u64 },
    #[error("the offset {offset} at {at} is outside the file")]
    Beyond { at: u64, offset: u64 },
    #[error("the compressed cluster at {offset} cannot be decompressed")]
    Compressed { offset: u64 },
}

/// A partition and its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundPartition {
    /// As Linux counts partitions, from 1 on.
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
        return "the disk has no partitions".into();
    }
    let found: Vec<_> = found.iter().map(ToString::to_string).collect();
    found.join(", ")
}
