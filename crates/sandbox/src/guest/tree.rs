//! Trees of files as tar streams, on the host's side.
//!
//! Always: what a guest packed is hostile. Every name is resolved beneath the one directory that was chosen, by handles
//! that cannot leave it, and through no symbolic link: no packer puts a member behind one. Set-id bits are dropped,
//! and device nodes are not made. Holes stay holes. Memory is bounded, whatever lengths the headers claim and however
//! many members come. What the host packs may change meanwhile: a member has the length that its header says.
//! When it fails: what was unpacked so far stays, as with any copy that breaks off.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use bytes::{Buf, Bytes};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use tar::{Archive, Builder, Entry, EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};
use tokio::sync::mpsc;

use crate::error::{Error, Result};

const CHUNK: usize = 128 * 1024;
/// Runs of zeros of this size become holes.
const HOLE: usize = 4096;
/// What may stand before a member's bytes: long names, attributes and the map of a file's holes are held in memory.
const HEADERS_MAX: u64 = 16 << 20;
/// No disk of a guest is larger. Holes cost nothing but the time to pass over them, and that must end.
const FILE_MAX: u64 = 1 << 43;
/// Directories are held in memory until the end: a million and more of usual depth.
const DIRS_MAX: usize = 256 << 20;
/// What one of them takes beside its path.
const DIR_COST: usize = 128;
const SKIPPED_LINES: usize = 1000;
const SKIPPED_BYTES: usize = 1 << 20;
/// The map of a file's holes is held in memory on both sides; a file in more pieces is sent with its zeros.
const PIECES_MAX: usize = 100_000;
/// What tar counts in; a sparse member's pieces must not end within one.
const BLOCK: u64 = 512;

/// What a copy left out, one line for each. Whoever packs can name as much as it likes: the first are kept, the rest
/// counted.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    lines: Vec<String>,
    bytes: usize,
    more: u64,
}

impl Skipped {
    /// Names in it may hold anything; what could steer a terminal is escaped.
    pub(super) fn add(&mut self, line: &str) {
        let full = self.lines.len() >= SKIPPED_LINES || self.bytes + line.len() > SKIPPED_BYTES;
        if full || self.more > 0 {
            self.more += 1;
            return;
        }
        self.bytes += line.len();
        self.lines.push(line.chars().map(plain).collect());
    }

    pub(super) fn join(&mut self, other: Skipped) {
        other.lines.iter().for_each(|line| self.add(line));
        self.more += other.more;
    }

    pub(super) fn into_lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.lines.push(format!("and {} more", self.more));
        }
        self.lines
    }
}

fn plain(c: char) -> String {
    if c.is_control() { c.escape_default().to_string() } else { c.to_string() }
}

/// Packs the file or tree at `from` under `name`. Gives what could not be packed.
pub(super) fn pack(from: &Path, name: &OsStr, chunks: mpsc::Sender<Bytes>) -> Result<Skipped> {
    let mut packing = Packing::new(chunks);
    packing.entry(from, Path::new(name))?;
    let Packing { builder, skipped } = packing;
    let finished = builder.into_inner().and_then(|mut writer| writer.flush());
    finished.map_err(|e| Error::io("pack", from, e))?;
    Ok(skipped)
}

struct Packing {
    builder: Builder<ChunkWriter>,
    skipped: Skipped,
}

impl Packing {
    fn new(chunks: mpsc::Sender<Bytes>) -> Self {
        let builder = Builder::new(ChunkWriter { chunks, buffer: Vec::with_capacity(CHUNK) });
        Self { builder, skipped: Skipped::default() }
    }

    fn entry(&mut self, from: &Path, name: &Path) -> Result<()> {
        let failed = |e| Error::io("read", from, e);
        let found = from.symlink_metadata().map_err(failed)?;
        let kind = found.file_type();
        if kind.is_socket() {
            self.skipped.add(&format!("{}: a socket cannot be copied", from.display()));
        } else if kind.is_file() {
            self.open_file(from, name).map_err(failed)?;
        } else if kind.is_symlink() {
            let target = from.read_link().map_err(failed)?;
            self.builder.append_link(&mut header(&found), name, target).map_err(failed)?;
        } else {
            self.empty(&found, name).map_err(failed)?;
        }
        if kind.is_dir() { self.children(from, name) } else { Ok(()) }
    }

    fn children(&mut self, from: &Path, name: &Path) -> Result<()> {
        let failed = |e| Error::io("read", from, e);
        let mut children: Vec<_> = from.read_dir().map_err(failed)?.collect::<io::Result<_>>().map_err(failed)?;
        children.sort_by_key(std::fs::DirEntry::file_name);
        children.iter().try_for_each(|child| self.entry(&child.path(), &name.join(child.file_name())))
    }

    /// A directory, a pipe or a device.
    fn empty(&mut self, found: &Metadata, name: &Path) -> io::Result<()> {
        let mut header = header(found);
        header.set_size(0);
        header.set_device_major(rustix::fs::major(found.rdev()))?;
        header.set_device_minor(rustix::fs::minor(found.rdev()))?;
        self.builder.append_data(&mut header, name, io::empty())
    }

    fn open_file(&mut self, from: &Path, name: &Path) -> io::Result<()> {
        // Not even a pipe that has taken the file's place holds us up.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(from, flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.is_file() {
            self.skipped.add(&format!("{}: it was replaced while it was copied", from.display()));
        } else if self.file(&file, &found, name)? == Length::Shrank {
            self.skipped.add(&format!("{}: its end, which was cut off while it was copied", from.display()));
        }
        Ok(())
    }

    /// A regular file, exactly as long as it was `found`, whatever it is now.
    fn file(&mut self, file: &File, found: &Metadata, name: &Path) -> io::Result<Length> {
        let (mut header, size) = (header(found), found.len());
        let pieces = data_of(file, size);
        let whole = pieces.iter().map(|piece| piece.end - piece.start).sum::<u64>() == size;
        let map = if whole { Vec::new() } else { describe_holes(&mut header, &pieces, size) };
        let data = Pieces { file, left: pieces.into_iter(), now: 0..0 };
        self.builder.append_data(&mut header, name, Read::chain(map.as_slice(), data))?;
        Ok(if file.metadata()?.len() < size { Length::Shrank } else { Length::Kept })
    }
}

fn header(found: &Metadata) -> Header {
    let mut header = Header::new_gnu();
    header.set_metadata(found);
    header
}

/// Where a file's data lies below `size`. What lies between reads as zeros.
fn data_of(file: &File, size: u64) -> Vec<Range<u64>> {
    use rustix::fs::{SeekFrom, seek};
    let whole = || std::iter::once(0..size).collect();
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < size {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < size => data,
            Ok(_) | Err(rustix::io::Errno::NXIO) => break,
            // Not every file system knows of holes.
            Err(_) => return whole(),
        };
        let hole = seek(file, SeekFrom::Hole(data)).unwrap_or(size).max(data + 1);
        let end = hole.next_multiple_of(BLOCK).min(size);
        pieces.push((data - data % BLOCK).max(at)..end);
        at = end;
        if pieces.len() > PIECES_MAX {
            return whole();
        }
    }
    pieces
}

/// Makes a member a sparse one. Gives the part of its map that has no place in the header and stands before the data.
fn describe_holes(header: &mut Header, pieces: &[Range<u64>], size: u64) -> Vec<u8> {
    let mut places: Vec<_> = pieces.iter().map(|piece| (piece.start, piece.end - piece.start)).collect();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_size(places.iter().map(|(_, length)| length).sum());
    // The last place has no bytes: it says where the file ends.
    places.push((size, 0));
    let gnu = header.as_gnu_mut().expect("it was made as one");
    gnu.set_real_size(size);
    let (first, rest) = places.split_at(places.len().min(gnu.sparse.len()));
    write_places(&mut gnu.sparse, first);
    gnu.set_is_extended(!rest.is_empty());
    let mut map = Vec::new();
    let mut groups = rest.chunks(GnuExtSparseHeader::new().sparse.len()).peekable();
    while let Some(group) = groups.next() {
        let mut extension = GnuExtSparseHeader::new();
        write_places(&mut extension.sparse, group);
        extension.set_is_extended(groups.peek().is_some());
        map.extend_from_slice(extension.as_bytes());
    }
    map
}

fn write_places(fields: &mut [GnuSparseHeader], places: &[(u64, u64)]) {
    for (field, (offset, length)) in fields.iter_mut().zip(places) {
        field.set_offset(*offset);
        field.set_length(*length);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Length {
    Kept,
    Shrank,
}

/// Pieces of a file one after the other. Zeros stand for what the file no longer has.
struct Pieces<'a> {
    file: &'a File,
    left: std::vec::IntoIter<Range<u64>>,
    now: Range<u64>,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            match self.left.next() {
                Some(piece) => self.now = piece,
                None => return Ok(0),
            }
        }
        let wanted = (self.now.end - self.now.start).min(buffer.len() as u64) as usize;
        let mut count = self.file.read_at(&mut buffer[..wanted], self.now.start)?;
        if count == 0 && wanted > 0 {
            buffer[..wanted].fill(0);
            count = wanted;
        }
        self.now.start += count as u64;
        Ok(count)
    }
}

/// Unpacks a stream whose members are named `X` and `X/…` as the file or tree `to`. Gives what was left out.
pub(super) fn unpack(chunks: mpsc::Receiver<Bytes>, to: &Path) -> Result<Skipped> {
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name =
        to.file_name().ok_or_else(|| Error::invalid("a place to copy to", to.display(), "it must have a name"))?;
    let root = Dir::open_ambient_dir(parent, ambient_authority()).map_err(|e| Error::io("open", parent, e))?;
    let (dirs, skipped) = (Dirs::new(DIRS_MAX), Skipped::default());
    let mut unpacking = Unpacking { root, base: name.to_owned(), dirs, skipped, shown: to.to_owned() };
    let allowance = Rc::new(Cell::new(HEADERS_MAX));
    let mut archive = Archive::new(ChunkReader { chunks, chunk: Bytes::new(), allowance: allowance.clone() });
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

/// The attributes of directories, by path, in a bounded room.
struct Dirs {
    attributes: BTreeMap<PathBuf, Attributes>,
    room: usize,
}

impl Dirs {
    fn new(room: usize) -> Self {
        Self { attributes: BTreeMap::new(), room }
    }

    /// Of a directory that is named again, the last attributes count.
    fn keep(&mut self, path: &Path, attributes: Attributes) -> Result<()> {
        if let Some(kept) = self.attributes.get_mut(path) {
            *kept = attributes;
            return Ok(());
        }
        let left = self.room.checked_sub(path.as_os_str().len() + DIR_COST);
        self.room = left.ok_or_else(|| {
            let count = self.attributes.len();
            Error::Archive { what: format!("it has more directories than can be remembered, which are {count}") }
        })?;
        self.attributes.insert(path.to_owned(), attributes);
        Ok(())
    }

    /// What lies inside a directory comes before it.
    fn innermost_first(self) -> impl Iterator<Item = (PathBuf, Attributes)> {
        self.attributes.into_iter().rev()
    }
}

impl Unpacking {
    fn entry(&mut self, entry: &mut Entry<'_, ChunkReader>) -> Result<()> {
        let path = self.place(&entry.path_bytes())?;
        let attributes = Attributes::of(entry.header()).map_err(|_| Error::Archive {
            what: format!("owner, mode or time of {} are none that a file can have", path.display()),
        })?;
        if entry.header().entry_type().is_dir() {
            self.dirs.keep(&path, attributes)?;
        }
        let placed = self.put(&path, entry, attributes);
        placed.map_err(|e| Error::io("write", self.shown.parent().unwrap_or(Path::new("")).join(&path), e))
    }

    fn put(&mut self, path: &Path, entry: &mut Entry<'_, ChunkReader>, attributes: Attributes) -> io::Result<()> {
        let (dir, name) = self.holder(path)?;
        match entry.header().entry_type() {
            EntryType::Directory => make_dir(&dir, &name),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse if entry.size() > FILE_MAX => {
                Err(io::ErrorKind::FileTooLarge.into())
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => write(&dir, &name, attributes, entry),
            EntryType::Symlink => symlink(&dir, &name, attributes, &link_name(entry)),
            EntryType::Link => {
                let target = self.place(&link_name(entry)).map_err(io::Error::other)?;
                let (target_dir, target_name) = self.holder(&target)?;
                vacate(&dir, &name)?;
                target_dir.hard_link(&target_name, &dir, &name)
            }
            other => {
                self.skipped.add(&format!("{}: a {other:?} cannot be copied", path.display()));
                Ok(())
            }
        }
    }

    /// Where a member goes: its first component is replaced by the chosen name, and the rest must be plain.
    fn place(&self, member: &[u8]) -> Result<PathBuf> {
        use std::os::unix::ffi::OsStrExt;
        let refused = || Error::Archive { what: format!("a member is called {:?}", String::from_utf8_lossy(member)) };
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

    /// The directory that a member lies in, and the member's name in it.
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
            let set = self.holder(&path).and_then(|(dir, name)| set_dir_attributes(&dir, &name, attributes));
            set.map_err(|e| Error::io("set the mode of", &path, e))?;
        }
        Ok(self.skipped)
    }
}

fn link_name(entry: &Entry<'_, ChunkReader>) -> Vec<u8> {
    entry.link_name_bytes().map(std::borrow::Cow::into_owned).unwrap_or_default()
}

fn make_dir(dir: &Dir, name: &OsStr) -> io::Result<()> {
    match dir.create_dir(name) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.symlink_metadata(name)?.is_dir() => Ok(()),
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

/// Removes a file that is in the way. A directory that is in the way is an error of the caller's choice of place.
fn vacate(dir: &Dir, name: &OsStr) -> io::Result<()> {
    match dir.remove_file(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The handles of `Dir` only name a directory; its attributes are set through one that reads it.
fn set_dir_attributes(dir: &Dir, name: &OsStr, attributes: Attributes) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    attributes.set(&rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// What of a member's header a file takes on.
#[derive(Debug, Clone, Copy)]
struct Attributes {
    mode: Mode,
    uid: Uid,
    gid: Gid,
    modified: i64,
}

impl Attributes {
    fn of(header: &Header) -> io::Result<Self> {
        // The largest number means "no change" to the system.
        let id = |number: u64| match u32::try_from(number) {
            Ok(u32::MAX) | Err(_) => Err(io::Error::from(io::ErrorKind::InvalidData)),
            Ok(id) => Ok(id),
        };
        Ok(Self {
            // A program with set-id bits would be one that the guest chose to run as its owner.
            mode: Mode::from_raw_mode(header.mode()? & 0o1777),
            uid: Uid::from_raw(id(header.uid()?)?),
            gid: Gid::from_raw(id(header.gid()?)?),
            modified: header.mtime()?.try_into().unwrap_or(i64::MAX),
        })
    }

    /// The owner, where we may give files away.
    fn owner(self) -> Option<(Uid, Gid)> {
        rustix::process::geteuid().is_root().then_some((self.uid, self.gid))
    }

    fn set(self, file: &impl std::os::fd::AsFd) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner() {
            rustix::fs::fchown(file, Some(uid), Some(gid))?;
        }
        rustix::fs::fchmod(file, self.mode)?;
        let time = Timespec { tv_sec: self.modified, tv_nsec: 0 };
        rustix::fs::futimens(file, &Timestamps { last_access: time, last_modification: time })?;
        Ok(())
    }
}

/// Copies, leaving out blocks of zeros.
fn copy_sparse(from: &mut impl Read, to: &mut (impl Write + Seek + std::os::fd::AsFd)) -> io::Result<()> {
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

/// The writing end of a stream whose reader is a task.
struct ChunkWriter {
    chunks: mpsc::Sender<Bytes>,
    buffer: Vec<u8>,
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let chunk = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK));
        self.chunks.blocking_send(chunk.into()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// The reading end of a stream whose writer is a task.
struct ChunkReader {
    chunks: mpsc::Receiver<Bytes>,
    chunk: Bytes,
    /// How much may still be read before something must have come of it.
    allowance: Rc<Cell<u64>>,
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.chunks.blocking_recv() {
                Some(chunk) => self.chunk = chunk,
                None => return Ok(0),
            }
        }
        let count = self.chunk.len().min(buffer.len());
        let left =
            self.allowance.get().checked_sub(count as u64).ok_or_else(|| io::Error::other("headers without end"))?;
        self.allowance.set(left);
        self.chunk.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// An archive as a hostile guest would write it: names go into headers as they are.
    #[derive(Default)]
    struct Forged(Vec<u8>);

    impl Forged {
        fn member(mut self, kind: EntryType, name: &str, link: &str, bytes: &[u8]) -> Self {
            let mut header = Header::new_gnu();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
            header.set_entry_type(kind);
            header.set_mode(0o755);
            header.set_uid(rustix::process::geteuid().as_raw().into());
            header.set_gid(rustix::process::getegid().as_raw().into());
            header.set_mtime(1_000_000);
            header.set_size(bytes.len() as u64);
            self.header(header);
            self.0.extend_from_slice(bytes);
            self.0.resize(self.0.len().next_multiple_of(512), 0);
            self
        }

        fn header(&mut self, mut header: Header) {
            header.set_cksum();
            self.0.extend_from_slice(header.as_bytes());
        }

        fn dir(self, name: &str) -> Self {
            self.member(EntryType::Directory, name, "", b"")
        }

        fn file(self, name: &str, bytes: &[u8]) -> Self {
            self.member(EntryType::Regular, name, "", bytes)
        }

        fn link(self, kind: EntryType, name: &str, target: &str) -> Self {
            self.member(kind, name, target, b"")
        }

        fn unpack(self, to: &Path) -> Result<Vec<String>> {
            let (chunks, queue) = mpsc::channel(1 << 16);
            for chunk in self.0.chunks(1000) {
                chunks.try_send(Bytes::copy_from_slice(chunk)).unwrap();
            }
            drop(chunks);
            unpack(queue, to).map(Skipped::into_lines)
        }
    }

    /// A directory that is chosen, with a neighbour that must not change.
    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("neighbour"), "untouched").unwrap();
            Self(dir)
        }

        fn chosen(&self) -> PathBuf {
            self.0.path().join("chosen")
        }

        fn assert_contained(&self) {
            let names = fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name());
            let others: Vec<_> = names.filter(|name| name != "chosen").collect();
            assert_eq!(others, ["neighbour"]);
            assert_eq!(fs::read(self.0.path().join("neighbour")).unwrap(), b"untouched");
        }
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        for name in ["/etc/x", "../x", "x/../../y", "x/..", "./..", "..", ".", "/", ""] {
            let place = Place::new();
            let refused = Forged::default().dir("x").file(name, b"bad").unpack(&place.chosen());
            assert!(matches!(refused, Err(Error::Archive { .. })), "{name:?}: {refused:?}");
            place.assert_contained();
        }
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        for target in ["..", "/tmp", ".", "../neighbour", "inner"] {
            let place = Place::new();
            let forged = Forged::default().dir("x").dir("x/inner").link(EntryType::Symlink, "x/l", target);
            let refused = forged.file("x/l/planted", b"bad").unpack(&place.chosen());
            assert!(refused.is_err(), "{target}");
            assert!(!place.chosen().join("inner/planted").exists());
            place.assert_contained();
        }
        // A file that takes a link's place replaces the link, not what it points to.
        let place = Place::new();
        let forged = Forged::default().dir("x").link(EntryType::Symlink, "x/l", "../neighbour");
        forged.file("x/l", b"own").unpack(&place.chosen()).unwrap();
        assert!(place.chosen().join("l").symlink_metadata().unwrap().is_file());
        place.assert_contained();
    }

    #[test]
    fn the_tree_itself_cannot_become_a_link() {
        let place = Place::new();
        let forged = Forged::default().link(EntryType::Symlink, "x", ".").file("x/planted", b"bad");
        assert!(forged.unpack(&place.chosen()).is_err());
        place.assert_contained();
    }

    #[test]
    fn hard_links_stay_inside() {
        for target in ["../neighbour", "/etc/passwd", "x/../../neighbour"] {
            let place = Place::new();
            let refused = Forged::default().dir("x").link(EntryType::Link, "x/h", target).unpack(&place.chosen());
            assert!(refused.is_err(), "{target}");
            assert!(!place.chosen().join("h").exists());
            place.assert_contained();
        }
        // Also not by way of a symbolic link.
        let place = Place::new();
        let forged = Forged::default().dir("x").link(EntryType::Symlink, "x/up", "..");
        assert!(forged.link(EntryType::Link, "x/h", "x/up/neighbour").unpack(&place.chosen()).is_err());
        place.assert_contained();
        let place = Place::new();
        let forged = Forged::default().dir("x").file("x/a", b"one").link(EntryType::Link, "x/b", "x/a");
        forged.unpack(&place.chosen()).unwrap();
        assert_eq!(fs::read(place.chosen().join("b")).unwrap(), b"one");
    }

    #[test]
    fn devices_are_left_out_and_named() {
        let place = Place::new();
        let forged = Forged::default().dir("x").link(EntryType::Char, "x/c", "").link(EntryType::Fifo, "x/f", "");
        let skipped = forged.file("x/after", b"kept").unpack(&place.chosen()).unwrap();
        assert_eq!(skipped.len(), 2, "{skipped:?}");
        assert!(!place.chosen().join("c").exists() && !place.chosen().join("f").exists());
        assert_eq!(fs::read(place.chosen().join("after")).unwrap(), b"kept");
    }

    #[test]
    fn set_id_bits_are_dropped_and_the_sticky_bit_is_kept() {
        let place = Place::new();
        let mut forged = Forged::default();
        for (kind, name) in [(EntryType::Directory, "x"), (EntryType::Regular, "x/f")] {
            let mut header = Header::new_gnu();
            header.set_path(name).unwrap();
            header.set_entry_type(kind);
            header.set_mode(0o7751);
            header.set_uid(rustix::process::geteuid().as_raw().into());
            header.set_gid(rustix::process::getegid().as_raw().into());
            header.set_mtime(1_000_000);
            header.set_size(0);
            forged.header(header);
        }
        forged.unpack(&place.chosen()).unwrap();
        for path in [place.chosen(), place.chosen().join("f")] {
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o1751, "{path:?}");
            assert_eq!(path.metadata().unwrap().mtime(), 1_000_000);
        }
    }

    #[test]
    fn the_last_of_two_members_with_one_name_stays() {
        let place = Place::new();
        let forged = Forged::default().dir("x").file("x/a", b"longer first").file("x/a", b"last");
        forged.unpack(&place.chosen()).unwrap();
        assert_eq!(fs::read(place.chosen().join("a")).unwrap(), b"last");
        let forged = Forged::default().dir("x").dir("x/d").file("x/d", b"in the way");
        assert!(forged.unpack(&place.chosen()).is_err(), "a directory is not replaced by a file");
    }

    /// A member of a few bytes that claims to be so long.
    fn sparse(claimed: u64) -> Forged {
        let mut header = Header::new_gnu();
        header.set_path("x").unwrap();
        header.set_entry_type(EntryType::GNUSparse);
        header.set_mode(0o644);
        header.set_uid(rustix::process::geteuid().as_raw().into());
        header.set_gid(rustix::process::getegid().as_raw().into());
        header.set_mtime(0);
        header.set_size(512);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.set_is_extended(false);
        gnu.set_real_size(claimed);
        gnu.sparse[0].set_offset(0);
        gnu.sparse[0].set_length(512);
        gnu.sparse[1].set_offset(claimed);
        gnu.sparse[1].set_length(0);
        let mut forged = Forged::default();
        forged.header(header);
        forged.0.extend_from_slice(&[1; 512]);
        forged
    }

    #[test]
    fn holes_stay_holes_and_those_beyond_any_disk_are_refused() {
        let place = Place::new();
        sparse(256 << 20).unpack(&place.chosen()).unwrap();
        let written = place.chosen().metadata().unwrap();
        assert_eq!(written.len(), 256 << 20);
        assert!(written.blocks() * 512 < 1 << 20);
        let refused = sparse(1 << 60).unpack(&place.chosen()).unwrap_err();
        assert!(refused.report().causes.iter().any(|cause| cause.contains("too large")), "{:?}", refused.report());
    }

    #[test]
    fn headers_without_end_do_not_fill_the_memory() {
        for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
            let place = Place::new();
            let forged = Forged::default().member(kind, "long", "", &vec![b'a'; HEADERS_MAX as usize + 1]);
            let refused = forged.file("x", b"").unpack(&place.chosen()).unwrap_err();
            assert!(
                refused.report().causes.iter().any(|cause| cause.contains("without end")),
                "{:?}",
                refused.report()
            );
        }
    }

    #[test]
    fn an_archive_that_is_cut_off_is_an_error() {
        let place = Place::new();
        let mut forged = Forged::default().dir("x").file("x/a", &[7; 2000]);
        forged.0.truncate(forged.0.len() - 1000);
        assert!(forged.unpack(&place.chosen()).is_err());
    }

    #[test]
    fn members_without_end_do_not_fill_the_memory() {
        let place = Place::new();
        let mut forged = Forged::default().dir("x").dir("x/d");
        for _ in 0..3000 {
            forged = forged.dir("x/d").link(EntryType::Fifo, "x/\x1b[2Jf", "");
        }
        let skipped = forged.unpack(&place.chosen()).unwrap();
        assert_eq!(skipped.len(), SKIPPED_LINES + 1);
        assert!(skipped[0].contains("\\u{1b}[2Jf: a Fifo"), "{}", skipped[0]);
        assert_eq!(skipped[SKIPPED_LINES], "and 2000 more");
        let mut long = Skipped::default();
        (0..3).for_each(|_| long.add(&"x".repeat(SKIPPED_BYTES / 2)));
        assert_eq!(long.into_lines().pop().unwrap(), "and 1 more");
    }

    #[test]
    fn a_directory_is_remembered_once_and_not_too_many_are() {
        let attributes = Attributes::of(&owned_by(0)).unwrap();
        let mut dirs = Dirs::new(2 * DIR_COST + 10);
        (0..100).for_each(|_| dirs.keep(Path::new("x"), attributes).unwrap());
        dirs.keep(Path::new("x/a"), attributes).unwrap();
        assert!(matches!(dirs.keep(Path::new("x/b"), attributes), Err(Error::Archive { .. })));
        let order: Vec<_> = dirs.innermost_first().map(|(path, _)| path).collect();
        assert_eq!(order, [Path::new("x/a"), Path::new("x")]);
    }

    fn owned_by(uid: u64) -> Header {
        let mut header = Header::new_gnu();
        header.set_path("x").unwrap();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o644);
        header.set_uid(uid);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(0);
        header
    }

    #[test]
    fn an_owner_that_cannot_be_is_refused() {
        for uid in [u64::from(u32::MAX), 1 << 32] {
            let place = Place::new();
            let mut forged = Forged::default();
            forged.header(owned_by(uid));
            assert!(matches!(forged.unpack(&place.chosen()), Err(Error::Archive { .. })), "{uid}");
            assert!(!place.chosen().exists());
        }
    }

    /// Runs `pack` and gives the archive with what it gave.
    fn packed<T>(pack: impl FnOnce(mpsc::Sender<Bytes>) -> T) -> (Forged, T) {
        let (chunks, mut queue) = mpsc::channel(1 << 16);
        let given = pack(chunks);
        let mut archive = Vec::new();
        while let Some(chunk) = queue.blocking_recv() {
            archive.extend_from_slice(&chunk);
        }
        (Forged(archive), given)
    }

    #[test]
    fn a_packed_tree_is_the_same_when_unpacked() {
        let (place, source) = (Place::new(), tempfile::tempdir().unwrap());
        let at = |name: &str| source.path().join(name);
        let (long, island) = ("n".repeat(200), 100 << 20);
        fs::create_dir(at("dir")).unwrap();
        fs::set_permissions(at("dir"), PermissionsExt::from_mode(0o1755)).unwrap();
        fs::write(at(&long), "long").unwrap();
        std::os::unix::fs::symlink(&long, at("link")).unwrap();
        let sparse = File::create(at("sparse")).unwrap();
        sparse.set_len(200 << 20).unwrap();
        // More pieces than the header has places, the last of them a block that the file does not fill.
        (0..40).for_each(|i| sparse.write_all_at(b"island", island + (i << 16)).unwrap());
        sparse.write_all_at(b"shore", 200 << 20).unwrap();
        let (archive, skipped) = packed(|chunks| pack(source.path(), OsStr::new("x"), chunks));
        assert!(skipped.unwrap().into_lines().is_empty());
        assert!(archive.0.len() < 1 << 20, "holes are sent: {}", archive.0.len());
        archive.unpack(&place.chosen()).unwrap();
        let there = |name: &str| place.chosen().join(name);
        assert_eq!(fs::read(there(&long)).unwrap(), b"long");
        assert_eq!(fs::read_link(there("link")).unwrap(), Path::new(&long));
        assert_eq!(there("dir").metadata().unwrap().mode(), at("dir").metadata().unwrap().mode());
        assert!(fs::read(there("sparse")).unwrap() == fs::read(at("sparse")).unwrap());
        assert!(there("sparse").metadata().unwrap().blocks() * 512 < 1 << 20);
    }

    #[test]
    fn pipes_are_packed_in_their_place_and_sockets_named() {
        let source = tempfile::tempdir().unwrap();
        let mode = Mode::from_raw_mode(0o640);
        rustix::fs::mknodat(rustix::fs::CWD, source.path().join("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        drop(std::os::unix::net::UnixListener::bind(source.path().join("socket")).unwrap());
        let (archive, skipped) = packed(|chunks| pack(source.path(), OsStr::new("x"), chunks));
        let skipped = skipped.unwrap().into_lines();
        assert!(skipped.len() == 1 && skipped[0].contains("socket"), "{skipped:?}");
        let mut archive = Archive::new(&archive.0[..]);
        let members = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            (entry.path().unwrap().into_owned(), entry.header().entry_type())
        });
        let members: Vec<_> = members.collect();
        assert_eq!(members, [("x".into(), EntryType::Directory), ("x/pipe".into(), EntryType::Fifo)]);
    }

    /// Packs a file of 1000 bytes that has another length by the time it is read.
    fn changed(length: u64) -> (Vec<u8>, Length) {
        let (place, source) = (Place::new(), tempfile::NamedTempFile::new().unwrap());
        let file = source.as_file();
        file.write_all_at(&[7; 1000], 0).unwrap();
        let found = file.metadata().unwrap();
        file.set_len(length).unwrap();
        let (archive, kept) = packed(|chunks| {
            let mut packing = Packing::new(chunks);
            packing.empty(&place.0.path().metadata().unwrap(), Path::new("x")).unwrap();
            let kept = packing.file(file, &found, Path::new("x/changed")).unwrap();
            packing.empty(&place.0.path().metadata().unwrap(), Path::new("x/after")).unwrap();
            packing.builder.into_inner().unwrap().flush().unwrap();
            kept
        });
        archive.unpack(&place.chosen()).unwrap();
        assert!(place.chosen().join("after").is_dir());
        (fs::read(place.chosen().join("changed")).unwrap(), kept)
    }

    #[test]
    fn a_file_that_changes_while_it_is_packed_keeps_the_length_it_had() {
        assert_eq!(changed(1000), (vec![7; 1000], Length::Kept));
        assert_eq!(changed(100_000), (vec![7; 1000], Length::Kept));
        let (bytes, kept) = changed(600);
        assert_eq!((&bytes[..600], &bytes[600..], kept), (&[7; 600][..], &[0; 400][..], Length::Shrank));
        assert_eq!(changed(0), (vec![0; 1000], Length::Shrank));
    }
}
