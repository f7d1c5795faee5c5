//! How a machine ended.

use sandtree_engine::{Exit, Machine};
use sandtree_store::{Ended, Phase};

use crate::console::Console;

/// How a machine ended, in our words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ending {
    pub phase: Phase,
    pub ended: Ended,
    /// For people.
    pub reason: String,
}

impl Ending {
    /// The console is drained.
    pub fn of(machine: &Machine, exit: &Exit, console: &Console) -> Ending {
        let ending = machine.ending();
        let shutdown = ending.shutdown.as_ref().map(|s| s.reason.as_str());
        // The console is the guest's to write: it counts only where nothing better is known.
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
