//! The block graph: a raw base below qcow2 overlays, every node with a name.
//!
//! ```text
//!   virtio-blk --> disk2 (qcow2, active) --> disk1 (qcow2, frozen) --> disk0 (raw base)
//!                    |                         |                         |
//!                  disk2-file                disk1-file                disk0-file      /dev/fdset/N
//! ```
//!
//! Always: only the last overlay is writable; everything below is shared between machines, so it is opened read-only
//! and without locks. Flushes are not passed on: durability is made where it is promised, not on each guest write.

use std::fs::File;
use std::os::fd::{OwnedFd, RawFd};

use serde::{Deserialize, Serialize};

/// A machine's disk as open files.
#[derive(Debug)]
pub struct DiskChain {
    /// Raw, opened read-only.
    pub base: File,
    /// qcow2, oldest first. The last is the active one and open for reading and writing; the others read-only.
    pub overlays: Vec<File>,
}

impl DiskChain {
    pub(crate) fn into_descriptors(self, first: RawFd) -> Vec<(RawFd, OwnedFd)> {
        let files = std::iter::once(self.base).chain(self.overlays);
        (first..).zip(files.map(OwnedFd::from)).collect()
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

/// The node of the n-th image from the bottom: 0 is the base.
pub(crate) fn node(level: usize) -> String {
    format!("disk{level}")
}

/// The `-blockdev` values of a chain, bottom first, for images whose fd sets are numbered by level.
pub(crate) fn nodes(overlays: usize, aio: Aio) -> Vec<String> {
    let mut nodes = vec![file_node(0, Access::Shared, aio), base_node()];
    for level in 1..=overlays {
        let access = if level == overlays { Access::Active } else { Access::Shared };
        nodes.push(file_node(level, access, aio));
        nodes.push(overlay_node(level, access));
    }
    nodes
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Active,
    Shared,
}

fn file_node(level: usize, access: Access, aio: Aio) -> String {
    let access = match access {
        Access::Active => "read-only=off,discard=unmap",
        Access::Shared => "read-only=on,locking=off",
    };
    let (node, aio) = (node(level), aio.name());
    format!("driver=file,node-name={node}-file,filename=/dev/fdset/{level},{access},aio={aio},cache.no-flush=on")
}

fn base_node() -> String {
    let node = node(0);
    format!("driver=raw,node-name={node},file={node}-file,read-only=on,cache.no-flush=on")
}

fn overlay_node(level: usize, access: Access) -> String {
    let access = match access {
        Access::Active => "read-only=off,discard=unmap,detect-zeroes=unmap",
        Access::Shared => "read-only=on",
    };
    let (node, backing) = (node(level), node(level - 1));
    format!("driver=qcow2,node-name={node},file={node}-file,backing={backing},{access},cache.no-flush=on")
}
