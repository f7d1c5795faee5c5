//! What a server is started with: options of the command line over those of a file.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use hyper::Uri;
use sandtree::RegistryAccess;
use serde::Deserialize;

use crate::observe;

/// The port of E2B's own development server.
pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3000);
/// The lifetime of a sandbox, unless its creator chooses: E2B's.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

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
    /// Who may read the figures at `/metrics`.
    pub metrics: MetricsAccess,
    /// The collector that gets traces, by OTLP over HTTP.
    pub traces: Option<Uri>,
    /// How many descriptors this process may have. `None`: enough.
    pub descriptors: Option<u64>,
}

/// Who may read the figures at `/metrics`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetricsAccess {
    /// Holders of a key.
    #[default]
    Key,
    /// Everybody on this host. The server must listen on loopback only.
    Loopback,
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
    pub descriptors: Option<u64>,
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
    #[serde(default)]
    pub metrics: MetricsAccess,
    pub traces: Option<String>,
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
    #[error(
        "metrics = \"loopback\" is for servers that listen on loopback only, and {0} is not loopback: \
         leave it out, and give Prometheus a key as its bearer token"
    )]
    OpenMetrics(SocketAddr),
    #[error("traces = {0:?}: use the address of a collector, such as \"http://127.0.0.1:4318\"")]
    Collector(String),
    #[error("traces: this program was built without them; build it with --features otlp")]
    NoTraces,
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
        let traces = self.traces.map(collector).transpose()?;
        let config = Config {
            listen: options.listen.or(self.listen).unwrap_or(DEFAULT_LISTEN),
            tls: options.tls.or(self.tls),
            insecure: options.insecure || self.insecure_listen,
            templates: self.templates,
            timeout: timeout.unwrap_or(DEFAULT_TIMEOUT),
            registry: options.registry,
            metrics: self.metrics,
            traces,
            descriptors: options.descriptors,
        };
        let is_exposed = !config.listen.ip().is_loopback();
        if is_exposed && config.tls.is_none() && !config.insecure {
            return Err(ConfigError::Insecure(config.listen));
        }
        if is_exposed && config.metrics == MetricsAccess::Loopback {
            return Err(ConfigError::OpenMetrics(config.listen));
        }
        Ok(config)
    }
}

/// The address of a collector. Traces go to the same host, or through a network that is trusted:
/// without TLS.
fn collector(text: String) -> Result<Uri, ConfigError> {
    if !observe::SENDS_TRACES {
        return Err(ConfigError::NoTraces);
    }
    let uri = text.parse::<Uri>().ok();
    let uri = uri.filter(|uri| uri.scheme_str() == Some("http") && uri.authority().is_some());
    uri.ok_or(ConfigError::Collector(text))
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
    fn figures_without_a_key_stay_on_this_host() {
        let with = |listen: &str| {
            let text =
                format!("listen = \"{listen}\"\ninsecure_listen = true\nmetrics = \"loopback\"");
            let file = FileConfig::parse("f".into(), &text).unwrap();
            file.with(Options::default())
        };
        assert_eq!(
            with("127.0.0.1:1").unwrap().metrics,
            MetricsAccess::Loopback
        );
        let refused = with("0.0.0.0:1").unwrap_err();
        assert!(refused.to_string().contains("bearer token"), "{refused}");
        let plain = FileConfig::default().with(Options::default()).unwrap();
        assert_eq!(plain.metrics, MetricsAccess::Key);
    }

    #[test]
    fn traces_need_a_collector() {
        let with = |address: &str| {
            let file = FileConfig {
                traces: Some(address.to_owned()),
                ..FileConfig::default()
            };
            file.with(Options::default())
        };
        assert!(with("http://127.0.0.1:4318").unwrap().traces.is_some());
        for wrong in ["127.0.0.1:4318", "https://x:1", "/v1", ""] {
            assert!(with(wrong).is_err(), "{wrong}");
        }
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
