//! What a server is started with: options of the command line over those of a file.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use sandtree::RegistryAccess;
use serde::Deserialize;

/// The port of E2B's own development server.
pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3000);
/// The lifetime of a sandbox, unless its creator chooses: E2B's.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, Clone)]
pub struct Config {
    pub listen: SocketAddr,
    pub tls: Option<TlsFiles>,
    /// Whether to serve without TLS on an address that other hosts reach.
    pub insecure: bool,
    /// Templates that are images or snapshots of another name.
    pub templates: BTreeMap<String, String>,
    /// How long a sandbox runs, unless its creator chooses.
    pub timeout: Duration,
    /// How registries are reached, unless a client says otherwise.
    pub registry: RegistryAccess,
}

/// The certificate chain and the private key, as PEM.
#[derive(Debug, Clone, Deserialize)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// What the command line says.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub listen: Option<SocketAddr>,
    pub tls: Option<TlsFiles>,
    pub insecure: bool,
    pub registry: RegistryAccess,
}

/// `sandtree.toml`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileConfig {
    pub listen: Option<SocketAddr>,
    pub tls: Option<TlsFiles>,
    #[serde(default)]
    pub insecure_listen: bool,
    #[serde(default)]
    pub templates: BTreeMap<String, String>,
    pub default_timeout_seconds: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{}: {message}", path.display())]
    Malformed { path: PathBuf, message: String },
    #[error(
        "{0} is reachable from other hosts, and without TLS keys and data can be read on the way: \
         use --tls-cert and --tls-key, or --insecure-listen behind a proxy of your own"
    )]
    Insecure(SocketAddr),
}

impl FileConfig {
    pub fn parse(path: PathBuf, text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| ConfigError::Malformed {
            path,
            message: error.to_string(),
        })
    }

    /// The configuration with what the command line says, which replaces what the file says.
    pub fn with(self, options: Options) -> Result<Config, ConfigError> {
        let timeout = self.default_timeout_seconds.map(Duration::from_secs);
        let config = Config {
            listen: options.listen.or(self.listen).unwrap_or(DEFAULT_LISTEN),
            tls: options.tls.or(self.tls),
            insecure: options.insecure || self.insecure_listen,
            templates: self.templates,
            timeout: timeout.unwrap_or(DEFAULT_TIMEOUT),
            registry: options.registry,
        };
        let is_exposed = !config.listen.ip().is_loopback();
        if is_exposed && config.tls.is_none() && !config.insecure {
            return Err(ConfigError::Insecure(config.listen));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_tls_only_this_host_is_served() {
        let open: SocketAddr = "0.0.0.0:3000".parse().unwrap();
        let tls = TlsFiles {
            cert: "c".into(),
            key: "k".into(),
        };
        let accepted = |listen: Option<SocketAddr>, tls: Option<&TlsFiles>, insecure| {
            let options = Options {
                listen,
                tls: tls.cloned(),
                insecure,
                ..Options::default()
            };
            FileConfig::default().with(options).is_ok()
        };
        assert!(accepted(None, None, false));
        assert!(!accepted(Some(open), None, false));
        assert!(accepted(Some(open), None, true));
        assert!(accepted(Some(open), Some(&tls), false));
        let local: SocketAddr = "[::1]:1".parse().unwrap();
        assert!(accepted(Some(local), None, false));
    }

    #[test]
    fn the_file_is_read_and_misspelled_names_are_refused() {
        let text = "listen = \"127.0.0.1:4000\"\n[templates]\nbase = \"mine\"\n";
        let config = FileConfig::parse("f".into(), text).unwrap();
        let config = config.with(Options::default()).unwrap();
        assert_eq!(config.listen.port(), 4000);
        assert_eq!(config.templates["base"], "mine");
        let wrong = FileConfig::parse("f".into(), "lisen = \"x\"").unwrap_err();
        assert!(wrong.to_string().contains("lisen"), "{wrong}");
    }
}
