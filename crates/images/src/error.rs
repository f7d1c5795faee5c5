//! What can go wrong while an image is found, made or moved. Display states the fact; the source
//! states its own.

use std::io;
use std::path::{Path, PathBuf};

use sandtree_registry as registry;
use sandtree_rootfs as rootfs;
use sandtree_store::{self as store, Named};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot make image {name}")]
    Make {
        name: String,
        #[source]
        source: Box<Error>,
    },
    #[error("cannot {verb} {reference}")]
    Transfer {
        verb: &'static str,
        reference: String,
        #[source]
        source: Box<Error>,
    },
    #[error("there is no image {name}")]
    NoImage { name: String },
    #[error("there is neither an image nor a snapshot {reference}")]
    NoImageOrSnapshot { reference: String },
    #[error("{name} is not an image, but {found}")]
    NotAnImage { name: String, found: Named },
    #[error("the name {name} is taken by {by}")]
    NameTaken { name: String, by: Named },
    #[error("the store cannot {operation}")]
    Store {
        operation: &'static str,
        #[source]
        source: store::Error,
    },
    #[error("the store refused the image")]
    Publish(#[from] store::Error),
    #[error("{program} is missing")]
    ToolMissing {
        program: &'static str,
        /// Debian's package that has it; None if only the system itself brings it.
        package: Option<&'static str>,
    },
    #[error("{program} failed ({status}): {stderr}")]
    ToolFailed {
        program: &'static str,
        status: std::process::ExitStatus,
        stderr: String,
    },
    #[error("apt knows no package {package}")]
    UnknownPackage { package: String },
    #[error("apt has no source of Debian's own")]
    NoDebianSources,
    #[error("packages could not be downloaded: {stderr}")]
    Download { stderr: String },
    #[error("package {package} holds no {what}")]
    Incomplete { package: String, what: &'static str },
    #[error("{what} is malformed: {why}")]
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
    #[error("the work was cancelled")]
    Cancelled,
    #[error("the recipe is refused: {what}")]
    Recipe { what: String },
    #[error("{} is neither a root file system nor a disk nor an image: {why}", path.display())]
    Unknown { path: PathBuf, why: String },
    #[error("layer {digest} is not what the image's configuration says")]
    WrongLayer { digest: String },
    #[error("the image is refused: {what}")]
    Config { what: String },
    #[error("the Quicksand save is refused: {what}")]
    Save { what: String },
    #[error("the Quicksand save needs its base image {name}, which is not in the store")]
    NoSaveBase { name: String },
    #[error("the files cannot become a root file system")]
    Rootfs(#[source] Box<rootfs::Error>),
    #[error("the disk cannot become a root file system")]
    Disk(#[source] Box<rootfs::DiskError>),
    #[error(transparent)]
    Registry(Box<registry::Error>),
}

impl From<registry::Error> for Error {
    fn from(error: registry::Error) -> Self {
        match error {
            registry::Error::Cancelled => Self::Cancelled,
            error => Self::Registry(Box::new(error)),
        }
    }
}

impl From<rootfs::Error> for Error {
    fn from(error: rootfs::Error) -> Self {
        match error {
            rootfs::Error::GivenUp => Self::Cancelled,
            error => Self::Rootfs(Box::new(error)),
        }
    }
}

impl From<rootfs::DiskError> for Error {
    fn from(error: rootfs::DiskError) -> Self {
        match error {
            rootfs::DiskError::GivenUp => Self::Cancelled,
            error => Self::Disk(Box::new(error)),
        }
    }
}

impl Error {
    /// The same failure, as that of making this image.
    pub fn making(self, name: impl ToString) -> Self {
        Self::Make {
            name: name.to_string(),
            source: Box::new(self),
        }
    }

    /// The same failure, as that of a transfer to or from a registry.
    pub(crate) fn transferring(self, verb: &'static str, reference: impl ToString) -> Self {
        Self::Transfer {
            verb,
            reference: reference.to_string(),
            source: Box::new(self),
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

pub(crate) fn store_error(operation: &'static str) -> impl FnOnce(store::Error) -> Error {
    move |source| Error::Store { operation, source }
}
