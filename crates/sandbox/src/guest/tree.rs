//! Trees of files as tar streams, on the host's side.
//!
//! Always: what a guest packed is hostile. Every name is resolved beneath the one directory that was chosen, links
//! included, by handles that cannot leave it; set-id bits are dropped, and device nodes are not made. Holes stay holes.
//! When it fails: what was unpacked so far stays, as with any copy that breaks off.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use bytes::{Buf, Bytes};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use rustix::fs::{AtFlags, Gid, Mode, Timespec, Timestamps, Uid};
use tar::{Archive, Builder, Entry, EntryType, Header};
use tokio::sync::mpsc;

use crate::error::{Error, Result};

const CHUNK: usize = 128 * 1024;
/// Runs of zeros of this size become holes.
const HOLE: usize = 4096;

/// Packs the file or tree at `from` under `name`. Gives what could not be packed.
pub(super) fn pack(from: &Path, name: &OsStr, chunks: mpsc::Sender<Bytes>) -> Result<Vec<String>> {
    let mut builder = Builder::new(ChunkWriter { chunks, buffer: Vec::with_capacity(CHUNK) });
    builder.follow_symlinks(false);
    let mut skipped = Vec::new();
    pack_entry(&mut builder, from, Path::new(name), &mut skipped)?;
    let finished = builder.into_inner().and_then(|mut writer| writer.flush());
    finished.map_err(|e| Error::io("pack", from, e))?;
    Ok(skipped)
}

fn pack_entry(builder: &mut Builder<ChunkWriter>, from: &Path, name: &Path, skipped: &mut Vec<String>) -> Result<()> {
    let failed = |e| Error::io("read", from, e);
    let kind = from.symlink_metadata().map_err(failed)?.file_type();
    if kind.is_socket() {
        skipped.push(format!("{}: a socket cannot be copied", from.display()));
        return Ok(());
    }
    builder.append_path_with_name(from, name).map_err(failed)?;
    if !kind.is_dir() {
        return Ok(());
    }
    let mut children: Vec<_> = from.read_dir().map_err(failed)?.collect::<io::Result<_>>().map_err(failed)?;
    children.sort_by_key(std::fs::DirEntry::file_name);
    children.iter().try_for_each(|child| pack_entry(builder, &child.path(), &name.join(child.file_name()), skipped))
}

/// Unpacks a stream whose members are named `X` and `X/…` as the file or tree `to`. Gives what was left out.
pub(super) fn unpack(chunks: mpsc::Receiver<Bytes>, to: &Path) -> Result<Vec<String>> {
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name =
        to.file_name().ok_or_else(|| Error::invalid("a place to copy to", to.display(), "it must have a name"))?;
    let root = Dir::open_ambient_dir(parent, ambient_authority()).map_err(|e| Error::io("open", parent, e))?;
    let mut unpacking =
        Unpacking { root, base: name.to_owned(), dirs: Vec::new(), skipped: Vec::new(), shown: to.to_owned() };
    let mut archive = Archive::new(ChunkReader { chunks, chunk: Bytes::new() });
    for entry in archive.entries().map_err(|e| Error::io("unpack into", to, e))? {
        unpacking.entry(entry.map_err(|e| Error::io("unpack into", to, e))?)?;
    }
    unpacking.finish()
}

struct Unpacking {
    /// The directory that holds `base`; every path is resolved beneath it.
    root: Dir,
    base: OsString,
    /// Directories whose mode and times are set last, so that read-only ones can be filled.
    dirs: Vec<(PathBuf, Header)>,
    skipped: Vec<String>,
    shown: PathBuf,
}

impl Unpacking {
    fn entry(&mut self, mut entry: Entry<'_, ChunkReader>) -> Result<()> {
        let path = self.place(&entry.path_bytes())?;
        let header = entry.header().clone();
        let outcome = match header.entry_type() {
            EntryType::Directory => self.make_dir(&path, &header),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => self.write(&path, &header, &mut entry),
            EntryType::Symlink => self.symlink(&path, &header, entry.link_name_bytes().as_deref().unwrap_or_default()),
            EntryType::Link => {
                let target = self.place(entry.link_name_bytes().as_deref().unwrap_or_default())?;
                self.vacate(&path).and_then(|()| self.root.hard_link(&target, &self.root, &path))
            }
            other => {
                self.skipped.push(format!("{}: a {other:?} cannot be copied", path.display()));
                Ok(())
            }
        };
        outcome.map_err(|e| Error::io("write", self.shown.parent().unwrap_or(Path::new("")).join(&path), e))
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

    fn make_dir(&mut self, path: &Path, header: &Header) -> io::Result<()> {
        match self.root.create_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && self.root.symlink_metadata(path)?.is_dir() => {}
            other => other?,
        }
        self.dirs.push((path.to_owned(), header.clone()));
        Ok(())
    }

    fn write(&self, path: &Path, header: &Header, bytes: &mut impl Read) -> io::Result<()> {
        self.vacate(path)?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let mut file = self.root.open_with(path, &options)?;
        copy_sparse(bytes, &mut file)?;
        set_attributes(&file, header)
    }

    fn symlink(&self, path: &Path, header: &Header, target: &[u8]) -> io::Result<()> {
        use std::os::unix::ffi::OsStrExt;
        self.vacate(path)?;
        self.root.symlink_contents(OsStr::from_bytes(target), path)?;
        // One more component beneath a directory handle: it cannot be led astray by a link in between.
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let parent = self.root.open_dir(parent)?;
        if let Some((uid, gid)) = owner(header)? {
            rustix::fs::chownat(&parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    /// Removes a file that is in the way. A directory that is in the way is an error of the caller's choice of place.
    fn vacate(&self, path: &Path) -> io::Result<()> {
        match self.root.remove_file(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn finish(mut self) -> Result<Vec<String>> {
        for (path, header) in std::mem::take(&mut self.dirs).into_iter().rev() {
            let set = self.root.open_dir(&path).and_then(|dir| set_attributes(&dir, &header));
            set.map_err(|e| Error::io("set the mode of", &path, e))?;
        }
        Ok(self.skipped)
    }
}

/// Mode without set-id bits, owner where we may give files away, and time.
fn set_attributes(file: &impl std::os::fd::AsFd, header: &Header) -> io::Result<()> {
    if let Some((uid, gid)) = owner(header)? {
        rustix::fs::fchown(file, Some(uid), Some(gid))?;
    }
    rustix::fs::fchmod(file, Mode::from_raw_mode(header.mode()? & 0o777))?;
    let time = Timespec { tv_sec: header.mtime()?.try_into().unwrap_or(i64::MAX), tv_nsec: 0 };
    rustix::fs::futimens(file, &Timestamps { last_access: time, last_modification: time })?;
    Ok(())
}

fn owner(header: &Header) -> io::Result<Option<(Uid, Gid)>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let id = |number: u64| u32::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
    Ok(Some((Uid::from_raw(id(header.uid()?)?), Gid::from_raw(id(header.gid()?)?))))
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
        self.chunk.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}
