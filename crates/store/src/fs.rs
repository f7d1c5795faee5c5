//! The one seam between the store and a file system.
//!
//! [`Fs`] is what the store asks of a file system: small, synchronous, paths in, `io::Error` out.
//! [`Disk`] is the real one; the simulated one of the tests stops, fails or loses power at any
//! operation. [`Files`] is what the rest of the store uses: it adds the operation and the path to
//! each error.
//!
//! Always: after a failed sync of a file, what the disk has of it is unknown: the kernel may have
//! dropped the pages, and says so only once. So a layer whose first sync failed is *doubtful*, and
//! no later sync of it succeeds, in any process and under any name. What was durable before
//! stays so, and what is still being made is thrown away. A directory may be synced again: file
//! systems keep what they could not write of their own structure, or take no more changes at all.

mod below;
mod disk;
#[cfg(test)]
pub(crate) mod simulated;
mod stream;

use std::any::Any;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

pub(crate) use disk::Disk;
pub use disk::rename_noreplace;
pub(crate) use stream::Output;

use crate::{Digest, Error};

/// Room for most records: with less, reading a file begins with looking how much there is.
const ONE_READ: usize = 1024;

/// More than a name or a pin has.
const SMALL: usize = 256;

/// The largest record that is read into memory at once.
pub(crate) const MAX_RECORD_BYTES: u64 = 16 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Dir,
    Other,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub name: OsString,
    pub kind: Kind,
}

/// What the file system knows of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    pub len: u64,
    /// What it takes on disk.
    pub disk_bytes: u64,
    /// How many names it has.
    pub links: u64,
    /// Which file it is, whatever its name. A file system may give the number of a removed file to
    /// the next one.
    pub id: (u64, u64),
    /// When its content or its names last changed: seconds and nanoseconds.
    pub changed: (i64, i64),
    /// A sync of it failed.
    pub doubtful: bool,
    /// It belongs to this user, and no other user may write to it.
    pub own: bool,
}

/// A file that can be read anywhere.
pub(crate) trait ReadAt: Send + Sync {
    fn bytes(&self) -> io::Result<u64>;
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// The next range, from `offset` on, that is not a hole. A file system may know of no holes.
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>>;
}

/// A new file that is written from front to back.
pub(crate) trait FileWriter: Send {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Adds zeros, as a hole where there can be one.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;
    /// Gives the file its full length.
    fn finish(&mut self) -> io::Result<()>;
}

/// A lock on a file, held until dropped or until the process ends.
pub struct Lock {
    _held: Box<dyn Any + Send + Sync>,
}

impl Lock {
    pub(crate) fn new(held: impl Any + Send + Sync) -> Self {
        Self {
            _held: Box::new(held),
        }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lock")
    }
}

pub(crate) trait Fs: fmt::Debug + Send + Sync {
    /// Whether other programs can open the path themselves.
    fn has_paths(&self) -> bool;
    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>>;
    fn open_at(&self, path: &Path) -> io::Result<Box<dyn ReadAt>>;
    fn stat(&self, path: &Path) -> io::Result<Stat>;
    fn kind(&self, path: &Path) -> io::Result<Kind>;
    fn list(&self, path: &Path) -> io::Result<Vec<Entry>>;
    fn free_bytes(&self, path: &Path) -> io::Result<u64>;

    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes a file that must not exist yet, readable and writable by its owner alone.
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Makes a file like `create`, to be written from front to back.
    fn writer(&self, path: &Path) -> io::Result<Box<dyn FileWriter>>;
    /// Makes a file like `create`, with the content of another one.
    fn copy(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes a file like `copy`, sharing the data of another one. Says whether there can be such a
    /// file.
    fn clone_file(&self, from: &Path, to: &Path) -> io::Result<bool>;
    /// Makes a file read-only for everyone: its content never changes again.
    fn seal(&self, path: &Path) -> io::Result<()>;
    /// Marks a sealed file, under all of its names, as one whose sync failed.
    fn doubtful(&self, path: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn rename_noreplace(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Lets two names trade places.
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()>;
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    fn sync_file(&self, path: &Path) -> io::Result<()>;
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Locks the file, made if missing, and waits while another process holds the lock.
    fn lock(&self, path: &Path) -> io::Result<Lock>;
    /// `None` when someone else holds it. `NotFound` when the file went away meanwhile.
    fn try_lock(&self, path: &Path) -> io::Result<Option<Lock>>;
}

#[derive(Debug, Clone)]
pub(crate) struct Files {
    fs: Arc<dyn Fs>,
}

impl Files {
    pub(crate) fn new(fs: Arc<dyn Fs>) -> Self {
        Self { fs }
    }

    pub(crate) fn has_paths(&self) -> bool {
        self.fs.has_paths()
    }

    pub(crate) fn read(&self, path: &Path) -> Result<Vec<u8>, Error> {
        // A name fits, of which there are many, and is then read at once.
        let mut bytes = Vec::with_capacity(512);
        let file = self.fs.open(path).map_err(io_error("open", path))?;
        file.take(MAX_RECORD_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(io_error("read", path))?;
        if bytes.len() as u64 > MAX_RECORD_BYTES {
            return Err(Error::corrupt(path, "it is far larger than any record"));
        }
        Ok(bytes)
    }

    /// A file to read from front to back.
    pub(crate) fn open(&self, path: &Path) -> Result<Box<dyn Read + Send>, Error> {
        self.fs.open(path).map_err(io_error("open", path))
    }

    /// A file to read anywhere.
    pub(crate) fn open_at(&self, path: &Path) -> Result<Box<dyn ReadAt>, Error> {
        self.fs.open_at(path).map_err(io_error("open", path))
    }

    /// A file that is small, by one look, unless it is not.
    pub(crate) fn read_small(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; SMALL];
        let count = self
            .open(path)?
            .read(&mut bytes)
            .map_err(io_error("read", path))?;
        if count == SMALL {
            return self.read(path);
        }
        bytes.truncate(count);
        Ok(bytes)
    }

    /// The first bytes of a file; fewer if it has no more.
    pub(crate) fn read_up_to(&self, path: &Path, bytes: u64) -> Result<Vec<u8>, Error> {
        let mut start = Vec::with_capacity(ONE_READ);
        self.open(path)?
            .take(bytes)
            .read_to_end(&mut start)
            .map_err(io_error("read", path))?;
        Ok(start)
    }

    pub(crate) fn read_if_exists(&self, path: &Path) -> Result<Option<Vec<u8>>, Error> {
        optional(self.read(path))
    }

    /// The first bytes of a file that has as many.
    pub(crate) fn read_start<const LEN: usize>(&self, path: &Path) -> Result<[u8; LEN], Error> {
        let mut start = [0; LEN];
        let mut file = self.fs.open(path).map_err(io_error("open", path))?;
        file.read_exact(&mut start)
            .map_err(io_error("read", path))?;
        Ok(start)
    }

    /// Digest and length of a file, read in pieces.
    pub(crate) fn digest(&self, path: &Path) -> Result<(Digest, u64), Error> {
        let mut file = self.fs.open(path).map_err(io_error("open", path))?;
        let mut hasher = Sha256::new();
        let mut piece = vec![0; 1 << 20];
        let mut len = 0;
        loop {
            let read = file.read(&mut piece).map_err(io_error("read", path))?;
            if read == 0 {
                return Ok((Digest::finish(hasher), len));
            }
            hasher.update(&piece[..read]);
            len += read as u64;
        }
    }

    pub(crate) fn len(&self, path: &Path) -> Result<u64, Error> {
        Ok(self.stat(path)?.len)
    }

    pub(crate) fn links(&self, path: &Path) -> Result<u64, Error> {
        Ok(self.stat(path)?.links)
    }

    pub(crate) fn stat(&self, path: &Path) -> Result<Stat, Error> {
        self.fs.stat(path).map_err(io_error("look at", path))
    }

    pub(crate) fn kind(&self, path: &Path) -> Result<Option<Kind>, Error> {
        optional(self.fs.kind(path).map_err(io_error("look at", path)))
    }

    pub(crate) fn list(&self, path: &Path) -> Result<Vec<Entry>, Error> {
        let mut entries = self.fs.list(path).map_err(io_error("list", path))?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// What a directory takes in which a guest writes.
    pub(crate) fn bytes_below(&self, path: &Path) -> u64 {
        if self.has_paths() {
            below::bytes(path)
        } else {
            0
        }
    }

    pub(crate) fn free_bytes(&self, path: &Path) -> Result<u64, Error> {
        self.fs
            .free_bytes(path)
            .map_err(io_error("measure the free space at", path))
    }

    pub(crate) fn create_dir(&self, path: &Path) -> Result<(), Error> {
        self.change("create directory", path, |fs| fs.create_dir(path))
    }

    pub(crate) fn ensure_dir(&self, path: &Path) -> Result<(), Error> {
        if self.kind(path)? == Some(Kind::Dir) {
            return Ok(());
        }
        match self.create_dir(path) {
            Err(error) if error.io_kind() == Some(io::ErrorKind::AlreadyExists) => Ok(()),
            done => done,
        }
    }

    pub(crate) fn create(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        self.change("write", path, |fs| fs.create(path, bytes))
    }

    /// A new file whose bytes others write by its descriptor. Nothing lists it before they are
    /// synced, by `sync_file`.
    pub(crate) fn new_file(&self, path: &Path) -> Result<File, Error> {
        self.create(path, b"")?;
        self.open_to_write(path)
    }

    /// A file that nothing lists yet, to write its bytes by a descriptor.
    pub(crate) fn open_to_write(&self, path: &Path) -> Result<File, Error> {
        let opened = File::options().read(true).write(true).open(path);
        opened.map_err(io_error("open", path))
    }

    /// One that is doubtful is sealed already, and stays doubtful.
    pub(crate) fn seal(&self, path: &Path) -> Result<(), Error> {
        if self.is_doubtful(path)? {
            Ok(())
        } else {
            self.change("make read-only", path, |fs| fs.seal(path))
        }
    }

    /// Whether a sync of a file failed: what the disk has of it is unknown.
    pub(crate) fn is_doubtful(&self, path: &Path) -> Result<bool, Error> {
        Ok(self.stat(path)?.doubtful)
    }

    fn refuse_doubtful(&self, path: &Path) -> Result<(), Error> {
        if self.is_doubtful(path)? {
            Err(Error::Doubtful {
                path: path.to_owned(),
            })
        } else {
            Ok(())
        }
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.change("rename to", to, |fs| fs.rename(from, to))
    }

    pub(crate) fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.change("rename to", to, |fs| fs.rename_noreplace(from, to))
    }

    pub(crate) fn exchange(&self, a: &Path, b: &Path) -> Result<(), Error> {
        self.change("trade places with", b, |fs| fs.exchange(a, b))
    }

    /// Returns whether the file system can; if not, nothing is created.
    pub(crate) fn clone_file(&self, from: &Path, to: &Path) -> Result<bool, Error> {
        self.fs
            .clone_file(from, to)
            .map_err(io_error("clone to", to))
    }

    pub(crate) fn hard_link(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.change("link", to, |fs| fs.hard_link(from, to))
    }

    /// Gives an immutable file another name. Where there can be no such link, the new name is a
    /// copy, and durable.
    pub(crate) fn share(&self, from: &Path, to: &Path) -> Result<(), Error> {
        match self.hard_link(from, to) {
            Err(error) if cannot_link(&error) => self.copy_sealed(from, to),
            linked => linked,
        }
    }

    fn copy_sealed(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.refuse_doubtful(from)?;
        self.change("copy to", to, |fs| fs.copy(from, to))?;
        self.seal(to)?;
        self.sync_file(to)
    }

    /// Shares every file of a directory tree; a directory that is not there is an empty one.
    pub(crate) fn share_tree(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.create_dir(to)?;
        for entry in optional(self.list(from))?.unwrap_or_default() {
            let from = from.join(&entry.name);
            let to = to.join(&entry.name);
            match entry.kind {
                Kind::Dir => self.share_tree(&from, &to)?,
                _ => self.share(&from, &to)?,
            }
        }
        self.sync_dir(to)
    }

    pub(crate) fn remove_file(&self, path: &Path) -> Result<(), Error> {
        self.change("remove", path, |fs| fs.remove_file(path))
    }

    pub(crate) fn remove_dir(&self, path: &Path) -> Result<(), Error> {
        self.change("remove directory", path, |fs| fs.remove_dir(path))
    }

    /// Removes what is at `path`, whatever it is; nothing being there is fine, also when it goes
    /// while we look.
    pub(crate) fn remove_tree(&self, path: &Path) -> Result<(), Error> {
        let removed = match self.kind(path)? {
            None => Ok(()),
            Some(Kind::Dir) => self.remove_dir_with_content(path),
            Some(_) => self.remove_file(path),
        };
        optional(removed).map(|_| ())
    }

    fn remove_dir_with_content(&self, path: &Path) -> Result<(), Error> {
        for entry in self.list(path)? {
            self.remove_tree(&path.join(entry.name))?;
        }
        self.remove_dir(path)
    }

    pub(crate) fn sync_file(&self, path: &Path) -> Result<(), Error> {
        self.refuse_doubtful(path)?;
        self.change("sync", path, |fs| fs.sync_file(path))
    }

    /// Seals and syncs a file that may never have been synced before, and that is kept whether or
    /// not that works.
    pub(crate) fn settle_file(&self, path: &Path) -> Result<(), Error> {
        self.seal(path)?;
        let synced = self.sync_file(path);
        // What is not there was not synced, but nothing was lost by that: a state may go while it
        // is being sealed.
        if synced
            .as_ref()
            .is_err_and(|error| error.io_kind() != Some(io::ErrorKind::NotFound))
        {
            unnoted(self.fs.doubtful(path));
        }
        synced
    }

    pub(crate) fn sync_dir(&self, path: &Path) -> Result<(), Error> {
        self.change("sync directory", path, |fs| fs.sync_dir(path))
    }

    pub(crate) fn lock(&self, path: &Path) -> Result<Lock, Error> {
        self.fs.lock(path).map_err(io_error("lock", path))
    }

    pub(crate) fn try_lock(&self, path: &Path) -> Result<Option<Lock>, Error> {
        self.fs.try_lock(path).map_err(io_error("lock", path))
    }

    fn change(
        &self,
        operation: &'static str,
        path: &Path,
        work: impl FnOnce(&dyn Fs) -> io::Result<()>,
    ) -> Result<(), Error> {
        work(&*self.fs).map_err(io_error(operation, path))
    }
}

/// A path as the store keeps it. The store does not read the working directory, so a relative path
/// means nothing to it.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, Error> {
    if path.is_absolute() {
        return Ok(path.components().collect());
    }
    let source = io::Error::new(io::ErrorKind::InvalidInput, "the path is not absolute");
    Err(io_error("find", path)(source))
}

/// A file system that takes not even a mode is about to take nothing: the error that is reported is
/// that of the sync.
fn unnoted(_: io::Result<()>) {}

pub(crate) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io {
        operation,
        path,
        source,
    }
}

/// Another file system, as many links as a file can have, or a file system without any.
pub(crate) fn cannot_link(error: &Error) -> bool {
    let Error::Io { source, .. } = error else {
        return false;
    };
    let has_none =
        [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS].map(|errno| Some(errno.raw_os_error()));
    matches!(
        source.kind(),
        io::ErrorKind::CrossesDevices | io::ErrorKind::TooManyLinks
    ) || has_none.contains(&source.raw_os_error())
}

/// Turns "not there" into `None`.
pub(crate) fn optional<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Err(error) if error.io_kind() == Some(io::ErrorKind::NotFound) => Ok(None),
        result => result.map(Some),
    }
}
