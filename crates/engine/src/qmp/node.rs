//! Nodes of QEMU's block graph, as its commands and arguments describe them.

use serde::Serialize;

/// One node of the block graph, as QEMU gets it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Node {
    pub driver: &'static str,
    pub node_name: String,
    #[serde(flatten)]
    pub below: Below,
    pub read_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locking: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detect_zeroes: Option<&'static str>,
    pub cache: Cache,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Below {
    Descriptor {
        filename: String,
        aio: &'static str,
    },
    Raw {
        file: String,
    },
    /// `backing: null` says that nothing backs the overlay. Without it QEMU would open what the
    /// overlay's header names.
    Overlay {
        file: String,
        backing: Option<String>,
    },
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Cache {
    pub no_flush: bool,
}

impl Node {
    pub(crate) fn json(&self) -> String {
        serde_json::to_string(self).expect("a node is plain data")
    }
}
