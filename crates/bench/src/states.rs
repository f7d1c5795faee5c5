//! `sandtree-bench states`: the cost of checkpoint, revert, fork, pause and create, each with its
//! target.

mod costs;

use std::time::Instant;

use sandtree::bench::BenchFork;
use sandtree::{Replace, RestoreReport, Result, Sandbox, SandboxSpec};
use tokio::task::JoinSet;

use crate::bare::bare_start;
use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, ms, true_once};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::fork::{memory_use, snapshot_delete, snapshot_load, snapshot_save};
use crate::samples::Samples;
use crate::stores::disk_usage;
use crate::turn::Turn;
use costs::{Costs, DIRTY_MB, Dirtied, REST, idle_checkpoint, use_memory};

#[derive(Debug, clap::Args)]
pub struct StatesArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Measure only these parts (repeatable)
    #[arg(long, value_name = "NAME")]
    pub only: Vec<Part>,
    /// Without 4 GB guests and without 50 forks
    #[arg(long)]
    pub quick: bool,
}

/// The parts of this benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Pause and total time, by written memory and by guest size
    Checkpoint,
    /// The 50th checkpoint, compared with the 1st
    Depth,
    /// Disk usage of an idle checkpoint
    Size,
    /// Checkpoint and revert, compared with QEMU's snapshot-save and snapshot-load
    Qemu,
    /// Revert, compared with a bare start of QEMU
    Revert,
    /// Pause and resume, compared with a bare start of QEMU
    Pause,
    /// Create from a warm image, compared with a cold boot
    Create,
    /// Fork of 1, 10 and 50 copies, until all have answered
    Fork,
    /// Memory that a copy does not share
    Memory,
}

const MIB: u64 = 1 << 20;
const SMALL: u64 = 512 * MIB;
const LARGE: u64 = 4096 * MIB;
/// The tag of QEMU's own snapshot.
const SNAPSHOT: &str = "bench";
const MB512: &str = "512 MB";
const GB4: &str = "4 GB";
const DEPTH: usize = 50;
const SIZE_CHECKPOINTS: usize = 10;
const FORKS: [usize; 3] = [1, 10, 50];
/// Many copies are many measurements already.
const CROWD_ROUNDS_MAX: usize = 3;

const ALL: [Part; 9] = [
    Part::Checkpoint,
    Part::Depth,
    Part::Size,
    Part::Qemu,
    Part::Revert,
    Part::Pause,
    Part::Create,
    Part::Fork,
    Part::Memory,
];

pub async fn run(global: &Global, args: StatesArgs) -> Outcome {
    let rounds = args.rounds.max(1);
    let figures = measured(global, async |crew| {
        Bench {
            crew,
            rounds,
            quick: args.quick,
        }
        .parts(&args.only)
        .await
    })
    .await?;
    Ok(figures.into())
}

struct Bench<'a> {
    crew: &'a Crew,
    rounds: usize,
    quick: bool,
}

impl Bench<'_> {
    async fn parts(&self, only: &[Part]) -> Result<Vec<Figure>> {
        let mut figures = Vec::new();
        for part in ALL
            .into_iter()
            .filter(|part| only.is_empty() || only.contains(part))
        {
            figures.extend(self.part(part).await?);
            // Guests of one part must not disturb the next.
            self.crew.clear().await?;
        }
        Ok(figures)
    }

    async fn part(&self, part: Part) -> Result<Vec<Figure>> {
        match part {
            Part::Checkpoint => self.checkpoints().await,
            Part::Depth => self.depth().await,
            Part::Size => self.size().await,
            Part::Qemu => self.qemu().await,
            Part::Revert => self.revert().await,
            Part::Pause => self.pause().await,
            Part::Create => self.create().await,
            Part::Fork => self.forks().await,
            Part::Memory => self.memory().await,
        }
    }

    async fn sandbox(&self, memory_bytes: u64) -> Result<Sandbox> {
        self.crew
            .create(SandboxSpec {
                memory_bytes: Some(memory_bytes),
                ..SandboxSpec::new(IMAGE)
            })
            .await
    }

    /// A stopped sandbox, whose machine a bare QEMU runs.
    async fn shape(&self) -> Result<Sandbox> {
        let shape = self.sandbox(SMALL).await?;
        shape.pause().await?;
        Ok(shape)
    }

    async fn checkpoints(&self) -> Result<Vec<Figure>> {
        let small = Dirtied::new(self.sandbox(SMALL).await?).await?;
        let large = if self.quick {
            None
        } else {
            Some(Dirtied::new(self.sandbox(LARGE).await?).await?)
        };
        let mut figures = Vec::new();
        for dirty_mb in DIRTY_MB {
            let mut at_small = Costs::default();
            let mut at_large = Costs::default();
            for _ in 0..self.rounds {
                at_small.push(&small.checkpoint(dirty_mb).await?);
                if let Some(large) = &large {
                    at_large.push(&large.checkpoint(dirty_mb).await?);
                }
            }
            figures.extend(checkpoint_figures(MB512, dirty_mb, &at_small));
            if large.is_some() {
                let pause = at_small.pause();
                figures.extend(checkpoint_figures(GB4, dirty_mb, &at_large));
                let same = Figure::ms(
                    format!("the same stop at 4 GB, {dirty_mb} MB dirty"),
                    at_large.pause(),
                );
                figures.push(same.times("at 512 MB", pause).ratio_at_most(1.5));
            }
        }
        Ok(figures)
    }

    async fn depth(&self) -> Result<Vec<Figure>> {
        let mut first = Costs::default();
        let mut last = Costs::default();
        for _ in 0..self.rounds {
            let sandbox = self.sandbox(SMALL).await?;
            for number in 1..=DEPTH {
                let checkpoint = sandbox.checkpoint(None, Replace::No).await?;
                match number {
                    1 => first.push(&checkpoint),
                    DEPTH => last.push(&checkpoint),
                    _ => {}
                }
            }
            self.crew.remove(sandbox).await?;
        }
        Ok(vec![
            Figure::ms("stop of the 1st checkpoint", first.pause()).note(first.captured()),
            Figure::ms("total of the 1st checkpoint", first.total()),
            Figure::ms("stop of the 50th checkpoint", last.pause())
                .times("the 1st", first.pause())
                .ratio_at_most(1.5)
                .note(last.captured()),
            Figure::ms("total of the 50th checkpoint", last.total())
                .times("the 1st", first.total()),
        ])
    }

    async fn size(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox(SMALL).await?;
        idle_checkpoint(&sandbox).await?;
        tokio::time::sleep(REST).await;
        let before = disk_usage(&self.crew.home, sandbox.id())?;
        for _ in 0..SIZE_CHECKPOINTS {
            idle_checkpoint(&sandbox).await?;
        }
        tokio::time::sleep(REST).await;
        let each =
            (disk_usage(&self.crew.home, sandbox.id())? - before) as f64 / SIZE_CHECKPOINTS as f64;
        let what = "an idle checkpoint on the disk, everything included";
        Ok(vec![Figure::new(what, each / 1e6, "MB").at_most(0.2)])
    }

    async fn qemu(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox(SMALL).await?;
        let idle = self.against_snapshots(&sandbox).await?;
        use_memory(&sandbox.guest().await?).await?;
        let used = self.against_snapshots(&sandbox).await?;
        let ahead = idle.saved_still.median() / idle.pause.median();
        let save = |what: &str, pause: Samples, save: Samples| {
            Figure::ms(what, pause).shorter_than("QEMU snapshot-save", save)
        };
        Ok(vec![
            save("stop of an idle checkpoint", idle.pause, idle.saved_still).ratio_at_least(15.0),
            save("whole idle checkpoint", idle.total, idle.saved_total),
            Figure::ms("revert of an idle guest, until it runs", idle.running)
                .shorter_than("QEMU snapshot-load", idle.loaded_still),
            Figure::ms("whole revert of an idle guest", idle.reverted)
                .shorter_than("QEMU snapshot-load", idle.loaded_total),
            save(
                "stop of a checkpoint, 300 MB used",
                used.pause,
                used.saved_still,
            )
            .ratio_at_least(ahead),
            save(
                "whole checkpoint, 300 MB used",
                used.total,
                used.saved_total,
            ),
            Figure::ms("revert with 300 MB used, until it runs", used.running)
                .shorter_than("QEMU snapshot-load", used.loaded_still),
            Figure::ms("whole revert with 300 MB used", used.reverted)
                .shorter_than("QEMU snapshot-load", used.loaded_total),
        ])
    }

    /// Compares our checkpoints of a guest with QEMU's snapshots of its fork, and both restores.
    async fn against_snapshots(&self, sandbox: &Sandbox) -> Result<Rivals> {
        // A checkpoint now, so that earlier writes do not count.
        let base = idle_checkpoint(sandbox).await?;
        let fork = BenchFork::of(&self.crew.host, sandbox).await?;
        let mut ours = Costs::default();
        let mut saves = Vec::new();
        let mut loads = Vec::new();
        let mut reverts = Vec::new();
        for round in 0..self.rounds {
            if round > 0 {
                snapshot_delete(&fork, SNAPSHOT).await?;
            }
            let mine = idle_checkpoint(sandbox);
            let (mine, save) = Turn::of(round)
                .both(mine, snapshot_save(&fork, SNAPSHOT))
                .await?;
            ours.push(&mine);
            saves.push(save);
        }
        for round in 0..self.rounds {
            let revert = sandbox.revert(&base.id);
            let (revert, load) = Turn::of(round)
                .both(revert, snapshot_load(&fork, SNAPSHOT))
                .await?;
            reverts.push(revert.restore);
            loads.push(load);
        }
        fork.end().await;
        Ok(Rivals {
            pause: ours.pause(),
            total: ours.total(),
            saved_still: samples(&saves, |job| ms(job.still)),
            saved_total: samples(&saves, |job| ms(job.total)),
            running: samples(&reverts, |restore| restore.running_ms),
            reverted: samples(&reverts, |restore| restore.total_ms),
            loaded_still: samples(&loads, |job| ms(job.still)),
            loaded_total: samples(&loads, |job| ms(job.total)),
        })
    }

    async fn revert(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox(SMALL).await?;
        let shape = self.shape().await?;
        let base = sandbox.checkpoint(None, Replace::No).await?;
        let mut times = Vec::new();
        let mut bare = Vec::new();
        for _ in 0..self.rounds {
            true_once(&sandbox.guest().await?).await?;
            times.push(sandbox.revert(&base.id).await?.restore);
            bare.push(ms(bare_start(&self.crew.host, shape.id()).await?));
        }
        Ok(restore_figures("revert", &times, bare).into())
    }

    async fn pause(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox(SMALL).await?;
        let shape = self.shape().await?;
        let mut pauses = Vec::new();
        let mut resumes = Vec::new();
        let mut bare = Vec::new();
        for _ in 0..self.rounds {
            true_once(&sandbox.guest().await?).await?;
            pauses.push(sandbox.pause().await?.total_ms);
            resumes.push(sandbox.resume().await?);
            bare.push(ms(bare_start(&self.crew.host, shape.id()).await?));
        }
        let mut figures = vec![Figure::ms("pause, synced", pauses)];
        figures.extend(restore_figures("resume", &resumes, bare));
        Ok(figures)
    }

    async fn create(&self) -> Result<Vec<Figure>> {
        // The first one boots and leaves a warm image.
        let first = self.sandbox(SMALL).await?;
        self.crew.remove(first).await?;
        let mut warm = Vec::new();
        let mut cold = Vec::new();
        for _ in 0..self.rounds {
            warm.push(self.created(SandboxSpec::new(IMAGE)).await?);
            cold.push(
                self.created(SandboxSpec {
                    cold: true,
                    ..SandboxSpec::new(IMAGE)
                })
                .await?,
            );
        }
        Ok(vec![
            Figure::ms("create, warm", warm)
                .shorter_than("cold", cold)
                .ratio_at_least(10.0),
        ])
    }

    async fn created(&self, spec: SandboxSpec) -> Result<f64> {
        let began = Instant::now();
        let sandbox = self.crew.create(spec).await?;
        let took = began.elapsed();
        self.crew.remove(sandbox).await?;
        Ok(ms(took))
    }

    /// A sandbox whose guest has run a command. In a copy of one that has run none, the first one
    /// also reads its program from the disk.
    async fn used(&self) -> Result<Sandbox> {
        let sandbox = self.sandbox(SMALL).await?;
        true_once(&sandbox.guest().await?).await?;
        Ok(sandbox)
    }

    async fn forks(&self) -> Result<Vec<Figure>> {
        let sandbox = self.used().await?;
        let mut figures = Vec::new();
        for count in FORKS
            .into_iter()
            .filter(|count| !self.quick || *count <= 10)
        {
            let rounds = if count > 10 {
                self.rounds.min(CROWD_ROUNDS_MAX)
            } else {
                self.rounds
            };
            let mut times = Vec::new();
            for _ in 0..rounds {
                times.push(self.forked(&sandbox, count).await?);
            }
            let figure = Figure::ms(format!("fork {count}, until all have answered"), times);
            let each = figure.ours.median() / count as f64;
            let figure = figure.note(format!("{each:.0} ms each"));
            figures.push(figure.at("forks", "until all have answered", count as f64));
        }
        Ok(figures)
    }

    async fn forked(&self, sandbox: &Sandbox, count: usize) -> Result<f64> {
        let began = Instant::now();
        let copies = self.crew.fork(sandbox, count).await?;
        let answers = copies
            .clone()
            .into_iter()
            .map(|copy| async move { true_once(&copy.guest().await?).await });
        let answers = answers.collect::<JoinSet<_>>().join_all().await;
        let took = began.elapsed();
        answers.into_iter().collect::<Result<()>>()?;
        for copy in copies {
            self.crew.remove(copy).await?;
        }
        Ok(ms(took))
    }

    async fn memory(&self) -> Result<Vec<Figure>> {
        let sandbox = self.used().await?;
        let mut forks = Vec::new();
        for _ in 0..self.rounds {
            let fork = BenchFork::of(&self.crew.host, &sandbox).await?;
            true_once(fork.guest()).await?;
            forks.push(fork);
        }
        let held = forks.iter().map(memory_use).collect::<Result<Vec<_>>>()?;
        for fork in forks {
            fork.end().await;
        }
        let guest = samples(&held, |held| held.guest_bytes as f64 / 1e6);
        let pss = samples(&held, |held| held.pss_bytes as f64 / 1e6);
        Ok(vec![
            Figure::new("a fork's own guest pages after one command", guest, "MB").at_most(2.0),
            Figure::new("a fork's QEMU as a whole (PSS)", pss, "MB")
                .at_most(30.0)
                .note(format!("of {} at a time", held.len())),
        ])
    }
}

/// The times of both, in milliseconds.
struct Rivals {
    pause: Samples,
    total: Samples,
    saved_still: Samples,
    saved_total: Samples,
    running: Samples,
    reverted: Samples,
    loaded_still: Samples,
    loaded_total: Samples,
}

fn samples<T>(measured: &[T], part: impl Fn(&T) -> f64) -> Samples {
    measured.iter().map(part).collect::<Vec<_>>().into()
}

fn checkpoint_figures(size: &str, dirty_mb: u64, costs: &Costs) -> [Figure; 2] {
    let what = |part| format!("checkpoint {part}, {size}, {dirty_mb} MB dirty");
    let stop = Figure::ms(what("stop"), costs.pause()).note(costs.captured());
    let stop = stop.at("dirty", format!("stop, {size}"), dirty_mb as f64);
    let stop = match dirty_mb {
        0 | 1 => stop.at_most(6.0),
        10 => stop.at_most(12.0),
        _ => stop,
    };
    let total = Figure::ms(what("total"), costs.total());
    [
        stop,
        total.at("dirty", format!("total, {size}"), dirty_mb as f64),
    ]
}

/// The time of a restore until the guest runs, compared with a bare start of QEMU; until its agent
/// has acknowledged; and in total.
fn restore_figures(verb: &str, restores: &[RestoreReport], bare: Vec<f64>) -> [Figure; 3] {
    let of = |part: fn(&RestoreReport) -> f64| samples(restores, part);
    [
        Figure::ms(
            format!("{verb}: restore until the guest runs"),
            of(|restore| restore.running_ms),
        )
        .times("bare start of QEMU", bare)
        .ratio_at_most(1.5),
        Figure::ms(
            format!("{verb}: until its agent has acknowledged"),
            of(|restore| restore.acknowledged_ms),
        ),
        Figure::ms(format!("whole {verb}"), of(|restore| restore.total_ms)),
    ]
}
