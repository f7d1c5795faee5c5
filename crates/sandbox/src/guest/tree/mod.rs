//! Trees of files as tar streams, on the host's side.
//!
//! Always: an archive of a guest is hostile. Every name is resolved beneath the chosen directory,
//! by handles that cannot leave it, and through no symbolic link: no packer puts a member behind
//! one. Set-id bits are dropped, and device nodes are not created. Holes stay holes. Memory is
//! bounded for any lengths in headers and any number of members. Files that the host packs may
//! change meanwhile: a member has the length in its header. When it fails: the files unpacked so
//! far stay, as with any interrupted copy.

mod archive;
mod pack;
#[cfg(test)]
mod tests;
mod unpack;

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::rc::Rc;

pub use archive::check_archive;
pub(super) use archive::send;
use bytes::{Buf, Bytes};
pub(super) use pack::{Owner, pack};
use tokio::sync::mpsc;
pub(super) use unpack::unpack;

const CHUNK: usize = 128 * 1024;
const SKIPPED_LINES: usize = 1000;
const SKIPPED_BYTES: usize = 1 << 20;

/// The files that a copy left out, one line for each. The first lines are kept, the others are only
/// counted, because a packer can name any number.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    lines: Vec<String>,
    bytes: usize,
    more: u64,
}

impl Skipped {
    /// Names in it may contain any character; control characters are escaped.
    pub(super) fn add(&mut self, line: &str) {
        let full = self.lines.len() >= SKIPPED_LINES || self.bytes + line.len() > SKIPPED_BYTES;
        if full || self.more > 0 {
            self.more += 1;
            return;
        }
        self.bytes += line.len();
        self.lines.push(line.chars().map(plain).collect());
    }

    pub(super) fn join(&mut self, other: Skipped) {
        other.lines.iter().for_each(|line| self.add(line));
        self.more += other.more;
    }

    pub(super) fn into_lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.lines.push(format!("and {} more", self.more));
        }
        self.lines
    }
}

fn plain(c: char) -> String {
    if c.is_control() {
        c.escape_default().to_string()
    } else {
        c.to_string()
    }
}

/// The writing end of a stream whose reader is a task.
struct ChunkWriter {
    chunks: mpsc::Sender<Bytes>,
    buffer: Vec<u8>,
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let chunk = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK));
        self.chunks
            .blocking_send(chunk.into())
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// The reading end of a stream whose writer is a task.
struct ChunkReader {
    chunks: mpsc::Receiver<Bytes>,
    chunk: Bytes,
    /// How many bytes may still be read before the next member must be complete.
    allowance: Rc<Cell<u64>>,
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.chunks.blocking_recv() {
                Some(chunk) => self.chunk = chunk,
                None => return Ok(0),
            }
        }
        let count = self.chunk.len().min(buffer.len());
        let left = self
            .allowance
            .get()
            .checked_sub(count as u64)
            .ok_or_else(|| io::Error::other("headers without end"))?;
        self.allowance.set(left);
        self.chunk.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}
