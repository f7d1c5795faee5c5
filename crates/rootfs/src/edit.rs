//! Changes to a tree and to the bytes below it, which always go together.
//!
//! Always: a node that loses its last name is gone, and its blocks are free. Numbers of nodes are
//! never used again, so that what came after a moment can be told from what was there before.

use std::collections::BTreeMap;

use crate::ext4::DataArea;
use crate::fault::{Fault, require};
use crate::limits::{Meter, xattrs_bytes};
use crate::path::{Step, Walk, check_target, split};
use crate::tree::{Attributes, Device, Kind, Node, NodeId, Tree};

const MAX_XATTRS_BYTES: u64 = 64 << 10;
const MAX_XATTR_NAME_BYTES: usize = 255;
/// As ext4 has it.
const MAX_NAMES: u32 = 65_000;
const MAX_MAJOR: u32 = 0xfff;
const MAX_MINOR: u32 = 0xf_ffff;

/// A root file system in the making.
#[derive(Debug)]
pub(crate) struct Canvas {
    pub tree: Tree,
    pub area: DataArea,
    pub meter: Meter,
}

impl Canvas {
    /// Of a directory that is on the way to something, and that nobody described.
    pub fn implied() -> Attributes {
        Attributes {
            mode: 0o755,
            ..Attributes::default()
        }
    }

    pub fn next_id(&self) -> NodeId {
        NodeId(u32::try_from(self.tree.nodes.len()).unwrap_or(u32::MAX))
    }

    pub fn entries(&self, dir: NodeId) -> Option<&BTreeMap<Vec<u8>, NodeId>> {
        match &self.tree.node(dir).kind {
            Kind::Dir(entries) => Some(entries),
            _ => None,
        }
    }

    pub fn child(&self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        self.entries(dir)?.get(name).copied()
    }

    /// The directory at a path; symbolic links on the way are followed inside of the tree, and what
    /// is missing is made.
    pub fn dir(&mut self, path: &[u8]) -> Result<NodeId, Fault> {
        let mut walk = Walk::new(path);
        loop {
            match walk.run(&self.tree)? {
                Step::Missing(name) => {
                    let made = self.place(
                        walk.here(),
                        &name,
                        Kind::Dir(BTreeMap::new()),
                        Self::implied(),
                    )?;
                    walk.enter(made)?;
                }
                Step::Arrived if self.entries(walk.here()).is_some() => return Ok(walk.here()),
                Step::Arrived | Step::NotADirectory => {
                    return Err(Fault::Refused(
                        "it would lie below something that is no directory",
                    ));
                }
            }
        }
    }

    /// What is at a path, if anything is; all symbolic links are followed.
    pub fn find(&self, path: &[u8]) -> Result<Option<NodeId>, Fault> {
        let mut walk = Walk::new(path);
        let step = walk.run(&self.tree)?;
        Ok((step == Step::Arrived).then(|| walk.here()))
    }

    /// The same, but a symbolic link at the end is what is found.
    pub fn find_itself(&self, plain: &[u8]) -> Result<Option<NodeId>, Fault> {
        let Some((parent, name)) = split(plain) else {
            return Ok(Some(Tree::ROOT));
        };
        Ok(self.find(parent)?.and_then(|dir| self.child(dir, name)))
    }

    /// Puts a node into a directory, in place of what is there. A directory over a directory gives
    /// it new attributes.
    pub fn place(
        &mut self,
        dir: NodeId,
        name: &[u8],
        kind: Kind,
        attributes: Attributes,
    ) -> Result<NodeId, Fault> {
        if let (Kind::Dir(_), Some(there)) = (&kind, self.child(dir, name))
            && self.entries(there).is_some()
        {
            self.describe(there, attributes)?;
            return Ok(there);
        }
        check_kind(&kind)?;
        check_attributes(&attributes)?;
        self.meter.take_name(name)?;
        self.meter.take_kind(&kind)?;
        self.meter.take_xattrs(&attributes)?;
        self.meter.take_node()?;
        self.unlink(dir, name)?;
        let id = self.next_id();
        require(id.0 < u32::MAX, "there are too many nodes")?;
        self.tree.nodes.push(Some(Node {
            kind,
            attributes,
            names: 1,
        }));
        self.name(dir, name, id);
        Ok(id)
    }

    /// Gives a node other attributes.
    pub fn describe(&mut self, id: NodeId, attributes: Attributes) -> Result<(), Fault> {
        check_attributes(&attributes)?;
        self.meter.take_xattrs(&attributes)?;
        if let Some(node) = self.node(id) {
            node.attributes = attributes;
        }
        Ok(())
    }

    /// Gives a node one more name, in place of what is there.
    pub fn link(&mut self, dir: NodeId, name: &[u8], target: NodeId) -> Result<(), Fault> {
        require(
            self.entries(target).is_none(),
            "it is a hard link to a directory",
        )?;
        if self.child(dir, name) == Some(target) {
            return Ok(());
        }
        self.meter.take_link(name)?;
        // First one more, as the target may lie below what is replaced.
        let Some(node) = self.node(target) else {
            return Ok(());
        };
        require(
            node.names < MAX_NAMES,
            "it is one more than 65000 names of one file",
        )?;
        node.names += 1;
        self.unlink(dir, name)?;
        self.name(dir, name, target);
        Ok(())
    }

    /// Takes a name away, and all that is below it. Says whether it was there.
    pub fn unlink(&mut self, dir: NodeId, name: &[u8]) -> Result<bool, Fault> {
        let removed = match self.node(dir).map(|node| &mut node.kind) {
            Some(Kind::Dir(entries)) => entries.remove(name),
            _ => None,
        };
        let mut gone: Vec<NodeId> = removed.into_iter().collect();
        while let Some(id) = gone.pop() {
            match self.drop_name(id) {
                Some(Kind::Dir(entries)) => gone.extend(entries.into_values()),
                Some(Kind::File(content)) => self.area.free(&content),
                _ => {}
            }
        }
        Ok(removed.is_some())
    }

    /// Gives what is gone with its last name.
    fn drop_name(&mut self, id: NodeId) -> Option<Kind> {
        let place = self.tree.nodes.get_mut(id.0 as usize)?;
        match place {
            Some(node) if node.names > 1 => {
                node.names -= 1;
                None
            }
            _ => place.take().map(|node| node.kind),
        }
    }

    fn name(&mut self, dir: NodeId, name: &[u8], id: NodeId) {
        if let Some(Node {
            kind: Kind::Dir(entries),
            ..
        }) = self.node(dir)
        {
            entries.insert(name.to_vec(), id);
        }
    }

    fn node(&mut self, id: NodeId) -> Option<&mut Node> {
        self.tree.nodes.get_mut(id.0 as usize)?.as_mut()
    }
}

fn check_kind(kind: &Kind) -> Result<(), Fault> {
    match kind {
        Kind::Symlink(target) => check_target(target),
        Kind::CharDevice(Device { major, minor }) | Kind::BlockDevice(Device { major, minor }) => {
            require(
                *major <= MAX_MAJOR && *minor <= MAX_MINOR,
                "it is a device of a number that Linux does not have",
            )
        }
        _ => Ok(()),
    }
}

fn check_attributes(attributes: &Attributes) -> Result<(), Fault> {
    let is_name = |name: &Vec<u8>| name.len() <= MAX_XATTR_NAME_BYTES && !name.contains(&0);
    require(
        attributes.xattrs.keys().all(is_name),
        "the name of an extended attribute is not possible",
    )?;
    require(
        xattrs_bytes(attributes) <= MAX_XATTRS_BYTES,
        "its extended attributes take more than 64 KiB",
    )
}

/// Whether Linux keeps it on ext4. Others come from other systems' archives (`com.apple…`) or mean
/// something inside of the file system (`system.data`), and unpacking with Linux's own tools leaves
/// them out as well.
pub(crate) fn is_kept_xattr(name: &[u8]) -> bool {
    let spaces: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    spaces
        .iter()
        .any(|space| name.starts_with(space) && name.len() > space.len())
        || [&b"system.posix_acl_access"[..], b"system.posix_acl_default"].contains(&name)
}
