//! The root file system while it is built: the tree, the bytes of its files, and the limits.
//!
//! Always: a node that loses its last name is removed, and its blocks are freed. Ids are never used
//! again, so new nodes can be distinguished from older ones by id.

use std::collections::BTreeMap;

use sandtree_disk::ext4::write::{Attributes, DataArea, Device, Kind, Node, NodeId, Tree};

use crate::fault::{Fault, require};
use crate::limits::{Meter, xattrs_bytes};
use crate::path::{Step, Walk, check_target, split};

const MAX_XATTRS_BYTES: u64 = 64 << 10;
const MAX_XATTR_NAME_BYTES: usize = 255;
/// The limit of ext4.
const MAX_NAMES: u32 = 65_000;
const MAX_MAJOR: u32 = 0xfff;
const MAX_MINOR: u32 = 0xf_ffff;

/// A root file system while it is built.
#[derive(Debug)]
pub(crate) struct Staging {
    pub tree: Tree,
    pub area: DataArea,
    pub meter: Meter,
}

impl Staging {
    /// The attributes of a directory that exists only because something is below it.
    pub fn implied() -> Attributes {
        Attributes {
            mode: 0o755,
            ..Attributes::default()
        }
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

    /// The directory at a path. Symbolic links are followed inside the tree, and missing
    /// directories are created.
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
                    return Err(Fault::Refused("one of its parents is not a directory"));
                }
            }
        }
    }

    /// The node at a path, if it exists. All symbolic links are followed.
    pub fn find(&self, path: &[u8]) -> Result<Option<NodeId>, Fault> {
        let mut walk = Walk::new(path);
        let step = walk.run(&self.tree)?;
        Ok((step == Step::Arrived).then(|| walk.here()))
    }

    /// The node at a path, if it exists. A symbolic link at the end is not followed.
    pub fn find_itself(&self, plain: &[u8]) -> Result<Option<NodeId>, Fault> {
        let Some((parent, name)) = split(plain) else {
            return Ok(Some(Tree::ROOT));
        };
        Ok(self.find(parent)?.and_then(|dir| self.child(dir, name)))
    }

    /// Puts a node into a directory, where it replaces an existing one. A directory that replaces a
    /// directory only gives it new attributes.
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
        let node = Node {
            kind,
            attributes,
            names: 1,
        };
        let id = self.tree.add(node).ok_or("there are too many nodes")?;
        self.name(dir, name, id);
        Ok(id)
    }

    /// Replaces the attributes of a node.
    pub fn describe(&mut self, id: NodeId, attributes: Attributes) -> Result<(), Fault> {
        check_attributes(&attributes)?;
        self.meter.take_xattrs(&attributes)?;
        if let Some(node) = self.tree.node_mut(id) {
            node.attributes = attributes;
        }
        Ok(())
    }

    /// Gives a node one more name, which replaces an existing node.
    pub fn link(&mut self, dir: NodeId, name: &[u8], target: NodeId) -> Result<(), Fault> {
        require(
            self.entries(target).is_none(),
            "it is a hard link to a directory",
        )?;
        if self.child(dir, name) == Some(target) {
            return Ok(());
        }
        self.meter.take_link(name)?;
        // The new name is counted first, because the target may lie below the replaced node.
        let Some(node) = self.tree.node_mut(target) else {
            return Ok(());
        };
        require(
            node.names < MAX_NAMES,
            "its target already has 65000 names, the most that ext4 allows",
        )?;
        node.names += 1;
        self.unlink(dir, name)?;
        self.name(dir, name, target);
        Ok(())
    }

    /// Removes a name and everything below it. Returns whether it existed.
    pub fn unlink(&mut self, dir: NodeId, name: &[u8]) -> Result<bool, Fault> {
        let removed = match self.tree.node_mut(dir).map(|node| &mut node.kind) {
            Some(Kind::Dir(entries)) => entries.remove(name),
            _ => None,
        };
        let mut gone: Vec<NodeId> = removed.into_iter().collect();
        while let Some(id) = gone.pop() {
            match self.tree.drop_name(id) {
                Some(Kind::Dir(entries)) => gone.extend(entries.into_values()),
                Some(Kind::File(content)) => self.area.free(&content),
                _ => {}
            }
        }
        Ok(removed.is_some())
    }

    fn name(&mut self, dir: NodeId, name: &[u8], id: NodeId) {
        if let Some(Node {
            kind: Kind::Dir(entries),
            ..
        }) = self.tree.node_mut(dir)
        {
            entries.insert(name.to_vec(), id);
        }
    }
}

fn check_kind(kind: &Kind) -> Result<(), Fault> {
    match kind {
        Kind::Symlink(target) => check_target(target),
        Kind::CharDevice(Device { major, minor }) | Kind::BlockDevice(Device { major, minor }) => {
            require(
                *major <= MAX_MAJOR && *minor <= MAX_MINOR,
                "its device numbers are too large for Linux",
            )
        }
        _ => Ok(()),
    }
}

fn check_attributes(attributes: &Attributes) -> Result<(), Fault> {
    let is_name = |name: &Vec<u8>| name.len() <= MAX_XATTR_NAME_BYTES && !name.contains(&0);
    require(
        attributes.xattrs.keys().all(is_name),
        "an extended attribute has an invalid name",
    )?;
    require(
        xattrs_bytes(attributes) <= MAX_XATTRS_BYTES,
        "its extended attributes have more than 64 KiB",
    )
}

/// Whether Linux stores an extended attribute on ext4. Others come from archives of other systems
/// (`com.apple…`) or are internal to the file system (`system.data`); the tools of Linux skip them
/// when they unpack an archive, too.
pub(crate) fn is_kept_xattr(name: &[u8]) -> bool {
    let spaces: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    spaces
        .iter()
        .any(|space| name.starts_with(space) && name.len() > space.len())
        || [&b"system.posix_acl_access"[..], b"system.posix_acl_default"].contains(&name)
}
