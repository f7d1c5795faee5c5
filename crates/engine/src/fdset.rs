//! Descriptors handed to a running QEMU, which opens them by name: `/dev/fdset/N`.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::qmp::{AddFd, Qmp, QueryFdsets, RemoveFd};

/// Numbers of fd sets, never used twice in the life of one machine.
#[derive(Debug)]
pub(crate) struct FdSets {
    qmp: Qmp,
    next: AtomicU64,
}

impl FdSets {
    /// Numbers below `next` came with the arguments.
    pub(crate) fn new(qmp: Qmp, next: u64) -> Self {
        Self {
            qmp,
            next: AtomicU64::new(next),
        }
    }

    /// Hands a descriptor over and returns the number of its set.
    pub(crate) async fn add(&self, fd: OwnedFd) -> Result<u64, Error> {
        let fdset_id = self.number();
        self.qmp.run_with_fd(AddFd { fdset_id }, fd).await?;
        Ok(fdset_id)
    }

    /// A number that nothing else of this machine has.
    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) async fn remove(&self, fdset_id: u64) -> Result<(), Error> {
        self.qmp
            .run(RemoveFd { fdset_id, fd: None })
            .await
            .map(drop)
    }

    /// Adds another descriptor of the same file to a set; `reopen` makes QEMU open the file by it.
    /// Then it is the only one of the set; or it goes again, if that fails.
    pub(crate) async fn exchange(
        &self,
        fdset_id: u64,
        fd: OwnedFd,
        reopen: impl Future<Output = Result<(), Error>>,
    ) -> Result<(), Error> {
        let added = self.qmp.run_with_fd(AddFd { fdset_id }, fd).await?.fd;
        let reopened = reopen.await;
        let is_unused = |fd: &i64| (*fd == added) == reopened.is_err();
        // QEMU copies what comes with its arguments, so only it knows the numbers.
        let sets = self.qmp.run(QueryFdsets {}).await?;
        let of_set = sets
            .iter()
            .filter(|set| set.fdset_id == fdset_id)
            .flat_map(|set| &set.fds);
        for fd in of_set.map(|fd| fd.fd).filter(is_unused) {
            self.qmp
                .run(RemoveFd {
                    fdset_id,
                    fd: Some(fd),
                })
                .await?;
        }
        reopened
    }

    /// Removes what has served. Whether QEMU keeps it does not change the outcome of what it was
    /// for.
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

/// A second description of the same open file, with its own offset and of one kind of access: QEMU
/// takes a descriptor of an fd set only for the access it was opened with.
pub(crate) fn reopen(file: &impl AsRawFd, options: &OpenOptions) -> Result<File, Error> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    options.open(&path).map_err(Error::io("open again", &path))
}
