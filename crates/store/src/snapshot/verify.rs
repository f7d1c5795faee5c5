//! Reading every byte of a snapshot, and moving damaged files to quarantine.
//!
//! Always: a damaged file is moved to `quarantine/` and reported, never removed. Only the very file
//! that was read is moved: one that was put in its place meanwhile stays. A file that cannot be
//! read at all is an error, not damage: the disk may be at fault, and moving the file would not
//! help.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::blob::Blob;
use crate::fs::optional;
use crate::image::{Image, KernelBundle};
use crate::snapshot::Snapshot;
use crate::{Digest, Error, Progress, Silent, Store, lock, progress};

/// What reading every byte found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Verified {
    /// How much was read, as it is when it is not compressed.
    pub bytes: u64,
    pub damaged: Vec<Damaged>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Damaged {
    /// Which part: "snapshot <digest>", "layer <digest>", "image <digest>", "kernel <digest>".
    pub what: String,
    /// Where it is now; nothing if it was not there.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub quarantined: Option<PathBuf>,
    pub reason: String,
}

/// A part of a snapshot that is whole or not.
struct Part<'a> {
    kind: &'static str,
    digest: &'a Digest,
    path: PathBuf,
}

impl Store {
    /// Reads every byte of a snapshot, its image and its kernel. What is damaged is moved to
    /// `quarantine/` and reported.
    pub fn verify_snapshot(
        &self,
        digest: &Digest,
        progress: &dyn Progress,
    ) -> Result<Verified, Error> {
        let mut verified = Verified::default();
        let part = Part {
            kind: "snapshot",
            digest,
            path: self.layout.snapshot(digest),
        };
        let seen = self.file_id(&part.path)?;
        match self.read_snapshot(digest) {
            Ok(snapshot) => self.verify_parts(&snapshot, progress, &mut verified)?,
            Err(error) => self.put_aside(part, seen, error, &mut verified)?,
        }
        Ok(verified)
    }

    fn verify_parts(
        &self,
        snapshot: &Snapshot,
        progress: &dyn Progress,
        verified: &mut Verified,
    ) -> Result<(), Error> {
        let reference = &snapshot.manifest.image;
        let image = self.image_by_digest(&reference.digest);
        let kernel = self.kernel(&reference.kernel);
        let below =
            image.as_ref().map_or(0, Image::bytes) + kernel.as_ref().map_or(0, KernelBundle::bytes);
        progress.begin(snapshot.bytes().saturating_add(below));
        for blob in snapshot.blobs() {
            self.verify_layer(blob, progress, verified)?;
        }
        self.verify_files(
            self.image_part(&reference.digest),
            image.map(|image| image.files()),
            progress,
            verified,
        )?;
        self.verify_files(
            self.kernel_part(&reference.kernel),
            kernel.map(|kernel| kernel.files()),
            progress,
            verified,
        )
    }

    fn image_part<'a>(&self, digest: &'a Digest) -> Part<'a> {
        Part {
            kind: "image",
            digest,
            path: self.layout.image(digest),
        }
    }

    fn kernel_part<'a>(&self, digest: &'a Digest) -> Part<'a> {
        Part {
            kind: "kernel",
            digest,
            path: self.layout.kernel(digest),
        }
    }

    /// Reads every byte of an image. Damage is moved to quarantine and reported.
    pub(crate) fn verify_image(
        &self,
        digest: &Digest,
        progress: &dyn Progress,
    ) -> Result<Option<Damaged>, Error> {
        let mut verified = Verified::default();
        let files = self.image_by_digest(digest).map(|image| image.files());
        self.verify_files(self.image_part(digest), files, progress, &mut verified)?;
        Ok(verified.damaged.pop())
    }

    /// Like `verify_image`, of a kernel.
    pub(crate) fn verify_kernel(
        &self,
        digest: &Digest,
        progress: &dyn Progress,
    ) -> Result<Option<Damaged>, Error> {
        let mut verified = Verified::default();
        let files = self.kernel(digest).map(|kernel| kernel.files());
        self.verify_files(self.kernel_part(digest), files, progress, &mut verified)?;
        Ok(verified.damaged.pop())
    }

    /// Like `verify_image`, of a blob of the pool.
    pub(crate) fn verify_blob(
        &self,
        blob: &Blob,
        progress: &dyn Progress,
    ) -> Result<Option<Damaged>, Error> {
        let mut verified = Verified::default();
        self.verify_layer(blob, progress, &mut verified)?;
        Ok(verified.damaged.pop())
    }

    fn verify_layer(
        &self,
        blob: &Blob,
        progress: &dyn Progress,
        verified: &mut Verified,
    ) -> Result<(), Error> {
        let plain = self.layout.layer(&blob.digest);
        let compressed = self.layout.compressed_layer(&blob.digest);
        let path = if self.files.kind(&plain)?.is_some() {
            plain
        } else {
            compressed
        };
        let seen = self.file_id(&path)?;
        let read = self
            .open_blob(blob)
            .and_then(|content| read_whole(&path, content, blob, progress, verified));
        let part = Part {
            kind: "layer",
            digest: &blob.digest,
            path,
        };
        read.or_else(|error| self.put_aside(part, seen, error, verified))
    }

    /// Reads a layer that may be damaged. Returns its place in quarantine if it is.
    pub(crate) fn put_aside_if_damaged(&self, blob: &Blob) -> Result<Option<PathBuf>, Error> {
        Ok(self
            .verify_blob(blob, &Silent)?
            .and_then(|damaged| damaged.quarantined))
    }

    /// An image or a kernel: a directory whose description was read, or not.
    fn verify_files(
        &self,
        part: Part<'_>,
        files: Result<Vec<(PathBuf, Blob)>, Error>,
        progress: &dyn Progress,
        verified: &mut Verified,
    ) -> Result<(), Error> {
        let seen = self.file_id(&part.path)?;
        let read = files.and_then(|files| {
            files.iter().try_for_each(|(path, blob)| {
                read_whole(path, self.files.open(path)?, blob, progress, verified)
            })
        });
        read.or_else(|error| self.put_aside(part, seen, error, verified))
    }

    /// Which file a path means now.
    fn file_id(&self, path: &Path) -> Result<Option<(u64, u64)>, Error> {
        Ok(optional(self.files.stat(path))?.map(|stat| stat.id))
    }

    fn put_aside(
        &self,
        part: Part<'_>,
        seen: Option<(u64, u64)>,
        error: Error,
        verified: &mut Verified,
    ) -> Result<(), Error> {
        let missing = seen.is_none();
        // A manifest of a later schema is whole: it is only not for us.
        let is_damage = matches!(error, Error::Corrupt { .. })
            || error.io_kind() == Some(io::ErrorKind::NotFound);
        if !is_damage {
            return Err(error);
        }
        let Part { kind, digest, path } = part;
        let held = lock::store(&self.files, &self.layout)?;
        let same = !missing && self.file_id(&path)? == seen;
        let name = format!("{kind}-{digest}");
        let before = Some(self.layout.quarantine().join(&name)).filter(|_| missing);
        let before = match before {
            Some(path) => self.files.kind(&path)?.map(|_| path),
            None => None,
        };
        let reason = match (missing, &before) {
            (true, Some(_)) => "it was found damaged before".to_owned(),
            (true, None) => "missing".to_owned(),
            (false, _) => error.to_string(),
        };
        let quarantined = if same {
            Some(self.quarantine(&held, &path, &name)?)
        } else {
            before
        };
        verified.damaged.push(Damaged {
            what: format!("{kind} {digest}"),
            quarantined,
            reason,
        });
        Ok(())
    }
}

fn read_whole(
    path: &Path,
    content: Box<dyn Read + Send>,
    blob: &Blob,
    progress: &dyn Progress,
    verified: &mut Verified,
) -> Result<(), Error> {
    // One byte more detects a file that is too long, and bounds a hostile one.
    let mut content = content.take(blob.bytes.saturating_add(1));
    let found = progress::read_through(path, &mut content, progress, &mut |_| Ok(()))?;
    verified.bytes += found.bytes;
    if found == *blob {
        Ok(())
    } else {
        Err(Error::corrupt(
            path,
            format!("its content is {}, {} bytes", found.digest, found.bytes),
        ))
    }
}
