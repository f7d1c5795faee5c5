//! The description of one file, directory or other node, as the caller sees it.

use std::fmt;

use serde::Serialize;

use super::Path;

/// A file, directory, link or device, without its name and content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Node {
    pub kind: Kind,
    /// The size of a file or of a symbolic link's target; 0 for other kinds.
    pub size: u64,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// The number of hard links.
    pub links: u16,
    pub modified_unix_s: i64,
    /// The target of a symbolic link.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub target: Option<Path>,
    /// The major and minor number of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<Vec<u32>>))]
    pub device: Option<(u32, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    File,
    Directory,
    Symlink,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Symlink => "symbolic link",
            Self::CharDevice => "character device",
            Self::BlockDevice => "block device",
            Self::Fifo => "FIFO",
            Self::Socket => "socket",
        })
    }
}
