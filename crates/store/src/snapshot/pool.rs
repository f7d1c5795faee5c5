//! The pool: every file of every snapshot, by the digest of its content.
//!
//! Always: `layers/<digest>` is the content itself, `layers/<digest>.zst` the same content as one
//! zstd frame. Either will do, and which it is never shows outside this module.

use std::io::{self, BufReader, Read};
use std::path::PathBuf;

use crate::blob::Blob;
use crate::fs::{Lock, io_error, optional};
use crate::{Digest, Error, Store};

/// The largest window that a frame may ask for, 128 MiB: what every zstd accepts.
const MAX_WINDOW_LOG: u32 = 27;
/// A frame's header has no more.
const FRAME_HEADER_BYTES: u64 = 18;

/// How the pool holds a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    Compressed,
}

impl Store {
    /// How the pool holds a blob, which it does with the right size.
    pub(crate) fn find_blob(&self, blob: &Blob) -> Result<Form, Error> {
        let plain = self.layout.layer(&blob.digest);
        match optional(self.files.len(&plain))? {
            Some(bytes) if bytes == blob.bytes => return Ok(Form::Plain),
            Some(bytes) => {
                return Err(Error::corrupt(
                    plain,
                    format!("{bytes} bytes where {} belong", blob.bytes),
                ));
            }
            None => {}
        }
        let compressed = self.layout.compressed_layer(&blob.digest);
        match optional(self.files.read_up_to(&compressed, FRAME_HEADER_BYTES))? {
            Some(start) if content_bytes(&start) == Some(blob.bytes) => Ok(Form::Compressed),
            Some(_) => Err(Error::corrupt(
                compressed,
                format!("it is no frame of {} bytes", blob.bytes),
            )),
            None => Err(Error::corrupt(plain, "missing")),
        }
    }

    /// Like `find_blob`. A visibly damaged file counts as missing: a caller that has the content
    /// puts it in its place.
    pub(super) fn usable_blob(&self, blob: &Blob) -> Result<Option<Form>, Error> {
        match self.find_blob(blob) {
            Err(Error::Corrupt { .. }) => Ok(None),
            found => found.map(Some),
        }
    }

    pub(super) fn check_blob(&self, blob: &Blob) -> Result<(), Error> {
        self.find_blob(blob).map(drop)
    }

    /// The content of a blob, whatever way it is held. Its digest is not checked.
    pub fn open_blob(&self, blob: &Blob) -> Result<Box<dyn Read + Send>, Error> {
        let (path, form) = self.blob_path(blob)?;
        let file = self.files.open(&path)?;
        match form {
            Form::Plain => Ok(file),
            Form::Compressed => Ok(Box::new(decoder(file).map_err(io_error("read", &path))?)),
        }
    }

    pub(crate) fn blob_path(&self, blob: &Blob) -> Result<(PathBuf, Form), Error> {
        match self.find_blob(blob)? {
            Form::Plain => Ok((self.layout.layer(&blob.digest), Form::Plain)),
            Form::Compressed => Ok((self.layout.compressed_layer(&blob.digest), Form::Compressed)),
        }
    }

    /// Moves whatever the pool has under a digest out of the way.
    pub(crate) fn quarantine_blob(
        &self,
        held: &Lock,
        digest: &Digest,
    ) -> Result<Option<PathBuf>, Error> {
        let mut moved = None;
        for path in [
            self.layout.layer(digest),
            self.layout.compressed_layer(digest),
        ] {
            if self.files.kind(&path)?.is_some() {
                moved = Some(self.quarantine(held, &path, &format!("layer-{digest}"))?);
            }
        }
        Ok(moved)
    }
}

/// The length of what a frame holds, if it is one of ours.
fn content_bytes(start: &[u8]) -> Option<u64> {
    zstd::zstd_safe::get_frame_content_size(start)
        .ok()
        .flatten()
}

fn decoder(file: Box<dyn Read + Send>) -> io::Result<impl Read + Send> {
    let mut decoder = zstd::Decoder::new(BufReader::new(file))?;
    decoder.window_log_max(MAX_WINDOW_LOG)?;
    Ok(Decoded(decoder))
}

/// What a frame holds. Bytes that are no frame are invalid data; what the system refuses to read is
/// its own error.
struct Decoded<R>(R);

impl<R: Read> Read for Decoded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0
            .read(buffer)
            .map_err(|error| match error.raw_os_error() {
                Some(_) => error,
                None => io::Error::new(io::ErrorKind::InvalidData, error),
            })
    }
}
