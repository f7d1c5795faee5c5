//! Errors of writing. Each message states its own fact; the caller prints the chain of sources.

use std::io;
use std::path::{Path, PathBuf};

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
    #[error("{what} would have {bytes} bytes; the limit is {limit_bytes}")]
    TooLarge {
        what: &'static str,
        bytes: u64,
        limit_bytes: u64,
    },
    #[error("more than {limit_bytes} bytes would be written to the image")]
    TooMuchWritten { limit_bytes: u64 },
    #[error("a file would need more than {limit} extents")]
    TooManyExtents { limit: u64 },
    #[error("a file received more than its announced {announced_bytes} bytes")]
    LongerThanAnnounced { announced_bytes: u64 },
    #[error(
        "{path} has {bytes} bytes of extended attributes; an inode and a block hold {limit_bytes}"
    )]
    XattrsTooLarge {
        path: String,
        bytes: u64,
        limit_bytes: u64,
    },
    #[error("{path} has the extended attribute {name}, which ext4 cannot store")]
    BadXattr { path: String, name: String },
    #[error("{path} is not a valid file name")]
    BadName { path: String },
    #[error(
        "{path} is a symbolic link with an invalid target of {bytes} bytes: it is empty, too long or contains a zero byte"
    )]
    BadTarget { path: String, bytes: u64 },
    #[error("{path} is a device with the numbers {major}:{minor}, which are too large")]
    BadDevice {
        path: String,
        major: u32,
        minor: u32,
    },
    #[error("{path} has {names} names; the limit is {limit}")]
    TooManyNames {
        path: String,
        names: u32,
        limit: u32,
    },
}

/// Makes an [`Error::Io`] of an error of the system.
pub(super) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io {
        operation,
        path,
        source,
    }
}
