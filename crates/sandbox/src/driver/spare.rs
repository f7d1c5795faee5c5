//! The spare of a running sandbox: a QEMU that is started ahead of the next revert.
//!
//! ```text
//!   checkpoint, revert --wish--> a moment of rest --> enough memory? --> QEMU started --> kept for minutes --> ended
//!                        \                                                   |  ^             |
//!                         `-- again, while there is one: kept for longer ----+--'             \--take--> the next revert
//! ```
//!
//! Always: a sandbox has at most one spare, and only while it runs. Without one a revert starts its
//! QEMU itself. A spare opens only images that nothing writes to any more, and ends when the
//! sandbox removes one of them. When it fails: there is no spare; the reason is logged. However the
//! driver ends, its spare ends with it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sandtree_engine::{AccelChoice, MachineSpec, Memory, Preload, Spare, Start};
use sandtree_store::LayerId;
use tokio::task::JoinHandle;
use tokio::time::Instant;

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
    Checkpointed,
    Reverted,
}

/// The place of a sandbox's spare.
#[derive(Debug, Default)]
pub(super) struct SpareSlot {
    place: Arc<Mutex<Place>>,
    /// Starts the spare, and ends one that is not used.
    task: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Place {
    stage: Stage,
    /// When a spare that is not used ends; `None`: with its sandbox.
    until: Option<Instant>,
    /// The closed overlays that the spare has open.
    overlays: Vec<LayerId>,
}

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Empty,
    Starting,
    Ready(Box<Spare>),
}

impl Place {
    fn take(&mut self) -> Option<Spare> {
        match std::mem::take(&mut self.stage) {
            Stage::Ready(spare) => Some(*spare),
            Stage::Starting => {
                self.stage = Stage::Starting;
                None
            }
            Stage::Empty => None,
        }
    }
}

impl SpareSlot {
    /// The spare, if it is ready.
    pub fn take(&self) -> Option<Spare> {
        lock(&self.place).take()
    }

    /// Ends the spare and its preparation, and waits for that.
    pub async fn end(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // An error says that it was aborted.
            drop(task.await);
        }
        // Its QEMU ends.
        lock(&self.place).stage = Stage::Empty;
    }

    /// Ends the spare if it has an overlay open that is gone: its QEMU would keep the space.
    pub fn end_without(&self, is_there: impl Fn(&LayerId) -> bool) {
        let mut place = lock(&self.place);
        if !place.overlays.iter().all(is_there) {
            place.stage = Stage::Empty;
        }
    }

    /// Keeps the spare for longer, also one that is being started. Returns whether there is one.
    fn keep(&self, kept: Kept) -> bool {
        let mut place = lock(&self.place);
        place.until = kept.until();
        match place.stage {
            Stage::Empty => false,
            Stage::Starting => self.task.as_ref().is_some_and(|task| !task.is_finished()),
            Stage::Ready(_) => true,
        }
    }

    /// Begins to start a spare where there is none.
    fn prepare(&mut self, host: Arc<Inner>, wanted: Wanted) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        let place = self.place.clone();
        {
            let mut place = lock(&place);
            place.stage = Stage::Starting;
            place.overlays = wanted.overlays.clone();
        }
        self.task = Some(tokio::spawn(may_block(async move {
            tokio::time::sleep(REST).await;
            let started = start(&host, wanted).await;
            let is_ready = ready(&place, started);
            if is_ready {
                expired(&place).await;
                // Its QEMU ends.
                drop(lock(&place).take());
            }
        })));
    }
}

/// Puts a spare that was started into its place, unless it was given up meanwhile.
fn ready(place: &Mutex<Place>, started: Result<Spare>) -> bool {
    let mut place = lock(place);
    match (started, &place.stage) {
        (Ok(spare), Stage::Starting) => place.stage = Stage::Ready(Box::new(spare)),
        (Ok(_), _) => {}
        (Err(error), _) => {
            tracing::debug!(%error, "the next revert starts its QEMU itself");
            place.stage = Stage::Empty;
        }
    }
    matches!(place.stage, Stage::Ready(_))
}

/// Waits until the spare has not been wanted for long enough.
async fn expired(place: &Mutex<Place>) {
    loop {
        let until = lock(place).until;
        match until {
            Some(until) if until <= Instant::now() => return,
            Some(until) => tokio::time::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for SpareSlot {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

fn lock(place: &Mutex<Place>) -> std::sync::MutexGuard<'_, Place> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A machine like the one that the spare is to become.
struct Wanted {
    spec: MachineSpec,
    disk_bytes: u64,
    /// The closed overlays of its disk.
    overlays: Vec<LayerId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    ForMinutes,
    WhileItRuns,
}

impl Kept {
    fn until(self) -> Option<Instant> {
        match self {
            Self::ForMinutes => Some(Instant::now() + KEPT),
            Self::WhileItRuns => None,
        }
    }
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
            (Spares::AfterCheckpoint, Occasion::Checkpointed | Occasion::Reverted) => {
                Kept::ForMinutes
            }
            (Spares::AfterCheckpoint, Occasion::Started) | (Spares::Never, _) => return,
        };
        if self.spare.keep(kept) {
            return;
        }
        match self.spare_like_this() {
            Ok(Some(wanted)) => self.spare.prepare(self.host.clone(), wanted),
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "the next revert starts its QEMU itself"),
        }
    }

    fn spare_like_this(&self) -> Result<Option<Wanted>> {
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
        let head = self.head()?;
        let closed = running.ground.frozen(&head.disk);
        let shape = Shape {
            kernel: Kernel::Boots,
            memory: Memory::Empty,
            preload: Preload::Use,
            start: Start::Incoming,
            // Up to the overlay that the guest writes to, which the spare does not open.
            disk: &head.disk[..=closed.len()],
            machine: &running.record,
        };
        Ok(Some(Wanted {
            spec: machine_spec(&self.host, self.dir(), accel, shape)?,
            disk_bytes: self.record_of().disk_bytes,
            overlays: closed.to_vec(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slot whose spare is being started, by a task that does not end.
    fn starting(overlays: Vec<LayerId>) -> SpareSlot {
        let place = Place {
            stage: Stage::Starting,
            until: None,
            overlays,
        };
        SpareSlot {
            place: Arc::new(Mutex::new(place)),
            task: Some(tokio::spawn(std::future::pending())),
        }
    }

    #[tokio::test]
    async fn a_spare_is_given_up_with_the_first_overlay_that_is_gone() {
        let overlays: Vec<LayerId> = (0..2)
            .map(|_| LayerId::random().expect("there is randomness"))
            .collect();
        let slot = starting(overlays.clone());
        slot.end_without(|_| true);
        assert!(slot.keep(Kept::ForMinutes), "all of them are there");
        slot.end_without(|overlay| *overlay != overlays[1]);
        assert!(!slot.keep(Kept::ForMinutes), "one is gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_spare_that_is_wanted_again_is_kept_for_longer() {
        let slot = starting(Vec::new());
        assert!(slot.keep(Kept::ForMinutes));
        let began = Instant::now();
        let again = async {
            tokio::time::sleep(KEPT / 2).await;
            assert!(slot.keep(Kept::ForMinutes));
        };
        tokio::join!(expired(&slot.place), again);
        assert_eq!(began.elapsed().as_secs(), (KEPT + KEPT / 2).as_secs());
    }

    #[tokio::test]
    async fn a_spare_is_wanted_anew_after_its_start_has_failed() {
        let slot = starting(Vec::new());
        let failed = Err(Error::HostMemory {
            wanted_bytes: 1,
            available_bytes: 0,
            cgroup: None,
        });
        assert!(!ready(&slot.place, failed));
        assert!(!slot.keep(Kept::ForMinutes));
    }
}
