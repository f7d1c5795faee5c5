//! What can go wrong between here and a registry. Each message states its own fact; the source is
//! printed by whoever prints the chain. No variant holds a secret: addresses are kept without their
//! query.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::{Digest, GivenUp, reference};

/// How much of a registry's own words is kept.
const SAID_MAX: usize = 300;

/// Why something did not come or go.
#[derive(Debug, Error)]
pub enum Error {
    #[error("{text} is not the name of an image: {rule}")]
    Reference { text: String, rule: &'static str },
    #[error("{text} is not a digest: {rule}")]
    Digest { text: String, rule: &'static str },
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
    #[error("there is no safe connection to {url}")]
    Tls {
        url: String,
        #[source]
        source: io::Error,
    },
    #[error("{url} leads elsewhere in a way that is not followed: {rule}")]
    Redirects { url: String, rule: &'static str },
    #[error("{what} has more than {limit_bytes} bytes")]
    TooLarge { what: String, limit_bytes: u64 },
    #[error("{media_type} is a kind of document that is not known here")]
    UnknownMediaType { media_type: String },
    #[error("this image is for {}, not for {wanted}", available.join(", "))]
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
    #[error("{url} does not speak as a registry does: {rule}")]
    Protocol { url: String, rule: &'static str },
    #[error("credential helper {helper} failed: {rule}")]
    Helper { helper: String, rule: String },
    #[error("{} cannot be used: {rule}", path.display())]
    File { path: PathBuf, rule: &'static str },
    #[error("the transfer was given up")]
    GivenUp,
    #[error("cannot {operation} {what}")]
    Io {
        operation: &'static str,
        what: String,
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// What the user could do, where that is known.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Reference { rule, .. } if *rule == reference::NO_HOST => {
                Some("begin with the registry's host, as in localhost:5000/team/app:1.2")
            }
            Self::Unauthorized { .. } => {
                Some("give a user name and a password, or log in with the tool that keeps them")
            }
            Self::Denied { .. } => Some("ask the owner of the repository for access"),
            Self::TooManyRequests { .. } => Some("try again later, or with credentials"),
            Self::Tls { .. } => {
                Some("give the registry's CA file, or say that it speaks plain http")
            }
            Self::WrongDigest { .. } | Self::WrongSize { .. } => {
                Some("the registry, or something on the way, is damaged")
            }
            Self::Registry { status: 413, .. } => {
                Some("something before the registry limits the size of requests")
            }
            _ => None,
        }
    }

    pub(crate) fn reference(text: &str, rule: &'static str) -> Self {
        Self::Reference {
            text: cleaned(text),
            rule,
        }
    }

    pub(crate) fn digest(text: &str, rule: &'static str) -> Self {
        Self::Digest {
            text: cleaned(text),
            rule,
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

impl From<GivenUp> for Error {
    fn from(_: GivenUp) -> Self {
        Self::GivenUp
    }
}

/// A registry's own words about an error: short, without control characters, possibly none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said(String);

impl Said {
    /// Reads the errors a registry sends with a status that is not a success.
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

/// Words from outside, fit for a terminal.
pub(crate) fn cleaned(text: &str) -> String {
    text.chars()
        .take(SAID_MAX)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_registry_are_short_and_harmless() {
        let said = Said::read(br#"{"errors":[{"code":"DENIED","message":"no\u001b[2J\nway"}]}"#);
        assert_eq!(said.to_string(), " (DENIED: no [2J way)");
        let long = format!(r#"{{"errors":[{{"message":"{}"}}]}}"#, "x".repeat(9000));
        assert!(Said::read(long.as_bytes()).to_string().len() < 400);
        assert_eq!(Said::read(b"<html>").to_string(), "");
    }
}
