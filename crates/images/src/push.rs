//! Images and snapshots from the store into a registry, as OCI artifacts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sandtree_registry::{
    self as registry, Client, Descriptor, Digest as BlobDigest, Manifest, Reference, media,
    parallel,
};
use sandtree_store::{Digest, Image, Name, Named, Packable, PackedMember, Pinned, Store};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::access::RegistryAccess;
use crate::artifact::{
    IMAGE, MEMBER, MEMBER_BYTES, MEMBER_DIGEST, MEMBER_ROLE, SNAPSHOT, SUBJECT, THREADS,
};
use crate::catalog::{ImageRef, find_by_digest};
use crate::error::{Error, Result, io_error, store_error};
use crate::hex::hex;
use crate::job::{Job, Progress, Stage};
use crate::memo;
use crate::pull::parse_reference;
use crate::transfer::{Transfer, on_thread, total_bytes};

/// Part of the key of a packed member; incremented when members are packed differently.
const PACKING: u32 = 1;
const LEVEL: i32 = 3;
/// The configuration of an artifact that has none.
const EMPTY: &[u8] = b"{}";

/// The outcome of a push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Pushed {
    pub reference: String,
    /// The digest of the manifest, in the registry.
    pub manifest: String,
    /// The digest of the image or snapshot.
    pub digest: String,
    /// The bytes that were sent; the registry had the rest already.
    pub sent_bytes: u64,
    /// The packed size of all members.
    pub total_bytes: u64,
}

/// The image or snapshot to push, kept while this lives.
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

impl Held {
    fn find(store: &Store, what: &ImageRef) -> Result<Self> {
        let named = match what {
            ImageRef::Name(name) => store.named(name).map_err(store_error("read a name"))?,
            ImageRef::Digest(digest) => match find_by_digest(store, digest)? {
                Some(image) => return Ok(Self::Image(Box::new(image))),
                None => Some(Named::Snapshot(digest.clone())),
            },
        };
        match named {
            Some(Named::Image(digest)) => store
                .pin_image(&digest)
                .map(|image| Self::Image(Box::new(image)))
                .map_err(store_error("read an image")),
            Some(Named::Snapshot(digest)) => store
                .pin(&digest)
                .map(|pinned| Self::Snapshot(Box::new(pinned)))
                .map_err(store_error("read a snapshot")),
            Some(Named::Reserved(_)) | None => Err(Error::NoImageOrSnapshot {
                reference: what.to_string(),
            }),
        }
    }
}

/// Sends an image or a snapshot to a registry.
pub fn push(
    job: &mut Job<'_>,
    what: &ImageRef,
    reference: &str,
    access: &RegistryAccess,
) -> Result<Pushed> {
    let to = parse_reference(reference)?;
    let held = Held::find(job.store, what)?;
    let push = Push {
        store: job.store,
        held: &held,
        to: &to,
    };
    let pushed = push.run(job, access);
    pushed.map_err(|error| error.transferring("push", &to))
}

/// The memo of how a member was packed.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Packed {
    digest: String,
    bytes: u64,
}

/// A member, and its blob in the registry.
struct Layer {
    member: PackedMember,
    blob: Descriptor,
    /// The packed file. `None`: the registry has the blob already.
    file: Option<PathBuf>,
}

struct Push<'a> {
    store: &'a Store,
    held: &'a Held,
    to: &'a Reference,
}

impl Push<'_> {
    fn run(&self, job: &mut Job<'_>, access: &RegistryAccess) -> Result<Pushed> {
        job.begin(Stage::Pack)?;
        let client = access.client(self.to)?;
        let work = self.store.stage()?;
        let mut layers = Vec::new();
        for member in self.store.packing(&self.held.packable())? {
            job.begin(Stage::Pack)?;
            layers.push(self.layer(job, &client, member, work.path())?);
        }
        let sent_bytes = self.send(job, &client, &layers)?;
        let manifest = self.manifest(&layers);
        let bytes = serde_json::to_vec(&manifest).expect("a manifest is plain data");
        let digest = on_thread(job, &client, Stage::Send, |_| {
            self.send_config(&client)?;
            Ok(client.push_manifest(self.to, media::OCI_MANIFEST, &bytes)?)
        })?;
        Ok(Pushed {
            reference: self.to.to_string(),
            manifest: digest.to_string(),
            digest: self.held.digest().to_string(),
            sent_bytes,
            total_bytes: total_bytes(layers.iter().map(|layer| &layer.blob)),
        })
    }

    /// Packs a member, unless it was packed before and the registry has it.
    fn layer(
        &self,
        job: &mut Job<'_>,
        client: &Client,
        member: PackedMember,
        dir: &Path,
    ) -> Result<Layer> {
        let key = memo_key(&member.digest);
        if let Some(blob) = self.known_blob(job, client, &key)? {
            return Ok(Layer {
                member,
                blob,
                file: None,
            });
        }
        let path = dir.join(member.digest.as_str());
        let packed = self.pack(job, &member, &path)?;
        memo::record(
            self.store,
            &key,
            &packed,
            "a packed member cannot be recorded; it will be packed again next time",
        );
        let blob = packed.blob().expect("its digest is one");
        Ok(Layer {
            member,
            blob,
            file: Some(path),
        })
    }

    /// The blob of a member that was packed before, if the registry has it.
    fn known_blob(
        &self,
        job: &mut Job<'_>,
        client: &Client,
        key: &Name,
    ) -> Result<Option<Descriptor>> {
        let known = self.store.cached::<Packed>(key).ok().flatten();
        let Some(blob) = known.and_then(|packed| packed.blob()) else {
            return Ok(None);
        };
        let is_there = on_thread(job, client, Stage::Pack, |_| {
            Ok(client.has_blob(&self.to.repository, &blob.digest)?)
        })?;
        Ok(is_there.then_some(blob))
    }

    fn pack(&self, job: &mut Job<'_>, member: &PackedMember, path: &Path) -> Result<Packed> {
        let failed = |operation| io_error(operation, path);
        let mut input = self.store.open_member(&self.held.packable(), member)?;
        let output = Hashed {
            file: File::create_new(path).map_err(failed("create"))?,
            hash: Sha256::new(),
            bytes: 0,
        };
        let mut encoder = zstd::Encoder::new(output, LEVEL).map_err(failed("pack"))?;
        encoder.multithread(2).map_err(failed("pack"))?;
        encoder.include_contentsize(false).map_err(failed("pack"))?;
        let mut chunk = vec![0; 1 << 20];
        let mut done_bytes = 0;
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
            job.report(Progress {
                stage: Stage::Pack,
                done_bytes,
                total_bytes: Some(member.bytes),
            })?;
        }
        let Hashed { hash, bytes, .. } = encoder.finish().map_err(failed("write"))?;
        Ok(Packed {
            digest: format!("sha256:{}", hex(&hash.finalize())),
            bytes,
        })
    }

    /// Sends the blobs that the registry does not have. Returns how many bytes were sent.
    fn send(&self, job: &mut Job<'_>, client: &Client, layers: &[Layer]) -> Result<u64> {
        let to_send = layers.iter().filter_map(|layer| {
            let file = layer.file.as_deref()?;
            Some((file, &layer.blob))
        });
        let to_send: Vec<_> = to_send.collect();
        let blobs: Vec<_> = to_send.iter().map(|(_, blob)| (*blob).clone()).collect();
        let transfer = Transfer {
            client,
            stage: Stage::Send,
            layers: &blobs,
        };
        transfer.run(job, |watch| {
            let send = |(path, blob): &(&Path, &Descriptor), watch: registry::Watch<'_>| {
                let mut open = |from: u64| {
                    let mut file = File::open(path)?;
                    file.seek(SeekFrom::Start(from))?;
                    Ok(Box::new(file) as Box<dyn Read + Send>)
                };
                client.push_blob(&self.to.repository, blob, &mut open, watch)
            };
            Ok(parallel(THREADS, &to_send, watch, &send)?)
        })
    }

    fn send_config(&self, client: &Client) -> Result<()> {
        let blob = Descriptor::of(media::OCI_EMPTY, EMPTY);
        let mut open = |from: u64| {
            let start = usize::try_from(from)
                .unwrap_or(EMPTY.len())
                .min(EMPTY.len());
            Ok(Box::new(&EMPTY[start..]) as Box<dyn Read + Send>)
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

/// The memo's key of a packed member.
fn memo_key(member: &Digest) -> Name {
    let inputs = format!("{PACKING} {member}");
    memo::key("packed", &Digest::of(inputs.as_bytes()))
}

/// A file that hashes and counts the bytes written to it.
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
