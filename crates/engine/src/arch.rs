//! Guest architectures.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    #[serde(rename = "x86_64")]
    X86_64,
    Aarch64,
}

impl Arch {
    /// The architecture this program was built for: the only one a hardware accelerator can run.
    pub const HOST: Arch = if cfg!(target_arch = "aarch64") {
        Arch::Aarch64
    } else {
        Arch::X86_64
    };

    pub fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        }
    }

    /// The file name of the QEMU that emulates this architecture.
    pub fn program(self) -> &'static str {
        match self {
            Arch::X86_64 => "qemu-system-x86_64",
            Arch::Aarch64 => "qemu-system-aarch64",
        }
    }

    /// What the names of all versions of our machine type begin with.
    pub(crate) fn machine_types(self) -> &'static str {
        match self {
            Arch::X86_64 => "pc-q35-",
            Arch::Aarch64 => "virt-",
        }
    }

    /// The versioned machine type. Never an alias: a captured state must mean the same under a
    /// newer QEMU.
    pub fn machine_type(self) -> &'static str {
        match self {
            Arch::X86_64 => "pc-q35-7.2",
            Arch::Aarch64 => "virt-7.2",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
