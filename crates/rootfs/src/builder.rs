//! How a root file system is made: layer by layer, then written out.
//!
//! Always: bytes of files go straight into the image file as they come, names and attributes stay
//! in memory until [`Builder::finish`]. Nothing but the image file is ever written.
//!
//! When it fails: after an error of an `add` or a `put`, half of what was added may be there, and
//! every later call fails as well. The image file stays; it is the caller's to remove.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use crate::edit::Canvas;
use crate::ext4::{self, DataArea};
use crate::fault::{Fault, require, shown};
use crate::limits::Meter;
use crate::path::{plain, split};
use crate::tree::{Attributes, Kind, MAX_FILE_BYTES, NodeId, Time, Tree};
use crate::unpack::{Allowed, unpack};
use crate::{Error, Limits, Made, Options, dir, layer, outward};

const BUFFER_BYTES: u64 = 64 << 10;

/// Is told how many unpacked bytes were read so far, again and again, and may stop it all.
pub type Watch<'a> = dyn FnMut(u64) -> Result<(), Stop> + 'a;

/// Nobody wants the result any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop;

/// What the members of an archive mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TarRules {
    /// Just files.
    Plain,
    /// A layer of an OCI image, in which some names hide what lower layers have.
    Layer,
}

/// What came out of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// Unpacked.
    pub bytes: u64,
    /// Of the unpacked bytes: what OCI calls a diff id.
    pub sha256: [u8; 32],
}

/// A node to be put.
pub struct New<'a> {
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub modified: Time,
    pub kind: NewKind<'a>,
}

pub enum NewKind<'a> {
    Dir,
    /// So many bytes of what is read.
    File(&'a mut dyn Read, u64),
    Symlink(&'a [u8]),
}

/// A root file system in the making.
#[derive(Debug)]
pub struct Builder {
    pub(crate) canvas: Canvas,
    limits: Limits,
    /// Something was added by half.
    is_failed: bool,
}

impl Builder {
    /// Starts with an empty root directory. There must be nothing at `image` yet.
    pub fn create(image: &Path, limits: Limits) -> Result<Self, Error> {
        let area = DataArea::create(image, limits.written_bytes)?;
        let canvas = Canvas {
            tree: Tree::new(),
            area,
            meter: Meter::new(limits),
        };
        Ok(Self {
            canvas,
            limits,
            is_failed: false,
        })
    }

    /// A tar archive, plain or in gzip, zstd or xz, laid over what is there. It is read to its end.
    pub fn add_tar(
        &mut self,
        input: &mut (dyn Read + Send),
        rules: TarRules,
        watch: &mut Watch<'_>,
    ) -> Result<Added, Error> {
        let allowed = Allowed {
            bytes: self.canvas.meter.bytes_left(),
            limit: self.limits.bytes,
        };
        self.change(|canvas| {
            let (bytes, sha256) = unpack(input, allowed, watch, |input| {
                layer::add(canvas, input, rules)
            })?;
            canvas
                .meter
                .take_bytes(bytes)
                .map_err(|fault| fault.of(b"the archive"))?;
            Ok(Added { bytes, sha256 })
        })
    }

    /// A host directory with all that is in it, laid over what is there. Gives how many bytes its
    /// files had.
    pub fn add_dir(&mut self, dir: &Path, watch: &mut Watch<'_>) -> Result<u64, Error> {
        self.change(|canvas| dir::add(canvas, dir, watch))
    }

    /// One node in place of what is there; missing parents are made, as root's and with mode 0755.
    pub fn put(&mut self, path: &[u8], node: New<'_>) -> Result<(), Error> {
        self.change(|canvas| place(canvas, path, node).map_err(|fault| fault.of(path)))
    }

    /// Takes away what is at a path, and all below it. Says whether there was anything.
    pub fn remove(&mut self, path: &[u8]) -> Result<bool, Error> {
        self.check()?;
        self.unlink(path).map_err(|fault| fault.of(path))
    }

    /// The bytes of a file, if there is one; links are followed inside of the tree. More than
    /// `limit` are an error.
    pub fn read(&self, path: &[u8], limit: u64) -> Result<Option<Vec<u8>>, Error> {
        self.check()?;
        let found = self.find(path).map_err(|fault| fault.of(path))?;
        match found.map(|id| &self.canvas.tree.node(id).kind) {
            Some(Kind::File(content)) if content.bytes > limit => Err(Error::Limit {
                name: shown(path),
                limit: "bytes to be read at once",
                allowed: limit,
            }),
            Some(Kind::File(content)) => self.canvas.area.read(content, limit).map(Some),
            _ => Ok(None),
        }
    }

    /// Whether there is anything at a path; links are followed inside of the tree.
    pub fn exists(&self, path: &[u8]) -> bool {
        !self.is_failed && matches!(self.find(path), Ok(Some(_)))
    }

    /// Writes every file into an empty directory of the host, for archives that hold an image and
    /// not a root file system. `watch` hears how many bytes were written; more than `limit_bytes`
    /// are an error.
    pub fn copy_out(
        &self,
        dir: &Path,
        limit_bytes: u64,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        self.check()?;
        outward::copy_out(&self.canvas, dir, limit_bytes, watch)
    }

    /// Writes the rest of the image file.
    pub fn finish(self, options: &Options) -> Result<Made, Error> {
        self.check()?;
        ext4::finish(self.canvas.area, &self.canvas.tree, options)
    }

    /// Adds something; unless all of it was added, there is nothing more to be done.
    fn change<T>(&mut self, add: impl FnOnce(&mut Canvas) -> Result<T, Error>) -> Result<T, Error> {
        self.check()?;
        self.is_failed = true;
        let added = add(&mut self.canvas)?;
        self.is_failed = false;
        Ok(added)
    }

    fn check(&self) -> Result<(), Error> {
        if self.is_failed {
            Err(Error::FailedBefore)
        } else {
            Ok(())
        }
    }

    fn find(&self, path: &[u8]) -> Result<Option<NodeId>, Fault> {
        self.canvas.find(&plain(path)?)
    }

    fn unlink(&mut self, path: &[u8]) -> Result<bool, Fault> {
        let path = plain(path)?;
        let (parent, name) = split(&path).ok_or("the root stays")?;
        match self.canvas.find(parent)? {
            Some(dir) => self.canvas.unlink(dir, name),
            None => Ok(false),
        }
    }
}

fn place(canvas: &mut Canvas, path: &[u8], node: New<'_>) -> Result<(), Fault> {
    let plain = plain(path)?;
    let New {
        mode,
        uid,
        gid,
        modified,
        kind,
    } = node;
    require(mode <= 0o7777, "its mode has more than permissions")?;
    let attributes = Attributes {
        mode,
        uid,
        gid,
        modified,
        xattrs: BTreeMap::new(),
    };
    let Some((parent, name)) = split(&plain) else {
        require(
            matches!(kind, NewKind::Dir),
            "it is in the place of the root and no directory",
        )?;
        return canvas.describe(Tree::ROOT, attributes);
    };
    let dir = canvas.dir(parent)?;
    let kind = match kind {
        NewKind::Dir => Kind::Dir(BTreeMap::new()),
        NewKind::Symlink(target) => Kind::Symlink(target.to_vec()),
        NewKind::File(from, bytes) => file(canvas, path, from, bytes)?,
    };
    canvas.place(dir, name, kind, attributes).map(drop)
}

fn file(canvas: &mut Canvas, path: &[u8], from: &mut dyn Read, bytes: u64) -> Result<Kind, Fault> {
    require(bytes <= MAX_FILE_BYTES, "it is larger than 16 TiB")?;
    canvas.meter.take_bytes(bytes)?;
    let mut file = canvas.area.file(bytes, canvas.meter.extents_left())?;
    let mut buffer = vec![0; bytes.min(BUFFER_BYTES) as usize];
    let mut left = bytes;
    while left > 0 {
        let some = &mut buffer[..left.min(BUFFER_BYTES) as usize];
        from.read_exact(some).map_err(|source| Error::Bytes {
            name: shown(path),
            source,
        })?;
        file.write(some)?;
        left -= some.len() as u64;
    }
    Ok(Kind::File(file.finish()?))
}

impl std::fmt::Debug for New<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("New")
            .field("mode", &self.mode)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for NewKind<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dir => out.write_str("Dir"),
            Self::File(_, bytes) => out.debug_tuple("File").field(bytes).finish_non_exhaustive(),
            Self::Symlink(target) => out.debug_tuple("Symlink").field(&shown(target)).finish(),
        }
    }
}
