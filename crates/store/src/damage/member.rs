//! The names that members of an artifact can have.

use std::fmt;

use super::artifact::Damage;
use crate::Digest;

const BLOBS: &str = "blobs/";

/// A member of an artifact. There are no other names, so none can lead anywhere.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Member {
    /// `artifact.json`: what the rest is.
    Artifact,
    /// `manifest.json`: the snapshot's own.
    Manifest,
    /// `blobs/<digest>`: a file, named by its content.
    Blob(Digest),
}

impl Member {
    pub(crate) fn parse(name: &str) -> Result<Self, Damage> {
        match name {
            "artifact.json" => return Ok(Self::Artifact),
            "manifest.json" => return Ok(Self::Manifest),
            _ => {}
        }
        let digest = name
            .strip_prefix(BLOBS)
            .and_then(|digest| digest.parse().ok());
        digest.map(Self::Blob).ok_or_else(|| Damage::Name {
            name: name.to_owned(),
            rule: broken_rule(name),
        })
    }
}

/// The most specific reason.
fn broken_rule(name: &str) -> &'static str {
    match name {
        "" => "it is empty",
        _ if name.starts_with('/') => "it is absolute",
        _ if name
            .split('/')
            .any(|component| matches!(component, "." | "..")) =>
        {
            "it goes by '.' or '..'"
        }
        _ if name.starts_with(BLOBS) => "a blob is named by a SHA-256 digest",
        _ => "it is neither artifact.json, nor manifest.json, nor in blobs/",
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Artifact => f.write_str("artifact.json"),
            Self::Manifest => f.write_str("manifest.json"),
            Self::Blob(digest) => write!(f, "{BLOBS}{digest}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_has_a_name_and_every_other_name_is_refused() {
        let blob = Member::Blob(Digest::of(b""));
        for member in [Member::Artifact, Member::Manifest, blob.clone()] {
            assert_eq!(Member::parse(&member.to_string()).unwrap(), member);
        }
        let upper = blob.to_string().to_uppercase();
        let rules = [
            "",
            "/etc/passwd",
            "../x",
            "blobs/../x",
            "./artifact.json",
            "blobs/1",
            "x",
            &upper,
        ]
        .map(|name| match Member::parse(name) {
            Err(Damage::Name { rule, .. }) => rule,
            other => panic!("{other:?}"),
        });
        assert!(rules[0].contains("empty") && rules[1].contains("absolute"));
        assert!(
            rules[2..5].iter().all(|rule| rule.contains("'..'")),
            "{rules:?}"
        );
        assert!(rules[5].contains("SHA-256"));
    }
}
