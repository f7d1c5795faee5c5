//! References to images in registries: `host[:port]/repository[:tag][@digest]`, by the grammar of
//! the distribution specification.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use crate::digest::Digest;
use crate::error::Error;

const DEFAULT_TAG: &str = "latest";
const REPOSITORY_MAX: usize = 255;
const TAG_MAX: usize = 128;

/// A reference to a manifest in a registry. With a digest, the tag is only informative.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// `host` or `host:port`.
    pub registry: String,
    pub repository: String,
    pub tag: Option<String>,
    pub digest: Option<Digest>,
}

impl Reference {
    /// The part of a request's path that selects the manifest: the digest, or else the tag.
    pub(crate) fn selector(&self) -> Result<String, Error> {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => Ok(digest.to_string()),
            (None, Some(tag)) if is_tag(tag) => Ok(tag.clone()),
            (None, Some(tag)) => Err(Error::reference(tag, "it is not a tag")),
            (None, None) => Ok(DEFAULT_TAG.to_owned()),
        }
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refuse = |rule| Error::reference(text, rule);
        let (named, digest) = match text.split_once('@') {
            Some((named, digest)) => (named, Some(digest.parse()?)),
            None => (text, None),
        };
        let (registry, path) = named
            .split_once('/')
            .filter(|(first, _)| looks_like_host(first))
            .ok_or_else(|| Error::no_registry(text))?;
        if !is_registry(registry) {
            return Err(refuse("its host is invalid"));
        }
        let (repository, tag) = match path.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (path, digest.is_none().then_some(DEFAULT_TAG)),
        };
        if !is_repository(repository) {
            return Err(refuse(
                "a repository is lower case letters and digits, joined by . _ __ - or /",
            ));
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(refuse(
                "a tag is up to 128 letters, digits, dots, dashes and underscores",
            ));
        }
        Ok(Self {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            tag: tag.map(str::to_owned),
            digest,
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

/// Whether the first part of a reference is a host and not a repository, by the rule that all tools
/// share.
fn looks_like_host(first: &str) -> bool {
    first == "localhost" || first.contains(['.', ':'])
}

/// Whether the text is `host` or `host:port`.
pub(crate) fn is_registry(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (text, None),
    };
    is_host(host) && port.is_none_or(is_port)
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_host(host: &str) -> bool {
    if let Some(address) = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    host.len() <= 253 && host.split('.').all(is_host_label)
}

fn is_host_label(label: &str) -> bool {
    let inner = label
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    inner
        && !label.is_empty()
        && label.len() <= 63
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// Whether the text can be the name of a repository.
pub(crate) fn is_repository(text: &str) -> bool {
    text.len() <= REPOSITORY_MAX && text.split('/').all(is_component)
}

fn is_component(component: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let allowed = component
        .bytes()
        .all(|byte| alphanumeric(byte) || b"._-".contains(&byte));
    let ends = component.bytes().next().is_some_and(alphanumeric)
        && component.bytes().last().is_some_and(alphanumeric);
    allowed
        && ends
        && component
            .split(|c: char| c.is_ascii_alphanumeric())
            .all(is_separator)
}

fn is_separator(text: &str) -> bool {
    matches!(text, "" | "." | "_" | "__") || text.bytes().all(|byte| byte == b'-')
}

fn is_tag(text: &str) -> bool {
    let first = text
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    first
        && text.len() <= TAG_MAX
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn parse(text: &str) -> Reference {
        text.parse()
            .unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn all_parts_of_a_reference_are_read() {
        let reference = parse(&format!("localhost:5000/team/app:1.2@{DIGEST}"));
        assert_eq!(reference.registry, "localhost:5000");
        assert_eq!(reference.repository, "team/app");
        assert_eq!(reference.tag.as_deref(), Some("1.2"));
        assert_eq!(reference.digest, Some(Digest::of(b"")));
    }

    #[test]
    fn the_default_tag_is_latest() {
        assert_eq!(parse("host.example/app").tag.as_deref(), Some("latest"));
        assert_eq!(parse(&format!("host.example/app@{DIGEST}")).tag, None);
    }

    #[test]
    fn hosts_of_all_kinds_are_read() {
        for host in [
            "localhost",
            "127.0.0.1:5000",
            "[::1]:5000",
            "[::1]",
            "a-b.example:443",
            "Host.Example",
        ] {
            assert_eq!(parse(&format!("{host}/a__b/c-d.e")).registry, host);
        }
    }

    #[test]
    fn a_missing_host_is_an_error_of_its_own() {
        for text in ["debian", "debian:12", "library/debian", ""] {
            let error = text.parse::<Reference>().unwrap_err();
            assert!(matches!(error, Error::NoRegistry { .. }), "{text}: {error}");
        }
    }

    #[test]
    fn references_outside_the_grammar_are_refused() {
        let long = format!("h.example/{}", "a".repeat(256));
        let bad = [
            "h.example/",
            "h.example/A",
            "h.example/../x",
            "h.example/a//b",
            "h.example/a..b",
            "h.example/a:",
        ];
        let worse = [
            "h.example/a:b:c",
            "h.example/a?x",
            "h.example:0/a",
            "h.example:99999/a",
            "-h.example/a",
            "[::g]:1/a",
        ];
        let rest = [
            "h.example/a@sha256:12",
            "u@h.example/a",
            "h.example/a#b",
            "h.example/a%2e",
            "h.example:+1/a",
            &long,
        ];
        for text in bad.into_iter().chain(worse).chain(rest) {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_read_as_it_is_written(text in "[a-zA-Z0-9:/@._\\[\\]é-]{0,60}") {
            if let Ok(reference) = text.parse::<Reference>() {
                prop_assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference);
            }
        }
    }
}
