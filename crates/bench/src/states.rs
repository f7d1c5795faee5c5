//! `sandtree-bench states`: the cost of checkpoint, revert, fork, pause and create, each with its
//! target.

use std::time::{Duration, Instant};

use sandtree::bench::BenchFork;
use sandtree::{
    Checkpoint, Error, ExecSpec, Guest, Replace, RestoreReport, Result, Sandbox, SandboxSpec,
};
use tokio::task::JoinSet;

use crate::bare::bare_start;
use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, median, ms, true_once};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::fork::{memory_use, snapshot_delete, snapshot_load, snapshot_save};
use crate::stores::disk_usage;

#[derive(Debug, clap::Args)]
pub struct StatesArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Measure only these parts (repeatable)
    #[arg(long, value_name = "NAME")]
    pub only: Vec<Part>,
    /// Measure one round, without 4 GB guests and without 50 forks: about a minute
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
const DIRTY_MB: [u64; 4] = [0, 1, 10, 100];
/// The memory that the guest uses when it is compared with QEMU's own snapshots.
const USED_MB: u64 = 300;
/// The tag of QEMU's own snapshot.
const SNAPSHOT: &str = "bench";
const DEPTH: usize = 50;
const SIZE_CHECKPOINTS: usize = 10;
const FORKS: [usize; 3] = [1, 10, 50];
/// Many copies are many measurements already.
const CROWD_ROUNDS_MAX: usize = 3;
/// Background work of the last state ends within this time.
const REST: Duration = Duration::from_millis(300);

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
    let rounds = if args.quick { 1 } else { args.rounds.max(1) };
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
    Figure::report(global, &figures, rounds);
    Ok(())
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
            figures.extend(checkpoint_figures("512 MB", dirty_mb, &at_small));
            if large.is_some() {
                let pause = at_small.pause();
                figures.extend(checkpoint_figures("4 GB", dirty_mb, &at_large));
                let same = Figure::ms(
                    format!("the same pause at 4 GB, {dirty_mb} MB dirty"),
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
            Figure::ms("pause of the 1st checkpoint", first.pause()).note(first.captured()),
            Figure::ms("total of the 1st checkpoint", first.total()),
            Figure::ms("pause of the 50th", last.pause())
                .times("the 1st", first.pause())
                .ratio_at_most(1.5)
                .note(last.captured()),
            Figure::ms("total of the 50th", last.total()).times("the 1st", first.total()),
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
        Ok(vec![Figure::new(what, each / 1e6, "MB").at_most(1.0)])
    }

    async fn qemu(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox(SMALL).await?;
        let idle = self.against_snapshots(&sandbox).await?;
        use_memory(&sandbox.guest().await?).await?;
        let used = self.against_snapshots(&sandbox).await?;
        let ahead = idle.saved_still / idle.pause;
        let save =
            |what: &str, pause, save| Figure::ms(what, pause).shorter_than("snapshot-save", save);
        Ok(vec![
            save("stop of an idle checkpoint", idle.pause, idle.saved_still)
                .ratio_at_least(15.0)
                .note(idle.spread),
            save("whole idle checkpoint", idle.total, idle.saved_total),
            Figure::ms("revert to it, until the guest runs", idle.running)
                .shorter_than("snapshot-load", idle.loaded_still),
            Figure::ms("whole revert to it", idle.reverted)
                .shorter_than("snapshot-load", idle.loaded_total),
            save(
                "stop of an idle checkpoint, 300 MB used",
                used.pause,
                used.saved_still,
            )
            .ratio_at_least(ahead)
            .note(used.spread),
            save(
                "whole idle checkpoint, 300 MB used",
                used.total,
                used.saved_total,
            ),
            Figure::ms("revert to it, until the guest runs", used.running)
                .shorter_than("snapshot-load", used.loaded_still),
            Figure::ms("whole revert to it", used.reverted)
                .shorter_than("snapshot-load", used.loaded_total),
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
            ours.push(&idle_checkpoint(sandbox).await?);
            saves.push(snapshot_save(&fork, SNAPSHOT).await?);
        }
        for _ in 0..self.rounds {
            reverts.push(sandbox.revert(&base.id).await?);
            loads.push(snapshot_load(&fork, SNAPSHOT).await?);
        }
        fork.end().await;
        let stills: Vec<f64> = saves.iter().map(|job| ms(job.still)).collect();
        Ok(Rivals {
            pause: ours.pause(),
            total: ours.total(),
            saved_still: median(stills.clone()),
            saved_total: median(saves.iter().map(|job| ms(job.total)).collect()),
            running: median(
                reverts
                    .iter()
                    .map(|reverted| reverted.restore.running_ms)
                    .collect(),
            ),
            reverted: median(
                reverts
                    .iter()
                    .map(|reverted| reverted.restore.total_ms)
                    .collect(),
            ),
            loaded_still: median(loads.iter().map(|job| ms(job.still)).collect()),
            loaded_total: median(loads.iter().map(|job| ms(job.total)).collect()),
            spread: format!(
                "{}; snapshot-save {}",
                spread(&ours.pauses),
                spread(&stills)
            ),
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
            bare.push(bare_start(&self.crew.host, shape.id()).await?);
        }
        Ok(restore_figures("revert", &times, ms(median(bare))).into())
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
            bare.push(bare_start(&self.crew.host, shape.id()).await?);
        }
        let mut figures = vec![Figure::ms("pause, synced", median(pauses))];
        figures.extend(restore_figures("resume", &resumes, ms(median(bare))));
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
            Figure::ms("create, warm", median(warm))
                .shorter_than("cold", median(cold))
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

    async fn forks(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox(SMALL).await?;
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
            let each = median(times.clone()) / count as f64;
            let figure = Figure::ms(
                format!("fork {count}, until all have answered"),
                median(times),
            );
            figures.push(figure.note(format!("{each:.0} ms each")));
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
        let sandbox = self.sandbox(SMALL).await?;
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
        let megabytes = |bytes: Vec<u64>| median(bytes) as f64 / 1e6;
        let guest = megabytes(held.iter().map(|held| held.guest_bytes).collect());
        let pss = megabytes(held.iter().map(|held| held.pss_bytes).collect());
        Ok(vec![
            Figure::new("a fork's own guest pages after one command", guest, "MB").at_most(4.0),
            Figure::new("its QEMU as a whole (PSS)", pss, "MB")
                .note(format!("of {} at a time", held.len())),
        ])
    }
}

/// Medians of both, in milliseconds.
struct Rivals {
    pause: f64,
    total: f64,
    saved_still: f64,
    saved_total: f64,
    running: f64,
    reverted: f64,
    loaded_still: f64,
    loaded_total: f64,
    spread: String,
}

fn spread(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    format!("{least:.1} to {most:.1} ms")
}

/// The costs of similar checkpoints.
#[derive(Default)]
struct Costs {
    pauses: Vec<f64>,
    totals: Vec<f64>,
    memory_bytes: Vec<u64>,
}

impl Costs {
    fn push(&mut self, checkpoint: &Checkpoint) {
        self.pauses.push(checkpoint.pause_ms);
        self.totals.push(checkpoint.total_ms);
        self.memory_bytes.push(checkpoint.memory_bytes);
    }

    fn pause(&self) -> f64 {
        median(self.pauses.clone())
    }

    fn total(&self) -> f64 {
        median(self.totals.clone())
    }

    fn captured(&self) -> String {
        format!(
            "{:.1} MB captured",
            median(self.memory_bytes.clone()) as f64 / 1e6
        )
    }
}

fn checkpoint_figures(size: &str, dirty_mb: u64, costs: &Costs) -> [Figure; 2] {
    let pause = Figure::ms(
        format!("checkpoint pause, {size}, {dirty_mb} MB dirty"),
        costs.pause(),
    );
    let pause = match dirty_mb {
        0 | 1 => pause.at_most(10.0),
        10 => pause.at_most(25.0),
        _ => pause,
    };
    let total = Figure::ms(
        format!("checkpoint total, {size}, {dirty_mb} MB dirty"),
        costs.total(),
    );
    [pause.note(costs.captured()), total]
}

async fn idle_checkpoint(sandbox: &Sandbox) -> Result<Checkpoint> {
    tokio::time::sleep(REST).await;
    sandbox.checkpoint(None, Replace::No).await
}

/// A guest that writes a given amount before each checkpoint.
struct Dirtied {
    sandbox: Sandbox,
    guest: Guest,
}

impl Dirtied {
    async fn new(sandbox: Sandbox) -> Result<Self> {
        let guest = sandbox.guest().await?;
        let most = DIRTY_MB[DIRTY_MB.len() - 1];
        done(
            &guest,
            &[
                "dd",
                "if=/dev/urandom",
                "of=/dev/shm/seed",
                "bs=64k",
                &format!("count={}", most * 16),
            ],
        )
        .await?;
        let dirtied = Self { sandbox, guest };
        // The first run reads the program from the disk.
        dirtied.checkpoint(most).await?;
        Ok(dirtied)
    }

    /// Copies random bytes in memory with one process, then takes a checkpoint.
    async fn checkpoint(&self, dirty_mb: u64) -> Result<Checkpoint> {
        tokio::time::sleep(REST).await;
        if dirty_mb > 0 {
            let count = format!("count={}", dirty_mb * 16);
            done(
                &self.guest,
                &[
                    "dd",
                    "if=/dev/shm/seed",
                    "of=/dev/shm/dirt",
                    "bs=64k",
                    &count,
                    "conv=notrunc",
                ],
            )
            .await?;
        }
        self.sandbox.checkpoint(None, Replace::No).await
    }
}

async fn use_memory(guest: &Guest) -> Result<()> {
    let size = format!("mount -o remount,size={}m /dev/shm", USED_MB + 20);
    done(guest, &["sh", "-c", &size]).await?;
    done(
        guest,
        &[
            "dd",
            "if=/dev/urandom",
            "of=/dev/shm/used",
            "bs=64k",
            &format!("count={}", USED_MB * 16),
        ],
    )
    .await
}

async fn done(guest: &Guest, argv: &[&str]) -> Result<()> {
    let output = guest
        .exec(ExecSpec::argv(argv))
        .await?
        .output(1 << 16)
        .await?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(Error::invalid(
        "command of the benchmark",
        argv.join(" "),
        &stderr,
    ))
}

/// The time of a restore until the guest runs, compared with a bare start of QEMU; until its agent
/// has acknowledged; and in total.
fn restore_figures(verb: &str, restores: &[RestoreReport], bare_ms: f64) -> [Figure; 3] {
    let of = |part: fn(&RestoreReport) -> f64| median(restores.iter().map(part).collect());
    [
        Figure::ms(
            format!("{verb}: restore until the guest runs"),
            of(|restore| restore.running_ms),
        )
        .times("bare QEMU", bare_ms)
        .ratio_at_most(1.5),
        Figure::ms(
            "until its agent has acknowledged",
            of(|restore| restore.acknowledged_ms),
        ),
        Figure::ms(format!("whole {verb}"), of(|restore| restore.total_ms)),
    ]
}
