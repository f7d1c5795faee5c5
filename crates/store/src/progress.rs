//! Progress of long work, and its cancellation.

use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::blob::Blob;
use crate::fs::io_error;
use crate::{Digest, Error};

/// Receives the progress of long work. When it is cancelled, the work ends with
/// [`Error::Cancelled`] and leaves nothing.
pub trait Progress: Sync {
    /// The bytes to process. Called once, before the first of them.
    fn begin(&self, total_bytes: u64);
    fn advance(&self, bytes: u64);
    fn is_cancelled(&self) -> bool;
}

/// No progress is shown, and nothing is cancelled.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {}

    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Work that is not counted, and is cancelled with the counted work.
pub(crate) struct Uncounted<'a>(pub &'a dyn Progress);

impl Progress for Uncounted<'_> {
    fn begin(&self, _: u64) {}

    fn advance(&self, _: u64) {}

    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}

/// Fails if the work is cancelled.
pub(crate) fn check(progress: &dyn Progress) -> Result<(), Error> {
    if progress.is_cancelled() {
        Err(Error::Cancelled)
    } else {
        Ok(())
    }
}

/// How much is read at once.
const PIECE: usize = 256 << 10;

/// Reads to the end, piece by piece, and returns digest and length. `sink` gets
/// every piece.
pub(crate) fn read_through(
    path: &Path,
    reader: &mut dyn Read,
    progress: &dyn Progress,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
) -> Result<Blob, Error> {
    let mut hasher = Sha256::new();
    let mut piece = vec![0; PIECE];
    let mut bytes = 0;
    loop {
        check(progress)?;
        let read = match reader.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(Error::corrupt(path, error));
            }
            read => read.map_err(io_error("read", path))?,
        };
        if read == 0 {
            return Ok(Blob {
                digest: Digest::finish(hasher),
                bytes,
            });
        }
        hasher.update(&piece[..read]);
        sink(&piece[..read])?;
        bytes += read as u64;
        progress.advance(read as u64);
    }
}
