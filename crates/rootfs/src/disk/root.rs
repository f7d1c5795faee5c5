//! Which part of a disk is the root file system.
//!
//! ```text
//!  ext4 from the first byte on ──► that
//!  partitions with ext4        ──► the best of those that are, or may be, a root: by the type that a GPT gives,
//!                                  then by what is in it
//! ```
//!
//! Always: of several that are equally good none is taken; and none that was read and is no root,
//! such as a `/boot` beside a root in btrfs.

use std::io;

use sandtree_diff::{FileSystem, Path};

use super::DiskError;
use super::error::FoundPartition;
use super::ext4::Superblock;
use super::kind::{self, Kind};
use super::partitions::{self, Partition, Role};
use super::source::{Part, Source};

/// A file system that all lies on the disk.
#[derive(Debug)]
pub(super) struct Root {
    pub start: u64,
    pub partition: Option<u32>,
    pub superblock: Superblock,
}

/// What is in a file system, from what is no root to what is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    Other,
    /// This program cannot read it; a kernel may.
    Unread,
    /// A `/bin`, as in a root, but also in what belongs below `/usr`.
    Programs,
    System,
}

struct Looked {
    partition: Partition,
    kind: Kind,
    /// Of an ext4.
    content: Content,
}

pub(super) fn find(disk: &Source) -> Result<Root, DiskError> {
    let start = kind::start(disk, 0, disk.bytes())?;
    let kind = kind::of(&start);
    if kind == Kind::Ext4 && !partitions::has_intact_gpt(disk)? {
        return take(disk, 0, disk.bytes(), None);
    }
    match partitions::read(disk, &start)? {
        Some(partitions) => among(disk, partitions),
        None => Err(match kind {
            Kind::OtherRoot(name) | Kind::NotRoot(name) => DiskError::OtherFileSystem(name),
            _ => DiskError::Unknown,
        }),
    }
}

fn among(disk: &Source, partitions: Vec<Partition>) -> Result<Root, DiskError> {
    let looked = partitions
        .into_iter()
        .map(|partition| look(disk, partition))
        .collect::<Result<Vec<_>, _>>()?;
    let possible = looked
        .iter()
        .filter(|looked| looked.kind == Kind::Ext4 && looked.content > Content::Other);
    let Some(best) = possible.clone().map(Looked::rank).max() else {
        return Err(without_root(&looked));
    };
    let best: Vec<_> = possible.filter(|looked| looked.rank() == best).collect();
    match best[..] {
        [Looked { partition, .. }] => take(
            disk,
            partition.start,
            partition.bytes,
            Some(partition.number),
        ),
        _ => Err(DiskError::SeveralRoots(
            best.into_iter().map(Looked::found).collect(),
        )),
    }
}

/// The largest of what could have been a root says most.
fn without_root(looked: &[Looked]) -> DiskError {
    let others = looked.iter().filter_map(|looked| match looked.kind {
        Kind::OtherRoot(name) => Some((
            looked.partition.role == Role::Root,
            looked.partition.bytes,
            name,
        )),
        _ => None,
    });
    match others.max() {
        Some((_, _, name)) => DiskError::OtherFileSystem(name),
        None => DiskError::NoRoot(looked.iter().map(Looked::found).collect()),
    }
}

impl Looked {
    fn rank(&self) -> (bool, Content) {
        (self.partition.role == Role::Root, self.content)
    }

    fn found(&self) -> FoundPartition {
        let what = match (self.partition.role, self.kind, self.content) {
            (Role::Extended, ..) => "partitions that are not looked at",
            (_, Kind::Ext4, Content::Other) => "an ext4 without a system",
            (_, kind, _) => kind.name(),
        };
        FoundPartition {
            number: self.partition.number,
            bytes: self.partition.bytes,
            what,
        }
    }
}

fn look(disk: &Source, partition: Partition) -> Result<Looked, DiskError> {
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
    Ok(Looked {
        partition,
        kind,
        content,
    })
}

fn content(part: &Part<'_>) -> Result<Content, DiskError> {
    let read = || {
        let fs = FileSystem::open(part)?;
        let has = |path: &str| fs.stat(&Path::from(path)).map(|node| node.is_some());
        Ok(match () {
            () if has("/etc")? || has("/usr")? => Content::System,
            () if has("/bin")? => Content::Programs,
            () => Content::Other,
        })
    };
    match read() {
        Ok(content) => Ok(content),
        Err(sandtree_diff::Error::Io { source, .. }) => unreadable(source),
        Err(_) => Ok(Content::Unread),
    }
}

/// A disk that cannot be read is no question of what is in it.
fn unreadable(source: io::Error) -> Result<Content, DiskError> {
    match source.downcast::<DiskError>() {
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
    let superblock = Superblock::parse(&kind::start(disk, start, available_bytes)?)?;
    if superblock.bytes > available_bytes {
        return Err(DiskError::FileSystemBeyond {
            bytes: superblock.bytes,
            available_bytes,
        });
    }
    Ok(Root {
        start,
        partition,
        superblock,
    })
}
