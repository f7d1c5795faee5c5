//! Trees of files as tar streams, on the host's side.
//!
//! Always: what a guest packed is hostile. Every name is resolved beneath the one directory that was chosen, by handles
//! that cannot leave it, and through no symbolic link: no packer puts a member behind one. Set-id bits are dropped,
//! and device nodes are not made. Holes stay holes. Memory is bounded, whatever lengths the headers claim.
//! When it fails: what was unpacked so far stays, as with any copy that breaks off.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use bytes::{Buf, Bytes};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use tar::{Archive, Builder, Entry, EntryType, Header};
use tokio::sync::mpsc;

use crate::error::{Error, Result};

const CHUNK: usize = 128 * 1024;
/// Runs of zeros of this size become holes.
const HOLE: usize = 4096;
/// What may stand before a member's bytes: long names, attributes and the map of a file's holes are held in memory.
const HEADERS_MAX: u64 = 16 << 20;
/// No disk of a guest is larger. Holes cost nothing but the time to pass over them, and that must end.
const FILE_MAX: u64 = 1 << 43;

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
    dirs: Vec<(PathBuf, Header)>,
    skipped: Vec<String>,
    shown: PathBuf,
}

impl Unpacking {
    fn entry(&mut self, entry: &mut Entry<'_, ChunkReader>) -> Result<()> {
        let path = self.place(&entry.path_bytes())?;
        let placed = self.put(&path, entry);
        placed.map_err(|e| Error::io("write", self.shown.parent().unwrap_or(Path::new("")).join(&path), e))
    }

    fn put(&mut self, path: &Path, entry: &mut Entry<'_, ChunkReader>) -> io::Result<()> {
        let header = entry.header().clone();
        let (dir, name) = self.holder(path)?;
        match header.entry_type() {
            EntryType::Directory => {
                make_dir(&dir, &name)?;
                self.dirs.push((path.to_owned(), header));
                Ok(())
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse if entry.size() > FILE_MAX => {
                Err(io::ErrorKind::FileTooLarge.into())
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => write(&dir, &name, &header, entry),
            EntryType::Symlink => symlink(&dir, &name, &header, &link_name(entry)),
            EntryType::Link => {
                let target = self.place(&link_name(entry)).map_err(io::Error::other)?;
                let (target_dir, target_name) = self.holder(&target)?;
                vacate(&dir, &name)?;
                target_dir.hard_link(&target_name, &dir, &name)
            }
            other => {
                self.skipped.push(format!("{}: a {other:?} cannot be copied", path.display()));
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

    fn finish(mut self) -> Result<Vec<String>> {
        for (path, header) in std::mem::take(&mut self.dirs).into_iter().rev() {
            let set = self.holder(&path).and_then(|(dir, name)| set_dir_attributes(&dir, &name, &header));
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

fn write(dir: &Dir, name: &OsStr, header: &Header, bytes: &mut impl Read) -> io::Result<()> {
    vacate(dir, name)?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = dir.open_with(name, &options)?;
    copy_sparse(bytes, &mut file)?;
    set_attributes(&file, header)
}

fn symlink(dir: &Dir, name: &OsStr, header: &Header, target: &[u8]) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    vacate(dir, name)?;
    dir.symlink_contents(OsStr::from_bytes(target), name)?;
    if let Some((uid, gid)) = owner(header)? {
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
fn set_dir_attributes(dir: &Dir, name: &OsStr, header: &Header) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    set_attributes(&rustix::fs::openat(dir, name, flags, Mode::empty())?, header)
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
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

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
            unpack(queue, to)
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
    fn set_id_bits_are_dropped() {
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
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o751, "{path:?}");
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
}
