//! Access to machines for benchmarks, with the cargo feature `bench` only.
//!
//! `crates/bench` starts machines without an agent, and forks that no driver owns. `tests/vm` saves
//! the devices of a machine that has loaded them.

use sandtree_engine::{Engine, Machine, MachineSpec, Memory, Preload, Start};

use crate::create::{self, CopySpec, Created};
use crate::error::{Result, engine_error, store_error};
use crate::fork::ForkSpec;
use crate::guest::Guest;
use crate::host::Host;
use crate::machine::spec::{Kernel, Shape, machine_record, machine_spec};
use crate::order::Wanted;
use crate::sandbox::Sandbox;

/// The machine of a stopped sandbox, without the preload library, to be started by the caller.
pub async fn bare_machine<'a>(host: &'a Host, sandbox: &str) -> Result<(&'a Engine, MachineSpec)> {
    let host = &host.inner;
    let engine = host.engine().await?;
    let (dir, _) = host.settled(sandbox)?;
    let accel = engine
        .accel(Default::default())
        .map_err(engine_error("be used"))?;
    let head = dir
        .head()
        .map_err(store_error("read where a sandbox stands"))?;
    let machine = machine_record(host, dir.record(), accel).await?;
    let shape = Shape {
        kernel: Kernel::Boots,
        memory: Memory::Empty,
        preload: Preload::Skip,
        start: Start::Run,
        disk: &head.disk,
        machine: &machine,
    };
    let spec = machine_spec(host, &dir, accel, shape)?;
    Ok((engine, spec))
}

/// Loads a state into a new machine, which does not continue, and returns the devices as that
/// machine saves them.
pub async fn devices_loaded(host: &Host, sandbox: &Sandbox, state: &str) -> Result<Vec<u8>> {
    let spec = CopySpec {
        source: host.inner.copy_source(sandbox.id(), state)?,
        mounts: create::ForkMounts::default(),
        name: ForkSpec::new(1).names(sandbox.name(), host)?.remove(0),
        batch: None,
    };
    let copy = create::copy(host.inner.clone(), spec).await?;
    let saved = match copy.machine() {
        Some(machine) => saved_devices(machine).await,
        None => Ok(Vec::new()),
    };
    tokio::task::block_in_place(|| drop(copy));
    saved.map_err(engine_error("save its devices"))
}

async fn saved_devices(machine: &Machine) -> Result<Vec<u8>, sandtree_engine::Error> {
    let devices = machine.prepare_devices().await?;
    machine.save_devices(&devices).await?;
    machine.take_devices(devices).await
}

/// A running fork without a driver: the caller has its QEMU. Dropping it ends the machine and
/// removes its files.
#[derive(Debug)]
pub struct BenchFork(Created);

impl BenchFork {
    pub async fn of(host: &Host, sandbox: &Sandbox) -> Result<BenchFork> {
        let loan = sandbox.borrow(Wanted::Copies).await?;
        let made = Self::from_state(host, sandbox, &loan.lent.state).await;
        loan.give_back().await;
        made
    }

    async fn from_state(host: &Host, sandbox: &Sandbox, state: &str) -> Result<BenchFork> {
        let spec = CopySpec {
            source: host.inner.copy_source(sandbox.id(), state)?,
            mounts: create::ForkMounts::default(),
            name: ForkSpec::new(1).names(sandbox.name(), host)?.remove(0),
            batch: None,
        };
        let copy = create::copy(host.inner.clone(), spec).await?;
        copy.resume().await.map(Self)
    }

    pub fn guest(&self) -> &Guest {
        &self.0.running.guest
    }

    pub fn machine(&self) -> &Machine {
        &self.0.running.machine
    }

    /// The number of overlays of the disk.
    pub fn disk_depth(&self) -> Result<usize> {
        let head = self
            .0
            .unfinished
            .dir()
            .head()
            .map_err(store_error("read where a sandbox stands"))?;
        Ok(head.disk.len())
    }

    /// Ends the machine and removes its files.
    pub async fn end(self) {
        let running = &self.0.running;
        running.machine.kill().await;
        running.hub.close("the measurement is over".into()).await;
        tokio::task::block_in_place(|| drop(self));
    }
}
