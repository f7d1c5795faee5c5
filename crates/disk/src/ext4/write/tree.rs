//! The tree to be written: names, attributes, and the places of file contents.
//!
//! Always: every node except the root has a name in some directory. A node with several names is
//! one node, and is not a directory. The names in a directory are ordered by their bytes. Ids are
//! never used again, so a later node has a higher id.

use std::collections::BTreeMap;

/// The block size of the image.
pub const BLOCK_BYTES: u64 = 4096;
/// The largest file: block numbers in a file have 32 bits, and the last one is not used.
pub const MAX_FILE_BYTES: u64 = u32::MAX as u64 * BLOCK_BYTES;

/// The id of a node in a [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) u32);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions with the set-id and sticky bits: at most `0o7777`.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub modified: Time,
    /// Values by full name, such as `user.x` or `security.capability`.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Consecutive blocks of a file that are also consecutive in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first block, counted in the file.
    pub logical: u32,
    /// The first block, counted in the image.
    pub physical: u64,
    pub blocks: u32,
}

/// The content of a file. Bytes outside the extents are zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// The size of the file.
    pub bytes: u64,
    /// Ordered by `logical`, without overlap.
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
    /// The number of its names, which the caller keeps up to date.
    pub names: u32,
}

/// All nodes. The places of removed nodes stay empty.
#[derive(Debug, Clone)]
pub struct Tree {
    pub(super) nodes: Vec<Option<Node>>,
}

impl Tree {
    pub const ROOT: NodeId = NodeId(0);

    /// An empty root directory that root owns.
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

    /// The id that the next added node gets.
    pub fn next_id(&self) -> NodeId {
        NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX))
    }

    /// Adds a node, to which the caller gives a name. `None`: there are too many nodes.
    pub fn add(&mut self, node: Node) -> Option<NodeId> {
        let id = self.next_id();
        if id.0 == u32::MAX {
            return None;
        }
        self.nodes.push(Some(node));
        Some(id)
    }

    /// The node with this id, which must exist.
    pub fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0 as usize]
            .as_ref()
            .expect("the id is one of an existing node")
    }

    pub fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id.0 as usize)?.as_mut()
    }

    /// Removes one name of a node from its count. Returns the node's kind if that was the last one
    /// and the node is removed.
    pub fn drop_name(&mut self, id: NodeId) -> Option<Kind> {
        let place = self.nodes.get_mut(id.0 as usize)?;
        match place {
            Some(node) if node.names > 1 => {
                node.names -= 1;
                None
            }
            _ => place.take().map(|node| node.kind),
        }
    }

    /// All existing nodes, in the order in which they were added.
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
