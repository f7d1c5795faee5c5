//! Names of images and sandboxes.
//!
//! Always: a `Name` is one harmless path component. No other text becomes a path below `names/`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

const MAX_LEN: usize = 63;

/// `[a-z0-9][a-z0-9._-]{0,62}`
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// The rule of names that a text breaks.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ParseNameError {
    #[error("a name cannot be empty")]
    Empty,
    #[error("{name:?} is too long for a name: {len} characters where {MAX_LEN} are allowed")]
    TooLong { name: String, len: usize },
    #[error("{name:?} is not a name: it must begin with a lowercase letter or a digit")]
    Start { name: String },
    #[error("{name:?} is not a name: {found:?} is none of a-z, 0-9, '.', '_', '-'")]
    Character { name: String, found: char },
}

impl Name {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, ParseNameError> {
        let first = text.chars().next().ok_or(ParseNameError::Empty)?;
        let len = text.chars().count();
        if len > MAX_LEN {
            return Err(ParseNameError::TooLong {
                name: text.chars().take(MAX_LEN).collect(),
                len,
            });
        }
        if let Some(found) = text.chars().find(|c| !is_allowed(*c)) {
            return Err(ParseNameError::Character {
                name: text.to_owned(),
                found,
            });
        }
        if !first.is_ascii_alphanumeric() {
            return Err(ParseNameError::Start {
                name: text.to_owned(),
            });
        }
        Ok(Self(text.to_owned()))
    }
}

fn is_allowed(c: char) -> bool {
    matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-')
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = ParseNameError;

    fn try_from(text: String) -> Result<Self, ParseNameError> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, proptest};

    use super::*;

    #[test]
    fn accepts_what_the_rule_allows() {
        for text in ["a", "0", "tiny", "p-10", "a.b_c-d", &"x".repeat(63)] {
            assert_eq!(text.parse::<Name>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn refuses_with_the_rule_broken() {
        assert_eq!("".parse::<Name>(), Err(ParseNameError::Empty));
        assert!(matches!(
            "../x".parse::<Name>(),
            Err(ParseNameError::Character { found: '/', .. })
        ));
        assert!(matches!(
            "..".parse::<Name>(),
            Err(ParseNameError::Start { .. })
        ));
        assert!(matches!(
            "-a".parse::<Name>(),
            Err(ParseNameError::Start { .. })
        ));
        assert!(matches!(
            "Tiny".parse::<Name>(),
            Err(ParseNameError::Character { found: 'T', .. })
        ));
        assert!(matches!(
            "a b".parse::<Name>(),
            Err(ParseNameError::Character { found: ' ', .. })
        ));
        assert!(matches!(
            "x".repeat(64).parse::<Name>(),
            Err(ParseNameError::TooLong { len: 64, .. })
        ));
        assert!(matches!(
            "a\0".parse::<Name>(),
            Err(ParseNameError::Character { .. })
        ));
    }

    proptest! {
        #[test]
        fn a_name_is_one_path_component(text in any::<String>()) {
            if let Ok(name) = text.parse::<Name>() {
                let path = std::path::Path::new(name.as_str());
                prop_assert!(path.components().count() == 1 && path.file_name().is_some());
            }
        }
    }
}
