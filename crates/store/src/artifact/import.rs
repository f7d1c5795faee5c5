//! An artifact becomes a snapshot of the store.
//!
//! ```text
//! artifact.json ─► manifest.json ─► image, kernel ─► blobs ─► nothing more ─► layers look right ─► published
//!                                   └──────────── all of it in staging, every byte hashed ──────────┘
//! ```
//!
//! Always: which member comes next, and how large it is, follows from what was read and verified
//! before; anything else is refused before a byte of it is written. Nothing of an artifact is seen
//! before all of it was read. What the store has already is used once every byte of it was read
//! there; what is damaged goes to `quarantine/`, and the artifact's own takes its place. When it
//! fails: staging goes, and with it everything. What was put aside stays there.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::image_files::{ImageFiles, parse_description};
use super::intake::{Archive, Intake, MAX_RECORD_BYTES};
use super::parts::{Part, Scope};
use super::pipeline::{self, Chunk};
use super::record::ArtifactRecord;
use super::structure;
use super::{Damage, Member, SparseMap};
use crate::blob::Blob;
use crate::fs::Output;
use crate::image::{Image, ImageRecord};
use crate::pin::Pin;
use crate::progress::Uncounted;
use crate::publish::Staged;
use crate::snapshot::{Assembly, Form};
use crate::{
    Damaged, Digest, Error, Pinned, Progress, Snapshot, SnapshotManifest, Store, Target, lock,
};

impl Store {
    /// Reads an artifact, and publishes the snapshot in it once every byte of it is verified.
    pub fn import(
        &self,
        input: &mut dyn Read,
        target: Target<'_>,
        progress: &dyn Progress,
    ) -> Result<Pinned, Error> {
        self.take_in(&mut Archive::new(input)?, target, progress)
    }

    pub(super) fn take_in(
        &self,
        intake: &mut dyn Intake,
        target: Target<'_>,
        progress: &dyn Progress,
    ) -> Result<Pinned, Error> {
        self.check_target(target, None)?;
        let (record, snapshot) = read_head(intake)?;
        let (_held, base) = record
            .since
            .as_ref()
            .map(|since| self.base(since))
            .transpose()?
            .unzip();
        let scope = if record.image {
            Scope::WithImage
        } else {
            Scope::WithoutImage
        };
        Import::new(self, intake, base.unwrap_or_default(), progress)
            .snapshot(&snapshot, scope, target)
    }

    /// The snapshot whose parts an artifact lacks, kept while this lives.
    fn base(&self, digest: &Digest) -> Result<(Pinned, BTreeMap<Digest, Part>), Error> {
        let pinned = self.pin(digest).map_err(|error| match error {
            Error::UnknownSnapshot { .. } => Error::MissingBase {
                base: digest.clone(),
            },
            other => other,
        })?;
        let parts = self.parts(&pinned, Scope::WithImage)?;
        let parts = parts
            .into_iter()
            .map(|part| (part.blob.digest.clone(), part))
            .collect();
        Ok((pinned, parts))
    }
}

/// The first two members: which snapshot it is.
pub(super) fn read_head(intake: &mut dyn Intake) -> Result<(ArtifactRecord, Snapshot), Error> {
    let record = ArtifactRecord::parse(&intake.small(&Member::Artifact, MAX_RECORD_BYTES)?)?;
    let bytes = intake.small(&Member::Manifest, MAX_RECORD_BYTES)?;
    let (manifest, digest) = parse_manifest(&bytes)?;
    if digest != record.snapshot {
        return Err(Damage::OtherSnapshot {
            expected: record.snapshot,
            found: digest,
        }
        .into());
    }
    Ok((record, Snapshot { digest, manifest }))
}

pub(super) fn parse_manifest(bytes: &[u8]) -> Result<(SnapshotManifest, Digest), Error> {
    let path = || Member::Manifest.to_string().into();
    SnapshotManifest::parse(bytes).map_err(|source| Error::Manifest {
        path: path(),
        source,
    })
}

/// A directory that is named by a digest: whole in the store already, and pinned there; or in the
/// making.
enum Slot {
    There(PathBuf, Staged),
    New(Staged),
}

impl Slot {
    fn file(&self, name: &str) -> Wanted {
        match self {
            Self::There(dir, _) => Wanted::There(dir.join(name)),
            Self::New(staged) => Wanted::New(staged.path().join(name)),
        }
    }

    /// Publishes it, if it is new, and keeps it while the result lives.
    fn publish(self, target: &Path, pin: &Pin) -> Result<Staged, Error> {
        match self {
            Self::There(_, held) => Ok(held),
            Self::New(staged) => staged.publish_pinned(target, pin),
        }
    }
}

/// Where a file is to be found afterwards.
enum Wanted {
    /// It exists already, and is whole: the artifact's copy is only verified.
    There(PathBuf),
    New(PathBuf),
}

impl Wanted {
    fn path(&self) -> &Path {
        match self {
            Self::There(path) | Self::New(path) => path,
        }
    }

    fn output(&self, store: &Store) -> Result<Option<Output>, Error> {
        match self {
            Self::There(_) => Ok(None),
            Self::New(path) => store.files.output(path).map(Some),
        }
    }
}

pub(super) struct Import<'a> {
    store: &'a Store,
    intake: &'a mut dyn Intake,
    progress: &'a dyn Progress,
    /// Content that was verified, and where it is.
    seen: BTreeMap<Digest, PathBuf>,
    /// What the artifact lacks because the store has it.
    base: BTreeMap<Digest, Part>,
}

impl<'a> Import<'a> {
    pub(super) fn new(
        store: &'a Store,
        intake: &'a mut dyn Intake,
        base: BTreeMap<Digest, Part>,
        progress: &'a dyn Progress,
    ) -> Self {
        Self {
            store,
            intake,
            progress,
            seen: BTreeMap::new(),
            base,
        }
    }

    pub(super) fn snapshot(
        mut self,
        snapshot: &Snapshot,
        scope: Scope,
        target: Target<'_>,
    ) -> Result<Pinned, Error> {
        let manifest = &snapshot.manifest;
        let image = match scope {
            Scope::WithImage => Some(self.image_files(manifest)?),
            Scope::WithoutImage => None,
        };
        if image.is_none() {
            self.store.check_image(manifest)?;
        }
        let assembly = Assembly::new(self.store)?;
        self.begin(snapshot, image.as_ref())?;
        let slots = image.as_ref().map(|files| self.image(files)).transpose()?;
        for blob in snapshot.blobs() {
            self.blob(&assembly, blob)?;
        }
        self.intake.finish()?;
        structure::check(&self.store.files, manifest, &|digest| {
            assembly.plain(digest)
        })?;
        let _image = image
            .zip(slots)
            .map(|(files, slots)| self.publish_image(&files, slots))
            .transpose()?;
        assembly.publish(snapshot.manifest.clone(), target, None)
    }

    /// An image alone, which stays while the result lives.
    pub(super) fn image_alone(mut self, digest: &Digest) -> Result<Image, Error> {
        let text = self.description(digest)?;
        let kernel = parse_description::<ImageRecord>(digest, &text)?.kernel;
        let texts = [text, self.description(&kernel)?];
        let files = ImageFiles::parse([digest.clone(), kernel], texts)?;
        self.progress.begin(files.bytes());
        let slots = self.image(&files)?;
        self.intake.finish()?;
        let [_kernel, held] = self.publish_image(&files, slots)?;
        Ok(self.store.image_by_digest(digest)?.held_by(held))
    }

    /// Announces the amount of work, and fails if the store has no room for it.
    fn begin(&self, snapshot: &Snapshot, image: Option<&ImageFiles>) -> Result<(), Error> {
        self.progress.begin(
            snapshot
                .bytes()
                .saturating_add(image.map_or(0, ImageFiles::bytes)),
        );
        let copied = snapshot
            .blobs()
            .filter(|blob| self.intake.lent(&blob.digest).is_none());
        let missing = copied.filter(|blob| self.store.find_blob(blob).is_err());
        self.require_space(missing.map(|blob| blob.bytes).sum())
    }

    fn require_space(&self, needed_bytes: u64) -> Result<(), Error> {
        let free_bytes = self.store.disk_free_bytes()?;
        if needed_bytes > free_bytes {
            return Err(Error::NotEnoughSpace {
                needed_bytes,
                free_bytes,
            });
        }
        Ok(())
    }

    fn image_files(&mut self, manifest: &SnapshotManifest) -> Result<ImageFiles, Error> {
        let texts = [
            self.description(&manifest.image.digest)?,
            self.description(&manifest.image.kernel)?,
        ];
        ImageFiles::read(manifest, texts)
    }

    /// From the artifact, or from the store if the base has it.
    pub(super) fn description(&mut self, digest: &Digest) -> Result<Vec<u8>, Error> {
        let known = self
            .base
            .get(digest)
            .map(|part| part.plain_path(self.store))
            .transpose()?
            .flatten();
        let Some(path) = known else {
            return self.intake.description(digest);
        };
        let bytes = self.store.files.read(&path)?;
        if Digest::of(&bytes) == *digest {
            Ok(bytes)
        } else {
            Err(Error::corrupt(path, "its digest is another one"))
        }
    }

    /// Takes in the files of image and kernel.
    fn image(&mut self, files: &ImageFiles) -> Result<(Slot, Slot), Error> {
        let [digest, bundle] = &files.digests;
        let image = self.image_slot(digest)?;
        let kernel = self.kernel_slot(bundle)?;
        self.keep_text(digest, image.file("image.json"), &files.texts[0])?;
        self.keep_text(bundle, kernel.file("bundle.json"), &files.texts[1])?;
        self.take(&files.kernel.kernel, kernel.file("kernel"))?;
        if let Some(initramfs) = &files.kernel.initramfs {
            self.take(initramfs, kernel.file("initramfs"))?;
        }
        if let Slot::New(staged) = &kernel {
            self.store
                .files
                .create_dir(&staged.path().join("modules"))?;
        }
        for module in &files.kernel.modules {
            self.take(
                &module.content,
                kernel.file(&format!("modules/{}", module.file)),
            )?;
        }
        self.take(&files.image.rootfs, image.file("rootfs.raw"))?;
        Ok((image, kernel))
    }

    fn image_slot(&self, digest: &Digest) -> Result<Slot, Error> {
        let slot = self.slot(self.store.layout.image(digest), &Pin::Image(digest.clone()))?;
        self.whole_or_new(slot, digest, |progress| {
            self.store.verify_image(digest, progress)
        })
    }

    fn kernel_slot(&self, digest: &Digest) -> Result<Slot, Error> {
        let slot = self.slot(
            self.store.layout.kernel(digest),
            &Pin::Kernel(digest.clone()),
        )?;
        self.whole_or_new(slot, digest, |progress| {
            self.store.verify_kernel(digest, progress)
        })
    }

    /// A new one replaces an existing one that is damaged.
    fn whole_or_new(
        &self,
        slot: Slot,
        digest: &Digest,
        verify: impl FnOnce(&dyn Progress) -> Result<Option<Damaged>, Error>,
    ) -> Result<Slot, Error> {
        if matches!(slot, Slot::New(_)) {
            return Ok(slot);
        }
        match verify(&Uncounted(self.progress))? {
            None => Ok(slot),
            Some(damaged) => {
                self.require_replacement(digest, damaged)?;
                Ok(Slot::New(self.store.stage()?))
            }
        }
    }

    /// A file that the artifact leaves out because the base has it cannot be replaced.
    fn require_replacement(&self, digest: &Digest, damaged: Damaged) -> Result<(), Error> {
        if self.base.contains_key(digest) {
            Err(Error::corrupt(
                damaged.quarantined.unwrap_or_default(),
                damaged.reason,
            ))
        } else {
            Ok(())
        }
    }

    /// An existing one is pinned under the same lock, so that no `gc` collects it meanwhile.
    fn slot(&self, dir: PathBuf, pin: &Pin) -> Result<Slot, Error> {
        let Store { files, layout, .. } = self.store;
        let staged = self.store.stage()?;
        let _held = lock::store(files, layout)?;
        if files.kind(&dir)?.is_none() {
            return Ok(Slot::New(staged));
        }
        staged.write_pin(pin)?;
        Ok(Slot::There(dir, staged))
    }

    fn keep_text(&mut self, digest: &Digest, wanted: Wanted, text: &[u8]) -> Result<(), Error> {
        if let Wanted::New(path) = &wanted {
            self.store.files.create(path, text)?;
        }
        self.seen.insert(digest.clone(), wanted.path().to_owned());
        Ok(())
    }

    fn publish_image(
        &self,
        files: &ImageFiles,
        (image, kernel): (Slot, Slot),
    ) -> Result<[Staged; 2], Error> {
        let [digest, bundle] = &files.digests;
        let layout = &self.store.layout;
        let kernel = kernel.publish(&layout.kernel(bundle), &Pin::Kernel(bundle.clone()))?;
        let image = image.publish(&layout.image(digest), &Pin::Image(digest.clone()))?;
        // What another put there meanwhile has at least the right sizes.
        self.store.kernel(bundle)?;
        self.store.image_by_digest(digest)?;
        Ok([kernel, image])
    }

    fn blob(&mut self, assembly: &Assembly<'_>, blob: &Blob) -> Result<(), Error> {
        let path = assembly.plain(&blob.digest);
        // Compressed, it could not be looked into.
        let is_there = self.whole_in_pool(blob)? == Some(Form::Plain) && assembly.has(blob)?;
        self.take(
            blob,
            if is_there {
                Wanted::There(path)
            } else {
                Wanted::New(path)
            },
        )
    }

    /// How the pool has a blob whose every byte is right. What is damaged is put aside; it may have
    /// it in both forms.
    fn whole_in_pool(&self, blob: &Blob) -> Result<Option<Form>, Error> {
        while let Ok(form) = self.store.find_blob(blob) {
            match self.store.verify_blob(blob, &Uncounted(self.progress))? {
                None => return Ok(Some(form)),
                Some(damaged) => self.require_replacement(&blob.digest, damaged)?,
            }
        }
        Ok(None)
    }

    /// Brings a file where it is wanted: from the artifact, from the base, or from where the same
    /// content is already.
    fn take(&mut self, blob: &Blob, wanted: Wanted) -> Result<(), Error> {
        if let Some(from) = self.seen.get(&blob.digest) {
            return self.again(blob, from, &wanted);
        }
        match self.base.get(&blob.digest).cloned() {
            Some(part) => self.verify_base(&part, blob, &wanted)?,
            None => self.receive(blob, &wanted)?,
        }
        self.seen
            .insert(blob.digest.clone(), wanted.path().to_owned());
        Ok(())
    }

    fn again(&self, blob: &Blob, from: &Path, wanted: &Wanted) -> Result<(), Error> {
        self.check_bytes(blob, self.store.files.len(from)?)?;
        match wanted {
            Wanted::New(to) => self.store.files.share(from, to),
            Wanted::There(_) => Ok(()),
        }
    }

    fn receive(&mut self, blob: &Blob, wanted: &Wanted) -> Result<(), Error> {
        if matches!(wanted, Wanted::There(_)) && self.intake.passes_over() {
            self.progress.advance(blob.bytes);
            return Ok(());
        }
        let map = self.intake.open(&Member::Blob(blob.digest.clone()))?;
        self.check_bytes(blob, map.bytes())?;
        let lent = self.intake.lent(&blob.digest);
        let mut written = Written::new(if lent.is_none() {
            wanted.output(self.store)?
        } else {
            None
        });
        if written.output.is_some() {
            self.require_space(map.data_bytes())?;
        }
        let intake = &mut *self.intake;
        let digest = pipeline::push(
            &map,
            &mut |chunk| intake.fill(chunk),
            &mut |chunk| written.add(chunk),
            self.progress,
        )?;
        written.finish(&map)?;
        self.check_digest(blob, &digest)?;
        match (lent, wanted) {
            (Some(from), Wanted::New(to)) => self.store.files.share(&from, to),
            _ => Ok(()),
        }
    }

    /// What the artifact lacks is verified where it is, and given another name.
    fn verify_base(&self, part: &Part, blob: &Blob, wanted: &Wanted) -> Result<(), Error> {
        self.check_bytes(blob, part.blob.bytes)?;
        let Wanted::New(to) = wanted else {
            self.progress.advance(blob.bytes);
            return Ok(());
        };
        let plain = part.plain_path(self.store)?;
        let mut written = Written::new(if plain.is_none() {
            wanted.output(self.store)?
        } else {
            None
        });
        let map = self.store.read_part(part, self.progress, |_| {
            Ok(|chunk: &Chunk| written.add(chunk))
        })?;
        written.finish(&map)?;
        plain.map_or(Ok(()), |from| self.store.files.share(&from, to))
    }

    fn check_bytes(&self, blob: &Blob, found: u64) -> Result<(), Error> {
        if found == blob.bytes {
            return Ok(());
        }
        let member = Member::Blob(blob.digest.clone());
        Err(Damage::Bytes {
            member,
            expected: blob.bytes,
            found,
        }
        .into())
    }

    fn check_digest(&self, blob: &Blob, found: &Digest) -> Result<(), Error> {
        if *found == blob.digest {
            return Ok(());
        }
        Err(Damage::Content {
            member: Member::Blob(blob.digest.clone()),
        }
        .into())
    }
}

/// A file that gets its pieces, and holes between them; or nothing, if it exists already.
pub(super) struct Written {
    output: Option<Output>,
    at: u64,
}

impl Written {
    pub(super) fn new(output: Option<Output>) -> Self {
        Self { output, at: 0 }
    }

    pub(super) fn add(&mut self, chunk: &Chunk) -> Result<(), Error> {
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        output.add_zeros(chunk.offset - self.at)?;
        self.at = chunk.offset + chunk.bytes.len() as u64;
        output.add(&chunk.bytes)
    }

    pub(super) fn finish(self, map: &SparseMap) -> Result<(), Error> {
        let Some(mut output) = self.output else {
            return Ok(());
        };
        output.add_zeros(map.bytes() - self.at)?;
        output.finish()
    }
}
