//! Documents: JSON that the HTTP server keeps in the store, one file for each name.
//!
//! ```text
//! server/<shelf>/<name>.json    {"content": …, "schema": 1}; replaced as a whole
//! ```
//!
//! Always: a document is whole and synced. All changes are made while the store's lock is held, so
//! two programs lose none of each other's.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::fs::optional;
use crate::record::{self, Record};
use crate::{Error, Name, Store, lock, publish};

/// A kind of documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shelf {
    /// What the tags of a template are, by the template's name.
    Templates,
    /// Builds of templates, by id.
    Builds,
    /// What the builds wrote, by the same id.
    Logs,
    /// What is known of archives that clients sent, by the archive's key.
    Uploads,
    /// What sandboxes from a snapshot inherit, by the snapshot's name.
    Snapshots,
}

impl Shelf {
    fn dir(self) -> &'static str {
        match self {
            Self::Templates => "templates",
            Self::Builds => "builds",
            Self::Logs => "logs",
            Self::Uploads => "uploads",
            Self::Snapshots => "snapshots",
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Document<T> {
    schema: u64,
    content: T,
}

impl<T: Serialize + DeserializeOwned> Record for Document<T> {
    const SCHEMA: u64 = 1;
}

impl Store {
    pub fn document<T>(&self, shelf: Shelf, name: &Name) -> Result<Option<T>, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let path = self.document_path(shelf, name);
        let read = record::read::<Document<T>>(&self.files, &path);
        Ok(optional(read)?.map(|document| document.content))
    }

    /// The names of all documents of a kind.
    pub fn documents(&self, shelf: Shelf) -> Result<Vec<Name>, Error> {
        let listed = optional(self.files.list(&self.shelf_dir(shelf)))?.unwrap_or_default();
        let name = |entry: &crate::fs::Entry| {
            let name = entry.name.to_str()?.strip_suffix(".json")?;
            name.parse().ok()
        };
        Ok(listed.iter().filter_map(name).collect())
    }

    /// Changes one document, and returns what `change` returns. A document that `change` leaves as
    /// `None` is removed.
    pub fn change_document<T, R>(
        &self,
        shelf: Shelf,
        name: &Name,
        change: impl FnOnce(&mut Option<T>) -> R,
    ) -> Result<R, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        let _alone = lock::store(&self.files, &self.layout)?;
        let mut content = self.document(shelf, name)?;
        let changed = change(&mut content);
        let path = self.document_path(shelf, name);
        match content {
            Some(content) => {
                publish::ensure_lasting_dir(&self.files, &self.layout.server())?;
                publish::ensure_lasting_dir(&self.files, &self.shelf_dir(shelf))?;
                let document = Document {
                    schema: Document::<T>::SCHEMA,
                    content,
                };
                publish::replace(&self.files, &path, &record::canonical(&document))?;
            }
            None => {
                if optional(self.files.remove_file(&path))?.is_some() {
                    self.files.sync_dir(publish::parent(&path))?;
                }
            }
        }
        Ok(changed)
    }

    pub fn put_document<T>(&self, shelf: Shelf, name: &Name, content: T) -> Result<(), Error>
    where
        T: Serialize + DeserializeOwned,
    {
        self.change_document(shelf, name, |stored| *stored = Some(content))
    }

    pub fn remove_document(&self, shelf: Shelf, name: &Name) -> Result<(), Error> {
        let remove = |stored: &mut Option<serde_json::Value>| *stored = None;
        self.change_document(shelf, name, remove)
    }

    fn shelf_dir(&self, shelf: Shelf) -> PathBuf {
        self.layout.server().join(shelf.dir())
    }

    fn document_path(&self, shelf: Shelf, name: &Name) -> PathBuf {
        self.shelf_dir(shelf).join(format!("{name}.json"))
    }
}
