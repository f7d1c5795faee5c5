//! The guest's serial console, kept in a file of bounded size.
//!
//! ```text
//!   console.log     the newest bytes, at most LIMIT        console.log.1   the LIMIT bytes before
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// A guest can print for ever; the host keeps between one and two of these.
const LIMIT: u64 = 4 << 20;
const TAIL: u64 = 2048;
const TAIL_LINES: usize = 12;

/// Writes everything from `console` to the log, until the machine ends.
pub(crate) fn keep(console: UnixStream, path: PathBuf) -> io::Result<JoinHandle<()>> {
    let log = Log::open(path)?;
    Ok(tokio::spawn(copy(console, log)))
}

async fn copy(mut console: UnixStream, mut log: Log) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = console.read(&mut buffer).await {
        if let Err(error) = log.append(&buffer[..count]) {
            // The console must be read on, or the guest would stand still for the sake of its log.
            tracing::warn!(%error, path = %log.path.display(), "cannot keep the console");
        }
    }
}

struct Log {
    path: PathBuf,
    file: File,
    length: u64,
}

impl Log {
    fn open(path: PathBuf) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        let length = file.metadata()?.len();
        Ok(Self { path, file, length })
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.length >= LIMIT {
            std::fs::rename(&self.path, previous(&self.path))?;
            *self = Self::open(self.path.clone())?;
        }
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }
}

/// Where the bytes before those in `path` are.
pub(crate) fn previous(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

/// The last lines, for error messages. What is not text is left out.
pub(crate) fn tail(path: &Path) -> String {
    let text = read_tail(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let shown = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    if shown.is_empty() {
        "  (nothing)".into()
    } else {
        shown.iter().map(|l| format!("  {l}")).collect::<Vec<_>>().join("\n")
    }
}

fn read_tail(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let printable = |c: &char| *c == '\n' || *c == '\t' || (!c.is_control() && *c != char::REPLACEMENT_CHARACTER);
    Ok(String::from_utf8_lossy(&bytes).chars().filter(printable).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_prints_for_ever_fills_two_limits_at_most() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = Log::open(path.clone()).unwrap();
        let block = vec![b'x'; 1 << 20];
        for _ in 0..20 {
            log.append(&block).unwrap();
        }
        log.append(b"\nthe last line\x1b\n").unwrap();
        assert!(path.metadata().unwrap().len() <= LIMIT + (1 << 20));
        assert!(previous(&path).metadata().unwrap().len() <= LIMIT + (1 << 20));
        assert!(tail(&path).ends_with("the last line"));
    }
}
