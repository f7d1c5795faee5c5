//! Locks: `flock` on files of the store, so a lock ends with the process that holds it.
//!
//! | lock | held by | for |
//! |---|---|---|
//! | `lock` | anyone | moments: making or ending a staging directory, taking a sandbox's name away, the names of images and snapshots, showing a snapshot, pins, moving garbage away |
//! | `staging/<id>/lock` | its maker | the work |
//! | `sandboxes/<id>/lock` | the owner of the sandbox | as long as it owns it |
//!
//! Always: `lock` is the last one taken, nothing waits while holding it, and the other two are only
//! ever tried.

use crate::fs::{Files, Lock};
use crate::layout::Layout;
use crate::{Error, SandboxId};

/// Holds the store's own lock.
pub(crate) fn store(files: &Files, layout: &Layout) -> Result<Lock, Error> {
    files.lock(&layout.lock())
}

/// `None` when another process owns the sandbox, or the sandbox has just gone.
pub(crate) fn try_sandbox(
    files: &Files,
    layout: &Layout,
    id: &SandboxId,
) -> Result<Option<Lock>, Error> {
    Ok(crate::fs::optional(files.try_lock(&layout.sandbox(id).join("lock")))?.flatten())
}
