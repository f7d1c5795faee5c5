//! Builds a root file system: adds archives, directories and single nodes, then writes the rest.
//!
//! Always: bytes of files go straight into the image file as they arrive. Names and attributes stay
//! in memory until [`Builder::finish`]. Nothing but the image file is ever written.
//!
//! When it fails: after an error of an `add` or a `put`, its input may be added in part, and every
//! later call fails as well. The image file stays; the caller removes it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use sandtree_disk::ext4::write::{
    self, Attributes, DataArea, Kind, MAX_FILE_BYTES, Made, NodeId, Options, Time, Tree,
};

use crate::copy_out;
use crate::dir;
use crate::error::Error;
use crate::ext4;
use crate::fault::{Fault, require, shown};
use crate::layer;
use crate::limits::{Limits, Meter};
use crate::path::{plain, split};
use crate::staging::Staging;
use crate::tar::TarRules;
use crate::unpack::{Allowed, unpack};
use crate::watch::Watch;

const BUFFER_BYTES: u64 = 64 << 10;

/// An archive that was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// The size of the unpacked archive.
    pub bytes: u64,
    /// The digest of the unpacked archive: OCI's diff id.
    pub sha256: [u8; 32],
}

/// A node to put into the tree.
pub struct New<'a> {
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub modified: Time,
    pub kind: NewKind<'a>,
}

pub enum NewKind<'a> {
    Dir,
    /// This many bytes from the reader.
    File(&'a mut dyn Read, u64),
    Symlink(&'a [u8]),
}

/// Builds one root file system.
#[derive(Debug)]
pub struct Builder {
    pub(crate) staging: Staging,
    limits: Limits,
    /// An addition failed, possibly after a part of it.
    is_failed: bool,
}

impl Builder {
    /// Starts with an empty root directory. The file `image` must not exist.
    pub fn create(image: &Path, limits: Limits) -> Result<Self, Error> {
        let area = DataArea::create(image, limits.written_bytes)?;
        let staging = Staging {
            tree: Tree::new(),
            area,
            meter: Meter::new(limits),
        };
        Ok(Self {
            staging,
            limits,
            is_failed: false,
        })
    }

    /// Adds a tar archive, uncompressed or in gzip, zstd or xz, on top of the tree. Reads it to its
    /// end.
    pub fn add_tar(
        &mut self,
        input: &mut (dyn Read + Send),
        rules: TarRules,
        watch: &mut Watch<'_>,
    ) -> Result<Added, Error> {
        let allowed = Allowed {
            bytes: self.staging.meter.bytes_left(),
            limit: self.limits.bytes,
        };
        self.change(|staging| {
            let (bytes, sha256) = unpack(input, allowed, watch, |input| {
                layer::add(staging, input, rules)
            })?;
            staging
                .meter
                .take_bytes(bytes)
                .map_err(|fault| fault.of(b"the archive"))?;
            Ok(Added { bytes, sha256 })
        })
    }

    /// Adds a host directory and everything in it on top of the tree. Returns the number of bytes
    /// in its files.
    pub fn add_dir(&mut self, dir: &Path, watch: &mut Watch<'_>) -> Result<u64, Error> {
        self.change(|staging| dir::add(staging, dir, watch))
    }

    /// Adds everything in the ext4 file system of an image file on top of the tree. Returns the
    /// number of bytes in its files. A file system with what the new one cannot have is refused.
    pub fn add_file_system(&mut self, image: &Path, watch: &mut Watch<'_>) -> Result<u64, Error> {
        self.change(|staging| ext4::add(staging, image, watch))
    }

    /// Whether a path is that of a directory. Links are followed inside the tree.
    pub fn is_dir(&self, path: &[u8]) -> bool {
        let found = self.find(path).ok().flatten();
        !self.is_failed && found.is_some_and(|id| self.staging.entries(id).is_some())
    }

    /// Puts one node, which replaces an existing one. Missing parents are created with mode 0755
    /// and owned by root.
    pub fn put(&mut self, path: &[u8], node: New<'_>) -> Result<(), Error> {
        self.change(|staging| place(staging, path, node).map_err(|fault| fault.of(path)))
    }

    /// Removes the node at a path and everything below it. Returns whether it existed.
    pub fn remove(&mut self, path: &[u8]) -> Result<bool, Error> {
        self.check()?;
        self.unlink(path).map_err(|fault| fault.of(path))
    }

    /// Reads a file, if it exists. Links are followed inside the tree. A file larger than `limit`
    /// is an error.
    pub fn read(&self, path: &[u8], limit: u64) -> Result<Option<Vec<u8>>, Error> {
        self.check()?;
        let found = self.find(path).map_err(|fault| fault.of(path))?;
        match found.map(|id| &self.staging.tree.node(id).kind) {
            Some(Kind::File(content)) if content.bytes > limit => Err(Error::Limit {
                name: shown(path),
                limit: "bytes in one read",
                allowed: limit,
            }),
            Some(Kind::File(content)) => Ok(Some(self.staging.area.read(content, limit)?)),
            _ => Ok(None),
        }
    }

    /// The name of the only entry of the root directory, if it has one entry and a name that is
    /// text.
    pub fn only_entry(&self) -> Option<String> {
        let Kind::Dir(entries) = &self.staging.tree.node(Tree::ROOT).kind else {
            return None;
        };
        let mut names = entries.keys();
        let first = names.next().filter(|_| names.len() == 0)?;
        String::from_utf8(first.to_vec()).ok()
    }

    /// Whether a path exists. Links are followed inside the tree.
    pub fn exists(&self, path: &[u8]) -> bool {
        !self.is_failed && matches!(self.find(path), Ok(Some(_)))
    }

    /// Writes every file into an empty directory of the host, for archives that contain an image
    /// rather than a root file system. `watch` receives the number of bytes written; more than
    /// `limit_bytes` are an error.
    pub fn copy_out(
        &self,
        dir: &Path,
        limit_bytes: u64,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        self.check()?;
        copy_out::copy_out(&self.staging, dir, limit_bytes, watch)
    }

    /// Writes the rest of the image file.
    pub fn finish(self, options: &Options) -> Result<Made, Error> {
        self.check()?;
        let made = write::finish(self.staging.area, &self.staging.tree, options)?;
        Ok(made)
    }

    /// Runs one addition. If it fails, all later calls fail.
    fn change<T>(
        &mut self,
        add: impl FnOnce(&mut Staging) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.check()?;
        self.is_failed = true;
        let added = add(&mut self.staging)?;
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
        self.staging.find(&plain(path)?)
    }

    fn unlink(&mut self, path: &[u8]) -> Result<bool, Fault> {
        let path = plain(path)?;
        let (parent, name) = split(&path).ok_or("the root directory cannot be removed")?;
        match self.staging.find(parent)? {
            Some(dir) => self.staging.unlink(dir, name),
            None => Ok(false),
        }
    }
}

fn place(staging: &mut Staging, path: &[u8], node: New<'_>) -> Result<(), Fault> {
    let plain = plain(path)?;
    let New {
        mode,
        uid,
        gid,
        modified,
        kind,
    } = node;
    require(mode <= 0o7777, "its mode has bits other than permissions")?;
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
            "it would replace the root directory with another kind of node",
        )?;
        return staging.describe(Tree::ROOT, attributes);
    };
    let dir = staging.dir(parent)?;
    let kind = match kind {
        NewKind::Dir => Kind::Dir(BTreeMap::new()),
        NewKind::Symlink(target) => Kind::Symlink(target.to_vec()),
        NewKind::File(from, bytes) => file(staging, path, from, bytes)?,
    };
    staging.place(dir, name, kind, attributes).map(drop)
}

fn file(
    staging: &mut Staging,
    path: &[u8],
    from: &mut dyn Read,
    bytes: u64,
) -> Result<Kind, Fault> {
    require(bytes <= MAX_FILE_BYTES, "it is larger than 16 TiB")?;
    staging.meter.take_bytes(bytes)?;
    let mut file = staging.area.file(bytes, staging.meter.extents_left())?;
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
