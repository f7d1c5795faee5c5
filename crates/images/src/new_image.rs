//! An unfinished image: a root file system that is being written into the store.

use std::fs::File;
use std::path::PathBuf;

use sandtree_rootfs::{Builder, DiskLimits, Limits, New, NewKind, Options, Stop, Time};
use sandtree_store::{Image, ImageSpec, Staged, Store};

use crate::error::{Result, io_error};
use crate::job::{Job, Progress, Stage};

/// The search path in images that do not set one.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The date of every file that we add ourselves, in seconds.
pub(crate) const EPOCH: i64 = 1_700_000_000;

/// The most that one image may unpack to: far above any image, and no more than a disk may have.
const UNPACKED_MAX: u64 = 1 << 40;
const NODES_MAX: u64 = 4_000_000;
const NAMES_MAX: u64 = 1 << 30;

/// The free space in an image. It is small, because the disks of sandboxes are larger.
pub(crate) const ROOM_BYTES: u64 = 64 << 20;
const GIB: u64 = 1 << 30;

/// The size of a sandbox's disk on an image of this size: as requested, or a few GiB more.
pub(crate) fn disk_bytes(requested: Option<u64>, image_bytes: u64) -> u64 {
    requested.unwrap_or(image_bytes.next_multiple_of(GIB) + 4 * GIB)
}

/// How much may be written at once. The last of the free space is left to others.
pub(crate) fn writable_bytes(store: &Store) -> Result<u64> {
    let free_bytes = store.disk_free_bytes()?;
    Ok(free_bytes - GIB.min(free_bytes / 2))
}

/// The limits of a disk that is read from outside.
pub(crate) fn disk_limits(store: &Store) -> Result<DiskLimits> {
    Ok(DiskLimits {
        bytes: store.disk_free_bytes()?.saturating_mul(4),
        written_bytes: writable_bytes(store)?,
    })
}

/// An image under construction. Dropping it removes all of it.
pub(crate) struct NewImage<'s> {
    store: &'s Store,
    staged: Staged,
    pub builder: Builder,
}

impl<'s> NewImage<'s> {
    pub fn begin(store: &'s Store) -> Result<Self> {
        let staged = store.stage()?;
        let bytes = store.disk_free_bytes()?.saturating_mul(4).min(UNPACKED_MAX);
        let limits = Limits {
            nodes: NODES_MAX,
            bytes,
            names_bytes: NAMES_MAX,
            written_bytes: writable_bytes(store)?,
        };
        let builder = Builder::create(&staged.path().join("rootfs.raw"), limits)?;
        Ok(Self {
            store,
            staged,
            builder,
        })
    }

    /// Finishes the file system with this much free space, and publishes it as an image. `spec`
    /// receives the size of the file system.
    pub fn publish(
        self,
        free_bytes: u64,
        job: &mut Job<'_>,
        spec: impl FnOnce(u64) -> ImageSpec,
    ) -> Result<Image> {
        job.begin(Stage::Rootfs)?;
        let made = self.builder.finish(&Options { free_bytes })?;
        job.begin(Stage::Publish)?;
        Ok(self.store.publish_image(self.staged, spec(made.bytes))?)
    }
}

/// Reports to the job how many bytes were unpacked.
pub(crate) fn unpacking(job: &mut Job<'_>) -> impl FnMut(u64) -> Result<(), Stop> {
    move |done_bytes| {
        let progress = Progress {
            stage: Stage::Unpack,
            done_bytes,
            total_bytes: None,
        };
        job.report(progress).map_err(|_| Stop)
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Content {
    Dir,
    Text(String),
    HostFile(PathBuf),
    Symlink(String),
}

/// A file, directory or link that we add to a root file system.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub path: String,
    pub mode: u16,
    /// The user and the group.
    pub owner: u32,
    pub content: Content,
}

pub(crate) fn put_all(builder: &mut Builder, nodes: &[Node]) -> Result<()> {
    nodes.iter().try_for_each(|node| put(builder, node))
}

fn put(builder: &mut Builder, node: &Node) -> Result<()> {
    let mut text;
    let mut file;
    let kind = match &node.content {
        Content::Dir => NewKind::Dir,
        Content::Symlink(target) => NewKind::Symlink(target.as_bytes()),
        Content::Text(content) => {
            text = content.as_bytes();
            NewKind::File(&mut text, content.len() as u64)
        }
        Content::HostFile(path) => {
            file = File::open(path).map_err(io_error("open", path))?;
            let bytes = file.metadata().map_err(io_error("look at", path))?.len();
            NewKind::File(&mut file, bytes)
        }
    };
    let new = New {
        mode: node.mode,
        uid: node.owner,
        gid: node.owner,
        modified: Time {
            seconds: EPOCH,
            nanoseconds: 0,
        },
        kind,
    };
    Ok(builder.put(node.path.as_bytes(), new)?)
}
