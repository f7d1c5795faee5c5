//! Descriptors handed to a running QEMU, which opens them by name: `/dev/fdset/N`.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::qmp::{AddFd, Qmp, RemoveFd};

/// Numbers of fd sets, never used twice in the life of one machine.
#[derive(Debug)]
pub(crate) struct FdSets {
    qmp: Qmp,
    next: AtomicU64,
}

impl FdSets {
    /// Numbers below `next` came with the arguments.
    pub(crate) fn new(qmp: Qmp, next: u64) -> Self {
        Self { qmp, next: AtomicU64::new(next) }
    }

    /// Hands a descriptor over and returns its number.
    pub(crate) async fn add(&self, fd: OwnedFd) -> Result<u64, Error> {
        let fdset_id = self.next.fetch_add(1, Ordering::Relaxed);
        self.qmp.run_with_fd(AddFd { fdset_id }, fd).await?;
        Ok(fdset_id)
    }

    pub(crate) async fn remove(&self, fdset_id: u64) -> Result<(), Error> {
        self.qmp.run(RemoveFd { fdset_id }).await.map(drop)
    }

    /// Removes what has served. Whether QEMU keeps it does not change the outcome of what it was for.
    pub(crate) async fn release(&self, fdset_id: u64) {
        if let Err(error) = self.remove(fdset_id).await {
            tracing::warn!(fdset_id, %error, "QEMU keeps a descriptor it does not need");
        }
    }
}

/// The name QEMU opens a descriptor by.
pub(crate) fn path(fdset_id: u64) -> String {
    format!("/dev/fdset/{fdset_id}")
}

/// A second description of the same open file, with its own offset and of one kind of access: QEMU takes a descriptor
/// of an fd set only for the access it was opened with.
pub(crate) fn reopen(file: &impl AsRawFd, options: &OpenOptions) -> Result<File, Error> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    options.open(&path).map_err(Error::io("open again", &path))
}
