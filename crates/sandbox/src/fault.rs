//! Faults that tests ask for: where, and what happens there.

use std::fmt;
use std::time::Duration;

use sandtree_engine::Machine;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::host::Inner;

/// The points at which a verb can be made to fail, in the order they are come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    Image,
    Resources,
    Ports,
    Record,
    Machine,
    Hello,
    Configure,
    Forward,
    Running,

    CapturePrepared,
    CaptureLive,
    CaptureStopped,
    CaptureDevices,
    CaptureRead,
    CapturePivoted,
    CaptureWritten,
    CapturePublish,

    RestoreChecked,
    RestoreStarted,
    RestoreLoaded,
    RestoreContinued,
    RestoreAcknowledged,
}

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

    pub const CAPTURE: [Step; 8] = [
        Self::CapturePrepared,
        Self::CaptureLive,
        Self::CaptureStopped,
        Self::CaptureDevices,
        Self::CaptureRead,
        Self::CapturePivoted,
        Self::CaptureWritten,
        Self::CapturePublish,
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
    /// The machine is killed, and the step goes on.
    MachineDies,
    /// The step waits: `reached` appears in [`HostConfig::hold`](crate::HostConfig), and it goes on when `go` does.
    Hold,
}

const HOLD_POLL: Duration = Duration::from_millis(1);

impl Inner {
    /// Does what a test asked for at this step; nothing otherwise.
    pub(crate) fn reach(&self, step: Step, machine: Option<&Machine>) -> Result<()> {
        match (self.config.fault, machine) {
            (Some((at, Fault::Error)), _) if at == step => Err(Error::Injected { step }),
            (Some((at, Fault::MachineDies)), Some(machine)) if at == step => {
                machine.kill_now();
                Ok(())
            }
            (Some((at, Fault::Hold)), _) if at == step => {
                tokio::task::block_in_place(|| self.hold());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn hold(&self) {
        let Some(dir) = &self.config.hold else { return };
        std::fs::write(dir.join("reached"), "").expect("a test's own directory takes a file");
        while !dir.join("go").exists() {
            std::thread::sleep(HOLD_POLL);
        }
    }
}
