//! Brings a machine up from a state: the only way for create, revert, fork and resume.
//!
//! ```text
//!   check the state -> start QEMU stopped, layers mapped -> load devices -> (Loaded) -> continue -> acknowledged
//!                           \ not mapped: one flat file of all layers, and again
//! ```
//!
//! Always: a guest that continues has acknowledged its new generation, entropy, time and name, or
//! it does not count as restored. The state is only read. When it fails: the machine that was
//! started is killed; the state, and a machine that ran before, are unchanged.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sandtree_engine::{
    self as engine, Accel, Engine, Events, Machine, MachineSpec, MapEntry, Memory, Preload, Spare,
    Start,
};
use sandtree_proto::{HookFailure, Identity, Rebirth};
use sandtree_store::memory::{self, Layer, PAGE};
use sandtree_store::{
    LayerId, MachineRecord, MemoryState, Owned, SandboxDir, StateManifest, StateSource,
};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tracing::{Instrument, debug_span};

use super::boot;
use super::clock::Telling;
use super::compat::{self, Fit};
use super::devices::{self, Packing};
use super::ground::Ground;
use super::identity::{self, Belongs};
use super::layers::{check_overlay, read_layer};
use super::running::{self, Running};
use super::spec::{Kernel, Shape, machine_spec};
use crate::blocking::blocking;
use crate::console::Console;
use crate::degradation::Degradation;
use crate::error::{Error, Result, engine_error, store_error};
use crate::fault::Step;
use crate::files::open;
use crate::guest::Guest;
use crate::hub::{self, ExecRecord, Gate, Hub, HubSpec};
use crate::inner::Inner;
use crate::link::LinkError;
use crate::moment::boot_id;
use crate::mounts::{self, MountPort};
use crate::states::{RestoreReport, ms};

/// As many layers as a machine has descriptors for.
const LAYERS_MAX: usize = 64;
/// Linux allows a process some 65,000 mappings, and each piece of a layer splits what it is laid
/// over.
const MAPPINGS_MAX: usize = 16 * 1024;
/// How many pieces the memory layers of a state may have: the tables take 64 MiB then. The layers
/// of a capture have far fewer.
const PIECES_MAX: usize = 1 << 22;
/// How long a guest that continues may take to acknowledge. The agent limits the time of hooks in
/// the guest.
pub(super) const ACKNOWLEDGE: Duration = Duration::from_secs(60);

/// A machine that holds a state and does not run yet.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub machine: Machine,
    pub(super) port: UnixStream,
    pub(super) console: Console,
    pub(super) events: Events,
    pub(super) ground: Ground,
    pub(super) record: MachineRecord,
    pub(super) degraded: Vec<Degradation>,
    provenance: Provenance,
    manifest: StateManifest,
    /// Where the kept output of the state's commands is.
    kept: PathBuf,
    /// Why the guest needs another clock.
    pub(super) other_tsc: Option<String>,
    /// How long the loading took.
    loading: Duration,
}

/// When the QEMU of a restored machine was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Provenance {
    ForThis,
    Ahead,
}

/// How long the parts of a restore took, from its beginning. The time between loading and
/// continuing does not count: a machine waits there for others.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RestoreTimes {
    /// Until the guest ran.
    pub running: Duration,
    /// Until its agent had acknowledged.
    pub acknowledged: Duration,
}

/// A machine that has continued from a state.
#[derive(Debug)]
pub(crate) struct Restored {
    pub running: Running,
    pub times: RestoreTimes,
    pub from_spare: bool,
    /// Hooks in the guest that failed.
    pub hooks: Vec<HookFailure>,
}

/// What a restored guest is connected with.
pub(crate) struct Connections {
    pub hub: HubChoice,
    pub belongs: Belongs,
}

pub(crate) enum HubChoice {
    /// A new hub, which knows the commands of the state.
    New,
    /// The hub that waited while the sandbox was paused.
    Kept { hub: Hub, execs: PathBuf },
}

/// A state that was found whole, and what its memory layers hold.
pub(crate) struct Checked {
    source: StateSource,
    layers: Vec<Layer>,
}

impl Restored {
    pub fn report(&self, total: Duration) -> RestoreReport {
        RestoreReport {
            degraded: self.running.degraded.clone(),
            hooks_failed: self
                .hooks
                .iter()
                .map(|hook| format!("{}: {}", hook.name, hook.what))
                .collect(),
            from_spare: self.from_spare,
            running_ms: ms(self.times.running),
            acknowledged_ms: ms(self.times.acknowledged),
            total_ms: ms(total),
        }
    }
}

impl Checked {
    pub fn manifest(&self) -> &StateManifest {
        self.source.manifest()
    }
}

/// Refuses a state that is not whole, before anything is done for it.
pub(crate) fn check(dir: &SandboxDir, source: StateSource) -> Result<Checked> {
    check_written(&source)?;
    let manifest = source.manifest();
    manifest
        .disk
        .iter()
        .try_for_each(|id| check_overlay(dir, id))
        .map_err(|what| broken(manifest, what))?;
    let layers = whole_layers(dir, manifest)?;
    Ok(Checked { source, layers })
}

/// The same for a kernel state, whose machine continues on a disk of its own.
pub(crate) fn check_kernel(dir: &SandboxDir, source: StateSource) -> Result<Checked> {
    check_written(&source)?;
    let layers = whole_layers(dir, source.manifest())?;
    Ok(Checked { source, layers })
}

fn broken(manifest: &StateManifest, what: String) -> Error {
    Error::BrokenState {
        state: label(manifest),
        what,
    }
}

fn whole_layers(dir: &SandboxDir, manifest: &StateManifest) -> Result<Vec<Layer>> {
    let MemoryState::Layers { layers } = &manifest.memory else {
        return Ok(Vec::new());
    };
    let of_this_size = |layer: &Layer| layer.ram_bytes == manifest.ram_bytes;
    let mut pieces = 0;
    let read = |id| {
        let layer = read_layer(dir, id).map_err(|what| broken(manifest, what))?;
        pieces += layer.data.len() + layer.zero.len();
        if pieces <= PIECES_MAX {
            return Ok((id, layer));
        }
        let what = format!("its memory is in more than {PIECES_MAX} pieces");
        Err(broken(manifest, what))
    };
    let layers = layers.iter().map(read).collect::<Result<Vec<_>>>()?;
    match layers.iter().find(|(_, layer)| !of_this_size(layer)) {
        Some((id, _)) => {
            let path = dir.memory_layer(id);
            let what = format!("{} is of a machine of another size", path.display());
            Err(broken(manifest, what))
        }
        None => Ok(layers.into_iter().map(|(_, layer)| layer).collect()),
    }
}

/// Refuses a state that may differ on the disk from the captured one.
pub(crate) fn check_written(source: &StateSource) -> Result<()> {
    let manifest = source.manifest();
    if manifest.boot_id == boot_id() || source.is_sealed().map_err(store_error("read a state"))? {
        return Ok(());
    }
    let what = "the host went down before it was written out".into();
    Err(Error::BrokenState {
        state: label(manifest),
        what,
    })
}

pub(crate) fn label(manifest: &StateManifest) -> String {
    manifest
        .tag
        .as_ref()
        .map_or_else(|| manifest.id.to_string(), ToString::to_string)
}

/// What a state is loaded with.
pub(crate) struct Loading<'a> {
    pub host: &'a Inner,
    pub owned: &'a Owned,
    /// The layers of the machine's disk.
    pub disk: &'a [LayerId],
    /// A QEMU that was started ahead, used if it fits the state.
    pub spare: Option<Spare>,
}

/// Loads a state into a machine on a sandbox's disk. The machine is stopped then.
pub(crate) async fn load(loading: Loading<'_>, state: Checked) -> Result<Loaded> {
    let began = Instant::now();
    let Loading {
        host,
        owned,
        disk,
        spare,
    } = loading;
    let Checked { source, layers } = state;
    host.reach(Step::RestoreChecked, None)?;
    let engine = host.engine().await?;
    let Fit {
        record,
        accel,
        other_tsc,
    } = compat::for_state(host, owned.record(), source.manifest()).await?;
    let devices = open_devices(&source, &record).await?;
    let starting = Starting {
        host,
        engine,
        owned,
        disk,
        machine: &record,
        accel,
    };
    let Started {
        mut machine,
        provenance,
        mut degraded,
    } = starting
        .start(source.manifest(), &layers, spare)
        .instrument(debug_span!("start"))
        .await?;
    let console = machine
        .take_console()
        .expect("a fresh machine has its console");
    let console = Console::keep(console, owned.console())
        .map_err(|e| Error::io("open", owned.console(), e))?;
    let events = machine.events();
    host.reach(Step::RestoreStarted, Some(&machine))?;
    degraded.extend(load_devices(&machine, devices, &source.manifest().memory).await?);
    host.reach(Step::RestoreLoaded, Some(&machine))?;
    let port = machine.take_link().expect("a fresh machine has its link");
    let ground = match &source.manifest().memory {
        MemoryState::Layers { layers: ids } => Ground::new(ids.clone(), runs(&layers)),
        MemoryState::Stream | MemoryState::None => Ground::without_layers(),
    };
    let manifest = source.manifest().clone();
    let kept = source.execs();
    Ok(Loaded {
        machine,
        port,
        console,
        events,
        ground,
        record,
        degraded,
        provenance,
        manifest,
        kept,
        other_tsc,
        loading: began.elapsed(),
    })
}

/// The state of the devices, as QEMU reads it.
async fn open_devices(source: &StateSource, machine: &MachineRecord) -> Result<File> {
    let path = source.devices();
    let file = open(&path)?;
    let packing = match source.manifest().memory {
        MemoryState::Layers { .. } => Packing::of(machine),
        // QEMU's own stream.
        _ => Packing::Sparse,
    };
    if packing == Packing::Sparse {
        return Ok(file);
    }
    let unpacked = blocking(move || devices::unpacked(file)).await;
    unpacked.map_err(|e| Error::io("read", path, e))
}

/// Loads everything that is not in layers.
async fn load_devices(
    machine: &Machine,
    devices: File,
    memory: &MemoryState,
) -> Result<Option<Degradation>> {
    let loaded = machine
        .load(OwnedFd::from(devices))
        .instrument(debug_span!("load"))
        .await;
    loaded.map_err(engine_error("load the state"))?;
    if !matches!(memory, MemoryState::Layers { .. }) {
        return Ok(None);
    }
    let restored = machine.restore_firmware();
    Ok(restored
        .err()
        .map(|error| Degradation::FirmwareNotRestored {
            reason: engine_error("write its firmware")(error).one_line(),
        }))
}

fn runs(layers: &[Layer]) -> usize {
    layers
        .iter()
        .map(|layer| layer.data.len() + layer.zero.len())
        .sum()
}

struct Starting<'a> {
    host: &'a Inner,
    engine: &'a Engine,
    owned: &'a Owned,
    disk: &'a [LayerId],
    machine: &'a MachineRecord,
    accel: Accel,
}

/// A machine that waits for its state.
struct Started {
    machine: Machine,
    provenance: Provenance,
    degraded: Vec<Degradation>,
}

impl Started {
    fn fresh(machine: Machine) -> Self {
        Self {
            machine,
            provenance: Provenance::ForThis,
            degraded: Vec::new(),
        }
    }
}

impl Starting<'_> {
    /// Starts a machine with the layers mapped. Where that does not work, starts it with a flat
    /// file made of them, and returns the reason as a degradation.
    async fn start(
        &self,
        manifest: &StateManifest,
        layers: &[Layer],
        spare: Option<Spare>,
    ) -> Result<Started> {
        let MemoryState::Layers { layers: ids } = &manifest.memory else {
            return Ok(Started::fresh(
                self.machine(Memory::Empty, Preload::Use).await?,
            ));
        };
        let plan = memory::plan(layers);
        let reason = match self.mapped(ids, &plan, spare).await {
            Ok(started) => return Ok(started),
            Err(Error::Engine {
                source: engine::Error::NotMapped { reason },
                ..
            }) => reason,
            Err(error) => return Err(error),
        };
        let file = self.flatten(ids).await?;
        let machine = self.machine(Memory::Flat { file }, Preload::Skip).await?;
        Ok(Started {
            degraded: vec![Degradation::FlatMemory { reason }],
            ..Started::fresh(machine)
        })
    }

    async fn mapped(
        &self,
        ids: &[LayerId],
        plan: &[memory::Mapping],
        spare: Option<Spare>,
    ) -> Result<Started> {
        if ids.len() > LAYERS_MAX || plan.len() > MAPPINGS_MAX {
            let reason = format!(
                "{} layers in {} pieces are too many to map",
                ids.len(),
                plan.len()
            );
            return Err(engine_error("map memory layers")(
                engine::Error::NotMapped { reason },
            ));
        }
        if let Some(machine) = self.filled(ids, plan, spare).await? {
            return Ok(Started {
                provenance: Provenance::Ahead,
                ..Started::fresh(machine)
            });
        }
        let machine = self.machine(self.memory(ids, plan)?, Preload::Use).await?;
        Ok(Started::fresh(machine))
    }

    /// The machine made of a spare, if there is one that fits. One that fails costs only time: a
    /// machine started now is the same.
    async fn filled(
        &self,
        ids: &[LayerId],
        plan: &[memory::Mapping],
        spare: Option<Spare>,
    ) -> Result<Option<Machine>> {
        let Some(spare) = spare else { return Ok(None) };
        let spec = self.spec(self.memory(ids, plan)?, Preload::Use)?;
        if !spare.fits(&spec) {
            return Ok(None);
        }
        let filled = spare.fill(spec).await;
        Ok(filled
            .inspect_err(|error| tracing::warn!(%error, "a spare machine cannot be used"))
            .ok())
    }

    fn memory(&self, ids: &[LayerId], plan: &[memory::Mapping]) -> Result<Memory> {
        let layers = ids
            .iter()
            .map(|id| open(&self.owned.memory_layer(id)))
            .collect::<Result<_>>()?;
        let entry = |mapping: &memory::Mapping| MapEntry {
            guest_offset: mapping.first_page * PAGE,
            bytes: mapping.pages * PAGE,
            layer: mapping.layer,
            file_offset: mapping.file_offset,
        };
        Ok(Memory::Mapped {
            entries: plan.iter().map(entry).collect(),
            layers,
        })
    }

    async fn machine(&self, memory: Memory, preload: Preload) -> Result<Machine> {
        let spec = self.spec(memory, preload)?;
        self.engine.start(spec).await.map_err(engine_error("start"))
    }

    fn spec(&self, memory: Memory, preload: Preload) -> Result<MachineSpec> {
        let shape = Shape {
            // The state has its kernel in it.
            kernel: Kernel::Boots,
            memory,
            preload,
            start: Start::Incoming,
            disk: self.disk,
            machine: self.machine,
        };
        machine_spec(self.host, self.owned, self.accel, shape)
    }

    /// Makes a file without a name that holds all of memory, for this machine alone.
    async fn flatten(&self, ids: &[LayerId]) -> Result<File> {
        let file = self
            .owned
            .unnamed_memory()
            .map_err(store_error("make a flat file of memory"))?;
        // The machine's own user opens it anew, by its descriptor.
        file.set_permissions(std::fs::Permissions::from_mode(0o666))
            .map_err(|e| Error::io("share", "a flat file of memory", e))?;
        let paths: Vec<PathBuf> = ids.iter().map(|id| self.owned.memory_layer(id)).collect();
        blocking(move || {
            let files = paths
                .iter()
                .map(|path| open(path))
                .collect::<Result<Vec<_>>>()?;
            let read = |file: File| {
                Layer::read(&file)
                    .map(|layer| (layer, file))
                    .map_err(store_error("read a memory layer"))
            };
            let layers = files.into_iter().map(read).collect::<Result<Vec<_>>>()?;
            memory::flatten(&layers, &file).map_err(store_error("make a flat file of memory"))?;
            Ok(file)
        })
        .await
    }
}

impl Loaded {
    /// Continues the guest, and waits until its agent has acknowledged its new identity.
    pub async fn continue_guest(
        self,
        host: &Inner,
        dir: &SandboxDir,
        connections: Connections,
    ) -> Result<Restored> {
        let Loaded {
            mut machine,
            port,
            mut console,
            mut events,
            ground,
            record,
            mut degraded,
            provenance,
            manifest,
            kept,
            other_tsc,
            loading,
        } = self;
        let began = Instant::now();
        let ports = (port, machine.take_mounts());
        let connected = connections.hub.connect(ports, dir, &manifest, kept).await?;
        degraded.extend(serve_mounts(&connected.hub, dir, &manifest));
        let rebirth = identity::rebirth(dir.record(), connections.belongs, manifest.disk_bytes);
        let waking = Waking {
            host,
            machine: &machine,
            hub: &connected.hub,
            loading,
            began,
        };
        let woken = tokio::select! {
            woken = waking.wake(rebirth) => woken,
            error = boot::ends_or_stalls(host, &machine, &mut events, &mut console) => Err(error),
        };
        let woken = match woken {
            Ok(woken) => woken,
            Err(error) => {
                machine.kill().await;
                connected.give_up().await;
                return Err(error.with_console(&console));
            }
        };
        if let Some(reason) = other_tsc {
            degraded.push(leave_tsc(&woken.guest, reason).await);
        }
        let engine = host.engine().await?;
        let running = Running {
            machine,
            hub: connected.hub,
            guest: woken.guest,
            events: Some(events),
            gate: connected.gate,
            forwards: Vec::new(),
            console,
            ground,
            tracking: engine.verdicts().tracking.clone(),
            record,
            execs: connected.execs,
            degraded: degraded.into_iter().chain(woken.degraded).collect(),
            created: None,
        };
        Ok(Restored {
            running,
            times: woken.times,
            from_spare: provenance == Provenance::Ahead,
            hooks: woken.hooks,
        })
    }
}

/// The hub of a restored guest.
struct Connected {
    hub: Hub,
    /// Where the hub keeps the output of detached commands.
    execs: PathBuf,
    gate: Option<mpsc::Receiver<Gate>>,
    /// Whether the hub was started for this restore.
    is_new: bool,
}

impl HubChoice {
    /// Connects the hub with the guest's port. `kept` is the directory of the output that the state
    /// keeps of its commands.
    async fn connect(
        self,
        (port, mounts): (UnixStream, Option<UnixStream>),
        dir: &SandboxDir,
        manifest: &StateManifest,
        kept: PathBuf,
    ) -> Result<Connected> {
        match self {
            HubChoice::Kept { hub, execs } => {
                hub.mounts().reconnect(mounts);
                hub.reconnect(port).await;
                Ok(Connected {
                    hub,
                    execs,
                    gate: None,
                    is_new: false,
                })
            }
            HubChoice::New => {
                let execs = running::fresh_execs(dir)?;
                let (gate, gated) = running::gate(dir.record());
                let restored = hub::Restored {
                    records: records(manifest)?,
                    from: kept,
                };
                let spec = HubSpec {
                    execs: execs.clone(),
                    restored: Some(restored),
                    gate,
                    mounts: MountPort::new(mounts),
                };
                Ok(Connected {
                    hub: Hub::start(port, spec),
                    execs,
                    gate: gated,
                    is_new: true,
                })
            }
        }
    }
}

impl Connected {
    /// Ends a new hub after a restore that failed. A kept hub waits for the next resume.
    async fn give_up(self) {
        let Self {
            hub, execs, is_new, ..
        } = self;
        if is_new {
            hub.close("the state could not be restored".into()).await;
            // If this fails, `clear_execs` removes the directory when the sandbox next gets a
            // machine.
            drop(std::fs::remove_dir_all(&execs));
        } else {
            hub.suspend("the sandbox could not be resumed".into()).await;
        }
    }
}

/// Gives the guest another clock source: the time-stamp counter has another rate here.
pub(super) async fn leave_tsc(guest: &Guest, reason: String) -> Degradation {
    match guest.leave_tsc().await {
        Ok(()) => Degradation::SlowerClock { reason },
        Err(error) => Degradation::ClockSpeed {
            reason,
            failure: error.to_string(),
        },
    }
}

fn records(manifest: &StateManifest) -> Result<Vec<ExecRecord>> {
    let broken = |error| Error::BrokenState {
        state: label(manifest),
        what: format!("its commands: {error}"),
    };
    manifest
        .execs
        .iter()
        .map(|exec| serde_json::from_value(exec.clone()).map_err(broken))
        .collect()
}

/// A guest that has acknowledged.
struct Woken {
    guest: Guest,
    times: RestoreTimes,
    hooks: Vec<HookFailure>,
    degraded: Vec<Degradation>,
}

/// A guest that is about to continue, with what it needs for that.
struct Waking<'a> {
    host: &'a Inner,
    machine: &'a Machine,
    hub: &'a Hub,
    loading: Duration,
    /// When the guest began to continue.
    began: Instant,
}

impl Waking<'_> {
    /// Continues the guest, grows its disk to the size of the sandbox's disk, and sends its agent
    /// the new identity.
    async fn wake(self, rebirth: Rebirth) -> Result<Woken> {
        let Self {
            host,
            machine,
            hub,
            loading,
            began,
        } = self;
        machine
            .cont()
            .instrument(debug_span!("cont"))
            .await
            .map_err(engine_error("continue from the state"))?;
        let running = loading + began.elapsed();
        host.reach(Step::RestoreContinued, Some(machine))?;
        if let Some(disk_bytes) = rebirth.disk_bytes {
            machine
                .resize_disk(disk_bytes)
                .await
                .map_err(engine_error("grow its disk"))?;
        }
        let patience = host.faults.acknowledge_within(ACKNOWLEDGE);
        let end = tokio::time::Instant::now() + patience;
        let acknowledged = async {
            let ready = hub.ready(patience).instrument(debug_span!("greet")).await;
            ready.map_err(|source| match source {
                LinkError::Timeout { .. } => Error::Unacknowledged { after: patience },
                source => boot::unreachable_agent(source),
            })?;
            let guest = Guest::new(hub.connect().await.map_err(boot::unreachable_agent)?);
            // Read after the waiting, so that the waiting does not make the guest's clock late.
            let telling = Telling::begin();
            let identity = Identity {
                unix_time_ns: telling.unix_time_ns(),
                ..rebirth.identity
            };
            let rebirth = Rebirth {
                identity,
                ..rebirth
            };
            host.faults.delay_message().await;
            let hooks = guest
                .restored(rebirth)
                .instrument(debug_span!("acknowledge"))
                .await?;
            let clock = telling.correct(&guest).await.err();
            let mounts = settle_mounts(hub).await.err();
            let clock = clock.map(late_clock).into_iter();
            Ok((
                guest,
                hooks,
                clock.chain(mounts.map(stale_mounts)).collect(),
            ))
        };
        let unanswered = |_| Err(Error::Unacknowledged { after: patience });
        let (guest, hooks, degraded) = tokio::time::timeout_at(end, acknowledged)
            .await
            .unwrap_or_else(unanswered)?;
        host.reach(Step::RestoreAcknowledged, Some(machine))?;
        Ok(Woken {
            guest,
            times: RestoreTimes {
                running,
                acknowledged: loading + began.elapsed(),
            },
            hooks,
            degraded,
        })
    }
}

/// Begins to serve the mounts that a restored guest has, before it continues. Returns those that
/// it cannot use here; the rest of the guest continues without them.
fn serve_mounts(hub: &Hub, dir: &SandboxDir, manifest: &StateManifest) -> Vec<Degradation> {
    if manifest.mounts.is_empty() {
        return Vec::new();
    }
    let known = mounts::known(dir);
    let served = known.and_then(|known| {
        let (directories, missing) = mounts::directories(&manifest.mounts, &known);
        hub.mounts().serve(directories).map(|()| missing)
    });
    served.unwrap_or_else(|error| {
        let reason = error.one_line();
        let points = manifest.mounts.iter();
        let unavailable = points.map(|point| Degradation::MountUnavailable {
            path: point.path.clone(),
            reason: reason.clone(),
        });
        unavailable.collect()
    })
}

/// Before anybody uses the guest: it must not show what the host had before. A guest whose mounts
/// do not get ready is admitted as well, because the rest of it works.
async fn settle_mounts(hub: &Hub) -> Result<()> {
    let settled = hub.mounts().ready().await;
    hub.admit().await;
    settled
}

fn stale_mounts(error: Error) -> Degradation {
    Degradation::MountsStale {
        reason: error.one_line(),
    }
}

/// An older agent, in an older state, cannot correct its clock.
fn late_clock(error: Error) -> Degradation {
    Degradation::LateClock {
        reason: error.one_line(),
    }
}
