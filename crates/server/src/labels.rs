//! What the server keeps of a sandbox, as labels in its record.

use std::collections::BTreeMap;

use sandtree::SandboxInfo;
use serde::{Deserialize, Serialize};

use crate::error::{Fault, Result};

const TEMPLATE: &str = "e2b/template";
const METADATA: &str = "e2b/metadata";
const AUTO_RESUME: &str = "e2b/auto-resume";
const PRIVATE_TRAFFIC: &str = "e2b/private-traffic";
const OPEN: &str = "e2b/open";
const KEY: &str = "e2b/key";
const REQUEST: &str = "e2b/request";
const USER: &str = "e2b/user";
const WORKDIR: &str = "e2b/workdir";
const VOLUMES: &str = "e2b/volumes";
/// A label holds no more.
const METADATA_MAX: usize = 4096;

/// What the creator of a sandbox chose, and the control plane reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Labels {
    /// The template as the creator named it. `None`: it was not created by a server.
    pub template: Option<String>,
    pub metadata: BTreeMap<String, String>,
    /// Whether traffic resumes it.
    pub auto_resume: bool,
    /// Whether its ports need no token.
    pub public_traffic: bool,
    /// Whether its commands and files need a token.
    pub secure: bool,
    /// The key that created it.
    pub key: Option<String>,
    /// The request that created it, if its client may send it again.
    pub request: Option<String>,
    /// As whom and where commands run, unless they say otherwise.
    pub user: Option<String>,
    pub workdir: Option<String>,
    /// The volumes that it has mounted.
    pub volumes: Vec<VolumeMount>,
}

/// A volume in a sandbox, as its creator asks for it and lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    /// The volume's name, or its id.
    pub name: String,
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

impl Labels {
    pub fn of(info: &SandboxInfo) -> Self {
        Self::read(&info.labels)
    }

    pub fn read(labels: &BTreeMap<String, String>) -> Self {
        let metadata = labels.get(METADATA);
        let metadata = metadata.and_then(|text| serde_json::from_str(text).ok());
        let volumes = labels.get(VOLUMES);
        let volumes = volumes.and_then(|text| serde_json::from_str(text).ok());
        Self {
            template: labels.get(TEMPLATE).cloned(),
            metadata: metadata.unwrap_or_default(),
            auto_resume: labels.contains_key(AUTO_RESUME),
            public_traffic: !labels.contains_key(PRIVATE_TRAFFIC),
            secure: !labels.contains_key(OPEN),
            key: labels.get(KEY).cloned(),
            request: labels.get(REQUEST).cloned(),
            user: labels.get(USER).cloned(),
            workdir: labels.get(WORKDIR).cloned(),
            volumes: volumes.unwrap_or_default(),
        }
    }

    pub fn write(&self) -> Result<BTreeMap<String, String>> {
        let mut labels = BTreeMap::new();
        let mut add = |name: &str, value: Option<String>| {
            labels.extend(value.map(|value| (name.to_owned(), value)));
        };
        let flag = |is_set: bool| is_set.then(|| "true".to_owned());
        add(TEMPLATE, self.template.clone());
        add(KEY, self.key.clone());
        add(REQUEST, self.request.clone());
        add(USER, self.user.clone());
        add(WORKDIR, self.workdir.clone());
        add(AUTO_RESUME, flag(self.auto_resume));
        add(PRIVATE_TRAFFIC, flag(!self.public_traffic));
        add(OPEN, flag(!self.secure));
        if !self.volumes.is_empty() {
            let text = serde_json::to_string(&self.volumes).expect("texts are JSON");
            if text.len() > METADATA_MAX {
                let message = "volumeMounts are too large: at most 4096 bytes as JSON";
                return Err(Fault::bad_request(message));
            }
            add(VOLUMES, Some(text));
        }
        if !self.metadata.is_empty() {
            let text = serde_json::to_string(&self.metadata).expect("a map of texts is JSON");
            if text.len() > METADATA_MAX {
                let message = "metadata is too large: at most 4096 bytes as JSON";
                return Err(Fault::bad_request(message));
            }
            add(METADATA, Some(text));
        }
        Ok(labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_as_they_were_written() {
        let labels = Labels {
            template: Some("base".into()),
            metadata: [("Größe".to_owned(), "a\nb=c".to_owned())].into(),
            auto_resume: true,
            public_traffic: false,
            secure: false,
            key: Some("0a".into()),
            request: Some("0b".into()),
            user: Some("dev".into()),
            workdir: Some("/app".into()),
            volumes: vec![VolumeMount {
                name: "v".into(),
                path: "/v".into(),
                read_only: Some(true),
            }],
        };
        assert_eq!(Labels::read(&labels.write().unwrap()), labels);
        let plain = Labels::read(&BTreeMap::new());
        assert!(plain.public_traffic && plain.secure && !plain.auto_resume);
        assert!(plain.write().unwrap().is_empty());
    }

    #[test]
    fn large_metadata_is_refused() {
        let mut labels = Labels::read(&BTreeMap::new());
        labels.metadata = [("k".to_owned(), "v".repeat(5000))].into();
        assert!(labels.write().is_err());
    }
}
