//! A machine that is up, with everything that serves it.

use std::path::{Path, PathBuf};

use sandtree_engine::{Events, Machine, TrackingVerdict};
use sandtree_store::{MachineRecord, SandboxDir, SandboxRecord, StateId};
use tokio::sync::mpsc;

use super::ground::Ground;
use super::ports::Listener;
use crate::console::Console;
use crate::degradation::Degradation;
use crate::error::{Error, Result, store_error};
use crate::guest::{Forward, Guest};
use crate::hub::{Gate, Hub};
use crate::states::RestoreReport;

/// A machine that is up, with everything that serves it.
#[derive(Debug)]
pub(crate) struct Running {
    pub machine: Machine,
    pub hub: Hub,
    pub guest: Guest,
    /// QEMU's events from the machine's start; its driver takes them.
    pub events: Option<Events>,
    /// Commands that want to start, where a checkpoint comes before each; its driver takes it.
    pub gate: Option<mpsc::Receiver<Gate>>,
    pub forwards: Vec<Forward>,
    pub console: Console,
    /// What its memory stands on.
    pub ground: Ground,
    pub tracking: TrackingVerdict,
    pub record: MachineRecord,
    /// Where its hub keeps the output of detached commands.
    pub execs: PathBuf,
    /// The degradations of the machine, with their reasons.
    pub degraded: Vec<Degradation>,
    /// How the guest of a new sandbox was restored.
    pub created: Option<RestoreReport>,
}

impl Running {
    /// The host's ports, to be handed to the machine that takes over.
    pub fn listeners(&self) -> Vec<Listener> {
        self.forwards
            .iter()
            .map(|forward| Listener {
                socket: forward.listener(),
                port: forward.port(),
            })
            .collect()
    }
}

/// Makes a directory for the output of one machine's detached commands. Each machine of a sandbox
/// has its own.
pub(crate) fn fresh_execs(dir: &SandboxDir) -> Result<PathBuf> {
    let id = StateId::random().map_err(store_error("make an id"))?;
    let path = dir.execs().join(id.as_str());
    std::fs::create_dir_all(&path).map_err(|e| Error::io("create", &path, e))?;
    Ok(path)
}

/// Removes the output of the commands of all machines except the one with the directory `but`.
pub(crate) fn clear_execs(dir: &SandboxDir, but: Option<&Path>) -> Result<()> {
    let execs = dir.execs();
    let entries = match execs.read_dir() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|e| Error::io("list", &execs, e))?,
    };
    for entry in entries {
        let path = entry.map_err(|e| Error::io("list", &execs, e))?.path();
        if Some(path.as_path()) != but {
            std::fs::remove_dir_all(&path).map_err(|e| Error::io("remove", &path, e))?;
        }
    }
    Ok(())
}

/// The two ends of a gate, for a sandbox that has one.
pub(crate) fn gate(
    record: &SandboxRecord,
) -> (Option<mpsc::Sender<Gate>>, Option<mpsc::Receiver<Gate>>) {
    record.auto_checkpoint.map(|_| mpsc::channel(16)).unzip()
}
