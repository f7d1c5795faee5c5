//! Building images: from the host's own packages to something a machine boots.
//!
//! ```text
//! apt ──► linux-image .deb ──► kernel (vmlinux) ─┬─► kernel bundle ──► initramfs (with an agent)
//!                          └─► modules, in order ┘          │
//!     ──► busybox .deb ──► files of the root ──► ext4 ──────┴─► image `tiny`
//! ```
//!
//! Always: needs no root and gives the same digests as with it; equal packages give equal digests on every host.
//! Everything is made in the store's staging and published by the store.
//!
//! When it fails, or is given up: nothing is left. When its process dies: staging, which the store removes when next opened.

mod apt;
mod elf;
mod ext4;
mod initramfs;
mod kernel;
mod modules;
mod tiny;
mod tool;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sandtree_store::{Digest, KernelBundle, Name, ParseNameError, Store};
use thiserror::Error;

/// A name that now points at an image.
#[derive(Debug, Clone)]
pub struct ImageRef {
    pub name: Name,
    pub digest: Digest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Asking apt which packages are needed.
    Resolve,
    Download,
    Unpack,
    Kernel,
    Rootfs,
    Publish,
}

impl Stage {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "resolving packages",
            Self::Download => "downloading packages",
            Self::Unpack => "unpacking",
            Self::Kernel => "preparing the kernel",
            Self::Rootfs => "making the root file system",
            Self::Publish => "publishing",
        }
    }
}

/// How far a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub stage: Stage,
    pub done_bytes: u64,
    /// Where it is known.
    pub total_bytes: Option<u64>,
}

impl Progress {
    fn begin(stage: Stage) -> Self {
        Self { stage, done_bytes: 0, total_bytes: None }
    }
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("{program} is missing")]
    ToolMissing { program: &'static str, hint: &'static str },
    #[error("{program} failed ({status}): {stderr}")]
    ToolFailed { program: &'static str, status: std::process::ExitStatus, stderr: String },
    #[error("apt knows no package {package}")]
    UnknownPackage { package: String },
    #[error("packages could not be downloaded: {stderr}")]
    Download { stderr: String },
    #[error("package {package} holds no {what}")]
    Incomplete { package: String, what: &'static str },
    #[error("{what} is not as expected: {why}")]
    Malformed { what: String, why: &'static str },
    #[error("kernel module {module}, needed by {needed_by}, is not in the kernel package")]
    ModuleMissing { module: String, needed_by: String },
    #[error("cannot {operation} {}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("its building was given up")]
    GivenUp,
    #[error("the store refused the image")]
    Store(#[from] sandtree_store::Error),
    #[error(transparent)]
    Name(#[from] ParseNameError),
}

impl Error {
    /// What the user can do about it, where we know.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::ToolMissing { hint, .. } => Some(hint),
            Self::UnknownPackage { .. } => Some("run `apt-get update`; Debian 12 and later have the package"),
            Self::Download { .. } => Some("check the network and apt's sources, and run `apt-get update`"),
            _ => None,
        }
    }
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { operation, path, source }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(io_error("read", path))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    std::fs::write(path, bytes).map_err(io_error("write", path))
}

fn create_dir(path: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(path).map_err(io_error("create directory", path))
}

/// Told how far a build is; says whether it goes on.
type Watch<'a> = dyn FnMut(Progress) -> Result<(), Error> + 'a;

/// Counts up when the built-in image is made differently, so that a store made by an older program gets a new one.
pub const RECIPE: u32 = 2;

/// Builds the image `tiny` and points its name at it. Blocks for seconds, or until it is given up.
pub fn build_tiny(store: &Store, progress: &mut dyn FnMut(Progress), given_up: &AtomicBool) -> Result<ImageRef, Error> {
    tiny::build(store, &mut |reached| {
        progress(reached);
        if given_up.load(Ordering::Relaxed) { Err(Error::GivenUp) } else { Ok(()) }
    })
}

/// The initial file system for a kernel and an agent: made once per pair, then found.
pub fn initramfs(store: &Store, agent: &[u8], kernel: &KernelBundle) -> Result<PathBuf, Error> {
    initramfs::find_or_make(store, agent, kernel)
}
