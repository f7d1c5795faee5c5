//! Who a client is: keys on the control plane, tokens on the data plane.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sandtree::{Access, KeyInfo, Scope, is_equal};
use sha2::{Digest, Sha256};

use crate::digits;
use crate::error::{Fault, Result};

/// The token for commands and files of a sandbox.
pub const ENVD: &str = "envd";
/// The token for all other ports of a sandbox.
pub const TRAFFIC: &str = "traffic";
/// The token for the content of a volume.
pub const VOLUME: &str = "volume";

/// The value of a header, if it is a text.
pub fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// The key that a request of the control plane presents.
pub fn key(access: &Access, headers: &HeaderMap) -> Result<KeyInfo> {
    let bearer = || {
        let value = header(headers, AUTHORIZATION.as_str())?;
        value.strip_prefix("Bearer ")
    };
    let presented = header(headers, "x-api-key").or_else(bearer);
    let Some(presented) = presented else {
        let message = "no API key: send it as X-API-KEY; `sandtree key create` makes one";
        return Err(Fault::unauthorized(message));
    };
    access
        .key(presented)
        .ok_or_else(|| Fault::unauthorized("invalid API key"))
}

/// Refuses what the holder of a key may not do.
pub fn need(key: &KeyInfo, scope: Scope, what: &str) -> Result<()> {
    if key.may(scope) {
        return Ok(());
    }
    let scope = scope.as_str();
    Err(Fault::forbidden(format!(
        "this key lacks the scope {scope}, which is needed for {what}: \
         `sandtree key create --scope sandboxes,{scope}` makes one that has it"
    )))
}

/// The name of a request that the holder of a key may send again.
pub fn request_name(key: &str, text: &str) -> String {
    let hash = Sha256::digest(format!("{key}\0{text}").as_bytes());
    digits::hex(&hash[..16])
}

/// Whether a request has the token of a sandbox.
pub fn has_token(headers: &HeaderMap, name: &str, expected: &str) -> bool {
    header(headers, name).is_some_and(|token| is_equal(token.as_bytes(), expected.as_bytes()))
}

/// The user that a request names, by basic authentication without a password.
pub fn basic_user(headers: &HeaderMap) -> Result<Option<String>> {
    let Some(value) = header(headers, AUTHORIZATION.as_str()) else {
        return Ok(None);
    };
    let Some(encoded) = value.strip_prefix("Basic ") else {
        return Ok(None);
    };
    let invalid = || Fault::unauthorized("invalid Authorization header");
    let decoded = STANDARD.decode(encoded.trim()).map_err(|_| invalid())?;
    let text = String::from_utf8(decoded).map_err(|_| invalid())?;
    let user = text.split_once(':').map_or(text.as_str(), |(user, _)| user);
    Ok(Some(user.to_owned()).filter(|user| !user.is_empty()))
}

/// What a signed address allows.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    pub path: &'a str,
    /// `read` or `write`.
    pub operation: &'a str,
    pub user: &'a str,
    /// Seconds since the epoch, as the address has them.
    pub expiration: Option<&'a str>,
}

impl Signed<'_> {
    /// Whether `signature` is the one for this, made with the token of a sandbox.
    pub fn matches(&self, token: &str, signature: &str) -> bool {
        let Self {
            path,
            operation,
            user,
            expiration,
        } = self;
        let mut text = format!("{path}:{operation}:{user}:{token}");
        if let Some(expiration) = expiration {
            text.push(':');
            text.push_str(expiration);
        }
        let hash = STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes()));
        is_equal(format!("v1_{hash}").as_bytes(), signature.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_request_is_named_by_its_key_and_its_text() {
        assert_eq!(request_name("a", "x"), request_name("a", "x"));
        assert_ne!(request_name("a", "x"), request_name("b", "x"));
        assert_eq!(request_name("a", "x").len(), 32);
    }

    #[test]
    fn users_come_from_basic_authentication() {
        let user = |value| basic_user(&headers(&[("authorization", value)]));
        assert_eq!(user("Basic cm9vdDo=").unwrap().as_deref(), Some("root"));
        assert_eq!(user("Basic Og==").unwrap(), None);
        assert_eq!(user("Bearer x").unwrap(), None);
        assert!(user("Basic ???").is_err());
        assert!(user("Basic /w==").is_err());
    }

    /// The real clients' own signatures are checked in tests/sdk.
    #[test]
    fn a_signature_is_that_of_the_clients() {
        let signed = Signed {
            path: "/home/user/a.txt",
            operation: "read",
            user: "user",
            expiration: None,
        };
        let hash = Sha256::digest(b"/home/user/a.txt:read:user:token");
        let signature = format!("v1_{}", STANDARD_NO_PAD.encode(hash));
        assert!(signed.matches("token", &signature));
        assert!(!signed.matches("another", &signature));
        let write = Signed {
            operation: "write",
            ..signed
        };
        assert!(!write.matches("token", &signature));
        let later = Signed {
            expiration: Some("1"),
            ..signed
        };
        assert!(!later.matches("token", &signature));
    }
}
