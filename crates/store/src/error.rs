//! Errors of the store. Each message states its own fact; the edge prints the chain of sources.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::damage::manifest::ManifestError;
use crate::damage::{artifact, disk, memory};
use crate::id::{Digest, SandboxId, StateId};
use crate::name::Name;
use crate::named::Named;

#[derive(Debug, Error)]
pub enum Error {
    #[error("cannot {operation} {}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not durable: an earlier sync failed, so its content on disk is unknown", path.display())]
    Doubtful { path: PathBuf },
    #[error("{} is a store of format {found}; this program knows formats up to {known}", root.display())]
    NewerFormat {
        root: PathBuf,
        found: u32,
        known: u32,
    },
    #[error("{} is a store of format {found}; this program reads only format {known}", root.display())]
    OlderFormat {
        root: PathBuf,
        found: u32,
        known: u32,
    },
    #[error("{} belongs to user {owner}; this program runs as user {user}", root.display())]
    ForeignRoot {
        root: PathBuf,
        owner: u32,
        user: u32,
    },
    #[error("other users may write to {}: its mode is {mode:04o}", root.display())]
    OpenRoot { root: PathBuf, mode: u32 },
    #[error("{} is not empty and not a sandtree store", root.display())]
    NotAStore { root: PathBuf },
    #[error("{} has schema {found}; this program knows schemas up to {known}", path.display())]
    NewerSchema {
        path: PathBuf,
        found: u64,
        known: u64,
    },
    #[error("{} is damaged: {what}", path.display())]
    Corrupt { path: PathBuf, what: String },
    #[error("cannot write the index {}: {what}", path.display())]
    Index { path: PathBuf, what: String },
    #[error("sandbox name {name} is taken by {holder}")]
    NameTaken { name: Name, holder: SandboxId },
    #[error("{name} cannot be the name of a sandbox: 16 hexadecimal digits are an id")]
    NameIsAnId { name: Name },
    #[error("there is no image {name}")]
    UnknownImage { name: Name },
    #[error("there is no sandbox {reference}")]
    UnknownSandbox { reference: String },
    #[error("sandbox {sandbox} has no state {state}")]
    UnknownState { sandbox: SandboxId, state: StateId },
    #[error("{} cannot hold the memory of sandboxes: {rule}", path.display())]
    MemoryDir { path: PathBuf, rule: &'static str },
    #[error("sandbox {id} is in use by another process")]
    Busy { id: SandboxId },
    #[error("invalid disk size of {bytes} bytes: {rule}")]
    DiskSize { bytes: u64, rule: &'static str },
    #[error("invalid guest memory of {bytes} bytes: {rule}")]
    MemorySize { bytes: u64, rule: &'static str },
    #[error("{pages} pages from page {first_page} on cannot be written to a memory layer: {rule}")]
    MemoryPages {
        first_page: u64,
        pages: u64,
        rule: &'static str,
    },
    #[error("the memory layer is damaged: {0}")]
    MemoryLayer(memory::Damage),
    #[error("disk layer {layer} is damaged: {damage}")]
    DiskLayer { layer: usize, damage: disk::Damage },
    #[error("these disk layers do not form a chain: {rule}")]
    DiskChain { rule: &'static str },
    #[error("these disk layers cannot be folded: {rule}")]
    DiskFold { rule: &'static str },
    /// Layers are read and written through open files; only their owner knows the path.
    #[error("cannot {operation} at byte {offset}")]
    LayerIo {
        operation: &'static str,
        offset: u64,
        #[source]
        source: io::Error,
    },
    #[error("invalid artifact: {0}")]
    Artifact(artifact::Damage),
    #[error("cannot {operation} the artifact")]
    ArtifactIo {
        operation: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the artifact needs snapshot {base}, which is not in the store")]
    MissingBase { base: Digest },
    #[error("not enough space: {needed_bytes} bytes are needed, {free_bytes} are free")]
    NotEnoughSpace { needed_bytes: u64, free_bytes: u64 },
    #[error("{} is not the directory of a snapshot{}", path.display(), foreign_entry(.foreign))]
    NotASnapshotDir {
        path: PathBuf,
        /// A file in it that does not belong to a snapshot.
        foreign: Option<PathBuf>,
    },
    #[error("the file for a new layer is not empty")]
    NotEmpty,
    #[error("name {name} is taken by {holder}")]
    NameInUse { name: Name, holder: Named },
    #[error("{name} is the name of {found}, not of {expected}")]
    OtherKind {
        name: Name,
        found: Named,
        expected: &'static str,
    },
    #[error("there is no snapshot {reference}")]
    UnknownSnapshot { reference: String },
    #[error("{} is not a usable snapshot", path.display())]
    Manifest {
        path: PathBuf,
        #[source]
        source: ManifestError,
    },
    #[error("image {name} with the digest {digest} is not in the store{}", other_digest(.name, .here))]
    MissingImage {
        name: Name,
        digest: Digest,
        /// The image that has this name here.
        here: Option<Digest>,
    },
    #[error("invalid labels")]
    Labels(#[source] ManifestError),
    #[error("kernel {digest} is not in the store")]
    MissingKernel { digest: Digest },
    #[error("this snapshot has no memory")]
    NoMemory,
    #[error("the work was cancelled")]
    Cancelled,
    #[error("cannot get random bytes from the system: {0}")]
    Random(getrandom::Error),
}

impl Error {
    /// The error behind an I/O failure, if this is one.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            Self::Io { source, .. }
            | Self::LayerIo { source, .. }
            | Self::ArtifactIo { source, .. } => Some(source.kind()),
            Self::NotEnoughSpace { .. } => Some(io::ErrorKind::StorageFull),
            _ => None,
        }
    }

    pub(crate) fn layer_io(operation: &'static str, offset: u64) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::LayerIo {
            operation,
            offset,
            source,
        }
    }

    pub(crate) fn artifact_io(operation: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::ArtifactIo { operation, source }
    }

    pub(crate) fn corrupt(path: impl Into<PathBuf>, what: impl ToString) -> Self {
        Self::Corrupt {
            path: path.into(),
            what: what.to_string(),
        }
    }
}

fn other_digest(name: &Name, here: &Option<Digest>) -> String {
    here.as_ref()
        .map(|here| format!("; {name} is {here} here"))
        .unwrap_or_default()
}

fn foreign_entry(foreign: &Option<PathBuf>) -> String {
    foreign
        .as_ref()
        .map(|entry| format!(" alone: {} is none of its files", entry.display()))
        .unwrap_or_default()
}

impl From<artifact::Damage> for Error {
    fn from(damage: artifact::Damage) -> Self {
        Self::Artifact(damage)
    }
}
