//! Images, as callers of a [`Host`] use them: made, listed, inspected, removed, pulled and pushed.
//!
//! `sandtree-images` does the work. This file runs it on threads, with the store and the tools of
//! the host.

use std::path::Path;
use std::sync::Arc;

use sandtree_images::{
    self as images, Fetched, HostTools, ImageInfo, ImageRef, ImportSpec, Job, OwnKernel, Progress,
    PulledKind, Pushed, RegistryAccess, RemovedImage,
};
use sandtree_store::{Digest, Image, Name, Pinned, SaveTarget};
use serde::Serialize;

use crate::blocking::blocking;
use crate::boxed::Boxed;
use crate::error::Result;
use crate::host::Host;
use crate::inner::Inner;
use crate::names::parse_name;
use crate::progress::Waiting;
use crate::publish::name_error;
use crate::reference::Reference;
use crate::states::Replace;

/// How to pull content from a registry.
#[derive(Debug, Clone, Default)]
pub struct PullSpec {
    /// `None`: the last part of the repository's name, with the tag unless that is `latest`.
    pub name: Option<String>,
    /// Whether a snapshot that has the name may be replaced. The name of an image always moves.
    pub replace: bool,
    pub access: RegistryAccess,
    /// For images that are not our artifacts.
    pub import: ImportSpec,
}

/// The outcome of a pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Pulled {
    pub name: String,
    pub kind: PulledKind,
    /// The digest of the image or snapshot, in the store.
    pub digest: String,
    /// The digest of the manifest, in the registry.
    pub manifest: String,
    /// The bytes that were fetched; the store had the rest already.
    pub fetched_bytes: u64,
}

impl Host {
    /// Makes sure that an image exists. A built-in image is made if it is missing.
    pub async fn ensure_image(
        &self,
        name: &str,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<ImageInfo> {
        let image = self.inner.clone().ensure_image(name, progress).await?;
        self.inner.image_info(&image.digest)
    }

    /// Makes a built-in image again, from what its sources have today.
    pub async fn rebuild_image(
        &self,
        name: &str,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<ImageInfo> {
        let name = parse_name("image name", name)?;
        let rebuilding = self
            .inner
            .image_job(progress, move |job| images::rebuild(job, &name));
        let image = rebuilding.await?;
        self.inner.image_info(&image.digest)
    }

    /// Makes an image from a root file system, an OCI image or a disk at a path, and points a name
    /// at it. `None` names it after the last part of the path.
    pub fn import_image<'a>(
        &'a self,
        path: &'a Path,
        name: Option<&'a str>,
        spec: ImportSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Boxed<'a, Result<ImageInfo>> {
        Box::pin(async move {
            let name = name.map_or_else(|| images::default_name(path), str::to_owned);
            let name = parse_name("image name", &name)?;
            self.inner.check_image_name(&name)?;
            let path = path.to_owned();
            let importing = self
                .inner
                .image_job(progress, move |job| images::import(job, &path, &spec));
            let image = importing.await?;
            self.inner.name_image(&name, &image).await?;
            self.inner.image_info(&image.digest)
        })
    }

    /// Every image, with or without a name.
    pub async fn images(&self) -> Result<Vec<ImageInfo>> {
        let host = self.inner.clone();
        Ok(blocking(move || images::list(&host.store)).await?)
    }

    /// An image by its name or digest.
    pub fn inspect_image(&self, reference: &str) -> Result<ImageInfo> {
        let image = self.inner.find_image(reference)?;
        self.inner.image_info(&image.digest)
    }

    /// Points one more name at an image, or moves the name to it.
    pub async fn tag_image(&self, reference: &str, name: &str) -> Result<()> {
        let image = self.inner.find_image(reference)?;
        let name = parse_name("image name", name)?;
        self.inner.check_image_name(&name)?;
        self.inner.name_image(&name, &image).await
    }

    /// Removes an image's name, or, by its digest, all of its names. Its content stays as long as
    /// anything uses it.
    pub async fn remove_image(&self, reference: &str) -> Result<RemovedImage> {
        let reference = image_ref(reference)?;
        let host = self.inner.clone();
        Ok(blocking(move || images::remove(&host.store, &reference)).await?)
    }

    /// Brings an image or a snapshot from a registry.
    pub fn pull<'a>(
        &'a self,
        reference: &'a str,
        spec: &'a PullSpec,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Boxed<'a, Result<Pulled>> {
        Box::pin(async move {
            let name = match &spec.name {
                Some(name) => name.clone(),
                None => images::pulled_name(reference)?,
            };
            let name = parse_name("name for the pulled content", &name)?;
            let text = reference.to_owned();
            let access = spec.access.clone();
            let looking = self
                .inner
                .image_job(|_| (), move |job| images::look_up(job, &text, &access));
            let remote = looking.await?;
            // Nothing is fetched for a name that it could not get.
            self.inner
                .check_pulled_name(&name, remote.kind(), spec.replace.into())?;
            let kind = remote.kind();
            let manifest = remote.manifest_digest();
            let import = spec.import.clone();
            let fetching = self
                .inner
                .image_job(progress, move |job| remote.fetch(job, &import));
            let (fetched, fetched_bytes) = fetching.await?;
            let digest = self
                .inner
                .name_fetched(&name, fetched, spec.replace)
                .await?;
            Ok(Pulled {
                name: name.to_string(),
                kind,
                digest: digest.to_string(),
                manifest,
                fetched_bytes,
            })
        })
    }

    /// Sends an image or a snapshot, by name or digest, to a registry.
    pub fn push<'a>(
        &'a self,
        what: &'a str,
        reference: &'a str,
        access: RegistryAccess,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Boxed<'a, Result<Pushed>> {
        Box::pin(async move {
            let what = match Reference::parse(what)? {
                Reference::Name(name) => ImageRef::Name(name),
                Reference::Digest(digest) => ImageRef::Digest(digest),
                Reference::Path(_) => {
                    let reference = what.to_owned();
                    return Err(images::Error::NoImageOrSnapshot { reference }.into());
                }
            };
            let to = reference.to_owned();
            let pushing = self
                .inner
                .image_job(progress, move |job| images::push(job, &what, &to, &access));
            pushing.await
        })
    }
}

/// An image by its name or digest. A path names none.
fn image_ref(reference: &str) -> Result<ImageRef> {
    match Reference::parse(reference)? {
        Reference::Name(name) => Ok(ImageRef::Name(name)),
        Reference::Digest(digest) => Ok(ImageRef::Digest(digest)),
        Reference::Path(path) => {
            let name = path.display().to_string();
            Err(images::Error::NoImage { name }.into())
        }
    }
}

impl Inner {
    /// Does work on images on a thread. Dropping the future cancels the work.
    pub async fn image_job<T: Send + 'static>(
        self: &Arc<Self>,
        mut progress: impl FnMut(Progress) + Send + 'static,
        work: impl FnOnce(&mut Job<'_>) -> Result<T, images::Error> + Send + 'static,
    ) -> Result<T> {
        let host = self.clone();
        let (_waiting, cancelled) = Waiting::new();
        let done = blocking(move || {
            let mut job = Job {
                store: &host.store,
                tools: HostTools {
                    search: &host.config.search,
                    env: &host.config.tool_env,
                },
                progress: &mut progress,
                cancelled: &cancelled,
            };
            work(&mut job)
        });
        Ok(done.await?)
    }

    pub async fn ensure_image(
        self: Arc<Self>,
        name: &str,
        progress: impl FnMut(Progress) + Send + 'static,
    ) -> Result<Image> {
        let name = parse_name("image name", name)?;
        self.image_job(progress, move |job| images::ensure(job, &name))
            .await
    }

    /// The same image with a kernel of the user's own.
    pub async fn with_kernel(self: &Arc<Self>, image: &Image, own: OwnKernel) -> Result<Image> {
        let image = image.clone();
        self.image_job(|_| (), move |job| images::with_kernel(job, &image, own))
            .await
    }

    /// Refuses a name that something other than an image has, before any work is done for it.
    pub fn check_image_name(&self, name: &Name) -> Result<()> {
        Ok(images::check_name(&self.store, name)?)
    }

    fn check_pulled_name(&self, name: &Name, kind: PulledKind, replace: Replace) -> Result<()> {
        match kind {
            PulledKind::Image => self.check_image_name(name),
            PulledKind::Snapshot => self.check_free(&SaveTarget::Name(name.clone()), replace, None),
        }
    }

    pub async fn name_image(self: &Arc<Self>, name: &Name, image: &Image) -> Result<()> {
        let host = self.clone();
        let name = name.clone();
        let image = image.clone();
        Ok(blocking(move || images::set_name(&host.store, &name, &image)).await?)
    }

    /// Points a name at content that was pulled.
    async fn name_fetched(
        self: &Arc<Self>,
        name: &Name,
        fetched: Fetched,
        replace: bool,
    ) -> Result<Digest> {
        match fetched {
            Fetched::Image(image) => {
                self.name_image(name, &image).await?;
                Ok(image.digest.clone())
            }
            Fetched::Snapshot(pinned) => self.name_snapshot(name, *pinned, replace).await,
        }
    }

    /// Points a name at a snapshot that was pulled. If that fails, the snapshot is removed.
    async fn name_snapshot(
        self: &Arc<Self>,
        name: &Name,
        pinned: Pinned,
        replace: bool,
    ) -> Result<Digest> {
        let host = self.clone();
        let name = name.clone();
        let naming = blocking(move || {
            let digest = pinned.digest.clone();
            let named = host.replacing(&name, || host.store.tag_snapshot(&digest, &name, replace));
            if let Err(error) = named {
                host.store.let_go(pinned)?;
                return Err(error);
            }
            Ok(digest)
        });
        naming.await.map_err(name_error)
    }

    /// An image by its name or digest.
    pub fn find_image(&self, reference: &str) -> Result<Image> {
        Ok(images::find(&self.store, &image_ref(reference)?)?)
    }

    pub fn image_if_there(&self, digest: &Digest) -> Result<Option<Image>> {
        Ok(images::find_by_digest(&self.store, digest)?)
    }

    pub fn image_info(&self, digest: &Digest) -> Result<ImageInfo> {
        Ok(images::info(&self.store, digest)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Code, Error, ErrorKind};

    #[test]
    fn a_report_shows_an_image_error_without_a_wrapper() {
        let error = images::Error::NoDebianSources.making("debian");
        let report = Error::from(error).report();
        assert_eq!(report.kind, ErrorKind::Unsupported);
        assert_eq!(report.message, "cannot make image debian");
        assert_eq!(report.causes, ["apt has no source of Debian's own"]);
        assert_eq!(report.code(), Some(Code::NoDebianSources));
    }

    #[test]
    fn a_path_is_no_image() {
        let error = image_ref("./tiny").unwrap_err();
        assert_eq!(error.to_string(), "there is no image ./tiny");
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
}
