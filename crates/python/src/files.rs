//! Files in a guest. Their names are bytes, which JSON cannot carry.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use bytes::Bytes;
use pyo3::prelude::{Py, PyAny, PyResult, pyclass, pymethods};
use sandtree::{FileKind, FileOwner, Stat, Transfer};

use crate::config::absolute;
use crate::convert::Blob;
use crate::runtime::{self, Operation};

/// Kind, mode, uid, gid, size, time of modification in nanoseconds, target of a link.
type StatTuple = (&'static str, u32, u32, u32, u64, i64, OsString);

fn tuple(stat: Stat) -> StatTuple {
    let kind = match stat.kind {
        FileKind::File => "file",
        FileKind::Dir => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Other => "other",
    };
    let target = OsString::from_vec(stat.target);
    (
        kind,
        stat.mode,
        stat.uid,
        stat.gid,
        stat.size,
        stat.modified_ns,
        target,
    )
}

fn transferred(transfer: Transfer) -> (u64, Vec<String>) {
    (transfer.bytes, transfer.skipped)
}

#[pyclass(frozen)]
#[derive(Debug)]
pub struct Files {
    sandbox: sandtree::Sandbox,
}

impl Files {
    pub fn new(sandbox: sandtree::Sandbox) -> Self {
        Self { sandbox }
    }
}

#[pymethods]
impl Files {
    fn read(&self, path: PathBuf, limit: usize, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(done, async move {
            let bytes = sandbox.files().await?.read_to_vec(path, limit).await?;
            Ok(Blob(Bytes::from(bytes)))
        })
    }

    /// Owner is mode, uid and gid.
    fn write(
        &self,
        path: PathBuf,
        bytes: Vec<u8>,
        owner: (u32, u32, u32),
        done: Py<PyAny>,
    ) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        let (mode, uid, gid) = owner;
        let owner = FileOwner { mode, uid, gid };
        runtime::start(done, async move {
            let files = sandbox.files().await?;
            files.write(path, &mut &bytes[..], owner).await
        })
    }

    fn stat(&self, path: PathBuf, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(done, async move {
            sandbox.files().await?.stat(path).await.map(tuple)
        })
    }

    fn list(&self, path: PathBuf, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(done, async move {
            let entries = sandbox.files().await?.list(path).await?;
            let named = |entry: sandtree::DirEntry| {
                let name = OsString::from_vec(entry.name);
                (name, tuple(entry.stat))
            };
            Ok(entries.into_iter().map(named).collect::<Vec<_>>())
        })
    }

    fn make_dir(&self, path: PathBuf, mode: u32, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(done, async move {
            sandbox.files().await?.make_dir(path, mode).await
        })
    }

    fn rename(&self, from: PathBuf, to: PathBuf, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(done, async move {
            sandbox.files().await?.rename(from, to).await
        })
    }

    fn remove(&self, path: PathBuf, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(
            done,
            async move { sandbox.files().await?.remove(path).await },
        )
    }

    /// Copies a file or tree of the host into the guest.
    fn upload(&self, from: PathBuf, to: PathBuf, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(done, async move {
            let from = absolute(from)?;
            let files = sandbox.files().await?;
            files.upload(&from, &to).await.map(transferred)
        })
    }

    /// Copies a file or tree of the guest to the host.
    fn download(&self, from: PathBuf, to: PathBuf, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.sandbox.clone();
        runtime::start(done, async move {
            let to = absolute(to)?;
            let files = sandbox.files().await?;
            files.download(&from, &to).await.map(transferred)
        })
    }
}
