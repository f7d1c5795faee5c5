//! Images in a directory: an OCI layout, or an unpacked archive of `docker save`.
//!
//! Always: nothing outside the directory is opened, whatever names and links it holds. Documents
//! are checked against their digests here; layers must be checked by their reader.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::digest::Digest;
use crate::document::{
    DOCUMENT_MAX, Descriptor, Document, ImageConfig, Index, Manifest, Platform, media, or_default,
    parse,
};
use crate::error::{Error, Said};
use crate::file::read_bounded;
use crate::text::cleaned;

/// The annotation by which a layout names its images.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Indexes may hold indexes; no honest layout is deeper.
const DEPTH_MAX: usize = 4;
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A directory with images.
#[derive(Debug)]
pub struct Layout {
    root: PathBuf,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Oci(Index),
    Docker(Vec<DockerImage>),
}

/// An image of a Docker archive, described like one in a registry.
#[derive(Debug)]
struct DockerImage {
    tags: Vec<String>,
    manifest: Manifest,
    config: ImageConfig,
    files: BTreeMap<Digest, PathBuf>,
}

/// One entry of a Docker archive's `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    config: String,
    #[serde(default, deserialize_with = "or_default")]
    repo_tags: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    layers: Vec<String>,
}

impl Layout {
    /// Opens a directory of either kind.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let root =
            fs::canonicalize(dir).map_err(|source| Error::io("open", dir.display(), source))?;
        let kind = if root.join("oci-layout").exists() {
            Kind::Oci(parse(
                "index.json",
                &document(&inside(&root, Path::new("index.json"))?)?,
            )?)
        } else if root.join("manifest.json").exists() {
            Kind::Docker(docker_images(&root)?)
        } else {
            return Err(Error::File {
                path: root,
                rule: "it is neither an OCI layout nor a Docker archive",
            });
        };
        Ok(Self { root, kind })
    }

    /// The image for a machine. A tag is needed only if the layout has several images.
    pub fn choose(
        &self,
        platform: &Platform,
        tag: Option<&str>,
    ) -> Result<(Manifest, ImageConfig), Error> {
        let (manifest, config) = match &self.kind {
            Kind::Oci(index) => {
                let manifest =
                    self.manifest(self.root_descriptor(index, platform, tag)?, platform)?;
                let config = ImageConfig::parse(&self.content(&manifest.config)?)?;
                (manifest, config)
            }
            Kind::Docker(images) => {
                let image = self.single(
                    images
                        .iter()
                        .filter(|image| tag.is_none_or(|tag| is_tagged(&image.tags, tag))),
                    tag,
                )?;
                (image.manifest.clone(), image.config.clone())
            }
        };
        is_for(&config, platform)?;
        Ok((manifest, config))
    }

    /// The file of a blob. Neither its size nor its digest is checked.
    pub fn blob(&self, descriptor: &Descriptor) -> Result<PathBuf, Error> {
        match &self.kind {
            Kind::Oci(_) => inside(
                &self.root,
                &Path::new("blobs/sha256").join(descriptor.digest.hex()),
            ),
            Kind::Docker(images) => images
                .iter()
                .find_map(|image| image.files.get(&descriptor.digest).cloned())
                .ok_or_else(|| {
                    not_found(format!(
                        "blob {} in {}",
                        descriptor.digest,
                        self.root.display()
                    ))
                }),
        }
    }

    fn root_descriptor(
        &self,
        index: &Index,
        platform: &Platform,
        tag: Option<&str>,
    ) -> Result<Descriptor, Error> {
        let named = |descriptor: &&Descriptor| {
            let name = descriptor.annotations.get(REF_NAME);
            tag.is_none_or(|tag| {
                name.is_some_and(|name| is_tagged(std::slice::from_ref(name), tag))
            })
        };
        // One image may have several names.
        let mut seen = HashSet::new();
        let new = |descriptor: &&Descriptor| seen.insert(descriptor.digest);
        let manifests = index
            .manifests
            .iter()
            .filter(named)
            .filter(new)
            .cloned()
            .collect::<Vec<_>>();
        if manifests.len() > 1
            && manifests
                .iter()
                .all(|descriptor| descriptor.platform.is_some())
        {
            let chosen = Index {
                manifests,
                ..index.clone()
            };
            return chosen
                .choose(
                    &platform.os,
                    &platform.architecture,
                    platform.variant.as_deref(),
                )
                .cloned();
        }
        self.single(manifests.into_iter(), tag)
    }

    fn single<T>(&self, mut found: impl Iterator<Item = T>, tag: Option<&str>) -> Result<T, Error> {
        let name = tag.map_or_else(
            || "image".to_owned(),
            |tag| format!("image {}", cleaned(tag)),
        );
        let first = found
            .next()
            .ok_or_else(|| not_found(format!("{name} in {}", self.root.display())))?;
        if found.next().is_some() {
            return Err(Error::File {
                path: self.root.clone(),
                rule: "it holds several images, and none was chosen by its tag",
            });
        }
        Ok(first)
    }

    /// Follows indexes down to a manifest.
    fn manifest(&self, root: Descriptor, platform: &Platform) -> Result<Manifest, Error> {
        let mut descriptor = root;
        for _ in 0..DEPTH_MAX {
            match Document::parse(&descriptor.media_type, &self.content(&descriptor)?)? {
                Document::Manifest(manifest) => return Ok(*manifest),
                Document::Index(index) => {
                    let variant = platform.variant.as_deref();
                    descriptor = index
                        .choose(&platform.os, &platform.architecture, variant)?
                        .clone();
                }
            }
        }
        Err(Error::File {
            path: self.root.clone(),
            rule: "its indexes are nested too deeply",
        })
    }

    /// Reads a document and checks it against its descriptor.
    fn content(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let bytes = document(&self.blob(descriptor)?)?;
        let what = format!("blob {}", descriptor.digest);
        let found = bytes.len() as u64;
        if found != descriptor.size {
            return Err(Error::WrongSize {
                what,
                expected: descriptor.size,
                found,
            });
        }
        let digest = Digest::of(&bytes);
        if digest != descriptor.digest {
            return Err(Error::WrongDigest {
                what,
                expected: descriptor.digest,
                found: digest,
            });
        }
        Ok(bytes)
    }
}

/// Whether one of these names is the tag, or ends with it as in `repository:tag`.
fn is_tagged(names: &[String], tag: &str) -> bool {
    names
        .iter()
        .any(|name| name == tag || name.rsplit_once(':').is_some_and(|(_, last)| last == tag))
}

fn is_for(config: &ImageConfig, platform: &Platform) -> Result<(), Error> {
    if config.os == platform.os && config.architecture == platform.architecture {
        return Ok(());
    }
    let found = Platform {
        architecture: config.architecture.clone(),
        os: config.os.clone(),
        variant: config.variant.clone(),
    };
    Err(Error::NoPlatform {
        wanted: platform.to_string(),
        available: vec![found.to_string()],
    })
}

fn docker_images(root: &Path) -> Result<Vec<DockerImage>, Error> {
    let bytes = document(&inside(root, Path::new("manifest.json"))?)?;
    let entries: Vec<Entry> = parse("manifest.json", &bytes)?;
    entries
        .into_iter()
        .map(|entry| docker_image(root, entry))
        .collect()
}

fn docker_image(root: &Path, entry: Entry) -> Result<DockerImage, Error> {
    let path = inside(root, Path::new(&entry.config))?;
    let bytes = document(&path)?;
    let config = ImageConfig::parse(&bytes)?;
    let described = Descriptor::of(media::DOCKER_CONFIG, &bytes);
    let mut files = BTreeMap::from([(described.digest, path.clone())]);
    if config.rootfs.diff_ids.len() != entry.layers.len() {
        return Err(Error::File {
            path,
            rule: "it names another number of layers than manifest.json",
        });
    }
    let mut layers = Vec::new();
    for (name, digest) in entry.layers.iter().zip(&config.rootfs.diff_ids) {
        let path = inside(root, Path::new(name))?;
        layers.push(Descriptor::new(
            media::DOCKER_LAYER,
            *digest,
            plain_size(&path)?,
        ));
        files.insert(*digest, path);
    }
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media::DOCKER_MANIFEST.to_owned()),
        artifact_type: None,
        config: described,
        layers,
        subject: None,
        annotations: BTreeMap::new(),
    };
    Ok(DockerImage {
        tags: entry.repo_tags,
        manifest,
        config,
        files,
    })
}

/// The size of a layer. A compressed layer is refused, because its digest is not the one in the
/// configuration.
fn plain_size(path: &Path) -> Result<u64, Error> {
    let failed = |source| Error::io("read", path.display(), source);
    let mut file = File::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let mut magic = [0; GZIP.len()];
    match file.read_exact(&mut magic) {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(failed(error)),
        _ if magic == GZIP => Err(Error::File {
            path: path.to_owned(),
            rule: "this layer is compressed",
        }),
        _ => Ok(size),
    }
}

/// The regular file of this name below a directory. Links may point anywhere inside it, but not
/// outside.
fn inside(root: &Path, name: &Path) -> Result<PathBuf, Error> {
    let outside = || Error::File {
        path: root.join(name),
        rule: "it leads out of the image's directory",
    };
    if name.as_os_str().is_empty()
        || !name
            .components()
            .all(|part| matches!(part, Component::Normal(_)))
    {
        return Err(outside());
    }
    let path = match fs::canonicalize(root.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(not_found(format!(
                "{} in {}",
                cleaned(&name.to_string_lossy()),
                root.display()
            )));
        }
        found => found.map_err(|source| Error::io("open", root.join(name).display(), source))?,
    };
    if !path.starts_with(root) {
        return Err(outside());
    }
    // Reading a pipe, for example, would never end.
    if !path.is_file() {
        return Err(Error::File {
            path,
            rule: "it is not a regular file",
        });
    }
    Ok(path)
}

fn document(path: &Path) -> Result<Vec<u8>, Error> {
    read_bounded(path, DOCUMENT_MAX as u64)
}

fn not_found(what: String) -> Error {
    Error::NotFound {
        what,
        said: Said::default(),
    }
}
