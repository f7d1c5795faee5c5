//! How a machine ended.

use sandtree_engine::{Exit, Machine};
use sandtree_store::{Ended, Phase};

use crate::console::Console;

/// How a machine ended, in the terms of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ending {
    pub phase: Phase,
    pub ended: Ended,
    /// The text for the user.
    pub reason: String,
}

impl Ending {
    /// The caller has drained the console.
    pub fn of(machine: &Machine, exit: &Exit, console: &Console) -> Ending {
        let ending = machine.ending();
        let shutdown = ending.shutdown.as_ref().map(|s| s.reason.as_str());
        // The guest can write anything to the console, so a panic there does not count if QEMU
        // reports that the guest powered off.
        let panicked =
            ending.panicked || (shutdown != Some("guest-shutdown") && console.has_panicked());
        match shutdown {
            _ if panicked => Self::crashed(Ended::Panicked, "the guest's kernel panicked"),
            Some("guest-shutdown") => Self::stopped(Ended::PoweredOff, "the guest powered off"),
            Some("guest-reset") => Self::stopped(Ended::Rebooted, "the guest rebooted"),
            Some("host-qmp-quit") => Self::stopped(Ended::Stopped, "stopped"),
            _ => Self::crashed(Ended::QemuEnded, format!("QEMU ended: {exit}")),
        }
    }

    pub fn stopped(ended: Ended, reason: impl Into<String>) -> Self {
        Self {
            phase: Phase::Stopped,
            ended,
            reason: reason.into(),
        }
    }

    pub fn crashed(ended: Ended, reason: impl Into<String>) -> Self {
        Self {
            phase: Phase::Crashed,
            ended,
            reason: reason.into(),
        }
    }
}
