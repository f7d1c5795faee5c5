//! The index: a database with the contents of manifests, so that lists are fast.
//!
//! ```text
//! names/images/, snapshots/ ──► which snapshots there are, always
//! index.sqlite              ──► what each of them is; a missing row is read from manifest.json and added
//! ```
//!
//! Always: the directories decide what is listed. A row counts only while the manifest it was made
//! from is unchanged, and only if every row has its checksum. So a list is the same with the index,
//! without it, and with any bytes in its place.
//!
//! When it fails: the list is made from manifests, and the reason is part of it. The next list
//! rebuilds a damaged database; one that is locked, read-only or out of space stays as it is.

mod database;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::image::Arch;
use crate::snapshot::SnapshotNames;
use crate::{Consistency, Digest, Error, Name, Snapshot, Store, lock};
use database::{Database, Origin, Row, Rows, Trouble};

/// A snapshot in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSummary {
    pub digest: Digest,
    #[serde(skip)]
    pub names: Vec<Name>,
    pub created_at_unix_ms: u64,
    pub parent: Option<Digest>,
    pub labels: BTreeMap<String, String>,
    pub image: Name,
    pub image_digest: Digest,
    pub arch: Arch,
    /// What its files have together, each content once, not compressed.
    pub bytes: u64,
    /// Whether it has memory, so that it continues without a boot.
    pub memory: bool,
    pub ram_bytes: u64,
    pub disk_bytes: u64,
    pub consistency: Consistency,
    /// Why it cannot be used. Where that is its manifest, nothing is known of it but its digest and
    /// its names.
    #[serde(skip)]
    pub unreadable: Option<String>,
}

/// Every snapshot by digest, also those without a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    pub snapshots: Vec<SnapshotSummary>,
    /// Why the index was of no use, or could not be written. The list is right all the same.
    pub trouble: Option<String>,
}

/// Of a name whose snapshot is not there.
const MISSING: &str = "its manifest is missing";

/// An index that was rebuilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reindexed {
    pub snapshots: usize,
}

impl SnapshotSummary {
    pub fn new(snapshot: &Snapshot, names: Vec<Name>) -> Self {
        let manifest = &snapshot.manifest;
        Self {
            digest: snapshot.digest.clone(),
            names,
            created_at_unix_ms: manifest.created_at_unix_ms,
            parent: manifest.parent.clone(),
            labels: manifest.labels.clone(),
            image: manifest.image.name.clone(),
            image_digest: manifest.image.digest.clone(),
            arch: manifest.arch,
            bytes: snapshot.bytes(),
            memory: manifest.memory.is_some(),
            ram_bytes: manifest
                .memory
                .as_ref()
                .map_or(manifest.settings.memory_bytes, |memory| memory.bytes),
            disk_bytes: manifest.disk.bytes,
            consistency: manifest.capture.consistency,
            unreadable: None,
        }
    }

    /// A snapshot whose manifest cannot be read; the fields that only the manifest has are empty.
    pub fn unreadable(digest: Digest, names: Vec<Name>, reason: String) -> Self {
        Self {
            image: "unknown".parse().expect("it is a name"),
            image_digest: digest.clone(),
            digest,
            names,
            created_at_unix_ms: 0,
            parent: None,
            labels: BTreeMap::new(),
            arch: Arch::X86_64,
            bytes: 0,
            memory: false,
            ram_bytes: 0,
            disk_bytes: 0,
            consistency: Consistency::Crash,
            unreadable: Some(reason),
        }
    }
}

impl Store {
    /// Every snapshot, by what its manifest says, and every name that says nothing. Whether its
    /// layers are there is looked at only while something that was put aside has not come back.
    pub fn list_snapshots(&self) -> Result<Listing, Error> {
        // Half of the time goes into reading names, of which each is a file.
        let (names, summaries) = std::thread::scope(|scope| {
            let names = scope.spawn(|| self.names_by_snapshot());
            let summaries = self.summaries();
            (
                names.join().expect("reading names does not panic"),
                summaries,
            )
        });
        let SnapshotNames {
            by_digest: mut names,
            unreadable,
        } = names?;
        let (mut snapshots, trouble) = summaries?;
        let damaged = self.lacks_something()?;
        for summary in &mut snapshots {
            summary.names = names.remove(&summary.digest).unwrap_or_default();
            if damaged {
                self.note_what_lacks(summary);
            }
        }
        // A snapshot that was published in the meantime exists.
        let is_lost = |digest: &Digest| {
            matches!(
                self.read_snapshot(digest),
                Err(Error::UnknownSnapshot { .. })
            )
        };
        let lost = names.into_iter().filter(|(digest, _)| is_lost(digest));
        snapshots.extend(
            lost.map(|(digest, names)| SnapshotSummary::unreadable(digest, names, MISSING.into())),
        );
        let nameless = unreadable.into_iter();
        snapshots.extend(nameless.map(|(name, why)| {
            SnapshotSummary::unreadable(Digest::of(&[]), vec![name], why.to_string())
        }));
        Ok(Listing {
            snapshots,
            trouble: trouble.map(|trouble| trouble.to_string()),
        })
    }

    /// Whether a file that snapshots need is in quarantine and has not been replaced since.
    fn lacks_something(&self) -> Result<bool, Error> {
        for entry in self.files.list(&self.layout.quarantine())? {
            let Some((kind, digest)) = entry.name.to_str().and_then(quarantined) else {
                continue;
            };
            let places = match kind {
                "layer" => vec![
                    self.layout.layer(&digest),
                    self.layout.compressed_layer(&digest),
                ],
                "image" => vec![self.layout.image(&digest)],
                "kernel" => vec![self.layout.kernel(&digest)],
                _ => continue,
            };
            let kinds = places
                .iter()
                .map(|path| self.files.kind(path))
                .collect::<Result<Vec<_>, _>>()?;
            if kinds.iter().all(Option::is_none) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Every snapshot, without its names, and what is wrong with the index.
    fn summaries(&self) -> Result<(Vec<SnapshotSummary>, Option<Trouble>), Error> {
        let digests = self.snapshot_digests()?;
        let (mut indexed, origins) = std::thread::scope(|scope| {
            let indexed = scope.spawn(|| self.indexed(&digests));
            let origins: Vec<_> = digests.iter().map(|digest| self.origin(digest)).collect();
            (
                indexed.join().expect("reading the index does not panic"),
                origins,
            )
        });
        let mut found = Found::default();
        for (digest, origin) in digests.into_iter().zip(origins) {
            let row = indexed
                .as_mut()
                .ok()
                .and_then(|rows| rows.known.remove(&digest));
            self.summarize(digest, origin, row, &mut found);
        }
        let written = self.index(&indexed, &found);
        Ok((found.snapshots, indexed.err().or(written.err())))
    }

    /// Marks a snapshot as unusable because a part of it is missing, or is not as
    /// long as it was.
    fn note_what_lacks(&self, summary: &mut SnapshotSummary) {
        let used = self
            .snapshot(&summary.digest)
            .and_then(|snapshot| self.check_image(&snapshot.manifest));
        if let (Err(error), None) = (used, &summary.unreadable) {
            summary.unreadable = Some(error.to_string());
        }
    }

    /// Makes the index anew from every manifest. Of all verbs this alone fails when the index
    /// cannot be written.
    pub fn reindex(&self) -> Result<Reindexed, Error> {
        let mut found = Found::default();
        for digest in self.snapshot_digests()? {
            let origin = self.origin(&digest);
            self.summarize(digest, origin, None, &mut found);
        }
        if let Some(path) = self.index_path() {
            let made = self.index_anew(&path, &found);
            made.map_err(|trouble| Error::Index {
                path,
                what: trouble.to_string(),
            })?;
        }
        Ok(Reindexed {
            snapshots: found.fresh.len(),
        })
    }

    /// Adds a snapshot to what was found, from its row if that is still true, or else from its
    /// manifest. One that went since its directory was listed was removed, which is no news.
    fn summarize(
        &self,
        digest: Digest,
        origin: Option<Origin>,
        row: Option<Row>,
        found: &mut Found,
    ) {
        if let Some(row) = row.filter(|row| Some(row.origin) == origin) {
            return found.snapshots.push(row.summary);
        }
        match (self.read_snapshot(&digest), origin) {
            (Err(Error::UnknownSnapshot { .. }), _) => {}
            (Err(error), _) => found.snapshots.push(SnapshotSummary::unreadable(
                digest,
                Vec::new(),
                error.to_string(),
            )),
            (Ok(snapshot), origin) => {
                let summary = SnapshotSummary::new(&snapshot, Vec::new());
                found.fresh.extend(origin.map(|origin| Row {
                    origin,
                    summary: summary.clone(),
                }));
                found.snapshots.push(summary);
            }
        }
    }

    /// Which file a snapshot's manifest is now.
    fn origin(&self, digest: &Digest) -> Option<Origin> {
        let stat = self
            .files
            .stat(&self.layout.snapshot(digest).join("manifest.json"))
            .ok()?;
        Some(Origin {
            inode: stat.id.1,
            bytes: stat.len,
        })
    }

    /// The rows of these snapshots, or why there are none.
    fn indexed(&self, digests: &[Digest]) -> Result<Rows, Trouble> {
        let Some(path) = self.index_path() else {
            return Ok(Rows::default());
        };
        Database::open(&path)?.map_or(Ok(Rows::default()), |database| database.rows(digests))
    }

    /// Adds the missing rows to the index, and removes the rows that are of no use any more.
    fn index(&self, indexed: &Result<Rows, Trouble>, found: &Found) -> Result<(), Trouble> {
        let Some(path) = self.index_path() else {
            return Ok(());
        };
        match indexed {
            Ok(rows) if found.fresh.is_empty() && rows.others.is_empty() => Ok(()),
            Ok(rows) => Database::create(&path)?.put(&found.fresh, &rows.others),
            Err(Trouble::Damaged(_)) => self.index_anew(&path, found),
            Err(Trouble::Unusable(_)) => Ok(()),
        }
    }

    /// Under the store's lock, so that no process removes what another has just made.
    fn index_anew(&self, path: &Path, found: &Found) -> Result<(), Trouble> {
        let unusable = |error: Error| Trouble::Unusable(error.to_string());
        let _store = lock::store(&self.files, &self.layout).map_err(unusable)?;
        self.layout
            .index_files()
            .iter()
            .try_for_each(|file| self.files.remove_tree(file))
            .map_err(unusable)?;
        Database::create(path)?.put(&found.fresh, &[])
    }

    /// Where the database is, if there can be one: it is not written through the seam.
    fn index_path(&self) -> Option<PathBuf> {
        self.files.has_paths().then(|| self.layout.index())
    }
}

/// What `<kind>-<digest>[-n]` in `quarantine/` was.
fn quarantined(name: &str) -> Option<(&str, Digest)> {
    let (kind, rest) = name.split_once('-')?;
    let digest = rest.split('-').next()?.parse().ok()?;
    Some((kind, digest))
}

/// What a look at all snapshots found.
#[derive(Debug, Default)]
struct Found {
    snapshots: Vec<SnapshotSummary>,
    /// What the index does not know yet.
    fresh: Vec<Row>,
}
