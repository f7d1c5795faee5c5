//! `sandtree-bench long`: how costs grow with time, memory, disk, states and copies. These parts
//! take minutes, so `all --quick` does not run them unless asked.

mod crowd;
mod written;

use std::time::{Duration, Instant};

use sandtree::{Error, Replace, Result, Sandbox, SandboxSpec};

use crate::cli::Cli;
use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, ms};
use crate::failure::{Measured, Outcome};
use crate::figure::Figure;
use crate::process;
use crate::samples::Samples;
use crate::stores::disk_usage;

#[derive(Debug, clap::Args)]
pub struct LongArgs {
    /// Measure only these parts (repeatable)
    #[arg(long, value_name = "NAME")]
    pub only: Vec<LongPart>,
    /// How many checkpoints one sandbox gets
    #[arg(long, default_value_t = 1000)]
    pub states: usize,
    /// How many copies run at the same time; fewer, if the host has too little memory
    #[arg(long, default_value_t = 200)]
    pub copies: usize,
    /// How many gibibytes the guest writes to its disk
    #[arg(long, default_value_t = 20)]
    pub disk_gib: u64,
    /// How long to take a checkpoint every 100 ms
    #[arg(long, default_value_t = 10)]
    pub minutes: u64,
}

/// The parts of this benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LongPart {
    /// Checkpoint and revert of guests with 512 MB to 32 GB
    Ram,
    /// Many checkpoints of one sandbox: stop, revert, disk, log
    States,
    /// A checkpoint every 100 ms: disk, descriptors, mappings, memory of the keeper
    Soak,
    /// Idle copies that run at the same time: their memory, and how many fit into 8 GB
    Density,
    /// What the tracking of written pages costs a guest that writes to all of its memory
    Tracking,
    /// Checkpoint and revert with a large overlay
    Disk,
}

const MIB: u64 = 1 << 20;
const RAM_MB: [u64; 6] = [512, 1024, 2048, 4096, 16384, 32768];
const ROUNDS: usize = 3;
const SOAK_INTERVAL: Duration = Duration::from_millis(100);
const ALL: [LongPart; 6] = [
    LongPart::Ram,
    LongPart::States,
    LongPart::Soak,
    LongPart::Density,
    LongPart::Tracking,
    LongPart::Disk,
];

pub async fn run(global: &Global, args: LongArgs) -> Outcome {
    let measured = measured(global, async |crew| {
        let bench = Bench {
            crew,
            cli: &Cli::find(global)?,
            args: &args,
        };
        let mut all = Measured::default();
        let only = |part: &LongPart| args.only.is_empty() || args.only.contains(part);
        for part in ALL.into_iter().filter(only) {
            let measured = bench.part(part).await?;
            all.figures.extend(measured.figures);
            all.left_out.extend(measured.left_out);
            crew.clear().await?;
        }
        Ok(all)
    })
    .await?;
    Ok(measured)
}

impl LongArgs {
    /// All of it.
    pub fn whole() -> Self {
        Self {
            only: Vec::new(),
            states: 1000,
            copies: 200,
            disk_gib: 20,
            minutes: 10,
        }
    }

    /// The parts that plots need, as short as they are useful.
    pub fn for_plots() -> Self {
        Self {
            only: vec![LongPart::Ram, LongPart::States],
            states: 100,
            ..Self::whole()
        }
    }
}

struct Bench<'a> {
    crew: &'a Crew,
    cli: &'a Cli,
    args: &'a LongArgs,
}

impl Bench<'_> {
    async fn part(&self, part: LongPart) -> Result<Measured> {
        let figures = match part {
            LongPart::Ram => return self.ram().await,
            LongPart::States => self.states().await?,
            LongPart::Soak => self.soak().await?,
            LongPart::Density => crowd::density(self).await?,
            LongPart::Tracking => written::tracking(self.crew).await?,
            LongPart::Disk => return written::large_disk(self.crew, self.args.disk_gib).await,
        };
        Ok(figures.into())
    }

    /// The guest's memory is sparse: only what the guest has used exists on the host.
    async fn ram(&self) -> Result<Measured> {
        let mut figures = Vec::new();
        let mut left_out = Vec::new();
        for memory_mb in RAM_MB {
            let spec = SandboxSpec {
                memory_bytes: Some(memory_mb * MIB),
                ..SandboxSpec::new(IMAGE)
            };
            let sandbox = match self.crew.create(spec).await {
                Err(error @ Error::HostMemory { .. }) => {
                    left_out.push(format!("a guest of {memory_mb} MB: {error}"));
                    continue;
                }
                created => created?,
            };
            let first = sandbox.checkpoint(None, Replace::No).await?;
            let mut stops = Vec::new();
            let mut runs = Vec::new();
            for _ in 0..ROUNDS {
                let checkpoint = sandbox.checkpoint(None, Replace::No).await?;
                stops.push(checkpoint.pause_ms);
                runs.push(sandbox.revert(&checkpoint.id).await?.restore.running_ms);
            }
            self.crew.remove(sandbox).await?;
            let x = memory_mb as f64;
            let what = |what| format!("{what}, guest of {memory_mb} MB");
            let start = Figure::ms(what("stop of the first checkpoint"), first.pause_ms);
            let start = start.at("ram", "stop of the first checkpoint", x);
            figures.push(match memory_mb {
                4096 => start.at_most(20.0),
                _ => start,
            });
            figures.push(Figure::ms(what("stop of a checkpoint"), stops).at("ram", "stop", x));
            let run = Figure::ms(what("revert, until the guest runs"), runs);
            figures.push(run.at("ram", "revert, until it runs", x));
        }
        Ok(Measured {
            figures,
            left_out,
            ..Measured::default()
        })
    }

    async fn states(&self) -> Result<Vec<Figure>> {
        let sandbox = self.crew.create(SandboxSpec::new(IMAGE)).await?;
        let mut figures = Vec::new();
        let mut taken = 0;
        let disk = || disk_usage(&self.crew.home, sandbox.id());
        let base = disk()?;
        for depth in [1, 10, 100, 1000]
            .into_iter()
            .filter(|d| *d <= self.args.states)
        {
            let mut stops = Vec::new();
            while taken < depth {
                stops.push(sandbox.checkpoint(None, Replace::No).await?.pause_ms);
                taken += 1;
            }
            let last = sandbox.checkpoint(None, Replace::No).await?;
            let mut runs = Vec::new();
            let mut wholes = Vec::new();
            for _ in 0..ROUNDS {
                let restore = sandbox.revert(&last.id).await?.restore;
                runs.push(restore.running_ms);
                wholes.push(restore.total_ms);
            }
            let began = Instant::now();
            sandbox.states()?;
            let listed = ms(began.elapsed());
            let log = self.cli.run(&["log", sandbox.name()]).await?.ms;
            let gc = self.cli.run(&["gc", "--dry-run"]).await?.ms;
            let x = depth as f64;
            let what = |what| format!("{what}, {depth} states");
            let tail = stops.split_off(stops.len().saturating_sub(ROUNDS));
            figures.push(Figure::ms(what("stop of a checkpoint"), tail).at("depth", "stop", x));
            let run = Figure::ms(what("revert, until the guest runs"), runs);
            figures.push(run.at("depth", "revert, until it runs", x));
            let whole = Figure::ms(what("revert, whole"), wholes);
            figures.push(whole.at("depth", "revert, whole", x));
            figures.push(Figure::ms(what("list of states"), listed).at("depth", "list", x));
            figures.push(Figure::ms(what("sandtree log"), log).through_cli());
            figures.push(Figure::ms(what("sandtree gc --dry-run"), gc).through_cli());
            let each = (disk()? - base) as f64 / 1e6 / x;
            figures.push(Figure::new(what("disk of a state"), each, "MB"));
        }
        Ok(figures)
    }

    /// Through a keeper, so that its memory is that of one sandbox alone.
    async fn soak(&self) -> Result<Vec<Figure>> {
        let sandbox = self.cli.sandbox(self.crew, "soak").await?;
        let began = Instant::now();
        let whole = Duration::from_secs(self.args.minutes * 60);
        // Allocators and caches have taken what they keep by then.
        let mut early = None;
        let mut stops = Vec::new();
        let mut clock = tokio::time::interval(SOAK_INTERVAL);
        while began.elapsed() < whole {
            clock.tick().await;
            if early.is_none() && began.elapsed() > whole / 10 {
                early = Some(self.usage(&sandbox)?);
            }
            stops.push(
                sandbox
                    .checkpoint(Some("soak"), Replace::Yes)
                    .await?
                    .pause_ms,
            );
        }
        let after = self.usage(&sandbox)?;
        let count = stops.len();
        let stops = Samples::from(stops);
        let mut figures = vec![
            Figure::ms("stop of a checkpoint every 100 ms", stops)
                .note(format!("{count} checkpoints, each replaces the last")),
        ];
        for ((what, unit, early), (_, _, after)) in early.into_iter().flatten().zip(after) {
            let figure = Figure::new(format!("{what} after them"), after, unit);
            figures.push(figure.times("after a tenth of them", early));
        }
        Ok(figures.into_iter().map(Figure::through_cli).collect())
    }

    fn usage(&self, sandbox: &Sandbox) -> Result<[(&'static str, &'static str, f64); 5]> {
        let info = sandbox.info()?;
        let missing = || Error::invalid("sandbox", sandbox.name(), "must run in a keeper");
        let keeper = info.keeper_pid.ok_or_else(missing)?;
        let qemu = info.qemu_pid.ok_or_else(missing)?;
        let disk = disk_usage(&self.crew.home, sandbox.id())? as f64 / 1e6;
        let memory = process::pss_bytes(keeper)? as f64 / 1e6;
        Ok([
            ("disk of the sandbox", "MB", disk),
            ("PSS of its keeper", "MB", memory),
            (
                "descriptors of its keeper",
                "descriptors",
                process::descriptors(keeper)? as f64,
            ),
            (
                "descriptors of its QEMU",
                "descriptors",
                process::descriptors(qemu)? as f64,
            ),
            (
                "mappings of its QEMU",
                "mappings",
                process::mappings(qemu)? as f64,
            ),
        ])
    }
}
