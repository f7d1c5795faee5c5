//! How a registry is reached.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use sandtree_registry::docker::{self, Helpers};
use sandtree_registry::{Access, Client, Credentials, Protocol, Reference, Secret};

use crate::error::Result;

/// How a registry is reached, in addition to its address. The library reads no environment, so the
/// caller says where files and programs are.
#[derive(Clone, Default)]
pub struct RegistryAccess {
    pub username: Option<String>,
    pub password: Option<String>,
    /// Docker's `config.json`, used when no user name is given.
    pub docker_config: Option<PathBuf>,
    /// Directories to look for Docker's credential helpers in.
    pub search: Vec<PathBuf>,
    /// All variables that credential helpers run with. Each helper reads variables of its own, so
    /// an edge passes its whole environment.
    pub helper_env: Vec<(OsString, OsString)>,
    /// Without encryption, also for other hosts than this one.
    pub plain_http: bool,
    /// Certificates to trust in addition to the host's own.
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
    /// Where Docker keeps credentials: in `DOCKER_CONFIG`, or below `HOME`, as `variable` gives
    /// them.
    pub fn docker_config(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let set = |name| variable(name).filter(|dir| !dir.is_empty());
        let dir = set("DOCKER_CONFIG").map(PathBuf::from);
        let below_home = || set("HOME").map(|home| PathBuf::from(home).join(".docker"));
        let dir = dir.or_else(below_home);
        dir.map(|dir| dir.join("config.json"))
    }

    pub(crate) fn client(&self, reference: &Reference) -> Result<Client> {
        let protocol = if self.plain_http {
            Protocol::Http
        } else {
            Protocol::ByHost
        };
        let access = Access {
            credentials: self.credentials(&reference.registry)?,
            protocol,
            ca: self.ca.clone(),
            ..Access::default()
        };
        Ok(Client::new(&reference.registry, access)?)
    }

    fn credentials(&self, registry: &str) -> Result<Credentials> {
        if let (Some(username), Some(password)) = (&self.username, &self.password) {
            return Ok(Credentials::Basic {
                username: username.clone(),
                password: Secret::new(password.clone()),
            });
        }
        let Some(config) = self.docker_config.as_deref().filter(|path| path.is_file()) else {
            return Ok(Credentials::Anonymous);
        };
        let helpers = Helpers {
            search: &self.search,
            env: &self.helper_env,
        };
        let known = docker::credentials(config, registry, helpers)?;
        Ok(known.unwrap_or_default())
    }
}
