//! The images in the store: listed, found, named and removed.

use std::fmt;

use sandtree_store::{
    self as store, Digest, ExecDefaults, Image, ImageSummary, Init, Name, Named, Store,
};
use serde::Serialize;

use crate::error::{Error, Result, store_error};

/// An image as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ImageInfo {
    pub names: Vec<String>,
    pub digest: String,
    pub arch: String,
    /// The digest of its kernel bundle.
    pub kernel: String,
    pub init: Option<Init>,
    /// The digest of its root file system.
    pub rootfs: String,
    /// The size of its root file system, with its holes.
    pub bytes: u64,
    /// The space that its files take on disk.
    pub disk_bytes_used: u64,
    /// The size of the disk that sandboxes get by default.
    pub disk_bytes: u64,
    pub defaults: ExecDefaults,
    /// How many sandboxes and snapshots are made from it.
    pub sandboxes: u64,
    pub snapshots: u64,
    /// How many captured boots it has, and the space that they take on disk.
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
        let readable = record.as_ref();
        let bytes = readable.map_or(0, |record| record.rootfs.bytes);
        let disk_bytes = readable.and_then(|record| record.disk_bytes);
        Self {
            names: summary.names.into_iter().map(String::from).collect(),
            digest: summary.digest.to_string(),
            arch: readable.map_or_else(String::new, |record| record.arch.to_string()),
            kernel: readable.map_or_else(String::new, |record| record.kernel.to_string()),
            init: readable.map(|record| record.init),
            rootfs: readable.map_or_else(String::new, |record| record.rootfs.digest.to_string()),
            bytes,
            disk_bytes_used: summary.disk_bytes_used,
            disk_bytes: disk_bytes.unwrap_or(bytes),
            defaults: record.map(|record| record.defaults).unwrap_or_default(),
            sandboxes: summary.sandboxes,
            snapshots: summary.snapshots,
            warm: summary.warm,
            warm_bytes: summary.warm_bytes,
            unreadable,
        }
    }

    /// Images without a name come last.
    fn order(&self) -> (bool, &[String], &str) {
        (self.names.is_empty(), &self.names, &self.digest)
    }
}

/// The outcome of removing an image's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct RemovedImage {
    pub digest: String,
    /// Whether its content was removed as well, because nothing else used it.
    pub collected: bool,
}

/// How a caller names an image, or a snapshot, of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageRef {
    Name(Name),
    Digest(Digest),
}

impl fmt::Display for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Digest(digest) => digest.fmt(f),
        }
    }
}

/// Every image, with or without a name.
pub fn list(store: &Store) -> Result<Vec<ImageInfo>> {
    let listed = store
        .list_images()
        .map_err(store_error("list its images"))?;
    let mut images: Vec<_> = listed.into_iter().map(ImageInfo::new).collect();
    images.sort_by(|a, b| a.order().cmp(&b.order()));
    Ok(images)
}

/// What lists show of one image.
pub fn info(store: &Store, digest: &Digest) -> Result<ImageInfo> {
    summary(store, digest).map(ImageInfo::new)
}

fn summary(store: &Store, digest: &Digest) -> Result<ImageSummary> {
    let listed = store
        .list_images()
        .map_err(store_error("list its images"))?;
    let found = listed.into_iter().find(|summary| summary.digest == *digest);
    found.ok_or_else(|| Error::NoImage {
        name: digest.to_string(),
    })
}

/// An image, kept while the result lives.
pub fn find(store: &Store, image: &ImageRef) -> Result<Image> {
    match image {
        ImageRef::Name(name) => store
            .image(name)
            .and_then(|image| store.pin_image(&image.digest))
            .map_err(no_image(name)),
        ImageRef::Digest(digest) => find_by_digest(store, digest)?.ok_or_else(|| Error::NoImage {
            name: digest.to_string(),
        }),
    }
}

/// An image by its digest, kept while the result lives. `None`: the store has no such image.
pub fn find_by_digest(store: &Store, digest: &Digest) -> Result<Option<Image>> {
    match store.pin_image(digest) {
        Ok(image) => Ok(Some(image)),
        Err(error) if error.io_kind() == Some(std::io::ErrorKind::NotFound) => Ok(None),
        Err(error) => Err(store_error("read an image")(error)),
    }
}

/// Removes an image's name, or, by its digest, all of its names. Its content stays as long as
/// anything uses it.
pub fn remove(store: &Store, image: &ImageRef) -> Result<RemovedImage> {
    let removed = match image {
        ImageRef::Name(name) => store.remove_image_name(name),
        ImageRef::Digest(digest) => {
            // An image that cannot be read, or has no name, is removed as well.
            let names = summary(store, digest)?.names;
            names
                .iter()
                .try_for_each(|name| store.remove_image_name(name).map(drop))
                .and_then(|()| store.remove_unused_image(digest.clone()))
        }
    };
    let removed = removed.map_err(no_image(image))?;
    Ok(RemovedImage {
        digest: removed.digest.to_string(),
        collected: removed.collected,
    })
}

/// Refuses a name that something other than an image has, before any work is done for it.
pub fn check_name(store: &Store, name: &Name) -> Result<()> {
    match store.named(name).map_err(store_error("read a name"))? {
        None | Some(Named::Image(_)) => Ok(()),
        Some(by) => Err(Error::NameTaken {
            name: name.to_string(),
            by,
        }),
    }
}

/// Points a name at an image.
pub fn set_name(store: &Store, name: &Name, image: &Image) -> Result<()> {
    let named = store.set_image_name(name, &image.digest);
    named.map_err(|error| match error {
        store::Error::NameInUse { name, holder } => Error::NameTaken {
            name: name.to_string(),
            by: holder,
        },
        error => store_error("name an image")(error),
    })
}

/// The error for an image that cannot be read under this name.
pub(crate) fn no_image(image: &impl fmt::Display) -> impl FnOnce(store::Error) -> Error {
    let name = image.to_string();
    move |error| match error {
        store::Error::UnknownImage { .. } => Error::NoImage { name },
        store::Error::OtherKind { name, found, .. } => Error::NotAnImage {
            name: name.to_string(),
            found,
        },
        error => store_error("read an image")(error),
    }
}
