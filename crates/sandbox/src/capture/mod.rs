//! Capturing a running machine: devices, memory and disk of one moment.
//!
//! ```text
//!   look at the ground -> prepare the next overlay -> copy live, while much is dirty
//!     -> stop -> devices -> which pages, re-armed -> read them -> pivot the disk -> continue
//!     -> write the layer -> record the commands -> publish -> (in the background) digest and sync
//! ```
//!
//! Always: everything of a state is taken within one stop. The head on disk lists the next overlay
//! before the guest can write to it, so that a death at any moment loses no write. At any time, the
//! layers that the machine stands on, the carried pages and the pages that are tracked as written
//! are together all of memory. When it fails: the guest continues, nothing of the state is left,
//! and pages whose tracking was re-armed are carried into the next capture. An overlay that QEMU
//! has switched to stays: it is part of the chain, not of the state.

mod disk;
mod held;
mod stop;
mod whole;

use std::fs::File;
use std::path::Path;
use std::time::Duration;

pub(crate) use disk::{CapturedDisk, as_after_power_cut};
use sandtree_engine::{GuestMemory, Machine, Tracking};
use sandtree_store::memory::{self, Layer, MemoryWriter, PAGE, PageRun};
use sandtree_store::{Head, LayerId, Owned, StagedState, StateKind, StateManifest, Tag};
use tracing::{Instrument, debug_span};

use crate::blocking::{blocking, in_place};
use crate::degradation::Degradation;
use crate::error::{Error, Result, engine_error, store_error};
use crate::fault::Step;
use crate::inner::Inner;
use crate::machine::devices::{self, Packing};
use crate::machine::ground::{Covers, NewLayer};
use crate::machine::layers::{check_overlay, read_layer};
use crate::machine::running::Running;
use crate::mode::MemoryMode;
use crate::pages;
use crate::plan::{self, Abilities, ModePlan};
use crate::states::{Checkpoint, ms};
use held::Held;
use stop::{Moment, Stop, TakenMemory};

/// If more than this is to be read, memory is first copied while the guest runs.
const LIVE_BYTES: u64 = 16 << 20;
/// How many times memory is copied live. Then the rest is copied in the stop, however much it is.
const LIVE_PASSES: usize = 3;
/// Up to this much is read into a buffer in the stop. More than this is written to a file before
/// the guest continues.
const BUFFER_BYTES: u64 = 128 << 20;
/// What a guest may write between the last look at its memory and the stop, on top of a quarter.
const SLACK_BYTES: u64 = 1 << 20;
/// Memory is copied in pieces of this.
const PIECE_BYTES: u64 = 4 << 20;
/// More runs than this are joined over their smallest gaps: each run is a mapping in every machine
/// that is restored from them.
const RUNS_MAX: usize = 4096;

/// What a capture is for.
#[derive(Debug, Clone)]
pub(crate) struct Purpose {
    pub kind: StateKind,
    pub tag: Option<Tag>,
    pub after: After,
}

/// What becomes of the guest once it is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    Continue,
    StayStopped,
}

/// A published state, and what it cost.
#[derive(Debug, Clone)]
pub(crate) struct Captured {
    pub manifest: StateManifest,
    pub pause: Duration,
}

impl Captured {
    pub fn report(&self, total: Duration) -> Checkpoint {
        let manifest = &self.manifest;
        Checkpoint {
            tag: manifest.tag.as_ref().map(ToString::to_string),
            id: manifest.id.to_string(),
            mode: manifest.mode.clone().unwrap_or_default(),
            degraded: Degradation::list(&manifest.degraded),
            pause_ms: ms(self.pause),
            total_ms: ms(total),
            memory_bytes: manifest.memory_layer_bytes,
            disk_bytes: manifest.disk_layer_bytes,
        }
    }
}

/// Everything a capture works on.
pub(crate) struct Capture<'a> {
    pub host: &'a Inner,
    pub owned: &'a Owned,
    pub running: &'a mut Running,
    pub wanted: MemoryMode,
    pub disk_bytes: u64,
}

/// Everything that a state is made of.
struct Taken {
    moment: Moment,
    devices: Vec<u8>,
    staged: StagedState,
    /// The layers of the disk that was switched from.
    disk: Vec<LayerId>,
    disk_whole: bool,
    /// What the layers of its live passes hold.
    live_bytes: u64,
}

/// How memory is taken this time.
struct Approach {
    plan: ModePlan,
    scope: Scope,
    /// Room for what is read in the stop. It is touched before, so that the stop has no page
    /// faults.
    buffer: Vec<u8>,
}

impl Approach {
    fn covers(&self) -> Covers {
        match (self.scope, self.plan.mode) {
            (Scope::Whole, _) => Covers::Everything,
            (Scope::Delta, MemoryMode::Anonymous) => Covers::SinceStart,
            (Scope::Delta, _) => Covers::SinceLast,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// What was written since.
    Delta,
    /// Everything, because there is nothing to put a delta on.
    Whole,
}

impl Capture<'_> {
    pub async fn take(&mut self, purpose: Purpose) -> Result<Captured> {
        let mut approach = self.approach();
        let disk_whole = self.look_at_disk(&mut approach);
        let disk = self
            .prepare_overlay()
            .instrument(debug_span!("prepare"))
            .await?;
        self.host
            .reach(Step::CapturePrepared, Some(&self.running.machine))?;
        let live_bytes = self
            .copy_live(&mut approach)
            .instrument(debug_span!("copy live"))
            .await?;
        let staged = self
            .owned
            .stage_state()
            .map_err(store_error("begin a state"))?;
        let devices = self
            .machine()
            .prepare_devices()
            .await
            .map_err(engine_error("prepare to save its devices"))?;
        let stop = Stop {
            staged: staged.path(),
            devices: &devices,
            after: purpose.after,
        };
        self.running.hub.mounts().hold().await;
        let moment = self.moment(&mut approach, stop).await;
        if moment.is_err() || purpose.after == After::Continue {
            self.running.hub.mounts().go();
        }
        let devices = self
            .machine()
            .take_devices(devices)
            .await
            .map_err(engine_error("save its devices"));
        let moment = moment?;
        let devices = match devices {
            Ok(devices) => devices,
            Err(error) => {
                self.carry_taken(&approach, moment.memory);
                if purpose.after == After::Continue {
                    self.give_up_writing(disk.last()).await;
                }
                return Err(error);
            }
        };
        // From here on the guest runs, or stays stopped by intention: the caller decides what to do
        // with it.
        let taken = Taken {
            moment,
            devices,
            staged,
            disk,
            disk_whole,
            live_bytes,
        };
        let finished = self
            .finish(&approach, taken, purpose)
            .instrument(debug_span!("finish"))
            .await;
        finished.inspect_err(
            |error| tracing::warn!(%error, "a capture failed after the guest continued"),
        )
    }

    fn machine(&self) -> &Machine {
        &self.running.machine
    }

    fn head(&self) -> Result<Head> {
        self.owned
            .head()
            .map_err(store_error("read where a sandbox stands"))
    }

    fn approach(&self) -> Approach {
        let mut plan = plan::choose(self.wanted, &self.abilities());
        let outside = self.machine().uncaptured_memory();
        if !outside.is_empty() && plan.mode != MemoryMode::Full {
            let degraded = Degradation::DeviceMemory {
                mode: plan.mode,
                devices: outside.to_vec(),
            };
            plan = ModePlan {
                mode: MemoryMode::Full,
                degraded: vec![degraded],
            };
        }
        let damage = match &self.running.ground.layers {
            None => Some("it stands on no memory layers".to_owned()),
            Some(layers) => layers.iter().find_map(|id| self.memory_damage(id)),
        };
        let scope = match damage {
            Some(reason) if plan.mode != MemoryMode::Full => {
                plan.degraded.push(Degradation::WholeMemory { reason });
                Scope::Whole
            }
            _ => Scope::Delta,
        };
        Approach {
            plan,
            scope,
            buffer: Vec::new(),
        }
    }

    /// Why a durable state cannot stand on a memory layer, if it cannot.
    fn memory_damage(&self, id: &LayerId) -> Option<String> {
        let doubtful = || self.owned.is_doubtful_memory(id).unwrap_or(false);
        let damage = read_layer(self.owned, id).err();
        damage.or_else(|| doubtful().then(|| not_synced(&self.owned.memory_layer(id))))
    }

    fn abilities(&self) -> Abilities {
        let found = Abilities::from(&self.running.tracking);
        let registered = self
            .machine()
            .memory()
            .write_protected()
            .map_err(|untracked| untracked.to_string());
        // A machine may track its writes, and its caller may all the same not look into it.
        Abilities {
            write_protect: found.write_protect.and(registered),
            ..found
        }
    }

    /// Whether the disk must be copied as a whole, because a layer below it is gone.
    fn look_at_disk(&self, approach: &mut Approach) -> bool {
        let damage = self.disk_damage();
        approach.plan.degraded.extend(damage.clone());
        damage.is_some()
    }

    fn disk_damage(&self) -> Option<Degradation> {
        let head = self.head().ok()?;
        let doubtful = |id| self.owned.is_doubtful_disk(id).unwrap_or(false);
        let damage = self
            .running
            .ground
            .frozen(&head.disk)
            .iter()
            .find_map(|id| {
                let damage = check_overlay(self.owned, id).err();
                damage.or_else(|| doubtful(id).then(|| not_synced(&self.owned.disk_layer(id))))
            });
        damage.map(|reason| Degradation::WholeDisk { reason })
    }

    /// Makes the overlay that the guest will write to next, or uses the one that a failed capture
    /// left. Returns the layers below it.
    async fn prepare_overlay(&mut self) -> Result<Vec<LayerId>> {
        let mut head = self.head()?;
        if self.running.ground.prepared.is_some() {
            head.disk.pop();
            return Ok(head.disk);
        }
        let id = self
            .owned
            .create_disk(self.disk_bytes)
            .map_err(store_error("make an overlay"))?;
        let path = self.owned.disk_layer(&id);
        // The head that lists the overlay is durable, so the overlay must be durable, too.
        self.owned
            .sync_overlay(&id)
            .map_err(store_error("sync an overlay"))?;
        let prepared = match File::options().read(true).write(true).open(&path) {
            Ok(file) => self
                .machine()
                .prepare_overlay(file)
                .await
                .map_err(engine_error("prepare an overlay")),
            Err(source) => Err(Error::io("open", &path, source)),
        };
        let prepared = prepared.inspect_err(|_| self.discard_overlay(&id))?;
        // The head lists the overlay before the guest writes to it. An empty overlay changes
        // nothing for a machine that starts from that head.
        let below = head.disk.clone();
        head.disk.push(id.clone());
        if let Err(error) = self.owned.set_head(&head) {
            self.machine()
                .discard_overlay(prepared)
                .await
                .map_err(engine_error("drop an overlay"))?;
            self.discard_overlay(&id);
            return Err(store_error("write where a sandbox stands")(error));
        }
        self.running.ground.prepared = Some((id, prepared));
        Ok(below)
    }

    /// Copies dirty pages while the guest runs, until few are left. Each pass writes its own layer:
    /// a page that changes meanwhile is in the next layer. Returns how many bytes were written.
    async fn copy_live(&mut self, approach: &mut Approach) -> Result<u64> {
        let mut total = 0;
        if approach.plan.mode != MemoryMode::WriteProtect || approach.scope == Scope::Whole {
            return Ok(total);
        }
        let mut last = u64::MAX;
        for _ in 0..LIVE_PASSES {
            let memory = self.machine().memory().clone();
            let pending = blocking(move || memory.pending())
                .await
                .map_err(engine_error("look at its memory"))?;
            // If the guest writes as fast as its memory is copied, more passes do not help.
            if pending < LIVE_BYTES || pending > last / 2 {
                approach.buffer = blocking(move || touched(pending)).await;
                return Ok(total);
            }
            last = pending;
            let runs = self.written(Tracking::WriteProtect)?;
            let layer = self.write_live(&runs).await;
            let layer = layer.inspect_err(|_| self.running.ground.carry(&runs))?;
            self.running.ground.push(&layer);
            total += layer.layer.len_bytes();
            self.host
                .reach(Step::CaptureLive, Some(&self.running.machine))?;
        }
        Ok(total)
    }

    fn written(&self, how: Tracking) -> Result<Vec<PageRun>> {
        let runs = in_place(|| self.machine().memory().written(how))
            .map_err(engine_error("list written pages"))?;
        Ok(pages::from_bytes(&runs))
    }

    async fn write_live(&self, runs: &[PageRun]) -> Result<NewLayer> {
        self.write_runs(memory::coalesce(runs.to_vec(), RUNS_MAX))
            .await
    }

    /// Copies runs of the machine's memory into a new layer.
    async fn write_runs(&self, runs: Vec<PageRun>) -> Result<NewLayer> {
        let memory = self.machine().memory().clone();
        let (id, file) = self
            .owned
            .memory_file()
            .map_err(store_error("make a memory layer"))?;
        let written = blocking(move || copy_runs(&memory, &runs, file)).await;
        self.kept(id, written)
    }

    /// Returns a layer that was written, or removes it if the writing failed.
    fn kept(&self, id: LayerId, written: Result<Layer>) -> Result<NewLayer> {
        match written {
            Ok(layer) => Ok(NewLayer { id, layer }),
            Err(error) => {
                self.discard_layer(&id);
                Err(error)
            }
        }
    }

    fn discard_layer(&self, id: &LayerId) {
        if let Err(error) = self.owned.discard_memory(id) {
            tracing::warn!(%error, %id, "an unfinished memory layer stays until the next collection");
        }
    }

    fn discard_overlay(&self, id: &LayerId) {
        if let Err(error) = self.owned.discard_disk(id) {
            tracing::warn!(%error, %id, "an unused overlay stays until the next collection");
        }
    }

    /// Makes QEMU open the frozen overlay read-only, so that it cannot write to it any more,
    /// whatever happens to QEMU: others share the file.
    async fn give_up_writing(&self, frozen: Option<&LayerId>) {
        let Some(path) = frozen.map(|id| self.owned.disk_layer(id)) else {
            return;
        };
        let given_up = match File::open(&path) {
            Ok(file) => self
                .machine()
                .give_up_writing(file)
                .await
                .map_err(engine_error("open an overlay read-only")),
            Err(source) => Err(Error::io("open", &path, source)),
        };
        if let Err(error) = given_up {
            tracing::warn!(%error, "QEMU keeps a writable descriptor of a layer until the machine ends");
        }
    }

    /// Writes and publishes what was taken. The guest runs meanwhile.
    async fn finish(
        &mut self,
        approach: &Approach,
        taken: Taken,
        purpose: Purpose,
    ) -> Result<Captured> {
        let Taken {
            moment: Moment { memory, pause },
            devices,
            staged,
            disk,
            disk_whole,
            live_bytes,
        } = taken;
        let layer = self.write_memory(approach, memory).await?;
        if layer.is_some() {
            self.write_devices(&staged.path().join("devices"), devices)
                .await?;
        }
        self.host
            .reach(Step::CaptureWritten, Some(&self.running.machine))?;
        if purpose.after == After::Continue {
            self.give_up_writing(disk.last()).await;
        }
        let disk = if disk_whole {
            vec![self.copy_disk().await?]
        } else {
            disk
        };
        disk.last()
            .map_or(Ok(()), |id| self.owned.freeze_disk(id))
            .map_err(store_error("seal an overlay"))?;
        let records = self.running.hub.record(staged.path().join("execs")).await;
        let mut manifest =
            self.manifest(approach, layer.as_ref(), purpose, disk, pause, &records?)?;
        manifest.memory_layer_bytes += live_bytes;
        self.host
            .reach(Step::CapturePublish, Some(&self.running.machine))?;
        let manifest = self
            .owned
            .publish_state(staged, manifest)
            .map_err(store_error("publish a state"))?;
        Ok(Captured { manifest, pause })
    }

    /// Puts the pages into a layer, on which the machine stands from then on.
    async fn write_memory(
        &mut self,
        approach: &Approach,
        taken: TakenMemory,
    ) -> Result<Option<NewLayer>> {
        let layer = match taken {
            TakenMemory::Stream => {
                self.running.ground.lose_layers();
                return Ok(None);
            }
            TakenMemory::Written { layer } => layer,
            TakenMemory::Held { runs, bytes } => {
                let written = self
                    .write_held(runs.clone(), bytes, approach.covers())
                    .await;
                written.inspect_err(|_| self.running.ground.carry(&runs))?
            }
        };
        self.running.ground.stand_on(&layer, approach.covers());
        Ok(Some(layer))
    }

    async fn write_held(
        &self,
        runs: Vec<PageRun>,
        bytes: Vec<u8>,
        covers: Covers,
    ) -> Result<NewLayer> {
        let below = self.running.ground.below(covers).iter();
        let held = Held {
            runs,
            bytes,
            ram_bytes: self.machine().memory().bytes(),
            below: below.map(|id| self.owned.memory_layer(id)).collect(),
        };
        let (id, file) = self
            .owned
            .memory_file()
            .map_err(store_error("make a memory layer"))?;
        let written = blocking(move || held.write(file)).await;
        self.kept(id, written)
    }

    async fn write_devices(&self, path: &Path, devices: Vec<u8>) -> Result<()> {
        let target = path.to_owned();
        let packing = Packing::of(&self.running.record);
        let written = blocking(move || devices::write(&target, &devices, packing)).await;
        written.map_err(|e| Error::io("write", path, e))
    }
}

/// An empty buffer whose pages exist. It has room for more than `pending` bytes, because the guest
/// writes until it is stopped.
fn touched(pending: u64) -> Vec<u8> {
    let bytes = pending + pending / 4 + SLACK_BYTES;
    let mut buffer = vec![1; bytes.min(BUFFER_BYTES) as usize];
    buffer.clear();
    buffer
}

fn not_synced(path: &Path) -> String {
    format!(
        "{} could not be synced, so nothing that needs it would be durable",
        path.display()
    )
}

/// Copies runs of a machine's memory into a layer, piece by piece.
fn copy_runs(memory: &GuestMemory, runs: &[PageRun], file: File) -> Result<Layer> {
    let mut writer =
        MemoryWriter::new(file, memory.bytes()).map_err(store_error("write a memory layer"))?;
    let mut bytes = Vec::new();
    for run in runs {
        let end = run.first + run.count;
        for first in (run.first..end).step_by((PIECE_BYTES / PAGE) as usize) {
            let piece = PageRun {
                first,
                count: (PIECE_BYTES / PAGE).min(end - first),
            };
            bytes.clear();
            memory
                .read(&pages::to_bytes(&[piece]), &mut bytes)
                .map_err(engine_error("read its memory"))?;
            writer
                .append(first, &bytes)
                .map_err(store_error("write a memory layer"))?;
        }
    }
    writer.finish().map_err(store_error("write a memory layer"))
}
