//! Exports into files of the user's.
//!
//! Always: a file gets its name when it is complete and synced. When it fails, or the future is
//! dropped: no file is left.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sandtree_store::rename_noreplace;

use crate::boxed::Boxed;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::progress::Progress;
use crate::snapshots::{ExportOptions, Exported};
use crate::states::Replace;

/// An export into a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileExport {
    /// A snapshot, a sandbox, or one of its states.
    pub reference: String,
    /// Whether memory and processes of a sandbox are exported, too.
    pub memory: bool,
    pub options: ExportOptions,
    pub path: PathBuf,
    /// Whether a complete export replaces an existing file.
    pub replace: Replace,
}

impl Host {
    /// Writes an artifact into a file that only its owner can read.
    pub fn export_file(
        &self,
        export: FileExport,
        progress: Progress,
    ) -> Boxed<'_, Result<Exported>> {
        Box::pin(async move {
            let unnamed = Unnamed::create(&export)?;
            let writing = unnamed.file.try_clone();
            let writing = writing.map_err(|e| Error::io("write", &unnamed.path, e))?;
            let FileExport {
                reference,
                memory,
                options,
                ..
            } = export;
            let exporting = self.export(&reference, memory, options, writing, progress);
            let exported = exporting.await?;
            unnamed.keep()?;
            Ok(exported)
        })
    }
}

/// A file that gets its name when it is complete. If dropped before, it is removed.
#[derive(Debug)]
struct Unnamed {
    file: File,
    path: PathBuf,
    target: PathBuf,
    replace: Replace,
}

impl Unnamed {
    fn create(export: &FileExport) -> Result<Self> {
        let target = &export.path;
        let shown = target.display();
        if !export.replace.is_yes() && target.exists() {
            let exists = io::ErrorKind::AlreadyExists.into();
            return Err(Error::io("make", target, exists));
        }
        let name = target.file_name();
        let name = name.ok_or_else(|| Error::invalid("output file", shown, "a file's path"))?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}", std::process::id()));
        let path = target.with_file_name(hidden);
        // Only for the owner: it may contain the memory of a guest.
        let opened = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let file = opened.map_err(|e| Error::io("make", &path, e))?;
        Ok(Self {
            file,
            path,
            target: target.clone(),
            replace: export.replace,
        })
    }

    fn keep(self) -> Result<()> {
        self.file
            .sync_all()
            .map_err(|e| Error::io("sync", &self.path, e))?;
        let target = &self.target;
        let named = if self.replace.is_yes() {
            std::fs::rename(&self.path, target)
        } else {
            // Another process may have made the file meanwhile.
            rename_noreplace(&self.path, target)
        };
        named.map_err(|e| Error::io("make", target, e))?;
        let parent = target
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let synced = File::open(parent).and_then(|dir| dir.sync_all());
        synced.map_err(|e| Error::io("sync directory", parent, e))
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        // After a rename there is nothing to remove, and an error has no other consequence.
        drop(std::fs::remove_file(&self.path));
    }
}
