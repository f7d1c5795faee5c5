//! `sandtree bench`: measurements, each beside what it is compared with.
//!
//! Always: the sandboxes of a run are removed when it ends, also when it fails or is broken off.

mod exec;
mod figure;
mod image;
mod scratch;
mod states;
mod store;
mod tool;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sandtree::{Error, ExecSpec, ForkSpec, Guest, Host, Result, Sandbox, SandboxSpec};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use super::{Outcome, open};
use crate::args::Global;
use crate::failure::Failure;
use crate::progress;

#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: Benchmark,
}

#[derive(Debug, clap::Subcommand)]
pub enum Benchmark {
    /// Round trips, throughput and boot, each against the plain-QEMU floor of the same run
    Exec {
        /// How often each is measured; the median counts
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// Checkpoint, revert, fork, pause and create, each beside its aim and against QEMU's own
    /// snapshots
    States(states::StatesArgs),
    /// Saves, artifacts, listings and comparisons, each against plain tools over the same bytes
    Store(store::StoreArgs),
    /// Imports, pulls, pushes and first commands of images, against tar, mke2fs and skopeo over the
    /// same bytes
    Image(image::ImageArgs),
}

const IMAGE: &str = "tiny";

pub async fn run(global: &Global, args: BenchArgs) -> Outcome {
    match args.what {
        Benchmark::Exec { rounds } => exec::run(global, rounds.max(1)).await,
        Benchmark::Image(args) => image::run(global, args).await,
        Benchmark::States(args) => states::run(global, args).await,
        Benchmark::Store(args) => store::run(global, args).await,
    }
}

/// Does the work of a benchmark, and removes what it made, however it ends.
async fn measured<T>(
    global: &Global,
    work: impl AsyncFnOnce(&Crew) -> Result<T>,
) -> Result<T, Failure> {
    let host = open(global).await?;
    let crew = Crew {
        host,
        made: Mutex::default(),
    };
    let bar = progress::spinner("measuring");
    let measured = tokio::select! {
        measured = prepared(&crew, work) => measured.map_err(Failure::from),
        told = told_to_end() => Err(told.err().map_or(Failure::Interrupted, Failure::from)),
    };
    bar.finish_and_clear();
    let cleared = crew.clear().await;
    let measured = measured?;
    cleared?;
    Ok(measured)
}

async fn prepared<T>(crew: &Crew, work: impl AsyncFnOnce(&Crew) -> Result<T>) -> Result<T> {
    crew.host
        .ensure_image(IMAGE, progress::image(IMAGE))
        .await?;
    work(crew).await
}

async fn told_to_end() -> Result<()> {
    let listen = |kind| signal(kind).map_err(|e| Error::io("listen for", "signals", e));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// The sandboxes of a run. What is under way when it is broken off undoes itself; what was made is
/// here.
struct Crew {
    host: Host,
    made: Mutex<Vec<Sandbox>>,
}

impl Crew {
    async fn create(&self, spec: SandboxSpec) -> Result<Sandbox> {
        self.create_on(&self.host, spec).await
    }

    /// In a store of the run's own, which has to outlive the crew.
    async fn create_on(&self, host: &Host, spec: SandboxSpec) -> Result<Sandbox> {
        let sandbox = host.create(spec).await?;
        self.join([sandbox.clone()]);
        Ok(sandbox)
    }

    async fn fork(&self, sandbox: &Sandbox, count: usize) -> Result<Vec<Sandbox>> {
        let (copies, _) = self.host.fork(sandbox, ForkSpec::new(count)).await?;
        self.join(copies.clone());
        Ok(copies)
    }

    fn join(&self, sandboxes: impl IntoIterator<Item = Sandbox>) {
        self.made
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(sandboxes);
    }

    async fn remove(&self, sandbox: Sandbox) -> Result<()> {
        sandbox.remove().await?;
        self.made
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|made| made.id() != sandbox.id());
        Ok(())
    }

    /// Removes everything that is left.
    async fn clear(&self) -> Result<()> {
        let left = std::mem::take(&mut *self.made.lock().unwrap_or_else(PoisonError::into_inner));
        let mut removals: JoinSet<_> = left
            .into_iter()
            .map(|sandbox| async move { sandbox.remove().await })
            .collect();
        let mut cleared = Ok(());
        while let Some(removed) = removals.join_next().await {
            cleared = cleared.and(removed.expect("a removal does not panic"));
        }
        cleared
    }
}

fn median<T: PartialOrd + Copy>(mut values: Vec<T>) -> T {
    values.sort_by(|a, b| a.partial_cmp(b).expect("measurements are numbers"));
    values[values.len() / 2]
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

async fn true_once(guest: &Guest) -> Result<()> {
    guest
        .exec(ExecSpec::argv(["/bin/true"]))
        .await?
        .wait()
        .await
        .map(drop)
}
