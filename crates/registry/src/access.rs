//! How a registry is reached: the credentials, the protocol, and the limits of each request.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// A password or token. `Debug` never shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Hides this text.
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The identity that requests are made with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Credentials {
    #[default]
    Anonymous,
    Basic {
        username: String,
        password: Secret,
    },
    /// A refresh token, which the registry's token endpoint turns into short-lived ones.
    Token(Secret),
    /// A token that is sent to the registry unchanged.
    Bearer(Secret),
    /// Anonymous, because the credential helper failed. If the registry wants credentials, that
    /// failure is the error.
    HelperFailed {
        helper: String,
        rule: String,
    },
}

/// The protocol of the requests to the registry itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Protocol {
    /// Plain http with this machine, unless a CA file is given; https with any other.
    #[default]
    ByHost,
    Http,
    Https,
}

/// How long to wait, how often to try, and how much to send at once.
#[derive(Debug, Clone)]
pub struct Limits {
    pub connect: Duration,
    /// The wait for the headers of an answer, and for each piece of a body.
    pub stalled: Duration,
    /// The time for all of a manifest or another document.
    pub document: Duration,
    /// The wait for the answer to the request that ends an upload. Some registries move and hash
    /// the whole blob before they answer.
    pub commit: Duration,
    /// The total wait that a registry may ask for during one request.
    pub asked_to_wait: Duration,
    /// The wait before the second try; each later one is twice as long.
    pub backoff: Duration,
    /// How many tries in a row may make no progress.
    pub tries: u32,
    /// The size of one chunk of an upload that cannot be sent in one piece. A registry may require
    /// larger chunks.
    pub chunk_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            stalled: Duration::from_secs(60),
            document: Duration::from_secs(120),
            commit: Duration::from_secs(600),
            asked_to_wait: Duration::from_secs(60),
            backoff: Duration::from_millis(250),
            tries: 5,
            chunk_bytes: 4 << 20,
        }
    }
}

/// How to reach a registry, except for its name.
#[derive(Debug, Clone)]
pub struct Access {
    pub credentials: Credentials,
    pub protocol: Protocol,
    /// A PEM file of certificates to trust in addition to the host's own.
    pub ca: Option<PathBuf>,
    pub user_agent: String,
    pub limits: Limits,
}

impl Default for Access {
    fn default() -> Self {
        Self {
            credentials: Credentials::default(),
            protocol: Protocol::default(),
            ca: None,
            user_agent: concat!("sandtree/", env!("CARGO_PKG_VERSION")).to_owned(),
            limits: Limits::default(),
        }
    }
}
