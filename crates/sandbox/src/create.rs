//! How a sandbox comes to life: the order of things, and what is undone when one fails.
//!
//! ```text
//!   check spec -> image -> resources -> ports -> record -> machine -> hello -> configure -> running
//!                                                  |         |
//!                            undone by removing it ´         ` undone by killing it
//! ```
//!
//! Always: each step's result owns what it made, so that an error or a dropped future at any point unwinds all of it. The
//! name is claimed before the machine starts, so of two creations under one name one fails at once.
//! When it fails: the console's last lines are in the error, and nothing else is left.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sandtree_engine::{self as engine, Accel, DiskChain, Event, Events, Limits, Machine, MachineSpec, NetworkMode};
use sandtree_proto::{self as proto, Identity};
use sandtree_store::{
    AccelChoice, Image, Init, Network, Owned, Phase, PublishedPort, SandboxDir, SandboxId, SandboxRecord, StateRecord,
    disk,
};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;

use crate::console::Console;
use crate::driver;
use crate::error::{Error, Result};
use crate::guest::{Forward, Guest};
use crate::host::{Inner, available_memory, boot_id, jail_of, now_unix_ms, now_unix_ns, store_error};
use crate::hub::Hub;
use crate::image;
use crate::link::LinkError;
use crate::sandbox::Sandbox;
use crate::spec::{PUBLISH_ADDRESS, SandboxSpec, parse_name};

/// The program in the guest, built with us.
static AGENT: &[u8] = include_bytes!(env!("SANDTREE_AGENT"));

const BOOT_TIMEOUT: Duration = Duration::from_secs(60);
/// Under emulation everything takes longer, and other work on the host takes its share.
const BOOT_TIMEOUT_TCG: Duration = Duration::from_secs(180);
/// Warnings and worse go to the console, a panic ends the machine at once, and what only real hardware or a distrusted
/// compiler needs is not waited for.
pub(crate) const KERNEL_OPTIONS: &str = "console=ttyS0 loglevel=4 panic=-1 random.trust_cpu=on no_timer_check \
    tsc=reliable i8042.noaux i8042.nokbd cryptomgr.notests";
/// What must be free for a sandbox to start with: its overlay's tables, its logs, and a little to write.
const DISK_RESERVE: u64 = 64 << 20;

/// The steps of creation, for tests that let each fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CreateStep {
    Image,
    Resources,
    Ports,
    Record,
    Machine,
    Hello,
    Configure,
    Forward,
    Running,
}

impl CreateStep {
    pub const ALL: [CreateStep; 9] = [
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
}

impl fmt::Display for CreateStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// A machine that is up, with everything that serves it.
#[derive(Debug)]
pub(crate) struct Running {
    pub machine: Machine,
    pub hub: Hub,
    pub guest: Guest,
    pub accel: Accel,
    pub qemu_version: String,
    /// What QEMU tells, from the machine's start; its driver takes it.
    pub events: Option<Events>,
    _forwards: Vec<Forward>,
    pub console: Console,
}

pub(crate) async fn create(host: Arc<Inner>, spec: SandboxSpec) -> Result<Sandbox> {
    spec.check()?;
    let image = host.clone().ensure_image(&spec.image, |_| {}).await?;
    host.reach(CreateStep::Image)?;
    check_resources(&host, spec.memory_bytes)?;
    host.reach(CreateStep::Resources)?;
    let ports = listen(&spec.publish).await?;
    host.reach(CreateStep::Ports)?;
    let record = record(&spec, &image, &ports)?;
    let mut newborn = Newborn::make(host.clone(), record).await?;
    host.reach(CreateStep::Record)?;
    let running = boot(&host, newborn.dir(), ports, spec.boot_timeout).await?;
    let state = running_state(&running);
    newborn.owned_mut().set_state(&state).map_err(store_error("write a sandbox's state"))?;
    host.reach(CreateStep::Running)?;
    Ok(driver::start(host, newborn.grown(), Some(running), state))
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
    clear_execs(owned)?;
    let starting = StateRecord { boot_id: Some(boot_id()), ..StateRecord::new(Phase::Starting, now_unix_ms()) };
    owned.set_state(&starting).map_err(store_error("write a sandbox's state"))?;
    boot(host, owned, ports, boot_timeout).await
}

fn check_disk(dir: &SandboxDir) -> Result<()> {
    match dir.check_overlay(0).map_err(store_error("check a sandbox's disk"))? {
        disk::check::Verdict::Clean { .. } => Ok(()),
        disk::check::Verdict::Corrupt(damage) => {
            Err(Error::DamagedDisk { name: dir.record().name.to_string(), what: damage.to_string() })
        }
    }
}

/// Commands of the last boot are gone, and so is what they said.
fn clear_execs(dir: &SandboxDir) -> Result<()> {
    match std::fs::remove_dir_all(dir.execs()) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", dir.execs(), e)),
        _ => Ok(()),
    }
}

fn check_resources(host: &Inner, memory_bytes: u64) -> Result<()> {
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

/// Takes the host's ports and keeps them: one chosen and let go could be taken by another.
async fn listen(ports: &[PublishedPort]) -> Result<Vec<(TcpListener, PublishedPort)>> {
    let mut listeners = Vec::new();
    for port in ports {
        let bound = TcpListener::bind((PUBLISH_ADDRESS, port.host)).await;
        let address = format!("{PUBLISH_ADDRESS}:{}", port.host);
        let listener = bound.map_err(|source| Error::Port { address: address.clone(), source })?;
        let host = listener.local_addr().map_err(|source| Error::Port { address, source })?.port();
        listeners.push((listener, PublishedPort { host, guest: port.guest }));
    }
    Ok(listeners)
}

fn record(spec: &SandboxSpec, image: &Image, ports: &[(TcpListener, PublishedPort)]) -> Result<SandboxRecord> {
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
        ports: ports.iter().map(|(_, port)| *port).collect(),
        created_at_unix_ms: now_unix_ms(),
        auto_remove: spec.auto_remove,
    })
}

/// A sandbox on disk that does not run yet. Dropped, it is removed with its name.
struct Newborn {
    host: Arc<Inner>,
    owned: Option<Owned>,
}

impl Newborn {
    async fn make(host: Arc<Inner>, record: SandboxRecord) -> Result<Newborn> {
        let making = host.clone();
        // The task makes the guard itself: a caller that stops waiting gets the sandbox removed, not left.
        let made = tokio::task::spawn_blocking(move || {
            let owned = making.store.create_sandbox(record).map_err(|error| match error {
                sandtree_store::Error::NameTaken { name, holder } => {
                    Error::NameTaken { name: name.to_string(), holder: holder.to_string() }
                }
                source => Error::Store { operation: "create a sandbox", source },
            })?;
            Ok(Newborn { host: making, owned: Some(owned) })
        });
        made.await.expect("creating does not panic")
    }

    fn dir(&self) -> &SandboxDir {
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

/// Starts a machine on a sandbox's disk and waits until its guest is ready.
async fn boot(
    host: &Inner,
    dir: &SandboxDir,
    ports: Vec<(TcpListener, PublishedPort)>,
    timeout: Option<Duration>,
) -> Result<Running> {
    let engine = host.engine().await?;
    let accel = engine
        .accel(engine_choice(dir.record().accel))
        .map_err(|source| Error::Engine { operation: "be used", source })?;
    let spec = machine_spec(host, dir, accel)?;
    let mut machine = engine.start(spec).await.map_err(|source| Error::Engine { operation: "start", source })?;
    let console = machine.take_console().expect("a fresh machine has its console");
    let mut console = Console::keep(console, dir.console()).map_err(|e| Error::io("open", dir.console(), e))?;
    let mut events = machine.events();
    let timeout = timeout.unwrap_or(if accel == Accel::Tcg { BOOT_TIMEOUT_TCG } else { BOOT_TIMEOUT });
    let port = machine.take_link().expect("a fresh machine has its link");
    let up = async {
        host.reach(CreateStep::Machine)?;
        come_up(host, dir, Hub::start(port, dir.execs()), timeout).await
    };
    let up = tokio::select! {
        up = up => up,
        error = ends_or_stalls(host, &machine, &mut events, &mut console) => Err(error),
    };
    let (hub, guest) = match up {
        Ok(up) => up,
        Err(error) => {
            // Awaited, so that whoever tries again finds the disk free.
            machine.kill().await;
            return Err(error.with_console(&console));
        }
    };
    let forwards = forward(&guest, ports)?;
    host.reach(CreateStep::Forward)?;
    let qemu_version = engine.version().to_string();
    Ok(Running { machine, hub, guest, accel, qemu_version, events: Some(events), _forwards: forwards, console })
}

/// Waits for the agent, and tells it who it is; all of it within the time a boot may take.
async fn come_up(host: &Inner, dir: &SandboxDir, hub: Hub, timeout: Duration) -> Result<(Hub, Guest)> {
    let end = tokio::time::Instant::now() + timeout;
    let late = |_| Error::Boot { after: timeout, console: String::new() };
    hub.ready(timeout).await.map_err(|source| match source {
        LinkError::Timeout { .. } => late(()),
        source => unreachable_agent(source),
    })?;
    host.reach(CreateStep::Hello)?;
    let configured = async {
        let guest = Guest::new(hub.connect().await.map_err(unreachable_agent)?);
        guest.configure(identity(dir)).await?;
        Ok(guest)
    };
    let guest = tokio::time::timeout_at(end, configured).await.unwrap_or_else(|_| Err(late(())))?;
    host.reach(CreateStep::Configure)?;
    Ok((hub, guest))
}

/// Why a guest will not come up, however long it is waited for.
async fn ends_or_stalls(host: &Inner, machine: &Machine, events: &mut Events, console: &mut Console) -> Error {
    tokio::select! {
        exit = machine.exited() => {
            console.drain().await;
            let reason = driver::Ending::of(machine, &exit, console).reason;
            Error::BootEnded { reason, console: String::new() }
        }
        () = disk_full(events) => {
            let available_bytes = host.store.disk_free_bytes().unwrap_or(0);
            Error::HostDisk { path: host.store.root().to_owned(), wanted_bytes: DISK_RESERVE, available_bytes }
        }
    }
}

/// Waits until QEMU stops the guest because the host's disk is full.
async fn disk_full(events: &mut Events) {
    loop {
        match events.next().await {
            Some(Event::BlockIoError { no_space: true, .. }) => return,
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

fn unreachable_agent(source: LinkError) -> Error {
    Error::Guest { operation: "reach the guest's agent".into(), source }
}

fn forward(guest: &Guest, ports: Vec<(TcpListener, PublishedPort)>) -> Result<Vec<Forward>> {
    ports.into_iter().map(|(listener, port)| guest.forward(listener, port.guest)).collect()
}

pub(crate) fn machine_spec(host: &Inner, dir: &SandboxDir, accel: Accel) -> Result<MachineSpec> {
    let record = dir.record();
    let image = host.store.image_by_digest(&record.image_digest).map_err(store_error("read an image"))?;
    let kernel = host.store.kernel(&record.kernel_digest).map_err(store_error("read a kernel"))?;
    let initramfs = image::initramfs(&host.store, AGENT, &kernel)
        .map_err(|source| Error::Image { name: record.image.to_string(), source })?;
    let overlay = dir.overlay(0);
    let active = File::options().read(true).write(true).open(&overlay).map_err(|e| Error::io("open", &overlay, e))?;
    Ok(MachineSpec {
        name: record.name.to_string(),
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        accel,
        kernel: open(&kernel.kernel())?,
        initramfs: open(&initramfs)?,
        cmdline: cmdline(image.record.init),
        disk: DiskChain { base: open(&image.rootfs())?, overlays: vec![active] },
        network: match record.network {
            Network::None => NetworkMode::None,
            Network::Isolated => NetworkMode::Isolated,
            Network::Full => NetworkMode::Full,
        },
        extra_args: record.qemu_args.clone(),
        jail: jail_of(Some(&record.id)),
        limits: Limits::default(),
    })
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::io("open", path, e))
}

fn cmdline(init: Init) -> String {
    let init = match init {
        Init::Agent => "agent",
        Init::Image => "image",
    };
    format!("{KERNEL_OPTIONS} sandtree.init={init}")
}

fn identity(dir: &SandboxDir) -> Identity {
    use sha2::{Digest, Sha256};
    let record = dir.record();
    let mut entropy = vec![0; 64];
    getrandom::fill(&mut entropy).expect("the kernel gives random bytes");
    let digest = Sha256::digest(record.id.as_str());
    Identity {
        hostname: record.name.to_string(),
        machine_id: digest.iter().take(16).map(|b| format!("{b:02x}")).collect(),
        unix_time_ns: now_unix_ns(),
        entropy,
        network: match record.network {
            Network::None => proto::Network::None,
            Network::Isolated => proto::Network::Isolated,
            Network::Full => proto::Network::Full,
        },
    }
}

fn engine_choice(choice: AccelChoice) -> engine::AccelChoice {
    match choice {
        AccelChoice::Auto => engine::AccelChoice::Auto,
        AccelChoice::Kvm => engine::AccelChoice::Only(Accel::Kvm),
        AccelChoice::Tcg => engine::AccelChoice::Only(Accel::Tcg),
    }
}

pub(crate) fn running_state(running: &Running) -> StateRecord {
    StateRecord {
        boot_id: Some(boot_id()),
        pids: sandtree_store::Pids { keeper: Some(std::process::id()), qemu: Some(running.machine.pid()) },
        accelerator: Some(running.accel.to_string()),
        qemu_version: Some(running.qemu_version.clone()),
        ..StateRecord::new(Phase::Running, now_unix_ms())
    }
}
