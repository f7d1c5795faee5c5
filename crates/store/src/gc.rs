//! Garbage collection: removing what nothing reaches, while other processes work.
//!
//! ```text
//! without a lock     mark ──► what is not marked is suspected
//! the store's lock   mark again, reading only what is new ──► what is still not marked moves to staging:
//!                    snapshots, sync ──► layers, sync ──► warm images, sync ──► images, sync ──► kernels, sync
//! without a lock     staging is removed
//! ```
//!
//! Always: a snapshot goes, durably, before a layer it lists. Only what has the name of a digest is
//! ever suspected. What cannot be read might reach anything, so with it nothing is removed, and the
//! report says why.
//!
//! When it fails: what was moved was garbage, and goes when the store is opened next.

mod mark;
mod usage;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use usage::{KindUsage, Usage, UsageKind};

use mark::{Marked, Marker};

use crate::fs::{Kind, Lock, optional};
use crate::named::Named;
use crate::publish::Staged;
use crate::{Digest, Error, Name, Store, WarmOf, lock};

/// What `gc` removed, or would.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct GcReport {
    pub removed: Vec<Garbage>,
    /// What the file system got back.
    pub bytes: u64,
    /// Why nothing was removed, if something could not be read.
    pub held_back: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Garbage {
    pub kind: GarbageKind,
    /// A digest, or the name of a reservation.
    pub id: String,
    /// What it took on disk alone: of a layer that a sandbox has, too, nothing.
    pub bytes: u64,
}

/// In the order in which they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GarbageKind {
    /// A name kept for the save of a sandbox that is gone.
    Reservation,
    Snapshot,
    Layer,
    /// A captured boot of an image that nothing reaches.
    Warm,
    Image,
    Kernel,
}

impl fmt::Display for GarbageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Snapshot => "snapshot",
            Self::Layer => "layer",
            Self::Warm => "warm",
            Self::Image => "image",
            Self::Kernel => "kernel",
            Self::Reservation => "reservation",
        })
    }
}

/// The kinds that are files and directories of their own.
const STORED: [GarbageKind; 5] = [
    GarbageKind::Snapshot,
    GarbageKind::Layer,
    GarbageKind::Warm,
    GarbageKind::Image,
    GarbageKind::Kernel,
];

/// Something that may be garbage.
#[derive(Debug)]
struct Suspect {
    what: What,
    path: PathBuf,
    bytes: u64,
}

#[derive(Debug)]
enum What {
    Reservation(Name),
    Stored(GarbageKind, Digest),
}

impl Suspect {
    fn kind(&self) -> GarbageKind {
        match self.what {
            What::Reservation(_) => GarbageKind::Reservation,
            What::Stored(kind, _) => kind,
        }
    }

    fn to_garbage(&self) -> Garbage {
        let id = match &self.what {
            What::Reservation(name) => name.to_string(),
            What::Stored(_, digest) => digest.to_string(),
        };
        Garbage {
            kind: self.kind(),
            id,
            bytes: self.bytes,
        }
    }
}

impl Store {
    /// Removes what no name, pin or sandbox reaches; with `dry_run`, only reports it.
    pub fn gc(&self, dry_run: bool) -> Result<GcReport, Error> {
        let mut marker = Marker::default();
        let marked = marker.mark(self)?;
        let suspects = self.unmarked(&marked)?;
        if dry_run || suspects.is_empty() {
            Ok(report(
                self.confirmed(marked.trouble, &mut marker)?,
                suspects,
            ))
        } else {
            self.sweep(&mut marker, suspects)
        }
    }

    /// Trouble that was seen without the lock may be nothing but somebody's next step.
    fn confirmed(
        &self,
        trouble: Option<String>,
        marker: &mut Marker,
    ) -> Result<Option<String>, Error> {
        if trouble.is_none() {
            return Ok(None);
        }
        let _store = lock::store(&self.files, &self.layout)?;
        Ok(marker.mark(self)?.trouble)
    }

    /// Removes one snapshot with the layers that only it lists, unless something still reaches
    /// them.
    pub(crate) fn collect_snapshot(&self, digest: &Digest) -> Result<(), Error> {
        // One that is not there, or cannot be read, is nothing that could be explained: it is left
        // alone.
        let Ok(snapshot) = self.read_snapshot(digest) else {
            return Ok(());
        };
        // What goes meanwhile, someone else collects.
        let own =
            optional(self.suspect(GarbageKind::Snapshot, digest, self.layout.snapshot(digest)))?;
        let mut suspects: Vec<_> = own.into_iter().collect();
        for blob in snapshot.blobs() {
            for path in [
                self.layout.layer(&blob.digest),
                self.layout.compressed_layer(&blob.digest),
            ] {
                suspects.extend(optional(self.suspect(
                    GarbageKind::Layer,
                    &blob.digest,
                    path,
                ))?);
            }
        }
        let mut marker = Marker::default();
        let marked = marker.mark(self)?;
        self.sweep_if_garbage(&mut marker, &marked, suspects)
    }

    /// Removes one image with its warm states and its kernel, unless something still reaches them.
    pub(crate) fn collect_image(&self, digest: &Digest) -> Result<(), Error> {
        // One that cannot be read does not say which kernel it has: `gc` finds that.
        let kernel = self
            .image_by_digest(digest)
            .ok()
            .map(|image| image.record.kernel);
        let mut marker = Marker::default();
        let marked = marker.mark(self)?;
        let mut suspects = Vec::new();
        let of_image = WarmOf::Image(digest.clone());
        let of_kernel = kernel.clone().map(WarmOf::Kernel);
        let warm = [Some(&of_image), of_kernel.as_ref()]
            .into_iter()
            .flatten()
            .flat_map(|of| marker.warm_of(of))
            .map(|key| (GarbageKind::Warm, key, self.layout.warm(key)));
        let image = (GarbageKind::Image, digest, self.layout.image(digest));
        let kernel = kernel
            .as_ref()
            .map(|kernel| (GarbageKind::Kernel, kernel, self.layout.kernel(kernel)));
        for (kind, digest, path) in warm.chain([image]).chain(kernel) {
            suspects.extend(optional(self.suspect(kind, digest, path))?);
        }
        self.sweep_if_garbage(&mut marker, &marked, suspects)
    }

    fn sweep_if_garbage(
        &self,
        marker: &mut Marker,
        marked: &Marked,
        mut suspects: Vec<Suspect>,
    ) -> Result<(), Error> {
        suspects.retain(|suspect| self.is_garbage(suspect, marked).unwrap_or(false));
        if suspects.is_empty() {
            Ok(())
        } else {
            self.sweep(marker, suspects).map(drop)
        }
    }

    fn sweep(&self, marker: &mut Marker, suspects: Vec<Suspect>) -> Result<GcReport, Error> {
        let staged = self.stage()?;
        match self.move_garbage(marker, suspects, &staged) {
            Ok(report) => staged.discard().map(|()| report),
            Err(error) => {
                // A rename that is not durable yet must not be followed by a removal.
                staged.keep();
                Err(error)
            }
        }
    }

    fn move_garbage(
        &self,
        marker: &mut Marker,
        suspects: Vec<Suspect>,
        staged: &Staged,
    ) -> Result<GcReport, Error> {
        let held = lock::store(&self.files, &self.layout)?;
        let marked = marker.mark(self)?;
        if marked.trouble.is_some() {
            return Ok(report(marked.trouble, Vec::new()));
        }
        let mut garbage = Vec::new();
        for suspect in suspects {
            if self.is_garbage(&suspect, &marked)? {
                garbage.push(suspect);
            }
        }
        self.move_to(&held, staged.path(), &garbage)?;
        Ok(report(None, garbage))
    }

    fn move_to(&self, held: &Lock, staging: &Path, garbage: &[Suspect]) -> Result<(), Error> {
        for suspect in garbage {
            if let What::Reservation(name) = &suspect.what {
                self.drop_name(held, name)?;
            }
        }
        for kind in STORED {
            let of_kind = garbage.iter().filter(|suspect| suspect.kind() == kind);
            for (path, name) in
                of_kind.filter_map(|suspect| Some((&suspect.path, suspect.path.file_name()?)))
            {
                let target = staging.join(format!("{kind:?}-{}", name.display()));
                optional(self.files.rename_noreplace(path, &target))?;
            }
            self.files.sync_dir(&self.dir_of(kind))?;
        }
        Ok(())
    }

    fn dir_of(&self, kind: GarbageKind) -> PathBuf {
        match kind {
            GarbageKind::Reservation => self.layout.image_names(),
            GarbageKind::Snapshot => self.layout.snapshots(),
            GarbageKind::Layer => self.layout.layers(),
            GarbageKind::Warm => self.layout.warm_dir(),
            GarbageKind::Image => self.layout.images(),
            GarbageKind::Kernel => self.layout.kernels(),
        }
    }

    fn is_garbage(&self, suspect: &Suspect, marked: &Marked) -> Result<bool, Error> {
        let (kind, digest) = match &suspect.what {
            What::Reservation(name) => return self.is_void(name),
            What::Stored(kind, digest) => (kind, digest),
        };
        let reached = match kind {
            GarbageKind::Reservation => return Ok(false),
            GarbageKind::Snapshot => &marked.snapshots,
            GarbageKind::Layer => &marked.layers,
            GarbageKind::Warm => &marked.warm,
            GarbageKind::Image => &marked.images,
            GarbageKind::Kernel => &marked.kernels,
        };
        Ok(!reached.contains(digest))
    }

    /// Whether a name is kept for the save of a sandbox that is gone.
    fn is_void(&self, name: &Name) -> Result<bool, Error> {
        let reserved = matches!(self.read_name(name)?, Some(Named::Reserved(_)));
        Ok(reserved && self.named(name)?.is_none())
    }

    fn unmarked(&self, marked: &Marked) -> Result<Vec<Suspect>, Error> {
        let mut found = self.void_reservations()?;
        for kind in STORED {
            let dir = self.dir_of(kind);
            for entry in self.files.list(&dir)? {
                let Some(digest) = entry.name.to_str().and_then(|name| digest_in(kind, name))
                else {
                    continue;
                };
                // What went meanwhile is no news.
                let suspect = optional(self.suspect(kind, &digest, dir.join(&entry.name)))?;
                found.extend(suspect);
            }
        }
        found.retain(|suspect| self.is_garbage(suspect, marked).unwrap_or(false));
        Ok(found)
    }

    fn void_reservations(&self) -> Result<Vec<Suspect>, Error> {
        let entries = self.files.list(&self.layout.image_names())?;
        let names = entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse::<Name>().ok());
        let suspect = |name: Name| Suspect {
            path: self.layout.image_name(&name),
            what: What::Reservation(name),
            bytes: 0,
        };
        Ok(names.map(suspect).collect())
    }

    fn suspect(&self, kind: GarbageKind, digest: &Digest, path: PathBuf) -> Result<Suspect, Error> {
        let bytes = self.freed_bytes(&path)?;
        Ok(Suspect {
            what: What::Stored(kind, digest.clone()),
            path,
            bytes,
        })
    }

    /// What removing a file or a directory gives back: of a file with another name, nothing.
    fn freed_bytes(&self, path: &Path) -> Result<u64, Error> {
        let stat = self.files.stat(path)?;
        if self.files.kind(path)? != Some(Kind::Dir) {
            return Ok(if stat.links == 1 { stat.disk_bytes } else { 0 });
        }
        let mut bytes = stat.disk_bytes;
        for entry in self.files.list(path)? {
            bytes += self.freed_bytes(&path.join(entry.name))?;
        }
        Ok(bytes)
    }
}

fn digest_in(kind: GarbageKind, name: &str) -> Option<Digest> {
    let name = if kind == GarbageKind::Layer {
        name.strip_suffix(".zst").unwrap_or(name)
    } else {
        name
    };
    name.parse().ok()
}

fn report(held_back: Option<String>, suspects: Vec<Suspect>) -> GcReport {
    let removed: Vec<_> = match held_back {
        Some(_) => Vec::new(),
        None => suspects.iter().map(Suspect::to_garbage).collect(),
    };
    GcReport {
        bytes: removed.iter().map(|garbage| garbage.bytes).sum(),
        removed,
        held_back,
    }
}
