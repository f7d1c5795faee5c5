//! A machine that is up with everything that serves it, and how one gets there by booting.
//!
//! Always: what is started is owned by what is returned, so that an error or a dropped future ends
//! it. When it fails: the machine is gone, and the console's last lines are in the error.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandtree_engine::{
    self as engine, Accel, CpuChoice, DiskChain, Engine, Event, Events, Flushes, Limits, Machine,
    MachineSpec, Memory, Nesting, NetworkMode, Preload, Start, TrackingVerdict,
};
use sandtree_proto::{self as proto, Identity, Rebirth};
use sandtree_store::{
    AccelChoice, Init, LayerId, MachineRecord, Network, PublishedPort, SandboxDir, SandboxRecord,
    StateId,
};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::capture::Ground;
use crate::clock::Telling;
use crate::console::Console;
use crate::driver;
use crate::error::{Error, Result, engine_error, store_error};
use crate::fault::Step;
use crate::guest::{Forward, Guest};
use crate::host::Inner;
use crate::hub::{Gate, Hub, HubSpec};
use crate::link::LinkError;
use crate::moment::now_unix_ns;
use crate::spec::PUBLISH_ADDRESS;

/// The program in the guest, built with us.
pub(crate) static AGENT: &[u8] = include_bytes!(env!("SANDTREE_AGENT"));

/// For emulation and for KVM inside another guest, where everything takes longer, and for hosts
/// with other work.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// Warnings and worse go to the console, a panic ends the machine at once, and what only real
/// hardware or a distrusted compiler needs is not waited for.
const KERNEL_OPTIONS: &str = "console=ttyS0 loglevel=4 panic=-1 random.trust_cpu=on no_timer_check \
    tsc=reliable i8042.noaux i8042.nokbd cryptomgr.notests";
/// What must be free for a sandbox to start with: its overlay's tables, its logs, and a little to
/// write.
pub(crate) const DISK_RESERVE: u64 = 64 << 20;

/// A machine that is up, with everything that serves it.
#[derive(Debug)]
pub(crate) struct Running {
    pub machine: Machine,
    pub hub: Hub,
    pub guest: Guest,
    /// What QEMU tells, from the machine's start; its driver takes it.
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
    /// What was done in a lesser way than it could be, and why.
    pub degraded: Vec<String>,
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

/// A port of the host that is ours, and the guest's port it leads to.
#[derive(Debug, Clone)]
pub(crate) struct Listener {
    socket: Arc<TcpListener>,
    pub port: PublishedPort,
}

/// Takes the host's ports and keeps them: one chosen and let go could be taken by another.
pub(crate) async fn listen(ports: &[PublishedPort]) -> Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for port in ports {
        let bound = TcpListener::bind((PUBLISH_ADDRESS, port.host)).await;
        let address = format!("{PUBLISH_ADDRESS}:{}", port.host);
        let socket = bound.map_err(|source| Error::Port {
            address: address.clone(),
            source,
        })?;
        let host = socket
            .local_addr()
            .map_err(|source| Error::Port { address, source })?
            .port();
        listeners.push(Listener {
            socket: Arc::new(socket),
            port: PublishedPort {
                host,
                guest: port.guest,
            },
        });
    }
    Ok(listeners)
}

/// As [`listen`], with any free port where the one that is wanted is another's. Says so.
pub(crate) async fn listen_if_free(
    ports: &[PublishedPort],
) -> Result<(Vec<Listener>, Vec<String>)> {
    let (mut listeners, mut notes) = (Vec::new(), Vec::new());
    for port in ports {
        let taken = match listen(std::slice::from_ref(port)).await {
            Ok(listening) => {
                listeners.extend(listening);
                continue;
            }
            Err(error) => error,
        };
        let other = listen(&[PublishedPort { host: 0, ..*port }]).await?;
        notes.extend(other.iter().map(|other| {
            format!(
                "port {} of the guest is published on {}, not on {}: {taken}",
                port.guest, other.port.host, port.host
            )
        }));
        listeners.extend(other);
    }
    Ok((listeners, notes))
}

pub(crate) fn forward(guest: &Guest, ports: &[Listener]) -> Result<Vec<Forward>> {
    ports
        .iter()
        .map(|listener| guest.forward(listener.socket.clone(), listener.port.guest))
        .collect()
}

/// Starts a machine on a sandbox's disk and waits until its guest has taken the identity it is
/// given.
pub(crate) async fn boot(
    host: &Inner,
    dir: &SandboxDir,
    disk: &[LayerId],
    identity: Identity,
    timeout: Option<Duration>,
) -> Result<Running> {
    let engine = host.engine().await?;
    let accel = chosen_accel(engine, dir.record())?;
    let record = machine_record(host, dir.record(), accel).await?;
    let shape = Shape {
        memory: Memory::Empty,
        preload: Preload::Use,
        start: Start::Run,
        disk,
        machine: &record,
    };
    let (mut machine, degraded) = start_tracked(host, engine, dir, accel, shape).await?;
    let console = machine
        .take_console()
        .expect("a fresh machine has its console");
    let mut console =
        Console::keep(console, dir.console()).map_err(|e| Error::io("open", dir.console(), e))?;
    let mut events = machine.events();
    let timeout = timeout.unwrap_or(BOOT_TIMEOUT);
    let port = machine.take_link().expect("a fresh machine has its link");
    let (execs, (gate, gated)) = (fresh_execs(dir)?, gate(dir.record()));
    let hub = Hub::start(
        port,
        HubSpec {
            gate,
            ..HubSpec::fresh(execs.clone())
        },
    );
    let up = async {
        host.reach(Step::Machine, Some(&machine))?;
        come_up(host, &hub, identity, timeout).await
    };
    let up = tokio::select! {
        up = up => up,
        error = ends_or_stalls(host, &machine, &mut events, &mut console) => Err(error),
    };
    let guest = match up {
        Ok(guest) => guest,
        Err(error) => {
            // Awaited, so that whoever tries again finds the disk free.
            machine.kill().await;
            return Err(error.with_console(&console));
        }
    };
    Ok(Running {
        machine,
        hub,
        guest,
        events: Some(events),
        gate: gated,
        forwards: Vec::new(),
        console,
        ground: Ground::new(Vec::new(), 0),
        tracking: engine.verdicts().tracking.clone(),
        record,
        execs,
        degraded,
    })
}

/// With the preload library, or without it where QEMU does not take it.
async fn start_tracked(
    host: &Inner,
    engine: &Engine,
    dir: &SandboxDir,
    accel: Accel,
    shape: Shape<'_>,
) -> Result<(Machine, Vec<String>)> {
    let Shape { disk, machine, .. } = shape;
    let spec = machine_spec(host, dir, accel, shape)?;
    match engine.start(spec).await {
        Ok(machine) => Ok((machine, Vec::new())),
        Err(engine::Error::NotMapped { reason }) => {
            let shape = Shape {
                memory: Memory::Empty,
                preload: Preload::Skip,
                start: Start::Run,
                disk,
                machine,
            };
            let spec = machine_spec(host, dir, accel, shape)?;
            let machine = engine.start(spec).await.map_err(engine_error("start"))?;
            Ok((machine, vec![format!("memory is QEMU's own: {reason}")]))
        }
        Err(source) => Err(engine_error("start")(source)),
    }
}

/// The two ends of a gate, for a sandbox that has one.
pub(crate) fn gate(
    record: &SandboxRecord,
) -> (Option<mpsc::Sender<Gate>>, Option<mpsc::Receiver<Gate>>) {
    record.auto_checkpoint.map(|_| mpsc::channel(16)).unzip()
}

/// Waits for the agent, and tells it who it is; all of it within the time a boot may take.
async fn come_up(host: &Inner, hub: &Hub, identity: Identity, timeout: Duration) -> Result<Guest> {
    let end = tokio::time::Instant::now() + timeout;
    let late = |_| Error::Boot {
        after: timeout,
        console: String::new(),
    };
    hub.ready(timeout).await.map_err(|source| match source {
        LinkError::Timeout { .. } => late(()),
        source => unreachable_agent(source),
    })?;
    host.reach(Step::Hello, None)?;
    let configured = async {
        let guest = Guest::new(hub.connect().await.map_err(unreachable_agent)?);
        // The boot is no part of the time.
        let telling = Telling::begin();
        let identity = Identity {
            unix_time_ns: telling.unix_time_ns(),
            ..identity
        };
        host.faults.delay_message().await;
        guest.configure(identity).await?;
        telling.correct(&guest).await?;
        Ok(guest)
    };
    let guest = tokio::time::timeout_at(end, configured)
        .await
        .unwrap_or_else(|_| Err(late(())))?;
    host.reach(Step::Configure, None)?;
    Ok(guest)
}

/// Why a guest will not come up, however long it is waited for.
pub(crate) async fn ends_or_stalls(
    host: &Inner,
    machine: &Machine,
    events: &mut Events,
    console: &mut Console,
) -> Error {
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

pub(crate) fn unreachable_agent(source: LinkError) -> Error {
    Error::Guest {
        operation: "reach the guest's agent".into(),
        source,
    }
}

/// A directory for the output of one machine's detached commands. Those of others are beside it.
pub(crate) fn fresh_execs(dir: &SandboxDir) -> Result<PathBuf> {
    let id = StateId::random().map_err(store_error("make an id"))?;
    let path = dir.execs().join(id.as_str());
    std::fs::create_dir_all(&path).map_err(|e| Error::io("create", &path, e))?;
    Ok(path)
}

/// Removes the output of commands of all machines but one.
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

/// What distinguishes one start of a sandbox's machine from another.
pub(crate) struct Shape<'a> {
    pub memory: Memory,
    pub preload: Preload,
    pub start: Start,
    pub disk: &'a [LayerId],
    pub machine: &'a MachineRecord,
}

pub(crate) fn machine_spec(
    host: &Inner,
    dir: &SandboxDir,
    accel: Accel,
    shape: Shape<'_>,
) -> Result<MachineSpec> {
    let record = dir.record();
    let image = host
        .store
        .image_by_digest(&record.image_digest)
        .map_err(store_error("read an image"))?;
    let kernel = host
        .store
        .kernel(&record.kernel_digest)
        .map_err(store_error("read a kernel"))?;
    let initramfs = sandtree_images::initramfs(&host.store, AGENT, &kernel)
        .map_err(|error| error.making(&record.image))?;
    let (active, frozen) = shape.disk.split_last().expect("a sandbox has a disk");
    let active = dir.disk_layer(active);
    let active = File::options()
        .read(true)
        .write(true)
        .open(&active)
        .map_err(|e| Error::io("open", &active, e))?;
    let mut overlays = frozen
        .iter()
        .map(|id| open(&dir.disk_layer(id)))
        .collect::<Result<Vec<_>>>()?;
    overlays.push(active);
    Ok(MachineSpec {
        name: record.name.to_string(),
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        accel,
        machine_type: shape.machine.machine_type.clone(),
        cpu: shape.machine.cpu.clone(),
        kernel: open(&kernel.kernel())?,
        initramfs: open(&initramfs)?,
        cmdline: cmdline(image.record.init),
        disk: DiskChain {
            base: open(&image.rootfs())?,
            overlays,
            flushes: flushes(record),
        },
        network: network(shape.machine.network, record.network),
        extra_args: record.qemu_args.clone(),
        jail: host.jail(Some(&record.id)),
        limits: limits(record),
        memory: shape.memory,
        start: shape.start,
        preload: shape.preload,
    })
}

fn flushes(record: &SandboxRecord) -> Flushes {
    if record.durable {
        Flushes::PassedOn
    } else {
        Flushes::Ignored
    }
}

/// What QEMU writes is a disk, or all of memory in one stream, with what either needs beside its
/// data.
fn limits(record: &SandboxRecord) -> Limits {
    let largest = record.disk_bytes.max(record.memory_bytes);
    let file_bytes = largest
        .saturating_add(largest / 64)
        .saturating_add(256 << 20);
    Limits {
        file_bytes: Some(file_bytes),
        ..Limits::default()
    }
}

/// The network of a machine in a sandbox that may use `allowed`.
fn network(machine: Network, allowed: Network) -> NetworkMode {
    match (machine, allowed) {
        (Network::None, _) => NetworkMode::None,
        (Network::Isolated, _) => NetworkMode::Isolated,
        (Network::Full, Network::Full) => NetworkMode::Full,
        (Network::Full, Network::Isolated | Network::None) => NetworkMode::Restricted,
    }
}

/// The machine a sandbox gets here when it boots.
pub(crate) async fn machine_record(
    host: &Inner,
    record: &SandboxRecord,
    accel: Accel,
) -> Result<MachineRecord> {
    let engine = host.engine().await?;
    let nesting = if record.nested {
        Nesting::On
    } else {
        Nesting::Off
    };
    let choice = CpuChoice {
        model: record.cpu.as_deref(),
        nesting,
    };
    let cpu = engine
        .cpu(accel, choice)
        .await
        .map_err(engine_error("resolve a processor model"))?;
    host.keep_news(engine);
    Ok(MachineRecord {
        arch: record.arch,
        machine_type: engine.arch().machine_type().to_owned(),
        cpu: cpu.argument,
        accelerator: accel.to_string(),
        qemu_version: engine.version().to_string(),
        cpus: record.cpus,
        network: record.network,
        qemu_args: record.qemu_args.clone(),
        cpu_features: cpu.features,
        tsc_khz: engine.verdicts().tsc_khz.filter(|_| accel == Accel::Tcg),
    })
}

pub(crate) fn chosen_accel(engine: &Engine, record: &SandboxRecord) -> Result<Accel> {
    let choice = match record.accel {
        AccelChoice::Auto => engine::AccelChoice::Auto,
        AccelChoice::Kvm => engine::AccelChoice::Only(Accel::Kvm),
        AccelChoice::Tcg => engine::AccelChoice::Only(Accel::Tcg),
    };
    engine.accel(choice).map_err(engine_error("be used"))
}

pub(crate) fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::io("open", path, e))
}

pub(crate) fn cmdline(init: Init) -> String {
    let init = match init {
        Init::Agent => "agent",
        Init::Image => "image",
    };
    format!("{KERNEL_OPTIONS} sandtree.init={init}")
}

/// Who a sandbox's guest is.
pub(crate) fn identity(record: &SandboxRecord) -> Identity {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(record.id.as_str());
    let machine_id = digest.iter().take(16).map(|b| format!("{b:02x}")).collect();
    Identity {
        machine_id,
        hostname: record.name.to_string(),
        ..nobody(record)
    }
}

/// What a guest is before it belongs to a sandbox.
pub(crate) fn nobody(record: &SandboxRecord) -> Identity {
    Identity {
        hostname: "sandtree".into(),
        machine_id: "0".repeat(32),
        unix_time_ns: now_unix_ns(),
        entropy: random_bytes(64),
        network: match record.network {
            Network::None => proto::Network::None,
            Network::Isolated => proto::Network::Isolated,
            Network::Full => proto::Network::Full,
        },
    }
}

/// Whether a guest that goes on from a state is in the sandbox it was captured in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Belongs {
    /// It keeps its names.
    Here,
    /// It gets those of the sandbox.
    Elsewhere,
}

/// What a guest is told that goes on from a state with a disk of `disk_bytes`.
pub(crate) fn rebirth(record: &SandboxRecord, belongs: Belongs, disk_bytes: u64) -> Rebirth {
    let generation = random_bytes(16).try_into().expect("sixteen bytes");
    let identity = match belongs {
        Belongs::Here => Identity {
            hostname: String::new(),
            machine_id: String::new(),
            ..nobody(record)
        },
        Belongs::Elsewhere => identity(record),
    };
    let disk_bytes = (record.disk_bytes > disk_bytes).then_some(record.disk_bytes);
    Rebirth {
        generation,
        identity,
        disk_bytes,
    }
}

fn random_bytes(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}
