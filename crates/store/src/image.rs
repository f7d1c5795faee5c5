//! Images and the kernels they boot with.
//!
//! Always: an image and a kernel bundle are named by the digest of their description, which holds
//! the digest of every file in them; the store computes those digests itself, from the bytes it
//! publishes. Equal inputs give equal names.
//!
//! A description has the smallest schema that can say it, and leaves out what that schema has no
//! word for: what an older program published keeps its name.
//!
//! Looking one up checks its description and the sizes of its files, not every byte of them.

mod derive;
mod listing;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::blob::Blob;
use crate::choice::DisplaySize;
use crate::disk::overlay;
use crate::fs::{Files, optional};
use crate::pin::Pin;
use crate::publish::Staged;
use crate::record::{self, Record};
use crate::{Digest, Error, Name, Named, Store};

pub use listing::ImageSummary;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arch {
    X86_64,
    Aarch64,
}

impl Arch {
    /// The architecture of this host, which is that of its machines.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") {
        Self::Aarch64
    } else {
        Self::X86_64
    };
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        })
    }
}

/// Who is process 1 once the root file system is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Our agent stays process 1.
    Agent,
    /// The agent starts the image's own `/sbin/init`.
    Image,
}

/// How a sandbox and its commands run when their caller says nothing else.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecDefaults {
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub cmd: Vec<String>,
    /// What `cmd`, or what is given instead of it, are the arguments of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// A line for `sh -c` that runs in the background from each boot on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
    /// What a boot waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<Ready>,
    /// The screen of its machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<DisplaySize>,
}

impl ExecDefaults {
    /// Whether each boot starts something, or waits for something.
    pub fn has_service(&self) -> bool {
        self.start.is_some() || self.ready.is_some()
    }
}

/// A check that is repeated until it succeeds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Ready {
    /// A line for `sh -c`. It succeeds with exit code 0.
    pub command: String,
    /// How long a boot waits for that.
    pub timeout_ms: u64,
}

/// What its maker says about an image; the store adds the digests.
#[derive(Debug, Clone)]
pub struct ImageSpec {
    pub arch: Arch,
    pub kernel: Digest,
    pub init: Init,
    pub defaults: ExecDefaults,
    /// How large the disk of a sandbox is when nothing else is asked for; as large as the image if
    /// this is none.
    pub disk_bytes: Option<u64>,
}

/// `images/<digest>/image.json`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    pub schema: u64,
    pub arch: Arch,
    pub kernel: Digest,
    pub rootfs: Blob,
    pub init: Init,
    pub defaults: ExecDefaults,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

impl ImageRecord {
    fn new(spec: ImageSpec, rootfs: Blob) -> Result<Self, Error> {
        let ImageSpec {
            arch,
            kernel,
            init,
            defaults,
            disk_bytes,
        } = spec;
        let mut record = Self {
            schema: 0,
            arch,
            kernel,
            rootfs,
            init,
            defaults,
            disk_bytes,
        };
        record.schema = record.least_schema();
        match (record.disk_rule(), disk_bytes) {
            (Some(rule), Some(bytes)) => Err(Error::DiskSize { bytes, rule }),
            _ => Ok(record),
        }
    }

    /// Schema 1 has neither an entrypoint nor a size of the disk, schema 2 has no service, and
    /// schema 3 no screen.
    fn least_schema(&self) -> u64 {
        if self.defaults.display.is_some() {
            4
        } else if self.defaults.has_service() {
            3
        } else if self.disk_bytes.is_some() || !self.defaults.entrypoint.is_empty() {
            2
        } else {
            1
        }
    }

    /// Which rule the size of the disk breaks.
    pub(crate) fn disk_rule(&self) -> Option<&'static str> {
        let bytes = self.disk_bytes?;
        if bytes < self.rootfs.bytes {
            Some("the image is larger")
        } else {
            overlay::check_size(bytes).err()
        }
    }
}

impl Record for ImageRecord {
    const SCHEMA: u64 = 4;

    fn has_least_schema(&self) -> bool {
        self.schema == self.least_schema()
    }
}

/// A published image.
#[derive(Debug, Clone)]
pub struct Image {
    pub digest: Digest,
    pub record: ImageRecord,
    dir: PathBuf,
    /// While one that was just published lives, it stays, named or not.
    _held: Option<Arc<Staged>>,
}

impl Image {
    /// The read-only root file system.
    pub fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs.raw")
    }

    /// Every file whose digest its description holds.
    pub(crate) fn files(&self) -> Vec<(PathBuf, Blob)> {
        vec![(self.rootfs(), self.record.rootfs.clone())]
    }

    /// How large its files are, holes and all.
    pub fn bytes(&self) -> u64 {
        self.record.rootfs.bytes
    }

    /// The same image, which stays while this lives.
    pub(crate) fn held_by(self, held: Staged) -> Self {
        Self {
            _held: Some(Arc::new(held)),
            ..self
        }
    }
}

/// One name of an image.
#[derive(Debug)]
pub struct NamedImage {
    pub name: Name,
    /// An image that cannot be read is listed with the reason.
    pub image: Result<Image, Error>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelFormat {
    /// An ELF file with a PVH entry: no decompression in the guest.
    Vmlinux,
    BzImage,
}

/// What its maker says about a kernel bundle; the store adds the digests.
#[derive(Debug, Clone)]
pub struct KernelSpec {
    pub arch: Arch,
    pub release: String,
    pub format: KernelFormat,
    /// File names in `modules/`, each after those it depends on.
    pub modules: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleRecord {
    pub file: String,
    pub content: Blob,
}

/// `kernels/<digest>/bundle.json`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelRecord {
    pub schema: u64,
    pub arch: Arch,
    pub release: String,
    pub format: KernelFormat,
    pub kernel: Blob,
    /// In the order in which they load.
    pub modules: Vec<ModuleRecord>,
    /// A cpio archive of the user's own, which is laid below ours at boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<Blob>,
}

impl KernelRecord {
    /// Schema 1 has no initial file system.
    fn least_schema(&self) -> u64 {
        if self.initramfs.is_some() { 2 } else { 1 }
    }
}

impl Record for KernelRecord {
    const SCHEMA: u64 = 2;

    fn has_least_schema(&self) -> bool {
        self.schema == self.least_schema()
    }
}

/// A published kernel with the modules a guest needs to find its disk.
#[derive(Debug, Clone)]
pub struct KernelBundle {
    pub digest: Digest,
    pub record: KernelRecord,
    dir: PathBuf,
    /// While one that was just published lives, it stays, whether or not an image needs it.
    _held: Option<Arc<Staged>>,
}

impl KernelBundle {
    /// The same bundle, which stays while this lives.
    pub(crate) fn held_by(self, held: Staged) -> Self {
        Self {
            _held: Some(Arc::new(held)),
            ..self
        }
    }

    pub fn kernel(&self) -> PathBuf {
        self.dir.join("kernel")
    }

    /// The user's own initial file system, if there is one.
    pub fn initramfs(&self) -> Option<PathBuf> {
        self.record
            .initramfs
            .as_ref()
            .map(|_| self.dir.join("initramfs"))
    }

    /// Every file whose digest its description holds.
    pub(crate) fn files(&self) -> Vec<(PathBuf, Blob)> {
        let modules = self
            .modules()
            .zip(&self.record.modules)
            .map(|((_, path), module)| (path, module.content.clone()));
        let initramfs = self.initramfs().zip(self.record.initramfs.clone());
        [(self.kernel(), self.record.kernel.clone())]
            .into_iter()
            .chain(initramfs)
            .chain(modules)
            .collect()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.files()
            .iter()
            .map(|(_, blob)| blob.bytes)
            .fold(0, u64::saturating_add)
    }

    /// File name and path of each module, in load order.
    pub fn modules(&self) -> impl Iterator<Item = (&str, PathBuf)> {
        self.record.modules.iter().map(|module| {
            (
                module.file.as_str(),
                self.dir.join("modules").join(&module.file),
            )
        })
    }
}

impl Store {
    /// Publishes `rootfs.raw` of the staged tree as an image, which stays as long as the result
    /// lives.
    pub fn publish_image(&self, staged: Staged, spec: ImageSpec) -> Result<Image, Error> {
        let record = ImageRecord::new(spec, blob(&self.files, &staged.path().join("rootfs.raw"))?)?;
        self.publish_described(staged, &record)
    }

    /// Publishes a staged root file system of which the record says everything.
    fn publish_described(&self, staged: Staged, record: &ImageRecord) -> Result<Image, Error> {
        let digest = self.describe(&staged, "image.json", record)?;
        let held =
            staged.publish_pinned(&self.layout.image(&digest), &Pin::Image(digest.clone()))?;
        Ok(self.image_by_digest(&digest)?.held_by(held))
    }

    /// Publishes `kernel`, `modules/` and, if there is one, `initramfs` of the staged tree. They
    /// stay as long as the result lives.
    pub fn publish_kernel(&self, staged: Staged, spec: KernelSpec) -> Result<KernelBundle, Error> {
        let modules = spec.modules.into_iter().map(|file| {
            Ok(ModuleRecord {
                content: blob(&self.files, &staged.path().join("modules").join(&file))?,
                file,
            })
        });
        let mut record = KernelRecord {
            schema: 0,
            arch: spec.arch,
            release: spec.release,
            format: spec.format,
            kernel: blob(&self.files, &staged.path().join("kernel"))?,
            modules: modules.collect::<Result<_, Error>>()?,
            initramfs: optional(blob(&self.files, &staged.path().join("initramfs")))?,
        };
        record.schema = record.least_schema();
        let digest = self.describe(&staged, "bundle.json", &record)?;
        let held =
            staged.publish_pinned(&self.layout.kernel(&digest), &Pin::Kernel(digest.clone()))?;
        Ok(KernelBundle {
            _held: Some(Arc::new(held)),
            ..self.kernel(&digest)?
        })
    }

    fn describe(&self, staged: &Staged, file: &str, record: &impl Record) -> Result<Digest, Error> {
        let bytes = record::canonical(record);
        self.files.create(&staged.path().join(file), &bytes)?;
        Ok(Digest::of(&bytes))
    }

    pub fn kernel(&self, digest: &Digest) -> Result<KernelBundle, Error> {
        let dir = self.layout.kernel(digest);
        let record: KernelRecord = self.read_described(&dir.join("bundle.json"), digest)?;
        let bundle = KernelBundle {
            digest: digest.clone(),
            record,
            dir,
            _held: None,
        };
        if let Some((file, _)) = bundle.modules().find(|(file, _)| file.contains('/')) {
            return Err(Error::corrupt(
                &bundle.dir,
                format!("{file:?} is not the name of a module"),
            ));
        }
        bundle
            .files()
            .iter()
            .try_for_each(|(path, blob)| check_size(&self.files, path, blob))?;
        Ok(bundle)
    }

    pub fn image_by_digest(&self, digest: &Digest) -> Result<Image, Error> {
        let dir = self.layout.image(digest);
        let record: ImageRecord = self.read_described(&dir.join("image.json"), digest)?;
        let image = Image {
            digest: digest.clone(),
            record,
            dir,
            _held: None,
        };
        check_size(&self.files, &image.rootfs(), &image.record.rootfs)?;
        Ok(image)
    }

    fn read_described<T: Record>(&self, path: &Path, digest: &Digest) -> Result<T, Error> {
        let (record, bytes) = record::read_canonical(&self.files, path)?;
        if Digest::of(&bytes) != *digest {
            return Err(Error::corrupt(
                path,
                "its digest is not the name of its directory",
            ));
        }
        Ok(record)
    }

    pub fn image(&self, name: &Name) -> Result<Image, Error> {
        match self.named(name)? {
            Some(Named::Image(digest)) => self.image_by_digest(&digest),
            Some(found) => Err(Error::OtherKind {
                name: name.clone(),
                found,
                expected: "an image",
            }),
            None => Err(Error::UnknownImage { name: name.clone() }),
        }
    }

    /// Every image that has a name, by name.
    pub fn images(&self) -> Result<Vec<NamedImage>, Error> {
        let image = |named| match named {
            Ok(Named::Image(digest)) => Some(self.image_by_digest(&digest)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        };
        let names = self.names()?.into_iter();
        Ok(names
            .filter_map(|(name, named)| {
                Some(NamedImage {
                    image: image(named)?,
                    name,
                })
            })
            .collect())
    }

    /// The initial file system made from `key`, if it was made before.
    pub fn initramfs(&self, key: &Digest) -> Result<Option<PathBuf>, Error> {
        let path = self.layout.initramfs(key);
        Ok(self.files.kind(&path)?.map(|_| path))
    }

    pub fn publish_initramfs(&self, key: &Digest, bytes: &[u8]) -> Result<PathBuf, Error> {
        let staged = self.stage()?;
        let target = self.layout.initramfs(key);
        self.files.create(&staged.path().join("cpio"), bytes)?;
        staged.publish_file("cpio", &target)?;
        Ok(target)
    }
}

fn blob(files: &Files, path: &Path) -> Result<Blob, Error> {
    let (digest, bytes) = files.digest(path)?;
    Ok(Blob { digest, bytes })
}

fn check_size(files: &Files, path: &Path, expected: &Blob) -> Result<(), Error> {
    match optional(files.len(path))? {
        Some(bytes) if bytes == expected.bytes => Ok(()),
        Some(bytes) => Err(Error::corrupt(
            path,
            format!("{bytes} bytes where {} belong", expected.bytes),
        )),
        None => Err(Error::corrupt(path, "missing")),
    }
}
