//! How a registry may be reached: by whom, over what, and with how much patience.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// A password or token. It is never shown.
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

/// Who asks.
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
    /// A token that is shown to the registry as it is.
    Bearer(Secret),
    /// Nobody, since the helper that knows did not tell. Why is the error if the registry wants a
    /// name.
    Untold {
        helper: String,
        rule: String,
    },
}

/// What is spoken with the registry itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Protocol {
    /// Plain http with this machine, unless a CA file is given; https with any other.
    #[default]
    ByHost,
    Http,
    Https,
}

/// How long to wait, how often to try, how much to send at once.
#[derive(Debug, Clone)]
pub struct Limits {
    pub connect: Duration,
    /// For the headers of an answer, and for each piece of a body.
    pub stalled: Duration,
    /// For all of a manifest or another document.
    pub document: Duration,
    /// For the answer to the request that ends an upload, during which some registries move and
    /// hash all of it.
    pub commit: Duration,
    /// All the waiting together that a registry may ask of one request.
    pub asked_to_wait: Duration,
    /// Before the second try; each later one waits twice as long.
    pub backoff: Duration,
    /// Tries in a row without a byte of progress.
    pub tries: u32,
    /// The body of one request of an upload that does not go in one piece, unless the registry
    /// wants larger ones.
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

/// Everything about the way to a registry but its name.
#[derive(Debug, Clone)]
pub struct Access {
    pub credentials: Credentials,
    pub protocol: Protocol,
    /// Certificates in PEM to trust besides the host's own.
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
