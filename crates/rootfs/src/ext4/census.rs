//! Which inode each node becomes, which directory it is in and how many names it has.

use super::inode;
use crate::path::check_name;
use crate::{Error, Kind, NodeId, Tree};

pub(super) const LOST_AND_FOUND: &[u8] = b"lost+found";
/// As long as a path that the kernel takes.
const MAX_SHOWN_BYTES: usize = 4096;
/// Of names, and of directories in one: those with more say 1.
const MAX_LINKS: u32 = 65_000;

/// By the number of the node.
#[derive(Debug)]
pub(super) struct Census {
    inodes: Vec<u32>,
    parents: Vec<NodeId>,
    links: Vec<u32>,
    pub has_own_lost_and_found: bool,
    /// The highest that is used.
    pub last_inode: u32,
    pub nodes: u64,
}

impl Census {
    /// Looks at every name, so that later nothing is left to complain about.
    pub(super) fn take(tree: &Tree) -> Result<Self, Error> {
        let count = tree.nodes.len();
        let mut census = Self {
            inodes: vec![0; count],
            parents: vec![Tree::ROOT; count],
            links: vec![0; count],
            has_own_lost_and_found: false,
            last_inode: inode::FIRST - 1,
            nodes: 0,
        };
        census.number(tree);
        for (id, node) in tree.nodes() {
            if let Kind::Dir(names) = &node.kind {
                census.links[id.0 as usize] += 2;
                names
                    .iter()
                    .try_for_each(|(name, child)| census.count(tree, (id, name), *child))?;
            }
        }
        census.check_links(tree)?;
        Ok(census)
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
                Tree::ROOT => inode::ROOT,
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
        if check_name(name).is_err() {
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
        let too_many = |(id, node): &(NodeId, &crate::Node)| {
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

    /// As the inode tells it.
    pub(super) fn links(&self, id: NodeId) -> u16 {
        match self.links[id.0 as usize] {
            links @ ..=MAX_LINKS => links as u16,
            _ => 1,
        }
    }
}

/// One path of a node, to be shown; of a very long one the end.
pub(super) fn path(tree: &Tree, id: NodeId) -> String {
    let names = names(tree);
    let (mut parts, mut shown_bytes, mut at) = (Vec::new(), 0, id);
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

/// One name of every node, which only errors need.
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
