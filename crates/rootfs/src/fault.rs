//! A refusal before it is known whose it is.

use crate::Error;

/// How much of a name is shown.
const SHOWN_BYTES: usize = 512;

/// What is wrong with something whose name only the caller knows.
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

/// Rules that are broken are told as text.
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

/// A name as text on one line, from which its bytes can be told.
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
