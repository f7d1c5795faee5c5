//! A file of the store by its content.

use serde::{Deserialize, Serialize};

use crate::id::Digest;

/// What a file of a published directory is, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    pub digest: Digest,
    pub bytes: u64,
}
