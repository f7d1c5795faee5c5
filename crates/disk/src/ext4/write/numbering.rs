//! Assigns an inode number to each node, and finds its parent directory and its number of names.

use super::error::Error;
use super::inode;
use super::tree::{Kind, Node, NodeId, Tree};
use crate::ext4::format::ROOT_INODE;

pub(super) const LOST_AND_FOUND: &[u8] = b"lost+found";
const MAX_NAME_BYTES: usize = 255;
/// The longest path in an error message: the kernel's limit.
const MAX_SHOWN_BYTES: usize = 4096;
/// The most names of a file. A directory with more subdirectories records 1.
const MAX_LINKS: u32 = 65_000;

/// Facts about every node, indexed by node.
#[derive(Debug)]
pub(super) struct Numbering {
    inodes: Vec<u32>,
    parents: Vec<NodeId>,
    links: Vec<u32>,
    pub has_own_lost_and_found: bool,
    /// The highest inode number in use.
    pub last_inode: u32,
    pub nodes: u64,
}

impl Numbering {
    /// Visits and checks every name, so that no later step can fail because of one.
    pub(super) fn of(tree: &Tree) -> Result<Self, Error> {
        let count = tree.nodes.len();
        let mut numbering = Self {
            inodes: vec![0; count],
            parents: vec![Tree::ROOT; count],
            links: vec![0; count],
            has_own_lost_and_found: false,
            last_inode: inode::FIRST - 1,
            nodes: 0,
        };
        numbering.number(tree);
        for (id, node) in tree.nodes() {
            if let Kind::Dir(names) = &node.kind {
                numbering.links[id.0 as usize] += 2;
                names
                    .iter()
                    .try_for_each(|(name, child)| numbering.count(tree, (id, name), *child))?;
            }
        }
        numbering.check_links(tree)?;
        Ok(numbering)
    }

    fn number(&mut self, tree: &Tree) {
        let Kind::Dir(in_root) = &tree.node(Tree::ROOT).kind else {
            return;
        };
        self.has_own_lost_and_found = in_root.contains_key(LOST_AND_FOUND);
        if !self.has_own_lost_and_found {
            self.last_inode += 1;
            self.links[0] += 1;
        }
        for (id, _) in tree.nodes() {
            self.nodes += 1;
            self.inodes[id.0 as usize] = match id {
                Tree::ROOT => ROOT_INODE,
                _ => {
                    self.last_inode += 1;
                    self.last_inode
                }
            };
        }
    }

    fn count(
        &mut self,
        tree: &Tree,
        (dir, name): (NodeId, &[u8]),
        child: NodeId,
    ) -> Result<(), Error> {
        if !is_name(name) {
            return Err(Error::BadName {
                path: path_with(tree, dir, name),
            });
        }
        match &tree.node(child).kind {
            Kind::Dir(_) => {
                self.parents[child.0 as usize] = dir;
                self.links[dir.0 as usize] += 1;
            }
            _ => self.links[child.0 as usize] += 1,
        }
        Ok(())
    }

    fn check_links(&self, tree: &Tree) -> Result<(), Error> {
        let too_many = |(id, node): &(NodeId, &Node)| {
            !matches!(node.kind, Kind::Dir(_)) && self.links[id.0 as usize] > MAX_LINKS
        };
        match tree.nodes().find(too_many) {
            None => Ok(()),
            Some((id, _)) => {
                let names = self.links[id.0 as usize];
                Err(Error::TooManyNames {
                    path: path(tree, id),
                    names,
                    limit: MAX_LINKS,
                })
            }
        }
    }

    pub(super) fn inode(&self, id: NodeId) -> u32 {
        self.inodes[id.0 as usize]
    }

    pub(super) fn parent(&self, dir: NodeId) -> NodeId {
        self.parents[dir.0 as usize]
    }

    /// The number of links that the inode records.
    pub(super) fn links(&self, id: NodeId) -> u16 {
        match self.links[id.0 as usize] {
            links @ ..=MAX_LINKS => links as u16,
            _ => 1,
        }
    }
}

/// Whether a directory can have an entry with this name.
fn is_name(name: &[u8]) -> bool {
    let is_special = name == b"." || name == b"..";
    let is_clean = !name.contains(&0) && !name.contains(&b'/');
    (1..=MAX_NAME_BYTES).contains(&name.len()) && is_clean && !is_special
}

/// One path of a node, for error messages; only the end of a very long one.
pub(super) fn path(tree: &Tree, id: NodeId) -> String {
    let names = names(tree);
    let mut parts = Vec::new();
    let mut shown_bytes = 0;
    let mut at = id;
    while let Some((dir, name)) = names[at.0 as usize] {
        parts.push(format!("/{}", name.escape_ascii()));
        shown_bytes += name.len() + 1;
        at = dir;
        if shown_bytes > MAX_SHOWN_BYTES {
            parts.push("…".to_owned());
            break;
        }
    }
    parts.reverse();
    if parts.is_empty() {
        "/".to_owned()
    } else {
        parts.concat()
    }
}

fn path_with(tree: &Tree, dir: NodeId, name: &[u8]) -> String {
    let dir = if dir == Tree::ROOT {
        String::new()
    } else {
        path(tree, dir)
    };
    format!("{dir}/{}", name.escape_ascii())
}

/// One directory and name of every node. Only error messages need it.
fn names(tree: &Tree) -> Vec<Option<(NodeId, &[u8])>> {
    let mut found = vec![None; tree.nodes.len()];
    for (dir, node) in tree.nodes() {
        let Kind::Dir(names) = &node.kind else {
            continue;
        };
        for (name, child) in names {
            found[child.0 as usize].get_or_insert((dir, name.as_slice()));
        }
    }
    found
}
