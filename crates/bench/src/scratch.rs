//! The directory of a run, for everything except the sandboxes in the user's store.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandtree::{Error, Result};

/// Cancelled work may still write for a moment.
const ATTEMPTS: usize = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// A directory next to the store, on the same file system. Dropping it removes it.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn beside(home: &Path) -> Result<Self> {
        let name = home
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let path = home.with_file_name(format!(".{name}-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|e| Error::io("make directory", &path, e))?;
        Ok(Self(path))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Makes a directory in it.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let path = self.path(name);
        std::fs::create_dir_all(&path).map_err(|e| Error::io("make directory", &path, e))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "what a benchmark wrote cannot be removed");
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && attempts > 0 => {
                std::thread::sleep(PAUSE);
            }
            removed => return removed,
        }
    }
}
