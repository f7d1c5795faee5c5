//! Trees of files as tar streams, on the host's side.
//!
//! Always: what a guest packed is hostile. Every name is resolved beneath the one directory that
//! was chosen, by handles that cannot leave it, and through no symbolic link: no packer puts a
//! member behind one. Set-id bits are dropped, and device nodes are not made. Holes stay holes.
//! Memory is bounded, whatever lengths the headers claim and however many members come. What the
//! host packs may change meanwhile: a member has the length that its header says. When it fails:
//! what was unpacked so far stays, as with any copy that breaks off.

mod pack;
#[cfg(test)]
mod tests;
mod unpack;

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::rc::Rc;

use bytes::{Buf, Bytes};
pub(super) use pack::{Owner, pack};
use tokio::sync::mpsc;
pub(super) use unpack::unpack;

const CHUNK: usize = 128 * 1024;
const SKIPPED_LINES: usize = 1000;
const SKIPPED_BYTES: usize = 1 << 20;

/// What a copy left out, one line for each. Whoever packs can name as much as it likes: the first
/// are kept, the rest counted.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    lines: Vec<String>,
    bytes: usize,
    more: u64,
}

impl Skipped {
    /// Names in it may hold anything; what could steer a terminal is escaped.
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
    /// How much may still be read before something must have come of it.
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
