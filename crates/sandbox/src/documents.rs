//! What the HTTP server keeps in the store: documents, archives of its clients, and the mark of
//! work that is under way.
//!
//! The server decides what they mean. Here they get their bounds.

use std::io::Write;
use std::path::PathBuf;

use sandtree_store::{Name, Receiving, Shelf, Staged};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::blocking::in_place;
use crate::error::{Error, Result, store_error};
use crate::host::Host;
use crate::moment::now_unix_ms;
use crate::names::parse_name;

/// How long an archive is kept that no build uses.
const KEPT_MS: u64 = 24 * 3600 * 1000;
/// What all archives may take on disk.
const ARCHIVES_BYTES_MAX: u64 = 64 << 30;
const ARCHIVES_MAX: usize = 10_000;

/// Work that is under way. It differs visibly from work whose process died.
#[derive(Debug)]
pub struct Work(Staged);

impl Work {
    pub fn id(&self) -> String {
        self.0.id()
    }
}

/// What is known of an archive.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ArchiveNote {
    bytes: u64,
    used_at_unix_ms: u64,
}

/// An archive that a client sends.
#[derive(Debug)]
pub struct NewArchive {
    receiving: Receiving,
    bytes: u64,
}

impl NewArchive {
    /// Adds bytes; the caller bounds them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes += bytes.len() as u64;
        let written = in_place(|| self.receiving.write_all(bytes));
        written.map_err(|e| Error::io("write", self.receiving.path(), e))
    }

    /// Where its bytes are until it is kept or dropped.
    pub fn path(&self) -> PathBuf {
        self.receiving.path()
    }
}

impl Host {
    /// A document. What cannot be a name is the name of none.
    pub fn document<T>(&self, shelf: Shelf, name: &str) -> Result<Option<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let Ok(name) = name.parse::<Name>() else {
            return Ok(None);
        };
        let read = in_place(|| self.inner.store.document(shelf, &name));
        read.map_err(store_error("read a document"))
    }

    pub fn documents(&self, shelf: Shelf) -> Result<Vec<String>> {
        let listed = in_place(|| self.inner.store.documents(shelf));
        let names = listed.map_err(store_error("list documents"))?;
        Ok(names.iter().map(Name::to_string).collect())
    }

    /// Changes one document, and returns what `change` returns. `None` removes it.
    pub fn change_document<T, R>(
        &self,
        shelf: Shelf,
        name: &str,
        change: impl FnOnce(&mut Option<T>) -> R,
    ) -> Result<R>
    where
        T: Serialize + DeserializeOwned,
    {
        let name = parse_name("name of a document", name)?;
        let changed = in_place(|| self.inner.store.change_document(shelf, &name, change));
        changed.map_err(store_error("write a document"))
    }

    pub fn put_document<T>(&self, shelf: Shelf, name: &str, content: T) -> Result<()>
    where
        T: Serialize + DeserializeOwned,
    {
        self.change_document(shelf, name, |stored| *stored = Some(content))
    }

    pub fn remove_document(&self, shelf: Shelf, name: &str) -> Result<()> {
        let name = parse_name("name of a document", name)?;
        let removed = in_place(|| self.inner.store.remove_document(shelf, &name));
        removed.map_err(store_error("remove a document"))
    }

    /// Marks work as under way, until the result is dropped or this process ends.
    pub fn begin_work(&self) -> Result<Work> {
        let staged = in_place(|| self.inner.store.stage());
        staged.map(Work).map_err(store_error("mark its work"))
    }

    /// Whether the process that began some work still does it.
    pub fn is_at_work(&self, id: &str) -> Result<bool> {
        let at_work = in_place(|| self.inner.store.is_at_work(id));
        at_work.map_err(store_error("look for work under way"))
    }

    /// Makes room for an archive of a client, or refuses it.
    pub fn new_archive(&self) -> Result<NewArchive> {
        let (count, bytes) = self.sweep_archives()?;
        if count >= ARCHIVES_MAX || bytes >= ARCHIVES_BYTES_MAX {
            let rule = "uploads take 64 GiB at most, and are removed after a day: try again later";
            let used = format!("{} MiB", bytes >> 20);
            return Err(Error::invalid("space for an upload", used, rule));
        }
        let receiving = in_place(|| self.inner.store.receive());
        let receiving = receiving.map_err(store_error("receive an archive"))?;
        Ok(NewArchive {
            receiving,
            bytes: 0,
        })
    }

    /// Keeps an archive under a key. Its note comes first: an archive without one is garbage.
    pub fn keep_archive(&self, archive: NewArchive, key: &str) -> Result<()> {
        let NewArchive { receiving, bytes } = archive;
        let note = ArchiveNote {
            bytes,
            used_at_unix_ms: now_unix_ms(),
        };
        self.put_document(Shelf::Uploads, key, note)?;
        let key = parse_name("key of an archive", key)?;
        let kept = in_place(|| self.inner.store.keep_archive(receiving, &key));
        kept.map_err(store_error("keep an archive"))
    }

    /// The file of an archive, which counts as used now.
    pub fn archive(&self, key: &str) -> Result<Option<PathBuf>> {
        let name = parse_name("key of an archive", key)?;
        let found = in_place(|| self.inner.store.archive(&name));
        let Some(path) = found.map_err(store_error("find an archive"))? else {
            return Ok(None);
        };
        let touched =
            self.change_document(Shelf::Uploads, key, |note: &mut Option<ArchiveNote>| {
                note.as_mut()
                    .map(|note| note.used_at_unix_ms = now_unix_ms())
            })?;
        Ok(touched.map(|()| path))
    }

    /// Removes archives that no build has used for a day. Returns the number of the others, and
    /// what they take.
    pub fn sweep_archives(&self) -> Result<(usize, u64)> {
        let now_ms = now_unix_ms();
        let mut count = 0;
        let mut bytes = 0;
        for key in self.documents(Shelf::Uploads)? {
            match self.document::<ArchiveNote>(Shelf::Uploads, &key)? {
                Some(note) if now_ms.saturating_sub(note.used_at_unix_ms) > KEPT_MS => {
                    self.remove_document(Shelf::Uploads, &key)?;
                }
                Some(note) => {
                    count += 1;
                    bytes += note.bytes;
                }
                None => {}
            }
        }
        let archives = in_place(|| self.inner.store.archives());
        for key in archives.map_err(store_error("list archives"))? {
            let note = self.document::<ArchiveNote>(Shelf::Uploads, key.as_str())?;
            if note.is_none() {
                let removed = in_place(|| self.inner.store.remove_archive(&key));
                removed.map_err(store_error("remove an archive"))?;
            }
        }
        Ok((count, bytes))
    }
}
