//! A root file system on its way into the store.

use std::fs::File;
use std::path::PathBuf;

use sandtree_rootfs::{Builder, Limits, New, NewKind, Options, Stop, Time};
use sandtree_store::{Image, ImageSpec, Staged, Store};

use super::{Error, Progress, Stage, Watch, io_error};

/// The date of what we add ourselves.
const EPOCH: Time = Time {
    seconds: super::EPOCH,
    nanoseconds: 0,
};
/// Whatever is unpacked in all: far above any image, and no more than a disk may have.
const UNPACKED_MAX: u64 = 1 << 40;
const NODES_MAX: u64 = 4_000_000;
const NAMES_MAX: u64 = 1 << 30;

/// In an image, beside what is in it: the disks of sandboxes are larger.
pub(super) const ROOM_BYTES: u64 = 64 << 20;
const GIB: u64 = 1 << 30;

/// The size of a sandbox's disk on an image of so many bytes: as asked for, or with some GiB of
/// room.
pub(super) fn disk_bytes(asked: Option<u64>, image_bytes: u64) -> u64 {
    asked.unwrap_or(image_bytes.next_multiple_of(GIB) + 4 * GIB)
}

/// What may be written at once without taking the last of the disk from others.
pub(crate) fn writable_bytes(store: &Store) -> Result<u64, Error> {
    let free_bytes = store.disk_free_bytes()?;
    Ok(free_bytes - GIB.min(free_bytes / 2))
}

/// Dropped, nothing of it is left.
pub(super) struct Making<'s> {
    store: &'s Store,
    staged: Staged,
    pub builder: Builder,
}

impl<'s> Making<'s> {
    pub fn begin(store: &'s Store) -> Result<Self, Error> {
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

    /// Finishes the file system, with so much room in it, and publishes it as an image. `spec`
    /// hears how large it is.
    pub fn publish(
        self,
        free_bytes: u64,
        watch: &mut Watch<'_>,
        spec: impl FnOnce(u64) -> ImageSpec,
    ) -> Result<Image, Error> {
        watch(Progress::begin(Stage::Rootfs))?;
        let made = self.builder.finish(&Options { free_bytes })?;
        watch(Progress::begin(Stage::Publish))?;
        Ok(self.store.publish_image(self.staged, spec(made.bytes))?)
    }
}

/// Tells how many bytes were unpacked.
pub(super) fn unpacking<'a>(watch: &'a mut Watch<'_>) -> impl FnMut(u64) -> Result<(), Stop> + 'a {
    move |done_bytes| {
        watch(Progress {
            stage: Stage::Unpack,
            done_bytes,
            total_bytes: None,
        })
        .map_err(|_| Stop)
    }
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    Dir,
    Text(String),
    HostFile(PathBuf),
    Symlink(String),
}

/// Something that we put into a root file system.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub path: String,
    pub mode: u16,
    /// User and group alike.
    pub owner: u32,
    pub content: Content,
}

pub(super) fn put_all(builder: &mut Builder, nodes: &[Node]) -> Result<(), Error> {
    nodes.iter().try_for_each(|node| put(builder, node))
}

fn put(builder: &mut Builder, node: &Node) -> Result<(), Error> {
    let (mut text, mut file);
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
        modified: EPOCH,
        kind,
    };
    Ok(builder.put(node.path.as_bytes(), new)?)
}
