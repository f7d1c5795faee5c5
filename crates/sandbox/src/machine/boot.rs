//! Boots a machine from its beginning, with everything that serves it. `wait` boots one from a
//! kernel that waits for its root.
//!
//! Always: the returned value owns everything that was started, so that an error or a dropped
//! future ends it. When it fails: the machine is gone, and the error has the console's last lines.

use std::path::PathBuf;
use std::time::Duration;

use sandtree_engine::{self as engine, Accel, Event, Events, Machine, Memory, Preload, Start};
use sandtree_proto::Identity;
use sandtree_store::{LayerId, MachineRecord, SandboxDir};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::clock::Telling;
use super::ending::Ending;
use super::ground::Ground;
use super::running::{Running, fresh_execs, gate};
use super::spec::{Kernel, Shape, chosen_accel, machine_record, machine_spec};
use crate::console::Console;
use crate::degradation::Degradation;
use crate::error::{Error, Result, engine_error};
use crate::fault::Step;
use crate::guest::Guest;
use crate::hub::{Gate, Hub, HubSpec};
use crate::inner::Inner;
use crate::link::LinkError;
use crate::mounts::MountPort;

/// For emulation and for KVM inside another guest, where everything takes longer, and for hosts
/// with other work.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// The free space that a sandbox needs to start: for its overlay's tables, its logs, and a few
/// writes.
pub(crate) const DISK_RESERVE: u64 = 64 << 20;

/// How long the reason of a guest's end may follow the loss of its link.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// What distinguishes one boot of a sandbox from another.
pub(crate) struct Boot<'a> {
    pub disk: &'a [LayerId],
    pub identity: Identity,
    /// How long the boot may take; `None` for the default.
    pub timeout: Option<Duration>,
}

/// Starts a machine on a sandbox's disk and waits until its guest has taken the given identity.
pub(crate) async fn boot(host: &Inner, dir: &SandboxDir, boot: Boot<'_>) -> Result<Running> {
    let mut arriving = power_on(host, dir, boot.disk, Kernel::Boots).await?;
    let patience = Patience::new(boot.timeout);
    let Arriving {
        machine,
        hub,
        watch,
        ..
    } = &mut arriving;
    let up = async {
        host.reach(Step::Machine, Some(machine))?;
        patience.greeted(hub).await?;
        host.reach(Step::Hello, None)?;
        patience.configured(host, hub, boot.identity).await
    };
    let guest = watch.during(host, machine, up).await?;
    arriving.into_running(host, guest).await
}

/// Starts a machine whose kernel boots from its beginning.
pub(super) async fn power_on(
    host: &Inner,
    dir: &SandboxDir,
    disk: &[LayerId],
    kernel: Kernel,
) -> Result<Arriving> {
    let engine = host.engine().await?;
    let accel = chosen_accel(engine, dir.record())?;
    let record = machine_record(host, dir.record(), accel).await?;
    let shape = Shape {
        kernel,
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
    let console =
        Console::keep(console, dir.console()).map_err(|e| Error::io("open", dir.console(), e))?;
    let events = machine.events();
    let port = machine.take_link().expect("a fresh machine has its link");
    Arriving::new(
        dir,
        Started {
            machine,
            port,
            console,
            events,
            ground: Ground::new(Vec::new(), 0),
            record,
            degraded,
        },
    )
}

/// A machine that was started, before anything serves it.
pub(super) struct Started {
    pub machine: Machine,
    pub port: UnixStream,
    pub console: Console,
    pub events: Events,
    pub ground: Ground,
    pub record: MachineRecord,
    pub degraded: Vec<Degradation>,
}

/// A machine whose guest is not up yet, with everything that serves it.
pub(super) struct Arriving {
    pub machine: Machine,
    pub hub: Hub,
    pub watch: Watch,
    pub degraded: Vec<Degradation>,
    gate: Option<mpsc::Receiver<Gate>>,
    execs: PathBuf,
    ground: Ground,
    record: MachineRecord,
}

impl Arriving {
    pub fn new(dir: &SandboxDir, mut started: Started) -> Result<Self> {
        let execs = fresh_execs(dir)?;
        let (gate, gated) = gate(dir.record());
        let spec = HubSpec {
            gate,
            mounts: MountPort::new(started.machine.take_mounts()),
            ..HubSpec::fresh(execs.clone())
        };
        Ok(Self {
            machine: started.machine,
            hub: Hub::start(started.port, spec),
            watch: Watch {
                events: started.events,
                console: started.console,
            },
            degraded: started.degraded,
            gate: gated,
            execs,
            ground: started.ground,
            record: started.record,
        })
    }

    pub async fn into_running(self, host: &Inner, guest: Guest) -> Result<Running> {
        let engine = host.engine().await?;
        Ok(Running {
            machine: self.machine,
            hub: self.hub,
            guest,
            events: Some(self.watch.events),
            gate: self.gate,
            forwards: Vec::new(),
            console: self.watch.console,
            ground: self.ground,
            tracking: engine.verdicts().tracking.clone(),
            record: self.record,
            execs: self.execs,
            degraded: self.degraded,
            created: None,
        })
    }
}

/// The signs that a guest cannot come up any more.
pub(super) struct Watch {
    events: Events,
    console: Console,
}

impl Watch {
    /// Does a part of the boot. If that fails, or the guest cannot come up any more, the machine
    /// ends, and the error has the console's last lines.
    pub async fn during<T>(
        &mut self,
        host: &Inner,
        machine: &Machine,
        part: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let Self { events, console } = self;
        let mut done = tokio::select! {
            done = part => done,
            error = ends_or_stalls(host, machine, events, console) => Err(error),
        };
        // A guest that powers off also closes its link, and the link's end may be seen first.
        if matches!(done, Err(Error::Guest { .. })) {
            let ends = ends_or_stalls(host, machine, events, console);
            if let Ok(error) = tokio::time::timeout(ENDS_WITHIN, ends).await {
                done = Err(error);
            }
        }
        match done {
            Ok(done) => Ok(done),
            Err(error) => {
                // Waits for the end, so that a caller that tries again finds the disk free.
                machine.kill().await;
                Err(error.with_console(console))
            }
        }
    }
}

/// Starts a machine with the preload library, or without it where QEMU does not accept it.
async fn start_tracked(
    host: &Inner,
    dir: &SandboxDir,
    accel: Accel,
    shape: Shape<'_>,
) -> Result<(Machine, Vec<Degradation>)> {
    let engine = host.engine().await?;
    let Shape {
        kernel,
        disk,
        machine,
        ..
    } = shape;
    let spec = machine_spec(host, dir, accel, shape)?;
    match engine.start(spec).await {
        Ok(machine) => Ok((machine, Vec::new())),
        Err(engine::Error::NotMapped { reason }) => {
            let shape = Shape {
                kernel,
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

/// The time that the parts of one boot may take together.
pub(super) struct Patience {
    whole: Duration,
    end: tokio::time::Instant,
}

impl Patience {
    pub fn new(timeout: Option<Duration>) -> Self {
        let whole = timeout.unwrap_or(BOOT_TIMEOUT);
        Self {
            whole,
            end: tokio::time::Instant::now() + whole,
        }
    }

    /// How long the whole boot may take.
    pub fn whole(&self) -> Duration {
        self.whole
    }

    /// Waits for the agent.
    pub async fn greeted(&self, hub: &Hub) -> Result<()> {
        hub.ready(self.whole).await.map_err(|source| match source {
            LinkError::Timeout { .. } => self.over(),
            source => unreachable_agent(source),
        })
    }

    /// Gives the guest its identity.
    pub async fn configured(&self, host: &Inner, hub: &Hub, identity: Identity) -> Result<Guest> {
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
        let guest = self.within(configured).await?;
        host.reach(Step::Configure, None)?;
        Ok(guest)
    }

    pub async fn within<T>(&self, part: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::time::timeout_at(self.end, part)
            .await
            .unwrap_or_else(|_| Err(self.over()))
    }

    fn over(&self) -> Error {
        Error::Boot {
            after: self.whole,
            console: String::new(),
        }
    }
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
