//! Finds the root file system on a disk.
//!
//! ```text
//!  ext4 from the first byte on ──► that
//!  partitions with ext4        ──► the best of those that are, or may be, a root: by the type in a GPT,
//!                                  then by the content
//! ```
//!
//! Always: if several partitions are equally good, none is chosen. A partition whose content is
//! known not to be a root is never chosen, such as a `/boot` next to a root in btrfs.

use std::io;

use sandtree_disk::ext4::probe::Summary;
use sandtree_disk::ext4::read::{self, FileSystem, Path};
use sandtree_disk::partitions::{self, Partition, Role};

use super::error::{DiskError, FoundPartition};
use super::kind::{self, Kind};
use super::source::{Part, Source};

/// A root file system that lies on the disk completely.
#[derive(Debug)]
pub(super) struct Root {
    pub start: u64,
    pub partition: Option<u32>,
    pub summary: Summary,
}

/// The content of a file system, ordered by how likely it is a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    Other,
    /// This program cannot read it, but a kernel may.
    Unread,
    /// It has a `/bin`, like a root, but also like a file system for `/usr`.
    Programs,
    System,
}

/// A partition that may be the root.
struct Candidate {
    partition: Partition,
    kind: Kind,
    /// The content of an ext4.
    content: Content,
}

pub(super) fn find(disk: &Source) -> Result<Root, DiskError> {
    let start = kind::start(disk, 0, disk.bytes())?;
    let kind = kind::of(&start);
    let whole = Part {
        disk,
        start: 0,
        bytes: disk.bytes(),
    };
    if kind == Kind::Ext4 && !partitions::has_intact_gpt(&whole)? {
        return take(disk, 0, disk.bytes(), None);
    }
    match partitions::read(&whole, &start)? {
        Some(partitions) => among(disk, partitions),
        None => Err(match kind {
            Kind::OtherRoot(name) | Kind::NotRoot(name) => DiskError::OtherFileSystem(name),
            _ => DiskError::Unknown,
        }),
    }
}

/// The file system of a disk without partitions.
pub(super) fn bare(disk: &Source) -> Result<Root, DiskError> {
    let start = kind::start(disk, 0, disk.bytes())?;
    if kind::of(&start) != Kind::Ext4 {
        return Err(DiskError::Unknown);
    }
    take(disk, 0, disk.bytes(), None)
}

fn among(disk: &Source, partitions: Vec<Partition>) -> Result<Root, DiskError> {
    let candidates = partitions
        .into_iter()
        .map(|partition| examine(disk, partition))
        .collect::<Result<Vec<_>, _>>()?;
    let possible = candidates
        .iter()
        .filter(|candidate| candidate.kind == Kind::Ext4 && candidate.content > Content::Other);
    let Some(best) = possible.clone().map(Candidate::rank).max() else {
        return Err(without_root(&candidates));
    };
    let best: Vec<_> = possible
        .filter(|candidate| candidate.rank() == best)
        .collect();
    match best[..] {
        [Candidate { partition, .. }] => take(
            disk,
            partition.start,
            partition.bytes,
            Some(partition.number),
        ),
        _ => Err(DiskError::SeveralRoots(
            best.into_iter().map(Candidate::found).collect(),
        )),
    }
}

/// The error names the largest file system of another kind that could be the root.
fn without_root(candidates: &[Candidate]) -> DiskError {
    let others = candidates
        .iter()
        .filter_map(|candidate| match candidate.kind {
            Kind::OtherRoot(name) => Some((
                candidate.partition.role == Role::Root,
                candidate.partition.bytes,
                name,
            )),
            _ => None,
        });
    match others.max() {
        Some((_, _, name)) => DiskError::OtherFileSystem(name),
        None => DiskError::NoRoot(candidates.iter().map(Candidate::found).collect()),
    }
}

impl Candidate {
    fn rank(&self) -> (bool, Content) {
        (self.partition.role == Role::Root, self.content)
    }

    fn found(&self) -> FoundPartition {
        let what = match (self.partition.role, self.kind, self.content) {
            (Role::Extended, ..) => "logical partitions, which are not supported",
            (_, Kind::Ext4, Content::Other) => "an ext4 without an operating system",
            (_, kind, _) => kind.name(),
        };
        FoundPartition {
            number: self.partition.number,
            bytes: self.partition.bytes,
            what,
        }
    }
}

fn examine(disk: &Source, partition: Partition) -> Result<Candidate, DiskError> {
    let kind = match partition.role {
        Role::Extended => Kind::Unknown,
        Role::Root | Role::Other => kind::of(&kind::start(disk, partition.start, partition.bytes)?),
    };
    let content = match kind {
        Kind::Ext4 => content(&Part {
            disk,
            start: partition.start,
            bytes: partition.bytes,
        })?,
        _ => Content::Other,
    };
    Ok(Candidate {
        partition,
        kind,
        content,
    })
}

fn content(part: &Part<'_>) -> Result<Content, DiskError> {
    let read = || {
        let fs = FileSystem::open(part)?;
        let has = |path: &str| fs.stat(&Path::from(path)).map(|node| node.is_some());
        if has("/etc")? || has("/usr")? {
            return Ok(Content::System);
        }
        if has("/bin")? {
            return Ok(Content::Programs);
        }
        Ok(Content::Other)
    };
    match read() {
        Ok(content) => Ok(content),
        Err(read::Error::Io { source, .. }) => unreadable(source),
        Err(_) => Ok(Content::Unread),
    }
}

/// An error of the disk image itself ends the import. An error because the file system is damaged
/// only means that its content is unknown.
fn unreadable(source: io::Error) -> Result<Content, DiskError> {
    match DiskError::from_read(source) {
        Ok(error) => Err(error),
        Err(_) => Ok(Content::Unread),
    }
}

fn take(
    disk: &Source,
    start: u64,
    available_bytes: u64,
    partition: Option<u32>,
) -> Result<Root, DiskError> {
    let summary = Summary::parse(&kind::start(disk, start, available_bytes)?)?;
    if summary.bytes > available_bytes {
        return Err(DiskError::FileSystemBeyond {
            bytes: summary.bytes,
            available_bytes,
        });
    }
    Ok(Root {
        start,
        partition,
        summary,
    })
}
