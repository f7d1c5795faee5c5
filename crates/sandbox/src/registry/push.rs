//! From the store into a registry, as an OCI artifact.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use sandtree_registry::{
    Client, Descriptor, Digest as BlobDigest, Manifest, Reference, media, parallel,
};
use sandtree_store::{Digest, Image, Name, Named, Packable, PackedMember, Pinned, Store};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::pull::parse;
use super::transfer::{counted, while_wanted};
use super::{
    IMAGE, MEMBER, MEMBER_BYTES, MEMBER_DIGEST, MEMBER_ROLE, RegistryAccess, SNAPSHOT, SUBJECT,
    THREADS,
};
use crate::error::{Error, Result, store_error};
use crate::host::Host;
use crate::image::{self, Progress, Stage, Watch};
use crate::note;
use crate::reference::Reference as Local;

/// Part of what a packed member is noted under: changes when members are packed differently.
const PACKING: u32 = 1;
const LEVEL: i32 = 3;
/// An artifact has no configuration; this is how that is said.
const EMPTY: &[u8] = b"{}";

/// What came of a push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pushed {
    pub reference: String,
    /// Of the manifest, there.
    pub manifest: String,
    /// Of the image or snapshot.
    pub digest: String,
    /// What was sent; the rest was there already.
    pub sent_bytes: u64,
    /// All of it, packed.
    pub total_bytes: u64,
}

/// What is pushed, kept while this lives.
enum Held {
    Snapshot(Box<Pinned>),
    Image(Box<Image>),
}

impl Held {
    fn packable(&self) -> Packable<'_> {
        match self {
            Self::Snapshot(pinned) => Packable::Snapshot(pinned),
            Self::Image(image) => Packable::Image(image),
        }
    }

    fn artifact_type(&self) -> &'static str {
        match self {
            Self::Snapshot(_) => SNAPSHOT,
            Self::Image(_) => IMAGE,
        }
    }

    fn digest(&self) -> &Digest {
        match self {
            Self::Snapshot(pinned) => &pinned.digest,
            Self::Image(image) => &image.digest,
        }
    }
}

impl Host {
    /// Brings an image or a snapshot, by name or digest, to a registry.
    pub async fn push(
        &self,
        what: &str,
        reference: &str,
        access: RegistryAccess,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Pushed> {
        let to = parse(reference)?;
        let held = self.held(what)?;
        let text = to.to_string();
        let pushed = self.inner.making(&text, progress, move |work| {
            work.watched(|store, watch| {
                Pushing {
                    store,
                    held: &held,
                    to: &to,
                }
                .run(&access, watch)
            })
        });
        pushed.await.map_err(|error| error.of_transfer("push"))
    }

    fn held(&self, what: &str) -> Result<Held> {
        let store = &self.inner.store;
        let named = match Local::parse(what)? {
            Local::Name(name) => store.named(&name).map_err(store_error("read a name"))?,
            Local::Digest(digest) => match self.inner.image_if_there(&digest)? {
                Some(image) => return Ok(Held::Image(Box::new(image))),
                None => Some(Named::Snapshot(digest)),
            },
            Local::Path(_) => None,
        };
        match named {
            Some(Named::Image(digest)) => store
                .pin_image(&digest)
                .map(|image| Held::Image(Box::new(image)))
                .map_err(store_error("read an image")),
            Some(Named::Snapshot(digest)) => store
                .pin(&digest)
                .map(|pinned| Held::Snapshot(Box::new(pinned)))
                .map_err(store_error("read a snapshot")),
            _ => Err(Error::Nothing {
                reference: what.to_owned(),
            }),
        }
    }
}

/// How a member was packed before.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Packed {
    digest: String,
    bytes: u64,
}

/// A member and the blob it is there.
struct Layer {
    member: PackedMember,
    blob: Descriptor,
    /// Where it lies packed, if it is not there yet.
    file: Option<std::path::PathBuf>,
}

struct Pushing<'a> {
    store: &'a Store,
    held: &'a Held,
    to: &'a Reference,
}

impl Pushing<'_> {
    fn run(&self, access: &RegistryAccess, watch: &mut Watch<'_>) -> Result<Pushed, image::Error> {
        watch(Progress::begin(Stage::Pack))?;
        let client = access.client(self.to)?;
        let work = self.store.stage()?;
        let mut layers = Vec::new();
        for member in self.store.packing(&self.held.packable())? {
            watch(Progress {
                stage: Stage::Pack,
                done_bytes: 0,
                total_bytes: None,
            })?;
            layers.push(self.layer(&client, member, work.path(), watch)?);
        }
        let sent_bytes = self.send(&client, &layers, watch)?;
        let manifest = self.manifest(&layers);
        let bytes = serde_json::to_vec(&manifest).expect("a manifest is plain data");
        let digest = while_wanted(&client, Stage::Send, watch, |_| {
            self.send_config(&client)?;
            Ok(client.push_manifest(self.to, media::OCI_MANIFEST, &bytes)?)
        })?;
        Ok(Pushed {
            reference: self.to.to_string(),
            manifest: digest.to_string(),
            digest: self.held.digest().to_string(),
            sent_bytes,
            total_bytes: layers.iter().map(|layer| layer.blob.size).sum(),
        })
    }

    /// A member that was packed before, and is there, is not packed again.
    fn layer(
        &self,
        client: &Client,
        member: PackedMember,
        dir: &Path,
        watch: &mut Watch<'_>,
    ) -> Result<Layer, image::Error> {
        let key = noted_as(&member.digest);
        let known = self.store.cached::<Packed>(&key).ok().flatten();
        if let Some(blob) = known.and_then(|packed| packed.blob())
            && while_wanted(client, Stage::Pack, watch, |_| {
                Ok(client.has_blob(&self.to.repository, &blob.digest)?)
            })?
        {
            return Ok(Layer {
                member,
                blob,
                file: None,
            });
        }
        let path = dir.join(member.digest.as_str());
        let packed = self.pack(&member, &path, watch)?;
        let otherwise = "how a member was packed cannot be noted; it is packed again next time";
        note::keep(self.store, &key, &packed, otherwise);
        let blob = packed.blob().expect("we have just made it");
        Ok(Layer {
            member,
            blob,
            file: Some(path),
        })
    }

    fn pack(
        &self,
        member: &PackedMember,
        path: &Path,
        watch: &mut Watch<'_>,
    ) -> Result<Packed, image::Error> {
        let failed = |operation| image::io_error(operation, path);
        let mut input = self.store.open_member(&self.held.packable(), member)?;
        let output = Hashed {
            file: File::create_new(path).map_err(failed("create"))?,
            hash: Sha256::new(),
            bytes: 0,
        };
        let mut encoder = zstd::Encoder::new(output, LEVEL).map_err(failed("pack"))?;
        encoder
            .multithread(2)
            .and_then(|()| encoder.include_contentsize(false))
            .map_err(failed("pack"))?;
        let (mut chunk, mut done_bytes) = (vec![0; 1 << 20], 0);
        loop {
            let count = input
                .read(&mut chunk)
                .map_err(failed("read a member for"))?;
            if count == 0 {
                break;
            }
            encoder
                .write_all(&chunk[..count])
                .map_err(failed("write"))?;
            done_bytes += count as u64;
            watch(Progress {
                stage: Stage::Pack,
                done_bytes,
                total_bytes: Some(member.bytes),
            })?;
        }
        let Hashed { hash, bytes, .. } = encoder.finish().map_err(failed("write"))?;
        Ok(Packed {
            digest: format!("sha256:{}", image::hex(&hash.finalize())),
            bytes,
        })
    }

    fn send(
        &self,
        client: &Client,
        layers: &[Layer],
        watch: &mut Watch<'_>,
    ) -> Result<u64, image::Error> {
        let missing: Vec<_> = layers.iter().filter(|layer| layer.file.is_some()).collect();
        let blobs: Vec<_> = missing.iter().map(|layer| layer.blob.clone()).collect();
        counted(client, Stage::Send, &blobs, watch, |told| {
            let send = |layer: &&Layer, told: sandtree_registry::Watch<'_>| {
                let path = layer.file.as_deref().unwrap_or(Path::new(""));
                let mut open = |from: u64| {
                    let mut file = File::open(path)?;
                    file.seek(SeekFrom::Start(from))?;
                    Ok(Box::new(file) as Box<dyn Read + Send>)
                };
                client.push_blob(&self.to.repository, &layer.blob, &mut open, told)
            };
            Ok(parallel(THREADS, &missing, told, &send)?)
        })
    }

    fn send_config(&self, client: &Client) -> Result<(), image::Error> {
        let blob = Descriptor::of(media::OCI_EMPTY, EMPTY);
        let mut open = |from: u64| {
            Ok(Box::new(
                &EMPTY[usize::try_from(from)
                    .unwrap_or(EMPTY.len())
                    .min(EMPTY.len())..],
            ) as Box<dyn Read + Send>)
        };
        Ok(client.push_blob(&self.to.repository, &blob, &mut open, &|_| Ok(()))?)
    }

    /// The same snapshot gives the same manifest, wherever and whenever it is pushed.
    fn manifest(&self, layers: &[Layer]) -> Manifest {
        let annotated = |layer: &Layer| Descriptor {
            annotations: BTreeMap::from([
                (MEMBER_DIGEST.to_owned(), layer.member.digest.to_string()),
                (MEMBER_BYTES.to_owned(), layer.member.bytes.to_string()),
                (MEMBER_ROLE.to_owned(), layer.member.role.to_string()),
            ]),
            ..layer.blob.clone()
        };
        Manifest {
            schema_version: 2,
            media_type: Some(media::OCI_MANIFEST.to_owned()),
            artifact_type: Some(self.held.artifact_type().to_owned()),
            config: Descriptor::of(media::OCI_EMPTY, EMPTY),
            layers: layers.iter().map(annotated).collect(),
            subject: None,
            annotations: BTreeMap::from([(SUBJECT.to_owned(), self.held.digest().to_string())]),
        }
    }
}

impl Packed {
    fn blob(&self) -> Option<Descriptor> {
        Some(Descriptor::new(
            MEMBER,
            self.digest.parse::<BlobDigest>().ok()?,
            self.bytes,
        ))
    }
}

fn noted_as(member: &Digest) -> Name {
    note::key(
        "packed",
        &Digest::of(format!("{PACKING} {member}").as_bytes()),
    )
}

/// A file that knows the digest of what was written.
struct Hashed {
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.hash.update(&bytes[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
