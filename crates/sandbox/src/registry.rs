//! Images and snapshots in and out of registries.
//!
//! ```text
//! OCI image ── layers ──► ext4 ──► image                                  pull
//! artifact of ours: one layer for each member, packed by zstd  ◄──►  image | snapshot, with memory
//! ```
//!
//! Always: every byte is checked against the digest it was asked by before a name points at it.
//! What is here already is not fetched, and what is there already is not sent. When it fails:
//! nothing is left here; there, at most blobs that no manifest lists, which registries collect.

mod pull;
mod push;
mod transfer;
mod unpacked;

use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use sandtree_registry::{
    Access, Client, Credentials, Descriptor, Protocol, Reference, Secret, docker,
};
use sandtree_store::Digest;

use crate::image::Error;

pub use pull::{PullSpec, Pulled, PulledKind};
pub use push::Pushed;

/// What our artifacts say they are.
const SNAPSHOT: &str = "application/vnd.sandtree.snapshot.v1";
const IMAGE: &str = "application/vnd.sandtree.image.v1";
/// One member of either, packed by zstd.
const MEMBER: &str = "application/vnd.sandtree.member.v1+zstd";

/// On an artifact: the digest of the snapshot or image that it is.
const SUBJECT: &str = "dev.sandtree.digest";
/// On each of its layers: the member's digest, its length and its role, not packed.
const MEMBER_DIGEST: &str = "dev.sandtree.member.digest";
const MEMBER_BYTES: &str = "dev.sandtree.member.bytes";
const MEMBER_ROLE: &str = "dev.sandtree.member.role";

/// Blobs at a time.
const THREADS: NonZeroUsize = NonZeroUsize::new(4).expect("it is not zero");

/// How a registry is reached, beside its address. The library reads no environment: whoever calls
/// it says where things are.
#[derive(Clone, Default)]
pub struct RegistryAccess {
    pub username: Option<String>,
    pub password: Option<String>,
    /// Docker's `config.json`, for who has no user name here.
    pub docker_config: Option<PathBuf>,
    /// Where its credential helpers are looked for.
    pub search: Vec<PathBuf>,
    /// All variables that credential helpers run with. Each helper reads variables of its own, so
    /// an edge passes its whole environment.
    pub helper_env: Vec<(OsString, OsString)>,
    /// Without encryption, also with other machines than this one.
    pub plain_http: bool,
    /// Certificates to trust besides the host's own.
    pub ca: Option<PathBuf>,
}

impl fmt::Debug for RegistryAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistryAccess")
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

impl RegistryAccess {
    fn client(&self, reference: &Reference) -> Result<Client, Error> {
        let access = Access {
            credentials: self.credentials(&reference.registry)?,
            protocol: if self.plain_http {
                Protocol::Http
            } else {
                Protocol::ByHost
            },
            ca: self.ca.clone(),
            ..Access::default()
        };
        Ok(Client::new(&reference.registry, access)?)
    }

    fn credentials(&self, registry: &str) -> Result<Credentials, Error> {
        if let (Some(username), Some(password)) = (&self.username, &self.password) {
            let (username, password) = (username.clone(), Secret::new(password.clone()));
            return Ok(Credentials::Basic { username, password });
        }
        let known = match self.docker_config.as_deref().filter(|path| path.is_file()) {
            Some(config) => {
                let helpers = docker::Helpers {
                    search: &self.search,
                    env: &self.helper_env,
                };
                docker::credentials(config, registry, helpers)?
            }
            None => None,
        };
        Ok(known.unwrap_or_default())
    }
}

/// A member as a layer of an artifact says it.
struct Member {
    digest: Digest,
    bytes: u64,
}

impl Member {
    fn of(layer: &Descriptor) -> Result<Self, Error> {
        let said = |key: &str| {
            layer
                .annotations
                .get(key)
                .map(String::as_str)
                .unwrap_or_default()
        };
        let member = said(MEMBER_DIGEST)
            .parse()
            .ok()
            .zip(said(MEMBER_BYTES).parse().ok());
        match member {
            Some((digest, bytes)) if layer.media_type == MEMBER => Ok(Self { digest, bytes }),
            _ => Err(Error::Config {
                what: format!("layer {} does not say which member it is", layer.digest),
            }),
        }
    }
}
