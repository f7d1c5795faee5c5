//! Choices that the records of sandboxes, states and snapshots hold.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Network {
    None,
    Isolated,
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum AccelChoice {
    Auto,
    Kvm,
    Tcg,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PublishedPort {
    pub host: u16,
    pub guest: u16,
}

/// The size of a screen in pixels, as `WIDTHxHEIGHT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DisplaySize {
    width: u16,
    height: u16,
}

/// A text that is not the size of a screen.
#[derive(Debug, Clone, Error)]
#[error("{text:?} is not the size of a screen: WIDTHxHEIGHT, from 320x200 to 2560x1600 pixels")]
pub struct ParseDisplaySizeError {
    text: String,
}

impl DisplaySize {
    /// What a screen has if no size is asked for.
    pub const DEFAULT: Self = Self {
        width: 1280,
        height: 800,
    };
    const LEAST: Self = Self {
        width: 320,
        height: 200,
    };
    /// Two pictures of this size, the old and the new one of a change, fit into what a machine
    /// keeps of its screen.
    const MOST: Self = Self {
        width: 2560,
        height: 1600,
    };

    /// A screen of a size that is possible.
    pub fn new(width: u16, height: u16) -> Result<Self, ParseDisplaySizeError> {
        let is_possible = (Self::LEAST.width..=Self::MOST.width).contains(&width)
            && (Self::LEAST.height..=Self::MOST.height).contains(&height);
        if is_possible {
            Ok(Self { width, height })
        } else {
            let text = format!("{width}x{height}");
            Err(ParseDisplaySizeError { text })
        }
    }

    pub fn width(self) -> u16 {
        self.width
    }

    pub fn height(self) -> u16 {
        self.height
    }
}

impl fmt::Display for DisplaySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

impl FromStr for DisplaySize {
    type Err = ParseDisplaySizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = || ParseDisplaySizeError {
            text: text.chars().take(64).collect(),
        };
        let (width, height) = text.split_once('x').ok_or_else(refused)?;
        let size = Self::new(
            width.parse().map_err(|_| refused())?,
            height.parse().map_err(|_| refused())?,
        )?;
        // One text for each size: equal manifests have equal bytes.
        if size.to_string() == text {
            Ok(size)
        } else {
            Err(refused())
        }
    }
}

impl TryFrom<String> for DisplaySize {
    type Error = ParseDisplaySizeError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<DisplaySize> for String {
    fn from(size: DisplaySize) -> Self {
        size.to_string()
    }
}

#[cfg(feature = "schema")]
impl utoipa::PartialSchema for DisplaySize {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        String::schema()
    }
}

#[cfg(feature = "schema")]
impl utoipa::ToSchema for DisplaySize {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_one_text_and_bounds() {
        let size: DisplaySize = "1280x800".parse().unwrap();
        assert_eq!(size, DisplaySize::DEFAULT);
        assert_eq!(size.to_string(), "1280x800");
        for refused in [
            "",
            "x",
            "1280",
            "1280x",
            "x800",
            "01280x800",
            "+1280x800",
            "1280X800",
            "319x200",
            "320x199",
            "2561x1600",
            "2560x1601",
            "65537x800",
            "1280x800x1",
        ] {
            assert!(refused.parse::<DisplaySize>().is_err(), "{refused}");
        }
    }
}
