//! Prints errors and chooses exit codes.

use std::error::Error as _;
use std::io::Write;
use std::process::ExitCode;

use sandtree::{Error, ErrorKind, Report};
use serde_json::json;

use crate::args::BadSandboxRef;
use crate::show;

/// Sandtree itself failed.
pub const OURS: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// After Ctrl-C, as in shells.
pub const INTERRUPTED: u8 = 130;

const ENOENT: i32 = 2;

#[derive(Debug)]
pub enum Failure {
    Library(Error),
    /// An error of the command line itself.
    Told(Report),
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
            Failure::Told(report) => {
                show(report, json);
                ExitCode::from(OURS)
            }
            Failure::Library(error) => {
                show(&error.report(), json);
                ExitCode::from(code(error))
            }
        }
    }
}

/// A command that could not be started fails as in a shell.
fn code(error: &Error) -> u8 {
    match error {
        Error::NotStarted { failure, .. } if failure.errno == ENOENT => NOT_FOUND,
        Error::NotStarted { .. } => NOT_EXECUTABLE,
        _ => OURS,
    }
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
        let hint = Some("`sandtree help` shows what can be typed".to_owned());
        show(
            &Report {
                kind: ErrorKind::Invalid,
                message,
                causes: Vec::new(),
                hint,
            },
            true,
        );
        return ExitCode::from(OURS);
    }
    let printed = error.print().is_ok();
    if printed && !error.use_stderr() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(OURS)
    }
}

/// Prints the error with its causes, once, on stderr.
pub fn show(report: &Report, json: bool) {
    if json {
        return say(&json!({ "error": report }).to_string());
    }
    let chain: Vec<&str> = std::iter::once(&report.message)
        .chain(&report.causes)
        .map(String::as_str)
        .collect();
    say(&format!("sandtree: {}", show::plain(&chain.join(": "))));
    if let Some(hint) = &report.hint {
        say(&format!("  hint: {}", show::plain(hint)));
    }
}

/// Prints one line on stderr.
fn say(line: &str) {
    // If that fails, there is no other place to report it.
    drop(writeln!(std::io::stderr(), "{line}"));
}
