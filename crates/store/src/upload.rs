//! Archives that clients sent for builds of templates.
//!
//! ```text
//! staging/<id>/tree/archive ── complete ──► server/archives/<key>.tar
//! ```
//!
//! Always: an archive has its name only when it is complete. What is received and never completed
//! is in `staging/`, and goes with its process.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use crate::fs::optional;
use crate::publish::Staged;
use crate::{Error, Name, Store, publish};

const ARCHIVE: &str = "archive";

/// An archive that is being received.
#[derive(Debug)]
pub struct Receiving {
    staged: Staged,
    file: File,
}

impl Write for Receiving {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Receiving {
    /// Where its bytes are.
    pub fn path(&self) -> PathBuf {
        self.staged.path().join(ARCHIVE)
    }
}

impl Store {
    pub fn receive(&self) -> Result<Receiving, Error> {
        let staged = self.stage()?;
        let file = self.files.new_file(&staged.path().join(ARCHIVE))?;
        Ok(Receiving { staged, file })
    }

    /// Keeps an archive under a key, in place of an earlier one.
    pub fn keep_archive(&self, received: Receiving, key: &Name) -> Result<(), Error> {
        let Receiving { staged, file } = received;
        drop(file);
        publish::ensure_lasting_dir(&self.files, &self.layout.server())?;
        publish::ensure_lasting_dir(&self.files, &self.layout.archives())?;
        let target = self.archive_path(key);
        optional(self.files.remove_file(&target))?;
        staged.publish_file(ARCHIVE, &target).map(drop)
    }

    /// The file of an archive, if there is one.
    pub fn archive(&self, key: &Name) -> Result<Option<PathBuf>, Error> {
        let path = self.archive_path(key);
        Ok(self.files.kind(&path)?.map(|_| path))
    }

    /// The keys of all archives.
    pub fn archives(&self) -> Result<Vec<Name>, Error> {
        let listed = optional(self.files.list(&self.layout.archives()))?.unwrap_or_default();
        let key = |entry: &crate::fs::Entry| {
            let key = entry.name.to_str()?.strip_suffix(".tar")?;
            key.parse().ok()
        };
        Ok(listed.iter().filter_map(key).collect())
    }

    pub fn remove_archive(&self, key: &Name) -> Result<(), Error> {
        let path = self.archive_path(key);
        optional(self.files.remove_file(&path))?;
        optional(self.files.sync_dir(publish::parent(&path))).map(drop)
    }

    fn archive_path(&self, key: &Name) -> PathBuf {
        self.layout.archives().join(format!("{key}.tar"))
    }
}
