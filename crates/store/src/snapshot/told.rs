//! How the kinds of things are called towards people.

use std::fmt;

use super::gc::GarbageKind;
use super::manifest::Consistency;
use super::usage::UsageKind;

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Frozen => "frozen",
            Self::Stopped => "stopped",
            Self::Crash => "crash",
        })
    }
}

impl fmt::Display for GarbageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Snapshot => "snapshot",
            Self::Layer => "layer",
            Self::Warm => "warm",
            Self::Image => "image",
            Self::Kernel => "kernel",
            Self::Reservation => "reservation",
        })
    }
}

impl fmt::Display for UsageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Images => "images",
            Self::Kernels => "kernels",
            Self::Snapshots => "snapshots",
            Self::Layers => "layers",
            Self::Sandboxes => "sandboxes",
            Self::Warm => "warm",
            Self::Cache => "cache",
            Self::Staging => "staging",
            Self::Quarantine => "quarantine",
        })
    }
}
