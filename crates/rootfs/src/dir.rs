//! Adds a host directory with its owners, modes, times, extended attributes, hard links and holes.
//!
//! Always: names are added in the order of their bytes. No symbolic link is followed, because every
//! file is opened relative to its directory. Attributes that depend on the host or on the reading
//! user are skipped: `trusted.*`, which only root sees, and `security.selinux`. A file that changes
//! while it is read is an error.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use sandtree_disk::ext4::write::{
    Attributes, Content, Device, FileWriter, Kind, MAX_FILE_BYTES, NodeId, Time, Tree,
};

use crate::error::Error;
use crate::fault::{Fault, require};
use crate::path::{check_depth, check_name};
use crate::staging::{Staging, is_kept_xattr};
use crate::watch::{Stop, Watch};

const BUFFER_BYTES: usize = 256 << 10;
/// The limit of Linux, for a list of names and for a value.
const MAX_XATTR_BYTES: usize = 64 << 10;
const OPEN: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// Adds a directory on top of the tree. Returns the number of bytes in its files.
pub(crate) fn add(staging: &mut Staging, dir: &Path, watch: &mut Watch<'_>) -> Result<u64, Error> {
    let fd = rustix::fs::openat(
        CWD,
        dir,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let mut import = Import {
        staging,
        watch,
        links: HashMap::new(),
        bytes: 0,
        buffer: vec![0; BUFFER_BYTES],
        xattr: Vec::new(),
    };
    import.all(Place {
        fd: fd.map_err(failed("open", dir))?,
        path: dir.to_path_buf(),
    })?;
    Ok(import.bytes)
}

/// An open file or directory, and its path for errors.
struct Place {
    fd: OwnedFd,
    path: PathBuf,
}

/// A directory whose names are being added.
struct Level {
    place: Place,
    node: NodeId,
    names: std::vec::IntoIter<Vec<u8>>,
}

struct Import<'c, 'w> {
    staging: &'c mut Staging,
    watch: &'w mut Watch<'w>,
    /// Nodes of files with several names, by device and inode.
    links: HashMap<(u64, u64), NodeId>,
    bytes: u64,
    buffer: Vec<u8>,
    xattr: Vec<u8>,
}

impl Import<'_, '_> {
    fn all(&mut self, root: Place) -> Result<(), Error> {
        let (_, attributes) = self.described(&root)?;
        self.staging
            .describe(Tree::ROOT, attributes)
            .map_err(|fault| of(fault, &root.path))?;
        let mut levels = vec![self.level(root, Tree::ROOT)?];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.next() else {
                levels.pop();
                continue;
            };
            let path = level.place.path.join(OsStr::from_bytes(&name));
            if let Some(below) = self.take(level, &name, path)? {
                check_depth(levels.len()).map_err(|fault| of(fault, &below.place.path))?;
                levels.push(below);
            }
        }
        Ok(())
    }

    /// Adds one name. Returns the directory to visit next, if it is one.
    fn take(&mut self, level: &Level, name: &[u8], path: PathBuf) -> Result<Option<Level>, Error> {
        let stat = rustix::fs::statat(&level.place.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = stat.map_err(failed("look at", &path))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            return self.take_dir(level, name, path).map(Some);
        }
        let inode = (stat.st_dev, stat.st_ino);
        if let Some(node) = self.links.get(&inode) {
            let linked = self.staging.link(level.node, name, *node);
            return linked.map(|()| None).map_err(|fault| of(fault, &path));
        }
        let (kind, attributes) = match kind {
            FileType::RegularFile => self.file(level, name, &path, inode)?,
            _ => {
                let kind = self.special(level, name, &path, &stat)?;
                let attributes = self.special_attributes(level, name, &path, &stat)?;
                (kind, attributes)
            }
        };
        let node = self
            .staging
            .place(level.node, name, kind, attributes)
            .map_err(|fault| of(fault, &path))?;
        if stat.st_nlink > 1 {
            self.links.insert(inode, node);
        }
        Ok(None)
    }

    fn take_dir(&mut self, level: &Level, name: &[u8], path: PathBuf) -> Result<Level, Error> {
        let fd = rustix::fs::openat(
            &level.place.fd,
            name,
            OPEN | OFlags::DIRECTORY,
            Mode::empty(),
        );
        let place = Place {
            fd: fd.map_err(failed("open", &path))?,
            path,
        };
        let (_, attributes) = self.described(&place)?;
        let node = self
            .staging
            .place(level.node, name, Kind::Dir(BTreeMap::new()), attributes);
        let node = node.map_err(|fault| of(fault, &place.path))?;
        self.level(place, node)
    }

    fn level(&mut self, place: Place, node: NodeId) -> Result<Level, Error> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&place.fd).map_err(failed("list", &place.path))? {
            let entry = entry.map_err(failed("list", &place.path))?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            check_name(name)
                .map_err(|fault| of(fault, &place.path.join(OsStr::from_bytes(name))))?;
            names.push(name.to_vec());
            if names.len() as u64 > self.staging.meter.nodes_left() {
                return Err(of(self.staging.meter.beyond_nodes(), &place.path));
            }
        }
        names.sort_unstable();
        Ok(Level {
            place,
            node,
            names: names.into_iter(),
        })
    }

    fn file(
        &mut self,
        level: &Level,
        name: &[u8],
        path: &Path,
        inode: (u64, u64),
    ) -> Result<(Kind, Attributes), Error> {
        let fd = rustix::fs::openat(&level.place.fd, name, OPEN, Mode::empty())
            .map_err(failed("open", path))?;
        let place = Place {
            fd,
            path: path.to_path_buf(),
        };
        let (stat, attributes) = self.described(&place)?;
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_file || (stat.st_dev, stat.st_ino) != inode {
            return Err(Error::Changed { path: place.path });
        }
        let content = self.content(&place, &stat)?;
        let after = rustix::fs::fstat(&place.fd).map_err(failed("look at", path))?;
        if moments(&stat) != moments(&after) {
            return Err(Error::Changed { path: place.path });
        }
        Ok((Kind::File(content), attributes))
    }

    /// Copies the bytes of an open file into the image.
    fn content(&mut self, place: &Place, stat: &Stat) -> Result<Content, Error> {
        let path = &place.path;
        let bytes = stat.st_size.cast_unsigned();
        require(bytes <= MAX_FILE_BYTES, "it is larger than 16 TiB")
            .map_err(|fault| of(fault, path))?;
        let is_full = stat.st_blocks.cast_unsigned().saturating_mul(512) >= bytes;
        let mut source = Source {
            place,
            bytes,
            is_full,
            at: 0,
        };
        let max_extents = self.staging.meter.extents_left();
        let mut file = self.staging.area.file(bytes, max_extents)?;
        while let Some((hole, data)) = source.next()? {
            file.skip(hole)?;
            self.staging
                .meter
                .take_bytes(data)
                .map_err(|fault| of(fault, path))?;
            copy(&source, data, &mut file, &mut self.buffer, &mut |more| {
                self.bytes += more;
                (self.watch)(self.bytes).map_err(|Stop| Error::GivenUp)
            })?;
            source.at += data;
        }
        Ok(file.finish()?)
    }

    /// The metadata of an open file.
    fn described(&mut self, place: &Place) -> Result<(Stat, Attributes), Error> {
        let stat = rustix::fs::fstat(&place.fd).map_err(failed("look at", &place.path))?;
        let xattrs = self.xattrs(
            &place.path,
            |list| rustix::fs::flistxattr(&place.fd, list),
            |name, value| rustix::fs::fgetxattr(&place.fd, name, value),
        )?;
        let attributes = attributes(&stat, xattrs);
        Ok((stat, attributes))
    }

    fn special(&self, level: &Level, name: &[u8], path: &Path, stat: &Stat) -> Result<Kind, Error> {
        let device = Device {
            major: rustix::fs::major(stat.st_rdev),
            minor: rustix::fs::minor(stat.st_rdev),
        };
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&level.place.fd, name, Vec::new());
                Kind::Symlink(target.map_err(failed("read the link", path))?.into_bytes())
            }
            FileType::CharacterDevice => Kind::CharDevice(device),
            FileType::BlockDevice => Kind::BlockDevice(device),
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            _ => {
                return Err(of(Fault::Refused("its file type is not supported"), path));
            }
        })
    }

    /// The attributes of a node that cannot be opened for reading. The path through the descriptor
    /// of its directory follows no symbolic link that others could place.
    fn special_attributes(
        &mut self,
        level: &Level,
        name: &[u8],
        path: &Path,
        stat: &Stat,
    ) -> Result<Attributes, Error> {
        let there = format!("/proc/self/fd/{}/", level.place.fd.as_raw_fd());
        let there = [there.as_bytes(), name].concat();
        let xattrs = self.xattrs(
            path,
            |list| rustix::fs::llistxattr(&there[..], list),
            |name, value| rustix::fs::lgetxattr(&there[..], name, value),
        )?;
        Ok(attributes(stat, xattrs))
    }

    fn xattrs(
        &mut self,
        path: &Path,
        list: impl FnOnce(&mut [u8]) -> Result<usize, Errno>,
        value: impl Fn(&[u8], &mut [u8]) -> Result<usize, Errno>,
    ) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Error> {
        self.xattr.resize(2 * MAX_XATTR_BYTES, 0);
        let (names, bytes) = self.xattr.split_at_mut(MAX_XATTR_BYTES);
        let length = match list(names) {
            Err(Errno::NOTSUP) => 0,
            length => length.map_err(failed("list the extended attributes of", path))?,
        };
        let names = names[..length]
            .split(|byte| *byte == 0)
            .filter(|name| is_kept_xattr(name));
        let names =
            names.filter(|name| !name.starts_with(b"trusted.") && *name != b"security.selinux");
        let read = |name: &[u8]| {
            let length =
                value(name, bytes).map_err(failed("read an extended attribute of", path))?;
            Ok((name.to_vec(), bytes[..length].to_vec()))
        };
        names.map(read).collect()
    }
}

/// A file, read as holes and data.
struct Source<'p> {
    place: &'p Place,
    bytes: u64,
    /// Every byte has a block, so there is no need to search for holes.
    is_full: bool,
    at: u64,
}

impl Source<'_> {
    /// The lengths of the next hole and of the data after it; `None` at the end.
    fn next(&mut self) -> Result<Option<(u64, u64)>, Error> {
        if self.at >= self.bytes {
            return Ok(None);
        }
        let data = if self.is_full {
            self.at
        } else {
            self.seek(SeekFrom::Data(self.at))?.unwrap_or(self.bytes)
        };
        let data = data.min(self.bytes);
        let end = if self.is_full || data == self.bytes {
            None
        } else {
            self.seek(SeekFrom::Hole(data))?
        };
        let end = end.unwrap_or(self.bytes).min(self.bytes);
        if data < self.at || end < data || end == self.at {
            return Err(Error::Changed {
                path: self.place.path.clone(),
            });
        }
        let hole = data - self.at;
        self.at = data;
        Ok(Some((hole, end - data)))
    }

    /// `None`: there is no data or hole up to the end of the file.
    fn seek(&self, to: SeekFrom) -> Result<Option<u64>, Error> {
        match (rustix::fs::seek(&self.place.fd, to), to) {
            (Err(Errno::NXIO), _) => Ok(None),
            // A file system without support for holes.
            (Err(Errno::INVAL), SeekFrom::Data(at)) => Ok(Some(at)),
            (Err(Errno::INVAL), _) => Ok(None),
            (found, _) => found
                .map(Some)
                .map_err(failed("find the holes of", &self.place.path)),
        }
    }
}

fn copy(
    source: &Source<'_>,
    bytes: u64,
    into: &mut FileWriter<'_>,
    buffer: &mut [u8],
    watch: &mut dyn FnMut(u64) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut done = 0;
    while done < bytes {
        let wanted = usize::try_from(bytes - done)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let read = rustix::io::pread(&source.place.fd, &mut buffer[..wanted], source.at + done);
        match read.map_err(failed("read", &source.place.path))? {
            0 => {
                return Err(Error::Changed {
                    path: source.place.path.clone(),
                });
            }
            read => {
                into.write(&buffer[..read])?;
                done += read as u64;
                watch(read as u64)?;
            }
        }
    }
    Ok(())
}

/// The size and times of a file, which change when the file does.
fn moments(stat: &Stat) -> impl PartialEq + use<> {
    (
        stat.st_size,
        stat.st_mtime,
        stat.st_mtime_nsec,
        stat.st_ctime,
        stat.st_ctime_nsec,
    )
}

fn attributes(stat: &Stat, xattrs: BTreeMap<Vec<u8>, Vec<u8>>) -> Attributes {
    Attributes {
        mode: (stat.st_mode & 0o7777) as u16,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified: Time {
            seconds: stat.st_mtime,
            nanoseconds: stat.st_mtime_nsec as u32,
        },
        xattrs,
    }
}

fn of(fault: Fault, path: &Path) -> Error {
    fault.of(path.as_os_str().as_bytes())
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::Io {
        operation,
        path: path.to_path_buf(),
        source: errno.into(),
    }
}
