//! What can go wrong. Each message states its own fact; the source is printed by whoever prints the
//! chain.

use std::io;

use thiserror::Error as ThisError;

use crate::{Kind, Path};

#[derive(Debug, ThisError)]
pub enum Error {
    #[error("cannot read the disk at byte {offset}")]
    Io {
        offset: u64,
        #[source]
        source: io::Error,
    },
    #[error("there is no ext4 file system on the disk")]
    NotExt4,
    #[error("the file system uses {0}, which this program cannot read")]
    Unsupported(String),
    #[error("the file system is damaged: {0}")]
    Damaged(String),
    #[error("{what} is larger than {limit_bytes} bytes")]
    TooLarge { what: String, limit_bytes: u64 },
    #[error("there is no {0}")]
    NotFound(Path),
    #[error("{path} is a {kind}, not a {wanted}")]
    OtherKind {
        path: Path,
        kind: Kind,
        wanted: Kind,
    },
}

impl Error {
    pub(crate) fn damaged(what: impl Into<String>) -> Self {
        Self::Damaged(what.into())
    }
}

/// `Damaged` unless it is fine.
pub(crate) fn require(fine: bool, what: impl FnOnce() -> String) -> Result<(), Error> {
    if fine {
        Ok(())
    } else {
        Err(Error::Damaged(what()))
    }
}
