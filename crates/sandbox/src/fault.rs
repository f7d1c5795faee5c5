//! Faults that tests ask for: where, and what happens there.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sandtree_engine::Machine;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::host::{Host, HostConfig, Inner};

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
    CapturePivoted,
    CaptureWritten,
    CapturePublish,

    RestoreChecked,
    RestoreStarted,
    RestoreLoaded,
    RestoreContinued,
    RestoreAcknowledged,

    SaveFrozen,
    SavePublish,

    /// Before the commit of new sandboxes.
    Commit,
    /// After it, before they record that they run.
    Committed,
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
    /// The machine is killed, and the step goes on.
    MachineDies,
    /// The step waits: `reached` appears in [`HostConfig::hold`](crate::HostConfig), and it goes on
    /// when `go` does.
    Hold,
}

const HOLD_POLL: Duration = Duration::from_millis(1);

/// What a test asked for, which may change while sandboxes run.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    pub fault: Option<(Step, Fault)>,
    /// As [`HostConfig::hold`](crate::HostConfig).
    pub hold: Option<PathBuf>,
    /// How long a restored guest may take to acknowledge, in place of the usual time.
    pub acknowledge: Option<Duration>,
    /// How long the message that tells a guest the time is under way.
    pub message_delay: Option<Duration>,
}

impl Faults {
    pub(crate) fn of(config: &HostConfig) -> Mutex<Faults> {
        Mutex::new(Faults {
            fault: config.fault,
            hold: config.hold.clone(),
            acknowledge: None,
            message_delay: None,
        })
    }
}

impl Host {
    /// For tests: what goes wrong from now on, in every sandbox of this host.
    #[doc(hidden)]
    pub fn set_faults(&self, faults: Faults) {
        *self
            .inner
            .faults
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = faults;
    }
}

impl Inner {
    pub(crate) fn planned_faults(&self) -> Faults {
        self.faults
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Delays the message that tells a guest the time, where a test asked for it.
    pub(crate) async fn delay_message(&self) {
        if let Some(delay) = self.planned_faults().message_delay {
            tokio::time::sleep(delay).await;
        }
    }

    /// Does what a test asked for at this step; nothing otherwise.
    pub(crate) fn reach(&self, step: Step, machine: Option<&Machine>) -> Result<()> {
        let planned = self.planned_faults();
        match (planned.fault, machine) {
            (Some((at, Fault::Error)), _) if at == step => Err(Error::Injected { step }),
            (Some((at, Fault::Panic)), _) if at == step => panic!("it was told to panic at {step}"),
            (Some((at, Fault::MachineDies)), Some(machine)) if at == step => {
                machine.kill_now();
                Ok(())
            }
            (Some((at, Fault::Hold)), _) if at == step => {
                tokio::task::block_in_place(|| hold(planned.hold));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

fn hold(dir: Option<PathBuf>) {
    let Some(dir) = dir else { return };
    std::fs::write(dir.join("reached"), "").expect("a test's own directory takes a file");
    while !dir.join("go").exists() {
        std::thread::sleep(HOLD_POLL);
    }
}
