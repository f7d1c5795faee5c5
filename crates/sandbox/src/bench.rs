//! Access to machines for benchmarks, with the cargo feature `bench` only.
//!
//! `crates/bench` is the only user: it starts machines without an agent, and forks that no driver
//! owns.

use sandtree_engine::{Engine, Machine, MachineSpec, Memory, Preload, Start};

use crate::boot::{Running, Shape, machine_record, machine_spec};
use crate::capture::engine_error;
use crate::create::{self, Newborn};
use crate::error::Result;
use crate::fork::ForkSpec;
use crate::guest::Guest;
use crate::host::{Host, store_error};
use crate::lend::Wanted;
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
        memory: Memory::Empty,
        preload: Preload::Skip,
        start: Start::Run,
        disk: &head.disk,
        machine: &machine,
    };
    let spec = machine_spec(host, &dir, accel, shape)?;
    Ok((engine, spec))
}

/// A running fork without a driver: the caller has its QEMU. Dropping it ends the machine and
/// removes its files.
#[derive(Debug)]
pub struct BenchFork {
    // The fields are dropped in this order: the machine ends before its files are removed.
    running: Running,
    files: Newborn,
}

impl BenchFork {
    pub async fn of(host: &Host, sandbox: &Sandbox) -> Result<BenchFork> {
        let point = sandbox.lend(Wanted::Copies).await?;
        let made = Self::from_state(host, sandbox.id(), &point.state).await;
        sandbox.take_back(&point.state).await?;
        made
    }

    async fn from_state(host: &Host, id: &str, state: &str) -> Result<BenchFork> {
        let (source, record) = host.inner.fork_source(id, state)?;
        let name = host
            .fork_names(record.name.as_str(), &ForkSpec::new(1))?
            .remove(0);
        let copy = create::copy(host.inner.clone(), source, &record, name).await?;
        let (files, running) = copy.wake().await?;
        Ok(BenchFork { running, files })
    }

    pub fn guest(&self) -> &Guest {
        &self.running.guest
    }

    pub fn machine(&self) -> &Machine {
        &self.running.machine
    }

    /// How many overlays the disk has.
    pub fn disk_depth(&self) -> Result<usize> {
        let head = self
            .files
            .dir()
            .head()
            .map_err(store_error("read where a sandbox stands"))?;
        Ok(head.disk.len())
    }

    /// Ends the machine and removes its files.
    pub async fn end(self) {
        self.running.machine.kill().await;
        self.running
            .hub
            .close("the measurement is over".into())
            .await;
        tokio::task::block_in_place(|| drop(self.files));
    }
}
