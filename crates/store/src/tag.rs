//! Tags: names of the states of one sandbox.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Name, ParseNameError, StateId};

/// A name that is not the id of a state, so that a reference to a state is never both.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tag(Name);

/// Why a text is no tag.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ParseTagError {
    #[error(transparent)]
    Name(#[from] ParseNameError),
    #[error("{text} cannot be a tag: 16 hexadecimal digits are an id")]
    Id { text: String },
}

impl Tag {
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl FromStr for Tag {
    type Err = ParseTagError;

    fn from_str(text: &str) -> Result<Self, ParseTagError> {
        match text.parse::<StateId>() {
            Ok(id) => Err(ParseTagError::Id { text: id.into() }),
            Err(_) => Ok(Self(text.parse()?)),
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl TryFrom<String> for Tag {
    type Error = ParseTagError;

    fn try_from(text: String) -> Result<Self, ParseTagError> {
        text.parse()
    }
}

impl From<Tag> for String {
    fn from(tag: Tag) -> Self {
        tag.0.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_a_name_and_never_an_id() {
        assert_eq!(
            "before-upgrade".parse::<Tag>().unwrap().as_str(),
            "before-upgrade"
        );
        assert!(matches!(
            "0123456789abcdef".parse::<Tag>(),
            Err(ParseTagError::Id { .. })
        ));
        assert!(matches!(
            "../up".parse::<Tag>(),
            Err(ParseTagError::Name(_))
        ));
        assert!(serde_json::from_str::<Tag>("\"0123456789abcdef\"").is_err());
    }
}
