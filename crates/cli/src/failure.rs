//! How an error is shown, and which exit code it has.

use std::process::ExitCode;

use sandtree::{Error, Report};
use serde_json::json;

/// Sandtree itself failed.
pub const OURS: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// After Ctrl-C, as shells have it.
pub const INTERRUPTED: u8 = 130;

const ENOENT: i32 = 2;

#[derive(Debug)]
pub enum Failure {
    Library(Error),
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

/// The chain once, on stderr.
pub fn show(report: &Report, json: bool) {
    if json {
        return eprintln!("{}", json!({ "error": report }));
    }
    let chain: Vec<&str> = std::iter::once(&report.message).chain(&report.causes).map(String::as_str).collect();
    eprintln!("sandtree: {}", chain.join(": "));
    if let Some(hint) = &report.hint {
        eprintln!("  hint: {hint}");
    }
}
