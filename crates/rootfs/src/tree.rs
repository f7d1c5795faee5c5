//! A file system as it is to be: names, attributes, and where the bytes of files are.
//!
//! Always: every node but the root has a name in some directory; a node with several names, other
//! than a directory, is one node. Directories are ordered by the bytes of their names.

use std::collections::BTreeMap;

/// Of file contents and of the image.
pub const BLOCK_BYTES: u64 = 4096;
/// Block numbers in a file have 32 bits, and the last one is not used.
pub(crate) const MAX_FILE_BYTES: u64 = u32::MAX as u64 * BLOCK_BYTES;

/// A node of a [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(crate) u32);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions with set-id bits and sticky bit: `0o7777` at most.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub modified: Time,
    /// By their whole names, such as `user.x` or `security.capability`.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Blocks of a file that lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first of them, counted in the file.
    pub logical: u32,
    /// The same, counted in the image.
    pub physical: u64,
    pub blocks: u32,
}

/// What a file holds; between its extents there are zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    pub bytes: u64,
    /// By `logical`, none over another.
    pub extents: Vec<Extent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    pub major: u32,
    pub minor: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Dir(BTreeMap<Vec<u8>, NodeId>),
    File(Content),
    Symlink(Vec<u8>),
    CharDevice(Device),
    BlockDevice(Device),
    Fifo,
    Socket,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub kind: Kind,
    pub attributes: Attributes,
    /// How many names it has; of a directory always 1.
    pub names: u32,
}

/// All nodes. Those without a name are gone, and their places empty.
#[derive(Debug, Clone)]
pub struct Tree {
    pub(crate) nodes: Vec<Option<Node>>,
}

impl Tree {
    pub const ROOT: NodeId = NodeId(0);

    /// A root directory of root's, and nothing in it.
    pub fn new() -> Self {
        let attributes = Attributes {
            mode: 0o755,
            ..Attributes::default()
        };
        Self {
            nodes: vec![Some(Node {
                kind: Kind::Dir(BTreeMap::new()),
                attributes,
                names: 1,
            })],
        }
    }

    pub fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize]
            .as_ref()
            .expect("ids are of nodes that are there")
    }

    /// Every node that is there, in the order in which they came.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let ids = (0..).map(NodeId);
        ids.zip(&self.nodes)
            .filter_map(|(id, node)| Some((id, node.as_ref()?)))
    }
}

impl Default for Tree {
    fn default() -> Self {
        Self::new()
    }
}
