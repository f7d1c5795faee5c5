//! `sandtree-bench`: measurements of Sandtree, each with a comparison or a target.
//!
//! Always: a run removes its sandboxes when it ends, also when it fails or a signal ends it. What
//! is compared is measured alternately within one run, so that noise on the host affects both
//! sides.

mod all;
mod bare;
mod cli;
mod compare;
mod config;
mod crew;
mod desktop;
mod exec;
mod failure;
mod figure;
mod fork;
mod host_load;
mod image;
mod long;
mod mounts;
mod peer;
mod process;
mod processes;
mod progress;
mod run;
mod samples;
mod scratch;
mod server;
mod show;
mod side;
mod states;
mod store;
mod stores;
mod tool;
mod turn;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use sandtree::Error;

use crate::config::Global;
use crate::failure::{Failure, Outcome};
use crate::run::Run;

/// How long dropped work may take to undo itself.
const UNDO_DEADLINE: Duration = Duration::from_secs(10);
const FAILED: u8 = 125;
/// A figure of this build is worse than that of the other.
const REGRESSED: u8 = 1;
/// After a signal, as shells report it.
const INTERRUPTED: u8 = 130;

/// Measure Sandtree on this host
#[derive(Debug, Parser)]
#[command(name = "sandtree-bench", version, max_term_width = 100)]
struct Args {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    what: Benchmark,
}

#[derive(Debug, clap::Subcommand)]
enum Benchmark {
    #[command(flatten)]
    Figures(Figures),
    /// This build and another one, alternately; fails when a figure has regressed beyond noise
    Compare(compare::CompareArgs),
}

#[derive(Debug, clap::Subcommand)]
enum Figures {
    /// All of the following in one table
    All(all::AllArgs),
    /// What a user of Quicksand does, with the program `sandtree` and with Quicksand
    Side(side::SideArgs),
    /// Keepers, forks and idle machines, through the program `sandtree`
    Processes(processes::ProcessesArgs),
    /// Directories of the host, compared with the guest's disk and the link
    Mounts(mounts::MountsArgs),
    /// How costs grow with time, memory, states and copies: minutes for each part
    Long(long::LongArgs),
    /// Round trips, throughput and boot, each compared with a bare QEMU in the same run
    Exec(exec::ExecArgs),
    /// Checkpoint, revert, fork, pause and create, each compared with its target and with QEMU's
    /// own snapshots
    States(states::StatesArgs),
    /// Saves, artifacts, listings and comparisons, each compared with plain tools on the same bytes
    Store(store::StoreArgs),
    /// What HTTP adds to the library, streams compared with the program `sandtree`, and the server
    /// itself
    Server(server::ServerArgs),
    /// Pictures, keys and states of a sandbox with a screen. The first run makes the image, which
    /// takes minutes
    Desktop(desktop::DesktopArgs),
    /// Imports, pulls, pushes and first commands of images, compared with tar, mke2fs and skopeo on
    /// the same bytes
    Image(image::ImageArgs),
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.global.log_to_stderr();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&Error::io("start", "the runtime", error)),
    };
    let outcome = runtime.block_on(run(args));
    runtime.shutdown_timeout(UNDO_DEADLINE);
    match outcome {
        Ok(code) => code,
        Err(Failure::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(Failure::Library(error)) => fail(&error),
    }
}

async fn run(args: Args) -> Result<ExitCode, Failure> {
    match args.what {
        Benchmark::Compare(what) => match compare::run(&args.global, what).await? {
            0 => Ok(ExitCode::SUCCESS),
            _ => Ok(ExitCode::from(REGRESSED)),
        },
        Benchmark::Figures(what) => {
            report(&args.global, what).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs a benchmark and reports its figures. Parts that failed do not prevent the report of others.
async fn report(global: &Global, what: Figures) -> Result<(), Failure> {
    let run = Run::begin()?;
    let mut measured = measure(global, what).await?;
    let failed = measured.failed.take();
    run.report(global, &measured).await?;
    failed.map_or(Ok(()), |error| Err(error.into()))
}

async fn measure(global: &Global, what: Figures) -> Outcome {
    match what {
        Figures::All(what) => all::run(global, what).await,
        Figures::Side(what) => side::run(global, what).await,
        Figures::Processes(what) => processes::run(global, what).await,
        Figures::Mounts(what) => mounts::run(global, what).await,
        Figures::Long(what) => long::run(global, what).await,
        Figures::Exec(what) => exec::run(global, what).await,
        Figures::States(what) => states::run(global, what).await,
        Figures::Store(what) => store::run(global, what).await,
        Figures::Server(what) => server::run(global, what).await,
        Figures::Desktop(what) => desktop::run(global, what).await,
        Figures::Image(what) => image::run(global, what).await,
    }
}

fn fail(error: &Error) -> ExitCode {
    eprintln!("sandtree-bench: {}", show::one_line(error));
    ExitCode::from(FAILED)
}
