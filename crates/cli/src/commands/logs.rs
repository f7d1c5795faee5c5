//! `sandtree logs`: the guest's console.

use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use sandtree::{Error, Host, Phase, Result};

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct LogsArgs {
    /// Continue until the sandbox stops
    #[arg(short, long)]
    pub follow: bool,
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
}

const POLL: Duration = Duration::from_millis(100);

pub async fn run(global: &Global, args: LogsArgs) -> Outcome {
    let host = open(global).await?;
    let [before, console] = host.console(&args.sandbox)?;
    let (bytes, console) = read_all(before, console)?;
    if global.json {
        show::json(&serde_json::json!({ "console": String::from_utf8_lossy(&bytes) }));
        return Ok(ExitCode::SUCCESS);
    }
    print(&bytes)?;
    if args.follow {
        follow(&host, &args.sandbox, console).await?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn follow(host: &Host, sandbox: &str, mut console: Log) -> Result<()> {
    loop {
        // Checked before reading, so that the last output is not missed.
        let live = is_live(host, sandbox);
        print(&console.rest()?)?;
        if !live {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
}

fn is_live(host: &Host, sandbox: &str) -> bool {
    let state = host.find(sandbox).map(|info| info.state);
    matches!(
        state,
        Ok(Phase::Creating | Phase::Starting | Phase::Running | Phase::Stopping)
    )
}

/// Returns the whole console so far, and the file to continue from.
fn read_all(before: PathBuf, console: PathBuf) -> Result<(Vec<u8>, Log)> {
    // The newer file is opened first. If the driver rotates it in between, both paths lead to the
    // same file, which is read once.
    let mut console = Log::open(console)?;
    let mut before = Log::open(before)?;
    let moved = console.identity()?.is_some() && console.identity()? == before.identity()?;
    let mut bytes = if moved { Vec::new() } else { before.rest()? };
    bytes.extend(console.rest()?);
    Ok((bytes, console))
}

/// A log file that its writer appends to and rotates.
struct Log {
    path: PathBuf,
    file: Option<File>,
}

impl Log {
    fn open(path: PathBuf) -> Result<Self> {
        let file = optional(&path, File::open(&path))?;
        Ok(Self { path, file })
    }

    /// Reads what was written since the last call, including the rest of a rotated file.
    fn rest(&mut self) -> Result<Vec<u8>> {
        // Checked before reading: once a new file exists, nothing is written to the old one.
        let there = optional(&self.path, self.path.metadata())?
            .as_ref()
            .map(identity);
        let mut bytes = Vec::new();
        self.read_into(&mut bytes)?;
        if there.is_some() && there != self.identity()? {
            *self = Self::open(std::mem::take(&mut self.path))?;
            self.read_into(&mut bytes)?;
        }
        Ok(bytes)
    }

    fn read_into(&mut self, bytes: &mut Vec<u8>) -> Result<()> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        file.read_to_end(bytes)
            .map(drop)
            .map_err(|e| Error::io("read", &self.path, e))
    }

    fn identity(&self) -> Result<Option<(u64, u64)>> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        file.metadata()
            .map(|found| Some(identity(&found)))
            .map_err(|e| Error::io("read", &self.path, e))
    }
}

fn identity(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// A log without output has no file yet.
fn optional<T>(path: &Path, found: std::io::Result<T>) -> Result<Option<T>> {
    match found {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some).map_err(|e| Error::io("read", path, e)),
    }
}

fn print(bytes: &[u8]) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(bytes)
        .and_then(|()| stdout.flush())
        .map_err(|e| Error::io("write to", "stdout", e))
}

#[cfg(test)]
mod tests {
    use std::fs::{OpenOptions, rename, write};

    use super::*;

    fn append(path: &Path, bytes: &[u8]) {
        OpenOptions::new()
            .append(true)
            .open(path)
            .unwrap()
            .write_all(bytes)
            .unwrap();
    }

    #[test]
    fn a_log_that_starts_again_is_read_without_a_gap() {
        let dir = tempfile::tempdir().unwrap();
        let [before, console] = ["console.log.1", "console.log"].map(|name| dir.path().join(name));
        let (bytes, mut log) = read_all(before.clone(), console.clone()).unwrap();
        assert_eq!(bytes, b"");
        write(&console, "one ").unwrap();
        assert_eq!(log.rest().unwrap(), b"one ");
        append(&console, b"two ");
        rename(&console, &before).unwrap();
        assert_eq!(
            log.rest().unwrap(),
            b"two ",
            "between the two there is no log"
        );
        append(&before, b"three ");
        write(&console, "the new one, longer than the old ").unwrap();
        assert_eq!(
            log.rest().unwrap(),
            b"three the new one, longer than the old "
        );
        assert_eq!(log.rest().unwrap(), b"");
        append(&console, b"end");
        assert_eq!(log.rest().unwrap(), b"end");
        let all = b"one two three the new one, longer than the old end";
        assert_eq!(read_all(before, console).unwrap().0, all);
    }

    #[test]
    fn a_log_with_two_names_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let [before, console] = ["console.log.1", "console.log"].map(|name| dir.path().join(name));
        write(&before, "text").unwrap();
        std::fs::hard_link(&before, &console).unwrap();
        assert_eq!(read_all(before, console).unwrap().0, b"text");
    }
}
