//! Snapshots as directories that need nothing else. They belong to the user, not to the store.
//!
//! ```text
//! <dir>/artifact.json  manifest.json  blobs/<digest> …        the members of an artifact, with its image and all blobs
//! <parent>/.<name>.sandtree-<random>                          one in the making, or on its way out
//! ```
//!
//! Always: a directory appears under its name whole and synced, or not at all; a directory that is
//! replaced exists until the new one does. Nothing in it is linked to the store, because its owner
//! may change it. No file of others is ever removed: a directory that holds one is neither replaced
//! nor removed. When it fails: the unfinished directory is removed. If the process dies, the
//! unfinished directory stays: no command reads a name with a dot, and the user can remove it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::image_files::ImageFiles;
use super::import::{Written, read_head};
use super::intake::{Directory, Intake};
use super::parts::{Part, Scope};
use super::pipeline::Chunk;
use super::record::ArtifactRecord;
use super::{Damage, Member, pipeline, structure};
use crate::blob::Blob;
use crate::fs::{Disk, Files, Kind, absolute, io_error, optional};
use crate::publish::{self, left_for_next_open};
use crate::{
    Damaged, Digest, Error, ImageReference, Pinned, Progress, SandboxId, Snapshot,
    SnapshotManifest, Store, Target, Verified, progress,
};

impl Store {
    /// Writes a snapshot as a directory; with `replace`, instead of the snapshot directory that is
    /// there.
    pub fn export_dir(
        &self,
        snapshot: &Snapshot,
        dir: &Path,
        replace: bool,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let files = self.files.clone();
        let dir = absolute(dir)?;
        let found = occupant(&files, &dir, replace)?;
        let snapshot = self.pin(&snapshot.digest)?;
        let building = Building::new(files, &dir)?;
        self.fill_dir(&building, &snapshot, progress)?;
        building.publish(&dir, found)
    }

    fn fill_dir(
        &self,
        building: &Building,
        snapshot: &Snapshot,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let Building { files, path, .. } = building;
        let record = ArtifactRecord::new(&snapshot.digest, None, true);
        files.create(&path.join(Member::Artifact.to_string()), &record.to_bytes())?;
        files.create(
            &path.join(Member::Manifest.to_string()),
            &snapshot.manifest.to_bytes(),
        )?;
        files.create_dir(&path.join("blobs"))?;
        let parts = self.parts(snapshot, Scope::WithImage)?;
        progress.begin(parts.iter().map(|part| part.blob.bytes).sum());
        parts
            .iter()
            .try_for_each(|part| self.copy_part(part, building, progress))
    }

    /// Shares the data with the store where the file system can; every byte is read in any case.
    fn copy_part(
        &self,
        part: &Part,
        building: &Building,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let to = building
            .path
            .join(Member::Blob(part.blob.digest.clone()).to_string());
        let cloned = match part.plain_path(self)? {
            Some(from) => building.files.clone_file(&from, &to)?,
            None => false,
        };
        let output = if cloned {
            None
        } else {
            Some(building.files.output(&to)?)
        };
        let mut written = Written::new(output);
        let map = self.read_part(part, progress, |_| Ok(|chunk: &Chunk| written.add(chunk)))?;
        written.finish(&map)
    }

    /// Copies a snapshot directory into the store. What the store has whole, which is read there,
    /// is not read here.
    pub fn import_dir(
        &self,
        dir: &Path,
        target: Target<'_>,
        progress: &dyn Progress,
    ) -> Result<Pinned, Error> {
        let files = self.files.clone();
        let dir = absolute(dir)?;
        check_head(&files, &dir)?;
        self.take_in(&mut Directory::new(files, &dir), target, progress)
    }

    /// The snapshot in a directory, if its files exist with the right sizes.
    pub fn read_dir_snapshot(dir: &Path) -> Result<Snapshot, Error> {
        read(&Files::new(Arc::new(Disk)), &absolute(dir)?)
    }

    /// Removes a snapshot directory, whole or damaged. One that is something else, or holds
    /// anything else, stays.
    pub fn remove_dir_snapshot(dir: &Path) -> Result<(), Error> {
        let files = Files::new(Arc::new(Disk));
        let dir = absolute(dir)?;
        require_nothing_else(&files, &dir)?;
        let leaving = beside(&dir)?;
        files.rename_noreplace(&dir, &leaving)?;
        files.sync_dir(publish::parent(&dir))?;
        remove_members(&files, &leaving)
    }

    /// Reads every byte of a snapshot directory. Damage is reported, and the files stay.
    pub fn verify_dir(dir: &Path, progress: &dyn Progress) -> Result<Verified, Error> {
        verify(&Files::new(Arc::new(Disk)), &absolute(dir)?, progress)
    }
}

pub(crate) fn read(files: &Files, dir: &Path) -> Result<Snapshot, Error> {
    let snapshot = check_head(files, dir)?;
    let image = read_image_files(&mut Directory::new(files.clone(), dir), &snapshot.manifest)?;
    for blob in image.blobs().chain(snapshot.blobs()) {
        check_file(files, dir, blob)?;
    }
    Ok(snapshot)
}

pub(crate) fn verify(
    files: &Files,
    dir: &Path,
    progress: &dyn Progress,
) -> Result<Verified, Error> {
    let mut verify = Verify {
        intake: Directory::new(files.clone(), dir),
        progress,
        found: Verified::default(),
    };
    match check_head(files, dir) {
        Ok(snapshot) => verify.all(files, dir, &snapshot)?,
        Err(error) => verify.damaged("manifest", error)?,
    }
    Ok(verify.found)
}

/// What is in the place of a new directory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Occupant {
    Nobody,
    /// An empty directory.
    Nothing,
    /// A snapshot that is to go.
    Snapshot,
}

fn occupant(files: &Files, dir: &Path, replace: bool) -> Result<Occupant, Error> {
    match files.kind(dir)? {
        None => Ok(Occupant::Nobody),
        // Somebody made room for it.
        Some(Kind::Dir) if files.list(dir)?.is_empty() => Ok(Occupant::Nothing),
        Some(_) if !replace => Err(io_error("create", dir)(io::ErrorKind::AlreadyExists.into())),
        Some(_) => {
            require_nothing_else(files, dir)?;
            Ok(Occupant::Snapshot)
        }
    }
}

/// Whether somebody meant this to be a snapshot, damaged or not.
fn require_snapshot_dir(files: &Files, dir: &Path) -> Result<(), Error> {
    for member in [Member::Artifact, Member::Manifest] {
        if files.kind(dir)? != Some(Kind::Dir)
            || files.kind(&dir.join(member.to_string()))? != Some(Kind::File)
        {
            return Err(Error::NotASnapshotDir {
                path: dir.to_owned(),
                foreign: None,
            });
        }
    }
    Ok(())
}

/// Whether it is a snapshot, damaged or not, and nothing else.
fn require_nothing_else(files: &Files, dir: &Path) -> Result<(), Error> {
    require_snapshot_dir(files, dir)?;
    members(files, dir).map(drop)
}

/// Every file of a snapshot directory. One that is of something else is refused by name.
fn members(files: &Files, dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    let mut names: Vec<(PathBuf, Kind)> = entries(files, dir, Path::new(""))?;
    while let Some((name, kind)) = names.pop() {
        let member = name.to_str().map(Member::parse);
        match (kind, member) {
            (Kind::File, Some(Ok(_))) => found.push(dir.join(name)),
            (Kind::Dir, _) if name == Path::new("blobs") => {
                names.extend(entries(files, dir, &name)?)
            }
            _ => {
                return Err(Error::NotASnapshotDir {
                    path: dir.to_owned(),
                    foreign: Some(name),
                });
            }
        }
    }
    Ok(found)
}

/// What is in a directory below `dir`, by names that begin there.
fn entries(files: &Files, dir: &Path, below: &Path) -> Result<Vec<(PathBuf, Kind)>, Error> {
    let listed = files.list(&dir.join(below))?;
    Ok(listed
        .into_iter()
        .map(|entry| (below.join(entry.name), entry.kind))
        .collect())
}

/// Removes a snapshot directory file by file: what came into it meanwhile stays, and the directory
/// with it.
fn remove_members(files: &Files, dir: &Path) -> Result<(), Error> {
    members(files, dir)?
        .iter()
        .try_for_each(|member| files.remove_file(member))?;
    optional(files.remove_dir(&dir.join("blobs")))?;
    files.remove_dir(dir)
}

fn check_head(files: &Files, dir: &Path) -> Result<Snapshot, Error> {
    require_snapshot_dir(files, dir)?;
    let (record, snapshot) = read_head(&mut Directory::new(files.clone(), dir))?;
    if record.since.is_some() || !record.image {
        let path = dir.join(Member::Artifact.to_string());
        return Err(Error::corrupt(
            path,
            "a directory has its image and needs no other snapshot",
        ));
    }
    Ok(snapshot)
}

fn read_image_files(
    intake: &mut Directory,
    manifest: &SnapshotManifest,
) -> Result<ImageFiles, Error> {
    let texts =
        [&manifest.image.digest, &manifest.image.kernel].map(|digest| intake.description(digest));
    let [image, kernel] = texts;
    ImageFiles::read(manifest, [image?, kernel?])
}

fn check_file(files: &Files, dir: &Path, blob: &Blob) -> Result<(), Error> {
    let path = dir.join(Member::Blob(blob.digest.clone()).to_string());
    match files.kind(&path)? {
        Some(Kind::File) => {}
        Some(_) => return Err(Error::corrupt(path, "it is not a plain file")),
        None => return Err(Error::corrupt(path, "missing")),
    }
    let bytes = files.len(&path)?;
    if bytes == blob.bytes {
        Ok(())
    } else {
        Err(wrong_length(path, bytes, blob))
    }
}

fn wrong_length(path: PathBuf, bytes: u64, blob: &Blob) -> Error {
    Error::corrupt(path, format!("{bytes} bytes where {} belong", blob.bytes))
}

/// A name that no command reads, for an unfinished directory or one that is being removed.
fn beside(dir: &Path) -> Result<PathBuf, Error> {
    let name = dir
        .file_name()
        .ok_or_else(|| io_error("create", dir)(io::ErrorKind::InvalidInput.into()))?;
    let name = format!(
        ".{}.sandtree-{}",
        name.to_string_lossy(),
        SandboxId::random()?
    );
    Ok(publish::parent(dir).join(name))
}

/// A temporary directory next to the target, removed when dropped.
struct Building {
    files: Files,
    path: PathBuf,
    /// What is in its place now may be needed again after a power loss.
    kept: bool,
}

impl Building {
    fn new(files: Files, dir: &Path) -> Result<Self, Error> {
        let path = beside(dir)?;
        files.create_dir(&path)?;
        Ok(Self {
            files,
            path,
            kept: false,
        })
    }

    /// Puts it in its place; what was there is in ours then, and goes with us, unless it may come
    /// back.
    fn publish(mut self, dir: &Path, found: Occupant) -> Result<(), Error> {
        publish::sync_tree(&self.files, &self.path)?;
        match found {
            Occupant::Nobody => self.files.rename_noreplace(&self.path, dir)?,
            // Which fails if it is not empty any more.
            Occupant::Nothing => self.files.rename(&self.path, dir)?,
            Occupant::Snapshot => self.files.exchange(&self.path, dir)?,
        }
        self.files
            .sync_dir(publish::parent(dir))
            .inspect_err(|_| self.kept = true)
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        if !self.kept {
            left_for_next_open(remove_members(&self.files, &self.path));
        }
    }
}

/// Every file behind the descriptions, and what it is a part of.
fn named_parts<'a>(
    snapshot: &'a Snapshot,
    image: Option<&'a ImageFiles>,
) -> Vec<(String, &'a Blob)> {
    let ImageReference { digest, kernel, .. } = &snapshot.manifest.image;
    let rootfs = image.map(|files| &files.image.rootfs);
    let of_image = image
        .into_iter()
        .flat_map(|files| files.blobs())
        .map(|blob| {
            let whole = if Some(blob) == rootfs {
                format!("image {digest}")
            } else {
                format!("kernel {kernel}")
            };
            (whole, blob)
        });
    of_image
        .chain(
            snapshot
                .blobs()
                .map(|blob| (format!("layer {}", blob.digest), blob)),
        )
        .collect()
}

/// Reads everything, and continues after damage.
struct Verify<'a> {
    intake: Directory,
    progress: &'a dyn Progress,
    found: Verified,
}

impl Verify<'_> {
    fn all(&mut self, files: &Files, dir: &Path, snapshot: &Snapshot) -> Result<(), Error> {
        let image = match read_image_files(&mut self.intake, &snapshot.manifest) {
            Ok(image) => Some(image),
            Err(error) => {
                self.damaged(&format!("image {}", snapshot.manifest.image.digest), error)?;
                None
            }
        };
        let parts = named_parts(snapshot, image.as_ref());
        self.progress.begin(
            parts
                .iter()
                .map(|(_, blob)| blob.bytes)
                .fold(0, u64::saturating_add),
        );
        for (what, blob) in parts {
            self.blob(blob)
                .or_else(|error| self.damaged(&what, error))?;
        }
        if self.found.damaged.is_empty() {
            let place = |digest: &Digest| dir.join(Member::Blob(digest.clone()).to_string());
            let checked = structure::check(files, &snapshot.manifest, &place);
            checked
                .or_else(|error| self.damaged(&format!("snapshot {}", snapshot.digest), error))?;
        }
        Ok(())
    }

    fn blob(&mut self, blob: &Blob) -> Result<(), Error> {
        let member = Member::Blob(blob.digest.clone());
        let map = self.intake.open(&member)?;
        if map.bytes() != blob.bytes {
            return Err(Damage::Bytes {
                member,
                expected: blob.bytes,
                found: map.bytes(),
            }
            .into());
        }
        let intake = &mut self.intake;
        let digest = pipeline::pull(
            &map,
            &mut |chunk| intake.fill(chunk),
            &mut |_| Ok(()),
            self.progress,
        )?;
        self.found.bytes += blob.bytes;
        if digest == blob.digest {
            Ok(())
        } else {
            Err(Damage::Content { member }.into())
        }
    }

    /// Notes damage. What is none, because nothing could be read, ends it.
    fn damaged(&mut self, what: &str, error: Error) -> Result<(), Error> {
        match error {
            Error::Io { .. } | Error::NotASnapshotDir { .. } | Error::Cancelled => {
                return Err(error);
            }
            _ => {}
        }
        progress::check(self.progress)?;
        self.found.damaged.push(Damaged {
            what: what.to_owned(),
            quarantined: None,
            reason: error.to_string(),
        });
        Ok(())
    }
}
