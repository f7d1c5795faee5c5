//! `sandtree-bench exec`: commands, streams and boot, each compared with a bare QEMU.

use std::time::{Duration, Instant};

use sandtree::{Error, ExecSpec, FileOwner, Guest, Result, SandboxSpec};

use crate::bare::BareGuest;
use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, ms, true_once};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::samples::Samples;
use crate::scratch::Scratch;
use crate::turn::Turn;

#[derive(Debug, clap::Args)]
pub struct ExecArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
}

/// The length of streams; it fits into the guest's memory file system.
const STREAM: u64 = 128 << 20;
const PINGS: usize = 200;
const CONCURRENT: usize = 100;

pub async fn run(global: &Global, args: ExecArgs) -> Outcome {
    let rounds = args.rounds.max(1);
    let scratch = Scratch::beside(&global.config()?.home)?;
    let figures = measured(global, async |crew| measure(crew, &scratch, rounds).await).await?;
    Ok(figures.into())
}

/// Both guests run at the same time and are measured alternately.
async fn measure(crew: &Crew, scratch: &Scratch, rounds: usize) -> Result<Vec<Figure>> {
    let boots = boots(crew, scratch, rounds).await?;
    let sandbox = crew.create(SandboxSpec::new(IMAGE)).await?;
    let shape = crew.create(SandboxSpec::new(IMAGE)).await?;
    shape.stop(None).await?;
    let mut bare = BareGuest::boot(&crew.host, shape.id(), scratch).await?;
    let guest = sandbox.guest().await?;
    let mut pings = Pair::default();
    let mut commands = Pair::default();
    let mut crowds = Pair::default();
    let mut outputs = Pair::default();
    let mut uploads = Pair::default();
    for round in 0..rounds {
        let turn = Turn::of(round);
        let ours = each(PINGS, async || guest.ping().await);
        let theirs = each(PINGS, async || bare.ping().await);
        pings.push(turn.both(ours, theirs).await?);
        let ours = timed(true_once(&guest));
        commands.push(turn.both(ours, timed(bare.start_processes(1))).await?);
        let theirs = timed(bare.start_processes(CONCURRENT as u64));
        crowds.push(turn.both(timed(crowd(&guest)), theirs).await?);
        let ours = timed(output(&guest));
        outputs.push(turn.both(ours, timed(bare.read(STREAM))).await?);
        let ours = timed(upload(&guest));
        uploads.push(turn.both(ours, timed(bare.write(STREAM))).await?);
    }
    let megabytes = STREAM as f64 / 1e6;
    Ok(vec![
        pings.millis("link ping").at_most(1.0),
        commands.millis("/bin/true in a running sandbox"),
        crowds.millis("100 commands at once"),
        outputs.rate("stdout", megabytes).ratio_at_least(0.5),
        uploads.rate("file upload", megabytes).ratio_at_least(0.5),
        boots
            .millis("cold boot to the first command")
            .ratio_at_most(1.15),
    ])
}

/// Cold boots of both kinds, alternately.
async fn boots(crew: &Crew, scratch: &Scratch, rounds: usize) -> Result<Pair> {
    let mut boots = Pair::default();
    for _ in 0..rounds {
        let began = Instant::now();
        let sandbox = crew
            .create(SandboxSpec {
                cold: true,
                ..SandboxSpec::new(IMAGE)
            })
            .await?;
        true_once(&sandbox.guest().await?).await?;
        let ours = began.elapsed();
        sandbox.stop(None).await?;
        let bare = BareGuest::boot(&crew.host, sandbox.id(), scratch).await?;
        crew.remove(sandbox).await?;
        boots.push((ours, bare.boot));
    }
    Ok(boots)
}

/// How long the same work takes with Sandtree and without, in milliseconds.
#[derive(Debug, Default)]
struct Pair {
    sandtree: Vec<f64>,
    bare: Vec<f64>,
}

impl Pair {
    fn push(&mut self, (sandtree, bare): (Duration, Duration)) {
        self.sandtree.push(ms(sandtree));
        self.bare.push(ms(bare));
    }

    fn millis(self, what: &str) -> Figure {
        Figure::ms(what, self.sandtree).times("bare QEMU", self.bare)
    }

    fn rate(self, what: &str, megabytes: f64) -> Figure {
        let rate = |times: Vec<f64>| Samples::from(times).map(|ms| megabytes / ms * 1e3);
        Figure::new(what, rate(self.sandtree), "MB/s").times("bare port", rate(self.bare))
    }
}

async fn timed<T>(work: impl Future<Output = Result<T>>) -> Result<Duration> {
    let began = Instant::now();
    work.await?;
    Ok(began.elapsed())
}

/// The average time of one of `count` runs.
async fn each(count: usize, mut work: impl AsyncFnMut() -> Result<()>) -> Result<Duration> {
    let began = Instant::now();
    for _ in 0..count {
        work().await?;
    }
    Ok(began.elapsed() / count as u32)
}

async fn crowd(guest: &Guest) -> Result<()> {
    let mut commands = tokio::task::JoinSet::new();
    for _ in 0..CONCURRENT {
        let guest = guest.clone();
        commands.spawn(async move { true_once(&guest).await });
    }
    while let Some(done) = commands.join_next().await {
        done.expect("a command's task does not panic")?;
    }
    Ok(())
}

async fn output(guest: &Guest) -> Result<()> {
    let blocks = STREAM >> 20;
    let line = format!("exec dd if=/dev/zero bs=1M count={blocks} 2>/dev/null");
    let mut exec = guest.exec(ExecSpec::shell(line)).await?;
    let mut stdout = exec.stdout.take().expect("it was not taken yet");
    let mut seen = 0;
    while let Ok(Some(chunk)) = stdout.next().await {
        seen += chunk.len() as u64;
    }
    if seen != STREAM {
        return Err(Error::invalid(
            "output of a command",
            seen,
            "as long as what it wrote",
        ));
    }
    exec.wait().await.map(drop)
}

/// Uploads into the guest's memory, so that its disk is not measured.
async fn upload(guest: &Guest) -> Result<()> {
    use tokio::io::AsyncReadExt;
    let mut bytes = tokio::io::repeat(b'x').take(STREAM);
    guest
        .files()
        .write("/dev/shm/upload", &mut bytes, FileOwner::default())
        .await?;
    guest.files().remove("/dev/shm/upload").await
}
