//! Snapshots, as callers of a [`Host`] manage them: listed, inspected, verified, moved, removed.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sandtree_store::{
    self as store, Digest, ExportSpec, GcReport, Name, Named, SaveTarget, Snapshot,
    SnapshotManifest, SnapshotSummary, Target, Usage, Verified,
};
use serde::{Deserialize, Serialize};

use crate::blocking::blocking;
use crate::boxed::Boxed;
use crate::error::{Error, Result, store_error};
use crate::held::Held;
use crate::host::Host;
use crate::info::rfc3339;
use crate::inner::Inner;
use crate::names::parse_name;
use crate::order::Wanted;
use crate::progress::{Progress, Watched};
use crate::publish::name_error;
use crate::reference::{Point, Reference, no_snapshot};
use crate::states::Replace;

/// A snapshot as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SnapshotInfo {
    pub names: Vec<String>,
    pub digest: String,
    /// Its directory, if it is not in the store.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub path: Option<PathBuf>,
    /// RFC 3339, in UTC.
    pub created_at: String,
    pub created_at_unix_ms: u64,
    pub parent: Option<String>,
    pub labels: std::collections::BTreeMap<String, String>,
    pub image: String,
    pub image_digest: String,
    pub arch: String,
    /// The size of all its files.
    pub bytes: u64,
    /// With memory, a sandbox from it continues exactly there.
    pub memory: bool,
    pub memory_bytes: u64,
    pub disk_bytes: u64,
    pub consistency: String,
    /// Why it cannot be used.
    pub unreadable: Option<String>,
}

impl SnapshotInfo {
    fn new(summary: SnapshotSummary, path: Option<PathBuf>) -> Self {
        Self {
            names: summary.names.into_iter().map(String::from).collect(),
            digest: summary.digest.into(),
            path,
            created_at: rfc3339(summary.created_at_unix_ms),
            created_at_unix_ms: summary.created_at_unix_ms,
            parent: summary.parent.map(String::from),
            labels: summary.labels,
            image: summary.image.into(),
            image_digest: summary.image_digest.into(),
            arch: summary.arch.to_string(),
            bytes: summary.bytes,
            memory: summary.memory,
            memory_bytes: summary.ram_bytes,
            disk_bytes: summary.disk_bytes,
            consistency: summary.consistency.to_string(),
            unreadable: summary.unreadable,
        }
    }
}

/// Every snapshot, oldest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotList {
    pub snapshots: Vec<SnapshotInfo>,
    /// Why the index cannot be used. The list is right anyway.
    pub trouble: Option<String>,
}

impl SnapshotList {
    fn new(mut snapshots: Vec<SnapshotInfo>, trouble: Option<String>) -> Self {
        snapshots.sort_by(|a, b| {
            (a.created_at_unix_ms, &a.names).cmp(&(b.created_at_unix_ms, &b.names))
        });
        Self { snapshots, trouble }
    }
}

/// All information about a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SnapshotDetails {
    pub names: Vec<String>,
    pub digest: String,
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub path: Option<PathBuf>,
    pub created_at: String,
    #[cfg_attr(feature = "schema", schema(value_type = serde_json::Value))]
    pub manifest: SnapshotManifest,
}

/// A snapshot in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exported {
    pub digest: String,
    /// The size of its content.
    pub content_bytes: u64,
    /// The size of the file.
    pub file_bytes: u64,
}

/// The result of an import.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Imported {
    pub digest: String,
    pub name: String,
    pub bytes: u64,
    pub memory: bool,
}

impl Host {
    pub async fn snapshots(&self) -> Result<SnapshotList> {
        let host = self.inner.clone();
        let listing = blocking(move || host.store.list_snapshots())
            .await
            .map_err(store_error("list its snapshots"))?;
        let snapshots = listing
            .snapshots
            .into_iter()
            .map(|summary| SnapshotInfo::new(summary, None));
        Ok(SnapshotList::new(snapshots.collect(), listing.trouble))
    }

    /// The snapshots that are directories in `dir`.
    pub fn snapshots_in(dir: &Path) -> Result<SnapshotList> {
        let failed = |e| Error::io("list", dir, e);
        let mut snapshots = Vec::new();
        for entry in dir.read_dir().map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str()?.parse().ok());
            let (Some(name), true) = (name, path.join("manifest.json").is_file()) else {
                continue;
            };
            let summary = match store::Store::read_dir_snapshot(&path) {
                Ok(snapshot) => SnapshotSummary::new(&snapshot, vec![name]),
                Err(error) => SnapshotSummary::unreadable(
                    store::Digest::of(&[]),
                    vec![name],
                    error.to_string(),
                ),
            };
            snapshots.push(SnapshotInfo::new(summary, Some(path)));
        }
        Ok(SnapshotList::new(snapshots, None))
    }

    pub fn inspect_snapshot<'a>(
        &'a self,
        reference: &'a str,
    ) -> Boxed<'a, Result<SnapshotDetails>> {
        Box::pin(async move {
            let parsed = Reference::parse(reference)?;
            if let Reference::Path(path) = &parsed {
                let snapshot = store::Store::read_dir_snapshot(path)
                    .map_err(store_error("read a snapshot"))?;
                return Ok(details(&snapshot, Vec::new(), Some(path.clone())));
            }
            let snapshot = self.inner.snapshot(&parsed, Progress::silent()).await?;
            let names = self.inner.names_of(&snapshot.digest)?;
            Ok(details(
                &snapshot,
                names.into_iter().map(String::from).collect(),
                None,
            ))
        })
    }

    /// Reads every byte of a snapshot and of its image. Damaged files are moved aside and named.
    pub fn verify<'a>(
        &'a self,
        reference: &'a str,
        progress: Progress,
    ) -> Boxed<'a, Result<Verified>> {
        Box::pin(async move {
            let host = self.inner.clone();
            let verified = match Reference::parse(reference)? {
                Reference::Path(path) => {
                    Watched::run(progress, move |p| store::Store::verify_dir(&path, p)).await
                }
                named => {
                    let digest = host
                        .digest_of(&named)?
                        .ok_or_else(|| no_snapshot(reference))?;
                    Watched::run(progress, move |p| host.store.verify_snapshot(&digest, p)).await
                }
            };
            verified.map_err(store_error("verify a snapshot"))
        })
    }

    /// Removes a snapshot's name; with its last name, the snapshot is removed. A directory is
    /// removed as a whole.
    pub fn remove_snapshot<'a>(&'a self, reference: &'a str) -> Boxed<'a, Result<()>> {
        Box::pin(async move {
            let host = self.inner.clone();
            let parsed = Reference::parse(reference)?;
            let text = reference.to_owned();
            blocking(move || match parsed {
                Reference::Name(name) => match host.store.remove_snapshot_name(&name) {
                    Err(store::Error::UnknownSnapshot { .. }) => Err(no_snapshot(&text)),
                    // A name with invalid content is put aside, and the name is free.
                    Err(store::Error::Corrupt { .. }) => host
                        .store
                        .put_name_aside(&name)
                        .map_err(store_error("remove a snapshot")),
                    removed => removed.map(drop).map_err(store_error("remove a snapshot")),
                },
                Reference::Path(path) => remove_dir(&path),
                Reference::Digest(digest) => {
                    let its = host.names_of(&digest)?;
                    if its.is_empty() {
                        let pinned = host.store.pin(&digest).map_err(|_| no_snapshot(&text))?;
                        return host
                            .store
                            .let_go(pinned)
                            .map_err(store_error("remove a snapshot"));
                    }
                    let removed = its
                        .iter()
                        .try_for_each(|name| host.store.remove_snapshot_name(name).map(drop));
                    removed.map_err(store_error("remove a snapshot"))
                }
            })
            .await
        })
    }

    pub async fn tag_snapshot(&self, reference: &str, name: &str, replace: Replace) -> Result<()> {
        let name = parse_name("snapshot name", name)?;
        self.inner
            .check_free(&SaveTarget::Name(name.clone()), replace, None)?;
        let pinned = self
            .inner
            .snapshot(&Reference::parse(reference)?, Progress::silent())
            .await?;
        let host = self.inner.clone();
        let tagging = move || {
            host.replacing(&name, || {
                host.store
                    .tag_snapshot(&pinned.digest, &name, replace.is_yes())
            })
        };
        blocking(tagging).await.map_err(name_error)
    }

    /// Rebuilds the index; returns its number of snapshots.
    pub async fn reindex(&self) -> Result<usize> {
        let host = self.inner.clone();
        let done = blocking(move || host.store.reindex())
            .await
            .map_err(store_error("make its index anew"))?;
        Ok(done.snapshots)
    }

    /// Writes a snapshot, or the present of a sandbox, into one file.
    pub fn export<'a>(
        &'a self,
        reference: &'a str,
        memory: bool,
        spec: ExportOptions,
        mut out: impl Write + Send + 'static,
        progress: Progress,
    ) -> Boxed<'a, Result<Exported>> {
        Box::pin(async move {
            let point = self.inner.point(reference)?;
            let since = match &spec.since {
                Some(base) => Some(
                    self.inner
                        .snapshot(&Reference::parse(base)?, Progress::silent())
                        .await?,
                ),
                None => None,
            };
            let spec = ExportSpec {
                plain: spec.plain,
                without_image: spec.without_image,
                since: since.as_ref().map(|base| base.digest.clone()),
            };
            let held = self.held_point(point, memory, progress.clone()).await?;
            let host = self.inner.clone();
            let exported = Watched::run(progress, move |progress| {
                let exported = host.store.export(&held, &spec, &mut out, progress)?;
                let store::Exported {
                    bytes_in: content_bytes,
                    bytes_out: file_bytes,
                    ..
                } = exported;
                Ok(Exported {
                    digest: held.digest.to_string(),
                    content_bytes,
                    file_bytes,
                })
            });
            exported.await.map_err(store_error("export a snapshot"))
        })
    }

    /// Writes a snapshot into a self-contained directory.
    pub fn export_dir<'a>(
        &'a self,
        reference: &'a str,
        dir: &'a Path,
        replace: Replace,
        progress: Progress,
    ) -> Boxed<'a, Result<()>> {
        Box::pin(async move {
            let point = self.inner.point(reference)?;
            let held = self.held_point(point, false, progress.clone()).await?;
            let host = self.inner.clone();
            let dir = dir.to_owned();
            let written = Watched::run(progress, move |progress| {
                host.store
                    .export_dir(&held, &dir, replace.is_yes(), progress)
            });
            written
                .await
                .map_err(store_error("write a snapshot into a directory"))
        })
    }

    /// A snapshot for as long as it is needed: an existing one, or a temporary one of a sandbox.
    async fn held_point(&self, point: Point, memory: bool, progress: Progress) -> Result<Held> {
        match point {
            Point::Snapshot(reference) => self.inner.snapshot(&reference, progress).await,
            Point::Sandbox { sandbox, state } => {
                let wanted = match state {
                    Some(state) => Wanted::State(state),
                    None if memory => Wanted::Memory,
                    None => Wanted::Disk,
                };
                let sandbox = self.sandbox(&sandbox)?;
                let loan = sandbox.borrow(wanted).await?;
                let pinned = match self.inner.find(sandbox.id()) {
                    Ok(dir) => self.inner.unnamed(dir, &loan.lent, progress).await,
                    Err(error) => Err(error),
                };
                loan.give_back().await;
                pinned
            }
        }
    }

    /// Imports a snapshot, and checks every byte before a name points at it.
    pub fn import<'a>(
        &'a self,
        mut input: impl Read + Send + 'static,
        name: &'a str,
        replace: Replace,
        progress: Progress,
    ) -> Boxed<'a, Result<Imported>> {
        Box::pin(async move {
            let name = parse_name("snapshot name", name)?;
            self.inner
                .check_free(&SaveTarget::Name(name.clone()), replace, None)?;
            let host = self.inner.clone();
            let target = name.clone();
            let imported = Watched::run(progress, move |progress| {
                let name = Target::Name {
                    name: &target,
                    replace: replace.is_yes(),
                };
                host.replacing(&target, || host.store.import(&mut input, name, progress))
            });
            let imported = imported.await.map_err(import_error)?;
            Ok(Imported {
                digest: imported.digest.to_string(),
                name: name.to_string(),
                bytes: imported.bytes(),
                memory: imported.manifest.memory.is_some(),
            })
        })
    }

    /// Removes garbage; with `dry_run`, only reports it.
    pub fn gc(&self, dry_run: bool) -> Boxed<'_, Result<GcReport>> {
        Box::pin(async move {
            let host = self.inner.clone();
            blocking(move || host.store.gc(dry_run))
                .await
                .map_err(store_error("collect its garbage"))
        })
    }

    /// The use of the store's disk.
    pub async fn usage(&self) -> Result<Usage> {
        let host = self.inner.clone();
        blocking(move || host.store.usage())
            .await
            .map_err(store_error("measure itself"))
    }
}

impl Inner {
    /// The snapshot of a name or digest; `None` for a directory, which is not in the store.
    pub fn digest_of(&self, reference: &Reference) -> Result<Option<Digest>> {
        match reference {
            Reference::Digest(digest) => Ok(Some(digest.clone())),
            Reference::Path(_) => Ok(None),
            Reference::Name(name) => {
                match self.store.named(name).map_err(store_error("read a name"))? {
                    Some(Named::Snapshot(digest)) => Ok(Some(digest)),
                    _ => Ok(None),
                }
            }
        }
    }

    /// Every name of a snapshot.
    fn names_of(&self, digest: &Digest) -> Result<Vec<Name>> {
        let names = self.store.names().map_err(store_error("list names"))?;
        let is_its = |named: &Named| matches!(named, Named::Snapshot(found) if found == digest);
        let its = names
            .into_iter()
            .filter(|(_, named)| named.as_ref().is_ok_and(is_its));
        Ok(its.map(|(name, _)| name).collect())
    }
}

/// The content of an exported file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExportOptions {
    /// Without compression.
    pub plain: bool,
    pub without_image: bool,
    /// Only content that this snapshot lacks.
    pub since: Option<String>,
}

fn details(snapshot: &Snapshot, names: Vec<String>, path: Option<PathBuf>) -> SnapshotDetails {
    SnapshotDetails {
        names,
        digest: snapshot.digest.to_string(),
        path,
        created_at: rfc3339(snapshot.manifest.created_at_unix_ms),
        manifest: snapshot.manifest.clone(),
    }
}

/// Removes only a snapshot's files, so that a directory given by mistake stays.
fn remove_dir(path: &Path) -> Result<()> {
    let manifest = path.join("manifest.json");
    File::open(&manifest).map_err(|e| Error::io("open", &manifest, e))?;
    store::Store::remove_dir_snapshot(path).map_err(store_error("remove a snapshot"))
}

fn import_error(error: store::Error) -> Error {
    match error {
        store::Error::NameInUse { .. } => name_error(error),
        error => store_error("import a snapshot")(error),
    }
}
