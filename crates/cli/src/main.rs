//! The `sandtree` command: parses what was typed, asks the library, shows the answer.
//!
//! Exit codes: the guest command's own; 124 when its timeout struck; 126 and 127 when it could not
//! be started; 125 when Sandtree itself failed; 130 after Ctrl-C.

mod args;
mod commands;
mod failure;
mod progress;
mod show;
mod stdin;
mod terminal;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tracing_subscriber::fmt::format::FmtSpan;

use crate::commands::Args;
use crate::failure::Failure;

const UNDO_DEADLINE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return failure::show_usage(&error),
    };
    log_to_stderr(&args);
    let json = args.global.json;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => {
            let outcome = runtime.block_on(commands::run(args));
            // What was dropped may still be undoing itself in threads.
            runtime.shutdown_timeout(UNDO_DEADLINE);
            outcome
        }
        Err(error) => Err(Failure::from(sandtree::Error::io(
            "start",
            "the runtime",
            error,
        ))),
    };
    outcome.unwrap_or_else(|failure| failure.show(json))
}

/// Warnings of the library go to stderr; more with SANDTREE_LOG, in the syntax of tracing's
/// filters.
fn log_to_stderr(args: &Args) {
    let filter = args.global.log.as_deref().unwrap_or("warn");
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        // How long each step took, where steps are asked for.
        .with_span_events(FmtSpan::CLOSE)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        // A log that cannot be written, on a disk that is full, is no reason to panic.
        .log_internal_errors(false)
        .init();
}
