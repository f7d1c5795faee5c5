//! Making images: from packages, archives, disks and registries to something a machine boots.
//!
//! ```text
//! apt ──► linux-image .deb ──► kernel (vmlinux) and modules ──► kernel bundle ──► initramfs (with an agent)
//!     ──► busybox .deb, or a whole Debian ──┐                       │
//! tar, directory, OCI layers ───────────────┴──► ext4 ──────────────┴──► image
//! qcow2, raw ──► the partition that is the root ──┘
//! ```
//!
//! Always: needs no root and gives the same digests as with it; equal input gives equal digests on
//! every host. Everything is made in the store's staging and published by the store.
//!
//! When it fails, or is given up: nothing is left. When its process dies: staging, which the store
//! removes when next opened.

mod apt;
mod bundle;
mod debian;
mod elf;
mod initramfs;
mod kernel;
mod making;
mod modules;
mod oci;
mod recipe;
mod source;
mod tiny;
mod tool;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sandtree_store::{Digest, Image, Init, KernelBundle, Name, Store};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::note;
pub use bundle::{KernelChoice, OwnKernel};
pub(crate) use making::writable_bytes;
pub(crate) use oci::{ARCHITECTURE, Described, OS, image_of as image_of_layers};
pub use recipe::{CopyFile, Kernel, KernelKind, Recipe, Run, RunStep, Size};
pub(crate) use recipe::{is_path, parse_mode};

/// Where commands are looked for in images that do not say it.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The date of what we put into images ourselves, in seconds.
const EPOCH: i64 = 1_700_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Asking apt which packages are needed.
    Resolve,
    Download,
    /// Their own scripts run.
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

/// How far a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub stage: Stage,
    pub done_bytes: u64,
    /// Where it is known.
    pub total_bytes: Option<u64>,
}

impl Progress {
    pub(crate) fn begin(stage: Stage) -> Self {
        Self {
            stage,
            done_bytes: 0,
            total_bytes: None,
        }
    }
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("{program} is missing")]
    ToolMissing {
        program: &'static str,
        hint: &'static str,
    },
    #[error("{program} failed ({status}): {stderr}")]
    ToolFailed {
        program: &'static str,
        status: std::process::ExitStatus,
        stderr: String,
    },
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
    #[error("apt has no source of Debian's own")]
    NoDebianSources,
    #[error("the recipe is refused: {what}")]
    Recipe { what: String },
    #[error("{} is neither a root file system nor a disk nor an image: {why}", path.display())]
    Unknown { path: PathBuf, why: String },
    #[error("layer {digest} is not what the image's configuration says")]
    WrongLayer { digest: String },
    #[error("the image is refused: {what}")]
    Config { what: String },
    #[error("the files cannot become a root file system")]
    Rootfs(#[source] Box<sandtree_rootfs::Error>),
    #[error("the disk cannot become a root file system")]
    Disk(#[source] Box<sandtree_rootfs::DiskError>),
    #[error(transparent)]
    Registry(Box<sandtree_registry::Error>),
}

impl From<sandtree_registry::Error> for Error {
    fn from(error: sandtree_registry::Error) -> Self {
        match error {
            sandtree_registry::Error::Cancelled => Self::GivenUp,
            error => Self::Registry(Box::new(error)),
        }
    }
}

impl From<sandtree_rootfs::Error> for Error {
    fn from(error: sandtree_rootfs::Error) -> Self {
        match error {
            sandtree_rootfs::Error::GivenUp => Self::GivenUp,
            error => Self::Rootfs(Box::new(error)),
        }
    }
}

impl From<sandtree_rootfs::DiskError> for Error {
    fn from(error: sandtree_rootfs::DiskError) -> Self {
        match error {
            sandtree_rootfs::DiskError::GivenUp => Self::GivenUp,
            error => Self::Disk(Box::new(error)),
        }
    }
}

impl Error {
    /// What the user can do about it, where we know.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::ToolMissing { hint, .. } => Some(hint),
            Self::UnknownPackage { .. } => {
                Some("run `apt-get update`; Debian 12 and later have the package")
            }
            Self::NoDebianSources => Some(
                "add Debian's archive to apt's sources and run `apt-get update`, or import another root file system",
            ),
            Self::Unknown { .. } => Some(
                "give a tar archive, a directory, an OCI layout or archive, a qcow2 or a raw disk with an ext4 root",
            ),
            Self::Download { .. } => {
                Some("check the network and apt's sources, and run `apt-get update`")
            }
            Self::Registry(source) => source.hint(),
            _ => None,
        }
    }
}

pub(crate) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io {
        operation,
        path,
        source,
    }
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
pub(crate) type Watch<'a> = dyn FnMut(Progress) -> Result<(), Error> + 'a;

/// Images that are made when they are first asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuiltIn {
    Tiny,
    Debian,
}

impl BuiltIn {
    pub fn of(name: &Name) -> Option<Self> {
        match name.as_str() {
            "tiny" => Some(Self::Tiny),
            "debian" => Some(Self::Debian),
            _ => None,
        }
    }

    /// Counts up when it is made differently, so that a store made by an older program gets a new
    /// one.
    pub fn recipe(self) -> u32 {
        match self {
            Self::Tiny => 3,
            Self::Debian => 1,
        }
    }
}

/// How something is made an image that is none of ours.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportSpec {
    pub kernel: KernelChoice,
    /// `None`: the agent.
    pub init: Option<Init>,
    /// Of the disk that sandboxes get; `None`: with at least 4 GiB of room.
    pub disk_bytes: Option<u64>,
}

/// Work that can be given up, and tells how far it is.
pub(crate) struct Work<'a> {
    pub store: &'a Store,
    pub progress: &'a mut dyn FnMut(Progress),
    pub given_up: &'a AtomicBool,
}

impl Work<'_> {
    pub fn watched<T>(
        self,
        work: impl FnOnce(&Store, &mut Watch<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Self {
            store,
            progress,
            given_up,
        } = self;
        work(store, &mut |reached| {
            progress(reached);
            if given_up.load(Ordering::Relaxed) {
                Err(Error::GivenUp)
            } else {
                Ok(())
            }
        })
    }

    /// Makes one of our own images. Blocks for seconds, or until it is given up.
    pub fn build(self, image: BuiltIn) -> Result<Image, Error> {
        self.watched(|store, watch| match image {
            BuiltIn::Tiny => tiny::build(store, watch),
            BuiltIn::Debian => debian::build(store, &[], &KernelChoice::Cloud, watch),
        })
    }

    /// Debian with more packages than it has by itself.
    pub fn debian(self, packages: &[String]) -> Result<Image, Error> {
        self.watched(|store, watch| debian::build(store, packages, &KernelChoice::Cloud, watch))
    }

    /// Makes what lies at a path an image.
    pub fn import(self, path: &Path, spec: &ImportSpec) -> Result<Image, Error> {
        self.watched(|store, watch| source::import(store, path, spec, watch))
    }

    pub fn kernel(self, choice: &KernelChoice) -> Result<KernelBundle, Error> {
        self.watched(|store, watch| bundle::find_or_make(store, choice, watch))
    }
}

/// Whether an image is made when it is first asked for.
pub fn is_built_in(name: &str) -> bool {
    name.parse().is_ok_and(|name| BuiltIn::of(&name).is_some())
}

/// Bytes as people write digests.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What Debian with these packages is noted under.
pub(crate) fn debian_key(packages: &[String]) -> Name {
    let wanted = debian::wanted(packages).join(" ");
    let key = Digest::of(format!("{} {wanted}", BuiltIn::Debian.recipe()).as_bytes());
    note::key("debian", &key)
}

/// The initial file system for a kernel and an agent: made once per pair, then found.
pub fn initramfs(store: &Store, agent: &[u8], kernel: &KernelBundle) -> Result<PathBuf, Error> {
    initramfs::find_or_make(store, agent, kernel)
}
