//! Errors of reading. Each message states its own fact; the caller prints the chain of sources.

use std::io;

use thiserror::Error as ThisError;

use super::{Kind, Path};

#[derive(Debug, ThisError)]
pub enum Error {
    #[error("cannot read the disk at byte {offset}")]
    Io {
        offset: u64,
        #[source]
        source: io::Error,
    },
    #[error("the disk has no ext4 file system")]
    NotExt4,
    #[error("the file system uses {0}, which this program cannot read")]
    Unsupported(String),
    #[error("the file system is damaged: {0}")]
    Damaged(String),
    #[error("{what} is larger than {limit_bytes} bytes")]
    TooLarge { what: String, limit_bytes: u64 },
    #[error("{0} does not exist")]
    NotFound(Path),
    #[error("{path} is a {kind}, not a {wanted}")]
    OtherKind {
        path: Path,
        kind: Kind,
        wanted: Kind,
    },
}

impl Error {
    pub(super) fn damaged(what: impl Into<String>) -> Self {
        Self::Damaged(what.into())
    }
}

/// Returns [`Error::Damaged`] unless the condition holds.
pub(super) fn require(fine: bool, what: impl FnOnce() -> String) -> Result<(), Error> {
    if fine {
        Ok(())
    } else {
        Err(Error::Damaged(what()))
    }
}
