//! `sandtree-bench store`: the cost of saves, artifacts and listings, each compared with a plain
//! tool on the same bytes.
//!
//! Always: everything that a run writes is in one directory next to the store, which the run
//! removes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sandtree::{
    DiffOptions, Error, ExportOptions, Host, HostConfig, Progress, Replace, Result, Sandbox,
    SandboxSpec, SaveSpec,
};

use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, ms, shell, true_once, write_random};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::samples::Samples;
use crate::scratch::Scratch;
use crate::stores::fill_with_snapshots;

#[derive(Debug, clap::Args)]
pub struct StoreArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Measure only these parts (repeatable)
    #[arg(long, value_name = "NAME")]
    pub only: Vec<StorePart>,
    /// Measure one round
    #[arg(long)]
    pub quick: bool,
}

/// The parts of this benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum StorePart {
    /// Saves of the disk and with memory, and starts from them
    Save,
    /// Disk usage of a save, compared with what was written
    Size,
    /// Export and import, compared with tar and zstd
    Artifact,
    /// Verification of every byte, compared with sha256sum
    Verify,
    /// List of 10,000 snapshots
    List,
    /// Diff of 50 changed files among 10,000
    Diff,
}

const MIB: u64 = 1 << 20;
const DISK: u64 = 1024 * MIB;
/// How much the guest writes to its disk before a measured save.
const CHANGED_MB: u64 = 64;
/// The content of a measured artifact; half of it does not compress.
const CONTENT_MB: u64 = 192;
const SNAPSHOTS: usize = 10_000;
const FILES: usize = 10_000;
const CHANGED_FILES: usize = 50;

const ALL: [StorePart; 6] = [
    StorePart::Save,
    StorePart::Size,
    StorePart::Artifact,
    StorePart::Verify,
    StorePart::List,
    StorePart::Diff,
];

pub async fn run(global: &Global, args: StoreArgs) -> Outcome {
    let rounds = if args.quick { 1 } else { args.rounds.max(1) };
    let config = global.config()?;
    let figures = measured(global, async |crew| {
        let bench = Bench {
            crew,
            rounds,
            scratch: Scratch::beside(&config.home)?,
            config,
        };
        bench.parts(&args.only).await
    })
    .await?;
    Ok(figures.into())
}

struct Bench<'a> {
    crew: &'a Crew,
    rounds: usize,
    scratch: Scratch,
    config: HostConfig,
}

impl Bench<'_> {
    async fn parts(&self, only: &[StorePart]) -> Result<Vec<Figure>> {
        let mut figures = Vec::new();
        for part in ALL
            .into_iter()
            .filter(|part| only.is_empty() || only.contains(part))
        {
            let measured = match part {
                StorePart::Save => self.save().await,
                StorePart::Size => self.size().await,
                StorePart::Artifact => self.artifact().await,
                StorePart::Verify => self.verify().await,
                StorePart::List => self.list().await,
                StorePart::Diff => self.diff().await,
            };
            let forgotten = self.forget_snapshots().await;
            figures.extend(measured?);
            forgotten?;
            self.crew.clear().await?;
        }
        Ok(figures)
    }

    /// A name that no user gives, for a snapshot of this run.
    fn name(&self, what: &str) -> String {
        format!("bench-{}-{what}", std::process::id())
    }

    async fn forget_snapshots(&self) -> Result<()> {
        let mine = self.name("");
        let listed = self.crew.host.snapshots().await?.snapshots;
        for name in listed
            .iter()
            .flat_map(|snapshot| &snapshot.names)
            .filter(|name| name.starts_with(&mine))
        {
            self.crew.host.remove_snapshot(name).await?;
        }
        Ok(())
    }

    async fn sandbox(&self) -> Result<Sandbox> {
        self.crew
            .create(SandboxSpec {
                disk_bytes: Some(DISK),
                ..SandboxSpec::new(IMAGE)
            })
            .await
    }

    async fn saved(&self, sandbox: &Sandbox, name: &str, memory: bool) -> Result<Duration> {
        let spec = SaveSpec {
            memory,
            replace: Replace::Yes,
            ..SaveSpec::new(&self.name(name))?
        };
        let began = Instant::now();
        sandbox.save(spec, Progress::silent()).await?;
        Ok(began.elapsed())
    }

    async fn started(&self, name: &str) -> Result<Duration> {
        let began = Instant::now();
        let sandbox = self
            .crew
            .create(SandboxSpec::from_snapshot(self.name(name)))
            .await?;
        true_once(&sandbox.guest().await?).await?;
        let took = began.elapsed();
        self.crew.remove(sandbox).await?;
        Ok(took)
    }

    async fn save(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox().await?;
        let mut idle = vec![];
        let mut hot = vec![];
        let mut memory = vec![];
        let mut disk_start = vec![];
        let mut memory_start = vec![];
        for round in 0..self.rounds {
            shell(&sandbox, "echo a little > /root/little").await?;
            idle.push(ms(self.saved(&sandbox, "idle", false).await?));
            write_random(&sandbox, &format!("/root/big{}", round % 2), CHANGED_MB).await?;
            hot.push(ms(self.saved(&sandbox, "disk", false).await?));
            memory.push(ms(self.saved(&sandbox, "memory", true).await?));
            disk_start.push(ms(self.started("disk").await?));
            memory_start.push(ms(self.started("memory").await?));
        }
        Ok(vec![
            Figure::ms("hot save, a small change", idle),
            Figure::ms(format!("hot save, {CHANGED_MB} MB just written"), hot),
            Figure::ms("save with memory", memory),
            Figure::ms("start from a disk save, to the first command", disk_start),
            Figure::ms(
                "start from a memory save, to the first command",
                memory_start,
            ),
        ])
    }

    /// The size of a save on the disk, compared with what was written.
    async fn size(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox().await?;
        self.saved(&sandbox, "before", false).await?;
        let before = self.pool_bytes().await?;
        write_random(&sandbox, "/root/changed", CHANGED_MB).await?;
        self.saved(&sandbox, "after", false).await?;
        let grown = (self.pool_bytes().await? - before) as f64 / MIB as f64;
        let figure =
            Figure::new("size of a save", grown, "MiB").times("really written", CHANGED_MB as f64);
        Ok(vec![figure.ratio_at_most(1.3)])
    }

    async fn pool_bytes(&self) -> Result<u64> {
        let usage = self.crew.host.usage().await?;
        Ok(usage
            .kinds
            .iter()
            .filter(|kind| kind.kind.to_string() == "layers")
            .map(|kind| kind.bytes)
            .sum())
    }

    /// Makes a snapshot with memory and a disk of which half compresses. Returns its directory.
    async fn content(&self) -> Result<PathBuf> {
        let sandbox = self.sandbox().await?;
        write_random(&sandbox, "/root/random", CONTENT_MB / 2).await?;
        let lines = "yes 'a line of text, as programs write them to their logs'";
        shell(
            &sandbox,
            &format!(
                "{lines} | head -c {} > /root/text; sync",
                CONTENT_MB / 2 * MIB
            ),
        )
        .await?;
        self.saved(&sandbox, "content", true).await?;
        let dir = self.scratch.path("content");
        // The same snapshot as a directory, for plain tools to pack and hash.
        self.crew
            .host
            .export_dir(
                &self.name("content"),
                &dir,
                Replace::Yes,
                Progress::silent(),
            )
            .await?;
        Ok(dir)
    }

    async fn artifact(&self) -> Result<Vec<Figure>> {
        let dir = self.content().await?;
        let ours = self.scratch.path("ours.tar.zst");
        let theirs = self.scratch.path("theirs.tar.zst");
        let other = self.scratch.path("store");
        let unpacked = self.scratch.path("unpacked");
        let mut export = vec![];
        let mut pack = vec![];
        let mut import = vec![];
        let mut unpack = vec![];
        let mut bytes = 0;
        for _ in 0..self.rounds {
            let file = std::fs::File::create(&ours).map_err(|e| Error::io("make", &ours, e))?;
            let began = Instant::now();
            let reference = self.name("content");
            let exporting = self.crew.host.export(
                &reference,
                false,
                ExportOptions::default(),
                file,
                Progress::silent(),
            );
            bytes = exporting.await?.content_bytes;
            export.push(began.elapsed().as_secs_f64());
            pack.push(tool(&format!(
                "tar -C {} -cSf - . | zstd -q -3 -f -o {}",
                quoted(&dir),
                quoted(&theirs)
            ))?);
            let host = Host::open(HostConfig {
                home: other.clone(),
                ..self.config.clone()
            })
            .await?;
            let file = std::fs::File::open(&ours).map_err(|e| Error::io("open", &ours, e))?;
            let began = Instant::now();
            host.import(file, "content", Replace::No, Progress::silent())
                .await?;
            import.push(began.elapsed().as_secs_f64());
            remove(&other)?;
            std::fs::create_dir(&unpacked)
                .map_err(|e| Error::io("make directory", &unpacked, e))?;
            let from = quoted(&theirs);
            let to = quoted(&unpacked);
            unpack.push(tool(&format!(
                "zstd -q -d -c {from} | tar -C {to} -xSf - && sync -f {to}"
            ))?);
            remove(&unpacked)?;
        }
        let rate =
            |seconds: Vec<f64>| Samples::from(seconds).map(|seconds| bytes as f64 / 1e6 / seconds);
        Ok(vec![
            Figure::new("export", rate(export), "MB/s")
                .times("tar | zstd", rate(pack))
                .ratio_at_least(0.8),
            Figure::new("import, synced", rate(import), "MB/s")
                .times("zstd -d | tar, synced", rate(unpack))
                .ratio_at_least(0.8),
        ])
    }

    async fn verify(&self) -> Result<Vec<Figure>> {
        let dir = self.content().await?;
        let mut ours = vec![];
        let mut theirs = vec![];
        let mut bytes = 0;
        for _ in 0..self.rounds {
            let began = Instant::now();
            bytes = self
                .crew
                .host
                .verify(&self.name("content"), Progress::silent())
                .await?
                .bytes;
            ours.push(began.elapsed().as_secs_f64());
            theirs.push(tool(&format!(
                "sha256sum {}/blobs/* > /dev/null",
                quoted(&dir)
            ))?);
        }
        let rate =
            |seconds: Vec<f64>| Samples::from(seconds).map(|seconds| bytes as f64 / 1e6 / seconds);
        Ok(vec![
            Figure::new("verify", rate(ours), "MB/s")
                .times("sha256sum", rate(theirs))
                .ratio_at_least(0.8),
        ])
    }

    async fn list(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox().await?;
        self.saved(&sandbox, "one", false).await?;
        let home = self.scratch.path("many");
        let many = Host::open(HostConfig {
            home: home.clone(),
            ..self.config.clone()
        })
        .await?;
        fill_with_snapshots(&self.crew.host, &self.name("one"), &home, SNAPSHOTS).await?;
        let began = Instant::now();
        many.reindex().await?;
        let reindexed = ms(began.elapsed());
        let mut listed = Vec::new();
        for _ in 0..self.rounds.max(3) {
            let began = Instant::now();
            let found = many.snapshots().await?.snapshots.len();
            listed.push(ms(began.elapsed()));
            if found != SNAPSHOTS {
                return Err(Error::invalid(
                    "list of snapshots",
                    found,
                    "as many as there are",
                ));
            }
        }
        Ok(vec![
            Figure::ms(format!("list {SNAPSHOTS} snapshots"), listed).at_most(100.0),
            Figure::ms(format!("reindex {SNAPSHOTS} snapshots"), reindexed),
        ])
    }

    async fn diff(&self) -> Result<Vec<Figure>> {
        let sandbox = self.sandbox().await?;
        let make = "for d in $(seq 100); do mkdir -p /srv/$d; for f in $(seq 100); do echo $d.$f > /srv/$d/$f; done; done";
        shell(&sandbox, make).await?;
        self.saved(&sandbox, "before", false).await?;
        shell(
            &sandbox,
            &format!("for f in $(seq {CHANGED_FILES}); do echo other > /srv/7/$f; done"),
        )
        .await?;
        self.saved(&sandbox, "after", false).await?;
        let mut took = Vec::new();
        for _ in 0..self.rounds.max(3) {
            let began = Instant::now();
            let found = self
                .crew
                .host
                .diff(
                    &self.name("before"),
                    &self.name("after"),
                    DiffOptions::default(),
                )
                .await?;
            took.push(ms(began.elapsed()));
            if found.changes.len() != CHANGED_FILES {
                return Err(Error::invalid(
                    "comparison",
                    found.changes.len(),
                    "as many changes as there are",
                ));
            }
        }
        Ok(vec![Figure::ms(
            format!("diff of {CHANGED_FILES} changed files among {FILES}"),
            took,
        )])
    }
}

/// How long a tool of the host takes, in seconds.
fn tool(script: &str) -> Result<f64> {
    let failed = |e| Error::io("run", script, e);
    let began = Instant::now();
    // starts: the script of tool(…) in crates/bench/src/store.rs
    let status = Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::null())
        .status()
        .map_err(failed)?;
    if !status.success() {
        return Err(Error::invalid(
            "tool of the host",
            script,
            "tar, zstd and sha256sum must be installed",
        ));
    }
    Ok(began.elapsed().as_secs_f64())
}

fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', "'\\''"))
}

fn remove(path: &Path) -> Result<()> {
    std::fs::remove_dir_all(path).map_err(|e| Error::io("remove", path, e))
}
