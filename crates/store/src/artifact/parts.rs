//! The parts of an artifact: files of the store, in the order of the archive.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::packing::Role;
use super::pipeline::{self, Chunk};
use super::{SparseMap, packing};
use crate::blob::Blob;
use crate::fs::{ReadAt, io_error};
use crate::snapshot::Form;
use crate::{Digest, Error, ImageReference, Progress, Silent, Snapshot, SnapshotManifest, Store};

/// A file that travels.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub blob: Blob,
    pub role: Role,
    place: Place,
}

#[derive(Debug, Clone)]
enum Place {
    /// Wherever and however the pool has it.
    Pool,
    File(PathBuf),
    /// A file of an image or a kernel that is used for another one.
    Lent(PathBuf, Lender),
}

/// What is of no use if one of its files is damaged.
#[derive(Debug, Clone)]
pub(super) enum Lender {
    Image(Digest),
    Kernel(Digest),
}

/// Content that is open for reading, from front to back.
struct Content {
    path: PathBuf,
    source: Source,
}

enum Source {
    Anywhere(Box<dyn ReadAt>),
    /// What was compressed: how far it was read.
    Forward(Box<dyn Read + Send>, u64),
}

/// Which members belong to an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    WithImage,
    WithoutImage,
}

impl Store {
    /// Every part of a snapshot, each content once: image, kernel bundle, kernel, modules, root
    /// file system, blobs.
    pub(super) fn parts(&self, snapshot: &Snapshot, scope: Scope) -> Result<Vec<Part>, Error> {
        let mut parts = Vec::new();
        if scope == Scope::WithImage {
            self.check_image(&snapshot.manifest)?;
            let ImageReference { digest, kernel, .. } = &snapshot.manifest.image;
            parts = self.image_parts(digest, kernel)?;
        }
        parts.extend(blobs(&snapshot.manifest).map(|(role, blob)| Part::pooled(role, blob)));
        Ok(unique(parts))
    }

    /// Every part of an image: image, kernel bundle, kernel, initial file system, modules, root
    /// file system.
    pub(super) fn image_parts(&self, digest: &Digest, kernel: &Digest) -> Result<Vec<Part>, Error> {
        let image = self.image_by_digest(digest)?;
        let bundle = self.kernel(kernel)?;
        let mut parts = vec![
            self.record_part(
                Role::Image,
                digest,
                self.layout.image(digest).join("image.json"),
            )?,
            self.record_part(
                Role::Kernel,
                kernel,
                self.layout.kernel(kernel).join("bundle.json"),
            )?,
        ];
        let files = packing::kernel_roles(&bundle.record).zip(bundle.files());
        parts.extend(files.map(|(role, (path, blob))| Part {
            blob,
            role,
            place: Place::File(path),
        }));
        let rootfs = image.files().into_iter();
        parts.extend(rootfs.map(|(path, blob)| Part {
            blob,
            role: Role::Rootfs,
            place: Place::File(path),
        }));
        Ok(unique(parts))
    }

    /// A description, which is named by its own digest and has no declared length.
    pub(super) fn record_part(
        &self,
        role: Role,
        digest: &Digest,
        path: PathBuf,
    ) -> Result<Part, Error> {
        let blob = Blob {
            digest: digest.clone(),
            bytes: self.files.len(&path)?,
        };
        Ok(Part {
            blob,
            role,
            place: Place::File(path),
        })
    }
}

/// Every blob of a snapshot, in the order in which they travel.
pub(super) fn blobs(manifest: &SnapshotManifest) -> impl Iterator<Item = (Role, &Blob)> {
    let disk = manifest
        .disk
        .layers
        .iter()
        .map(|layer| (Role::DiskLayer, layer));
    let memory = manifest.memory.iter().flat_map(|memory| {
        let layers = memory.layers.iter().map(|layer| (Role::MemoryLayer, layer));
        let outputs = memory.outputs.values().map(|output| (Role::Output, output));
        let commands = memory
            .commands
            .iter()
            .map(|commands| (Role::Commands, commands));
        layers
            .chain([(Role::Devices, &memory.devices)])
            .chain(commands)
            .chain(outputs)
    });
    disk.chain(memory)
}

/// Each content once, where it comes first.
fn unique(mut parts: Vec<Part>) -> Vec<Part> {
    let mut seen = BTreeSet::new();
    parts.retain(|part| seen.insert(part.blob.digest.clone()));
    parts
}

impl Store {
    /// Reads a part, every byte verified. `begin` hears which pieces it has, and gives what takes
    /// them.
    pub(super) fn read_part<D: FnMut(&Chunk) -> Result<(), Error>>(
        &self,
        part: &Part,
        progress: &dyn Progress,
        begin: impl FnOnce(&SparseMap) -> Result<D, Error>,
    ) -> Result<SparseMap, Error> {
        let read = part.map(self).and_then(|map| {
            let mut content = part.open(self)?;
            let mut drain = begin(&map)?;
            let digest =
                pipeline::pull(&map, &mut |chunk| content.fill(chunk), &mut drain, progress)?;
            Ok((map, digest))
        });
        match read {
            Ok((map, digest)) if digest == part.blob.digest => Ok(map),
            Ok(_) | Err(Error::Corrupt { .. }) => Err(part.damage(self)),
            Err(error) => Err(error),
        }
    }
}

impl Part {
    pub(super) fn pooled(role: Role, blob: &Blob) -> Self {
        Self {
            blob: blob.clone(),
            role,
            place: Place::Pool,
        }
    }

    pub(super) fn lent(role: Role, blob: Blob, path: PathBuf, by: Lender) -> Self {
        Self {
            blob,
            role,
            place: Place::Lent(path, by),
        }
    }

    /// Its bytes from front to back, as they are. Their digest is not checked.
    pub(super) fn stream(&self, store: &Store) -> Result<Box<dyn Read + Send>, Error> {
        match &self.place {
            Place::Pool => store.open_blob(&self.blob),
            Place::File(path) | Place::Lent(path, _) => store.files.open(path),
        }
    }

    /// Where it is as it is, if it is anywhere.
    pub(super) fn plain_path(&self, store: &Store) -> Result<Option<PathBuf>, Error> {
        match &self.place {
            Place::File(path) | Place::Lent(path, _) => Ok(Some(path.clone())),
            Place::Pool => match store.blob_path(&self.blob)? {
                (path, Form::Plain) => Ok(Some(path)),
                (_, Form::Compressed) => Ok(None),
            },
        }
    }

    fn open(&self, store: &Store) -> Result<Content, Error> {
        if let Some(path) = self.plain_path(store)? {
            return Ok(Content {
                source: Source::Anywhere(store.files.open_at(&path)?),
                path,
            });
        }
        let (path, _) = store.blob_path(&self.blob)?;
        Ok(Content {
            source: Source::Forward(store.open_blob(&self.blob)?, 0),
            path,
        })
    }

    /// Which pieces of it are stored. What is compressed has to be read for that.
    fn map(&self, store: &Store) -> Result<SparseMap, Error> {
        let Content { path, source } = self.open(store)?;
        let map = match source {
            Source::Anywhere(file) => SparseMap::of_file(&*file),
            Source::Forward(mut stream, _) => SparseMap::of_stream(self.blob.bytes, &mut stream)
                .and_then(|map| {
                    expect_end(&mut stream, self.blob.bytes % super::sparse::BLOCK).map(|()| map)
                }),
        };
        let map = map.map_err(|error| read_error(error, &path))?;
        if map.bytes() != self.blob.bytes {
            return Err(Error::corrupt(
                path,
                format!("{} bytes where {} belong", map.bytes(), self.blob.bytes),
            ));
        }
        Ok(map)
    }

    /// Content that does not match its name: a layer, or the image that lent it, is checked again
    /// and put aside; anything else is named.
    pub(super) fn damage(&self, store: &Store) -> Error {
        let what = format!("its bytes are not those of {}", self.blob.digest);
        match &self.place {
            Place::File(path) => Error::corrupt(path, what),
            Place::Lent(path, by) => match by.put_aside_if_damaged(store) {
                Ok(()) => Error::corrupt(path, what),
                Err(error) => error,
            },
            Place::Pool => match store.put_aside_if_damaged(&self.blob) {
                Ok(moved) => Error::corrupt(
                    moved.unwrap_or_else(|| store.layout.layer(&self.blob.digest)),
                    what,
                ),
                Err(error) => error,
            },
        }
    }
}

impl Lender {
    fn put_aside_if_damaged(&self, store: &Store) -> Result<(), Error> {
        match self {
            Self::Image(digest) => store.verify_image(digest, &Silent).map(drop),
            Self::Kernel(digest) => store.verify_kernel(digest, &Silent).map(drop),
        }
    }
}

impl Content {
    fn fill(&mut self, chunk: &mut Chunk) -> Result<(), Error> {
        self.source
            .read(chunk)
            .map_err(|error| read_error(error, &self.path))
    }
}

/// Reads the rest of a frame, which must end there: only its end shows whether it is whole.
fn expect_end(stream: &mut dyn Read, rest_bytes: u64) -> io::Result<()> {
    if io::copy(&mut stream.take(rest_bytes + 1), &mut io::sink())? == rest_bytes {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it holds more or less than it should",
        ))
    }
}

/// A frame that cannot be decoded is damage, and no failure of the system.
fn read_error(error: io::Error, path: &Path) -> Error {
    match error.raw_os_error() {
        Some(_) => io_error("read", path)(error),
        None => Error::corrupt(path, error),
    }
}

impl Source {
    fn read(&mut self, chunk: &mut Chunk) -> io::Result<()> {
        match self {
            Self::Anywhere(file) => file.read_exact_at(&mut chunk.bytes, chunk.offset),
            Self::Forward(stream, at) => {
                io::copy(
                    &mut stream.by_ref().take(chunk.offset - *at),
                    &mut io::sink(),
                )?;
                *at = chunk.offset + chunk.bytes.len() as u64;
                stream.read_exact(&mut chunk.bytes)
            }
        }
    }
}
