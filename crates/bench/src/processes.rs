//! `sandtree-bench processes`: what the processes of sandboxes cost: keepers, forks, idle machines,
//! and what a checkpoint writes. All of it through the program `sandtree`, as users run it.

use std::time::{Duration, Instant};

use sandtree::{Error, Result, Sandbox};
use tokio::task::JoinSet;

use crate::cli::{self, Cli};
use crate::config::Global;
use crate::crew::{Crew, measured, ms, true_once};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::host_load::Ticks;
use crate::process;
use crate::stores::disk_usage;

#[derive(Debug, clap::Args)]
pub struct ProcessesArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// How many copies to fork, beside 1 and 10
    #[arg(long, default_value_t = 50)]
    pub forks: usize,
}

/// How long an idle keeper and its QEMU are watched.
const IDLE: Duration = Duration::from_secs(5);
/// Background work of a new sandbox ends within this time.
const SETTLED: Duration = Duration::from_secs(2);
const DIRTY_MB: u64 = 100;
/// Many copies are many measurements already.
const CROWD_ROUNDS_MAX: usize = 2;

pub async fn run(global: &Global, args: ProcessesArgs) -> Outcome {
    let figures = measured(global, async |crew| {
        let bench = Bench {
            crew,
            cli: &Cli::find(global)?,
            rounds: args.rounds.max(1),
        };
        let sandbox = bench.cli.sandbox(crew, "processes").await?;
        let mut figures = bench.idle(&sandbox).await?;
        figures.push(bench.list().await?);
        figures.extend(bench.written(&sandbox).await?);
        figures.extend(bench.fork_time(&sandbox).await?);
        for count in [10, args.forks] {
            figures.extend(bench.forks(&sandbox, count).await?);
        }
        Ok(figures)
    })
    .await?;
    Ok(figures.into())
}

/// The processes of a running sandbox.
struct Pids {
    keeper: u32,
    qemu: u32,
}

impl Pids {
    fn of(sandbox: &Sandbox) -> Result<Self> {
        let info = sandbox.info()?;
        let missing = || Error::invalid("sandbox", sandbox.name(), "must run in a keeper");
        Ok(Self {
            keeper: info.keeper_pid.ok_or_else(missing)?,
            qemu: info.qemu_pid.ok_or_else(missing)?,
        })
    }
}

struct Bench<'a> {
    crew: &'a Crew,
    cli: &'a Cli,
    rounds: usize,
}

impl Bench<'_> {
    async fn idle(&self, sandbox: &Sandbox) -> Result<Vec<Figure>> {
        tokio::time::sleep(SETTLED).await;
        let pids = Pids::of(sandbox)?;
        let memory = process::pss_bytes(pids.keeper)? as f64 / 1e6;
        let mut figures = vec![Figure::new("PSS of a keeper", memory, "MB").at_most(12.0)];
        for (what, pid) in [("a keeper", pids.keeper), ("its QEMU", pids.qemu)] {
            let before = process::wakeups(pid)?;
            tokio::time::sleep(IDLE).await;
            let woken = (process::wakeups(pid)? - before) as f64 / IDLE.as_secs_f64();
            let what = format!("wake-ups of {what} of an idle guest, each second");
            figures.push(Figure::new(what, woken, "times"));
        }
        Ok(figures.into_iter().map(Figure::through_cli).collect())
    }

    async fn list(&self) -> Result<Figure> {
        let mut times = Vec::new();
        for _ in 0..self.rounds.max(10) {
            times.push(self.cli.run(&["ps"]).await?.ms);
        }
        Ok(Figure::ms("sandtree ps", times).at_most(15.0).through_cli())
    }

    /// What a checkpoint adds to the disk, compared with what the guest has written to its memory.
    async fn written(&self, sandbox: &Sandbox) -> Result<Vec<Figure>> {
        let name = sandbox.name();
        let write = format!("dd if=/dev/urandom of=/dev/shm/dirt bs=1M count={DIRTY_MB}");
        let mut grown = Vec::new();
        for _ in 0..self.rounds {
            self.cli.run(&["checkpoint", name]).await?;
            self.cli
                .run(&["exec", name, "--", "sh", "-c", &write])
                .await?;
            let before = disk_usage(&self.crew.home, sandbox.id())?;
            self.cli.run(&["checkpoint", name]).await?;
            let bytes = disk_usage(&self.crew.home, sandbox.id())? - before;
            grown.push(bytes as f64 / f64::from(1 << 20));
        }
        let figure = Figure::new(
            "disk space of a checkpoint with 100 MiB dirty",
            grown,
            "MiB",
        );
        let figure = figure.times("dirtied", DIRTY_MB as f64).ratio_at_most(1.1);
        Ok(vec![figure.through_cli()])
    }

    /// Processor time of both processes of a new copy, until its agent has acknowledged.
    async fn fork_time(&self, sandbox: &Sandbox) -> Result<Vec<Figure>> {
        let mut both = Vec::new();
        let mut keepers = Vec::new();
        for _ in 0..self.rounds {
            let copies = self.copies(sandbox, 1).await?;
            for copy in copies {
                let pids = Pids::of(&copy)?;
                let keeper = ms(process::processor_time(pids.keeper)?);
                both.push(keeper + ms(process::processor_time(pids.qemu)?));
                keepers.push(keeper);
                self.crew.remove(copy).await?;
            }
        }
        Ok(vec![
            Figure::ms("processor time of a fork, until acknowledged", both)
                .at_most(180.0)
                .through_cli(),
            Figure::ms("... of which its keeper", keepers).through_cli(),
        ])
    }

    async fn copies(&self, sandbox: &Sandbox, count: usize) -> Result<Vec<Sandbox>> {
        let prefix = cli::name("fork");
        let number = count.to_string();
        let words = ["fork", "-n", &number, "--name", &prefix, sandbox.name()];
        self.cli.run(&words).await?;
        let names = (1..=count).map(|number| format!("{prefix}-{number}"));
        names.map(|name| self.crew.adopt(&name)).collect()
    }

    /// Forks until all copies have run a command, and how busy the processors were.
    async fn forks(&self, sandbox: &Sandbox, count: usize) -> Result<Vec<Figure>> {
        let mut times = Vec::new();
        let mut shares = Vec::new();
        for _ in 0..self.rounds.min(CROWD_ROUNDS_MAX) {
            let ticks = Ticks::now()?;
            let began = Instant::now();
            let copies = self.copies(sandbox, count).await?;
            let answers = copies
                .clone()
                .into_iter()
                .map(|copy| async move { true_once(&copy.guest().await?).await });
            let answers = answers.collect::<JoinSet<_>>().join_all().await;
            times.push(ms(began.elapsed()));
            shares.push(Ticks::now()?.busy_since(ticks) * 100.0);
            answers.into_iter().collect::<Result<()>>()?;
            self.crew.clear_except(sandbox).await?;
        }
        let limit = if count <= 10 { 1200.0 } else { 6000.0 };
        let time = Figure::ms(format!("fork {count}, all answering"), times);
        let time = time.at("forks", "all answering, through the CLI", count as f64);
        let busy = Figure::new(format!("processors during fork {count}"), shares, "% busy");
        let figures = vec![time.at_most(limit), busy.at_least(90.0)];
        Ok(figures.into_iter().map(Figure::through_cli).collect())
    }
}
