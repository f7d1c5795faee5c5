//! `sandtree-bench`: measurements of Sandtree, each with a comparison or a target.
//!
//! Always: a run removes its sandboxes when it ends, also when it fails or a signal ends it. What
//! is compared is measured alternately within one run, so that noise on the host affects both
//! sides.

mod bare;
mod config;
mod crew;
mod exec;
mod failure;
mod figure;
mod fork;
mod image;
mod progress;
mod scratch;
mod show;
mod states;
mod store;
mod stores;
mod tool;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use sandtree::Error;

use crate::config::Global;
use crate::failure::{Failure, Outcome};

/// How long dropped work may take to undo itself.
const UNDO_DEADLINE: Duration = Duration::from_secs(10);
const FAILED: u8 = 125;
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
    /// Round trips, throughput and boot, each compared with a bare QEMU in the same run
    Exec(exec::ExecArgs),
    /// Checkpoint, revert, fork, pause and create, each compared with its target and with QEMU's
    /// own snapshots
    States(states::StatesArgs),
    /// Saves, artifacts, listings and comparisons, each compared with plain tools on the same bytes
    Store(store::StoreArgs),
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
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(Failure::Library(error)) => fail(&error),
    }
}

async fn run(args: Args) -> Outcome {
    match args.what {
        Benchmark::Exec(what) => exec::run(&args.global, what).await,
        Benchmark::States(what) => states::run(&args.global, what).await,
        Benchmark::Store(what) => store::run(&args.global, what).await,
        Benchmark::Image(what) => image::run(&args.global, what).await,
    }
}

fn fail(error: &Error) -> ExitCode {
    eprintln!("sandtree-bench: {}", show::one_line(error));
    ExitCode::from(FAILED)
}
