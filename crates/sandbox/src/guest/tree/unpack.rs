//! Unpacks a guest's tar stream into a file or tree of the host.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use bytes::Bytes;
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use tar::{Archive, Entry, EntryType, Header};
use tokio::sync::mpsc;

use super::{CHUNK, ChunkReader, Skipped};
use crate::error::{Error, Result};

/// Runs of zeros of this size become holes.
const HOLE: usize = 4096;
/// The limit of the headers before a member's bytes: long names, attributes and the map of a file's
/// holes are kept in memory.
pub(super) const HEADERS_MAX: u64 = 16 << 20;
/// No disk of a guest is larger. Holes take no space, but the time to skip them must be bounded.
const FILE_MAX: u64 = 1 << 43;
/// The limit of memory for directories, which are kept until the end: over a million of usual
/// depth.
const DIRS_MAX: usize = 256 << 20;
/// The memory of one directory in addition to its path.
pub(super) const DIR_COST: usize = 128;

/// Unpacks a stream whose members are named `X` and `X/…` as the file or tree `to`. Returns the
/// list of left-out files.
pub fn unpack(chunks: mpsc::Receiver<Bytes>, to: &Path) -> Result<Skipped> {
    let parent = to
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let name = to
        .file_name()
        .ok_or_else(|| Error::invalid("place to copy to", to.display(), "it must have a name"))?;
    let root = Dir::open_ambient_dir(parent, ambient_authority())
        .map_err(|e| Error::io("open", parent, e))?;
    let dirs = Dirs::new(DIRS_MAX);
    let skipped = Skipped::default();
    let mut unpacking = Unpacking {
        root,
        base: name.to_owned(),
        dirs,
        skipped,
        shown: to.to_owned(),
    };
    let allowance = Rc::new(Cell::new(HEADERS_MAX));
    let mut archive = Archive::new(ChunkReader {
        chunks,
        chunk: Bytes::new(),
        allowance: allowance.clone(),
    });
    let failed = |e| Error::io("unpack into", to, e);
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        allowance.set(u64::MAX);
        unpacking.entry(&mut entry)?;
        io::copy(&mut entry, &mut io::sink()).map_err(failed)?;
        allowance.set(HEADERS_MAX);
    }
    unpacking.finish()
}

struct Unpacking {
    /// The directory that holds `base`; every path is resolved beneath it.
    root: Dir,
    base: OsString,
    /// Directories whose mode and times are set last, so that read-only ones can be filled.
    dirs: Dirs,
    skipped: Skipped,
    shown: PathBuf,
}

/// The attributes of directories, by path, in bounded memory.
pub(super) struct Dirs {
    attributes: BTreeMap<PathBuf, Attributes>,
    room: usize,
}

impl Dirs {
    pub(super) fn new(room: usize) -> Self {
        Self {
            attributes: BTreeMap::new(),
            room,
        }
    }

    /// If a directory occurs twice, its last attributes count.
    pub(super) fn keep(&mut self, path: &Path, attributes: Attributes) -> Result<()> {
        if let Some(kept) = self.attributes.get_mut(path) {
            *kept = attributes;
            return Ok(());
        }
        let left = self.room.checked_sub(path.as_os_str().len() + DIR_COST);
        self.room = left.ok_or_else(|| {
            let count = self.attributes.len();
            Error::Archive {
                what: format!("it has more directories than can be remembered, which are {count}"),
            }
        })?;
        self.attributes.insert(path.to_owned(), attributes);
        Ok(())
    }

    /// The members of a directory come before it.
    pub(super) fn innermost_first(self) -> impl Iterator<Item = (PathBuf, Attributes)> {
        self.attributes.into_iter().rev()
    }
}

impl Unpacking {
    fn entry(&mut self, entry: &mut Entry<'_, ChunkReader>) -> Result<()> {
        let path = self.place(&entry.path_bytes())?;
        let attributes = Attributes::of(entry.header()).map_err(|_| Error::Archive {
            what: format!(
                "owner, mode or time of {} are none that a file can have",
                path.display()
            ),
        })?;
        if entry.header().entry_type().is_dir() {
            self.dirs.keep(&path, attributes)?;
        }
        let placed = self.put(&path, entry, attributes);
        placed.map_err(|e| {
            Error::io(
                "write",
                self.shown.parent().unwrap_or(Path::new("")).join(&path),
                e,
            )
        })
    }

    fn put(
        &mut self,
        path: &Path,
        entry: &mut Entry<'_, ChunkReader>,
        attributes: Attributes,
    ) -> io::Result<()> {
        let (dir, name) = self.holder(path)?;
        match entry.header().entry_type() {
            EntryType::Directory => make_dir(&dir, &name),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse
                if entry.size() > FILE_MAX =>
            {
                Err(io::ErrorKind::FileTooLarge.into())
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                write(&dir, &name, attributes, entry)
            }
            EntryType::Symlink => symlink(&dir, &name, attributes, &link_name(entry)),
            EntryType::Link => {
                let target = self.place(&link_name(entry)).map_err(io::Error::other)?;
                let (target_dir, target_name) = self.holder(&target)?;
                vacate(&dir, &name)?;
                target_dir.hard_link(&target_name, &dir, &name)
            }
            other => {
                self.skipped
                    .add(&format!("{}: a {other:?} cannot be copied", path.display()));
                Ok(())
            }
        }
    }

    /// The path of a member: the chosen name replaces its first component, and the rest must be
    /// plain.
    fn place(&self, member: &[u8]) -> Result<PathBuf> {
        use std::os::unix::ffi::OsStrExt;
        let refused = || Error::Archive {
            what: format!("a member is called {:?}", String::from_utf8_lossy(member)),
        };
        let mut place = PathBuf::from(&self.base);
        let mut components = Path::new(OsStr::from_bytes(member)).components();
        if !matches!(components.next(), Some(Component::Normal(_))) {
            return Err(refused());
        }
        for component in components {
            match component {
                Component::Normal(name) => place.push(name),
                Component::CurDir => {}
                _ => return Err(refused()),
            }
        }
        Ok(place)
    }

    /// The directory of a member, and the member's name in it.
    fn holder(&self, path: &Path) -> io::Result<(Dir, OsString)> {
        let mut dir = self.root.try_clone()?;
        let mut names: Vec<&OsStr> = path.iter().collect();
        let last = names.pop().expect("a member's place has a name");
        for name in names {
            if !dir.symlink_metadata(name)?.is_dir() {
                return Err(io::ErrorKind::NotADirectory.into());
            }
            dir = dir.open_dir(name)?;
        }
        Ok((dir, last.to_owned()))
    }

    fn finish(mut self) -> Result<Skipped> {
        let dirs = std::mem::replace(&mut self.dirs, Dirs::new(0));
        for (path, attributes) in dirs.innermost_first() {
            let set = self
                .holder(&path)
                .and_then(|(dir, name)| set_dir_attributes(&dir, &name, attributes));
            set.map_err(|e| Error::io("set the mode of", &path, e))?;
        }
        Ok(self.skipped)
    }
}

fn link_name(entry: &Entry<'_, ChunkReader>) -> Vec<u8> {
    entry
        .link_name_bytes()
        .map(std::borrow::Cow::into_owned)
        .unwrap_or_default()
}

fn make_dir(dir: &Dir, name: &OsStr) -> io::Result<()> {
    match dir.create_dir(name) {
        Err(e)
            if e.kind() == io::ErrorKind::AlreadyExists && dir.symlink_metadata(name)?.is_dir() =>
        {
            Ok(())
        }
        other => other,
    }
}

fn write(dir: &Dir, name: &OsStr, attributes: Attributes, bytes: &mut impl Read) -> io::Result<()> {
    vacate(dir, name)?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = dir.open_with(name, &options)?;
    copy_sparse(bytes, &mut file)?;
    attributes.set(&file)
}

fn symlink(dir: &Dir, name: &OsStr, attributes: Attributes, target: &[u8]) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    vacate(dir, name)?;
    dir.symlink_contents(OsStr::from_bytes(target), name)?;
    if let Some((uid, gid)) = attributes.owner() {
        rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

/// Removes an existing file. An existing directory is an error: the caller chose a wrong place.
fn vacate(dir: &Dir, name: &OsStr) -> io::Result<()> {
    match dir.remove_file(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The handles of `Dir` only name a directory; its attributes are set through a readable one.
fn set_dir_attributes(dir: &Dir, name: &OsStr, attributes: Attributes) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    attributes.set(&rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// The attributes of a member that its file gets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attributes {
    mode: Mode,
    uid: Uid,
    gid: Gid,
    modified: i64,
}

impl Attributes {
    pub(super) fn of(header: &Header) -> io::Result<Self> {
        // To the system, the largest number means "no change".
        let id = |number: u64| match u32::try_from(number) {
            Ok(u32::MAX) | Err(_) => Err(io::Error::from(io::ErrorKind::InvalidData)),
            Ok(id) => Ok(id),
        };
        Ok(Self {
            // The guest could choose a program with set-id bits that runs as its owner.
            mode: Mode::from_raw_mode(header.mode()? & 0o1777),
            uid: Uid::from_raw(id(header.uid()?)?),
            gid: Gid::from_raw(id(header.gid()?)?),
            modified: header.mtime()?.try_into().unwrap_or(i64::MAX),
        })
    }

    /// The owner, if we may give files away.
    fn owner(self) -> Option<(Uid, Gid)> {
        rustix::process::geteuid()
            .is_root()
            .then_some((self.uid, self.gid))
    }

    fn set(self, file: &impl std::os::fd::AsFd) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner() {
            rustix::fs::fchown(file, Some(uid), Some(gid))?;
        }
        rustix::fs::fchmod(file, self.mode)?;
        let time = Timespec {
            tv_sec: self.modified,
            tv_nsec: 0,
        };
        rustix::fs::futimens(
            file,
            &Timestamps {
                last_access: time,
                last_modification: time,
            },
        )?;
        Ok(())
    }
}

/// Copies, and leaves holes for blocks of zeros.
fn copy_sparse(
    from: &mut impl Read,
    to: &mut (impl Write + Seek + std::os::fd::AsFd),
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut length = 0u64;
    loop {
        let count = fill(from, &mut buffer)?;
        if count == 0 {
            return Ok(rustix::fs::ftruncate(&*to, length)?);
        }
        for block in buffer[..count].chunks(HOLE) {
            if block.iter().all(|b| *b == 0) {
                to.seek(SeekFrom::Current(block.len() as i64))?;
            } else {
                to.write_all(block)?;
            }
        }
        length += count as u64;
    }
}

fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}
