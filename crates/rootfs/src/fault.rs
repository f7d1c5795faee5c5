//! A refusal without the name of what is refused, which only the caller knows.

use sandtree_disk::ext4::write;

use crate::error::Error;

/// How many bytes of a name are shown.
const SHOWN_BYTES: usize = 512;

/// An error to which the caller adds the name.
#[derive(Debug)]
pub(crate) enum Fault {
    Refused(&'static str),
    Limit { limit: &'static str, allowed: u64 },
    Other(Error),
}

impl Fault {
    pub fn of(self, name: &[u8]) -> Error {
        match self {
            Self::Refused(rule) => Error::Refused {
                name: shown(name),
                rule,
            },
            Self::Limit { limit, allowed } => Error::Limit {
                name: shown(name),
                limit,
                allowed,
            },
            Self::Other(error) => error,
        }
    }
}

impl From<&'static str> for Fault {
    fn from(rule: &'static str) -> Self {
        Self::Refused(rule)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl From<write::Error> for Fault {
    fn from(error: write::Error) -> Self {
        Self::Other(error.into())
    }
}

/// A name as text on one line, with unprintable bytes escaped.
pub(crate) fn shown(name: &[u8]) -> String {
    match name.get(..SHOWN_BYTES) {
        Some(start) => format!("{}…", start.escape_ascii()),
        None => name.escape_ascii().to_string(),
    }
}

pub(crate) fn require(fine: bool, rule: &'static str) -> Result<(), Fault> {
    if fine {
        Ok(())
    } else {
        Err(Fault::Refused(rule))
    }
}
