//! Long work on images: its inputs, its progress, and its cancellation.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use sandtree_store::Store;

use crate::error::{Error, Result};
use crate::tool::HostTools;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Asking apt which packages are needed.
    Resolve,
    Download,
    /// The scripts of the packages run.
    Install,
    Unpack,
    Kernel,
    /// From a registry.
    Fetch,
    /// For a registry.
    Pack,
    /// To a registry.
    Send,
    Rootfs,
    Publish,
}

impl Stage {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "resolving packages",
            Self::Download => "downloading packages",
            Self::Install => "installing packages",
            Self::Unpack => "unpacking",
            Self::Kernel => "preparing the kernel",
            Self::Fetch => "fetching",
            Self::Pack => "packing",
            Self::Send => "sending",
            Self::Rootfs => "making the root file system",
            Self::Publish => "publishing",
        }
    }
}

/// The progress of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub stage: Stage,
    pub done_bytes: u64,
    /// `None`: the total is not known.
    pub total_bytes: Option<u64>,
}

/// Work on the images of a store. It blocks its thread; another thread cancels it.
pub struct Job<'a> {
    pub store: &'a Store,
    pub tools: HostTools<'a>,
    pub progress: &'a mut dyn FnMut(Progress),
    /// Set by the caller when the result is no longer wanted. The work checks it at every report.
    pub cancelled: &'a AtomicBool,
}

impl fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("tools", &self.tools)
            .field("cancelled", &self.cancelled)
            .finish_non_exhaustive()
    }
}

impl Job<'_> {
    /// Reports a stage of which no byte is done yet. Fails if the work is cancelled.
    pub(crate) fn begin(&mut self, stage: Stage) -> Result<()> {
        self.report(Progress {
            stage,
            done_bytes: 0,
            total_bytes: None,
        })
    }

    /// Reports the progress. Fails if the work is cancelled.
    pub(crate) fn report(&mut self, progress: Progress) -> Result<()> {
        (self.progress)(progress);
        self.check()
    }

    /// Fails if the work is cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
        Ok(())
    }
}
