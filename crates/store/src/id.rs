//! Identities: random ones for sandboxes, layers and states, digests for everything that is named
//! by its content.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

/// A text that is not the identity it should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not {expected}")]
pub struct ParseIdError {
    text: String,
    expected: &'static str,
}

/// Names one sandbox, for ever: 16 random hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(String);

/// Names one layer, for ever: 16 hexadecimal digits, random or of its digest. Every link to it has
/// this name, in whatever sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayerId(String);

/// Names one state, for ever: 16 random hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StateId(String);

/// Names one batch of sandboxes: 16 random hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BatchId(String);

/// SHA-256 of some content.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(hex(&Sha256::digest(bytes)))
    }

    pub(crate) fn finish(hasher: Sha256) -> Self {
        Self(hex(&hasher.finalize()))
    }
}

/// The beginning of a digest distinguishes the layers of one snapshot; its manifest guarantees
/// that.
fn short(digest: &Digest) -> String {
    digest.0[..16].to_owned()
}

impl LayerId {
    /// What a layer is called in sandboxes made from a snapshot.
    pub fn of(digest: &Digest) -> Self {
        Self(short(digest))
    }
}

impl BatchId {
    /// The name of its staging directory.
    pub(crate) fn as_staged(&self) -> SandboxId {
        SandboxId(self.0.clone())
    }

    /// The batch that a staging directory may be of.
    pub(crate) fn of_staged(id: &SandboxId) -> Self {
        Self(id.0.clone())
    }
}

impl StateId {
    /// What a snapshot is called as a state of a sandbox made from it.
    pub(crate) fn of(digest: &Digest) -> Self {
        Self(short(digest))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check_hex(text: &str, digits: usize, expected: &'static str) -> Result<(), ParseIdError> {
    let valid =
        text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if valid {
        Ok(())
    } else {
        Err(ParseIdError {
            text: text.to_owned(),
            expected,
        })
    }
}

macro_rules! hex_id {
    ($id:ident, $digits:literal, $expected:literal) => {
        impl $id {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $id {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                check_hex(text, $digits, $expected)?;
                Ok(Self(text.to_owned()))
            }
        }

        impl TryFrom<String> for $id {
            type Error = ParseIdError;

            fn try_from(text: String) -> Result<Self, ParseIdError> {
                text.parse()
            }
        }

        impl From<$id> for String {
            fn from(id: $id) -> Self {
                id.0
            }
        }

        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

macro_rules! random_id {
    ($id:ident, $expected:literal) => {
        hex_id!($id, 16, $expected);

        impl $id {
            pub(crate) fn from_bytes(bytes: [u8; 8]) -> Self {
                Self(hex(&bytes))
            }
        }
    };
}

random_id!(SandboxId, "a sandbox id (16 hexadecimal digits)");
random_id!(BatchId, "a batch id (16 hexadecimal digits)");
random_id!(LayerId, "a layer id (16 hexadecimal digits)");
random_id!(StateId, "a state id (16 hexadecimal digits)");
hex_id!(Digest, 64, "a SHA-256 digest (64 hexadecimal digits)");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_sha256() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").as_str(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
    }

    #[test]
    fn ids_differ_and_parse_back() {
        let a = SandboxId::random().unwrap();
        let b = SandboxId::random().unwrap();
        assert_ne!(a, b);
        assert_eq!(a.to_string().parse::<SandboxId>().unwrap(), a);
        assert!("../../etc/passwd".parse::<SandboxId>().is_err());
        assert!("ABCDEF0123456789".parse::<SandboxId>().is_err());
    }
}
