//! The ways to find the pages of a capture.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// How the pages of a capture are found, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// Written since the last capture, by asynchronous write protection.
    WriteProtect,
    /// Written since the last capture, by the kernel's soft-dirty bit.
    SoftDirty,
    /// Written since the machine's process started.
    Anonymous,
    /// All of memory, as QEMU's own stream.
    Full,
}

impl MemoryMode {
    pub const ALL: [MemoryMode; 4] = [
        Self::WriteProtect,
        Self::SoftDirty,
        Self::Anonymous,
        Self::Full,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::WriteProtect => "write-protect",
            Self::SoftDirty => "soft-dirty",
            Self::Anonymous => "anonymous",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for MemoryMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MemoryMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| {
            Error::invalid(
                "memory mode",
                text,
                "write-protect, soft-dirty, anonymous or full",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for mode in MemoryMode::ALL {
            assert_eq!(mode.name().parse::<MemoryMode>().unwrap(), mode);
        }
        assert!("dirty".parse::<MemoryMode>().is_err());
    }
}
