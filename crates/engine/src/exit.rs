//! How a QEMU process ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rustix::process::Signal;

/// How a QEMU process ended, and the last it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    pub status: ExitStatus,
    /// The end of its standard error, at most 16 KiB.
    pub stderr: String,
}

impl Exit {
    /// Whether it was killed: by a user, by us, or by a kernel without memory. A QEMU that ends in
    /// any other way does so because of what it did.
    pub fn is_kill(&self) -> bool {
        self.status.signal() == Some(Signal::KILL.as_raw())
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stderr.trim() {
            "" => write!(f, "{}, without output", self.status),
            output => write!(f, "{}, with output: {output}", self.status),
        }
    }
}
