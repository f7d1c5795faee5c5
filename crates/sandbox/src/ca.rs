//! Gives a guest the host's certificate authorities.
//!
//! A host behind its own proxy trusts an authority that no image knows. A guest gets the host's
//! bundle at the path where distributions keep theirs. Programs with a bundle of their own find the
//! host's bundle by the variables that they read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::guest::{FileOwner, Guest};

/// Where distributions keep theirs.
const HOST: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const GUEST: &str = "/etc/ssl/certs/ca-certificates.crt";
/// OpenSSL, curl, Python's requests and pip, Node.js, git.
const VARIABLES: [&str; 6] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
];
/// Far above any bundle.
const MAX_BYTES: u64 = 16 << 20;

/// The host's own bundle.
pub fn host_bundle() -> Result<PathBuf> {
    let found = HOST.iter().map(Path::new).find(|path| path.is_file());
    found.map(Path::to_owned).ok_or_else(|| {
        Error::invalid(
            "certificates of the host",
            "none",
            "install ca-certificates",
        )
    })
}

/// The variables that commands get in their environment.
pub(crate) fn env() -> BTreeMap<String, String> {
    VARIABLES
        .iter()
        .map(|&key| (key.to_owned(), GUEST.to_owned()))
        .collect()
}

/// Refuses a path that cannot be a bundle.
pub(crate) fn check(path: &Path) -> Result<()> {
    let found = path.metadata().map_err(|e| Error::io("look at", path, e))?;
    if found.is_file() && path.is_absolute() && found.len() <= MAX_BYTES {
        return Ok(());
    }
    Err(Error::invalid(
        "bundle of certificates",
        path.display(),
        "an absolute path to a file below 16 MiB",
    ))
}

pub(crate) async fn hand_over(guest: &Guest, bundle: &Path) -> Result<()> {
    let files = guest.files();
    let parent = Path::new(GUEST).parent().expect("it is absolute");
    files.make_dir(parent, 0o755).await?;
    let mut source = tokio::fs::File::open(bundle)
        .await
        .map_err(|e| Error::io("open", bundle, e))?;
    files
        .write(GUEST, &mut source, FileOwner::default())
        .await
        .map(drop)
}
