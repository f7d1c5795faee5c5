//! The half of the library in QEMU that the engine shares: their messages to each other, and the
//! write protection that its probe tries. The same source, because the library itself must not be
//! linked into this program.

#[path = "../../preload/src/format.rs"]
pub(crate) mod format;
#[path = "../../preload/src/protect.rs"]
pub(crate) mod protect;

use std::{fmt, io};

use format::{Failure, Step};

impl Step {
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Step::ReadPlan => "the plan cannot be read",
            Step::MapBase => "the memory cannot be reserved",
            Step::CheckEntry => "a region is not one of the guest's memory",
            Step::MapEntry => "a region cannot be mapped",
            Step::HugePages => "huge pages cannot be turned off",
            Step::Open => "userfaultfd cannot be used",
            Step::Negotiate => {
                "userfaultfd cannot protect without a reader (Linux 6.7 or newer is needed)"
            }
            Step::Register => "the memory cannot be registered with userfaultfd",
            Step::Wait => "the plan of the memory cannot be waited for",
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}",
            self.step.describe(),
            io::Error::from_raw_os_error(self.errno)
        )
    }
}
