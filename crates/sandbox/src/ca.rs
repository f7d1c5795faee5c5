//! The host's certificate authorities, handed to a guest.
//!
//! A host behind a proxy of its own trusts an authority that no image knows. A guest that is given
//! the host's bundle has it where distributions look for theirs, and its commands find it by the
//! variables that programs with a bundle of their own look at.

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

/// What commands find in their environment.
pub(crate) fn env() -> BTreeMap<String, String> {
    VARIABLES
        .iter()
        .map(|&key| (key.to_owned(), GUEST.to_owned()))
        .collect()
}

/// Refuses what cannot be a bundle.
pub(crate) fn check(path: &Path) -> Result<()> {
    let found = path.metadata().map_err(|e| Error::io("look at", path, e))?;
    match found.is_file() && path.is_absolute() && found.len() <= MAX_BYTES {
        true => Ok(()),
        false => Err(Error::invalid(
            "bundle of certificates",
            path.display(),
            "an absolute path to a file below 16 MiB",
        )),
    }
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
