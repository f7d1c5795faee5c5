//! Our artifacts in registries: an image or a snapshot, with one layer for each of its members.

use std::num::NonZeroUsize;

use sandtree_registry::Descriptor;
use sandtree_store::Digest;

use crate::error::{Error, Result};

/// The artifact types.
pub(crate) const SNAPSHOT: &str = "application/vnd.sandtree.snapshot.v1";
pub(crate) const IMAGE: &str = "application/vnd.sandtree.image.v1";
/// The media type of one member, packed by zstd.
pub(crate) const MEMBER: &str = "application/vnd.sandtree.member.v1+zstd";

/// An annotation of the artifact: the digest of its snapshot or image.
pub(crate) const SUBJECT: &str = "dev.sandtree.digest";
/// Annotations of each layer: digest, length and role of the unpacked member.
pub(crate) const MEMBER_DIGEST: &str = "dev.sandtree.member.digest";
pub(crate) const MEMBER_BYTES: &str = "dev.sandtree.member.bytes";
pub(crate) const MEMBER_ROLE: &str = "dev.sandtree.member.role";

/// How many blobs are fetched or sent at a time.
pub(crate) const THREADS: NonZeroUsize = NonZeroUsize::new(4).expect("it is not zero");

/// A member, as the annotations of its layer describe it.
pub(crate) struct Member {
    pub digest: Digest,
    pub bytes: u64,
}

impl Member {
    pub fn of(layer: &Descriptor) -> Result<Self> {
        Self::annotated(layer).ok_or_else(|| Error::Config {
            what: format!("layer {} does not say which member it is", layer.digest),
        })
    }

    fn annotated(layer: &Descriptor) -> Option<Self> {
        if layer.media_type != MEMBER {
            return None;
        }
        Some(Self {
            digest: layer.annotations.get(MEMBER_DIGEST)?.parse().ok()?,
            bytes: layer.annotations.get(MEMBER_BYTES)?.parse().ok()?,
        })
    }
}
