//! The guest's serial console, kept in a file of bounded size.
//!
//! ```text
//!   console.log     the newest bytes, at most LIMIT        console.log.1   the LIMIT bytes before
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// A guest can print without end; the host keeps between one and two of these.
const LIMIT: u64 = 4 << 20;
const TAIL: u64 = 16 << 10;
const TAIL_LINES: usize = 12;
/// The first words of a kernel panic.
const PANIC: &str = "Kernel panic - not syncing";

/// The console of one boot, which is written to the log that all boots share.
#[derive(Debug)]
pub(crate) struct Console {
    path: PathBuf,
    /// The offset of this boot in the log.
    begin: u64,
    panicked: Arc<AtomicBool>,
    copying: JoinHandle<()>,
}

impl Console {
    /// Writes everything from `stream` to the log, until the machine ends.
    pub fn keep(stream: UnixStream, path: PathBuf) -> io::Result<Console> {
        let log = Log::open(path.clone())?;
        let begin = log.length;
        let panicked = Arc::new(AtomicBool::new(false));
        let watch = PanicWatch {
            seen: panicked.clone(),
            carried: Vec::new(),
        };
        Ok(Console {
            path,
            begin,
            panicked,
            copying: tokio::spawn(copy(stream, log, watch)),
        })
    }

    /// Waits until the last bytes are in the log. The machine has ended.
    pub async fn drain(&mut self) {
        if !self.copying.is_finished() {
            // The task ends with its socket; the runtime reports a panic in it.
            drop((&mut self.copying).await);
        }
    }

    /// Whether this boot's kernel printed a panic. A guest without the panic device reports it
    /// nowhere else.
    pub fn has_panicked(&self) -> bool {
        self.panicked.load(Ordering::Acquire)
    }

    /// The last lines of this boot, or the first of its panic, for error messages, without bytes
    /// that are no text.
    pub fn tail(&self) -> String {
        tail(&self.path, self.begin)
    }
}

/// Searches for a panic in a stream that arrives in pieces.
struct PanicWatch {
    seen: Arc<AtomicBool>,
    carried: Vec<u8>,
}

impl PanicWatch {
    fn look(&mut self, bytes: &[u8]) {
        self.carried.extend_from_slice(bytes);
        if self
            .carried
            .windows(PANIC.len())
            .any(|window| window == PANIC.as_bytes())
        {
            self.seen.store(true, Ordering::Release);
        }
        let keep_from = self.carried.len().saturating_sub(PANIC.len() - 1);
        self.carried.drain(..keep_from);
    }
}

async fn copy(mut console: UnixStream, mut log: Log, mut watch: PanicWatch) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = console.read(&mut buffer).await {
        watch.look(&buffer[..count]);
        if let Err(error) = log.append(&buffer[..count]) {
            // The console must still be read; otherwise the guest would block.
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
        let file = append_to(&path)?;
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

/// Opens a log, which is created if missing. It follows no link, so that the guest's output reaches
/// no other file.
pub(crate) fn append_to(path: &Path) -> io::Result<File> {
    let nofollow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    OpenOptions::new()
        .create(true)
        .append(true)
        .custom_flags(nofollow)
        .open(path)
}

/// The file with the bytes before those in `path`.
pub(crate) fn previous(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

fn tail(path: &Path, begin: u64) -> String {
    let text = read_tail(path, begin).unwrap_or_default();
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    // A panic prints its reason first, and then the call trace.
    let panic = lines.iter().rposition(|line| line.contains(PANIC));
    let first = panic.unwrap_or(lines.len().saturating_sub(TAIL_LINES));
    let shown = &lines[first..lines.len().min(first + TAIL_LINES)];
    if shown.is_empty() {
        "  (nothing)".into()
    } else {
        shown
            .iter()
            .map(|l| format!("  {l}"))
            .collect::<Vec<_>>()
            .join("\n")
    }
}

fn read_tail(path: &Path, begin: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    // A log that is shorter than this boot's offset has been rotated since.
    let begin = if begin > length { 0 } else { begin };
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL).max(begin)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let printable = |c: &char| {
        *c == '\n' || *c == '\t' || (!c.is_control() && *c != char::REPLACEMENT_CHARACTER)
    };
    Ok(String::from_utf8_lossy(&bytes)
        .chars()
        .filter(printable)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_prints_without_end_fills_at_most_two_limits() {
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
        assert!(tail(&path, 0).ends_with("the last line"));
    }

    #[test]
    fn an_error_shows_this_boot_and_not_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        std::fs::write(&path, "before\n").unwrap();
        assert_eq!(tail(&path, 7), "  (nothing)");
        std::fs::write(&path, "before\nnow\n").unwrap();
        assert_eq!(tail(&path, 7), "  now");
        std::fs::write(&path, "now\n").unwrap();
        assert_eq!(tail(&path, 7), "  now", "the log was begun anew");
    }

    #[test]
    fn the_reason_of_a_panic_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let trace: String = (0..100)
            .map(|n| format!("[    0.2]  call {n} of many that lead here\n"))
            .collect();
        std::fs::write(&path, format!("[    0.1] {PANIC}: no init\n{trace}")).unwrap();
        let shown = tail(&path, 0);
        assert!(
            shown.starts_with("  [    0.1] Kernel panic - not syncing: no init\n"),
            "{shown}"
        );
        assert_eq!(shown.lines().count(), TAIL_LINES);
    }

    #[test]
    fn a_panic_is_found_in_any_pieces() {
        let text = b"[    0.1] Kernel panic - not syncing: no init";
        for cut in 0..text.len() {
            let mut watch = PanicWatch {
                seen: Arc::default(),
                carried: Vec::new(),
            };
            watch.look(&text[..cut]);
            watch.look(&text[cut..]);
            assert!(watch.seen.load(Ordering::Acquire), "cut at {cut}");
            assert!(watch.carried.len() < PANIC.len());
        }
    }

    #[test]
    fn a_log_is_not_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let target = dir.path().join("target");
        std::fs::write(&target, "as it was").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(Log::open(path).is_err());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "as it was");
    }
}
