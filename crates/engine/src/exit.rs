//! How a QEMU process ended.

use std::fmt;
use std::process::ExitStatus;

/// How a QEMU process ended, and the last it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub status: ExitStatus,
    /// The end of its standard error, at most 16 KiB.
    pub stderr: String,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stderr.trim() {
            "" => write!(f, "{}, without output", self.status),
            output => write!(f, "{}, with output: {output}", self.status),
        }
    }
}
