//! `sandtree-bench mounts`: directories of the host, each figure compared with the guest's own disk
//! or with the link, and with the CIFS mounts of Quicksand.

use std::path::Path;
use std::time::Instant;

use sandtree::{
    Error, ExecSpec, Guest, MountAccess, MountSpec, Replace, Result, Sandbox, SandboxSpec,
};

use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, ms};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::peer::{Missing, Quicksand};
use crate::process;
use crate::scratch::Scratch;
use crate::turn::Turn;

#[derive(Debug, clap::Args)]
pub struct MountsArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
}

const DIRECTORIES: usize = 50;
/// Files in each directory.
const FILES: usize = 100;
const KNOWN_DIRECTORIES: usize = 100;
const STREAM_MB: usize = 64;
const CREATED: usize = 200;
const MOUNT: &str = "/work";
const LOCAL: &str = "/root/local";
const CIFS: &str = "Quicksand's CIFS";
const DROP: &str = "sync; echo 3 > /proc/sys/vm/drop_caches";

pub async fn run(global: &Global, args: MountsArgs) -> Outcome {
    let rounds = args.rounds.max(1);
    let scratch = Scratch::beside(&global.config()?.home)?;
    let work = async |crew: &Crew| measure(global, crew, &scratch, rounds).await;
    let figures = measured(global, work).await?;
    Ok(figures.into())
}

async fn measure(
    global: &Global,
    crew: &Crew,
    scratch: &Scratch,
    rounds: usize,
) -> Result<Vec<Figure>> {
    let shared = scratch.path("shared");
    fill(&shared, DIRECTORIES)?;
    let sandbox = mounted(crew, &shared).await?;
    let accel = sandbox.info()?.accelerator.unwrap_or_default();
    let guest = sandbox.guest().await?;
    timed(&guest, &format!("cp -r {MOUNT} {LOCAL}")).await?;
    let cifs = match Quicksand::start(global, &accel, scratch).await? {
        // Our figures are worth showing without those of a peer that fails.
        Ok(peer) => match Cifs::measure(peer, &shared, rounds).await {
            Ok(cifs) => Ok(cifs),
            Err(error) => Err(error.to_string()),
        },
        Err(Missing(why)) => Err(why),
    };
    let bench = Bench {
        guest,
        rounds,
        cifs,
    };
    let mut figures = bench.walks().await?;
    figures.extend(bench.streams().await?);
    figures.push(bench.creations().await?);
    figures.extend(comparison(crew, scratch, rounds).await?);
    Ok(figures)
}

/// Milliseconds of the same lines on a CIFS mount of Quicksand.
struct Cifs {
    cold: Vec<f64>,
    warm: Vec<f64>,
    write: Vec<f64>,
    read: Vec<f64>,
    create: Vec<f64>,
}

impl Cifs {
    async fn measure(mut peer: Quicksand, dir: &Path, rounds: usize) -> Result<Self> {
        let measured = Self::lines(&mut peer, dir, rounds).await;
        let ended = peer.end().await;
        let measured = measured?;
        ended?;
        Ok(measured)
    }

    async fn lines(peer: &mut Quicksand, dir: &Path, rounds: usize) -> Result<Self> {
        peer.create().await?;
        peer.mount(dir, MOUNT).await?;
        let mut times = async |prepare: &str, line: &str| {
            let mut times = Vec::new();
            for _ in 0..rounds {
                peer.run(prepare).await?;
                times.push(peer.run(line).await?);
            }
            Ok::<_, Error>(times)
        };
        Ok(Self {
            cold: times(DROP, &walk(MOUNT)).await?,
            warm: times("true", &walk(MOUNT)).await?,
            write: times("true", &write_stream()).await?,
            read: times(DROP, &read_stream()).await?,
            create: times("true", &create_files(MOUNT)).await?,
        })
    }
}

/// Every file is found and examined, as by `git status`.
fn walk(dir: &str) -> String {
    format!("find {dir} -type f -size +0c > /dev/null")
}

fn write_stream() -> String {
    format!("dd if=/dev/zero of={MOUNT}/stream bs=1M count={STREAM_MB}")
}

fn read_stream() -> String {
    format!("dd if={MOUNT}/stream of=/dev/null bs=1M")
}

fn create_files(dir: &str) -> String {
    format!(
        "mkdir {dir}/new; for i in $(seq {CREATED}); do echo $i > {dir}/new/$i; done; \
         rm -r {dir}/new"
    )
}

/// Megabytes a second of streams that took so many milliseconds.
fn rates(times: &[f64]) -> Vec<f64> {
    let megabytes = (STREAM_MB << 20) as f64 / 1e6;
    times.iter().map(|ms| megabytes / ms * 1e3).collect()
}

/// Small files, as a source tree has them.
fn fill(dir: &Path, directories: usize) -> Result<()> {
    for number in 0..directories {
        let inner = dir.join(format!("directory-{number}"));
        std::fs::create_dir_all(&inner).map_err(|e| Error::io("make", &inner, e))?;
        for file in 0..FILES {
            let path = inner.join(format!("file-{file}.c"));
            let text = format!("int number_{number}_{file};\n");
            std::fs::write(&path, text).map_err(|e| Error::io("write", &path, e))?;
        }
    }
    Ok(())
}

async fn mounted(crew: &Crew, dir: &Path) -> Result<Sandbox> {
    let mount = MountSpec {
        host: dir.to_owned(),
        guest: MOUNT.to_owned(),
        access: MountAccess::ReadWrite,
        owner: None,
    };
    let spec = SandboxSpec {
        disk_bytes: Some(1 << 30),
        mounts: vec![mount],
        ..SandboxSpec::new(IMAGE)
    };
    crew.create(spec).await
}

/// Milliseconds of a shell line.
async fn timed(guest: &Guest, line: &str) -> Result<f64> {
    let began = Instant::now();
    let done = guest
        .exec(ExecSpec::shell(line))
        .await?
        .output(1 << 16)
        .await?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        return Err(Error::invalid("command", line, &said));
    }
    Ok(ms(began.elapsed()))
}

struct Bench {
    guest: Guest,
    rounds: usize,
    /// Or why it was not measured.
    cifs: std::result::Result<Cifs, String>,
}

impl Bench {
    /// Measures two lines alternately.
    async fn both(&self, prepare: &str, ours: &str, theirs: &str) -> Result<(Vec<f64>, Vec<f64>)> {
        let mut pairs = (Vec::new(), Vec::new());
        for round in 0..self.rounds {
            let once = async |line: &str| {
                timed(&self.guest, prepare).await?;
                timed(&self.guest, line).await
            };
            let turn = Turn::of(round);
            let (a, b) = turn.both(once(ours), once(theirs)).await?;
            pairs.0.push(a);
            pairs.1.push(b);
        }
        Ok(pairs)
    }

    fn and_cifs(&self, figure: Figure, pick: impl FnOnce(&Cifs) -> Vec<f64>) -> Figure {
        match &self.cifs {
            Ok(cifs) => figure.times(CIFS, pick(cifs)),
            Err(why) => figure.without(CIFS, why),
        }
    }

    async fn walks(&self) -> Result<Vec<Figure>> {
        let ours = walk(MOUNT);
        let theirs = walk(LOCAL);
        let (cold, local_cold) = self.both(DROP, &ours, &theirs).await?;
        timed(&self.guest, &format!("{ours}; {theirs}")).await?;
        let (warm, local_warm) = self.both("true", &ours, &theirs).await?;
        let cold = Figure::ms("walk over 5,000 files of a mount, the first time", cold)
            .times("the guest's disk", local_cold)
            .ratio_at_most(10.0);
        let warm = Figure::ms("walk over 5,000 files of a mount, again", warm)
            .times("the guest's disk", local_warm)
            .ratio_at_most(2.5);
        Ok(vec![
            self.and_cifs(cold, |cifs| cifs.cold.clone()),
            self.and_cifs(warm, |cifs| cifs.warm.clone()),
        ])
    }

    async fn streams(&self) -> Result<Vec<Figure>> {
        let (writes, links) = self.with_link("true", &write_stream()).await?;
        let (reads, links_again) = self.with_link(DROP, &read_stream()).await?;
        let write = Figure::new("write to a mount", rates(&writes), "MB/s")
            .times("the link's stdout", rates(&links))
            .ratio_at_least(0.5);
        let read = Figure::new("read of a mount", rates(&reads), "MB/s")
            .times("the link's stdout", rates(&links_again))
            .ratio_at_least(0.5);
        Ok(vec![
            self.and_cifs(write, |cifs| rates(&cifs.write)),
            self.and_cifs(read, |cifs| rates(&cifs.read)),
        ])
    }

    /// A line, and as many bytes on a command's output, alternately.
    async fn with_link(&self, prepare: &str, line: &str) -> Result<(Vec<f64>, Vec<f64>)> {
        let mut pairs = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            timed(&self.guest, prepare).await?;
            pairs.0.push(timed(&self.guest, line).await?);
            let began = Instant::now();
            let output = format!("dd if=/dev/zero bs=1M count={STREAM_MB} 2>/dev/null");
            let exec = self.guest.exec(ExecSpec::shell(&output)).await?;
            exec.output((STREAM_MB << 20) + 1).await?;
            pairs.1.push(ms(began.elapsed()));
        }
        Ok(pairs)
    }

    async fn creations(&self) -> Result<Figure> {
        let here = create_files(MOUNT);
        let (ours, theirs) = self.both("true", &here, &create_files(LOCAL)).await?;
        let figure = Figure::ms("200 small files made and removed on a mount", ours)
            .times("the guest's disk", theirs);
        Ok(self.and_cifs(figure, |cifs| cifs.create.clone()))
    }
}

/// What a guest that knows many files adds to a revert, and its server to the process.
async fn comparison(crew: &Crew, scratch: &Scratch, rounds: usize) -> Result<Vec<Figure>> {
    let known = scratch.path("known");
    fill(&known, KNOWN_DIRECTORIES)?;
    let with = mounted(crew, &known).await?;
    let without = crew.create(SandboxSpec::new(IMAGE)).await?;
    let before = process::pss_bytes(std::process::id())?;
    timed(
        &with.guest().await?,
        &format!("find {MOUNT} -type f -size +0c > /dev/null"),
    )
    .await?;
    let grown = process::pss_bytes(std::process::id())?.saturating_sub(before);
    for sandbox in [&with, &without] {
        sandbox.checkpoint(Some("bench"), Replace::Yes).await?;
    }
    let mut added = Vec::new();
    for _ in 0..rounds {
        let ours = with.revert("bench").await?.restore.acknowledged_ms;
        let theirs = without.revert("bench").await?.restore.acknowledged_ms;
        added.push((ours - theirs).max(0.0));
    }
    Ok(vec![
        Figure::ms(
            "10,000 known files compared with the host, after a revert",
            added,
        )
        .at_most(500.0),
        Figure::new(
            "memory that a mount with 10,000 known files adds",
            grown as f64 / 1e6,
            "MB",
        )
        .at_most(4.0),
    ])
}
