//! Prints errors and chooses exit codes.

use std::error::Error as _;
use std::io::Write;
use std::process::ExitCode;

use sandtree::{Arguments, Code, Error, Report};
use serde::Serialize;
use serde_json::json;

use crate::args::BadSandboxRef;
use crate::{hint, show};

/// Sandtree itself failed.
pub const OURS: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// After Ctrl-C, as in shells.
pub const INTERRUPTED: u8 = 130;

#[derive(Debug)]
pub enum Failure {
    Library(Error),
    /// An error of the command line itself.
    Reported(Report),
    Interrupted,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Library(error)
    }
}

impl Failure {
    pub fn show(&self, json: bool) -> ExitCode {
        match self {
            Failure::Interrupted => ExitCode::from(INTERRUPTED),
            Failure::Reported(report) => {
                show(report, json);
                exit_code(report)
            }
            Failure::Library(error) => {
                let report = error.report();
                show(&report, json);
                exit_code(&report)
            }
        }
    }
}

/// A command that could not be started fails as in a shell.
fn exit_code(report: &Report) -> ExitCode {
    ExitCode::from(match report.code() {
        Some(Code::CommandNotFound) => NOT_FOUND,
        Some(Code::CommandNotStarted) => NOT_EXECUTABLE,
        _ => OURS,
    })
}

/// Prints a usage error, or the requested help, which is no failure.
pub fn show_usage(error: &clap::Error) -> ExitCode {
    let wants_json = std::env::args_os()
        .take_while(|arg| arg != "--")
        .any(|arg| arg == "--json");
    if let Some(BadSandboxRef(refused)) = error.source().and_then(|e| e.downcast_ref()) {
        show(&refused.report(), wants_json);
        return ExitCode::from(OURS);
    }
    if error.use_stderr() && wants_json {
        let shown = error.to_string();
        let message = shown
            .lines()
            .next()
            .unwrap_or_default()
            .trim_start_matches("error: ")
            .to_owned();
        show(&Report::new(Code::Usage, message, Arguments::new()), true);
        return ExitCode::from(OURS);
    }
    let printed = error.print().is_ok();
    if printed && !error.use_stderr() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(OURS)
    }
}

/// An error as `--json` shows it.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    report: &'a Report,
    hint: Option<String>,
}

/// Prints the error with its causes, once, on stderr.
pub fn show(report: &Report, json: bool) {
    let hint = hint::of(report);
    if json {
        return say(&json!({ "error": Shown { report, hint } }).to_string());
    }
    say(&format!("sandtree: {}", show::plain(&report.one_line())));
    if let Some(hint) = hint {
        say(&format!("  hint: {}", show::plain(&hint)));
    }
}

/// Prints one line on stderr.
fn say(line: &str) {
    // If that fails, there is no other place to report it.
    drop(writeln!(std::io::stderr(), "{line}"));
}
