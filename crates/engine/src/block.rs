//! The block graph: a raw base below qcow2 overlays, every node with a name.
//!
//! ```text
//!   virtio-blk --> disk2 (qcow2, active) --> disk1 (qcow2, frozen) --> disk0 (raw base)
//!                    |                         |                         |
//!                  disk2-file                disk1-file                disk0-file      /dev/fdset/N
//! ```
//!
//! Always: only the last overlay is writable; everything below is shared between machines, so it is
//! opened read-only and without locks. Unless it is asked for, flushes are not passed on:
//! durability is made where it is promised, not on each guest write. An image's number is that of
//! its fd set and is never used again in one machine. When it fails: nodes and descriptors added on
//! the way are removed again, and the guest's disk is what it was.

use std::fs::File;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::error::Error;
use crate::fdset::{self, FdSets};
use crate::qmp::{
    Below, BlockResize, BlockdevAdd, BlockdevBackup, BlockdevDel, BlockdevReopen, BlockdevSnapshot,
    Cache, Event, Events, JobDismiss, Node, Qmp, QomSet, QueryBlock, QueryJobs,
};

/// A machine's disk as open files.
#[derive(Debug)]
pub struct DiskChain {
    /// Raw, opened read-only.
    pub base: File,
    /// qcow2, oldest first. The last is the active one and open for reading and writing; the others
    /// read-only.
    pub overlays: Vec<File>,
    pub flushes: Flushes,
}

impl DiskChain {
    pub(crate) fn into_descriptors(self, first: RawFd) -> Vec<(RawFd, OwnedFd)> {
        let files = std::iter::once(self.base).chain(self.overlays);
        (first..).zip(files.map(OwnedFd::from)).collect()
    }

    /// The images that nothing writes to: the base, and all overlays but the active one.
    pub(crate) fn closed(&self) -> impl Iterator<Item = &File> {
        let (_, closed) = self.overlays.split_last().unzip();
        std::iter::once(&self.base).chain(closed.into_iter().flatten())
    }
}

/// Two descriptors are of the same file if these are equal, as long as one of them is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    pub(crate) fn of(file: &File) -> Result<Self, Error> {
        let status = file
            .metadata()
            .map_err(Error::io("look at", "an opened file"))?;
        Ok(Self {
            device: status.dev(),
            inode: status.ino(),
        })
    }
}

/// How QEMU does disk input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aio {
    IoUring,
    Threads,
}

impl Aio {
    pub fn name(self) -> &'static str {
        match self {
            Aio::IoUring => "io_uring",
            Aio::Threads => "threads",
        }
    }
}

/// What becomes of a guest's flushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flushes {
    /// A power loss of the host may take anything that was written since the disk was last synced,
    /// in any order.
    #[default]
    Ignored,
    /// What the guest has synced is on the host's disk.
    PassedOn,
}

/// How the images of a machine are opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    pub aio: Aio,
    pub flushes: Flushes,
}

/// The guest's disk among QEMU's devices.
pub(crate) const DEVICE: &str = "disk";

/// The node of a disk that comes later.
pub(crate) const PLACEHOLDER: &str = "nothing";

/// A node that holds no data, as JSON. Of the disk's size: QEMU derives a geometry from it.
pub(crate) fn placeholder(bytes: u64) -> String {
    let node = serde_json::json!({
        "driver": "null-co", "node-name": PLACEHOLDER, "size": bytes, "read-zeroes": true,
    });
    node.to_string()
}

/// The node of image n: 0 is the base.
pub(crate) fn node(number: u64) -> String {
    format!("disk{number}")
}

/// The nodes of a chain, bottom first, for images whose fd sets are numbered by level. JSON is what
/// both the arguments and QMP take.
pub(crate) fn nodes(overlays: u64, opening: Opening) -> Vec<Node> {
    let mut nodes = closed_nodes(overlays - 1, opening);
    nodes.extend(overlay_nodes(overlays, Access::Active, opening));
    nodes
}

/// The same without an active overlay.
fn closed_nodes(overlays: u64, opening: Opening) -> Vec<Node> {
    let mut nodes = vec![file_node(0, Access::Shared, opening), base_node(opening)];
    nodes.extend((1..=overlays).flat_map(|level| overlay_nodes(level, Access::Shared, opening)));
    nodes
}

fn overlay_nodes(level: u64, access: Access, opening: Opening) -> [Node; 2] {
    [
        file_node(level, access, opening),
        overlay_node(level, access, opening, Some(node(level - 1))),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Active,
    Shared,
}

fn file_name(number: u64) -> String {
    format!("{}-file", node(number))
}

fn plain(
    driver: &'static str,
    node_name: String,
    below: Below,
    access: Access,
    flushes: Flushes,
) -> Node {
    let active = access == Access::Active;
    // Nothing is written to the others.
    let no_flush = !active || flushes == Flushes::Ignored;
    Node {
        driver,
        node_name,
        below,
        read_only: !active,
        locking: None,
        discard: active.then_some("unmap"),
        detect_zeroes: None,
        cache: Cache { no_flush },
    }
}

fn file_node(number: u64, access: Access, opening: Opening) -> Node {
    let below = Below::Descriptor {
        filename: fdset::path(number),
        aio: opening.aio.name(),
    };
    let locking = (access == Access::Shared).then_some("off");
    Node {
        locking,
        ..plain("file", file_name(number), below, access, opening.flushes)
    }
}

fn base_node(opening: Opening) -> Node {
    plain(
        "raw",
        node(0),
        Below::Raw { file: file_name(0) },
        Access::Shared,
        opening.flushes,
    )
}

fn overlay_node(number: u64, access: Access, opening: Opening, backing: Option<String>) -> Node {
    let below = Below::Overlay {
        file: file_name(number),
        backing,
    };
    let detect_zeroes = (access == Access::Active).then_some("unmap");
    Node {
        detect_zeroes,
        ..plain("qcow2", node(number), below, access, opening.flushes)
    }
}

/// The images that a machine with a placeholder has open: the base, and closed overlays above it.
/// Their numbers are their levels.
#[derive(Debug)]
pub(crate) struct OpenedAhead {
    qmp: Qmp,
    images: Vec<FileIdentity>,
}

impl OpenedAhead {
    /// Opens the closed images of a disk. `sets` has given out no number yet. After an error the
    /// machine is of no use.
    pub(crate) async fn open(
        qmp: Qmp,
        opening: Opening,
        sets: &FdSets,
        closed: Vec<File>,
    ) -> Result<Self, Error> {
        let images = closed
            .iter()
            .map(FileIdentity::of)
            .collect::<Result<Vec<_>, _>>()?;
        let overlays = closed.len() as u64 - 1;
        for image in closed {
            sets.add(image.into()).await?;
        }
        for node in closed_nodes(overlays, opening) {
            qmp.run(BlockdevAdd(node)).await?;
        }
        Ok(Self { qmp, images })
    }

    /// Whether the disk has the same base: everything else can be exchanged.
    pub(crate) fn fits(&self, chain: &DiskChain) -> bool {
        self.shared_with(chain).is_ok_and(|shared| shared > 0)
    }

    /// How many images from the base up the disk shares.
    fn shared_with(&self, chain: &DiskChain) -> Result<usize, Error> {
        let wanted = chain.closed().map(FileIdentity::of);
        let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
        let pairs = self.images.iter().zip(&wanted);
        Ok(pairs.take_while(|(ahead, wanted)| ahead == wanted).count())
    }
}

/// Opens the overlays from level `first` on, and exchanges the placeholder of the disk for the last
/// one. No command needs the reply to another one, so they are sent together.
async fn open_and_switch(
    qmp: &Qmp,
    opening: Opening,
    numbers: &[u64],
    first: usize,
) -> Result<(), Error> {
    let last = numbers.len() - 1;
    let mut opened = Vec::new();
    for level in first..=last {
        let access = if level == last {
            Access::Active
        } else {
            Access::Shared
        };
        let backing = Some(node(numbers[level - 1]));
        let overlay = overlay_node(numbers[level], access, opening, backing);
        let file = file_node(numbers[level], access, opening);
        opened.push(qmp.begin(&BlockdevAdd(file)));
        opened.push(qmp.begin(&BlockdevAdd(overlay)));
    }
    let path = format!("/machine/peripheral/{DEVICE}");
    let active = node(numbers[last]);
    let switched = qmp.begin(&QomSet {
        path: &path,
        property: "drive",
        value: &active,
    });
    let deleted = qmp.begin(&BlockdevDel {
        node_name: PLACEHOLDER,
    });
    for reply in opened {
        reply.await?;
    }
    switched.await?;
    deleted.await.map(drop)
}

/// An overlay that QEMU has open and the guest does not use yet.
#[derive(Debug)]
#[must_use = "it is to be made the active one, or discarded"]
pub struct PreparedOverlay {
    number: u64,
}

/// The disk of a running machine.
#[derive(Debug)]
pub(crate) struct Disk {
    qmp: Qmp,
    opening: Opening,
    /// Held while the graph is changed or copied from: QEMU 7.2 may hang forever when the
    /// graph changes under a backup job.
    chain: Mutex<Chain>,
    /// Images that were opened ahead, bottom first, and that no overlay of the disk stands on.
    unneeded: Mutex<Vec<u64>>,
}

/// Numbers of the images above the base.
#[derive(Debug)]
struct Chain {
    active: u64,
    /// Bottom first.
    frozen: Vec<u64>,
    /// The overlay of a pivot that QEMU did not answer in time: it may be the active one.
    unsettled: Option<u64>,
}

impl Chain {
    fn advance(&mut self, overlay: u64) {
        let frozen = std::mem::replace(&mut self.active, overlay);
        self.frozen.push(frozen);
    }
}

impl Disk {
    pub(crate) fn new(qmp: Qmp, opening: Opening, overlays: u64) -> Self {
        let chain = Chain {
            active: overlays,
            frozen: (1..overlays).collect(),
            unsettled: None,
        };
        Self {
            qmp,
            opening,
            chain: Mutex::new(chain),
            unneeded: Mutex::default(),
        }
    }

    /// Gives a machine that was started with a placeholder its disk. Of the images, `ahead` has
    /// opened the base, and perhaps overlays above it. After an error the machine is of no use.
    pub(crate) async fn attach(
        ahead: OpenedAhead,
        sets: &FdSets,
        opening: Opening,
        chain: DiskChain,
    ) -> Result<Self, Error> {
        let shared = ahead.shared_with(&chain)?;
        if shared == 0 {
            let detail = "the base of a disk was not opened ahead".into();
            return Err(Error::Spec { detail });
        }
        let OpenedAhead { qmp, images } = ahead;
        let mut numbers: Vec<u64> = (0..shared as u64).collect();
        for (_, image) in chain.into_descriptors(0).into_iter().skip(shared) {
            numbers.push(sets.add(image).await?);
        }
        open_and_switch(&qmp, opening, &numbers, shared).await?;
        let (active, below) = numbers.split_last().expect("a disk has an active overlay");
        let chain = Chain {
            active: *active,
            frozen: below[1..].to_vec(),
            unsettled: None,
        };
        Ok(Self {
            qmp,
            opening,
            chain: Mutex::new(chain),
            unneeded: Mutex::new((shared as u64..images.len() as u64).collect()),
        })
    }

    /// Closes the images that were opened ahead and that the disk does not have. The guest runs:
    /// QEMU does not close a descriptor of a machine that waits for a state.
    pub(crate) async fn close_unneeded(&self, sets: &FdSets) -> Result<(), Error> {
        let _unchanged = self.chain.lock().await;
        let mut unneeded = self.unneeded.lock().await;
        while let Some(number) = unneeded.pop() {
            self.remove(sets, number).await?;
        }
        Ok(())
    }

    pub(crate) async fn prepare(
        &self,
        sets: &FdSets,
        file: File,
    ) -> Result<PreparedOverlay, Error> {
        Ok(PreparedOverlay {
            number: self.add(sets, file, Access::Active, None).await?,
        })
    }

    pub(crate) async fn pivot(
        &self,
        overlay: PreparedOverlay,
    ) -> Result<(), (PreparedOverlay, Error)> {
        let mut chain = self.chain.lock().await;
        match self.settle(&mut chain).await {
            // The guest has written to it since: it is no place to begin a state from.
            Ok(()) if chain.active == overlay.number => return Err((overlay, Error::PivotedLate)),
            Ok(()) => {}
            Err(error) => return Err((overlay, error)),
        }
        let below = node(chain.active);
        let above = node(overlay.number);
        match self
            .qmp
            .run(BlockdevSnapshot {
                node: &below,
                overlay: &above,
            })
            .await
        {
            Ok(_) => {
                chain.advance(overlay.number);
                Ok(())
            }
            Err(error @ Error::Timeout { .. }) => {
                chain.unsettled = Some(overlay.number);
                match self.settle(&mut chain).await {
                    Ok(()) if chain.active == overlay.number => Ok(()),
                    _ => Err((overlay, error)),
                }
            }
            Err(error) => Err((overlay, error)),
        }
    }

    /// Finds out what came of a pivot that was not answered in time. QEMU answers in order, so once
    /// it does, it is known.
    async fn settle(&self, chain: &mut Chain) -> Result<(), Error> {
        let Some(number) = chain.unsettled else {
            return Ok(());
        };
        let blocks = self.qmp.run(QueryBlock {}).await?;
        let used: Vec<String> = blocks
            .into_iter()
            .filter_map(|block| Some(block.inserted?.node_name))
            .collect();
        if used.contains(&node(number)) {
            chain.advance(number);
        }
        chain.unsettled = None;
        Ok(())
    }

    /// Gives up the right to write to the overlay that the last pivot froze. `file` is that
    /// overlay, opened read-only.
    pub(crate) async fn give_up_writing(&self, sets: &FdSets, file: File) -> Result<(), Error> {
        let chain = self.chain.lock().await;
        let Some((frozen, below)) = chain.frozen.split_last() else {
            return Ok(());
        };
        let backing = node(below.last().copied().unwrap_or(0));
        let read_only = |node: Node| Node {
            read_only: true,
            ..node
        };
        let options = [
            read_only(overlay_node(
                *frozen,
                Access::Active,
                self.opening,
                Some(backing),
            )),
            read_only(file_node(*frozen, Access::Active, self.opening)),
        ];
        let reopen = async {
            self.qmp
                .run(BlockdevReopen { options: &options })
                .await
                .map(drop)
        };
        sets.exchange(*frozen, file.into(), reopen).await
    }

    pub(crate) async fn discard(
        &self,
        sets: &FdSets,
        overlay: PreparedOverlay,
    ) -> Result<(), Error> {
        self.remove(sets, overlay.number).await
    }

    /// Exchanges everything between the base and the active overlay for files that hold the same.
    pub(crate) async fn rebase(&self, sets: &FdSets, below: Vec<File>) -> Result<(), Error> {
        let mut chain = self.chain.lock().await;
        let mut added = Vec::new();
        let exchanged = self.exchange(sets, chain.active, below, &mut added).await;
        let unused = match &exchanged {
            Ok(()) => std::mem::replace(&mut chain.frozen, added),
            Err(_) => added,
        };
        for number in unused.into_iter().rev() {
            // What stays open costs a descriptor and disk space until the machine ends; its disk is
            // right either way.
            if let Err(error) = self.remove(sets, number).await {
                tracing::warn!(number, %error, "QEMU keeps an image it does not use");
            }
        }
        exchanged
    }

    async fn exchange(
        &self,
        sets: &FdSets,
        active: u64,
        below: Vec<File>,
        added: &mut Vec<u64>,
    ) -> Result<(), Error> {
        let mut top = node(0);
        for file in below {
            let number = self.add(sets, file, Access::Shared, Some(top)).await?;
            added.push(number);
            top = node(number);
        }
        let reopened = overlay_node(active, Access::Active, self.opening, Some(top));
        self.qmp
            .run(BlockdevReopen {
                options: &[reopened],
            })
            .await
            .map(drop)
    }

    /// Copies what lies below the active overlay, and so does not change.
    pub(crate) async fn copy(&self, sets: &FdSets, into: File) -> Result<(), Error> {
        let chain = self.chain.lock().await;
        let source = node(chain.frozen.last().copied().unwrap_or(0));
        let target = self.add(sets, into, Access::Active, None).await?;
        let copied = self.back_up(&source, target).await;
        // Closing the target writes what QEMU still holds of it.
        let closed = self.remove(sets, target).await;
        copied.and(closed)
    }

    async fn back_up(&self, source: &str, target: u64) -> Result<(), Error> {
        let job = format!("copy{target}");
        let mut events = self.qmp.events();
        let backup = BlockdevBackup {
            job_id: &job,
            device: source,
            target: &node(target),
            sync: "full",
            auto_dismiss: false,
        };
        self.qmp.run(backup).await?;
        let ended = self.concluded(&mut events, &job).await;
        if ended.is_ok() {
            self.qmp.run(JobDismiss { id: &job }).await?;
        }
        match ended? {
            None => Ok(()),
            Some(reason) => Err(Error::NotCopied { reason }),
        }
    }

    /// Waits for the end of a job; its reason if it failed.
    async fn concluded(&self, events: &mut Events, job: &str) -> Result<Option<String>, Error> {
        loop {
            match events.next().await {
                Some(Event::Job { id, status }) if id == job && status == "concluded" => {}
                // It may be among those lost. And when the connection has ended, the query returns
                // why.
                Some(Event::Lost { .. }) | None => {}
                Some(_) => continue,
            }
            let jobs = self.qmp.run(QueryJobs {}).await?;
            match jobs.into_iter().find(|found| found.id == job) {
                Some(found) if found.status == "concluded" => return Ok(found.error),
                Some(_) => {}
                None => {
                    return Err(Error::Protocol {
                        detail: format!("job {job} is gone"),
                    });
                }
            }
        }
    }

    pub(crate) async fn resize(&self, bytes: u64) -> Result<(), Error> {
        let chain = self.chain.lock().await;
        self.qmp
            .run(BlockResize {
                node_name: &node(chain.active),
                size: bytes,
            })
            .await
            .map(drop)
    }

    /// Opens an image in QEMU, with nothing left behind when it fails.
    async fn add(
        &self,
        sets: &FdSets,
        file: File,
        access: Access,
        backing: Option<String>,
    ) -> Result<u64, Error> {
        let number = sets.add(file.into()).await?;
        let added = self.add_nodes(number, access, backing).await;
        if added.is_err() {
            sets.release(number).await;
        }
        added.map(|()| number)
    }

    async fn add_nodes(
        &self,
        number: u64,
        access: Access,
        backing: Option<String>,
    ) -> Result<(), Error> {
        let file = file_node(number, access, self.opening);
        let overlay = overlay_node(number, access, self.opening, backing);
        // Together: without its file, the overlay is refused.
        let opened = self.qmp.begin(&BlockdevAdd(file));
        let added = self.qmp.begin(&BlockdevAdd(overlay));
        opened.await?;
        let added = added.await;
        if added.is_err() {
            self.delete(&file_name(number)).await?;
        }
        added.map(drop)
    }

    async fn remove(&self, sets: &FdSets, number: u64) -> Result<(), Error> {
        self.delete(&node(number)).await?;
        self.delete(&file_name(number)).await?;
        sets.remove(number).await
    }

    async fn delete(&self, node_name: &str) -> Result<(), Error> {
        self.qmp.run(BlockdevDel { node_name }).await.map(drop)
    }
}
