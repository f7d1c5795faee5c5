//! From a registry into the store.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sandtree_registry::{
    self as registry, BlobTarget, Client, Descriptor, Document, GivenUp, ImageConfig, Manifest, Reference, fetch_all,
    media, parallel,
};
use sandtree_store::{self as store, Digest, Image, Name, Pinned, Store, Target};
use serde::Serialize;

use super::{IMAGE, Member, RegistryAccess, SNAPSHOT, SUBJECT, THREADS};
use crate::capture::blocking;
use crate::error::{Error, Result};
use crate::host::{Host, Inner};
use crate::image::{
    self, ARCHITECTURE, Described, ImportSpec, KernelChoice, OS, Progress, Stage, Watch, image_of_layers,
};
use crate::progress::Waiting;
use crate::sandbox::Replace;
use crate::save::name_error;
use crate::spec::parse_name;

/// A configuration is a few KiB.
const CONFIG_MAX: u64 = 4 << 20;
/// Counts up when images are made differently from their layers.
const RECIPE: u32 = 1;
/// What is left free on the store's file system, however much a registry says there is to unpack.
const RESERVE_BYTES: u64 = 1 << 30;
/// How often someone who gives up is noticed.
const POLL: Duration = Duration::from_millis(100);

/// What to make of what a registry has.
#[derive(Debug, Clone, Default)]
pub struct PullSpec {
    /// `None`: the last part of the repository's name, with the tag unless that is `latest`.
    pub name: Option<String>,
    /// Whether a snapshot that has the name may go. A name of an image moves on by itself.
    pub replace: bool,
    pub access: RegistryAccess,
    /// For images that are not ours.
    pub import: ImportSpec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PulledKind {
    Image,
    Snapshot,
}

/// What came of a pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pulled {
    pub name: String,
    pub kind: PulledKind,
    /// Of the image or snapshot, here.
    pub digest: String,
    /// Of the manifest, there.
    pub manifest: String,
    /// What was fetched; the rest was here already.
    pub fetched_bytes: u64,
}

/// What was pulled, without a name.
enum Got {
    Image(Box<Image>),
    Snapshot(Box<Pinned>),
}

/// What a reference leads to.
struct There {
    client: Client,
    reference: Reference,
    manifest: Manifest,
    digest: registry::Digest,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Anyone's image.
    Oci,
    /// An artifact of ours.
    Ours(PulledKind),
}

impl Host {
    /// Brings an image or a snapshot from a registry.
    pub async fn pull(
        &self,
        reference: &str,
        spec: &PullSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Pulled> {
        let parsed = parse(reference)?;
        let name = spec.name.clone().unwrap_or_else(|| name_of(&parsed));
        let name = parse_name("the name of what is pulled", &name)?;
        let there = self.inner.look(parsed, spec).await?;
        let manifest = there.digest;
        // Nothing is fetched for a name that it could not get.
        match there.kind {
            Kind::Ours(PulledKind::Snapshot) => {
                self.inner.check_free(&store::SaveTarget::Name(name.clone()), Replace::from(spec.replace), None)?;
            }
            Kind::Oci | Kind::Ours(PulledKind::Image) => self.inner.check_image_name(&name)?,
        }
        let (got, fetched_bytes) = self.inner.fetch(there, spec, progress).await?;
        let (kind, digest) = match got {
            Got::Image(image) => {
                self.inner.name_image(&name, &image).await?;
                (PulledKind::Image, image.digest.clone())
            }
            Got::Snapshot(pinned) => {
                (PulledKind::Snapshot, self.inner.name_pulled(&name, *pinned, spec.replace).await?)
            }
        };
        Ok(Pulled {
            name: name.to_string(),
            kind,
            digest: digest.to_string(),
            manifest: manifest.to_string(),
            fetched_bytes,
        })
    }
}

impl Inner {
    /// An image from a registry, without a name.
    pub async fn pull_image(
        self: Arc<Self>,
        reference: &str,
        spec: &PullSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Image> {
        let there = self.look(parse(reference)?, spec).await?;
        match self.fetch(there, spec, progress).await?.0 {
            Got::Image(image) => Ok(*image),
            Got::Snapshot(_) => Err(Error::NotAnImage { name: reference.into(), found: "a snapshot".into() }),
        }
    }

    /// What there is behind a reference; nothing of it is fetched yet.
    async fn look(self: &Arc<Self>, reference: Reference, spec: &PullSpec) -> Result<There> {
        let (text, access) = (reference.to_string(), spec.access.clone());
        let there = self.making(&text, |_| (), move |work| work.watched(|_, watch| look(reference, &access, watch)));
        there.await.map_err(|error| error.of_transfer("pull"))
    }

    async fn fetch(
        self: &Arc<Self>,
        there: There,
        spec: &PullSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<(Got, u64)> {
        let (text, import) = (there.reference.to_string(), spec.import.clone());
        let fetched =
            self.making(&text, progress, move |work| work.watched(|store, watch| fetch(store, &there, &import, watch)));
        fetched.await.map_err(|error| error.of_transfer("pull"))
    }

    /// Gives a snapshot that was pulled its name, or lets it go.
    async fn name_pulled(self: &Arc<Self>, name: &Name, pinned: Pinned, replace: bool) -> Result<Digest> {
        let (host, name) = (self.clone(), name.clone());
        blocking(move || {
            let digest = pinned.digest.clone();
            let named = host.replacing(&name, || host.store.tag_snapshot(&digest, &name, replace));
            let left = if named.is_err() { host.store.let_go(pinned) } else { Ok(()) };
            named.and(left).map_err(name_error)?;
            Ok(digest)
        })
        .await
    }
}

pub(super) fn parse(reference: &str) -> Result<Reference> {
    let refused = |error: registry::Error| error.into();
    reference.parse().map_err(|e| Error::Transfer { verb: "use", reference: reference.to_owned(), source: refused(e) })
}

/// What something is called that was pulled without a name.
fn name_of(reference: &Reference) -> String {
    let last = reference.repository.rsplit('/').next().unwrap_or_default();
    let tag = reference.tag.as_deref().filter(|tag| *tag != "latest" && reference.digest.is_none());
    let name = tag.map_or_else(|| last.to_owned(), |tag| format!("{last}-{tag}")).to_ascii_lowercase();
    name.chars().take(63).collect()
}

fn look(reference: Reference, access: &RegistryAccess, watch: &mut Watch<'_>) -> Result<There, image::Error> {
    let client = access.client(&reference)?;
    let (manifest, digest) = while_wanted(&client, Stage::Fetch, watch, || manifest_of(&client, &reference))?;
    let kind = kind_of(&manifest)?;
    Ok(There { client, reference, manifest, digest, kind })
}

/// What a manifest says it is. Artifacts from before there were artifacts say it by the kind of their configuration.
fn kind_of(manifest: &Manifest) -> Result<Kind, image::Error> {
    let config = manifest.config.media_type.as_str();
    let is_image =
        !config.starts_with("application/vnd.") || [media::OCI_CONFIG, media::DOCKER_CONFIG].contains(&config);
    match manifest.artifact_type.as_deref().or((!is_image).then_some(config)) {
        Some(SNAPSHOT) => Ok(Kind::Ours(PulledKind::Snapshot)),
        Some(IMAGE) => Ok(Kind::Ours(PulledKind::Image)),
        Some(other) => Err(image::Error::Config { what: format!("it is an artifact of type {other}") }),
        None => Ok(Kind::Oci),
    }
}

fn fetch(store: &Store, there: &There, import: &ImportSpec, watch: &mut Watch<'_>) -> Result<(Got, u64), image::Error> {
    watch(Progress::begin(Stage::Fetch))?;
    let There { client, reference, manifest, digest, kind } = there;
    let fetching = Fetching { store, client, repository: &reference.repository, manifest };
    match kind {
        Kind::Ours(PulledKind::Snapshot) => fetching.members(watch, |store, subject, dir, told| {
            let pinned = store.unpack_snapshot(subject, dir, Target::Unnamed, told)?;
            Ok(Got::Snapshot(Box::new(pinned)))
        }),
        Kind::Ours(PulledKind::Image) => fetching.members(watch, |store, subject, dir, told| {
            store.unpack_image(subject, dir, told).map(|image| Got::Image(Box::new(image)))
        }),
        Kind::Oci => fetching.image(digest, import, watch),
    }
}

/// The manifest behind a reference: of an index, the one for this machine.
fn manifest_of(client: &Client, reference: &Reference) -> Result<(Manifest, registry::Digest), image::Error> {
    let fetched = client.manifest(reference)?;
    match Document::parse(&fetched.media_type, &fetched.bytes)? {
        Document::Manifest(manifest) => Ok((*manifest, fetched.digest)),
        Document::Index(index) => {
            let digest = index.choose(OS, ARCHITECTURE, None)?.digest;
            let fetched = client.manifest(&Reference { digest: Some(digest), ..reference.clone() })?;
            match Document::parse(&fetched.media_type, &fetched.bytes)? {
                Document::Manifest(manifest) => Ok((*manifest, digest)),
                Document::Index(_) => Err(image::Error::Config { what: "its index leads to another index".into() }),
            }
        }
    }
}

/// Fetches the layers of an image, or of an artifact, to files in a directory and does nothing else with them; how many
/// bytes they have. Nothing is synced: it stands beside tools that only copy.
pub async fn fetch_layers(reference: &str, access: RegistryAccess, dir: &Path) -> Result<u64> {
    let (text, reference, dir) = (reference.to_owned(), parse(reference)?, dir.to_owned());
    let (_waiting, given_up) = Waiting::new();
    blocking(move || {
        let told = |_| if given_up.load(Ordering::Relaxed) { Err(GivenUp) } else { Ok(()) };
        let fetched = copy_layers(&reference, &access, &dir, &told);
        fetched.map_err(|source| Error::Transfer { verb: "fetch", reference: text, source })
    })
    .await
}

fn copy_layers(
    reference: &Reference,
    access: &RegistryAccess,
    dir: &Path,
    told: registry::Watch<'_>,
) -> Result<u64, image::Error> {
    let client = access.client(reference)?;
    let (manifest, _) = manifest_of(&client, reference)?;
    let target = |layer: &Descriptor| File::create_new(dir.join(layer.digest.hex()));
    fetch_all(&client, &reference.repository, &manifest.layers, THREADS, &target, told)?;
    Ok(manifest.layers.iter().map(|layer| layer.size).fold(0, u64::saturating_add))
}

struct Fetching<'a> {
    store: &'a Store,
    client: &'a Client,
    repository: &'a str,
    manifest: &'a Manifest,
}

impl Fetching<'_> {
    /// An artifact of ours: fetches the members that the store does not have, and lets it take them in.
    fn members(
        &self,
        watch: &mut Watch<'_>,
        take_in: impl FnOnce(&Store, &Digest, &Path, &Told<'_>) -> Result<Got, store::Error> + Send,
    ) -> Result<(Got, u64), image::Error> {
        let subject = self.manifest.annotations.get(SUBJECT).and_then(|text| text.parse().ok());
        let subject: Digest =
            subject.ok_or_else(|| image::Error::Config { what: "it does not say what it is".into() })?;
        let staged = self.store.stage()?;
        let wanted = self.missing()?;
        let room = Arc::new(AtomicU64::new(self.store.disk_free_bytes()?.saturating_sub(RESERVE_BYTES)));
        let target = |layer: &Descriptor| {
            let member = Member::of(layer).map_err(io::Error::other)?;
            Unpacked::create(&staged.path().join(member.digest.as_str()), member.bytes, &room)
        };
        let fetched = counted(self.client, Stage::Fetch, &wanted, watch, |told| {
            fetch_all(self.client, self.repository, &wanted, THREADS, &target, told).map_err(Into::into)
        })?;
        let mut got = None;
        counted(self.client, Stage::Publish, &[], watch, |told| {
            got = Some(take_in(self.store, &subject, staged.path(), &Told(told))?);
            Ok(())
        })?;
        Ok((got.ok_or(image::Error::GivenUp)?, fetched))
    }

    /// Layers whose members are not here, each member once.
    fn missing(&self) -> Result<Vec<Descriptor>, image::Error> {
        let (mut seen, mut wanted) = (BTreeSet::new(), Vec::new());
        for layer in &self.manifest.layers {
            let member = Member::of(layer)?;
            if seen.insert(member.digest.clone()) && !self.store.has_member(&member.digest, member.bytes)? {
                wanted.push(layer.clone());
            }
        }
        let free_bytes = self.store.disk_free_bytes()?;
        let needed_bytes = wanted.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
        if needed_bytes > free_bytes {
            return Err(store::Error::NotEnoughSpace { needed_bytes, free_bytes }.into());
        }
        Ok(wanted)
    }

    /// Anyone's image: its layers are fetched side by side, and laid over each other as they come.
    fn image(
        &self,
        digest: &registry::Digest,
        spec: &ImportSpec,
        watch: &mut Watch<'_>,
    ) -> Result<(Got, u64), image::Error> {
        let key = noted_as(digest, spec);
        let known = key.as_ref().and_then(|key| self.store.cached::<Digest>(key).ok().flatten());
        if let Some(image) = known.and_then(|digest| self.store.pin_image(&digest).ok()) {
            return Ok((Got::Image(Box::new(image)), 0));
        }
        let config = while_wanted(self.client, Stage::Fetch, watch, || self.config())?;
        let staged = self.store.stage()?;
        let (image, bytes) = self.laid(&config, spec, staged.path(), watch)?;
        if let Some(key) = key
            && let Err(error) = self.store.cache(&key, &image.digest)
        {
            tracing::warn!(%error, "an image that was pulled cannot be noted; it is fetched again next time");
        }
        Ok((Got::Image(Box::new(image)), bytes))
    }

    fn config(&self) -> Result<ImageConfig, image::Error> {
        let descriptor = &self.manifest.config;
        if descriptor.size > CONFIG_MAX {
            return Err(image::Error::Config { what: format!("its configuration has {} bytes", descriptor.size) });
        }
        let mut bytes = Vec::new();
        self.client.blob(self.repository, descriptor, &mut bytes, &|_| Ok(()))?;
        Ok(ImageConfig::parse(&bytes)?)
    }

    fn laid(
        &self,
        config: &ImageConfig,
        spec: &ImportSpec,
        dir: &Path,
        watch: &mut Watch<'_>,
    ) -> Result<(Image, u64), image::Error> {
        let layers: Vec<_> = self.manifest.layers.iter().enumerate().collect();
        let (fetched, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
        let total_bytes = Some(self.manifest.layers.iter().map(|layer| layer.size).fold(0, u64::saturating_add));
        let (done, ready) = mpsc::channel();
        let done = Mutex::new(done);
        let told = |bytes| {
            fetched.fetch_add(bytes, Ordering::Relaxed);
            if stopped.load(Ordering::Relaxed) { Err(GivenUp) } else { Ok(()) }
        };
        let work = |(index, layer): &(usize, &Descriptor), told: registry::Watch<'_>| {
            let path = dir.join(index.to_string());
            let file = File::create_new(&path);
            let what = path.display().to_string();
            let mut file = file.map_err(|source| registry::Error::Io { operation: "create", what, source })?;
            self.client.blob(self.repository, layer, &mut file, told)?;
            // Nobody listens if the laying of layers has failed; then this is over, too.
            let told = done.lock().map_or(Err(GivenUp), |done| done.send(*index).map_err(|_| GivenUp));
            told.map_err(|_| registry::Error::GivenUp)
        };
        let described = Described { manifest: self.manifest, config };
        let image = std::thread::scope(|scope| {
            let fetching = scope.spawn(|| parallel(THREADS, &layers, &told, &work));
            let mut there = BTreeSet::new();
            let mut next = |index: usize, watch: &mut Watch<'_>| {
                while !there.contains(&index) {
                    let done_bytes = fetched.load(Ordering::Relaxed);
                    watch(Progress { stage: Stage::Fetch, done_bytes, total_bytes })?;
                    match ready.recv_timeout(POLL) {
                        Ok(index) => drop(there.insert(index)),
                        Err(RecvTimeoutError::Timeout) if !fetching.is_finished() => {}
                        // What went wrong is told below.
                        Err(_) if ready.try_iter().map(|index| there.insert(index)).count() == 0 => {
                            return Err(image::Error::GivenUp);
                        }
                        Err(_) => {}
                    }
                }
                Ok(dir.join(index.to_string()))
            };
            let laid = image_of_layers(self.store, &described, spec, &mut next, watch);
            if laid.is_err() {
                stopped.store(true, Ordering::Relaxed);
                self.client.give_up();
            }
            let fetched = fetching.join().expect("fetching does not panic");
            match (laid, fetched) {
                (Ok(image), _) => Ok(image),
                (Err(image::Error::GivenUp), Err(error)) if !matches!(error, registry::Error::GivenUp) => {
                    Err(error.into())
                }
                (Err(error), _) => Err(error),
            }
        })?;
        Ok((image, fetched.into_inner()))
    }
}

/// What an image that was made from a manifest is noted under. With a kernel of the user's own it is not: the kernel may
/// be another one by then.
fn noted_as(manifest: &registry::Digest, spec: &ImportSpec) -> Option<Name> {
    let kernel = match spec.kernel {
        KernelChoice::Cloud => "cloud",
        KernelChoice::Full => "full",
        KernelChoice::Own(_) => return None,
    };
    let shape = (RECIPE, manifest.to_string(), kernel, spec.init, spec.disk_bytes);
    let shape = serde_json::to_vec(&shape).expect("plain data");
    Some(format!("oci-{}", &Digest::of(&shape).as_str()[..40]).parse().expect("it is a name"))
}

/// Does a small request on another thread, and gives it up with whoever waits for it.
pub(super) fn while_wanted<T: Send>(
    client: &Client,
    stage: Stage,
    watch: &mut Watch<'_>,
    ask: impl FnOnce() -> Result<T, image::Error> + Send,
) -> Result<T, image::Error> {
    let mut answer = None;
    counted(client, stage, &[], watch, |_| {
        answer = Some(ask()?);
        Ok(())
    })?;
    answer.ok_or(image::Error::GivenUp)
}

/// Does a transfer on another thread while this one tells how far it is; how many bytes were moved.
pub(super) fn counted(
    client: &Client,
    stage: Stage,
    layers: &[Descriptor],
    watch: &mut Watch<'_>,
    transfer: impl FnOnce(registry::Watch<'_>) -> Result<(), image::Error> + Send,
) -> Result<u64, image::Error> {
    let total_bytes = layers.iter().map(|layer| layer.size).reduce(u64::saturating_add);
    let (moved, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    let told = |bytes| {
        moved.fetch_add(bytes, Ordering::Relaxed);
        if stopped.load(Ordering::Relaxed) { Err(GivenUp) } else { Ok(()) }
    };
    std::thread::scope(|scope| {
        let (done, over) = mpsc::channel::<()>();
        let transferring = scope.spawn(|| {
            let _done = done;
            transfer(&told)
        });
        while over.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
            let done_bytes = moved.load(Ordering::Relaxed);
            if watch(Progress { stage, done_bytes, total_bytes }).is_err() {
                stopped.store(true, Ordering::Relaxed);
                client.give_up();
            }
        }
        transferring.join().expect("a transfer does not panic")
    })?;
    if stopped.load(Ordering::Relaxed) { Err(image::Error::GivenUp) } else { Ok(moved.into_inner()) }
}

/// What the store tells and asks, for whoever watches a transfer.
struct Told<'a>(registry::Watch<'a>);

impl store::Progress for Told<'_> {
    fn begin(&self, _total_bytes: u64) {}

    fn advance(&self, bytes: u64) {
        if (self.0)(bytes).is_err() {
            tracing::debug!("a transfer was given up; whoever works for it asks next");
        }
    }

    fn is_cancelled(&self) -> bool {
        (self.0)(0).is_err()
    }
}

/// A file that gets a member's bytes as they are unpacked, with holes where there are zeros.
struct Unpacked {
    decoder: zstd::stream::write::Decoder<'static, Sparse>,
    path: PathBuf,
    bytes: u64,
    room: Arc<AtomicU64>,
}

impl Unpacked {
    /// `room`: what all members of an artifact may take together.
    fn create(path: &Path, bytes: u64, room: &Arc<AtomicU64>) -> io::Result<Self> {
        let file = File::options().write(true).create(true).truncate(true).open(path)?;
        let decoder = zstd::stream::write::Decoder::new(Sparse { file, at: 0, bytes, room: room.clone() })?;
        Ok(Self { decoder, path: path.to_owned(), bytes, room: room.clone() })
    }
}

impl BlobTarget for Unpacked {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.decoder.write_all(bytes)
    }

    fn restart(&mut self) -> io::Result<()> {
        *self = Self::create(&self.path, self.bytes, &self.room)?;
        Ok(())
    }

    fn complete(&mut self) -> io::Result<()> {
        self.decoder.flush()?;
        let Sparse { file, at, bytes, .. } = self.decoder.get_mut();
        match at == bytes {
            true => file.set_len(*bytes),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has {at} bytes where {bytes} belong"))),
        }
    }
}

struct Sparse {
    file: File,
    at: u64,
    /// More than these are refused.
    bytes: u64,
    room: Arc<AtomicU64>,
}

impl Sparse {
    fn take_room(&self, bytes: u64) -> io::Result<()> {
        let taken = self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        taken
            .map(drop)
            .map_err(|_| io::Error::new(io::ErrorKind::StorageFull, "it unpacks to more than there is room for"))
    }
}

impl Write for Sparse {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.bytes - self.at {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it unpacks to more than it says"));
        }
        if bytes.iter().any(|byte| *byte != 0) {
            self.take_room(bytes.len() as u64)?;
            self.file.write_all_at(bytes, self.at)?;
        }
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pulled_without_a_name_has_one() {
        for (reference, name) in [
            ("localhost:5000/team/app:1.2", "app-1.2"),
            ("localhost:5000/team/app", "app"),
            ("localhost:5000/app:latest", "app"),
            ("localhost:5000/a/b/tool:V2", "tool-v2"),
        ] {
            assert_eq!(name_of(&reference.parse().unwrap()), name);
        }
    }

    #[test]
    fn a_member_is_unpacked_with_holes_and_never_beyond_what_it_says() {
        let dir = tempfile::tempdir().unwrap();
        let content = [vec![7; 5000], vec![0; 1 << 20], vec![8; 10]].concat();
        let packed = zstd::encode_all(&content[..], 3).unwrap();
        let room = Arc::new(AtomicU64::new(1 << 20));
        let take = |bytes: u64| {
            let mut unpacked = Unpacked::create(&dir.path().join("x"), bytes, &room)?;
            packed.chunks(100).try_for_each(|chunk| unpacked.append(chunk))?;
            unpacked.complete()
        };
        take(content.len() as u64).unwrap();
        assert_eq!(std::fs::read(dir.path().join("x")).unwrap(), content);
        assert!(take(content.len() as u64 - 1).is_err());
        assert!(take(content.len() as u64 + 1).is_err());
        room.store(100, Ordering::Relaxed);
        assert_eq!(take(content.len() as u64).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
