//! The spare of a running sandbox: a QEMU that is started ahead of the next revert.
//!
//! ```text
//!   revert done --wish--> a moment of rest --> enough memory? --> QEMU started --> kept for some minutes --> ended
//!                                                                     \--take--> the next revert
//! ```
//!
//! Always: a sandbox has at most one spare, and only while it runs. Without one a revert starts its
//! QEMU itself. When it fails: there is no spare; the reason is logged. However the driver ends,
//! its spare ends with it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandtree_engine::{AccelChoice, MachineSpec, Memory, Preload, Spare, Start};
use tokio::task::JoinHandle;

use super::Driver;
use crate::blocking::may_block;
use crate::config::Spares;
use crate::error::{Error, Result, engine_error};
use crate::inner::Inner;
use crate::machine::spec::{Kernel, Shape, machine_spec};
use crate::memory;

/// The guest that was just started or reverted has the processors for itself this long.
const REST: Duration = Duration::from_millis(500);
/// How long a spare waits for the next revert.
const KEPT: Duration = Duration::from_secs(600);
/// Memory that must be available: a spare takes some 20 MB, and must not take the last of it.
const AVAILABLE_BYTES_MIN: u64 = 1 << 30;

/// Why a spare may be wanted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occasion {
    Started,
    Reverted,
}

/// The place of a sandbox's spare.
#[derive(Debug, Default)]
pub(super) struct SpareSlot {
    spare: Arc<Mutex<Option<Spare>>>,
    /// Starts the spare, and ends one that is not used.
    task: Option<JoinHandle<()>>,
}

impl SpareSlot {
    /// The spare, if it is ready.
    pub fn take(&self) -> Option<Spare> {
        take(&self.spare)
    }

    /// Ends the spare and its preparation, and waits for that.
    pub async fn end(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // An error says that it was aborted.
            drop(task.await);
        }
        // Its QEMU ends.
        drop(self.take());
    }

    /// Begins to start a spare, unless the one before was not used.
    fn prepare(&mut self, host: Arc<Inner>, wanted: Wanted) {
        if lock(&self.spare).is_some() {
            return;
        }
        if let Some(task) = self.task.take() {
            task.abort();
        }
        let slot = self.spare.clone();
        self.task = Some(tokio::spawn(may_block(async move {
            tokio::time::sleep(REST).await;
            let kept = wanted.kept;
            match start(&host, wanted).await {
                Ok(spare) => *lock(&slot) = Some(spare),
                Err(error) => {
                    tracing::debug!(%error, "the next revert starts its QEMU itself");
                    return;
                }
            }
            if kept == Kept::ForMinutes {
                tokio::time::sleep(KEPT).await;
                // Its QEMU ends.
                drop(take(&slot));
            }
        })));
    }
}

impl Drop for SpareSlot {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

fn lock(slot: &Mutex<Option<Spare>>) -> std::sync::MutexGuard<'_, Option<Spare>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take(slot: &Mutex<Option<Spare>>) -> Option<Spare> {
    lock(slot).take()
}

/// A machine like the one that the spare is to become.
struct Wanted {
    spec: MachineSpec,
    disk_bytes: u64,
    kept: Kept,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    ForMinutes,
    WhileItRuns,
}

async fn start(host: &Inner, wanted: Wanted) -> Result<Spare> {
    let available = memory::available()?;
    if available.bytes < AVAILABLE_BYTES_MIN {
        return Err(Error::HostMemory {
            wanted_bytes: AVAILABLE_BYTES_MIN,
            available_bytes: available.bytes,
            cgroup: available.cgroup,
        });
    }
    let engine = host.engine().await?;
    let started = engine.prepare(wanted.spec, wanted.disk_bytes).await;
    started.map_err(engine_error("start ahead of a revert"))
}

impl Driver {
    /// Begins to prepare a spare, if the host's configuration asks for one on this occasion.
    pub(super) fn wish_for_spare(&mut self, occasion: Occasion) {
        let kept = match (self.host.config.spares, occasion) {
            (Spares::Always, _) => Kept::WhileItRuns,
            (Spares::AfterRevert, Occasion::Reverted) => Kept::ForMinutes,
            (Spares::AfterRevert, Occasion::Started) | (Spares::Never, _) => return,
        };
        match self.spare_like_this(kept) {
            Ok(Some(wanted)) => self.spare.prepare(self.host.clone(), wanted),
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "the next revert starts its QEMU itself"),
        }
    }

    fn spare_like_this(&self, kept: Kept) -> Result<Option<Wanted>> {
        let Some(running) = &self.running else {
            return Ok(None);
        };
        // Arguments of the user's may claim what only one process at a time can have.
        if !running.record.qemu_args.is_empty() {
            return Ok(None);
        }
        let Ok(AccelChoice::Only(accel)) = running.record.accelerator.parse() else {
            return Ok(None);
        };
        let shape = Shape {
            kernel: Kernel::Boots,
            memory: Memory::Empty,
            preload: Preload::Use,
            start: Start::Incoming,
            disk: &self.head()?.disk,
            machine: &running.record,
        };
        Ok(Some(Wanted {
            spec: machine_spec(&self.host, self.dir(), accel, shape)?,
            disk_bytes: self.record_of().disk_bytes,
            kept,
        }))
    }
}
