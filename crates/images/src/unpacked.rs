//! Members of an artifact, unpacked while they are fetched.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sandtree_registry::BlobTarget;

/// The file of a member. It receives packed bytes and holds unpacked ones, with holes for zeros.
pub(crate) struct Unpacked {
    decoder: zstd::stream::write::Decoder<'static, Sparse>,
    path: PathBuf,
    bytes: u64,
    room: Arc<AtomicU64>,
}

impl Unpacked {
    /// `bytes` is the member's unpacked size. All members of an artifact share `room`.
    pub fn create(path: &Path, bytes: u64, room: &Arc<AtomicU64>) -> io::Result<Self> {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)?;
        let decoder = zstd::stream::write::Decoder::new(Sparse {
            file,
            at: 0,
            bytes,
            room: room.clone(),
        })?;
        Ok(Self {
            decoder,
            path: path.to_owned(),
            bytes,
            room: room.clone(),
        })
    }
}

impl BlobTarget for Unpacked {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.decoder.write_all(bytes)
    }

    fn restart(&mut self) -> io::Result<()> {
        *self = Self::create(&self.path, self.bytes, &self.room)?;
        Ok(())
    }

    fn complete(&mut self) -> io::Result<()> {
        self.decoder.flush()?;
        let Sparse {
            file, at, bytes, ..
        } = self.decoder.get_mut();
        if at != bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the member has {at} bytes instead of {bytes}"),
            ));
        }
        file.set_len(*bytes)
    }
}

struct Sparse {
    file: File,
    at: u64,
    /// The size; more bytes are refused.
    bytes: u64,
    room: Arc<AtomicU64>,
}

impl Sparse {
    fn take_room(&self, bytes: u64) -> io::Result<()> {
        let taken = self
            .room
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(bytes)
            });
        taken.map(drop).map_err(|_| {
            io::Error::new(
                io::ErrorKind::StorageFull,
                "the member unpacks to more than there is room for",
            )
        })
    }
}

impl Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.bytes - self.at {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the member unpacks to more than its annotated size",
            ));
        }
        if bytes.iter().any(|byte| *byte != 0) {
            self.take_room(bytes.len() as u64)?;
            self.file.write_all_at(bytes, self.at)?;
        }
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_unpacked_with_holes_and_never_beyond_its_annotated_size() {
        let dir = tempfile::tempdir().unwrap();
        let content = [vec![7; 5000], vec![0; 1 << 20], vec![8; 10]].concat();
        let packed = zstd::encode_all(&content[..], 3).unwrap();
        let room = Arc::new(AtomicU64::new(1 << 20));
        let take = |bytes: u64| {
            let mut unpacked = Unpacked::create(&dir.path().join("x"), bytes, &room)?;
            packed
                .chunks(100)
                .try_for_each(|chunk| unpacked.append(chunk))?;
            unpacked.complete()
        };
        take(content.len() as u64).unwrap();
        assert_eq!(std::fs::read(dir.path().join("x")).unwrap(), content);
        assert!(take(content.len() as u64 - 1).is_err());
        assert!(take(content.len() as u64 + 1).is_err());
        room.store(100, Ordering::Relaxed);
        assert_eq!(
            take(content.len() as u64).unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
    }
}
