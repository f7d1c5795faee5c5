//! Adds the members of an archive on top of the tree.
//!
//! A member replaces the node with its name and everything below it. Only a directory that replaces
//! a directory keeps its entries and takes the new attributes. A directory replaces a symbolic
//! link, even one to a directory, as containerd and umoci do: a layer that wants to keep the link
//! does not name it. Parents of a member may be symbolic links, which are followed inside the tree:
//! `bin/x` of a layer goes to `usr/bin/x` if a lower layer has `bin -> usr/bin`.
//!
//! In a layer of an OCI image, `.wh.NAME` hides NAME of lower layers, and `.wh..wh..opq` hides
//! everything that its directory has from lower layers. Always: everything from the same layer
//! stays, whether it comes before or after the marker. A hidden directory that contains something
//! from the same layer stays, with default attributes.

use std::collections::HashSet;

use sandtree_disk::ext4::write::{Attributes, Kind, NodeId, Tree};

use crate::error::Error;
use crate::fault::{Fault, require};
use crate::path::{check_name, parts, plain, split};
use crate::staging::Staging;
use crate::tar::{Archive, Member, TarRules, What};
use crate::unpack::Unpacked;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Metadata of aufs, a file system that once produced layers. It is not part of an image.
const NOTES: &[u8] = b".wh..wh.";

/// Adds a whole archive. Returns the number of its bytes.
pub(crate) fn add(
    staging: &mut Staging,
    input: &mut Unpacked<'_>,
    rules: TarRules,
) -> Result<u64, Error> {
    let mut archive = Archive::new(input, rules, staging.meter.headers());
    let mut layer = Layer::new(staging, rules);
    while let Some(mut member) = archive.next()? {
        let name = std::mem::take(&mut member.name);
        layer
            .take(&name, member, &mut archive)
            .map_err(|fault| fault.of(&name))?;
    }
    Ok(archive.position())
}

/// An archive while it is added, and the names that came from it.
struct Layer<'c> {
    staging: &'c mut Staging,
    rules: TarRules,
    /// All nodes from here on come from this archive.
    first: NodeId,
    /// Older directories to which the archive gave new attributes.
    described: HashSet<NodeId>,
    /// New names of older nodes, by directory and name.
    linked: HashSet<(NodeId, Vec<u8>)>,
    /// Directories from which all older names were removed.
    cleared: HashSet<NodeId>,
}

enum Marker<'p> {
    /// A directory and the hidden name in it.
    Whiteout(&'p [u8], &'p [u8]),
    Opaque(&'p [u8]),
    Notes,
}

impl<'c> Layer<'c> {
    fn new(staging: &'c mut Staging, rules: TarRules) -> Self {
        let first = staging.tree.next_id();
        Self {
            staging,
            rules,
            first,
            described: HashSet::new(),
            linked: HashSet::new(),
            cleared: HashSet::new(),
        }
    }

    fn take(
        &mut self,
        name: &[u8],
        member: Member,
        archive: &mut Archive<'_, '_>,
    ) -> Result<(), Fault> {
        let path = plain(name)?;
        match self.rules {
            TarRules::Layer => match Marker::of(&path)? {
                Some(marker) => self.apply(&marker),
                None => self.put(&path, member, archive),
            },
            TarRules::Plain => self.put(&path, member, archive),
        }
    }

    fn put(
        &mut self,
        path: &[u8],
        member: Member,
        archive: &mut Archive<'_, '_>,
    ) -> Result<(), Fault> {
        let Some((parent, name)) = split(path) else {
            return self.put_root(member);
        };
        let dir = self.staging.dir(parent)?;
        match member.what {
            What::HardLink(target) => self.link(dir, name, &target),
            What::File(body) => {
                let mut file = self
                    .staging
                    .area
                    .file(body.bytes, self.staging.meter.extents_left())?;
                archive.pour(&body, &mut file)?;
                let content = file.finish()?;
                self.place(dir, name, Kind::File(content), member.attributes)
            }
            What::Node(kind) => self.place(dir, name, kind, member.attributes),
        }
    }

    fn put_root(&mut self, member: Member) -> Result<(), Fault> {
        let is_dir = matches!(member.what, What::Node(Kind::Dir(_)));
        require(
            is_dir,
            "it would replace the root directory with another kind of node",
        )?;
        self.staging.describe(Tree::ROOT, member.attributes)
    }

    fn place(
        &mut self,
        dir: NodeId,
        name: &[u8],
        kind: Kind,
        attributes: Attributes,
    ) -> Result<(), Fault> {
        let id = self.staging.place(dir, name, kind, attributes)?;
        if id < self.first {
            self.described.insert(id);
        }
        Ok(())
    }

    fn link(&mut self, dir: NodeId, name: &[u8], target: &[u8]) -> Result<(), Fault> {
        let found = self.staging.find_itself(&plain(target)?)?;
        let found = found.ok_or("it is a hard link to a file that does not exist")?;
        self.staging.link(dir, name, found)?;
        if found < self.first {
            self.linked.insert((dir, name.to_vec()));
        }
        Ok(())
    }

    fn apply(&mut self, marker: &Marker<'_>) -> Result<(), Fault> {
        let (Marker::Whiteout(parent, _) | Marker::Opaque(parent)) = marker else {
            return Ok(());
        };
        let Some(dir) = self.staging.find(parent)? else {
            return Ok(());
        };
        match marker {
            Marker::Whiteout(_, name) => self.hide(dir, name),
            _ => self.hide_below(dir),
        }
    }

    fn hide(&mut self, dir: NodeId, name: &[u8]) -> Result<(), Fault> {
        let Some(id) = self.staging.child(dir, name) else {
            return Ok(());
        };
        self.hide_below(id)?;
        if self.is_new(dir, name, id) {
            return Ok(());
        }
        match self.staging.entries(id) {
            Some(entries) if !entries.is_empty() => self.staging.describe(id, Staging::implied()),
            _ => self.staging.unlink(dir, name).map(drop),
        }
    }

    fn hide_below(&mut self, dir: NodeId) -> Result<(), Fault> {
        let Some(entries) = self.staging.entries(dir) else {
            return Ok(());
        };
        // Each directory is cleared once, for any number of markers.
        if dir >= self.first || !self.cleared.insert(dir) {
            return Ok(());
        }
        let names: Vec<_> = entries.keys().cloned().collect();
        names.iter().try_for_each(|name| self.hide(dir, name))
    }

    fn is_new(&self, dir: NodeId, name: &[u8], id: NodeId) -> bool {
        id >= self.first
            || self.described.contains(&id)
            || (!self.linked.is_empty() && self.linked.contains(&(dir, name.to_vec())))
    }
}

impl<'p> Marker<'p> {
    fn of(path: &'p [u8]) -> Result<Option<Self>, Fault> {
        let Some((parent, name)) = split(path) else {
            return Ok(None);
        };
        if parts(parent).any(|part| part.starts_with(NOTES)) {
            return Ok(Some(Self::Notes));
        }
        let is_inside = parts(parent).any(|part| part.starts_with(WHITEOUT));
        require(!is_inside, "one of its parents is a whiteout")?;
        Ok(match name.strip_prefix(WHITEOUT) {
            None => None,
            Some(_) if name == OPAQUE => Some(Self::Opaque(parent)),
            Some(_) if name.starts_with(NOTES) => Some(Self::Notes),
            Some(hidden) => {
                check_name(hidden)?;
                Some(Self::Whiteout(parent, hidden))
            }
        })
    }
}
