//! The result of a comparison.

use sandtree_disk::ext4::read::{Node, Path};
use serde::Serialize;

/// All changes, in the order of a walk: a directory comes before its entries, and names are sorted
/// by their bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diff {
    pub changes: Vec<Change>,
    /// What could not be compared: changes there may be missing or wrong.
    pub incomplete: Option<String>,
}

/// One path at which the disks differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Change {
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: Path,
    pub change: ChangeKind,
    /// How it differs; empty for a path that only one disk has.
    pub what: Vec<Aspect>,
    pub before: Option<Node>,
    pub after: Option<Node>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Added,
    Removed,
    Changed,
}

/// How a path can differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Aspect {
    /// The type: for example, a file became a directory. Size, content, target and device are then
    /// not compared.
    Kind,
    Size,
    /// The bytes of a file.
    Content,
    /// The target of a symbolic link.
    Target,
    Device,
    /// Permissions, including the set-id and sticky bits.
    Mode,
    /// User or group.
    Owner,
    Xattrs,
    /// The time of the last modification; only compared on request.
    Modified,
}

#[cfg(test)]
mod tests {
    use sandtree_disk::ext4::read::Kind;

    use super::*;

    #[test]
    fn the_json_form_is_stable() {
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
