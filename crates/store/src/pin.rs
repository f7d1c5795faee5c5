//! What a pin keeps, and its file: see `snapshot::pinned`.

use crate::id::Digest;

/// What a pin can hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pin {
    Snapshot(Digest),
    Image(Digest),
    Kernel(Digest),
}

impl Pin {
    pub(crate) fn to_line(&self) -> String {
        match self {
            Self::Snapshot(digest) => format!("snapshot {digest}\n"),
            Self::Image(digest) => format!("image {digest}\n"),
            Self::Kernel(digest) => format!("kernel {digest}\n"),
        }
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, digest) = std::str::from_utf8(bytes)
            .ok()?
            .strip_suffix('\n')?
            .split_once(' ')?;
        let digest = digest.parse().ok()?;
        match kind {
            "snapshot" => Some(Self::Snapshot(digest)),
            "image" => Some(Self::Image(digest)),
            "kernel" => Some(Self::Kernel(digest)),
            _ => None,
        }
    }
}
