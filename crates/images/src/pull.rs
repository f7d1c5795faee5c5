//! Images and snapshots from a registry into the store.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use sandtree_registry::{
    self as registry, Cancelled, Client, Descriptor, Document, ImageConfig, Manifest, Reference,
    fetch_all, media, parallel,
};
use sandtree_store::{self as store, Digest, Image, Name, Named, Pinned, Store, Target};
use serde::Serialize;

use crate::access::RegistryAccess;
use crate::artifact::{IMAGE, Member, SNAPSHOT, SUBJECT, THREADS};
use crate::error::{Error, Result};
use crate::job::{Job, Progress, Stage};
use crate::memo;
use crate::new_image::writable_bytes;
use crate::oci::{ARCHITECTURE, Described, OS, image_of_layers};
use crate::spec::{ImportSpec, KernelChoice};
use crate::transfer::{Counter, POLL, StoreProgress, Transfer, on_thread, total_bytes};
use crate::unpacked::Unpacked;

/// A configuration is a few KiB.
const CONFIG_MAX: u64 = 4 << 20;
/// Part of the key; incremented when images are made differently from their layers.
const RECIPE: u32 = 1;
/// The longest name in the store.
const NAME_MAX: usize = 63;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PulledKind {
    Image,
    Snapshot,
}

/// An image or snapshot that was fetched. It has no name yet, and stays while this lives.
#[derive(Debug)]
pub enum Fetched {
    Image(Box<Image>),
    Snapshot(Box<Pinned>),
}

/// The content behind a reference. Only its manifest is fetched so far.
#[derive(Debug)]
pub struct Remote {
    client: Client,
    reference: Reference,
    manifest: Manifest,
    digest: registry::Digest,
    source: Source,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// An OCI image.
    Oci,
    /// One of our artifacts.
    Artifact(PulledKind),
}

/// Finds out what a reference leads to.
pub fn look_up(job: &mut Job<'_>, reference: &str, access: &RegistryAccess) -> Result<Remote> {
    let reference = parse_reference(reference)?;
    let text = reference.to_string();
    let found = Remote::look_up(job, reference, access);
    found.map_err(|error| error.transferring("pull", text))
}

pub(crate) fn parse_reference(text: &str) -> Result<Reference> {
    let parsed = text.parse::<Reference>().map_err(Error::from);
    parsed.map_err(|error| error.transferring("use", text))
}

/// An image from a registry, without a name. A snapshot is refused.
pub fn image_from_registry(
    job: &mut Job<'_>,
    reference: &str,
    access: &RegistryAccess,
    spec: &ImportSpec,
) -> Result<Image> {
    let remote = look_up(job, reference, access)?;
    match remote.fetch(job, spec)?.0 {
        Fetched::Image(image) => Ok(*image),
        Fetched::Snapshot(pinned) => Err(Error::NotAnImage {
            name: reference.to_owned(),
            found: Named::Snapshot(pinned.digest.clone()),
        }),
    }
}

impl Remote {
    fn look_up(job: &mut Job<'_>, reference: Reference, access: &RegistryAccess) -> Result<Self> {
        let client = access.client(&reference)?;
        let (manifest, digest) = on_thread(job, &client, Stage::Fetch, |_| {
            manifest_of(&client, &reference)
        })?;
        let source = source_of(&manifest)?;
        Ok(Self {
            client,
            reference,
            manifest,
            digest,
            source,
        })
    }

    /// What the content becomes in the store.
    pub fn kind(&self) -> PulledKind {
        match self.source {
            Source::Oci => PulledKind::Image,
            Source::Artifact(kind) => kind,
        }
    }

    /// The digest of the manifest, in the registry.
    pub fn manifest_digest(&self) -> String {
        self.digest.to_string()
    }

    /// Fetches the content. Returns it with the number of bytes that came over the network.
    pub fn fetch(&self, job: &mut Job<'_>, spec: &ImportSpec) -> Result<(Fetched, u64)> {
        let fetched = self.fetch_any(job, spec);
        fetched.map_err(|error| error.transferring("pull", &self.reference))
    }

    fn fetch_any(&self, job: &mut Job<'_>, spec: &ImportSpec) -> Result<(Fetched, u64)> {
        job.begin(Stage::Fetch)?;
        let take_snapshot =
            |store: &Store, subject: &Digest, dir: &Path, progress: &StoreProgress| {
                let pinned = store.unpack_snapshot(subject, dir, Target::Unnamed, progress)?;
                Ok(Fetched::Snapshot(Box::new(pinned)))
            };
        let take_image = |store: &Store, subject: &Digest, dir: &Path, progress: &StoreProgress| {
            let image = store.unpack_image(subject, dir, progress)?;
            Ok(Fetched::Image(Box::new(image)))
        };
        match self.source {
            Source::Artifact(PulledKind::Snapshot) => self.fetch_members(job, take_snapshot),
            Source::Artifact(PulledKind::Image) => self.fetch_members(job, take_image),
            Source::Oci => self.fetch_image(job, spec),
        }
    }

    /// Fetches the missing members of one of our artifacts, and lets the store import them.
    fn fetch_members(
        &self,
        job: &mut Job<'_>,
        take_in: impl FnOnce(
            &Store,
            &Digest,
            &Path,
            &StoreProgress<'_>,
        ) -> Result<Fetched, store::Error>
        + Send,
    ) -> Result<(Fetched, u64)> {
        let store = job.store;
        let subject = self.subject()?;
        let staged = store.stage()?;
        let wanted = self.missing_members(store)?;
        let room = Arc::new(AtomicU64::new(writable_bytes(store)?));
        let target = |layer: &Descriptor| {
            let member = Member::of(layer).map_err(io::Error::other)?;
            let path = staged.path().join(member.digest.as_str());
            Unpacked::create(&path, member.bytes, &room)
        };
        let transfer = Transfer {
            client: &self.client,
            stage: Stage::Fetch,
            layers: &wanted,
        };
        let fetched_bytes = transfer.run(job, |watch| {
            let repository = &self.reference.repository;
            fetch_all(&self.client, repository, &wanted, THREADS, &target, watch)?;
            Ok(())
        })?;
        let fetched = on_thread(job, &self.client, Stage::Publish, |watch| {
            let progress = StoreProgress(watch);
            Ok(take_in(store, &subject, staged.path(), &progress)?)
        })?;
        Ok((fetched, fetched_bytes))
    }

    /// The digest of the snapshot or image that the artifact holds.
    fn subject(&self) -> Result<Digest> {
        let subject = self.manifest.annotations.get(SUBJECT);
        let subject = subject.and_then(|text| text.parse().ok());
        subject.ok_or_else(|| Error::Config {
            what: "it does not say what it is".to_owned(),
        })
    }

    /// The layers whose members are not in the store, each member once.
    fn missing_members(&self, store: &Store) -> Result<Vec<Descriptor>> {
        let mut seen = BTreeSet::new();
        let mut wanted = Vec::new();
        for layer in &self.manifest.layers {
            let member = Member::of(layer)?;
            let is_new = seen.insert(member.digest.clone());
            if is_new && !store.has_member(&member.digest, member.bytes)? {
                wanted.push(layer.clone());
            }
        }
        let needed_bytes = total_bytes(&wanted);
        let free_bytes = store.disk_free_bytes()?;
        if needed_bytes > free_bytes {
            return Err(Error::Publish(store::Error::NotEnoughSpace {
                needed_bytes,
                free_bytes,
            }));
        }
        Ok(wanted)
    }

    /// Makes an image from OCI layers, or finds the one that was made from them before.
    fn fetch_image(&self, job: &mut Job<'_>, spec: &ImportSpec) -> Result<(Fetched, u64)> {
        let key = memo_key(&self.digest, spec);
        if let Some(image) = key.as_ref().and_then(|key| memo_of(job.store, key)) {
            return Ok((Fetched::Image(Box::new(image)), 0));
        }
        let config = on_thread(job, &self.client, Stage::Fetch, |_| self.config())?;
        let staged = job.store.stage()?;
        let layers = Layers::new(self, staged.path());
        let image = layers.make_image(job, &config, spec)?;
        if let Some(key) = key {
            memo::record(
                job.store,
                &key,
                &image.digest,
                "a pulled image cannot be recorded; it will be fetched again next time",
            );
        }
        Ok((Fetched::Image(Box::new(image)), layers.counter.bytes()))
    }

    fn config(&self) -> Result<ImageConfig> {
        let descriptor = &self.manifest.config;
        if descriptor.size > CONFIG_MAX {
            return Err(Error::Config {
                what: format!("its configuration has {} bytes", descriptor.size),
            });
        }
        let mut bytes = Vec::new();
        let repository = &self.reference.repository;
        self.client
            .blob(repository, descriptor, &mut bytes, &|_| Ok(()))?;
        Ok(ImageConfig::parse(&bytes)?)
    }
}

/// The layers of an OCI image, fetched side by side while they are applied in order.
struct Layers<'a> {
    remote: &'a Remote,
    /// The directory of the layers' files, which are named by their index.
    dir: &'a Path,
    counter: Counter,
}

impl<'a> Layers<'a> {
    fn new(remote: &'a Remote, dir: &'a Path) -> Self {
        Self {
            remote,
            dir,
            counter: Counter::default(),
        }
    }

    fn make_image(
        &self,
        job: &mut Job<'_>,
        config: &ImageConfig,
        spec: &ImportSpec,
    ) -> Result<Image> {
        let described = Described {
            manifest: &self.remote.manifest,
            config,
        };
        let (done, ready) = mpsc::channel();
        std::thread::scope(|scope| {
            let fetching = scope.spawn(move || self.fetch_all(done));
            let mut complete = Complete::new(ready);
            let mut next = |index: usize, job: &mut Job<'_>| {
                while !complete.contains(index) {
                    self.report(job)?;
                    complete.wait()?;
                }
                Ok(self.dir.join(index.to_string()))
            };
            let made = image_of_layers(job, &described, spec, &mut next);
            if made.is_err() {
                self.counter.stop(&self.remote.client);
            }
            let fetched = fetching.join().expect("fetching does not panic");
            first_failure(made, fetched)
        })
    }

    /// Fetches every layer, and sends its index once its file is complete. The channel closes at
    /// the end.
    fn fetch_all(&self, done: Sender<usize>) -> Result<(), registry::Error> {
        let done = Mutex::new(done);
        let layers: Vec<_> = self.remote.manifest.layers.iter().enumerate().collect();
        let fetch = |(index, layer): &(usize, &Descriptor), watch: registry::Watch<'_>| {
            self.fetch_one(*index, layer, watch)?;
            let done = done.lock().unwrap_or_else(PoisonError::into_inner);
            // The receiver is gone if a layer could not be applied. The others are then useless.
            done.send(*index).map_err(|_| Cancelled.into())
        };
        parallel(THREADS, &layers, &|bytes| self.counter.add(bytes), &fetch)
    }

    fn fetch_one(
        &self,
        index: usize,
        layer: &Descriptor,
        watch: registry::Watch<'_>,
    ) -> Result<(), registry::Error> {
        let path = self.dir.join(index.to_string());
        let file = File::create_new(&path);
        let mut file = file.map_err(|source| registry::Error::Io {
            operation: "create",
            what: path.display().to_string(),
            source,
        })?;
        let repository = &self.remote.reference.repository;
        self.remote.client.blob(repository, layer, &mut file, watch)
    }

    fn report(&self, job: &mut Job<'_>) -> Result<()> {
        job.report(Progress {
            stage: Stage::Fetch,
            done_bytes: self.counter.bytes(),
            total_bytes: Some(total_bytes(&self.remote.manifest.layers)),
        })
    }
}

/// The layers that are complete so far.
struct Complete {
    indexes: BTreeSet<usize>,
    ready: Receiver<usize>,
}

impl Complete {
    fn new(ready: Receiver<usize>) -> Self {
        Self {
            indexes: BTreeSet::new(),
            ready,
        }
    }

    fn contains(&self, index: usize) -> bool {
        self.indexes.contains(&index)
    }

    /// Waits a moment for one more layer. Fails once no more can come, because fetching has ended:
    /// its own error then says why.
    fn wait(&mut self) -> Result<()> {
        match self.ready.recv_timeout(POLL) {
            Ok(index) => {
                self.indexes.insert(index);
                Ok(())
            }
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Error::Cancelled),
        }
    }
}

/// If fetching failed, the image could not be made because of that.
fn first_failure(made: Result<Image>, fetched: Result<(), registry::Error>) -> Result<Image> {
    match (made, fetched) {
        (Err(Error::Cancelled), Err(error)) => Err(error.into()),
        (made, _) => made,
    }
}

/// The name for content that is pulled without one: the last part of the repository's name,
/// followed by the tag unless that is `latest`.
pub fn pulled_name(reference: &str) -> Result<String> {
    parse_reference(reference).map(|reference| default_name(&reference))
}

fn default_name(reference: &Reference) -> String {
    let last = reference.repository.rsplit('/').next().unwrap_or_default();
    let tag = reference
        .tag
        .as_deref()
        .filter(|tag| *tag != "latest" && reference.digest.is_none());
    let name = tag.map_or_else(|| last.to_owned(), |tag| format!("{last}-{tag}"));
    name.to_ascii_lowercase().chars().take(NAME_MAX).collect()
}

/// What a manifest describes. An artifact without an artifact type, as older tools write it, has
/// the type of its configuration.
fn source_of(manifest: &Manifest) -> Result<Source> {
    let config = manifest.config.media_type.as_str();
    let is_image = !config.starts_with("application/vnd.")
        || [media::OCI_CONFIG, media::DOCKER_CONFIG].contains(&config);
    let artifact_type = manifest.artifact_type.as_deref();
    match artifact_type.or((!is_image).then_some(config)) {
        Some(SNAPSHOT) => Ok(Source::Artifact(PulledKind::Snapshot)),
        Some(IMAGE) => Ok(Source::Artifact(PulledKind::Image)),
        Some(other) => Err(Error::Config {
            what: format!("it is an artifact of type {other}"),
        }),
        None => Ok(Source::Oci),
    }
}

/// The manifest behind a reference. Of an index, it is the one for this machine.
fn manifest_of(client: &Client, reference: &Reference) -> Result<(Manifest, registry::Digest)> {
    let fetched = client.manifest(reference)?;
    let index = match Document::parse(&fetched.media_type, &fetched.bytes)? {
        Document::Manifest(manifest) => return Ok((*manifest, fetched.digest)),
        Document::Index(index) => index,
    };
    let digest = index.choose(OS, ARCHITECTURE, None)?.digest;
    let chosen = Reference {
        digest: Some(digest),
        ..reference.clone()
    };
    let fetched = client.manifest(&chosen)?;
    match Document::parse(&fetched.media_type, &fetched.bytes)? {
        Document::Manifest(manifest) => Ok((*manifest, digest)),
        Document::Index(_) => Err(Error::Config {
            what: "its index leads to another index".to_owned(),
        }),
    }
}

fn memo_of(store: &Store, key: &Name) -> Option<Image> {
    let digest = store.cached::<Digest>(key).ok()??;
    store.pin_image(&digest).ok()
}

/// The memo's key of an image that is made from a manifest. `None` with a kernel of the user's own,
/// which may be another one the next time.
fn memo_key(manifest: &registry::Digest, spec: &ImportSpec) -> Option<Name> {
    let kernel = match spec.kernel {
        KernelChoice::Cloud => "cloud",
        KernelChoice::Full => "full",
        KernelChoice::Own(_) => return None,
    };
    let inputs = (
        RECIPE,
        manifest.to_string(),
        kernel,
        spec.init,
        spec.disk_bytes,
    );
    let inputs = serde_json::to_vec(&inputs).expect("plain data");
    Some(memo::key("oci", &Digest::of(&inputs)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_pulled_without_a_name_is_named_after_its_repository_and_tag() {
        for (reference, name) in [
            ("localhost:5000/team/app:1.2", "app-1.2"),
            ("localhost:5000/team/app", "app"),
            ("localhost:5000/app:latest", "app"),
            ("localhost:5000/a/b/tool:V2", "tool-v2"),
        ] {
            assert_eq!(default_name(&reference.parse().unwrap()), name);
        }
    }

    #[test]
    fn layers_that_came_before_the_end_of_fetching_are_all_complete() {
        let (done, ready) = mpsc::channel();
        done.send(2).unwrap();
        done.send(0).unwrap();
        drop(done);
        let mut complete = Complete::new(ready);
        complete.wait().unwrap();
        complete.wait().unwrap();
        assert!(complete.contains(0) && complete.contains(2));
        assert!(matches!(complete.wait(), Err(Error::Cancelled)));
    }

    #[test]
    fn the_error_of_fetching_explains_why_no_image_was_made() {
        let lost = || registry::Error::NotFound {
            what: "blob".to_owned(),
            said: registry::Said::default(),
        };
        let failure = first_failure(Err(Error::Cancelled), Err(lost())).unwrap_err();
        assert!(matches!(failure, Error::Registry(_)), "{failure:?}");
        let failure = first_failure(Err(Error::NoDebianSources), Err(lost())).unwrap_err();
        assert!(matches!(failure, Error::NoDebianSources), "{failure:?}");
        let cancelled = Err(registry::Error::Cancelled);
        let failure = first_failure(Err(Error::Cancelled), cancelled).unwrap_err();
        assert!(matches!(failure, Error::Cancelled), "{failure:?}");
    }
}
