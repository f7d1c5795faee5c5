//! What the server keeps of templates, their builds and snapshots, as documents of the store.

use std::collections::BTreeMap;

use sandtree::{ErrorKind, Expiry, Host, Shelf};
use serde::{Deserialize, Serialize};

use crate::clock::now_unix_ms;
use crate::error::Result;
use crate::naming;

/// What the tags of a template stand for. The names in the store decide; this adds what they do
/// not say.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TemplateRecord {
    pub created_at_unix_ms: u64,
    pub tags: Vec<TagRecord>,
}

/// A tag as it was last set. It counts only as long as its name leads to the same image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagRecord {
    pub tag: String,
    pub build: String,
    /// The digest of the image.
    pub image: String,
    pub assigned_at_unix_ms: u64,
    #[serde(flatten)]
    pub shape: Shape,
    /// As whom and where commands run, unless they say otherwise.
    pub user: Option<String>,
    pub workdir: Option<String>,
}

/// The machines of a template's sandboxes. `None`: the library's choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub cpus: Option<u32>,
    pub memory_bytes: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BuildRecord {
    pub template: String,
    pub tags: Vec<String>,
    #[serde(flatten)]
    pub shape: Shape,
    /// The free space that its builder asked for.
    pub free_mib: Option<u64>,
    pub created_at_unix_ms: u64,
    pub finished_at_unix_ms: Option<u64>,
    pub status: BuildStatus,
    /// The mark of the process that builds it.
    pub work: Option<String>,
    pub reason: Option<Reason>,
    /// What CubeSandbox's client asked to build, to build it again.
    pub image: Option<ImageSource>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ImageSource {
    pub image: String,
    /// `NAME=value`
    pub env: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildStatus {
    /// Its files are being uploaded.
    Waiting,
    Building,
    Ready,
    Error,
}

impl BuildStatus {
    pub fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Building => "building",
            Self::Ready => "ready",
            Self::Error => "error",
        }
    }
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    pub message: String,
    /// `base`, `finalize`, or the number of a step.
    pub step: String,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct LogRecord {
    pub entries: Vec<LogEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    pub at_unix_ms: u64,
    pub level: Level,
    pub step: Option<String>,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Info,
    Error,
}

/// What a sandbox from a snapshot inherits beside the snapshot's labels. It stays in this store:
/// variables may be secrets, and snapshots are exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// The digest of the snapshot. The record counts only as long as its name leads there.
    pub snapshot: String,
    pub env: BTreeMap<String, String>,
    /// `None`: the sandbox does not expire.
    pub expiry: Option<Expiry>,
}

/// The record of a snapshot, if it is still that of the name.
pub fn snapshot_of(host: &Host, name: &str, snapshot: &str) -> Result<Option<SnapshotRecord>> {
    let record: Option<SnapshotRecord> = host.document(Shelf::Snapshots, name)?;
    Ok(record.filter(|record| record.snapshot == snapshot))
}

/// Removes the records of snapshots that other programs have removed or replaced.
pub async fn sweep_snapshots(host: &Host) -> Result<()> {
    for name in host.documents(Shelf::Snapshots)? {
        let found = host.inspect_snapshot(&name).await;
        let is_its = match &found {
            Ok(details) => snapshot_of(host, &name, &details.digest)?.is_some(),
            // One that cannot be read may be readable later.
            Err(error) => error.kind() != ErrorKind::NotFound,
        };
        if !is_its {
            host.remove_document(Shelf::Snapshots, &name)?;
        }
    }
    Ok(())
}

/// The record of a tag, if it is still that of the image.
pub fn tag_of(host: &Host, stored: &str, image: &str) -> Result<Option<TagRecord>> {
    let (name, tag) = naming::of_stored(stored);
    let record: Option<TemplateRecord> = host.document(Shelf::Templates, name)?;
    let mut tags = record.map(|record| record.tags).unwrap_or_default();
    tags.retain(|known| known.tag == tag && known.image == image);
    Ok(tags.pop())
}

/// Records tags, in place of earlier ones of the same names.
pub fn set_tags(host: &Host, template: &str, new: Vec<TagRecord>) -> sandtree::Result<()> {
    let set = |stored: &mut Option<TemplateRecord>| {
        let record = stored.get_or_insert_with(|| TemplateRecord {
            created_at_unix_ms: now_unix_ms(),
            tags: Vec::new(),
        });
        let is_replaced = |known: &TagRecord| new.iter().any(|tag| tag.tag == known.tag);
        record.tags.retain(|known| !is_replaced(known));
        record.tags.extend(new.iter().cloned());
    };
    host.change_document(Shelf::Templates, template, set)
}

/// Forgets tags of a template, and the template with its last one.
pub fn forget_tags(host: &Host, template: &str, is_gone: impl Fn(&str) -> bool) -> Result<()> {
    let forget = |stored: &mut Option<TemplateRecord>| {
        if let Some(record) = stored {
            record.tags.retain(|known| !is_gone(&known.tag));
            if record.tags.is_empty() {
                *stored = None;
            }
        }
    };
    Ok(host.change_document(Shelf::Templates, template, forget)?)
}

/// The build of an image that no client built: the same each time.
pub fn derived_build(image: &str) -> String {
    let digit = |at| image.get(at).unwrap_or("0");
    format!(
        "{}-{}-4{}-8{}-{}",
        digit(0..8),
        digit(8..12),
        digit(13..16),
        digit(17..20),
        digit(20..32)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_derived_build_has_the_form_that_clients_parse() {
        let build = derived_build(&"0123456789abcdef".repeat(4));
        assert_eq!(build, "01234567-89ab-4def-8123-456789abcdef");
    }
}
