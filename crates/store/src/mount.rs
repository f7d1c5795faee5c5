//! Directories of the host that guests use.
//!
//! A guest remembers where it has a directory, so the mount points are part of each state. Which
//! directory of the host that is belongs to the sandbox alone, in `mounts.json`, and never leaves
//! this host.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::record::Record;

/// Where a guest has a directory of its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountPoint {
    /// Never used for another mount in the life of its guest.
    pub id: u32,
    /// An absolute path in the guest.
    pub path: String,
    pub access: MountAccess,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum MountAccess {
    /// Changes of the guest are changes of the host's directory.
    ReadWrite,
    ReadOnly,
    /// Changes are kept on the guest's disk, on top of the host's directory.
    CopyOnWrite,
}

/// `mounts.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDirectories {
    schema: u64,
    pub directories: Vec<HostDirectory>,
}

/// Which directory of the host a mount is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDirectory {
    /// The mount's.
    pub id: u32,
    /// An absolute path.
    pub path: PathBuf,
    /// The host refuses changes, whatever the guest's mount allows.
    pub read_only: bool,
    /// The guest's user as whom the host's own user is shown: numbers of user and group. `None`:
    /// root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<(u32, u32)>,
    /// Files that were written to the directory from this sandbox, by path, and the version that
    /// the host's file has since.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub applied: BTreeMap<String, String>,
}

impl Record for HostDirectories {
    const SCHEMA: u64 = 1;
}

impl Default for HostDirectories {
    fn default() -> Self {
        Self {
            schema: Self::SCHEMA,
            directories: Vec::new(),
        }
    }
}

impl HostDirectories {
    pub fn get(&self, id: u32) -> Option<&HostDirectory> {
        self.directories.iter().find(|directory| directory.id == id)
    }

    /// Adds a directory, or replaces the one of the same mount.
    pub fn set(&mut self, directory: HostDirectory) {
        self.directories.retain(|known| known.id != directory.id);
        self.directories.push(directory);
    }
}
