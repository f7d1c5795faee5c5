//! A best-effort memo of results (key to digest), in the store's cache, which may vanish at any
//! time.

use sandtree_store::{Digest, Name, Store};
use serde::Serialize;

/// The key of a result. `of` is the digest of everything that the result depends on.
pub fn key(kind: &str, of: &Digest) -> Name {
    format!("{kind}-{}", &of.as_str()[..40])
        .parse()
        .expect("it is a name")
}

/// Records a result. A memo that cannot be written only costs time later; `consequence` says how,
/// in the warning.
pub fn record(store: &Store, key: &Name, result: &impl Serialize, consequence: &str) {
    if let Err(error) = store.cache(key, result) {
        tracing::warn!(%error, "{consequence}");
    }
}
