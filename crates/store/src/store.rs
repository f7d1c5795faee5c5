//! An opened store: its format, and what a process that died left in it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::error::Error;
use crate::fs::{self, Files, Fs, io_error};
use crate::id::{BatchId, SandboxId};
use crate::layout::{FORMAT, FORMAT_MAGIC, Layout, UPGRADED};
use crate::lock;
use crate::publish::{self, Staged};

/// An opened store.
#[derive(Debug)]
pub struct Store {
    pub(crate) files: Files,
    pub(crate) layout: Layout,
    recovered: Vec<Recovered>,
}

/// What opening the store found left over from a process that died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovered {
    /// Work that was never published.
    Unfinished,
    /// A sandbox whose creation or removal was interrupted. It is gone now, with its name.
    Sandbox { id: SandboxId },
    /// A leftover that could not be dealt with yet, and why: some process may still be writing
    /// there.
    Kept { id: SandboxId, reason: String },
}

impl Store {
    /// Opens the store at `root`, made if missing, and removes what dead processes left unfinished.
    /// A root that belongs to another user, or that other users may write to, is refused: its
    /// records decide what machines are started.
    pub fn open(root: &Path) -> Result<Self, Error> {
        // Absolute, because paths of the store are handed to processes with other working
        // directories.
        let root = fs::absolute(root)?;
        let parent = publish::parent(&root);
        std::fs::create_dir_all(parent).map_err(io_error("create directory", parent))?;
        Files::new(Arc::new(fs::Disk)).ensure_dir(&root)?;
        require_own(&root)?;
        Self::open_on(Arc::new(fs::Disk), &root)
    }

    pub(crate) fn open_on(fs: Arc<dyn Fs>, root: &Path) -> Result<Self, Error> {
        let mut store = Self {
            files: Files::new(fs),
            layout: Layout::new(root),
            recovered: Vec::new(),
        };
        store.files.ensure_dir(root)?;
        store.check_or_write_format()?;
        store.recovered = store.recover()?;
        Ok(store)
    }

    pub fn root(&self) -> &Path {
        self.layout.root()
    }

    /// What open had to clean up.
    pub fn recovered(&self) -> &[Recovered] {
        &self.recovered
    }

    /// Bytes an ordinary user can still write.
    pub fn disk_free_bytes(&self) -> Result<u64, Error> {
        self.files.free_bytes(self.root())
    }

    /// A new directory to build something in. Dropped, it is gone.
    pub fn stage(&self) -> Result<Staged, Error> {
        Staged::new(&self.files, &self.layout, &SandboxId::random()?)
    }

    /// Whether the process that works in a staging directory still lives.
    pub fn is_at_work(&self, id: &str) -> Result<bool, Error> {
        let Ok(id) = id.parse::<SandboxId>() else {
            return Ok(false);
        };
        let shell = self.layout.staging().join(id.as_str());
        if self.files.kind(&shell)?.is_none() {
            return Ok(false);
        }
        let tried = fs::optional(self.files.try_lock(&shell.join("lock")))?;
        Ok(matches!(tried, Some(None)))
    }

    /// The same store, for what outlives a borrow of it.
    pub(crate) fn handle(&self) -> Self {
        Self {
            files: self.files.clone(),
            layout: self.layout.clone(),
            recovered: Vec::new(),
        }
    }

    fn check_or_write_format(&self) -> Result<(), Error> {
        match self.files.read_if_exists(&self.layout.format())? {
            Some(bytes) => self.check_format(&bytes),
            None => self.write_format(),
        }
    }

    fn check_format(&self, bytes: &[u8]) -> Result<(), Error> {
        let root = self.root().to_owned();
        let text = std::str::from_utf8(bytes).unwrap_or_default();
        let number = text
            .strip_suffix('\n')
            .and_then(|line| line.strip_prefix(FORMAT_MAGIC)?.trim().parse().ok());
        match number {
            Some(FORMAT) => Ok(()),
            Some(UPGRADED) => self.upgrade(),
            Some(found) if found > FORMAT => Err(Error::NewerFormat {
                root,
                found,
                known: FORMAT,
            }),
            Some(found) => Err(Error::OlderFormat {
                root,
                found,
                known: FORMAT,
            }),
            None => Err(Error::NotAStore { root }),
        }
    }

    /// The format is written last: a root with a format is a whole store.
    fn write_format(&self) -> Result<(), Error> {
        self.refuse_foreign_root()?;
        let store = lock::store(&self.files, &self.layout)?;
        if let Some(bytes) = self.files.read_if_exists(&self.layout.format())? {
            drop(store);
            return self.check_format(&bytes);
        }
        self.finish_format()
    }

    fn finish_format(&self) -> Result<(), Error> {
        for dir in self.layout.dirs() {
            self.files.ensure_dir(&dir)?;
        }
        self.files.sync_dir(&self.root().join("names"))?;
        publish::replace(
            &self.files,
            &self.layout.format(),
            format!("{FORMAT_MAGIC} {FORMAT}\n").as_bytes(),
        )?;
        self.files.sync_dir(publish::parent(self.root()))
    }

    /// The format before ours had no snapshots. The number changes last: until then it is still
    /// that format.
    fn upgrade(&self) -> Result<(), Error> {
        let _store = lock::store(&self.files, &self.layout)?;
        self.finish_format()
    }

    fn refuse_foreign_root(&self) -> Result<(), Error> {
        let entries = self.files.list(self.root())?;
        let foreign = |entry: &fs::Entry| !entry.name.to_str().is_some_and(Layout::is_ours);
        if entries.iter().any(foreign) {
            return Err(Error::NotAStore {
                root: self.root().to_owned(),
            });
        }
        Ok(())
    }

    /// Deals with every staging directory whose maker is gone; see the table in `layout`.
    fn recover(&self) -> Result<Vec<Recovered>, Error> {
        let mut recovered = Vec::new();
        let mut batches = Vec::new();
        for id in publish::staged_ids(&self.files, &self.layout)? {
            let Some(staged) = publish::stale(&self.files, &self.layout, &id)? else {
                continue;
            };
            match self.is_batch(&staged) {
                Ok(false) => recovered.push(self.recover_one(id, staged)),
                Ok(true) => {
                    staged.keep();
                    batches.push(id);
                }
                Err(error) => recovered.push(kept(id, staged, &error)),
            }
        }
        // Last, because a sandbox that is still being created needs its batch to be judged.
        for id in batches {
            let Some(staged) = publish::stale(&self.files, &self.layout, &id)? else {
                continue;
            };
            match self.is_needed(&BatchId::of_staged(&id)) {
                Ok(false) => {
                    publish::left_for_next_open(staged.discard());
                    recovered.push(Recovered::Unfinished);
                }
                Ok(true) => staged.keep(),
                Err(error) => recovered.push(kept(id, staged, &error)),
            }
        }
        Ok(recovered)
    }

    /// A process that died may have renamed something to or from staging and not synced it. Before
    /// what is left is removed, it must not be able to come back.
    fn settle(&self) -> Result<(), Error> {
        self.layout
            .published()
            .iter()
            .try_for_each(|dir| self.files.sync_dir(dir))?;
        // Not every store has volumes.
        fs::optional(self.files.sync_dir(&self.layout.volumes())).map(drop)
    }

    fn recover_one(&self, id: SandboxId, staged: Staged) -> Recovered {
        let finished = match self
            .settle()
            .and_then(|()| self.finish_interrupted(&id, &staged))
        {
            Ok(was_sandbox) => staged.discard().map(|()| was_sandbox),
            Err(error) => {
                // Its files are the only clue to what happened: they stay for the next open.
                staged.keep();
                Err(error)
            }
        };
        match finished {
            Ok(true) => Recovered::Sandbox { id },
            Ok(false) => Recovered::Unfinished,
            Err(error) => Recovered::Kept {
                id,
                reason: error.to_string(),
            },
        }
    }
}

/// What cannot be judged now stays for the next open.
fn kept(id: SandboxId, staged: Staged, error: &Error) -> Recovered {
    staged.keep();
    Recovered::Kept {
        id,
        reason: error.to_string(),
    }
}

/// Fails if another user can write to the directory.
fn require_own(root: &Path) -> Result<(), Error> {
    let found = std::fs::metadata(root).map_err(io_error("look at", root))?;
    let owner = found.uid();
    let user = rustix::process::geteuid().as_raw();
    if owner != user {
        return Err(Error::ForeignRoot {
            root: root.to_owned(),
            owner,
            user,
        });
    }
    let mode = found.mode() & 0o777;
    match mode & 0o022 {
        0 => Ok(()),
        _ => Err(Error::OpenRoot {
            root: root.to_owned(),
            mode,
        }),
    }
}
