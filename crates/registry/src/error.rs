//! What can go wrong with a registry. Display states the fact; the source states its own. No
//! variant holds a secret: addresses are kept without their query.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::digest::{Digest, InvalidDigest};
use crate::text::cleaned;
use crate::watch::Cancelled;

/// Why a request or a transfer failed.
#[derive(Debug, Error)]
pub enum Error {
    #[error("{text} is not the name of an image: {rule}")]
    Reference { text: String, rule: &'static str },
    #[error("{text} is not the name of an image: it names no registry")]
    NoRegistry { text: String },
    #[error(transparent)]
    Digest(#[from] InvalidDigest),
    #[error("{registry} does not accept these credentials{said}")]
    Unauthorized { registry: String, said: Said },
    #[error("{registry} does not allow this with these credentials{said}")]
    Denied { registry: String, said: Said },
    #[error("there is no {what}{said}")]
    NotFound { what: String, said: Said },
    #[error("{registry} asks for fewer requests, after {waited_s} s of waiting")]
    TooManyRequests { registry: String, waited_s: u64 },
    #[error("{what} has digest {found} instead of {expected}")]
    WrongDigest {
        what: String,
        expected: Digest,
        found: Digest,
    },
    #[error("{what} has {} {found} bytes instead of {expected}", if *.found > *.expected { "at least" } else { "only" })]
    WrongSize {
        what: String,
        expected: u64,
        found: u64,
    },
    #[error("the connection to {url} was lost {tries} times")]
    ConnectionLost {
        url: String,
        tries: u32,
        #[source]
        source: io::Error,
    },
    #[error("cannot connect securely to {url}")]
    Tls {
        url: String,
        #[source]
        source: io::Error,
    },
    #[error("a redirect from {url} is not followed: {rule}")]
    Redirects { url: String, rule: &'static str },
    #[error("{what} has more than {limit_bytes} bytes")]
    TooLarge { what: String, limit_bytes: u64 },
    #[error("unknown media type {media_type}")]
    UnknownMediaType { media_type: String },
    #[error("the image is for {}, not for {wanted}", available.join(", "))]
    NoPlatform {
        wanted: String,
        available: Vec<String>,
    },
    #[error("{what} is malformed: {rule}")]
    Document { what: &'static str, rule: String },
    #[error("{url} answers with status {status}{said}")]
    Registry {
        url: String,
        status: u16,
        said: Said,
    },
    #[error("{url} does not behave like a registry: {rule}")]
    Protocol { url: String, rule: &'static str },
    #[error("credential helper {helper} failed: {rule}")]
    Helper { helper: String, rule: String },
    #[error("{} cannot be used: {rule}", path.display())]
    File { path: PathBuf, rule: &'static str },
    #[error("the transfer was cancelled")]
    Cancelled,
    #[error("cannot {operation} {what}")]
    Io {
        operation: &'static str,
        what: String,
        #[source]
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn reference(text: &str, rule: &'static str) -> Self {
        Self::Reference {
            text: cleaned(text),
            rule,
        }
    }

    pub(crate) fn no_registry(text: &str) -> Self {
        Self::NoRegistry {
            text: cleaned(text),
        }
    }

    pub(crate) fn io(operation: &'static str, what: impl fmt::Display, source: io::Error) -> Self {
        Self::Io {
            operation,
            what: what.to_string(),
            source,
        }
    }
}

impl From<Cancelled> for Error {
    fn from(_: Cancelled) -> Self {
        Self::Cancelled
    }
}

/// A registry's own explanation of an error: short, without control characters, possibly empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said(String);

impl Said {
    /// Reads the first error of a registry's answer.
    pub(crate) fn read(body: &[u8]) -> Self {
        let first = serde_json::from_slice::<Complaints>(body)
            .ok()
            .and_then(|body| body.errors.into_iter().next());
        let Some(Complaint { code, message }) = first else {
            return Self::default();
        };
        let words = [code, message]
            .into_iter()
            .flatten()
            .filter(|word| !word.is_empty())
            .collect::<Vec<_>>();
        Self(cleaned(&words.join(": ")))
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            Ok(())
        } else {
            write!(f, " ({})", self.0)
        }
    }
}

#[derive(serde::Deserialize)]
struct Complaints {
    errors: Vec<Complaint>,
}

#[derive(serde::Deserialize)]
struct Complaint {
    code: Option<String>,
    message: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registrys_explanation_is_short_and_has_no_control_characters() {
        let said = Said::read(br#"{"errors":[{"code":"DENIED","message":"no\u001b[2J\nway"}]}"#);
        assert_eq!(said.to_string(), " (DENIED: no [2J way)");
        let long = format!(r#"{{"errors":[{{"message":"{}"}}]}}"#, "x".repeat(9000));
        assert!(Said::read(long.as_bytes()).to_string().len() < 400);
        assert_eq!(Said::read(b"<html>").to_string(), "");
    }
}
