//! `sandtree-bench side`: what a user of Quicksand does, with both: the program `sandtree` and its
//! keepers, and Quicksand in a Python process that is already running.
//!
//! Both guests have 512 MB, one processor of the same model, and the same QEMU. Sandtree's is the
//! image `tiny`, Quicksand's is its Alpine. The time of `sandtree` includes the start of a process
//! for each verb; Quicksand's does not include the start of Python.

use std::time::Duration;

use sandtree::{Result, Sandbox};

use crate::cli::{self, Cli};
use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured};
use crate::failure::{Measured, Outcome};
use crate::figure::Figure;
use crate::peer::{Missing, Quicksand, number};
use crate::process;
use crate::scratch::Scratch;
use crate::turn::Turn;

#[derive(Debug, clap::Args)]
pub struct SideArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// How often to boot Quicksand's guest, which takes a minute without KVM
    #[arg(long, default_value_t = 2)]
    pub boots: usize,
}

const PEER: &str = "Quicksand";
const COMMANDS: usize = 10;
const WRITTEN_MB: u64 = 100;
/// A checkpoint with much written costs much.
const WRITTEN_ROUNDS_MAX: usize = 3;
const TAG: &str = "base";
/// Between reverts, so that a QEMU that was started ahead waits for the next one.
const PAUSE: Duration = Duration::from_millis(1500);

/// How reverts follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// Each after the first command of the one before.
    AtOnce,
    /// With a pause. Sandtree's QEMU has been started ahead.
    Paused,
}

pub async fn run(global: &Global, args: SideArgs) -> Outcome {
    let scratch = Scratch::beside(&global.config()?.home)?;
    let measured = measured(global, async |crew| {
        let cli = Cli::find(global)?;
        // It makes the warm image, which the first sandbox of an image boots for.
        let first = cli.sandbox(crew, "first").await?;
        let accel = first.info()?.accelerator.unwrap_or_default();
        crew.remove(first).await?;
        let mut peer = Quicksand::start(global, &accel, &scratch).await?;
        let mut bench = Bench {
            crew,
            cli: &cli,
            args: &args,
            peer: peer
                .as_mut()
                .map_err(|Missing(why)| why.as_str().to_owned()),
        };
        let measured = bench.parts().await;
        let ended = match peer {
            Ok(peer) => peer.end().await,
            Err(_) => Ok(()),
        };
        let measured = measured?;
        ended?;
        Ok(measured)
    })
    .await?;
    Ok(measured)
}

struct Bench<'a> {
    crew: &'a Crew,
    cli: &'a Cli,
    args: &'a SideArgs,
    peer: std::result::Result<&'a mut Quicksand, String>,
}

/// The same measurement of both, in one unit.
#[derive(Default)]
struct Both {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

impl Both {
    fn push(&mut self, ours: f64, theirs: Option<f64>) {
        self.ours.push(ours);
        self.theirs.extend(theirs);
    }
}

impl Bench<'_> {
    async fn parts(&mut self) -> Result<Measured> {
        let mut left_out = Vec::new();
        match &mut self.peer {
            Ok(peer) => left_out.push(format!("compared with {}", peer.version().await?)),
            Err(why) => left_out.push(format!("{PEER} was not measured: {why}")),
        }
        let mut figures = vec![self.create().await?];
        let name = cli::name("side");
        let (sandbox, _) = self.cli.create(self.crew, &name, IMAGE).await?;
        figures.push(self.command(&name).await?);
        figures.push(self.memory(&sandbox).await?);
        figures.extend(self.saves(&name).await?);
        figures.extend(self.checkpoints(&name, 0).await?);
        figures.extend(self.checkpoints(&name, WRITTEN_MB).await?);
        figures.extend(self.reverts(&name, Pace::AtOnce).await?);
        figures.extend(self.reverts(&name, Pace::Paused).await?);
        figures.push(self.restart(&name).await?);
        Ok(Measured {
            figures,
            left_out,
            ..Measured::default()
        })
    }

    /// Measures both, in the order of the round. Without the peer, only ours.
    async fn in_turn<A, B>(
        &mut self,
        round: usize,
        ours: impl Future<Output = Result<A>>,
        theirs: impl AsyncFnOnce(&mut Quicksand) -> Result<B>,
    ) -> Result<(A, Option<B>)> {
        let theirs = async {
            match &mut self.peer {
                Ok(peer) => theirs(peer).await.map(Some),
                Err(_) => Ok(None),
            }
        };
        Turn::of(round).both(ours, theirs).await
    }

    fn figure(&self, what: impl Into<String>, both: Both) -> Figure {
        self.compared(Figure::ms(what, both.ours), both.theirs)
    }

    fn compared(&self, figure: Figure, theirs: Vec<f64>) -> Figure {
        let figure = figure.through_cli();
        match &self.peer {
            Ok(_) => figure.shorter_than(PEER, theirs),
            Err(why) => figure.without(PEER, why),
        }
    }

    async fn create(&mut self) -> Result<Figure> {
        let mut both = Both::default();
        let crew = self.crew;
        let cli = self.cli;
        for round in 0..self.args.boots.max(1) {
            let name = cli::name("created");
            let ours = async {
                let (sandbox, ms) = cli.create(crew, &name, IMAGE).await?;
                crew.remove(sandbox).await?;
                Ok(ms)
            };
            let theirs = async |peer: &mut Quicksand| peer.create().await;
            let (ours, theirs) = self.in_turn(round, ours, theirs).await?;
            both.push(ours, theirs);
        }
        let figure = self.figure("create to the first command, warm", both);
        Ok(figure.ratio_at_least(120.0))
    }

    async fn command(&mut self, name: &str) -> Result<Figure> {
        let mut both = Both::default();
        for round in 0..COMMANDS {
            let ours = self.cli.first_command(name);
            let theirs = async |peer: &mut Quicksand| peer.run("true").await;
            let (ours, theirs) = self.in_turn(round, ours, theirs).await?;
            both.push(ours, theirs);
        }
        Ok(self.figure("`true` in a running sandbox", both))
    }

    /// The memory of an idle machine. Sandtree's keeper is not in it, nor is Quicksand's Python.
    async fn memory(&mut self, sandbox: &Sandbox) -> Result<Figure> {
        let pid = sandbox.info()?.qemu_pid.unwrap_or_default();
        let ours = process::pss_bytes(pid)? as f64 / 1e6;
        let theirs = match &mut self.peer {
            Ok(peer) => vec![peer.pss_bytes().await? / 1e6],
            Err(_) => Vec::new(),
        };
        let figure = Figure::new("PSS of the QEMU of an idle sandbox", ours, "MB");
        Ok(self.compared(figure, theirs))
    }

    /// Before any checkpoint: Quicksand saves none of its checkpoints, and would remove them.
    async fn saves(&mut self, name: &str) -> Result<Vec<Figure>> {
        let mut saves = Both::default();
        let mut starts = Both::default();
        let crew = self.crew;
        let cli = self.cli;
        let saved = cli::name("saved");
        for round in 0..self.args.rounds {
            let words = ["save", "--force", name, &saved];
            let ours = cli.run(&words);
            let theirs = async |peer: &mut Quicksand| peer.save("saved").await;
            let (ours, theirs) = self.in_turn(round, ours, theirs).await?;
            saves.push(ours.ms, theirs);
        }
        for round in 0..self.args.boots.max(1) {
            let copy = cli::name("copy");
            let ours = async {
                let (sandbox, ms) = cli.create(crew, &copy, &saved).await?;
                crew.remove(sandbox).await?;
                Ok(ms)
            };
            let theirs = async |peer: &mut Quicksand| peer.start_saved("saved").await;
            let (ours, theirs) = self.in_turn(round, ours, theirs).await?;
            starts.push(ours, theirs);
        }
        self.crew.host.remove_snapshot(&saved).await?;
        let start = self.figure("start from a disk save, to the first command", starts);
        Ok(vec![
            self.figure("hot save of the disk", saves),
            start.at_most(1000.0),
        ])
    }

    /// Takes checkpoints, each after the guest has written some megabytes.
    async fn checkpoints(&mut self, name: &str, written_mb: u64) -> Result<Vec<Figure>> {
        let mut stops = Both::default();
        let mut wholes = Both::default();
        let rounds = match written_mb {
            0 => self.args.rounds,
            _ => self.args.rounds.min(WRITTEN_ROUNDS_MAX),
        };
        let write = format!("dd if=/dev/urandom of=/dev/shm/written bs=1M count={written_mb}");
        for round in 0..rounds {
            if written_mb > 0 {
                let words = ["exec", name, "--", "sh", "-c", &write];
                let theirs = async |peer: &mut Quicksand| peer.run(&write).await;
                self.in_turn(round, self.cli.run(&words), theirs).await?;
            }
            let words = ["checkpoint", "--force", name, TAG];
            let theirs = async |peer: &mut Quicksand| peer.checkpoint(TAG).await;
            let (ours, theirs) = self.in_turn(round, self.cli.run(&words), theirs).await?;
            let stopped = theirs.as_ref().map(|theirs| number(theirs, "stopped_ms"));
            let whole = theirs.as_ref().map(|theirs| number(theirs, "ms"));
            stops.push(ours.number("pause_ms")?, stopped.transpose()?);
            wholes.push(ours.ms, whole.transpose()?);
        }
        let what = match written_mb {
            0 => "idle checkpoint".to_owned(),
            _ => format!("checkpoint with {written_mb} MB written"),
        };
        Ok(vec![
            self.figure(format!("{what}: the guest stops for"), stops),
            self.figure(format!("{what}, whole"), wholes),
        ])
    }

    /// To the last checkpoint.
    async fn reverts(&mut self, name: &str, pace: Pace) -> Result<Vec<Figure>> {
        let mut runs = Both::default();
        let mut wholes = Both::default();
        let mut firsts = Both::default();
        let cli = self.cli;
        for round in 0..self.args.rounds {
            if pace == Pace::Paused {
                tokio::time::sleep(PAUSE).await;
            }
            let ours = async {
                let revert = cli.run(&["revert", name, TAG]).await?;
                let first = cli.first_command(name).await?;
                Ok((revert.number("running_ms")?, revert.ms, first))
            };
            let theirs = async |peer: &mut Quicksand| peer.revert(TAG).await;
            let ((running, whole, first), theirs) = self.in_turn(round, ours, theirs).await?;
            let of = |name| {
                theirs
                    .as_ref()
                    .map(|theirs| number(theirs, name))
                    .transpose()
            };
            runs.push(running, of("stopped_ms")?);
            wholes.push(whole, of("ms")?);
            firsts.push(whole + first, of("first_ms")?);
        }
        let (with, limit) = match pace {
            Pace::AtOnce => ("", 45.0),
            Pace::Paused => (" from a spare", 15.0),
        };
        Ok(vec![
            self.figure(
                format!("restore{with} of a revert, until the guest runs"),
                runs,
            )
            .at_most(limit)
            .note("host time; Quicksand's is how long loadvm stops the guest"),
            self.figure(format!("revert{with}, whole"), wholes)
                .ratio_at_least(1.5),
            self.figure(format!("revert{with} to the first command"), firsts)
                .ratio_at_least(2.0),
        ])
    }

    async fn restart(&mut self, name: &str) -> Result<Figure> {
        let mut starts = Vec::new();
        for _ in 0..self.args.boots.max(1) {
            self.cli.run(&["stop", name]).await?;
            let start = self.cli.run(&["start", name]).await?;
            starts.push(start.ms + self.cli.first_command(name).await?);
        }
        let figure = Figure::ms("start after stop, to the first command", starts);
        Ok(figure.through_cli().at_most(1000.0))
    }
}
