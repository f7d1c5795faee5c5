//! The documents of a registry: descriptors, indexes, manifests and the configuration of an image.
//!
//! Always: a document is read only as the kind that its media type names, and has at most
//! [`DOCUMENT_MAX`] bytes. An unknown kind is refused by name. Unused fields are ignored.

mod config;
pub mod media;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

pub use config::{ImageConfig, RootFs, RunConfig};
pub use media::LayerPacking;

use crate::digest::Digest;
use crate::error::Error;
use crate::text::cleaned;

/// The largest document that is read.
pub(crate) const DOCUMENT_MAX: usize = 4 << 20;

/// Media type, digest and size of a blob or document, known before it is fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
}

impl Descriptor {
    /// Describes these bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    /// Describes content that was hashed elsewhere.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            annotations: BTreeMap::new(),
            platform: None,
            artifact_type: None,
        }
    }
}

/// The machine that a manifest of an index is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    pub architecture: String,
    pub os: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", cleaned(&self.os), cleaned(&self.architecture))?;
        self.variant
            .as_ref()
            .map_or(Ok(()), |variant| write!(f, "/{}", cleaned(variant)))
    }
}

/// A list of manifests, one for each platform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    pub schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    pub manifests: Vec<Descriptor>,
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
}

impl Index {
    /// The manifest for a machine. A manifest of the same variant comes first, then one without a
    /// variant. For a machine without a variant, any variant is accepted.
    pub fn choose(
        &self,
        os: &str,
        architecture: &str,
        variant: Option<&str>,
    ) -> Result<&Descriptor, Error> {
        let fitting = |descriptor: &&Descriptor| {
            descriptor
                .platform
                .as_ref()
                .is_some_and(|platform| platform.os == os && platform.architecture == architecture)
        };
        let variant_of =
            |descriptor: &Descriptor| descriptor.platform.as_ref().and_then(|p| p.variant.clone());
        let fits = || self.manifests.iter().filter(fitting);
        fits()
            .find(|descriptor| variant_of(descriptor).as_deref() == variant)
            .or_else(|| {
                fits().find(|descriptor| variant.is_none() || variant_of(descriptor).is_none())
            })
            .ok_or_else(|| self.no_platform(os, architecture, variant))
    }

    fn no_platform(&self, os: &str, architecture: &str, variant: Option<&str>) -> Error {
        const LISTED: usize = 20;
        let name = |descriptor: &Descriptor| {
            descriptor
                .platform
                .as_ref()
                .map_or("no platform".to_owned(), |p| p.to_string())
        };
        let mut available = self
            .manifests
            .iter()
            .map(name)
            .take(LISTED)
            .collect::<Vec<_>>();
        if available.is_empty() {
            available.push("no platform".to_owned());
        }
        let variant = variant.map(str::to_owned);
        let wanted = Platform {
            architecture: architecture.to_owned(),
            os: os.to_owned(),
            variant,
        };
        Error::NoPlatform {
            wanted: wanted.to_string(),
            available,
        }
    }
}

/// The parts of an image or an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    #[serde(
        default,
        deserialize_with = "or_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub annotations: BTreeMap<String, String>,
}

/// The document behind a reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    Index(Index),
    Manifest(Box<Manifest>),
}

impl Document {
    /// Reads a document as the kind that its media type names.
    pub fn parse(media_type: &str, bytes: &[u8]) -> Result<Self, Error> {
        let kind = media::essence(media_type);
        let document = match kind {
            media::OCI_INDEX | media::DOCKER_LIST => Self::Index(parse("an index", bytes)?),
            media::OCI_MANIFEST | media::DOCKER_MANIFEST => {
                Self::Manifest(parse("a manifest", bytes)?)
            }
            other => {
                return Err(Error::UnknownMediaType {
                    media_type: cleaned(other),
                });
            }
        };
        document.check(kind, bytes)?;
        Ok(document)
    }

    /// Refuses a document that could be read as either kind, because tools would disagree on it.
    fn check(&self, kind: &str, bytes: &[u8]) -> Result<(), Error> {
        let (what, version, own) = match self {
            Self::Index(index) => ("an index", index.schema_version, &index.media_type),
            Self::Manifest(manifest) => {
                ("a manifest", manifest.schema_version, &manifest.media_type)
            }
        };
        let refuse = |rule: &str| {
            Err(Error::Document {
                what,
                rule: rule.to_owned(),
            })
        };
        if version != 2 {
            return refuse("its schema version is not 2");
        }
        if own.as_ref().is_some_and(|own| own != kind) {
            return refuse("it says that it is of another media type");
        }
        let shape: Shape = parse(what, bytes)?;
        if shape.manifests.is_some() && (shape.layers.is_some() || shape.config.is_some()) {
            return refuse("it is an index and a manifest at once");
        }
        Ok(())
    }
}

/// Whether the fields exist that distinguish the kinds.
#[derive(Deserialize)]
struct Shape {
    manifests: Option<serde::de::IgnoredAny>,
    layers: Option<serde::de::IgnoredAny>,
    config: Option<serde::de::IgnoredAny>,
}

/// Reads JSON of a bounded size.
pub(crate) fn parse<'a, T: Deserialize<'a>>(
    what: &'static str,
    bytes: &'a [u8],
) -> Result<T, Error> {
    if bytes.len() > DOCUMENT_MAX {
        return Err(Error::TooLarge {
            what: what.to_owned(),
            limit_bytes: DOCUMENT_MAX as u64,
        });
    }
    serde_json::from_slice(bytes).map_err(|error| Error::Document {
        what,
        rule: cleaned(&error.to_string()),
    })
}

/// Reads `null` as a missing field; some tools write it for an empty value.
pub(crate) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn descriptor(platform: Option<(&str, &str, Option<&str>)>, size: u64) -> Descriptor {
        let platform = platform.map(|(os, architecture, variant)| Platform {
            os: os.into(),
            architecture: architecture.into(),
            variant: variant.map(str::to_owned),
        });
        Descriptor {
            platform,
            size,
            ..Descriptor::of(media::OCI_MANIFEST, b"")
        }
    }

    fn index() -> Index {
        let manifests = vec![
            descriptor(Some(("linux", "arm", Some("v6"))), 1),
            descriptor(Some(("linux", "arm", Some("v7"))), 2),
            descriptor(Some(("linux", "amd64", None)), 3),
            descriptor(Some(("windows", "amd64", None)), 4),
            descriptor(None, 5),
        ];
        Index {
            schema_version: 2,
            media_type: None,
            artifact_type: None,
            manifests,
            annotations: BTreeMap::new(),
        }
    }

    #[test]
    fn the_variant_decides_between_several_manifests() {
        assert_eq!(index().choose("linux", "arm", Some("v7")).unwrap().size, 2);
        assert_eq!(index().choose("linux", "arm", None).unwrap().size, 1);
        assert_eq!(
            index().choose("linux", "amd64", Some("v2")).unwrap().size,
            3
        );
        assert!(index().choose("linux", "arm", Some("v8")).is_err());
    }

    #[test]
    fn the_error_for_a_missing_platform_lists_the_others() {
        let error = index()
            .choose("linux", "riscv64", None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("linux/riscv64") && error.contains("linux/arm/v7, linux/amd64"),
            "{error}"
        );
    }

    #[test]
    fn unknown_kinds_are_refused_by_name() {
        let error = Document::parse(
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
            b"{}",
        )
        .unwrap_err();
        assert!(
            error.to_string().contains("manifest.v1+prettyjws"),
            "{error}"
        );
    }

    #[test]
    fn a_document_of_two_kinds_is_refused() {
        let part = serde_json::to_value(descriptor(None, 0)).unwrap();
        let both = json!({"schemaVersion": 2, "config": part, "layers": [], "manifests": [part]});
        for kind in [media::OCI_INDEX, media::OCI_MANIFEST] {
            assert!(Document::parse(kind, both.to_string().as_bytes()).is_err());
        }
        let liar = json!({"schemaVersion": 2, "mediaType": media::OCI_INDEX, "config": part, "layers": []});
        assert!(Document::parse(media::OCI_MANIFEST, liar.to_string().as_bytes()).is_err());
    }

    #[test]
    fn invalid_sizes_and_digests_of_other_kinds_are_refused() {
        for (size, digest) in [
            ("-1", "sha256"),
            ("1.5", "sha256"),
            ("99999999999999999999", "sha256"),
            ("1", "sha512"),
        ] {
            let digest = Digest::of(b"").to_string().replace("sha256", digest);
            let part = format!(r#"{{"mediaType":"x","digest":"{digest}","size":{size}}}"#);
            let text = format!(r#"{{"schemaVersion":2,"config":{part},"layers":[]}}"#);
            assert!(matches!(
                Document::parse(media::OCI_MANIFEST, text.as_bytes()),
                Err(Error::Document { .. })
            ));
        }
    }

    #[test]
    fn null_is_read_as_a_missing_field() {
        let part = serde_json::to_value(descriptor(None, 0)).unwrap();
        let text =
            json!({"schemaVersion": 2, "config": part, "layers": [part], "annotations": null})
                .to_string();
        assert!(
            Document::parse(
                "application/vnd.oci.image.manifest.v1+json; charset=utf-8",
                text.as_bytes()
            )
            .is_ok()
        );
    }
}
