//! Digests: the SHA-256 of content, which is its name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};

use crate::text::cleaned;

const PREFIX: &str = "sha256:";
const BYTES: usize = 32;

/// The SHA-256 of some content, written `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; BYTES]);

/// A text that is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} is not a digest: {rule}")]
pub struct InvalidDigest {
    text: String,
    rule: &'static str,
}

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self::finish(Sha256::new_with_prefix(bytes))
    }

    /// The digest of everything that a hasher has read.
    pub(crate) fn finish(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }

    /// The 64 digits without the algorithm, as an OCI layout names its files.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let refuse = |rule| InvalidDigest {
            text: cleaned(text),
            rule,
        };
        let hex = text
            .strip_prefix(PREFIX)
            .ok_or_else(|| refuse("only sha256 is known"))?;
        if hex.len() != 2 * BYTES {
            return Err(refuse("sha256 has 64 digits"));
        }
        let mut digest = [0; BYTES];
        for (byte, pair) in digest.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            let both = nibble(pair[0]).zip(nibble(pair[1]));
            let (high, low) = both.ok_or_else(|| refuse("digits are 0-9 and a-f"))?;
            *byte = high << 4 | low;
        }
        Ok(Self(digest))
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn a_digest_is_read_as_it_is_written() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        assert_eq!(EMPTY.parse::<Digest>().unwrap(), Digest::of(b""));
    }

    #[test]
    fn other_algorithms_and_malformed_digits_are_refused() {
        let upper = EMPTY.to_uppercase();
        let long = format!("{EMPTY}0");
        for text in [
            "",
            "sha256:",
            "sha512:00",
            &upper,
            &long,
            &EMPTY.replace('e', "é"),
            &EMPTY.replace('e', "g"),
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
