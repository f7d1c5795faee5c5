//! Keys of the HTTP server, and the tokens that it derives.
//!
//! ```text
//!   key    e2b_ + 160 random bits, shown once ──► SHA-256 ──► the store
//!   token  HMAC(the store's secret, purpose and sandbox) ──► nothing to store, and the same after a pause
//! ```

use sandtree_store::{AccessRecord, KeyLimits, KeyRecord, Scope};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::blocking::in_place;
use crate::error::{Error, Result, store_error};
use crate::host::Host;
use crate::info::rfc3339;
use crate::moment::now_unix_ms;

/// The form that clients of E2B expect.
const PREFIX: &str = "e2b_";
const KEY_BYTES: usize = 20;
const ID_DIGITS: usize = 12;
const NAME_MAX: usize = 100;
const KEYS_MAX: usize = 10_000;
/// The block of SHA-256, as HMAC uses it.
const BLOCK: usize = 64;

/// A key as lists show it.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct KeyInfo {
    pub id: String,
    pub name: String,
    /// RFC 3339, in UTC.
    pub created_at: String,
    pub limits: KeyLimits,
    /// What its holder may do: `sandboxes`, `host-files`, `registries`.
    pub scopes: Vec<String>,
}

impl KeyInfo {
    fn new(record: &KeyRecord) -> Self {
        Self {
            id: record.id.clone(),
            name: record.name.clone(),
            created_at: rfc3339(record.created_at_unix_ms),
            limits: record.limits,
            scopes: record.scopes.clone(),
        }
    }

    /// Whether its holder may do this.
    pub fn may(&self, scope: Scope) -> bool {
        self.scopes.iter().any(|has| has == scope.as_str())
    }
}

/// A key that was just made. Nothing else ever shows the key itself.
#[derive(Debug, Clone, Serialize)]
pub struct NewKey {
    pub key: String,
    #[serde(flatten)]
    pub info: KeyInfo,
}

/// Who may use the server at this moment.
#[derive(Debug, Clone)]
pub struct Access {
    record: AccessRecord,
}

impl Host {
    pub fn create_key(&self, name: &str, scopes: &[Scope], limits: KeyLimits) -> Result<NewKey> {
        let valid = name.len() <= NAME_MAX && !name.chars().any(char::is_control);
        if !valid {
            let rule = "at most 100 bytes, without control characters";
            return Err(Error::invalid("name of a key", name, rule));
        }
        let key = random_key();
        let hash = hex(&Sha256::digest(key.as_bytes()));
        let record = KeyRecord {
            id: hash[..ID_DIGITS].to_owned(),
            name: name.to_owned(),
            hash,
            created_at_unix_ms: now_unix_ms(),
            limits,
            scopes: scopes
                .iter()
                .map(|scope| scope.as_str().to_owned())
                .collect(),
        };
        let info = KeyInfo::new(&record);
        let added = self.change_access(|access| {
            let has_room = access.keys.len() < KEYS_MAX;
            if has_room {
                access.keys.push(record);
            }
            has_room
        })?;
        if !added {
            return Err(Error::invalid(
                "number of keys",
                KEYS_MAX + 1,
                "at most 10000",
            ));
        }
        Ok(NewKey { key, info })
    }

    /// All keys, oldest first.
    pub fn keys(&self) -> Result<Vec<KeyInfo>> {
        let access = in_place(|| self.inner.store.access());
        let access = access.map_err(store_error("read its keys"))?;
        let keys = access.map(|access| access.keys).unwrap_or_default();
        Ok(keys.iter().map(KeyInfo::new).collect())
    }

    /// Removes a key by its id. The key is refused from then on.
    pub fn remove_key(&self, id: &str) -> Result<()> {
        let removed = self.change_access(|access| {
            let before = access.keys.len();
            access.keys.retain(|key| key.id != id);
            access.keys.len() < before
        })?;
        if removed {
            return Ok(());
        }
        Err(Error::NoKey { id: id.to_owned() })
    }

    /// The keys and tokens of this moment.
    pub fn access(&self) -> Result<Access> {
        let stored = in_place(|| self.inner.store.access());
        let record = match stored.map_err(store_error("read its keys"))? {
            Some(record) => record,
            None => self.change_access(|access| access.clone())?,
        };
        Ok(Access { record })
    }

    fn change_access<T>(&self, change: impl FnOnce(&mut AccessRecord) -> T) -> Result<T> {
        let changed = in_place(|| self.inner.store.change_access(change));
        changed.map_err(store_error("change its keys"))
    }
}

impl Access {
    pub fn has_keys(&self) -> bool {
        !self.record.keys.is_empty()
    }

    /// The key that a client presents. Every stored hash is compared whole, so the time does not
    /// depend on how much of one matches.
    pub fn key(&self, presented: &str) -> Option<KeyInfo> {
        let hash = hex(&Sha256::digest(presented.as_bytes()));
        let keys = self.record.keys.iter();
        let mut found = None;
        for key in keys {
            if is_equal(key.hash.as_bytes(), hash.as_bytes()) {
                found = Some(key);
            }
        }
        found.map(KeyInfo::new)
    }

    /// The token for a purpose in a sandbox: the same each time, and useless for another sandbox.
    pub fn token(&self, purpose: &str, sandbox: &str) -> String {
        let message = format!("{purpose}\0{sandbox}");
        hex(&hmac(self.record.secret.as_bytes(), message.as_bytes()))
    }
}

/// Compares in a time that depends on the lengths only.
pub fn is_equal(one: &[u8], other: &[u8]) -> bool {
    let differences = one.iter().zip(other).fold(0, |sum, (a, b)| sum | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differences) == 0
}

fn random_key() -> String {
    let mut bytes = [0; KEY_BYTES];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    format!("{PREFIX}{}", hex(&bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// RFC 2104, for a key that is not longer than a block.
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    assert!(key.len() <= BLOCK, "a secret has 64 digits");
    let padded = |pad: u8| {
        let mut block = [pad; BLOCK];
        block
            .iter_mut()
            .zip(key)
            .for_each(|(byte, key)| *byte ^= key);
        block
    };
    let inner = Sha256::new()
        .chain_update(padded(0x36))
        .chain_update(message)
        .finalize();
    let outer = Sha256::new().chain_update(padded(0x5c)).chain_update(inner);
    outer.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test case 2 of RFC 4231.
    #[test]
    fn hmac_is_that_of_the_standard() {
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        let found = hmac(b"Jefe", b"what do ya want for nothing?");
        assert_eq!(hex(&found), expected);
    }

    #[test]
    fn keys_have_the_form_that_clients_check() {
        let key = random_key();
        let digits = key.strip_prefix("e2b_").unwrap();
        assert_eq!(digits.len(), 40);
        assert!(
            digits
                .bytes()
                .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        );
        assert_ne!(key, random_key());
    }

    #[test]
    fn only_equal_texts_are_equal() {
        assert!(is_equal(b"ab", b"ab"));
        assert!(!is_equal(b"ab", b"ac"));
        assert!(!is_equal(b"ab", b"abc"));
        assert!(!is_equal(b"", b"a"));
    }
}
