//! Running the host's tools.

use std::io;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use super::Error;

/// A program of the host's that we need, and how to get it.
pub(super) struct Tool {
    pub program: &'static str,
    pub hint: &'static str,
}

impl Tool {
    pub(super) const fn new(program: &'static str, hint: &'static str) -> Self {
        Self { program, hint }
    }

    /// Starts the program. Those for administrators are not on everyone's search path, so we look
    /// there, too.
    pub(super) fn spawn(&self, setup: impl Fn(&mut Command)) -> Result<Child, Error> {
        for dir in ["", "/usr/sbin", "/sbin"] {
            // starts: the program of Tool::new(…)
            let mut command = Command::new(Path::new(dir).join(self.program));
            command
                .env("LC_ALL", "C")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            setup(&mut command);
            match command.spawn() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                spawned => return spawned.map_err(|source| self.failed_to("start", source)),
            }
        }
        Err(Error::ToolMissing {
            program: self.program,
            hint: self.hint,
        })
    }

    /// Runs it to its end, successful or not.
    pub(super) fn output(&self, setup: impl Fn(&mut Command)) -> Result<Output, Error> {
        self.spawn(setup)?
            .wait_with_output()
            .map_err(|source| self.failed_to("wait for", source))
    }

    /// Runs it; anything but success is an error. Returns what it printed.
    pub(super) fn run(&self, setup: impl Fn(&mut Command)) -> Result<String, Error> {
        let output = self.output(setup)?;
        if !output.status.success() {
            return Err(Error::ToolFailed {
                program: self.program,
                status: output.status,
                stderr: stderr(&output),
            });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(super) fn failed_to(&self, operation: &'static str, source: io::Error) -> Error {
        Error::Io {
            operation,
            path: self.program.into(),
            source,
        }
    }
}

pub(super) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}
