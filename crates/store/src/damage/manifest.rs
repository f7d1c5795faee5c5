//! Why bytes are not a snapshot manifest.

use thiserror::Error as ThisError;

/// Why bytes are no manifest that this program can use.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum ManifestError {
    #[error("a manifest of {bytes} bytes is larger than any can be")]
    TooLarge { bytes: usize },
    #[error("it is not a manifest: {0}")]
    NotAManifest(String),
    #[error("its schema is {found}; this program knows schema {known}")]
    Schema { found: u64, known: u64 },
    #[error("it requires {feature:?}, which this program does not know")]
    Requires { feature: String },
    #[error("it is not in canonical form")]
    NotCanonical,
    #[error("its {field} cannot be: {rule}")]
    Invalid { field: String, rule: String },
}
