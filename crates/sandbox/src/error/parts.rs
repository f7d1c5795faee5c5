//! The parts of errors that edges tell apart. Each has a stable name and words for people.

use std::fmt;

use sandtree_store::{Digest, Named, SandboxId};

use crate::verb::Phase;

/// What a restored guest's memory does not allow to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    Memory,
    Cpus,
    Network,
    Processor,
    Display,
    QemuArguments,
}

impl Setting {
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpus => "cpus",
            Self::Network => "network",
            Self::Processor => "processor",
            Self::Display => "display",
            Self::QemuArguments => "qemu_arguments",
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Cpus => "number of cpus",
            Self::Network => "network",
            Self::Processor => "processor",
            Self::Display => "size of the screen",
            Self::QemuArguments => "arguments of QEMU",
        })
    }
}

/// What of a machine a state cannot find on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachinePart {
    Architecture,
    Accelerator,
    MachineType,
    Processor,
    Qemu,
}

impl MachinePart {
    pub fn name(self) -> &'static str {
        match self {
            Self::Architecture => "architecture",
            Self::Accelerator => "accelerator",
            Self::MachineType => "machine_type",
            Self::Processor => "processor",
            Self::Qemu => "qemu",
        }
    }
}

impl fmt::Display for MachinePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Architecture => "architecture",
            Self::Accelerator => "accelerator",
            Self::MachineType => "machine type",
            Self::Processor => "processor",
            Self::Qemu => "QEMU",
        })
    }
}

/// What needs a state, so that it cannot be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateUser {
    Paused,
    Borrower,
}

impl StateUser {
    pub fn name(self) -> &'static str {
        match self {
            Self::Paused => "paused",
            Self::Borrower => "borrower",
        }
    }
}

impl fmt::Display for StateUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Paused => "the sandbox is paused in it",
            Self::Borrower => "it is being saved or copied",
        })
    }
}

/// What has the name that a snapshot is to get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameHolder {
    Image(Digest),
    Snapshot(Digest),
    /// A save that is due when this sandbox stops.
    Save(SandboxId),
    /// A directory that is not empty.
    Files,
}

impl NameHolder {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Image(_) => "image",
            Self::Snapshot(_) => "snapshot",
            Self::Save(_) => "save",
            Self::Files => "files",
        }
    }
}

impl From<Named> for NameHolder {
    fn from(named: Named) -> Self {
        match named {
            Named::Image(digest) => Self::Image(digest),
            Named::Snapshot(digest) => Self::Snapshot(digest),
            Named::Reserved(sandbox) => Self::Save(sandbox),
        }
    }
}

impl fmt::Display for NameHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(digest) => write!(f, "image {digest}"),
            Self::Snapshot(digest) => write!(f, "snapshot {digest}"),
            Self::Save(sandbox) => write!(f, "the save to come of sandbox {sandbox}"),
            Self::Files => f.write_str("the files in it"),
        }
    }
}

/// Why a sandbox that was to be saved when it stopped is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unsaved {
    /// Somebody removed it.
    Removed,
    /// It is still in this phase.
    Phase(Phase),
    /// The save failed; the keeper recorded why.
    Failed { reason: String },
}

impl fmt::Display for Unsaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Removed => f.write_str("it was removed"),
            Self::Phase(phase) => write!(f, "it is {phase}"),
            Self::Failed { reason } => f.write_str(reason),
        }
    }
}
