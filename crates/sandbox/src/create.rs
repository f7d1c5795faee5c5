//! How a sandbox comes to life: the order of things, and what is undone when one fails.
//!
//! ```text
//!   check spec -> image -> resources -> ports -> warm state, made if missing -> record -> restore -> running
//!                                                                                 |  \-> boot ------´
//!                                                           undone by removing it ´
//! ```
//!
//! Always: each step's result owns what it made, so that an error or a dropped future at any point unwinds all of it. The
//! name is claimed before the machine starts, so of two creations under one name one fails at once.
//! When it fails: the console's last lines are in the error, and nothing else is left.

use std::sync::Arc;
use std::time::Duration;

use sandtree_store::{
    Digest, Head, Image, MemoryState, Origin, Owned, Phase, PublishedPort, SandboxDir, SandboxId, SandboxRecord,
    StateId, StateKind, StateManifest, StateRecord, StateSource,
};

use crate::boot::{self, Belongs, DISK_RESERVE, Listener, Running, listen};
use crate::driver;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Step;
use crate::host::{Inner, available_memory, boot_id, now_unix_ms, store_error};
use crate::restore::{self, Connections, HubChoice, Loaded};
use crate::sandbox::Sandbox;
use crate::spec::{SandboxSpec, parse_name};
use crate::warm;

pub(crate) async fn create(host: Arc<Inner>, spec: SandboxSpec) -> Result<Sandbox> {
    spec.check()?;
    let image = host.clone().ensure_image(&spec.image, |_| {}).await?;
    host.reach(Step::Image, None)?;
    check_resources(&host, spec.memory_bytes)?;
    host.reach(Step::Resources, None)?;
    let ports = listen(&spec.publish).await?;
    host.reach(Step::Ports, None)?;
    let record = record(&spec, &image, &ports)?;
    let (mut newborn, running) = match spec.cold {
        true => booted(&host, record, spec.boot_timeout).await?,
        false => warm_or_booted(&host, record, &image, spec.boot_timeout).await?,
    };
    let running = connected(&host, running, &ports)?;
    let state = running_state(&running);
    newborn.owned_mut().set_state(&state).map_err(store_error("write a sandbox's state"))?;
    host.reach(Step::Running, None)?;
    Ok(driver::start(host, newborn.grown(), Some(running), state))
}

fn connected(host: &Inner, mut running: Running, ports: &[Listener]) -> Result<Running> {
    running.forwards = boot::forward(&running.guest, ports)?;
    host.reach(Step::Forward, None)?;
    Ok(running)
}

/// From the warm state, which is made if there is none; or by a boot, if that does not work, and then it says so.
async fn warm_or_booted(
    host: &Arc<Inner>,
    record: SandboxRecord,
    image: &Image,
    timeout: Option<Duration>,
) -> Result<(Newborn, Running)> {
    let key = &warm::key(host, &record, image).await?;
    let mut notes = Vec::new();
    match host.store.warm(key).map_err(store_error("read a warm state")) {
        Ok(None) => {}
        Ok(Some(warm)) => match restored(host, record.clone(), &warm).await {
            Err(error) if is_about_the_state(&error) => notes.push(unusable(host, key, &error)?),
            done => return done,
        },
        Err(error) if is_about_the_state(&error) => notes.push(unusable(host, key, &error)?),
        Err(error) => return Err(error),
    }
    match warm::make(host, &record, image, key, timeout).await? {
        Ok(warm) => match restored(host, record.clone(), &warm).await {
            Err(error) if is_about_the_state(&error) => notes.push(unusable(host, key, &error)?),
            Ok((newborn, mut running)) => {
                running.degraded.extend(notes);
                return Ok((newborn, running));
            }
            failed => return failed,
        },
        Err(error) => notes.push(format!("it was booted: the booted state of its image cannot be kept: {error}")),
    }
    let (newborn, mut running) = booted(host, record, timeout).await?;
    running.degraded.extend(notes);
    Ok((newborn, running))
}

/// A warm state that does not load is of no use to anybody.
fn unusable(host: &Inner, key: &Digest, error: &Error) -> Result<String> {
    host.store.remove_warm(key).map_err(store_error("remove a warm state"))?;
    Ok(format!("the booted state of its image did not load: {error}"))
}

/// Whether booting instead may help.
fn is_about_the_state(error: &Error) -> bool {
    let kinds = [ErrorKind::Corrupt, ErrorKind::Engine, ErrorKind::Unsupported, ErrorKind::Guest];
    !matches!(error, Error::Injected { .. }) && kinds.contains(&error.kind())
}

async fn restored(host: &Arc<Inner>, record: SandboxRecord, warm: &StateSource) -> Result<(Newborn, Running)> {
    let newborn = Newborn::from_state(host.clone(), record, warm.clone()).await?;
    host.reach(Step::Record, None)?;
    let loaded = loaded(host, &newborn, warm.clone()).await?;
    let running = go_on(host, &newborn, loaded).await?;
    Ok((newborn, running))
}

/// A machine on a new sandbox's disk that holds the state it was made from.
async fn loaded(host: &Inner, newborn: &Newborn, state: StateSource) -> Result<Loaded> {
    let disk = newborn.dir().head().map_err(store_error("read where a sandbox stands"))?.disk;
    let state = restore::check(newborn.dir(), state)?;
    restore::load(host, newborn.owned(), state, &disk).await
}

/// Lets a guest go on in a sandbox that is new to it.
async fn go_on(host: &Inner, newborn: &Newborn, loaded: Loaded) -> Result<Running> {
    let connections = Connections { hub: HubChoice::New, belongs: Belongs::Elsewhere };
    let restored = loaded.go_on(host, newborn.dir(), connections).await?;
    let failed = restored.hooks.iter().map(|hook| format!("hook {} failed: {}", hook.name, hook.what));
    let mut running = restored.running;
    running.degraded.extend(failed);
    Ok(running)
}

async fn booted(host: &Arc<Inner>, record: SandboxRecord, timeout: Option<Duration>) -> Result<(Newborn, Running)> {
    let newborn = Newborn::make(host.clone(), record).await?;
    host.reach(Step::Record, None)?;
    let running = boot_head(host, newborn.dir(), boot::identity(newborn.dir().record()), timeout).await?;
    Ok((newborn, running))
}

pub(crate) async fn boot_head(
    host: &Inner,
    dir: &SandboxDir,
    identity: sandtree_proto::Identity,
    timeout: Option<Duration>,
) -> Result<Running> {
    let disk = dir.head().map_err(store_error("read where a sandbox stands"))?.disk;
    boot::boot(host, dir, &disk, identity, timeout).await
}

/// A copy of a sandbox that holds its state and stands still.
pub(crate) struct Copy {
    host: Arc<Inner>,
    // Before the sandbox, so that a copy that is dropped ends its machine first.
    loaded: Loaded,
    newborn: Newborn,
    ports: Vec<Listener>,
}

/// Makes a copy from a state. Dropped, nothing of it is left.
pub(crate) async fn copy(host: Arc<Inner>, state: StateSource, of: &SandboxRecord, name: String) -> Result<Copy> {
    check_resources(&host, 0)?;
    let wanted: Vec<_> = of.ports.iter().map(|port| PublishedPort { host: 0, guest: port.guest }).collect();
    let ports = listen(&wanted).await?;
    let record = SandboxRecord {
        id: SandboxId::random().map_err(store_error("make an id"))?,
        name: parse_name("a sandbox's name", &name)?,
        ports: ports.iter().map(|listener| listener.port).collect(),
        created_at_unix_ms: now_unix_ms(),
        ..of.clone()
    };
    let newborn = Newborn::from_state(host.clone(), record, state.clone()).await?;
    let loaded = loaded(&host, &newborn, state).await?;
    Ok(Copy { host, newborn, loaded, ports })
}

impl Copy {
    /// Lets the copy go on.
    pub async fn go_on(self) -> Result<Sandbox> {
        let host = self.host.clone();
        let woken = self.wake().await?;
        Ok(grow(&host, vec![woken])?.remove(0))
    }

    /// Lets the copy go on, without a driver.
    pub async fn wake(self) -> Result<(Newborn, Running)> {
        let Copy { host, newborn, loaded, ports } = self;
        let running = connected(&host, go_on(&host, &newborn, loaded).await?, &ports)?;
        Ok((newborn, running))
    }
}

/// Sandboxes that run are there from now on, all or none.
pub(crate) fn grow(host: &Arc<Inner>, woken: Vec<(Newborn, Running)>) -> Result<Vec<Sandbox>> {
    let mut ready = Vec::new();
    for (mut newborn, running) in woken {
        let state = running_state(&running);
        newborn.owned_mut().set_state(&state).map_err(store_error("write a sandbox's state"))?;
        ready.push((running, newborn, state));
    }
    let start = |(running, newborn, state): (Running, Newborn, StateRecord)| {
        driver::start(host.clone(), newborn.grown(), Some(running), state)
    };
    Ok(ready.into_iter().map(start).collect())
}

/// Boots a sandbox that was stopped. When it fails, or is dropped in the middle, it is stopped still.
pub(crate) async fn start(host: Arc<Inner>, owned: Owned, boot_timeout: Option<Duration>) -> Result<Sandbox> {
    let before = owned.state().map_err(store_error("read a sandbox's state"))?;
    let mut waking = Waking { owned: Some(owned), before };
    let running = reboot(&host, waking.owned_mut(), boot_timeout).await?;
    let state = running_state(&running);
    waking.owned_mut().set_state(&state).map_err(store_error("write a sandbox's state"))?;
    Ok(driver::start(host, waking.up(), Some(running), state))
}

/// A sandbox on its way up. Dropped, it rests as before.
struct Waking {
    owned: Option<Owned>,
    before: StateRecord,
}

impl Waking {
    fn owned_mut(&mut self) -> &mut Owned {
        self.owned.as_mut().expect("it is there until it is up")
    }

    fn up(mut self) -> Owned {
        self.owned.take().expect("it is there until it is up")
    }
}

impl Drop for Waking {
    fn drop(&mut self) {
        let Some(owned) = &mut self.owned else { return };
        if let Err(error) = owned.set_state(&unsynced(&self.before)) {
            tracing::error!(%error, "a sandbox that could not be started cannot be put to rest");
        }
    }
}

/// A state to go back to after a boot that was not finished: it may have written to the disk.
pub(crate) fn unsynced(before: &StateRecord) -> StateRecord {
    StateRecord { clean: false, ..before.clone() }
}

/// Boots a machine on a sandbox's own disk.
pub(crate) async fn reboot(host: &Inner, owned: &mut Owned, boot_timeout: Option<Duration>) -> Result<Running> {
    check_resources(host, owned.record().memory_bytes)?;
    let state = owned.state().map_err(store_error("read a sandbox's state"))?;
    if !state.clean {
        check_disk(owned)?;
    }
    let ports = listen(&owned.record().ports).await?;
    boot::clear_execs(owned, None)?;
    let starting = StateRecord { boot_id: Some(boot_id()), ..StateRecord::new(Phase::Starting, now_unix_ms()) };
    owned.set_state(&starting).map_err(store_error("write a sandbox's state"))?;
    let disk = owned.writable_head().map_err(store_error("read where a sandbox stands"))?.disk;
    let running = boot::boot(host, owned, &disk, boot::identity(owned.record()), boot_timeout).await?;
    connected(host, running, &ports)
}

pub(crate) fn check_disk(dir: &SandboxDir) -> Result<()> {
    match dir.check_chain().map_err(store_error("check a sandbox's disk"))?.first() {
        None => Ok(()),
        Some(damaged) => {
            Err(Error::DamagedDisk { name: dir.record().name.to_string(), what: damaged.damage.to_string() })
        }
    }
}

pub(crate) fn check_resources(host: &Inner, memory_bytes: u64) -> Result<()> {
    let available_bytes = available_memory()?;
    if memory_bytes > available_bytes {
        return Err(Error::HostMemory { wanted_bytes: memory_bytes, available_bytes });
    }
    let available_bytes = host.store.disk_free_bytes().map_err(store_error("tell its free space"))?;
    if available_bytes < DISK_RESERVE {
        let path = host.store.root().to_owned();
        return Err(Error::HostDisk { path, wanted_bytes: DISK_RESERVE, available_bytes });
    }
    Ok(())
}

fn record(spec: &SandboxSpec, image: &Image, ports: &[Listener]) -> Result<SandboxRecord> {
    let id = SandboxId::random().map_err(store_error("make an id"))?;
    let name = parse_name("a sandbox's name", spec.name.as_deref().unwrap_or(id.as_str()))?;
    let image_bytes = image.record.rootfs.bytes;
    let disk_bytes = spec.disk_bytes.unwrap_or(image_bytes);
    if disk_bytes < image_bytes {
        let rule = format!("at least as large as the image, which has {} MiB", image_bytes >> 20);
        return Err(Error::invalid("a disk's size", disk_bytes, &rule));
    }
    Ok(SandboxRecord {
        schema: SandboxRecord::SCHEMA,
        id,
        name,
        image: parse_name("an image's name", &spec.image)?,
        image_digest: image.digest.clone(),
        kernel_digest: image.record.kernel.clone(),
        arch: spec.arch,
        memory_bytes: spec.memory_bytes,
        cpus: spec.cpus,
        disk_bytes,
        network: spec.network,
        accel: spec.accel,
        qemu_args: spec.qemu_args.clone(),
        ports: ports.iter().map(|listener| listener.port).collect(),
        created_at_unix_ms: now_unix_ms(),
        auto_remove: spec.auto_remove,
        memory_dir: spec.memory_dir.clone(),
        memory_mode: spec.memory_mode.map(|mode| mode.to_string()),
        auto_checkpoint: spec.auto_checkpoint,
    })
}

/// A sandbox on disk that does not run yet. Dropped, it is removed with its name.
#[derive(Debug)]
pub(crate) struct Newborn {
    host: Arc<Inner>,
    owned: Option<Owned>,
}

impl Newborn {
    pub async fn make(host: Arc<Inner>, record: SandboxRecord) -> Result<Newborn> {
        Self::create(host, record, |store, record| store.create_sandbox(record, Origin::Image)).await
    }

    async fn from_state(host: Arc<Inner>, record: SandboxRecord, state: StateSource) -> Result<Newborn> {
        Self::create(host, record, move |store, record| store.create_sandbox(record, Origin::State(&state))).await
    }

    async fn create(
        host: Arc<Inner>,
        record: SandboxRecord,
        create: impl FnOnce(&sandtree_store::Store, SandboxRecord) -> Result<Owned, sandtree_store::Error> + Send + 'static,
    ) -> Result<Newborn> {
        // The task makes the guard itself: a caller that stops waiting gets the sandbox removed, not left.
        let made = tokio::task::spawn_blocking(move || {
            let owned = create(&host.store, record).map_err(|error| match error {
                sandtree_store::Error::NameTaken { name, holder } => {
                    Error::NameTaken { name: name.to_string(), holder: holder.to_string() }
                }
                source => Error::Store { operation: "create a sandbox", source },
            })?;
            Ok(Newborn { host, owned: Some(owned) })
        });
        made.await.expect("creating does not panic")
    }

    pub fn dir(&self) -> &SandboxDir {
        self.owned()
    }

    pub fn owned(&self) -> &Owned {
        self.owned.as_ref().expect("it is there until it has grown")
    }

    fn owned_mut(&mut self) -> &mut Owned {
        self.owned.as_mut().expect("it is there until it has grown")
    }

    fn grown(mut self) -> Owned {
        self.owned.take().expect("it is there until it has grown")
    }
}

impl Drop for Newborn {
    fn drop(&mut self) {
        let Some(owned) = self.owned.take() else { return };
        let id = owned.id().clone();
        if let Err(error) = self.host.store.remove_sandbox(owned) {
            tracing::error!(%id, %error, "a sandbox that was not finished cannot be removed; the next open tries again");
        }
    }
}

/// The manifest of a sandbox's disk, without a machine.
pub(crate) fn bare_manifest(record: &SandboxRecord, head: &Head, kind: StateKind) -> Result<StateManifest> {
    Ok(StateManifest {
        schema: StateManifest::SCHEMA,
        id: StateId::random().map_err(store_error("make an id"))?,
        kind,
        tag: None,
        parent: head.parent.clone(),
        created_at_unix_ms: now_unix_ms(),
        boot_id: boot_id(),
        disk: head.disk.clone(),
        disk_bytes: record.disk_bytes,
        memory: MemoryState::None,
        ram_bytes: record.memory_bytes,
        mode: None,
        degraded: Vec::new(),
        memory_layer_bytes: 0,
        disk_layer_bytes: 0,
        pause_us: 0,
        machine: None,
        execs: Vec::new(),
    })
}

pub(crate) fn running_state(running: &Running) -> StateRecord {
    StateRecord {
        boot_id: Some(boot_id()),
        pids: sandtree_store::Pids { keeper: Some(std::process::id()), qemu: Some(running.machine.pid()) },
        accelerator: Some(running.record.accelerator.clone()),
        qemu_version: Some(running.record.qemu_version.clone()),
        degraded: running.degraded.clone(),
        ..StateRecord::new(Phase::Running, now_unix_ms())
    }
}
