//! The configuration of an image: its platform, and how its program runs.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::{or_default, parse};
use crate::digest::Digest;
use crate::error::Error;

/// The fields of an image's configuration that we need.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ImageConfig {
    pub architecture: String,
    pub os: String,
    #[serde(default, deserialize_with = "or_default")]
    pub variant: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub config: RunConfig,
    pub rootfs: RootFs,
}

/// How the image's program runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct RunConfig {
    /// `NAME=value`.
    #[serde(default, deserialize_with = "or_default")]
    pub env: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub user: String,
    #[serde(default, deserialize_with = "or_default")]
    pub working_dir: String,
    #[serde(default, deserialize_with = "or_default")]
    pub entrypoint: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub cmd: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    /// `8080/tcp`, `53/udp` or `8080`.
    #[serde(default, deserialize_with = "names")]
    pub exposed_ports: BTreeSet<String>,
    #[serde(default, deserialize_with = "names")]
    pub volumes: BTreeSet<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub stop_signal: Option<String>,
}

/// The digests of the unpacked layers, bottom first.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RootFs {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default, deserialize_with = "or_default")]
    pub diff_ids: Vec<Digest>,
}

impl ImageConfig {
    /// Reads the configuration of an image made of layers.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let config: Self = parse("the configuration of an image", bytes)?;
        if config.rootfs.kind != "layers" {
            return Err(Error::Document {
                what: "the configuration of an image",
                rule: "its root file system is not made of layers".to_owned(),
            });
        }
        Ok(config)
    }
}

/// A set, which these documents write as an object with empty values.
fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    let map = Option::<BTreeMap<String, IgnoredAny>>::deserialize(deserializer)?;
    Ok(map.unwrap_or_default().into_keys().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_of_docker_is_read() {
        let text = br#"{"architecture":"amd64","os":"linux","config":{"Env":["A=1"],"Cmd":null,"User":"user",
            "ExposedPorts":{"80/tcp":{}},"WorkingDir":"/w","Entrypoint":["/bin/app"],"Labels":null,"Healthcheck":{"x":1}},
            "rootfs":{"type":"layers","diff_ids":[]},"history":[]}"#;
        let config = ImageConfig::parse(text).unwrap();
        assert_eq!(config.config.env, ["A=1"]);
        assert!(config.config.exposed_ports.contains("80/tcp") && config.config.cmd.is_empty());
    }

    #[test]
    fn an_image_without_a_run_configuration_is_accepted() {
        let text = br#"{"architecture":"amd64","os":"linux","config":null,"rootfs":{"type":"layers","diff_ids":null}}"#;
        assert_eq!(
            ImageConfig::parse(text).unwrap().config,
            RunConfig::default()
        );
        assert!(
            ImageConfig::parse(br#"{"architecture":"a","os":"l","rootfs":{"type":"vhd"}}"#)
                .is_err()
        );
    }
}
