//! Who may use the HTTP server: its keys, and the secret from which it derives tokens.
//!
//! Always: a key itself is never stored, only its SHA-256. The file is replaced as a whole while
//! the store's lock is held, so two programs lose none of each other's changes.

use serde::{Deserialize, Serialize};

use crate::record::{self, Record};
use crate::{Error, Store, publish};

/// The bytes of the secret.
const SECRET: usize = 32;

/// `access.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessRecord {
    pub schema: u64,
    /// 64 hexadecimal digits.
    pub secret: String,
    pub keys: Vec<KeyRecord>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// The first digits of its hash: they name the key, and give nothing away.
    pub id: String,
    pub name: String,
    /// SHA-256 of the key, 64 hexadecimal digits.
    pub hash: String,
    pub created_at_unix_ms: u64,
    #[serde(default)]
    pub limits: KeyLimits,
    /// What its holder may do. Texts, so that the scopes of a newer program stay.
    #[serde(default = "first_scope")]
    pub scopes: Vec<String>,
}

/// What the holder of a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Create, use and remove sandboxes and snapshots.
    Sandboxes,
    /// Name files of the host: mounts, directories for snapshots, arguments of QEMU.
    HostFiles,
    /// Let the host push to registries and pull from them, with the credentials of its user.
    Registries,
}

impl Scope {
    pub const ALL: [Scope; 3] = [Self::Sandboxes, Self::HostFiles, Self::Registries];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sandboxes => "sandboxes",
            Self::HostFiles => "host-files",
            Self::Registries => "registries",
        }
    }
}

/// The scope of a key from before scopes.
fn first_scope() -> Vec<String> {
    vec![Scope::Sandboxes.as_str().to_owned()]
}

/// What the holder of a key may use. `None`: as much as the host has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct KeyLimits {
    /// Sandboxes that run at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<u32>,
    /// Memory of all of them together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creates_per_minute: Option<u32>,
}

impl AccessRecord {
    const SCHEMA: u64 = 1;

    fn new() -> Result<Self, Error> {
        let mut secret = [0; SECRET];
        getrandom::fill(&mut secret).map_err(Error::Random)?;
        Ok(Self {
            schema: Self::SCHEMA,
            secret: secret.iter().map(|byte| format!("{byte:02x}")).collect(),
            keys: Vec::new(),
        })
    }
}

impl Record for AccessRecord {
    const SCHEMA: u64 = Self::SCHEMA;
}

impl Store {
    /// The keys and the secret, if there are any.
    pub fn access(&self) -> Result<Option<AccessRecord>, Error> {
        let path = self.layout.access();
        if self.files.kind(&path)?.is_none() {
            return Ok(None);
        }
        record::read(&self.files, &path).map(Some)
    }

    /// Changes the keys, and returns what `change` returns. The secret is made the first time.
    pub fn change_access<T>(
        &self,
        change: impl FnOnce(&mut AccessRecord) -> T,
    ) -> Result<T, Error> {
        let _alone = self.files.lock(&self.layout.lock())?;
        let mut access = match self.access()? {
            Some(access) => access,
            None => AccessRecord::new()?,
        };
        let before = access.clone();
        let changed = change(&mut access);
        if access != before || access.keys.is_empty() {
            let bytes = record::canonical(&access);
            publish::replace(&self.files, &self.layout.access(), &bytes)?;
        }
        Ok(changed)
    }
}
