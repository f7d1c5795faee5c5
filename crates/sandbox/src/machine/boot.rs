//! Boots a machine, with everything that serves it.
//!
//! Always: the returned value owns everything that was started, so that an error or a dropped
//! future ends it. When it fails: the machine is gone, and the error has the console's last lines.

use std::time::Duration;

use sandtree_engine::{self as engine, Accel, Event, Events, Machine, Memory, Preload, Start};
use sandtree_proto::Identity;
use sandtree_store::{LayerId, SandboxDir};

use super::clock::Telling;
use super::ending::Ending;
use super::ground::Ground;
use super::running::{Running, fresh_execs, gate};
use super::spec::{Shape, chosen_accel, machine_record, machine_spec};
use crate::console::Console;
use crate::degradation::Degradation;
use crate::error::{Error, Result, engine_error};
use crate::fault::Step;
use crate::guest::Guest;
use crate::hub::{Hub, HubSpec};
use crate::inner::Inner;
use crate::link::LinkError;

/// For emulation and for KVM inside another guest, where everything takes longer, and for hosts
/// with other work.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// The free space that a sandbox needs to start: for its overlay's tables, its logs, and a few
/// writes.
pub(crate) const DISK_RESERVE: u64 = 64 << 20;

/// What distinguishes one boot of a sandbox from another.
pub(crate) struct Boot<'a> {
    pub disk: &'a [LayerId],
    pub identity: Identity,
    /// How long the boot may take; `None` for the default.
    pub timeout: Option<Duration>,
}

/// Starts a machine on a sandbox's disk and waits until its guest has taken the given identity.
pub(crate) async fn boot(host: &Inner, dir: &SandboxDir, boot: Boot<'_>) -> Result<Running> {
    let Boot {
        disk,
        identity,
        timeout,
    } = boot;
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
    let (mut machine, degraded) = start_tracked(host, dir, accel, shape).await?;
    let console = machine
        .take_console()
        .expect("a fresh machine has its console");
    let mut console =
        Console::keep(console, dir.console()).map_err(|e| Error::io("open", dir.console(), e))?;
    let mut events = machine.events();
    let timeout = timeout.unwrap_or(BOOT_TIMEOUT);
    let port = machine.take_link().expect("a fresh machine has its link");
    let execs = fresh_execs(dir)?;
    let (gate, gated) = gate(dir.record());
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
            // Waits for the end, so that a caller that tries again finds the disk free.
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

/// Starts a machine with the preload library, or without it where QEMU does not accept it.
async fn start_tracked(
    host: &Inner,
    dir: &SandboxDir,
    accel: Accel,
    shape: Shape<'_>,
) -> Result<(Machine, Vec<Degradation>)> {
    let engine = host.engine().await?;
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
            Ok((machine, vec![Degradation::MemoryUntracked { reason }]))
        }
        Err(source) => Err(engine_error("start")(source)),
    }
}

/// Waits for the agent, and sends it its identity; both within the timeout of the boot.
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
        // Read after the boot, so that the boot does not make the guest's clock late.
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

/// Waits until the guest cannot come up any more, and returns why.
pub(crate) async fn ends_or_stalls(
    host: &Inner,
    machine: &Machine,
    events: &mut Events,
    console: &mut Console,
) -> Error {
    tokio::select! {
        exit = machine.exited() => {
            console.drain().await;
            let reason = Ending::of(machine, &exit, console).reason;
            Error::BootEnded { reason, console: String::new() }
        }
        () = disk_full(events) => {
            let available_bytes = host.store.disk_free_bytes().unwrap_or(0);
            Error::HostDisk {
                path: host.store.root().to_owned(),
                wanted_bytes: DISK_RESERVE,
                available_bytes,
            }
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
