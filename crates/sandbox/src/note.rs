//! What was made once and is found again: digests in the store's cache, which may go at any time.

use sandtree_store::{Digest, Name, Store};
use serde::Serialize;

/// What something is noted under that is told apart from others of its kind by a digest.
pub(crate) fn key(kind: &str, of: &Digest) -> Name {
    format!("{kind}-{}", &of.as_str()[..40])
        .parse()
        .expect("it is a name")
}

/// Notes what was made. `otherwise`: what becomes of it if that fails, which is nobody's failure.
pub(crate) fn keep(store: &Store, key: &Name, made: &impl Serialize, otherwise: &str) {
    if let Err(error) = store.cache(key, made) {
        tracing::warn!(%error, "{otherwise}");
    }
}
