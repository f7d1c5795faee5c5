//! The stop of a capture: what must be of one moment, and nothing else.
//!
//! ```text
//!   QEMU:     stop | save devices |        pivot        | cont
//!   here:     wait ---------------| scan | read | wait  | wait
//! ```
//!
//! Commands that do not depend on each other's answers are sent together, and memory is scanned and
//! read by the thread that is here anyway: each wake-up of another thread would add to the stop.
//!
//! Always: devices are saved before memory is scanned, because saving them may write to memory.
//! When it fails: the guest continues. Pages that the scan took out of the tracking are carried.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use sandtree_engine::{DeviceFile, PreparedOverlay, Tracking};
use sandtree_store::LayerId;
use sandtree_store::memory::{self, PAGE, PageRun};
use tracing::{Instrument, debug_span};

use super::{After, Approach, BUFFER_BYTES, Capture, RUNS_MAX, Scope};
use crate::blocking::in_place;
use crate::error::{Error, Result, engine_error};
use crate::fault::Step;
use crate::machine::ground::NewLayer;
use crate::mode::MemoryMode;
use crate::pages;

/// How long QEMU may take to write its own stream of all of memory.
const STREAM_DEADLINE: Duration = Duration::from_secs(600);

/// What was taken inside the stop.
pub(super) struct Moment {
    pub memory: TakenMemory,
    pub pause: Duration,
}

pub(super) enum TakenMemory {
    /// Read, and yet to be written.
    Held { runs: Vec<PageRun>, bytes: Vec<u8> },
    /// Too much to hold: written inside the stop.
    Written { layer: NewLayer },
    /// In the state's directory.
    Stream,
}

/// Where a stop puts what it takes, and what follows it.
pub(super) struct Stop<'a> {
    pub staged: &'a Path,
    pub devices: &'a DeviceFile,
    pub after: After,
}

/// What came of a switch to an overlay.
type Pivoted = Result<(), (PreparedOverlay, sandtree_engine::Error)>;

impl Capture<'_> {
    /// Stops the guest and takes its devices, memory and disk. The guest continues afterwards, also
    /// after an error, unless nothing failed and it is to stay stopped.
    pub(super) async fn moment(
        &mut self,
        approach: &mut Approach,
        stop: Stop<'_>,
    ) -> Result<Moment> {
        // The hub is silent from before the stop until everything is read: devices and memory are
        // of the same moment only if no bytes move.
        let _silence = self.running.hub.hold().await;
        let began = Instant::now();
        // QEMU answers in order, so it saves the devices only after it has stopped.
        let (stopped, saved) = tokio::join!(self.stop_machine(), self.save_devices(stop.devices));
        let taken = match stopped?.and(saved) {
            Ok(()) => self.take_stopped(approach, stop.staged).await,
            Err(error) => Err(error),
        };
        if taken.is_err() || stop.after == After::Continue {
            let continued = self.machine().cont().instrument(debug_span!("cont")).await;
            // The pages that were taken are out of the tracking, and in no layer.
            continued
                .map_err(engine_error("continue the guest"))
                .inspect_err(|_| self.running.ground.lose_layers())?;
        }
        Ok(Moment {
            memory: taken?,
            pause: began.elapsed(),
        })
    }

    /// Stops the machine. The inner error is that of a later step: the machine is stopped.
    async fn stop_machine(&self) -> Result<Result<()>> {
        self.machine()
            .stop()
            .instrument(debug_span!("stop"))
            .await
            .map_err(engine_error("be stopped"))?;
        Ok(self
            .host
            .reach(Step::CaptureStopped, Some(&self.running.machine)))
    }

    async fn save_devices(&self, devices: &DeviceFile) -> Result<()> {
        self.machine()
            .save_devices(devices)
            .instrument(debug_span!("devices"))
            .await
            .map_err(engine_error("save its devices"))
    }

    async fn take_stopped(
        &mut self,
        approach: &mut Approach,
        staged: &Path,
    ) -> Result<TakenMemory> {
        if approach.plan.mode == MemoryMode::Full {
            self.pivot().await?;
            self.save_stream(&staged.join("devices")).await?;
            return Ok(TakenMemory::Stream);
        }
        self.host
            .reach(Step::CaptureDevices, Some(&self.running.machine))?;
        let (id, overlay) = self.prepared();
        let buffer = std::mem::take(&mut approach.buffer);
        // The pivot comes first, because its command is sent before the read occupies this thread.
        // QEMU switches the disk meanwhile: neither depends on the other.
        let (pivoted, read) = tokio::join!(self.pivot_to(overlay), self.read(approach, buffer));
        let pivoted = self.pivoted(id, pivoted);
        let (fresh, taken) = read?;
        // The fresh pages are out of the tracking now, and in no layer.
        pivoted
            .and(taken)
            .inspect_err(|_| self.running.ground.carry(&fresh))
    }

    /// Lists the pages to take, and reads them. After an inner error the pages are out of the
    /// tracking.
    async fn read(
        &self,
        approach: &Approach,
        buffer: Vec<u8>,
    ) -> Result<(Vec<PageRun>, Result<TakenMemory>)> {
        let scan = || self.written(tracking(approach.plan.mode));
        let fresh = debug_span!("scan").in_scope(scan)?;
        let taken = self
            .read_stopped(approach.scope, &fresh, buffer)
            .instrument(debug_span!("read"))
            .await;
        Ok((fresh, taken))
    }

    async fn read_stopped(
        &self,
        scope: Scope,
        fresh: &[PageRun],
        mut buffer: Vec<u8>,
    ) -> Result<TakenMemory> {
        let memory = self.machine().memory();
        let runs = match scope {
            Scope::Delta => pages::union(fresh.to_vec(), &self.running.ground.carried),
            Scope::Whole => vec![PageRun {
                first: 0,
                count: memory.bytes() / PAGE,
            }],
        };
        let runs = memory::coalesce(runs, RUNS_MAX);
        if pages::total_bytes(&runs) > BUFFER_BYTES {
            return self.write_stopped(runs).await;
        }
        buffer.reserve_exact(pages::total_bytes(&runs) as usize);
        in_place(|| memory.read(&pages::to_bytes(&runs), &mut buffer))
            .map_err(engine_error("read its memory"))?;
        Ok(TakenMemory::Held {
            runs,
            bytes: buffer,
        })
    }

    /// Writes pages to a layer while the guest is stopped. This may take long, so it leaves the
    /// thread free for a request to end the machine.
    async fn write_stopped(&self, runs: Vec<PageRun>) -> Result<TakenMemory> {
        let layer = self.write_runs(runs).await?;
        Ok(TakenMemory::Written { layer })
    }

    fn prepared(&mut self) -> (LayerId, PreparedOverlay) {
        let prepared = self.running.ground.prepared.take();
        prepared.expect("it was prepared before the stop")
    }

    pub(super) async fn pivot(&mut self) -> Result<()> {
        let (id, overlay) = self.prepared();
        let pivoted = self.pivot_to(overlay).await;
        self.pivoted(id, pivoted)
    }

    async fn pivot_to(&self, overlay: PreparedOverlay) -> Pivoted {
        self.machine()
            .pivot(overlay)
            .instrument(debug_span!("pivot"))
            .await
    }

    /// Keeps an overlay that QEMU did not switch to for the next capture.
    fn pivoted(&mut self, id: LayerId, pivoted: Pivoted) -> Result<()> {
        pivoted.map_err(|(overlay, error)| {
            // An overlay that QEMU switched to late is the active one: the head lists it, and the
            // guest writes to it.
            if !matches!(error, sandtree_engine::Error::PivotedLate) {
                self.running.ground.prepared = Some((id, overlay));
            }
            engine_error("switch its disk")(error)
        })?;
        self.host
            .reach(Step::CapturePivoted, Some(&self.running.machine))
    }

    async fn save_stream(&self, path: &Path) -> Result<()> {
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|e| Error::io("create", path, e))?;
        let saved = self
            .machine()
            .save_stream(file.into(), STREAM_DEADLINE)
            .await;
        saved.map_err(engine_error("save all of its memory"))
    }

    /// Keeps track of memory that was taken for a state which cannot be made. The scan has taken
    /// its pages out of the tracking.
    pub(super) fn carry_taken(&mut self, approach: &Approach, taken: TakenMemory) {
        let ground = &mut self.running.ground;
        match taken {
            TakenMemory::Held { runs, .. } => ground.carry(&runs),
            TakenMemory::Written { layer } => ground.stand_on(&layer, approach.covers()),
            TakenMemory::Stream => ground.lose_layers(),
        }
    }
}

fn tracking(mode: MemoryMode) -> Tracking {
    match mode {
        MemoryMode::WriteProtect => Tracking::WriteProtect,
        MemoryMode::SoftDirty => Tracking::SoftDirty,
        MemoryMode::Anonymous | MemoryMode::Full => Tracking::Anonymous,
    }
}
