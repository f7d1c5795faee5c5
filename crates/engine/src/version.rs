//! The version of a QEMU.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub micro: u32,
}

impl Version {
    /// The machine type is of this version, and no older QEMU knows it.
    pub const OLDEST: Version = Version {
        major: 7,
        minor: 2,
        micro: 0,
    };

    /// Finds the version in what `--version` prints.
    pub(crate) fn parse(output: &str) -> Option<Version> {
        let text = output.strip_prefix("QEMU emulator version ")?;
        let text = text
            .split(|c: char| c != '.' && !c.is_ascii_digit())
            .next()?;
        let mut numbers = text.split('.').map(str::parse);
        Some(Version {
            major: numbers.next()?.ok()?,
            minor: numbers.next()?.ok()?,
            micro: numbers.next().unwrap_or(Ok(0)).ok()?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}
