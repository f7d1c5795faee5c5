//! What can go wrong. Each message states its own fact; the source is printed by whoever prints the
//! chain.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error as ThisError;

/// Paths inside the file system are told with everything but printable ASCII escaped.
#[derive(Debug, ThisError)]
pub enum Error {
    #[error("cannot {operation} {}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{what} would have {bytes} bytes, more than {limit_bytes}")]
    TooLarge {
        what: &'static str,
        bytes: u64,
        limit_bytes: u64,
    },
    #[error("a file of {announced_bytes} bytes got more of them")]
    LongerThanAnnounced { announced_bytes: u64 },
    #[error(
        "{path} has extended attributes of {bytes} bytes, of which {limit_bytes} fit into an inode and a block"
    )]
    XattrsTooLarge {
        path: String,
        bytes: u64,
        limit_bytes: u64,
    },
    #[error("{path} has the extended attribute {name}, which ext4 cannot hold")]
    BadXattr { path: String, name: String },
    #[error("{path} is no name for a file")]
    BadName { path: String },
    #[error(
        "{path} is a symbolic link with a target of {bytes} bytes, which is empty, too long or has a zero byte"
    )]
    BadTarget { path: String, bytes: u64 },
    #[error("{path} is a device with the numbers {major}:{minor}, which are too large")]
    BadDevice {
        path: String,
        major: u32,
        minor: u32,
    },
    #[error("{path} has {names} names, more than {limit}")]
    TooManyNames {
        path: String,
        names: u32,
        limit: u32,
    },
    #[error("cannot read the archive as {format}")]
    Input {
        /// How it is packed, judged by its first bytes.
        format: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the archive is damaged at byte {offset}: {problem}")]
    Archive { offset: u64, problem: &'static str },
    /// A member of an archive, a file of a directory, or a path that was asked for.
    #[error("{name} is refused: {rule}")]
    Refused { name: String, rule: &'static str },
    #[error("{name} goes beyond the limit of {allowed} {limit}")]
    Limit {
        name: String,
        limit: &'static str,
        allowed: u64,
    },
    #[error("{} changed while it was read", path.display())]
    Changed { path: PathBuf },
    #[error("cannot read the bytes that {name} is to have")]
    Bytes {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("something before could not be added, and nothing can be made of the rest")]
    FailedBefore,
    #[error("given up before all was read")]
    GivenUp,
}

/// Makes an [`Error::Io`] of what the system said.
pub(crate) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io {
        operation,
        path,
        source,
    }
}
