//! From a registry into the store.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};

use sandtree_registry::{
    self as registry, Client, Descriptor, Document, GivenUp, ImageConfig, Manifest, Reference,
    fetch_all, media, parallel,
};
use sandtree_store::{self as store, Digest, Image, Name, Pinned, Store, Target};
use serde::Serialize;

use super::transfer::{POLL, Told, counted, while_wanted};
use super::unpacked::Unpacked;
use super::{IMAGE, Member, RegistryAccess, SNAPSHOT, SUBJECT, THREADS};
use crate::blocking::blocking;
use crate::error::{Error, Result};
use crate::host::{Host, Inner};
use crate::image::{
    self, ARCHITECTURE, Described, ImportSpec, KernelChoice, OS, Progress, Stage, Watch,
    image_of_layers, writable_bytes,
};
use crate::note;
use crate::save::name_error;
use crate::spec::parse_name;
use crate::states::Replace;

/// A configuration is a few KiB.
const CONFIG_MAX: u64 = 4 << 20;
/// Counts up when images are made differently from their layers.
const RECIPE: u32 = 1;

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
                self.inner.check_free(
                    &store::SaveTarget::Name(name.clone()),
                    Replace::from(spec.replace),
                    None,
                )?;
            }
            Kind::Oci | Kind::Ours(PulledKind::Image) => self.inner.check_image_name(&name)?,
        }
        let (got, fetched_bytes) = self.inner.fetch(there, spec, progress).await?;
        let (kind, digest) = match got {
            Got::Image(image) => {
                self.inner.name_image(&name, &image).await?;
                (PulledKind::Image, image.digest.clone())
            }
            Got::Snapshot(pinned) => (
                PulledKind::Snapshot,
                self.inner.name_pulled(&name, *pinned, spec.replace).await?,
            ),
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
            Got::Snapshot(_) => Err(Error::NotAnImage {
                name: reference.into(),
                found: "a snapshot".into(),
            }),
        }
    }

    /// What there is behind a reference; nothing of it is fetched yet.
    async fn look(self: &Arc<Self>, reference: Reference, spec: &PullSpec) -> Result<There> {
        let (text, access) = (reference.to_string(), spec.access.clone());
        let there = self.making(
            &text,
            |_| (),
            move |work| work.watched(|_, watch| look(reference, &access, watch)),
        );
        there.await.map_err(|error| error.of_transfer("pull"))
    }

    async fn fetch(
        self: &Arc<Self>,
        there: There,
        spec: &PullSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<(Got, u64)> {
        let (text, import) = (there.reference.to_string(), spec.import.clone());
        let fetched = self.making(&text, progress, move |work| {
            work.watched(|store, watch| fetch(store, &there, &import, watch))
        });
        fetched.await.map_err(|error| error.of_transfer("pull"))
    }

    /// Gives a snapshot that was pulled its name, or lets it go.
    async fn name_pulled(
        self: &Arc<Self>,
        name: &Name,
        pinned: Pinned,
        replace: bool,
    ) -> Result<Digest> {
        let (host, name) = (self.clone(), name.clone());
        blocking(move || {
            let digest = pinned.digest.clone();
            let named = host.replacing(&name, || host.store.tag_snapshot(&digest, &name, replace));
            let left = if named.is_err() {
                host.store.let_go(pinned)
            } else {
                Ok(())
            };
            named.and(left).map_err(name_error)?;
            Ok(digest)
        })
        .await
    }
}

pub(super) fn parse(reference: &str) -> Result<Reference> {
    let refused = |error: registry::Error| error.into();
    reference.parse().map_err(|e| Error::Transfer {
        verb: "use",
        reference: reference.to_owned(),
        source: refused(e),
    })
}

/// What something is called that was pulled without a name.
fn name_of(reference: &Reference) -> String {
    let last = reference.repository.rsplit('/').next().unwrap_or_default();
    let tag = reference
        .tag
        .as_deref()
        .filter(|tag| *tag != "latest" && reference.digest.is_none());
    let name = tag
        .map_or_else(|| last.to_owned(), |tag| format!("{last}-{tag}"))
        .to_ascii_lowercase();
    name.chars().take(63).collect()
}

fn look(
    reference: Reference,
    access: &RegistryAccess,
    watch: &mut Watch<'_>,
) -> Result<There, image::Error> {
    let client = access.client(&reference)?;
    let (manifest, digest) = while_wanted(&client, Stage::Fetch, watch, |_| {
        manifest_of(&client, &reference)
    })?;
    let kind = kind_of(&manifest)?;
    Ok(There {
        client,
        reference,
        manifest,
        digest,
        kind,
    })
}

/// What a manifest says it is. Artifacts from before there were artifacts say it by the kind of
/// their configuration.
fn kind_of(manifest: &Manifest) -> Result<Kind, image::Error> {
    let config = manifest.config.media_type.as_str();
    let is_image = !config.starts_with("application/vnd.")
        || [media::OCI_CONFIG, media::DOCKER_CONFIG].contains(&config);
    match manifest
        .artifact_type
        .as_deref()
        .or((!is_image).then_some(config))
    {
        Some(SNAPSHOT) => Ok(Kind::Ours(PulledKind::Snapshot)),
        Some(IMAGE) => Ok(Kind::Ours(PulledKind::Image)),
        Some(other) => Err(image::Error::Config {
            what: format!("it is an artifact of type {other}"),
        }),
        None => Ok(Kind::Oci),
    }
}

fn fetch(
    store: &Store,
    there: &There,
    import: &ImportSpec,
    watch: &mut Watch<'_>,
) -> Result<(Got, u64), image::Error> {
    watch(Progress::begin(Stage::Fetch))?;
    let There {
        client,
        reference,
        manifest,
        digest,
        kind,
    } = there;
    let fetching = Fetching {
        store,
        client,
        repository: &reference.repository,
        manifest,
    };
    match kind {
        Kind::Ours(PulledKind::Snapshot) => fetching.members(watch, |store, subject, dir, told| {
            let pinned = store.unpack_snapshot(subject, dir, Target::Unnamed, told)?;
            Ok(Got::Snapshot(Box::new(pinned)))
        }),
        Kind::Ours(PulledKind::Image) => fetching.members(watch, |store, subject, dir, told| {
            store
                .unpack_image(subject, dir, told)
                .map(|image| Got::Image(Box::new(image)))
        }),
        Kind::Oci => fetching.image(digest, import, watch),
    }
}

/// The manifest behind a reference: of an index, the one for this machine.
fn manifest_of(
    client: &Client,
    reference: &Reference,
) -> Result<(Manifest, registry::Digest), image::Error> {
    let fetched = client.manifest(reference)?;
    match Document::parse(&fetched.media_type, &fetched.bytes)? {
        Document::Manifest(manifest) => Ok((*manifest, fetched.digest)),
        Document::Index(index) => {
            let digest = index.choose(OS, ARCHITECTURE, None)?.digest;
            let fetched = client.manifest(&Reference {
                digest: Some(digest),
                ..reference.clone()
            })?;
            match Document::parse(&fetched.media_type, &fetched.bytes)? {
                Document::Manifest(manifest) => Ok((*manifest, digest)),
                Document::Index(_) => Err(image::Error::Config {
                    what: "its index leads to another index".into(),
                }),
            }
        }
    }
}

struct Fetching<'a> {
    store: &'a Store,
    client: &'a Client,
    repository: &'a str,
    manifest: &'a Manifest,
}

impl Fetching<'_> {
    /// An artifact of ours: fetches the members that the store does not have, and lets it take them
    /// in.
    fn members(
        &self,
        watch: &mut Watch<'_>,
        take_in: impl FnOnce(&Store, &Digest, &Path, &Told<'_>) -> Result<Got, store::Error> + Send,
    ) -> Result<(Got, u64), image::Error> {
        let subject = self
            .manifest
            .annotations
            .get(SUBJECT)
            .and_then(|text| text.parse().ok());
        let subject: Digest = subject.ok_or_else(|| image::Error::Config {
            what: "it does not say what it is".into(),
        })?;
        let staged = self.store.stage()?;
        let wanted = self.missing()?;
        let room = Arc::new(AtomicU64::new(writable_bytes(self.store)?));
        let target = |layer: &Descriptor| {
            let member = Member::of(layer).map_err(io::Error::other)?;
            Unpacked::create(
                &staged.path().join(member.digest.as_str()),
                member.bytes,
                &room,
            )
        };
        let fetched = counted(self.client, Stage::Fetch, &wanted, watch, |told| {
            fetch_all(
                self.client,
                self.repository,
                &wanted,
                THREADS,
                &target,
                told,
            )
            .map_err(Into::into)
        })?;
        let got = while_wanted(self.client, Stage::Publish, watch, |told| {
            Ok(take_in(self.store, &subject, staged.path(), &Told(told))?)
        })?;
        Ok((got, fetched))
    }

    /// Layers whose members are not here, each member once.
    fn missing(&self) -> Result<Vec<Descriptor>, image::Error> {
        let (mut seen, mut wanted) = (BTreeSet::new(), Vec::new());
        for layer in &self.manifest.layers {
            let member = Member::of(layer)?;
            if seen.insert(member.digest.clone())
                && !self.store.has_member(&member.digest, member.bytes)?
            {
                wanted.push(layer.clone());
            }
        }
        let free_bytes = self.store.disk_free_bytes()?;
        let needed_bytes = wanted
            .iter()
            .map(|layer| layer.size)
            .fold(0, u64::saturating_add);
        if needed_bytes > free_bytes {
            return Err(store::Error::NotEnoughSpace {
                needed_bytes,
                free_bytes,
            }
            .into());
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
        let known = key
            .as_ref()
            .and_then(|key| self.store.cached::<Digest>(key).ok().flatten());
        if let Some(image) = known.and_then(|digest| self.store.pin_image(&digest).ok()) {
            return Ok((Got::Image(Box::new(image)), 0));
        }
        let config = while_wanted(self.client, Stage::Fetch, watch, |_| self.config())?;
        let staged = self.store.stage()?;
        let (image, bytes) = self.laid(&config, spec, staged.path(), watch)?;
        if let Some(key) = key {
            let otherwise =
                "an image that was pulled cannot be noted; it is fetched again next time";
            note::keep(self.store, &key, &image.digest, otherwise);
        }
        Ok((Got::Image(Box::new(image)), bytes))
    }

    fn config(&self) -> Result<ImageConfig, image::Error> {
        let descriptor = &self.manifest.config;
        if descriptor.size > CONFIG_MAX {
            return Err(image::Error::Config {
                what: format!("its configuration has {} bytes", descriptor.size),
            });
        }
        let mut bytes = Vec::new();
        self.client
            .blob(self.repository, descriptor, &mut bytes, &|_| Ok(()))?;
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
        let total_bytes = Some(
            self.manifest
                .layers
                .iter()
                .map(|layer| layer.size)
                .fold(0, u64::saturating_add),
        );
        let (done, ready) = mpsc::channel();
        let done = Mutex::new(done);
        let told = |bytes| {
            fetched.fetch_add(bytes, Ordering::Relaxed);
            if stopped.load(Ordering::Relaxed) {
                Err(GivenUp)
            } else {
                Ok(())
            }
        };
        let work = |(index, layer): &(usize, &Descriptor), told: registry::Watch<'_>| {
            let path = dir.join(index.to_string());
            let file = File::create_new(&path);
            let what = path.display().to_string();
            let mut file = file.map_err(|source| registry::Error::Io {
                operation: "create",
                what,
                source,
            })?;
            self.client.blob(self.repository, layer, &mut file, told)?;
            // Nobody listens if the laying of layers has failed; then this is over, too.
            let told = done
                .lock()
                .map_or(Err(GivenUp), |done| done.send(*index).map_err(|_| GivenUp));
            told.map_err(|_| registry::Error::GivenUp)
        };
        let described = Described {
            manifest: self.manifest,
            config,
        };
        let image = std::thread::scope(|scope| {
            let fetching = scope.spawn(|| parallel(THREADS, &layers, &told, &work));
            let mut there = BTreeSet::new();
            let mut next = |index: usize, watch: &mut Watch<'_>| {
                while !there.contains(&index) {
                    let done_bytes = fetched.load(Ordering::Relaxed);
                    watch(Progress {
                        stage: Stage::Fetch,
                        done_bytes,
                        total_bytes,
                    })?;
                    match ready.recv_timeout(POLL) {
                        Ok(index) => drop(there.insert(index)),
                        Err(RecvTimeoutError::Timeout) if !fetching.is_finished() => {}
                        // What went wrong is told below.
                        Err(_)
                            if ready.try_iter().map(|index| there.insert(index)).count() == 0 =>
                        {
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
                (Err(image::Error::GivenUp), Err(error))
                    if !matches!(error, registry::Error::GivenUp) =>
                {
                    Err(error.into())
                }
                (Err(error), _) => Err(error),
            }
        })?;
        Ok((image, fetched.into_inner()))
    }
}

/// What an image that was made from a manifest is noted under. With a kernel of the user's own it
/// is not: the kernel may be another one by then.
fn noted_as(manifest: &registry::Digest, spec: &ImportSpec) -> Option<Name> {
    let kernel = match spec.kernel {
        KernelChoice::Cloud => "cloud",
        KernelChoice::Full => "full",
        KernelChoice::Own(_) => return None,
    };
    let shape = (
        RECIPE,
        manifest.to_string(),
        kernel,
        spec.init,
        spec.disk_bytes,
    );
    let shape = serde_json::to_vec(&shape).expect("plain data");
    Some(note::key("oci", &Digest::of(&shape)))
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
}
