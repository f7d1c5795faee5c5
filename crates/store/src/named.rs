//! What a name of the namespace of images and snapshots stands for, and its file.
//!
//! ```text
//! "<digest>\n" an image | "snapshot <digest>\n" | "reserved <sandbox id>\n" a save to come
//! ```

use std::fmt;

use crate::id::{Digest, SandboxId};

const SNAPSHOT: &str = "snapshot ";
const RESERVED: &str = "reserved ";

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    Image(Digest),
    Snapshot(Digest),
    /// The save that is due when this sandbox stops.
    Reserved(SandboxId),
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(digest) => write!(f, "image {digest}"),
            Self::Snapshot(digest) => write!(f, "snapshot {digest}"),
            Self::Reserved(sandbox) => write!(f, "the save to come of sandbox {sandbox}"),
        }
    }
}

impl Named {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.strip_suffix('\n')?;
        if let Some(digest) = text.strip_prefix(SNAPSHOT) {
            return digest.parse().ok().map(Self::Snapshot);
        }
        match text.strip_prefix(RESERVED) {
            Some(sandbox) => sandbox.parse().ok().map(Self::Reserved),
            None => text.parse().ok().map(Self::Image),
        }
    }

    pub(crate) fn to_line(&self) -> String {
        match self {
            Self::Image(digest) => format!("{digest}\n"),
            Self::Snapshot(digest) => format!("{SNAPSHOT}{digest}\n"),
            Self::Reserved(sandbox) => format!("{RESERVED}{sandbox}\n"),
        }
    }
}
