//! What can go wrong between a caller and its server. Errors of files are answers to the guest, and
//! appear in [`Status`](crate::Status).

use std::io;
use std::path::PathBuf;

use sandtree_proto::mount::MountId;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum Error {
    /// openat2(2) is what keeps a guest beneath its directory: without it, nothing is served.
    #[error("the kernel has no openat2(2): mounts need Linux 5.6 or newer")]
    Kernel,
    #[error("cannot look into {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start the thread that serves mounts")]
    Thread(#[source] io::Error),
    #[error("mount {} is served already", mount.0)]
    Exists { mount: MountId },
    #[error("mount {} is not served", mount.0)]
    Unknown { mount: MountId },
    /// The other end of the port is gone: QEMU has ended.
    #[error("the port of mounts is closed")]
    Closed,
    #[error("the guest broke the protocol of mounts too often and is not served any longer")]
    Refused,
    /// [`go`](crate::Server::go) came before the guest said that it holds.
    #[error("the guest was released before it held")]
    Released,
    #[error("the server of mounts has ended")]
    Ended,
}

/// How a call to the server ended.
pub type Outcome = Result<(), Error>;

/// A caller that waits. It gets an outcome exactly once: the one that it is given, or
/// [`Error::Ended`] when the server drops it.
pub(crate) struct Completion(Option<Box<dyn FnOnce(Outcome) + Send>>);

impl Completion {
    pub(crate) fn new(done: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Self(Some(Box::new(done)))
    }

    pub(crate) fn complete(mut self, outcome: Outcome) {
        if let Some(done) = self.0.take() {
            done(outcome);
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(Error::Ended));
        }
    }
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").finish_non_exhaustive()
    }
}
