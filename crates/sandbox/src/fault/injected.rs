//! With the feature `faults`: what a test asked for happens at its step.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sandtree_engine::Machine;
use serde::{Deserialize, Serialize};

use super::Step;

/// How often a step that waits looks for the file `go`.
const HOLD_POLL: Duration = Duration::from_millis(1);

impl Step {
    pub const CREATE: [Step; 9] = [
        Self::Image,
        Self::Resources,
        Self::Ports,
        Self::Record,
        Self::Machine,
        Self::Hello,
        Self::Configure,
        Self::Forward,
        Self::Running,
    ];

    pub const CAPTURE: [Step; 7] = [
        Self::CapturePrepared,
        Self::CaptureLive,
        Self::CaptureStopped,
        Self::CaptureDevices,
        Self::CapturePivoted,
        Self::CaptureWritten,
        Self::CapturePublish,
    ];

    /// Of a save of the disk alone.
    pub const SAVE: [Step; 5] = [
        Self::CapturePrepared,
        Self::SaveFrozen,
        Self::CapturePivoted,
        Self::CapturePublish,
        Self::SavePublish,
    ];

    pub const RESTORE: [Step; 5] = [
        Self::RestoreChecked,
        Self::RestoreStarted,
        Self::RestoreLoaded,
        Self::RestoreContinued,
        Self::RestoreAcknowledged,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// What happens at the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The step fails.
    Error,
    /// The step panics.
    Panic,
    /// The machine is killed, and the step continues.
    MachineDies,
    /// The step writes the file `reached` in [`Faults::hold`] and waits for the file `go` there.
    Hold,
}

/// What a test asks for, from a host in this process or from a keeper.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Faults {
    pub fault: Option<(Step, Fault)>,
    /// The directory of [`Fault::Hold`].
    pub hold: Option<PathBuf>,
    /// How long a restored guest may take to acknowledge, in place of the usual time.
    pub acknowledge: Option<Duration>,
    /// How long the message with the time takes to reach a guest.
    pub message_delay: Option<Duration>,
}

/// A step failed because a test asked for it.
#[derive(Debug)]
pub(crate) struct Injected {
    pub step: Step,
}

/// What a test asked for; it may change while sandboxes run.
#[derive(Debug)]
pub(crate) struct Plan(Mutex<Faults>);

impl Plan {
    pub fn new(faults: Faults) -> Self {
        Self(Mutex::new(faults))
    }

    pub fn set(&self, faults: Faults) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }

    fn faults(&self) -> Faults {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Does what a test asked for at this step; nothing at other steps.
    pub fn reach(&self, step: Step, machine: Option<&Machine>) -> Result<(), Injected> {
        let faults = self.faults();
        let Some((_, fault)) = faults.fault.filter(|(at, _)| *at == step) else {
            return Ok(());
        };
        match fault {
            Fault::Error => return Err(Injected { step }),
            Fault::Panic => panic!("a test injected a panic at {step}"),
            Fault::MachineDies => machine.into_iter().for_each(Machine::kill_now),
            Fault::Hold => {
                if let Some(dir) = faults.hold {
                    tokio::task::block_in_place(|| hold(&dir));
                }
            }
        }
        Ok(())
    }

    /// Delays the message with the time, where a test asked for it.
    pub async fn delay_message(&self) {
        if let Some(delay) = self.faults().message_delay {
            tokio::time::sleep(delay).await;
        }
    }

    pub fn acknowledge_within(&self, usual: Duration) -> Duration {
        self.faults().acknowledge.unwrap_or(usual)
    }
}

fn hold(dir: &Path) {
    std::fs::write(dir.join("reached"), "").expect("a test's own directory takes a file");
    while !dir.join("go").exists() {
        std::thread::sleep(HOLD_POLL);
    }
}
