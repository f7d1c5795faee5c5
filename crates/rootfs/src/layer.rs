//! Members of an archive, laid over what is there.
//!
//! A member replaces what has its name, and all below that; only a directory over a directory keeps
//! what is in it and takes the new attributes. A directory over a symbolic link replaces the link,
//! even one to a directory, as containerd and umoci do: a layer that wanted to keep the link would
//! not name it. Parents of a member may be symbolic links: they are followed inside of the tree, as
//! `bin/x` of a layer goes where `bin -> usr/bin` of a lower one leads.
//!
//! In a layer of an OCI image, `.wh.NAME` hides NAME of lower layers, and `.wh..wh..opq` all that
//! its directory has from them. Always: what the same layer brings stays, whether it comes before
//! the marker or after it; what is on the way to it stays too, as a directory that nobody
//! described.

use std::collections::HashSet;

use crate::Error;
use crate::builder::TarRules;
use crate::edit::Canvas;
use crate::fault::{Fault, require};
use crate::path::{check_name, parts, plain, split};
use crate::tar::{Archive, Member, What};
use crate::tree::{Attributes, Kind, NodeId, Tree};
use crate::unpack::Unpacked;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Notes of a file system that layers were once made with. They are no part of an image.
const NOTES: &[u8] = b".wh..wh.";

/// Lays a whole archive over the canvas. Gives how many bytes it had.
pub(crate) fn add(
    canvas: &mut Canvas,
    input: &mut Unpacked<'_>,
    rules: TarRules,
) -> Result<u64, Error> {
    let mut archive = Archive::new(input, rules, canvas.meter.headers());
    let mut layer = Layer::new(canvas, rules);
    while let Some(mut member) = archive.next()? {
        let name = std::mem::take(&mut member.name);
        layer
            .take(&name, member, &mut archive)
            .map_err(|fault| fault.of(&name))?;
    }
    Ok(archive.position())
}

/// What is known about names that this archive brought.
struct Layer<'c> {
    canvas: &'c mut Canvas,
    rules: TarRules,
    /// All nodes from here on are new.
    first: NodeId,
    /// Directories from before that it described anew.
    described: HashSet<NodeId>,
    /// New names of nodes from before, by directory and name.
    linked: HashSet<(NodeId, Vec<u8>)>,
    /// Directories in which nothing from before is left.
    cleared: HashSet<NodeId>,
}

enum Marker<'p> {
    /// By directory and name.
    Whiteout(&'p [u8], &'p [u8]),
    Opaque(&'p [u8]),
    Notes,
}

impl<'c> Layer<'c> {
    fn new(canvas: &'c mut Canvas, rules: TarRules) -> Self {
        let first = canvas.next_id();
        let (described, linked, cleared) = Default::default();
        Self {
            canvas,
            rules,
            first,
            described,
            linked,
            cleared,
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
        let dir = self.canvas.dir(parent)?;
        match member.what {
            What::HardLink(target) => self.link(dir, name, &target),
            What::File(body) => {
                let mut file = self
                    .canvas
                    .area
                    .file(body.bytes, self.canvas.meter.extents_left())?;
                archive.pour(&body, &mut file)?;
                let content = file.finish()?;
                self.place(dir, name, Kind::File(content), member.attributes)
            }
            What::Node(kind) => self.place(dir, name, kind, member.attributes),
        }
    }

    fn put_root(&mut self, member: Member) -> Result<(), Fault> {
        let is_dir = matches!(member.what, What::Node(Kind::Dir(_)));
        require(is_dir, "it is in the place of the root and no directory")?;
        self.canvas.describe(Tree::ROOT, member.attributes)
    }

    fn place(
        &mut self,
        dir: NodeId,
        name: &[u8],
        kind: Kind,
        attributes: Attributes,
    ) -> Result<(), Fault> {
        let id = self.canvas.place(dir, name, kind, attributes)?;
        if id < self.first {
            self.described.insert(id);
        }
        Ok(())
    }

    fn link(&mut self, dir: NodeId, name: &[u8], target: &[u8]) -> Result<(), Fault> {
        let found = self.canvas.find_itself(&plain(target)?)?;
        let found = found.ok_or("it is a hard link to what is not there")?;
        self.canvas.link(dir, name, found)?;
        if found < self.first {
            self.linked.insert((dir, name.to_vec()));
        }
        Ok(())
    }

    fn apply(&mut self, marker: &Marker<'_>) -> Result<(), Fault> {
        let (Marker::Whiteout(parent, _) | Marker::Opaque(parent)) = marker else {
            return Ok(());
        };
        let Some(dir) = self.canvas.find(parent)? else {
            return Ok(());
        };
        match marker {
            Marker::Whiteout(_, name) => self.hide(dir, name),
            _ => self.hide_below(dir),
        }
    }

    fn hide(&mut self, dir: NodeId, name: &[u8]) -> Result<(), Fault> {
        let Some(id) = self.canvas.child(dir, name) else {
            return Ok(());
        };
        self.hide_below(id)?;
        if self.is_new(dir, name, id) {
            return Ok(());
        }
        match self.canvas.entries(id) {
            Some(entries) if !entries.is_empty() => self.canvas.describe(id, Canvas::implied()),
            _ => self.canvas.unlink(dir, name).map(drop),
        }
    }

    fn hide_below(&mut self, dir: NodeId) -> Result<(), Fault> {
        let Some(entries) = self.canvas.entries(dir) else {
            return Ok(());
        };
        // Each directory is gone through once, however many markers there are.
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
        require(!is_inside, "it lies below a whiteout")?;
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
