//! Lists of images, and of the sandboxes that use them.

use std::collections::{BTreeMap, BTreeSet};

use super::Image;
use crate::{Digest, Error, Name, Named, Store};

/// An image in a list.
#[derive(Debug)]
pub struct ImageSummary {
    pub digest: Digest,
    pub names: Vec<Name>,
    /// One that cannot be read is listed with the reason.
    pub image: Result<Image, Error>,
    /// What its files take on disk. What another image shares with it counts for both.
    pub disk_bytes_used: u64,
    pub sandboxes: u64,
    pub snapshots: u64,
    /// How many captured boots there are of it, and what they take on disk.
    pub warm: u64,
    pub warm_bytes: u64,
}

/// How often something was seen of each image.
type Counts = BTreeMap<Digest, u64>;

impl Store {
    /// Every image by digest, also those without a name, and every name whose image is not there.
    pub fn list_images(&self) -> Result<Vec<ImageSummary>, Error> {
        let mut names = self.names_by_image()?;
        let sandboxes = self.sandboxes_by_image()?;
        let snapshots = self.snapshots_by_image()?;
        let warm = self.warm_by_image()?;
        let digests: BTreeSet<_> = self
            .image_digests()?
            .into_iter()
            .chain(names.keys().cloned())
            .collect();
        let summarize = |digest: Digest| {
            let (count, bytes) = warm.get(&digest).copied().unwrap_or_default();
            Ok(ImageSummary {
                names: names.remove(&digest).unwrap_or_default(),
                image: self.image_by_digest(&digest),
                disk_bytes_used: self.bytes_on_disk(&self.layout.image(&digest))?,
                sandboxes: sandboxes.get(&digest).copied().unwrap_or_default(),
                snapshots: snapshots.get(&digest).copied().unwrap_or_default(),
                warm: count,
                warm_bytes: bytes,
                digest,
            })
        };
        digests.into_iter().map(summarize).collect()
    }

    /// What is in `images/` under the name of a digest.
    pub(crate) fn image_digests(&self) -> Result<Vec<Digest>, Error> {
        let entries = self.files.list(&self.layout.images())?;
        Ok(entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse().ok())
            .collect())
    }

    /// What is in `kernels/` under the name of a digest.
    pub(crate) fn kernel_digests(&self) -> Result<Vec<Digest>, Error> {
        let entries = self.files.list(&self.layout.kernels())?;
        Ok(entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse().ok())
            .collect())
    }

    fn names_by_image(&self) -> Result<BTreeMap<Digest, Vec<Name>>, Error> {
        let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (name, named) in self.names()? {
            if let Ok(Named::Image(digest)) = named {
                found.entry(digest).or_default().push(name);
            }
        }
        Ok(found)
    }

    fn sandboxes_by_image(&self) -> Result<Counts, Error> {
        let readable = self
            .sandboxes()?
            .into_iter()
            .filter_map(|listed| listed.sandbox.ok());
        Ok(count(
            readable.map(|sandbox| sandbox.record().image_digest.clone()),
        ))
    }

    fn snapshots_by_image(&self) -> Result<Counts, Error> {
        Ok(count(
            self.list_snapshots()?
                .snapshots
                .into_iter()
                .map(|snapshot| snapshot.image_digest),
        ))
    }

    /// Number and bytes.
    fn warm_by_image(&self) -> Result<BTreeMap<Digest, (u64, u64)>, Error> {
        let mut found: BTreeMap<_, (u64, u64)> = BTreeMap::new();
        for warm in self.warm_list()? {
            let record = warm.record.as_ref();
            let Some(image) = record.and_then(|record| record.of.image()) else {
                continue;
            };
            let (count, bytes) = found.entry(image.clone()).or_default();
            (*count, *bytes) = (*count + 1, bytes.saturating_add(warm.bytes));
        }
        Ok(found)
    }
}

fn count(digests: impl Iterator<Item = Digest>) -> Counts {
    let mut counts = Counts::new();
    digests.for_each(|digest| *counts.entry(digest).or_default() += 1);
    counts
}
