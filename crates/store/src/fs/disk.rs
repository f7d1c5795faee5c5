//! The real file system.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{
    CWD, FlockOperation, RenameFlags, SeekFrom, flock, ioctl_ficlone, renameat_with, seek, statvfs,
};
use rustix::io::Errno;

use super::{Entry, FileWriter, Fs, Kind, Lock, ReadAt, Stat};

/// The mode of a file that never changes again.
const SEALED: u32 = 0o444;
/// The mode of such a file once a sync of it failed.
const DOUBTFUL: u32 = 0o440;

#[derive(Debug)]
pub(crate) struct Disk;

/// Renames a file or directory, unless the new name is taken.
pub fn rename_noreplace(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => rename_to_free(from, to),
        renamed => Ok(renamed?),
    }
}

/// For file systems whose rename knows no flags: NFS, and most on FUSE. A link replaces nothing, so
/// a file gets its new name by one. A directory, and a file where there are no links, is renamed
/// once its name is seen to be free: a rename would replace an empty directory or a file that
/// appears in between, but code that publishes under a name that others may choose, too, holds the
/// store's lock.
fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(from)?.is_dir() {
        match fs::hard_link(from, to) {
            Ok(()) => return fs::remove_file(from),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) => {}
        }
    }
    match fs::symlink_metadata(to) {
        Ok(_) => Err(Errno::EXIST.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
        Err(error) => Err(error),
    }
}

impl Fs for Disk {
    fn has_paths(&self) -> bool {
        true
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(File::open(path)?))
    }

    fn open_at(&self, path: &Path) -> io::Result<Box<dyn ReadAt>> {
        Ok(Box::new(File::open(path)?))
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let found = fs::symlink_metadata(path)?;
        let id = (found.dev(), found.ino());
        Ok(Stat {
            len: found.len(),
            disk_bytes: found.blocks().saturating_mul(512),
            links: found.nlink(),
            id,
            changed: (found.ctime(), found.ctime_nsec()),
            own: found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o022 == 0,
            doubtful: found.is_file() && found.mode() & 0o777 == DOUBTFUL,
        })
    }

    fn kind(&self, path: &Path) -> io::Result<Kind> {
        Ok(kind_of(fs::symlink_metadata(path)?.file_type()))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        fs::read_dir(path)?
            .map(|entry| entry.and_then(to_entry))
            .collect()
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        let stat = statvfs(path)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(path)
    }

    /// Blocks of zeros become holes: an empty overlay is hardly anything else.
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        const BLOCK: usize = 4096;
        let file = new_file(path)?;
        for (index, block) in bytes
            .chunks(BLOCK)
            .enumerate()
            .filter(|(_, block)| block.iter().any(|byte| *byte != 0))
        {
            file.write_all_at(block, (index * BLOCK) as u64)?;
        }
        file.set_len(bytes.len() as u64)
    }

    fn writer(&self, path: &Path) -> io::Result<Box<dyn FileWriter>> {
        Ok(Box::new(Writer {
            file: new_file(path)?,
            len: 0,
        }))
    }

    /// A clone where the file system can; any refusal to clone means to copy the bytes.
    fn copy(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut from = File::open(from)?;
        let mut to = new_file(to)?;
        match ioctl_ficlone(&to, &from) {
            Ok(()) => Ok(()),
            Err(_) => io::copy(&mut from, &mut to).map(drop),
        }
    }

    fn clone_file(&self, from: &Path, to: &Path) -> io::Result<bool> {
        let from = File::open(from)?;
        let file = new_file(to)?;
        if ioctl_ficlone(&file, &from).is_ok() {
            return Ok(true);
        }
        fs::remove_file(to)?;
        Ok(false)
    }

    fn seal(&self, path: &Path) -> io::Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(SEALED))
    }

    /// By its mode, which all names of a file share and every process sees. It need not outlive the
    /// host's boot: a state that is not sealed does not either.
    fn doubtful(&self, path: &Path) -> io::Result<()> {
        let mode = fs::symlink_metadata(path)?.mode() & 0o777;
        if mode != SEALED {
            return Ok(());
        }
        fs::set_permissions(path, fs::Permissions::from_mode(DOUBTFUL))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> io::Result<()> {
        rename_noreplace(from, to)
    }

    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn lock(&self, path: &Path) -> io::Result<Lock> {
        let file = open_lock(path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(Lock::new(file))
    }

    fn try_lock(&self, path: &Path) -> io::Result<Option<Lock>> {
        let file = open_lock(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => still_there(&file, path).map(|()| Some(Lock::new(file))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl ReadAt for File {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let start = match seek(self, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // A file system without holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                return Ok(Some(offset..self.metadata()?.len()));
            }
            Err(errno) => return Err(errno.into()),
        };
        Ok(Some(start..seek(self, SeekFrom::Hole(start))?))
    }
}

/// A file whose holes are where nothing was written.
struct Writer {
    file: File,
    len: u64,
}

impl FileWriter for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.len)?;
        self.skip(bytes.len() as u64)
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.len = self
            .len
            .checked_add(bytes)
            .ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.file.set_len(self.len)
    }
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn kind_of(kind: fs::FileType) -> Kind {
    match kind {
        kind if kind.is_file() => Kind::File,
        kind if kind.is_dir() => Kind::Dir,
        _ => Kind::Other,
    }
}

fn to_entry(entry: fs::DirEntry) -> io::Result<Entry> {
    Ok(Entry {
        name: entry.file_name(),
        kind: kind_of(entry.file_type()?),
    })
}

/// Opened close-on-exec, as std does everywhere, so that a child never keeps a lock alive.
fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

/// Between open and lock, the last holder may have removed the file: such a lock guards nothing.
fn still_there(file: &File, path: &Path) -> io::Result<()> {
    let held = file.metadata()?;
    let found = fs::symlink_metadata(path)?;
    if (held.dev(), held.ino()) == (found.dev(), found.ino()) {
        return Ok(());
    }
    Err(io::ErrorKind::NotFound.into())
}
