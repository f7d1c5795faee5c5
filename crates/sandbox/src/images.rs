//! Images, as whoever looks after them sees them: made, listed, inspected, warmed, removed.

use std::path::Path;
use std::sync::Arc;

use sandtree_store::{
    self as store, Digest, ExecDefaults, Image, ImageSummary, Init, KernelBundle, Name, Named,
};
use serde::{Deserialize, Serialize};

use crate::blocking::blocking;
use crate::error::{Error, Result, store_error};
use crate::host::{Host, Inner};
use crate::image::{
    self, BuiltIn, ImportSpec, KernelChoice, OwnKernel, Progress, Work, debian_key,
};
use crate::note;
use crate::progress::Waiting;
use crate::reference::Reference;
use crate::spec::parse_name;

/// An image as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageInfo {
    pub names: Vec<String>,
    pub digest: String,
    pub arch: String,
    /// The digest of its kernel bundle.
    pub kernel: String,
    pub init: Option<Init>,
    /// Of its root file system, holes and all.
    pub bytes: u64,
    /// What its files take on disk.
    pub disk_bytes_used: u64,
    /// Of the disk that sandboxes get when nothing else is asked for.
    pub disk_bytes: u64,
    pub defaults: ExecDefaults,
    /// How many sandboxes and snapshots are made from it.
    pub sandboxes: u64,
    pub snapshots: u64,
    /// How many captured boots there are of it, and what they take on disk.
    pub warm: u64,
    pub warm_bytes: u64,
    /// Why it cannot be used.
    pub unreadable: Option<String>,
}

impl ImageInfo {
    fn new(summary: ImageSummary) -> Self {
        let (record, unreadable) = match summary.image {
            Ok(image) => (Some(image.record), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let bytes = record.as_ref().map_or(0, |record| record.rootfs.bytes);
        Self {
            names: summary.names.into_iter().map(String::from).collect(),
            digest: summary.digest.to_string(),
            arch: record
                .as_ref()
                .map(|record| record.arch.to_string())
                .unwrap_or_default(),
            kernel: record
                .as_ref()
                .map(|record| record.kernel.to_string())
                .unwrap_or_default(),
            init: record.as_ref().map(|record| record.init),
            bytes,
            disk_bytes_used: summary.disk_bytes_used,
            disk_bytes: record
                .as_ref()
                .and_then(|record| record.disk_bytes)
                .unwrap_or(bytes),
            defaults: record.map(|record| record.defaults).unwrap_or_default(),
            sandboxes: summary.sandboxes,
            snapshots: summary.snapshots,
            warm: summary.warm,
            warm_bytes: summary.warm_bytes,
            unreadable,
        }
    }
}

/// What became of an image whose name was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RemovedImage {
    pub digest: String,
    /// Whether its content went, too: nothing else used it.
    pub collected: bool,
}

/// Which image a built-in name was given to, and by which recipe it was made.
#[derive(Debug, Serialize, Deserialize)]
struct Built {
    recipe: u32,
    digest: Digest,
}

impl Host {
    /// Makes sure that an image is there, building it if it is built in.
    pub async fn ensure_image(
        &self,
        name: &str,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<ImageInfo> {
        let image = self.inner.clone().ensure_image(name, progress).await?;
        self.inner.image_info(&image.digest)
    }

    /// Makes a built-in image anew, from what its sources have today.
    pub async fn rebuild_image(
        &self,
        name: &str,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<ImageInfo> {
        let name = parse_name("an image's name", name)?;
        let built_in = BuiltIn::of(&name).ok_or_else(|| Error::NoImage {
            name: name.to_string(),
        })?;
        let image = self
            .inner
            .clone()
            .build_in(&name, built_in, progress)
            .await?;
        self.inner.image_info(&image.digest)
    }

    /// Makes a root file system, an OCI image or a disk that lies at a path an image, and points a
    /// name at it.
    pub async fn import_image(
        &self,
        path: &Path,
        name: Option<&str>,
        spec: ImportSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<ImageInfo> {
        let name = parse_name(
            "an image's name",
            &name.map_or_else(|| name_of(path), str::to_owned),
        )?;
        self.inner.check_image_name(&name)?;
        let image = self.inner.clone().take_in(path, spec, progress).await?;
        self.inner.name_image(&name, &image).await?;
        self.inner.image_info(&image.digest)
    }

    /// Every image, also those without a name.
    pub async fn images(&self) -> Result<Vec<ImageInfo>> {
        let host = self.inner.clone();
        let listed = blocking(move || host.store.list_images())
            .await
            .map_err(store_error("list its images"))?;
        let mut images: Vec<_> = listed.into_iter().map(ImageInfo::new).collect();
        // Those without a name come last.
        images.sort_by(|a, b| {
            (a.names.is_empty(), &a.names, &a.digest).cmp(&(
                b.names.is_empty(),
                &b.names,
                &b.digest,
            ))
        });
        Ok(images)
    }

    /// An image by its name or digest.
    pub fn inspect_image(&self, reference: &str) -> Result<ImageInfo> {
        let image = self.inner.find_image(reference)?;
        self.inner.image_info(&image.digest)
    }

    /// Takes an image's name away, or by its digest all of its names. Its content stays as long as
    /// anything uses it.
    pub async fn remove_image(&self, reference: &str) -> Result<RemovedImage> {
        let (host, text) = (self.inner.clone(), reference.to_owned());
        let reference = Reference::parse(reference)?;
        blocking(move || {
            let removed = match reference {
                Reference::Name(name) => host.store.remove_image_name(&name),
                Reference::Digest(digest) => {
                    // It may have no name, and be one that cannot be read.
                    let mut names = host.image_summary(&digest)?.names.into_iter();
                    let unnamed =
                        names.try_for_each(|name| host.store.remove_image_name(&name).map(drop));
                    unnamed.and_then(|()| host.store.remove_unused_image(digest))
                }
                Reference::Path(path) => {
                    return Err(Error::NoImage {
                        name: path.display().to_string(),
                    });
                }
            };
            let removed = removed.map_err(no_image(&text))?;
            Ok(RemovedImage {
                digest: removed.digest.to_string(),
                collected: removed.collected,
            })
        })
        .await
    }
}

fn no_image(reference: &str) -> impl Fn(store::Error) -> Error + '_ {
    move |error| match error {
        store::Error::UnknownImage { .. } => Error::NoImage {
            name: reference.to_owned(),
        },
        store::Error::OtherKind { name, found, .. } => Error::NotAnImage {
            name: name.to_string(),
            found: found.to_string(),
        },
        error => store_error("read an image")(error),
    }
}

/// What an image is called that was imported without a name: the file's, without what tells its
/// kind.
fn name_of(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let file = absolute
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    let mut name = file.as_str();
    for suffix in [
        ".gz", ".tgz", ".zst", ".xz", ".tar", ".qcow2", ".raw", ".img",
    ] {
        name = name.strip_suffix(suffix).unwrap_or(name);
    }
    name.to_owned()
}

impl Inner {
    pub async fn ensure_image(
        self: Arc<Self>,
        name: &str,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Image> {
        let name = parse_name("an image's name", name)?;
        let found = match self.store.image(&name) {
            Err(store::Error::UnknownImage { .. }) => None,
            // What has a name now may have none, and be gone, before it is used.
            found => Some(
                found
                    .and_then(|image| self.store.pin_image(&image.digest))
                    .map_err(no_image(name.as_str()))?,
            ),
        };
        match (found, BuiltIn::of(&name)) {
            (Some(image), None) => Ok(image),
            (Some(image), Some(built_in)) if !self.is_outdated(&name, built_in, &image) => {
                Ok(image)
            }
            (_, Some(built_in)) => self.build_in(&name, built_in, progress).await,
            (None, None) => Err(Error::NoImage {
                name: name.to_string(),
            }),
        }
    }

    /// Whether `debian` is what this program makes of it, or would.
    pub fn is_debian_ours(&self) -> bool {
        let name: Name = "debian".parse().expect("it is a name");
        match (
            self.store.image(&name),
            self.store.cached::<Built>(&built_key(&name)),
        ) {
            (Ok(image), Ok(Some(built))) => built.digest == image.digest,
            (Ok(_), _) => false,
            (Err(_), _) => true,
        }
    }

    /// Whether an image was made by another version of this program. What a user gave a built-in
    /// name to is the user's.
    fn is_outdated(&self, name: &Name, built_in: BuiltIn, image: &Image) -> bool {
        match self.store.cached::<Built>(&built_key(name)) {
            Ok(Some(built)) => built.digest == image.digest && built.recipe != built_in.recipe(),
            Ok(None) => false,
            // As older versions noted it.
            Err(_) => true,
        }
    }

    async fn build_in(
        self: Arc<Self>,
        name: &Name,
        built_in: BuiltIn,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Image> {
        let image = self
            .making(name.as_str(), progress, move |work| work.build(built_in))
            .await?;
        self.name_image(name, &image).await?;
        let built = Built {
            recipe: built_in.recipe(),
            digest: image.digest.clone(),
        };
        let otherwise =
            "the recipe of an image cannot be noted; it is not renewed by later versions";
        note::keep(&self.store, &built_key(name), &built, otherwise);
        Ok(image)
    }

    /// Debian with more packages: found, or made.
    pub async fn debian_with(
        self: Arc<Self>,
        packages: &[String],
        anew: bool,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Image> {
        let key = debian_key(packages);
        let known = self
            .store
            .cached::<Digest>(&key)
            .ok()
            .flatten()
            .filter(|_| !anew);
        if let Some(image) = known.and_then(|digest| self.store.pin_image(&digest).ok()) {
            return Ok(image);
        }
        let packages = packages.to_vec();
        let image = self
            .making("debian", progress, move |work| work.debian(&packages))
            .await?;
        note::keep(
            &self.store,
            &key,
            &image.digest,
            "an image cannot be noted; it is made again next time",
        );
        Ok(image)
    }

    /// Makes what lies at a path an image without a name.
    pub async fn take_in(
        self: Arc<Self>,
        path: &Path,
        spec: ImportSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Image> {
        let (name, path) = (path.display().to_string(), path.to_owned());
        self.making(&name, progress, move |work| work.import(&path, &spec))
            .await
    }

    pub async fn kernel(
        self: Arc<Self>,
        choice: KernelChoice,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<KernelBundle> {
        self.making("the kernel", progress, move |work| work.kernel(&choice))
            .await
    }

    /// The same image with a kernel of the user's own.
    pub async fn with_kernel(self: &Arc<Self>, image: &Image, own: OwnKernel) -> Result<Image> {
        let kernel = self.clone().kernel(KernelChoice::Own(own), |_| {}).await?;
        let record = image.record.clone();
        let spec = store::ImageSpec {
            arch: record.arch,
            kernel: kernel.digest.clone(),
            init: record.init,
            defaults: record.defaults,
            disk_bytes: record.disk_bytes,
        };
        let (host, image) = (self.clone(), image.clone());
        blocking(move || host.store.derive_image(&image, spec))
            .await
            .map_err(store_error("publish an image"))
    }

    /// Does work on a thread, until nobody waits for it any more.
    pub async fn making<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        mut progress: impl FnMut(Progress) + Send + 'static,
        work: impl FnOnce(Work<'_>) -> Result<T, image::Error> + Send + 'static,
    ) -> Result<T> {
        let (host, (_waiting, given_up)) = (self.clone(), Waiting::new());
        let made = tokio::task::spawn_blocking(move || {
            work(Work {
                store: &host.store,
                progress: &mut progress,
                given_up: &given_up,
            })
        });
        let made = made.await.expect("making an image does not panic");
        made.map_err(|source| Error::Image {
            name: name.to_owned(),
            source,
        })
    }

    /// Refuses a name that is not an image's, before anything is done for it.
    pub fn check_image_name(&self, name: &Name) -> Result<()> {
        match self.store.named(name).map_err(store_error("read a name"))? {
            None | Some(Named::Image(_)) => Ok(()),
            Some(held) => Err(Error::SnapshotNameTaken {
                name: name.to_string(),
                by: held.to_string(),
            }),
        }
    }

    pub async fn name_image(self: &Arc<Self>, name: &Name, image: &Image) -> Result<()> {
        let (host, name, digest) = (self.clone(), name.clone(), image.digest.clone());
        blocking(move || host.store.set_image_name(&name, &digest))
            .await
            .map_err(crate::save::name_error)
    }

    /// An image by its name or digest.
    pub fn find_image(&self, reference: &str) -> Result<Image> {
        match Reference::parse(reference)? {
            Reference::Name(name) => {
                let found = self
                    .store
                    .image(&name)
                    .and_then(|image| self.store.pin_image(&image.digest));
                found.map_err(no_image(reference))
            }
            Reference::Digest(digest) => {
                self.image_if_there(&digest)?.ok_or_else(|| Error::NoImage {
                    name: reference.to_owned(),
                })
            }
            Reference::Path(path) => Err(Error::NoImage {
                name: path.display().to_string(),
            }),
        }
    }

    pub fn image_if_there(&self, digest: &Digest) -> Result<Option<Image>> {
        match self.store.pin_image(digest) {
            Ok(image) => Ok(Some(image)),
            Err(error) if error.io_kind() == Some(std::io::ErrorKind::NotFound) => Ok(None),
            Err(error) => Err(store_error("read an image")(error)),
        }
    }

    pub fn image_info(&self, digest: &Digest) -> Result<ImageInfo> {
        self.image_summary(digest).map(ImageInfo::new)
    }

    fn image_summary(&self, digest: &Digest) -> Result<ImageSummary> {
        let listed = self
            .store
            .list_images()
            .map_err(store_error("list its images"))?;
        let found = listed.into_iter().find(|summary| summary.digest == *digest);
        found.ok_or_else(|| Error::NoImage {
            name: digest.to_string(),
        })
    }
}

/// What is noted of a built-in image.
fn built_key(name: &Name) -> Name {
    format!("{name}-recipe").parse().expect("it is a name")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gives_its_image_a_name() {
        for (path, name) in [
            ("/x/rootfs.tar.gz", "rootfs"),
            ("app.tgz", "app"),
            ("/x/disk.qcow2", "disk"),
            ("/x/Debian-12.raw", "debian-12"),
            ("/x/tree", "tree"),
        ] {
            assert_eq!(name_of(Path::new(path)), name);
        }
    }
}
