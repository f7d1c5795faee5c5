//! Publishing: moving a finished tree out of `staging/`, whole or not at all.
//!
//! ```text
//! stage ──► fill tree ──► sync every file and directory ──► rename_noreplace ──► sync the directory it is in now
//!             └── dropped, or its process died: removed, at once or by the next open
//! ```
//!
//! Always: a staging directory is locked by its maker from its first moment until the store's lock
//! is held to remove it; only one with a free lock is ever cleaned up.
//!
//! When it fails: what was staged is removed. Where that fails, too, it stays in `staging/`, and
//! the next open removes it.

use std::io;
use std::path::{Path, PathBuf};

use crate::fs::{Files, Kind, Lock, optional};
use crate::layout::Layout;
use crate::pin::Pin;
use crate::{Error, SandboxId, lock};

/// The file of a staging directory that says what must stay.
pub(crate) const PIN: &str = "pin";

/// A directory of unfinished work. Dropping it removes it.
#[derive(Debug)]
pub struct Staged {
    files: Files,
    layout: Layout,
    shell: PathBuf,
    tree: PathBuf,
    kept: bool,
    /// Nothing once it is about to be removed.
    lock: Option<Lock>,
}

/// What publishing under a digest found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    New,
    /// The same content was there before; what was staged is dropped.
    Already,
}

impl Staged {
    /// Makes `staging/<id>/tree`, locked.
    pub(crate) fn new(files: &Files, layout: &Layout, id: &SandboxId) -> Result<Self, Error> {
        let staged = Self::shell(files, layout, id)?;
        files.create_dir(&staged.tree)?;
        Ok(staged)
    }

    /// Makes `staging/<id>`, locked, with no `tree` in it yet; or takes over one that was kept.
    pub(crate) fn shell(files: &Files, layout: &Layout, id: &SandboxId) -> Result<Self, Error> {
        let shell = layout.staging().join(id.as_str());
        let _store = lock::store(files, layout)?;
        files.ensure_dir(&shell)?;
        match files.try_lock(&shell.join("lock")) {
            Ok(Some(lock)) => Ok(Self::adopt(files, layout, shell, lock)),
            Ok(None) => Err(Error::Busy { id: id.clone() }),
            Err(error) => {
                left_for_next_open(files.remove_tree(&shell));
                Err(error)
            }
        }
    }

    fn adopt(files: &Files, layout: &Layout, shell: PathBuf, lock: Lock) -> Self {
        let tree = shell.join("tree");
        Self {
            files: files.clone(),
            layout: layout.clone(),
            shell,
            tree,
            kept: false,
            lock: Some(lock),
        }
    }

    /// The name of the directory, by which [`Store::is_at_work`] finds out whether its maker lives.
    ///
    /// [`Store::is_at_work`]: crate::Store::is_at_work
    pub fn id(&self) -> String {
        let name = self.shell.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// The directory to fill.
    pub fn path(&self) -> &Path {
        &self.tree
    }

    /// Makes what is in the tree so far durable, so that it is found after a power loss.
    pub(crate) fn announce(&self) -> Result<(), Error> {
        sync_tree(&self.files, &self.tree)?;
        self.files.sync_dir(&self.shell)?;
        self.files.sync_dir(&self.layout.staging())
    }

    /// Makes the tree read-only and durable, then renames it to `target`.
    pub(crate) fn publish(self, target: &Path) -> Result<Published, Error> {
        self.make_durable()?;
        publish(&self.files, &self.tree, target)
    }

    /// Like `publish`; what is published stays at least as long as the result lives.
    pub(crate) fn publish_pinned(self, target: &Path, pin: &Pin) -> Result<Self, Error> {
        self.make_durable()?;
        {
            let _store = lock::store(&self.files, &self.layout)?;
            self.write_pin(pin)?;
        }
        publish(&self.files, &self.tree, target)?;
        Ok(self)
    }

    /// Says what must stay while this lives. The store's lock is held by the caller.
    pub(crate) fn write_pin(&self, pin: &Pin) -> Result<(), Error> {
        create_whole(&self.files, &self.shell.join(PIN), pin.to_line().as_bytes())
    }

    pub(crate) fn make_durable(&self) -> Result<(), Error> {
        seal_tree(&self.files, &self.tree)?;
        sync_tree(&self.files, &self.tree)
    }

    /// Like `publish`, for one file of the tree.
    pub(crate) fn publish_file(self, name: &str, target: &Path) -> Result<Published, Error> {
        let file = self.tree.join(name);
        self.files.seal(&file)?;
        self.files.sync_file(&file)?;
        publish(&self.files, &file, target)
    }

    /// The path of a mark in the directory, outside the tree.
    pub(crate) fn mark_path(&self, mark: &str) -> PathBuf {
        self.shell.join(mark)
    }

    /// Leaves a durable mark in the directory, outside the tree.
    pub(crate) fn mark(&self, mark: &str) -> Result<(), Error> {
        let path = self.mark_path(mark);
        self.files.create(&path, b"")?;
        self.files.sync_file(&path)?;
        self.files.sync_dir(&self.shell)?;
        self.files.sync_dir(&self.layout.staging())
    }

    /// Removes it, and returns whether that worked.
    pub(crate) fn discard(mut self) -> Result<(), Error> {
        self.kept = true;
        self.remove()
    }

    /// Leaves everything to the next open.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }

    fn remove(&mut self) -> Result<(), Error> {
        self.files.remove_tree(&self.tree)?;
        // Under the store's lock, so that no process locks the directory again between the steps.
        // The lock's file is closed first: NFS and FUSE keep an open file in its directory under
        // another name, which is not empty then.
        let _store = lock::store(&self.files, &self.layout)?;
        self.lock = None;
        self.files.remove_tree(&self.shell)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.kept {
            left_for_next_open(self.remove());
        }
    }
}

/// A clean-up that failed needs no report: the next open finds what is left and removes it.
pub(crate) fn left_for_next_open(_: Result<(), Error>) {}

pub(crate) fn publish(files: &Files, from: &Path, target: &Path) -> Result<Published, Error> {
    let renamed = files.rename_noreplace(from, target);
    let published = match renamed {
        Err(error) if error.io_kind() == Some(io::ErrorKind::AlreadyExists) => Published::Already,
        done => done.map(|()| Published::New)?,
    };
    // Also when it exists already: the process that published it may have died before this sync.
    files.sync_dir(parent(target))?;
    Ok(published)
}

pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

fn seal_tree(files: &Files, path: &Path) -> Result<(), Error> {
    for entry in files.list(path)? {
        let path = path.join(entry.name);
        match entry.kind {
            Kind::Dir => seal_tree(files, &path)?,
            Kind::File => files.seal(&path)?,
            Kind::Other => return Err(Error::corrupt(path, "neither a file nor a directory")),
        }
    }
    Ok(())
}

pub(crate) fn sync_tree(files: &Files, path: &Path) -> Result<(), Error> {
    for entry in files.list(path)? {
        let path = path.join(entry.name);
        match entry.kind {
            Kind::Dir => sync_tree(files, &path)?,
            _ => files.sync_file(&path)?,
        }
    }
    files.sync_dir(path)
}

/// Makes the entries of every directory of a tree durable, not the content of its files.
pub(crate) fn sync_dirs(files: &Files, path: &Path) -> Result<(), Error> {
    for entry in files.list(path)? {
        if entry.kind == Kind::Dir {
            sync_dirs(files, &path.join(entry.name))?;
        }
    }
    files.sync_dir(path)
}

/// Replaces the file at `path`: afterwards it holds the old bytes or the new ones, whatever happens
/// on the way.
///
/// The temporary file has a fixed name, so only one process may replace a given file at a time.
pub(crate) fn replace(files: &Files, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let new = path.with_extension("new");
    optional(files.remove_file(&new))?;
    let written = files
        .create(&new, bytes)
        .and_then(|()| files.sync_file(&new))
        .and_then(|()| files.rename(&new, path));
    if written.is_err() {
        left_for_next_open(files.remove_file(&new));
    }
    written?;
    files.sync_dir(parent(path))
}

/// Makes sure that there is a directory that not every store has, and that it stays. Synced each
/// time: the process that made it may have died before.
pub(crate) fn ensure_lasting_dir(files: &Files, path: &Path) -> Result<(), Error> {
    files.ensure_dir(path)?;
    files.sync_dir(parent(path))
}

/// Makes a file that others see with all of its content or not at all. Not synced.
pub(crate) fn create_whole(files: &Files, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let new = path.with_extension("new");
    files.create(&new, bytes)?;
    files.rename_noreplace(&new, path)
}

/// The staging directories, whether or not their makers are gone.
pub(crate) fn staged_ids(files: &Files, layout: &Layout) -> Result<Vec<SandboxId>, Error> {
    let entries = files.list(&layout.staging())?;
    Ok(entries
        .iter()
        .filter_map(|entry| entry.name.to_str()?.parse().ok())
        .collect())
}

/// A staging directory, now locked by us; `None` while its maker lives, or once it is gone. One at
/// a time: each holds a descriptor, and there may be more of them than a process can have.
pub(crate) fn stale(
    files: &Files,
    layout: &Layout,
    id: &SandboxId,
) -> Result<Option<Staged>, Error> {
    let shell = layout.staging().join(id.as_str());
    // Under the store's lock: a maker that is about to lock its new directory holds it.
    let _store = lock::store(files, layout)?;
    let lock = optional(files.try_lock(&shell.join("lock")))?.flatten();
    Ok(lock.map(|lock| Staged::adopt(files, layout, shell, lock)))
}
