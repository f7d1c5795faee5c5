//! `sandtree-bench exec`: commands, streams and boot, each compared with a bare QEMU.

use std::time::{Duration, Instant};

use sandtree::{Error, ExecSpec, FileOwner, Guest, Result, SandboxSpec};
use serde::Serialize;

use crate::bare::BareGuest;
use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, median, true_once};
use crate::failure::Outcome;
use crate::scratch::Scratch;
use crate::show;

#[derive(Debug, clap::Args)]
pub struct ExecArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

/// The length of streams; it fits into the guest's memory file system.
const STREAM: u64 = 128 << 20;
const PINGS: usize = 200;
const CONCURRENT: usize = 100;

/// One figure, with Sandtree and on a bare QEMU.
#[derive(Debug, Serialize)]
struct Figure {
    what: &'static str,
    unit: &'static str,
    sandtree: f64,
    #[serde(rename = "floor")]
    bare: f64,
    aim: &'static str,
}

pub async fn run(global: &Global, args: ExecArgs) -> Outcome {
    let rounds = args.rounds.max(1);
    let scratch = Scratch::beside(&global.config()?.home)?;
    let measured = measured(global, async |crew| measure(crew, &scratch, rounds).await).await?;
    if global.json {
        show::json(&measured);
        return Ok(());
    }
    let rows: Vec<Vec<String>> = measured.iter().map(row).collect();
    show::table(
        &["MEASURED", "SANDTREE", "BARE QEMU", "RATIO", "AIM"],
        &rows,
    );
    println!(
        "medians of {rounds} rounds; bare QEMU: same kernel, initramfs and port, and no agent"
    );
    Ok(())
}

fn row(figure: &Figure) -> Vec<String> {
    let value = |value: f64| format!("{value:.2} {}", figure.unit);
    let ratio = format!("{:.2}", figure.sandtree / figure.bare);
    vec![
        figure.what.into(),
        value(figure.sandtree),
        value(figure.bare),
        ratio,
        figure.aim.into(),
    ]
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
    for _ in 0..rounds {
        pings.push(
            each(PINGS, async || guest.ping().await).await?,
            each(PINGS, async || bare.ping().await).await?,
        );
        commands.push(
            timed(true_once(&guest)).await?,
            timed(bare.start_processes(1)).await?,
        );
        crowds.push(
            timed(crowd(&guest)).await?,
            timed(bare.start_processes(CONCURRENT as u64)).await?,
        );
        outputs.push(
            timed(output(&guest)).await?,
            timed(bare.read(STREAM)).await?,
        );
        uploads.push(
            timed(upload(&guest)).await?,
            timed(bare.write(STREAM)).await?,
        );
    }
    let megabytes = STREAM as f64 / 1e6;
    Ok(vec![
        pings.millis("link ping", "< 1 ms"),
        commands.millis("/bin/true", ""),
        crowds.millis("100 commands at once", ""),
        outputs.rate("stdout", megabytes, "> 100 MB/s"),
        uploads.rate("file upload", megabytes, "> 100 MB/s"),
        boots.millis("cold boot to first command", "<= 1.15 of bare"),
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
        boots.push(ours, bare.boot);
    }
    Ok(boots)
}

/// Durations of the same work, with Sandtree and without.
#[derive(Debug, Default)]
struct Pair {
    sandtree: Vec<Duration>,
    bare: Vec<Duration>,
}

impl Pair {
    fn push(&mut self, sandtree: Duration, bare: Duration) {
        self.sandtree.push(sandtree);
        self.bare.push(bare);
    }

    fn millis(self, what: &'static str, aim: &'static str) -> Figure {
        let millis = |times: Vec<Duration>| median(times).as_secs_f64() * 1e3;
        Figure {
            what,
            unit: "ms",
            sandtree: millis(self.sandtree),
            bare: millis(self.bare),
            aim,
        }
    }

    fn rate(self, what: &'static str, megabytes: f64, aim: &'static str) -> Figure {
        let rate = |times: Vec<Duration>| megabytes / median(times).as_secs_f64();
        Figure {
            what,
            unit: "MB/s",
            sandtree: rate(self.sandtree),
            bare: rate(self.bare),
            aim,
        }
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
