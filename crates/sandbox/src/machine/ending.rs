//! How a machine ended.

use sandtree_engine::{Exit, Machine};
use sandtree_store::Phase;

use crate::console::Console;

/// How a machine ended, in our words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ending {
    pub phase: Phase,
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
        let (phase, reason) = match shutdown {
            _ if panicked => (Phase::Crashed, "the guest's kernel panicked".to_owned()),
            Some("guest-shutdown") => (Phase::Stopped, "the guest powered off".to_owned()),
            Some("guest-reset") => (Phase::Stopped, "the guest rebooted".to_owned()),
            Some("host-qmp-quit") => (Phase::Stopped, "stopped".to_owned()),
            _ => (Phase::Crashed, format!("QEMU ended: {exit}")),
        };
        Ending { phase, reason }
    }
}
