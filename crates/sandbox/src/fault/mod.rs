//! The steps at which tests inject faults.
//!
//! The cargo feature `faults` decides what reaching a step does: with it, [`Plan`] holds what a
//! test asked for (`injected.rs`); without it, as in the program that is shipped, [`Plan`] is empty
//! and nothing happens (`absent.rs`). The tests of `tests/vm` turn the feature on.

#[cfg(not(feature = "faults"))]
mod absent;
#[cfg(feature = "faults")]
mod injected;

#[cfg(not(feature = "faults"))]
pub(crate) use absent::{Injected, Plan};
#[cfg(feature = "faults")]
pub use injected::{Fault, Faults};
#[cfg(feature = "faults")]
pub(crate) use injected::{Injected, Plan};

/// The steps of verbs at which a test can inject a fault, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "faults",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
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
