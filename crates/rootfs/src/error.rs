//! Errors. Each message states its own fact; the caller prints the chain of sources.

use std::io;
use std::path::{Path, PathBuf};

use sandtree_disk::ext4::write;
use thiserror::Error as ThisError;

/// Paths inside the file system are shown with everything but printable ASCII escaped.
#[derive(Debug, ThisError)]
pub enum Error {
    #[error("cannot {operation} {}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The tree cannot be written as ext4.
    #[error(transparent)]
    Write(write::Error),
    #[error("cannot read the archive as {format}")]
    Input {
        /// Its compression, recognised by its first bytes.
        format: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the archive is damaged at byte {offset}: {problem}")]
    Archive { offset: u64, problem: &'static str },
    /// A member of an archive, a file of a directory, or a path that was asked for.
    #[error("{name} is refused: {rule}")]
    Refused { name: String, rule: &'static str },
    #[error("{name} exceeds the limit of {allowed} {limit}")]
    Limit {
        name: String,
        limit: &'static str,
        allowed: u64,
    },
    #[error("{} changed while it was read", path.display())]
    Changed { path: PathBuf },
    #[error("cannot read the content of {name}")]
    Bytes {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("an earlier addition failed, so the root file system cannot be completed")]
    FailedBefore,
    #[error("stopped before everything was read")]
    GivenUp,
}

impl From<write::Error> for Error {
    fn from(error: write::Error) -> Self {
        match error {
            write::Error::Io {
                operation,
                path,
                source,
            } => Self::Io {
                operation,
                path,
                source,
            },
            write::Error::TooMuchWritten { limit_bytes } => Self::Limit {
                name: "the image".to_owned(),
                limit: "bytes written to it",
                allowed: limit_bytes,
            },
            write::Error::TooManyExtents { limit } => Self::Limit {
                name: "a file".to_owned(),
                limit: "extents",
                allowed: limit,
            },
            error => Self::Write(error),
        }
    }
}

/// Makes an [`Error::Io`] of an error of the system.
pub(crate) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io {
        operation,
        path,
        source,
    }
}
