//! The `sandtree` command: parses arguments, calls the library, prints the result.
//!
//! Exit codes: the guest command's own; 124 after its timeout; 126 and 127 if it could not be
//! started; 125 if Sandtree itself failed; 130 after Ctrl-C.

mod args;
mod commands;
mod failure;
mod hint;
mod progress;
mod show;
mod stdin;
mod terminal;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use tracing_subscriber::fmt::format::FmtSpan;

use crate::commands::{Args, Command};
use crate::failure::Failure;

const UNDO_DEADLINE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    if is_version_asked() {
        show::line(concat!("sandtree ", env!("CARGO_PKG_VERSION")));
        return ExitCode::SUCCESS;
    }
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
            // Threads may still undo dropped work.
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

/// The Python package asks for the version at each import. To answer takes a tenth of the time that
/// the parser of all commands takes to be built.
fn is_version_asked() -> bool {
    let mut args = std::env::args_os().skip(1);
    args.next().is_some_and(|arg| arg == "--version") && args.next().is_none()
}

/// What is logged without a choice: warnings, and one line for each request of a server.
const LOGGED: &str = "warn,request=info";

/// Logs the library's warnings to stderr. SANDTREE_LOG selects more, in the syntax of tracing's
/// filters.
fn log_to_stderr(args: &Args) {
    let filter = args.global.log.as_deref().unwrap_or(LOGGED);
    let log = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        // Shows how long each span took.
        .with_span_events(FmtSpan::CLOSE)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        // A log that cannot be written, for example on a full disk, must not panic.
        .log_internal_errors(false);
    // The errors of other commands are one JSON object, and nothing follows it.
    if args.global.json && matches!(args.command, Command::Serve(_)) {
        log.json().flatten_event(true).init();
    } else {
        log.init();
    }
}
