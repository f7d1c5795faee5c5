//! What a comparison says.

use std::fmt;

use serde::Serialize;

use crate::Path;

/// All that differs, in the order of a walk: a directory stands before what is in it, names are
/// sorted by their bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diff {
    pub changes: Vec<Change>,
    /// What could not be taken into account, and so may be missing or wrong above.
    pub incomplete: Option<String>,
}

/// One path at which the disks differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    pub path: Path,
    pub change: ChangeKind,
    /// In what it differs; empty for what is on one disk only.
    pub what: Vec<Aspect>,
    pub before: Option<Node>,
    pub after: Option<Node>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Added,
    Removed,
    Changed,
}

/// In what a path can differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aspect {
    /// A file became a directory, or the like. Size, content, target and device are not compared
    /// then.
    Kind,
    Size,
    /// Of files: some byte differs.
    Content,
    /// Where a symbolic link points to.
    Target,
    Device,
    /// Permissions, with the set-id and sticky bits.
    Mode,
    /// User or group.
    Owner,
    Xattrs,
    /// The time of the last modification; only when asked for.
    Modified,
}

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    pub kind: Kind,
    /// Of files and symbolic links; else 0.
    pub size: u64,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// How many names it has.
    pub links: u16,
    pub modified_unix_s: i64,
    /// Of a symbolic link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<Path>,
    /// Of a device: major and minor number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<(u32, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_as_json() {
        let node = |mode| Node {
            kind: Kind::CharDevice,
            size: 0,
            mode,
            uid: 0,
            gid: 5,
            links: 1,
            modified_unix_s: -1,
            target: None,
            device: Some((1, 3)),
        };
        let change = Change {
            path: b"/dev/\xff".as_slice().into(),
            change: ChangeKind::Changed,
            what: vec![Aspect::Mode],
            before: Some(node(0o600)),
            after: None,
        };
        let json = serde_json::to_string(&Diff {
            changes: vec![change],
            incomplete: None,
        })
        .unwrap();
        let before = r#"{"kind":"char_device","size":0,"mode":384,"uid":0,"gid":5,"links":1,"modified_unix_s":-1,"device":[1,3]}"#;
        let path = r#""/dev/\\xff""#;
        assert_eq!(
            json,
            format!(
                r#"{{"changes":[{{"path":{path},"change":"changed","what":["mode"],"before":{before},"after":null}}],"incomplete":null}}"#
            )
        );
    }
}
