//! Creates sandboxes: the order of the steps, and what is undone when a step fails.
//!
//! ```text
//!   check spec -> image -> resources -> ports -> warm state, made if missing -> record -> restore -> running
//!             \-> snapshot ------´        \------------------------------------´  |  \-> boot ------´
//!                                                           undone by removing it ´
//! ```
//!
//! Always: each step's result owns what the step made, so that an error or a dropped future at any
//! point undoes all steps. The sandbox claims its name before its machine starts, so of two
//! creations under one name one fails at once. When it fails: the error has the console's last
//! lines, and nothing else is left.

mod origin;
mod warm;

pub use origin::Prepared;
pub use warm::WarmInfo;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sandtree_store::{
    BatchId, Damaged, DamagedLayer, Digest, HostDirectories, Image, MemoryState, ModuleRecord,
    MountAccess, MountPoint, Name, Network, Owned, PublishedPort, SandboxId, SandboxRecord,
    Settings, Snapshot, SnapshotManifest, StateSource,
};
use serde::{Deserialize, Serialize};

use self::origin::{Beginning, check_as_saved};
use crate::degradation::Degradation;
use crate::driver::{Driven, Existence, Local};
use crate::error::{Error, Result, store_error};
use crate::fault::Step;
use crate::host::Host;
use crate::inner::Inner;
use crate::machine::identity::{self, Belongs};
use crate::machine::mounts::{self, remember};
use crate::machine::ports::{Listener, listen, listen_if_free};
use crate::machine::restore::{self, Connections, HubChoice, Loaded, Loading};
use crate::machine::running::Running;
use crate::moment::now_unix_ms;
use crate::mounts::MountSpec;
use crate::names::parse_name;
use crate::progress::Progress;
use crate::reference::Reference;
use crate::spec::{SandboxSpec, check_settings};
use crate::start::kept::is_about_the_state;
use crate::start::{self, Service, boot_head, check_resources, connected, running_state};
use crate::unfinished::Unfinished;
use crate::{ca, fold};

/// A sandbox that runs and that other processes do not see yet. Dropping it removes everything.
#[derive(Debug)]
pub(crate) struct Created {
    // Before the sandbox, so that the machine ends first.
    pub running: Running,
    pub unfinished: Unfinished,
}

impl Created {
    /// Fails if the machine has ended by itself: such a sandbox cannot be committed.
    pub fn check(&self) -> Result<()> {
        match self.running.machine.exit().now() {
            None => Ok(()),
            Some(exit) => Err(Error::BootEnded {
                reason: format!("QEMU ended: {exit}"),
                console: self.running.console.tail(),
            }),
        }
    }

    /// Records that it exists. Dropped before this, nothing of it is left; afterwards it stays.
    pub fn record(&mut self) -> Result<()> {
        let state = running_state(&self.running, self.unfinished.dir().record(), None);
        let recorded = self.unfinished.owned_mut().set_state(&state);
        recorded.map_err(store_error("write a sandbox's state"))
    }

    /// Starts the sandbox's driver. The driver records a pending sandbox when it gets the order
    /// to commit it.
    pub fn drive(self, host: &Host, existence: Existence) -> Local {
        host.drive(Driven {
            state: running_state(&self.running, self.unfinished.dir().record(), None),
            owned: self.unfinished.finish(),
            running: Some(self.running),
            existence,
        })
    }
}

/// Creates a running sandbox. If it fails, or its future is dropped, nothing is left.
pub(crate) async fn created(
    host: Arc<Inner>,
    spec: SandboxSpec,
    batch: Option<BatchId>,
) -> Result<Created> {
    spec.check()?;
    let origin = host.beginning(&spec, Progress::silent(), |_| {}).await?;
    host.reach(Step::Image, None)?;
    let made = match origin {
        Beginning::Image(image) => from_image(&host, &spec, *image, batch).await,
        Beginning::Snapshot(snapshot) => from_snapshot(&host, &spec, &snapshot, batch).await,
    };
    let (unfinished, running) = made?;
    mount(&unfinished, &running, &spec).await?;
    host.reach(Step::Running, None)?;
    Ok(Created {
        unfinished,
        running,
    })
}

async fn from_image(
    host: &Arc<Inner>,
    spec: &SandboxSpec,
    image: Image,
    batch: Option<BatchId>,
) -> Result<(Unfinished, Running)> {
    let image = match spec.kernel.clone() {
        None => image,
        Some(own) => host.with_kernel(&image, own).await?,
    };
    let settings = spec.settings(&image.record);
    check_screen(host, spec, &image)?;
    check_resources(host, settings.memory_bytes)?;
    host.reach(Step::Resources, None)?;
    let ports = listen(&settings.ports).await?;
    host.reach(Step::Ports, None)?;
    let record = SandboxRecord {
        batch,
        ..record(spec, settings, Base::image(spec, &image)?, &ports)?
    };
    let (unfinished, running) = if spec.cold || spec.without_start {
        booted(host, record, Booting::as_asked(spec)).await?
    } else {
        warm_or_booted(host, record, &image, Booting::as_asked(spec)).await?
    };
    Ok((unfinished, ready(host, spec, running, &ports).await?))
}

/// Creates a sandbox that continues from a snapshot's memory, or boots from the snapshot's disk.
async fn from_snapshot(
    host: &Arc<Inner>,
    spec: &SandboxSpec,
    snapshot: &Snapshot,
    batch: Option<BatchId>,
) -> Result<(Unfinished, Running)> {
    let manifest = &snapshot.manifest;
    check_kernel_and_arch(spec, manifest)?;
    let image = host.image_of(manifest).await?;
    let origin = SavedBy::of(host, snapshot)?;
    let settings = spec.settings_over(&origin.granted(&manifest.settings));
    check_settings(&settings)?;
    let memory = manifest.memory.as_ref().filter(|_| !spec.cold);
    if let Some(memory) = memory {
        check_as_saved(&memory.machine, &manifest.settings, &settings)?;
    }
    check_resources(host, settings.memory_bytes)?;
    host.reach(Step::Resources, None)?;
    let (ports, mut notes) = listen_for(spec, &settings).await?;
    host.reach(Step::Ports, None)?;
    let base = Base {
        image: manifest.image.name.clone(),
        of: &image,
        snapshot: Some(snapshot),
    };
    let record = SandboxRecord {
        batch,
        ..record(spec, settings, base, &ports)?
    };
    let unfinished =
        Unfinished::from_snapshot(host.clone(), record, snapshot.clone(), memory.is_some()).await?;
    give_directories(unfinished.owned(), &manifest.mounts, &spec.mounts)?;
    host.reach(Step::Record, None)?;
    let mut running = if memory.is_some() {
        resume_snapshot(host, &unfinished, snapshot).await?
    } else {
        check_layers(&unfinished, snapshot)?;
        boot(host, &unfinished, Booting::as_asked(spec)).await?
    };
    notes.extend(origin.withheld(spec, &manifest.settings));
    running.degraded.append(&mut notes);
    Ok((unfinished, ready(host, spec, running, &ports).await?))
}

/// Refuses a screen that the image's kernel would leave dark. A kernel of the user's own may have
/// the driver built in.
fn check_screen(host: &Inner, spec: &SandboxSpec, image: &Image) -> Result<()> {
    let (Some(size), None) = (spec.display, &spec.kernel) else {
        return Ok(());
    };
    let kernel = host.store.kernel(&image.record.kernel);
    let modules = kernel.map_err(store_error("read a kernel"))?.record.modules;
    let has_driver = |module: &ModuleRecord| module.file.starts_with("virtio-gpu");
    if modules.is_empty() || modules.iter().any(has_driver) {
        return Ok(());
    }
    let rule = "the image's kernel has no driver for it; kernel = \"full\" in a recipe has one";
    Err(Error::invalid("display", size, rule))
}

/// Names the directories of this host that a snapshot's mounts are. A snapshot names none: it may
/// come from anyone.
fn give_directories(owned: &Owned, points: &[MountPoint], specs: &[MountSpec]) -> Result<()> {
    for point in points {
        let Some(spec) = specs.iter().find(|spec| spec.guest == point.path) else {
            continue;
        };
        let is_narrower = spec.access == MountAccess::ReadOnly;
        if spec.access != point.access && !(is_narrower && point.access == MountAccess::ReadWrite) {
            let rule = "used as when the snapshot was saved, or read-only instead of shared";
            return Err(Error::invalid("mount", &spec.guest, rule));
        }
        remember(owned, point, spec)?;
    }
    Ok(())
}

/// Mounts what a spec asks for, unless the guest has it already.
async fn mount(unfinished: &Unfinished, running: &Running, spec: &SandboxSpec) -> Result<()> {
    let head = unfinished
        .dir()
        .head()
        .map_err(store_error("read where a sandbox stands"))?;
    let is_there = |mount: &MountSpec| head.mounts.iter().any(|point| point.path == mount.guest);
    for mount in spec.mounts.iter().filter(|mount| !is_there(mount)) {
        mounts::mount(unfinished.owned(), running, mount).await?;
    }
    Ok(())
}

/// A snapshot continues with its own kernel, and on its own architecture.
fn check_kernel_and_arch(spec: &SandboxSpec, manifest: &SnapshotManifest) -> Result<()> {
    if let Some(own) = &spec.kernel {
        return Err(Error::invalid(
            "kernel",
            own.kernel.display(),
            "a snapshot continues with its own",
        ));
    }
    if manifest.arch != spec.arch {
        return Err(Error::ForeignArch {
            there: manifest.arch.to_string(),
            here: spec.arch.to_string(),
        });
    }
    Ok(())
}

/// Listens on the ports of a sandbox from a snapshot. If the spec asks for ports, each of them must
/// be free. If only the snapshot names them, any free port replaces one that is taken, and a note
/// reports it.
async fn listen_for(
    spec: &SandboxSpec,
    settings: &Settings,
) -> Result<(Vec<Listener>, Vec<Degradation>)> {
    if spec.publish.is_empty() {
        listen_if_free(&settings.ports).await
    } else {
        Ok((listen(&settings.ports).await?, Vec::new()))
    }
}

/// Continues a guest from a snapshot's memory.
async fn resume_snapshot(
    host: &Inner,
    unfinished: &Unfinished,
    snapshot: &Snapshot,
) -> Result<Running> {
    let state = unfinished
        .dir()
        .state_source(&snapshot.state_id())
        .map_err(store_error("read a state"))?;
    let loaded = loaded(host, unfinished, state).await?;
    let running = resume(host, unfinished, loaded).await?;
    start::tell_variables(host, unfinished.owned(), &running).await?;
    Ok(running)
}

/// How a new sandbox boots.
#[derive(Debug, Clone, Copy)]
struct Booting {
    from: start::From,
    service: Service,
    timeout: Option<Duration>,
}

impl Booting {
    /// A cold sandbox boots from power-on.
    fn as_asked(spec: &SandboxSpec) -> Self {
        Self {
            from: if spec.cold {
                start::From::PowerOn
            } else {
                start::From::KernelState
            },
            service: if spec.without_start {
                Service::Left
            } else {
                Service::Required
            },
            timeout: spec.boot_timeout,
        }
    }
}

/// Boots a new sandbox from its own disk.
async fn boot(host: &Arc<Inner>, unfinished: &Unfinished, booting: Booting) -> Result<Running> {
    let head = start::Head {
        identity: identity::identity(unfinished.dir().record()),
        from: booting.from,
        service: booting.service,
        timeout: booting.timeout,
    };
    boot_head(host, unfinished.owned(), head).await
}

/// Gives a running guest its certificate authorities, and forwards its published ports.
async fn ready(
    host: &Inner,
    spec: &SandboxSpec,
    running: Running,
    ports: &[Listener],
) -> Result<Running> {
    if let Some(bundle) = &spec.ca_bundle {
        ca::hand_over(&running.guest, bundle).await?;
    }
    connected(host, running, ports)
}

/// Which store saved a snapshot. A snapshot of another store may come from anyone, so a sandbox
/// does not take settings from it that reach beyond the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SavedBy {
    ThisStore,
    Another,
}

impl SavedBy {
    fn of(host: &Inner, snapshot: &Snapshot) -> Result<Self> {
        let is_saved_here = host
            .store
            .is_saved_here(&snapshot.digest)
            .map_err(store_error("read a snapshot"))?;
        if is_saved_here {
            Ok(Self::ThisStore)
        } else {
            Ok(Self::Another)
        }
    }

    /// The settings that a sandbox takes from a snapshot without a request of its spec.
    fn granted(self, saved: &Settings) -> Settings {
        let mut granted = saved.clone();
        if self == SavedBy::Another {
            granted.ports.clear();
            if granted.network == Network::Full {
                granted.network = Network::Isolated;
            }
        }
        granted
    }

    /// The settings that a sandbox does not take from a snapshot.
    fn withheld(self, spec: &SandboxSpec, saved: &Settings) -> Vec<Degradation> {
        let mut notes = Vec::new();
        if self == SavedBy::Another && spec.network.is_none() && saved.network == Network::Full {
            notes.push(Degradation::NetworkWithheld {});
        }
        if self == SavedBy::Another && spec.publish.is_empty() && !saved.ports.is_empty() {
            let ports = saved
                .ports
                .iter()
                .map(|port| format!("{}:{}", port.host, port.guest))
                .collect();
            notes.push(Degradation::PortsWithheld { ports });
        }
        if !saved.qemu_args.is_empty() && saved.qemu_args != spec.qemu_args {
            notes.push(Degradation::QemuArgumentsWithheld {
                saved: saved.qemu_args.clone(),
            });
        }
        notes
    }
}

/// Checks the structure of a snapshot's disk. A restore with memory makes the same check.
fn check_layers(unfinished: &Unfinished, snapshot: &Snapshot) -> Result<()> {
    let damaged = unfinished
        .dir()
        .check_chain()
        .map_err(store_error("check a snapshot's disk"))?;
    let report = |layer: DamagedLayer| Damaged {
        what: format!("layer {}", layer.layer),
        quarantined: None,
        reason: layer.damage.to_string(),
    };
    if damaged.is_empty() {
        return Ok(());
    }
    Err(Error::Damaged {
        reference: snapshot.digest.to_string(),
        damaged: damaged.into_iter().map(report).collect(),
    })
}

/// Creates a sandbox from the warm state, which is made if it is missing. If the warm state does
/// not work, the sandbox boots, and a note reports the reason.
async fn warm_or_booted(
    host: &Arc<Inner>,
    record: SandboxRecord,
    image: &Image,
    booting: Booting,
) -> Result<(Unfinished, Running)> {
    let key = &warm::key(host, &record, image).await?;
    let mut notes = Vec::new();
    match host
        .store
        .warm(key)
        .map_err(store_error("read a warm state"))
    {
        Ok(None) => {}
        Ok(Some(warm)) => match restored(host, record.clone(), &warm).await {
            Err(error) if is_about_the_state(&error) => notes.push(unusable(host, key, &error)?),
            done => return done,
        },
        Err(error) if is_about_the_state(&error) => notes.push(unusable(host, key, &error)?),
        Err(error) => return Err(error),
    }
    let made = warm::make(host, &record, image, key, booting.timeout).await?;
    notes.extend(made.degraded);
    match made.state {
        Ok(warm) => match restored(host, record.clone(), &warm).await {
            Err(error) if is_about_the_state(&error) => notes.push(unusable(host, key, &error)?),
            Ok((unfinished, mut running)) => {
                running.degraded.extend(notes);
                return Ok((unfinished, running));
            }
            failed => return failed,
        },
        Err(error) => notes.push(Degradation::WarmImageNotKept {
            reason: error.to_string(),
        }),
    }
    let (unfinished, mut running) = booted(host, record, booting).await?;
    running.degraded.extend(notes);
    Ok((unfinished, running))
}

/// Removes a warm state that does not load.
fn unusable(host: &Inner, key: &Digest, error: &Error) -> Result<Degradation> {
    host.store
        .remove_warm(key)
        .map_err(store_error("remove a warm state"))?;
    Ok(Degradation::WarmImageUnusable {
        reason: error.to_string(),
    })
}

async fn restored(
    host: &Arc<Inner>,
    record: SandboxRecord,
    warm: &StateSource,
) -> Result<(Unfinished, Running)> {
    let unfinished = Unfinished::from_state(host.clone(), record, warm.clone()).await?;
    host.reach(Step::Record, None)?;
    let loaded = loaded(host, &unfinished, warm.clone()).await?;
    let running = resume(host, &unfinished, loaded).await?;
    start::tell_variables(host, unfinished.owned(), &running).await?;
    Ok((unfinished, running))
}

/// Loads the state that a new sandbox is made from into a machine on the sandbox's disk.
async fn loaded(host: &Inner, unfinished: &Unfinished, state: StateSource) -> Result<Loaded> {
    let state = restore::check(unfinished.dir(), state)?;
    let disk = fold::head(unfinished.owned()).await?;
    let loading = Loading {
        host,
        owned: unfinished.owned(),
        disk: &disk,
        spare: None,
    };
    restore::load(loading, state).await
}

/// Resumes a guest in a sandbox that is new to it.
async fn resume(host: &Inner, unfinished: &Unfinished, loaded: Loaded) -> Result<Running> {
    let connections = Connections {
        hub: HubChoice::New,
        belongs: Belongs::Elsewhere,
    };
    let restored = loaded
        .continue_guest(host, unfinished.dir(), connections)
        .await?;
    let failed = restored.hooks.iter().map(|hook| Degradation::HookFailed {
        hook: hook.name.clone(),
        reason: hook.what.clone(),
    });
    let report = restored.report(restored.times.acknowledged);
    let mut running = restored.running;
    running.degraded.extend(failed);
    running.created = Some(report);
    Ok(running)
}

async fn booted(
    host: &Arc<Inner>,
    record: SandboxRecord,
    booting: Booting,
) -> Result<(Unfinished, Running)> {
    let unfinished = Unfinished::make(host.clone(), record).await?;
    host.reach(Step::Record, None)?;
    let running = boot(host, &unfinished, booting).await?;
    Ok((unfinished, running))
}

/// The source of copies: a state, and the record of the state's sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub state: StateSource,
    pub record: SandboxRecord,
    directories: HostDirectories,
}

/// What copies may do with the directories of the host that are mounted in their source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ForkMounts {
    /// Read them. Several guests that write to one directory disturb each other.
    #[default]
    ReadOnly,
    /// What their source may do.
    Shared,
}

impl ForkMounts {
    fn of(self, mut directories: HostDirectories) -> HostDirectories {
        if self == Self::ReadOnly {
            for directory in &mut directories.directories {
                directory.read_only = true;
            }
        }
        directories
    }
}

pub(crate) struct CopySpec {
    pub source: Source,
    pub mounts: ForkMounts,
    pub name: String,
    pub batch: Option<BatchId>,
}

impl Inner {
    pub(crate) fn copy_source(&self, reference: &str, state: &str) -> Result<Source> {
        let dir = self.find(reference)?;
        let id = state.parse().map_err(|_| Error::NoState {
            name: reference.into(),
            state: state.into(),
        })?;
        let state = dir.state_source(&id).map_err(store_error("read a state"))?;
        let directories = crate::mounts::known(&dir)?;
        Ok(Source {
            state,
            record: dir.record().clone(),
            directories,
        })
    }
}

/// A copy of a sandbox that has loaded its state and does not run yet. Dropping it removes
/// everything.
pub(crate) struct Copy {
    host: Arc<Inner>,
    // Before the sandbox, so that the machine ends first. `None`: the state has no memory.
    loaded: Option<Loaded>,
    unfinished: Unfinished,
    ports: Vec<Listener>,
}

pub(crate) async fn copy(host: Arc<Inner>, spec: CopySpec) -> Result<Copy> {
    check_resources(&host, 0)?;
    let CopySpec {
        source:
            Source {
                state,
                record: of,
                directories,
            },
        mounts,
        name,
        batch,
    } = spec;
    let wanted: Vec<_> = of
        .ports
        .iter()
        .map(|port| PublishedPort {
            host: 0,
            guest: port.guest,
        })
        .collect();
    let ports = listen(&wanted).await?;
    let record = SandboxRecord {
        id: SandboxId::random().map_err(store_error("make an id"))?,
        name: parse_name("sandbox name", &name)?,
        ports: ports.iter().map(|listener| listener.port).collect(),
        created_at_unix_ms: now_unix_ms(),
        save_on_stop: None,
        batch,
        ..of
    };
    let unfinished = Unfinished::from_state(host.clone(), record, state.clone()).await?;
    if !directories.directories.is_empty() {
        unfinished
            .owned()
            .set_host_directories(&mounts.of(directories))
            .map_err(store_error("write the mounts of a sandbox"))?;
    }
    let loaded = match state.manifest().memory {
        MemoryState::None => None,
        _ => Some(loaded(&host, &unfinished, state).await?),
    };
    Ok(Copy {
        host,
        unfinished,
        loaded,
        ports,
    })
}

impl Copy {
    /// The machine that has loaded the state, if the state has memory.
    #[cfg(feature = "bench")]
    pub fn machine(&self) -> Option<&sandtree_engine::Machine> {
        self.loaded.as_ref().map(|loaded| &loaded.machine)
    }

    /// Resumes the copy's guest, or boots it if the state has no memory.
    pub async fn resume(self) -> Result<Created> {
        let Copy {
            host,
            unfinished,
            loaded,
            ports,
        } = self;
        let running = match loaded {
            Some(loaded) => resume(&host, &unfinished, loaded).await?,
            None => {
                let booting = Booting {
                    from: start::From::KernelState,
                    service: Service::Required,
                    timeout: None,
                };
                boot(&host, &unfinished, booting).await?
            }
        };
        let running = connected(&host, running, &ports)?;
        host.reach(Step::Running, None)?;
        Ok(Created {
            running,
            unfinished,
        })
    }
}

/// The record that a sandbox from an image would have, without its ports.
pub(crate) fn record_of(spec: &SandboxSpec, image: &Image) -> Result<SandboxRecord> {
    record(
        spec,
        spec.settings(&image.record),
        Base::image(spec, image)?,
        &[],
    )
}

/// The image, and perhaps the snapshot, below a sandbox's disk.
struct Base<'a> {
    image: Name,
    of: &'a Image,
    snapshot: Option<&'a Snapshot>,
}

impl<'a> Base<'a> {
    /// Names the image as the spec does, or by the beginning of its digest.
    fn image(spec: &SandboxSpec, of: &'a Image) -> Result<Self> {
        let name = match Reference::parse(spec.image.as_deref().unwrap_or_default())? {
            Reference::Name(name) => name,
            _ => parse_name("image name", &of.digest.as_str()[..12])?,
        };
        Ok(Self {
            image: name,
            of,
            snapshot: None,
        })
    }

    fn disk_bytes(&self) -> u64 {
        self.snapshot
            .map_or(self.of.record.rootfs.bytes, |snapshot| {
                snapshot.manifest.disk.bytes
            })
    }
}

fn record(
    spec: &SandboxSpec,
    settings: Settings,
    base: Base<'_>,
    ports: &[Listener],
) -> Result<SandboxRecord> {
    let id = SandboxId::random().map_err(store_error("make an id"))?;
    let name = parse_name("sandbox name", spec.name.as_deref().unwrap_or(id.as_str()))?;
    let least_bytes = base.disk_bytes();
    if settings.disk_bytes < least_bytes {
        let what = if base.snapshot.is_some() {
            "snapshot"
        } else {
            "image"
        };
        let rule = format!(
            "at least as large as the {what}, which has {} MiB",
            least_bytes >> 20
        );
        return Err(Error::invalid("disk size", settings.disk_bytes, &rule));
    }
    Ok(SandboxRecord {
        schema: SandboxRecord::SCHEMA,
        id,
        name,
        image: base.image,
        image_digest: base.of.digest.clone(),
        kernel_digest: base.of.record.kernel.clone(),
        snapshot: base.snapshot.map(|snapshot| snapshot.digest.clone()),
        arch: spec.arch,
        memory_bytes: settings.memory_bytes,
        cpus: settings.cpus,
        cpu: settings.cpu,
        display: settings.display,
        disk_bytes: settings.disk_bytes,
        network: settings.network,
        accel: settings.accel,
        qemu_args: settings.qemu_args,
        ports: ports.iter().map(|listener| listener.port).collect(),
        created_at_unix_ms: now_unix_ms(),
        auto_remove: spec.auto_remove,
        memory_dir: spec.memory_dir.clone(),
        memory_mode: settings.memory_mode,
        auto_checkpoint: settings.auto_checkpoint,
        save_on_stop: spec.save_on_stop.clone(),
        durable: spec.durable,
        env: env(spec),
        nested: spec.nested,
        batch: None,
        labels: spec.labels.clone(),
        expiry: spec.expiry,
    })
}

/// The environment of every command: the user's variables override ours.
fn env(spec: &SandboxSpec) -> BTreeMap<String, String> {
    let trusted = spec.ca_bundle.as_ref().map(|_| ca::env());
    let mut env = trusted.unwrap_or_default();
    env.extend(spec.env.clone());
    env
}
