//! The zstd frame around an archive.
//!
//! Always: an input is one frame and nothing behind it, or plain; its first bytes tell which. A
//! frame that asks for a window of more than 128 MiB is refused, so its memory is bounded.
//!
//! When it fails: a damaged frame is a [`Damage`] inside an `io::Error`, so that the frame can be
//! read like any other input.

use std::fmt;
use std::io::{self, Read, Write};

use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};
use zstd::zstd_safe::CParameter;

use super::Damage;
use crate::Error;

const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const WINDOW_LOG_MAX: u32 = 27;
const PIECE: usize = 256 << 10;
const LEVEL: i32 = 3;
/// Each worker has a few buffers of 8 MiB.
const MAX_WORKERS: usize = 16;

/// The output of an export: compressed, or as it is.
pub(super) enum Output<'a> {
    Plain(&'a mut dyn Write),
    Compressed(zstd::Encoder<'static, &'a mut dyn Write>),
}

impl<'a> Output<'a> {
    pub(super) fn plain(out: &'a mut dyn Write) -> Self {
        Self::Plain(out)
    }

    /// What comes out depends on the input alone, not on the number of workers.
    pub(super) fn compressed(out: &'a mut dyn Write) -> io::Result<Self> {
        let workers = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_WORKERS);
        let mut encoder = zstd::Encoder::new(out, LEVEL)?;
        encoder.include_checksum(true)?;
        encoder.set_parameter(CParameter::NbWorkers(workers as u32))?;
        Ok(Self::Compressed(encoder))
    }

    pub(super) fn finish(self) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.flush(),
            Self::Compressed(encoder) => encoder.finish()?.flush(),
        }
    }
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(out) => out.write(bytes),
            Self::Compressed(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.flush(),
            Self::Compressed(encoder) => encoder.flush(),
        }
    }
}

/// The archive inside an input, compressed or not.
#[derive(Debug)]
pub enum Input<R> {
    Plain(io::Chain<io::Cursor<Vec<u8>>, R>),
    Compressed(Frame<R>),
}

impl<R: Read> Input<R> {
    /// Looks at the first bytes of an input.
    pub fn new(mut input: R) -> Result<Self, Error> {
        let mut start = Vec::with_capacity(MAGIC.len());
        input
            .by_ref()
            .take(MAGIC.len() as u64)
            .read_to_end(&mut start)
            .map_err(Error::artifact_io("read"))?;
        match &start[..] {
            _ if start == MAGIC => Ok(Self::Compressed(Frame::new(input, &start)?)),
            // An archive begins with the name of its first member.
            b"arti" => Ok(Self::Plain(io::Cursor::new(start).chain(input))),
            _ => Err(Damage::NotAnArtifact.into()),
        }
    }
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(input) => input.read(buffer),
            Self::Compressed(frame) => frame.read(buffer),
        }
    }
}

/// The content of one zstd frame.
pub struct Frame<R> {
    input: R,
    decoder: Decoder<'static>,
    buffer: Vec<u8>,
    /// What is in the buffer and not decoded yet.
    at: usize,
    end: usize,
    ended: bool,
}

impl<R> fmt::Debug for Frame<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl<R: Read> Frame<R> {
    fn new(input: R, start: &[u8]) -> Result<Self, Error> {
        let mut decoder = Decoder::new().map_err(Error::artifact_io("decompress"))?;
        decoder
            .set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX))
            .map_err(Error::artifact_io("decompress"))?;
        let mut buffer = vec![0; PIECE];
        buffer[..start.len()].copy_from_slice(start);
        Ok(Self {
            input,
            decoder,
            buffer,
            at: 0,
            end: start.len(),
            ended: false,
        })
    }

    /// More input, once all of it is used.
    fn refill(&mut self) -> io::Result<()> {
        if self.at < self.end {
            return Ok(());
        }
        (self.at, self.end) = (0, read_some(&mut self.input, &mut self.buffer)?);
        if self.end == 0 {
            Err(damage(Damage::Truncated("its compressed data")))
        } else {
            Ok(())
        }
    }

    fn refuse_more(&mut self) -> io::Result<usize> {
        if self.at == self.end && read_some(&mut self.input, &mut self.buffer)? == 0 {
            return Ok(0);
        }
        Err(damage(Damage::Trailing))
    }
}

impl<R: Read> Read for Frame<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        while !self.ended {
            let mut output = OutBuffer::around(&mut *buffer);
            let mut input = InBuffer::around(&self.buffer[self.at..self.end]);
            let decoded = self.decoder.run(&mut input, &mut output);
            self.at += input.pos();
            self.ended =
                decoded.map_err(|error| damage(Damage::Compression(error.to_string())))? == 0;
            if output.pos() > 0 {
                return Ok(output.pos());
            }
            if !self.ended {
                self.refill()?;
            }
        }
        self.refuse_more()
    }
}

/// The next bytes of an input; none at its end. A signal in between is no failure.
pub(super) fn read_some(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match input.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

fn damage(damage: Damage) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, damage)
}
