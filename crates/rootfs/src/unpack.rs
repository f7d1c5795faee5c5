//! Decompresses and hashes an archive while it is read.
//!
//! ```text
//! input ─ read, decompress ─► chunk ─ hash ─► chunk ─ the caller parses it ─► emptied chunk ─┐
//!         └──────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Three threads let decompressing, hashing and writing overlap. A fixed number of chunks
//! circulates, so memory is bounded. When it fails: all threads end with the call. A thread that
//! waits for the input ends when the input returns.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use flate2::bufread::GzDecoder;
use liblzma::bufread::XzDecoder;
use liblzma::stream::{CONCATENATED, Stream};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::fault;
use crate::watch::{Stop, Watch};

const CHUNK_BYTES: usize = 256 << 10;
const CHUNKS: usize = 8;
const MAGIC_BYTES: u64 = 6;
/// Zeros after a gzip stream, which programs leave that write whole blocks.
const MAX_PADDING_BYTES: usize = 1 << 20;
/// `xz -9` needs 65 MiB.
const MAX_XZ_MEMORY_BYTES: u64 = 256 << 20;

type Chunk = io::Result<Vec<u8>>;

/// The decompressed archive: one chunk after the other.
pub(crate) struct Unpacked<'a> {
    chunks: Receiver<Chunk>,
    emptied: Sender<Vec<u8>>,
    chunk: Vec<u8>,
    at: usize,
    /// The bytes before the current chunk.
    bytes: u64,
    allowed: Allowed,
    format: &'static str,
    watch: &'a mut Watch<'a>,
    /// The name of the current member, for the error about too many bytes.
    pub member: Vec<u8>,
}

/// How many decompressed bytes are allowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowed {
    pub bytes: u64,
    /// The limit in the error message. Earlier archives may have used a part of it.
    pub limit: u64,
}

impl Unpacked<'_> {
    /// The bytes of the current chunk that were not consumed; empty only at the end.
    pub fn chunk(&mut self) -> Result<&[u8], Error> {
        while self.at == self.chunk.len() {
            let Ok(next) = self.chunks.recv() else { break };
            let chunk = next.map_err(|source| Error::Input {
                format: self.format,
                source,
            })?;
            self.bytes += self.chunk.len() as u64;
            let emptied = std::mem::replace(&mut self.chunk, chunk);
            self.at = 0;
            self.check()?;
            // The receiver has ended if the input was read completely.
            self.emptied.send(emptied).unwrap_or_default();
        }
        Ok(&self.chunk[self.at..])
    }

    pub fn consume(&mut self, bytes: usize) {
        self.at = (self.at + bytes).min(self.chunk.len());
    }

    /// How many bytes were consumed.
    pub fn position(&self) -> u64 {
        self.bytes + self.at as u64
    }

    fn check(&mut self) -> Result<(), Error> {
        let bytes = self.bytes + self.chunk.len() as u64;
        if bytes > self.allowed.bytes {
            let name = if self.member.is_empty() {
                "the archive".into()
            } else {
                fault::shown(&self.member)
            };
            return Err(Error::Limit {
                name,
                limit: "bytes of input",
                allowed: self.allowed.limit,
            });
        }
        (self.watch)(bytes).map_err(|Stop| Error::GivenUp)
    }
}

/// Decompresses `input` for `take`, which reads it to its end. Returns the result of `take` and the
/// SHA-256 of the decompressed bytes.
pub(crate) fn unpack<'a, T>(
    input: &mut (dyn Read + Send),
    allowed: Allowed,
    watch: &'a mut Watch<'a>,
    take: impl FnOnce(&mut Unpacked<'a>) -> Result<T, Error>,
) -> Result<(T, [u8; 32]), Error> {
    let failed = |format| move |source| Error::Input { format, source };
    let mut magic = Vec::new();
    input
        .take(MAGIC_BYTES)
        .read_to_end(&mut magic)
        .map_err(failed("tar"))?;
    let format = Format::of(&magic);
    let input = Cursor::new(magic).chain(input);
    let (to_emptied, emptied) = channel();
    for _ in 0..CHUNKS {
        to_emptied.send(Vec::new()).unwrap_or_default();
    }
    let (to_hash, to_be_hashed) = sync_channel(CHUNKS);
    let (to_take, chunks) = sync_channel(CHUNKS);
    thread::scope(|scope| {
        let unpacks = move || fill_chunks(format.reader(input), &emptied, &to_hash);
        thread::Builder::new()
            .spawn_scoped(scope, unpacks)
            .map_err(failed(format.name()))?;
        let hashes = move || hash(&to_be_hashed, &to_take);
        let hashes = thread::Builder::new()
            .spawn_scoped(scope, hashes)
            .map_err(failed(format.name()))?;
        let mut unpacked = Unpacked {
            chunks,
            emptied: to_emptied,
            chunk: Vec::new(),
            at: 0,
            bytes: 0,
            allowed,
            format: format.name(),
            watch,
            member: Vec::new(),
        };
        let taken = take(&mut unpacked)?;
        drop(unpacked);
        let digest = hashes
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((taken, digest))
    })
}

/// Fills chunks until the input ends, an error occurs, or the receiver ends.
fn fill_chunks(
    reader: io::Result<Box<dyn Read + '_>>,
    emptied: &Receiver<Vec<u8>>,
    to: &SyncSender<Chunk>,
) {
    let mut reader = match reader {
        Ok(reader) => reader,
        Err(error) => return to.send(Err(error)).unwrap_or_default(),
    };
    while let Ok(mut chunk) = emptied.recv() {
        let filled = fill(&mut *reader, &mut chunk);
        let is_last = !matches!(filled, Ok(CHUNK_BYTES));
        if to.send(filled.map(|_| chunk)).is_err() || is_last {
            return;
        }
    }
}

/// Fills a chunk, as far as the input has bytes.
fn fill(reader: &mut dyn Read, chunk: &mut Vec<u8>) -> io::Result<usize> {
    chunk.resize(CHUNK_BYTES, 0);
    let mut filled = 0;
    while filled < CHUNK_BYTES {
        match reader.read(&mut chunk[filled..]) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    chunk.truncate(filled);
    Ok(filled)
}

fn hash(from: &Receiver<Chunk>, to: &SyncSender<Chunk>) -> [u8; 32] {
    let mut hasher = Sha256::new();
    while let Ok(chunk) = from.recv() {
        if let Ok(bytes) = &chunk {
            hasher.update(bytes);
        }
        if to.send(chunk).is_err() {
            break;
        }
    }
    hasher.finalize().into()
}

#[derive(Debug, Clone, Copy)]
enum Format {
    Plain,
    Gzip,
    Zstd,
    Xz,
}

impl Format {
    fn of(magic: &[u8]) -> Self {
        match magic {
            [0x1f, 0x8b, ..] => Self::Gzip,
            // A skippable frame may come first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0] => Self::Xz,
            _ => Self::Plain,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "tar",
            Self::Gzip => "tar in gzip",
            Self::Zstd => "tar in zstd",
            Self::Xz => "tar in xz",
        }
    }

    fn reader<'r>(self, input: impl Read + 'r) -> io::Result<Box<dyn Read + 'r>> {
        if let Self::Plain = self {
            return Ok(Box::new(input));
        }
        let input = BufReader::with_capacity(CHUNK_BYTES, input);
        Ok(match self {
            Self::Gzip => Box::new(Gzip(Some(GzDecoder::new(input)))),
            Self::Zstd => Box::new(zstd::Decoder::with_buffer(input)?),
            _ => {
                let stream = Stream::new_stream_decoder(MAX_XZ_MEMORY_BYTES, CONCATENATED)?;
                Box::new(XzDecoder::new_stream(input, stream))
            }
        })
    }
}

/// Whether a file starts like a supported compressed file.
pub(crate) fn is_packed(start: &[u8]) -> bool {
    !matches!(
        Format::of(&start[..start.len().min(MAGIC_BYTES as usize)]),
        Format::Plain
    )
}

/// Any number of gzip members, and zeros after the last.
struct Gzip<R>(Option<GzDecoder<R>>);

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while let Some(mut member) = self.0.take() {
            let read = member.read(into)?;
            if read > 0 || into.is_empty() {
                self.0 = Some(member);
                return Ok(read);
            }
            let mut input = member.into_inner();
            if has_member(&mut input)? {
                self.0 = Some(GzDecoder::new(input));
            }
        }
        Ok(0)
    }
}

/// Whether another gzip member follows. Otherwise only zeros may follow.
fn has_member(input: &mut impl BufRead) -> io::Result<bool> {
    let mut zeros = 0;
    loop {
        let some = input.fill_buf()?;
        let count = some.iter().take_while(|byte| **byte == 0).count();
        zeros += count;
        if some.is_empty() {
            return Ok(false);
        }
        if zeros == 0 {
            return Ok(true);
        }
        if count < some.len() || zeros > MAX_PADDING_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "data follows the end of the gzip stream",
            ));
        }
        input.consume(count);
    }
}
