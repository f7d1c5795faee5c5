//! Writes the blocks of single nodes other than bytes of files: names, long targets, tables of
//! extents and extended attributes.

use std::collections::HashMap;

use super::area::DataArea;
use super::dir::{self, Directory, Name, Written};
use super::error::Error;
use super::extents::{self, IN_INODE};
use super::inode::{self, Shape};
use super::layout::BLOCK;
use super::numbering::{self, LOST_AND_FOUND, Numbering};
use super::tree::{BLOCK_BYTES, Content, Device, Kind, Node, NodeId, Tree};
use super::xattr::{Unfit, Xattrs};
use crate::ext4::format::{BLOCK_FIELD_BYTES, ROOT_INODE, inode_flag};

/// Targets up to this length are in the inode, followed by a zero byte.
const MAX_SHORT_TARGET: usize = BLOCK_FIELD_BYTES - 1;
const MAX_TARGET: usize = BLOCK - 1;

/// The place of every node's content.
#[derive(Debug)]
pub(super) struct Places {
    /// Only for nodes with blocks of this module; the shape of others follows from the node.
    shapes: HashMap<NodeId, Shape>,
    pub lost_and_found: Option<Shape>,
}

impl Places {
    /// Writes all these blocks.
    pub(super) fn write(
        area: &mut DataArea,
        tree: &Tree,
        numbering: &Numbering,
        seed: u32,
    ) -> Result<Self, Error> {
        let mut placer = Placer {
            area,
            tree,
            numbering,
            seed,
        };
        let mut shapes = HashMap::new();
        for (id, node) in tree.nodes() {
            if let Some(shape) = placer.place(id, node)? {
                shapes.insert(id, shape);
            }
        }
        let lost_and_found = if numbering.has_own_lost_and_found {
            None
        } else {
            Some(placer.lost_and_found()?)
        };
        Ok(Self {
            shapes,
            lost_and_found,
        })
    }

    pub(super) fn shape(&self, tree: &Tree, id: NodeId) -> Result<Shape, Error> {
        match self.shapes.get(&id) {
            Some(shape) => Ok(shape.clone()),
            None => plain(tree, id).map(Option::unwrap_or_default),
        }
    }
}

struct Placer<'a, 't> {
    area: &'a mut DataArea,
    tree: &'t Tree,
    numbering: &'a Numbering,
    /// The start value of the file system's checksums.
    seed: u32,
}

impl<'t> Placer<'_, 't> {
    /// Writes the blocks of a node. `None`: it needs none.
    fn place(&mut self, id: NodeId, node: &Node) -> Result<Option<Shape>, Error> {
        let plain = plain(self.tree, id)?;
        let xattr_block = self.xattr_block(id, node)?;
        if plain.is_some() && xattr_block.is_none() {
            return Ok(None);
        }
        let mut shape = match plain {
            Some(shape) => shape,
            None => self.content(id, node)?,
        };
        if let Some(block) = xattr_block {
            shape.xattr_block = block;
            shape.blocks += 1;
        }
        Ok(Some(shape))
    }

    fn xattr_block(&mut self, id: NodeId, node: &Node) -> Result<Option<u64>, Error> {
        if node.attributes.xattrs.is_empty() {
            return Ok(None);
        }
        let xattrs = xattrs(self.tree, id, node)?;
        if !xattrs.needs_block() {
            return Ok(None);
        }
        let seed = self.seed;
        let block = self.area.append_one(|number| xattrs.block(seed, number))?;
        Ok(Some(block))
    }

    fn content(&mut self, id: NodeId, node: &Node) -> Result<Shape, Error> {
        match &node.kind {
            Kind::File(content) => self.mapped(self.numbering.inode(id), content),
            Kind::Symlink(target) => self.target(id, target),
            _ => self.directory(id),
        }
    }

    fn mapped(&mut self, inode: u32, content: &Content) -> Result<Shape, Error> {
        let (map, tables) =
            extents::write(self.area, inode::seed(self.seed, inode), &content.extents)?;
        let blocks = tables + data_blocks(content);
        Ok(Shape {
            bytes: content.bytes,
            blocks,
            flags: inode_flag::EXTENTS,
            map,
            ..Shape::default()
        })
    }

    fn target(&mut self, id: NodeId, target: &[u8]) -> Result<Shape, Error> {
        let mut block = target.to_vec();
        block.resize(BLOCK, 0);
        let mut content = Content {
            bytes: target.len() as u64,
            extents: Vec::new(),
        };
        self.area.append(&block, 0, &mut content.extents)?;
        self.mapped(self.numbering.inode(id), &content)
    }

    fn directory(&mut self, id: NodeId) -> Result<Shape, Error> {
        let inode = self.numbering.inode(id);
        let parent = self.numbering.inode(self.numbering.parent(id));
        let mut names = self.names(id);
        if id == Tree::ROOT && !self.numbering.has_own_lost_and_found {
            let at = names.partition_point(|name| name.name < LOST_AND_FOUND);
            names.insert(
                at,
                Name {
                    name: LOST_AND_FOUND,
                    inode: inode::FIRST,
                    kind: dir::KIND_DIR,
                },
            );
        }
        self.write_directory(inode, parent, names)
    }

    fn lost_and_found(&mut self) -> Result<Shape, Error> {
        self.write_directory(inode::FIRST, ROOT_INODE, Vec::new())
    }

    fn write_directory(
        &mut self,
        inode: u32,
        parent: u32,
        names: Vec<Name<'_>>,
    ) -> Result<Shape, Error> {
        let seed = inode::seed(self.seed, inode);
        let Written {
            extents,
            blocks,
            is_indexed,
        } = Directory {
            inode,
            parent,
            seed,
            names,
        }
        .write(self.area)?;
        let mut shape = self.mapped(
            inode,
            &Content {
                bytes: u64::from(blocks) * BLOCK_BYTES,
                extents,
            },
        )?;
        if is_indexed {
            shape.flags |= inode_flag::INDEX;
        }
        Ok(shape)
    }

    fn names(&self, dir: NodeId) -> Vec<Name<'t>> {
        let Kind::Dir(names) = &self.tree.node(dir).kind else {
            return Vec::new();
        };
        let name = |(name, child): (&'t Vec<u8>, &NodeId)| Name {
            name,
            inode: self.numbering.inode(*child),
            kind: kind_number(&self.tree.node(*child).kind),
        };
        names.iter().map(name).collect()
    }
}

/// The shape of a node that needs no blocks except those of its bytes. `None`: it needs others.
fn plain(tree: &Tree, id: NodeId) -> Result<Option<Shape>, Error> {
    Ok(match &tree.node(id).kind {
        Kind::File(content) if content.extents.len() <= IN_INODE => Some(Shape {
            bytes: content.bytes,
            blocks: data_blocks(content),
            flags: inode_flag::EXTENTS,
            map: extents::short(&content.extents),
            ..Shape::default()
        }),
        Kind::Symlink(target) => {
            check_target(tree, id, target)?;
            (target.len() <= MAX_SHORT_TARGET).then(|| short_target(target))
        }
        Kind::CharDevice(device) | Kind::BlockDevice(device) => {
            Some(device_shape(tree, id, *device)?)
        }
        Kind::Fifo | Kind::Socket => Some(Shape::default()),
        Kind::File(_) | Kind::Dir(_) => None,
    })
}

fn data_blocks(content: &Content) -> u64 {
    content
        .extents
        .iter()
        .map(|extent| u64::from(extent.blocks))
        .sum()
}

fn check_target(tree: &Tree, id: NodeId, target: &[u8]) -> Result<(), Error> {
    if (1..=MAX_TARGET).contains(&target.len()) && !target.contains(&0) {
        return Ok(());
    }
    Err(Error::BadTarget {
        path: numbering::path(tree, id),
        bytes: target.len() as u64,
    })
}

fn short_target(target: &[u8]) -> Shape {
    let mut shape = Shape {
        bytes: target.len() as u64,
        ..Shape::default()
    };
    shape.map[..target.len()].copy_from_slice(target);
    shape
}

fn device_shape(tree: &Tree, id: NodeId, device: Device) -> Result<Shape, Error> {
    let Device { major, minor } = device;
    let map = inode::device_map(device);
    let map = map.ok_or_else(|| Error::BadDevice {
        path: numbering::path(tree, id),
        major,
        minor,
    })?;
    Ok(Shape {
        map,
        ..Shape::default()
    })
}

/// The extended attributes of a node, if ext4 can store them.
pub(super) fn xattrs<'n>(tree: &Tree, id: NodeId, node: &'n Node) -> Result<Xattrs<'n>, Error> {
    Xattrs::new(&node.attributes.xattrs).map_err(|unfit| {
        let path = numbering::path(tree, id);
        match unfit {
            Unfit::Name(name) => Error::BadXattr {
                path,
                name: name.escape_ascii().to_string(),
            },
            Unfit::Bytes { bytes, limit_bytes } => Error::XattrsTooLarge {
                path,
                bytes,
                limit_bytes,
            },
        }
    })
}

/// The number that directories use for a kind.
fn kind_number(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Dir(_) => dir::KIND_DIR,
        Kind::CharDevice(_) => 3,
        Kind::BlockDevice(_) => 4,
        Kind::Fifo => 5,
        Kind::Socket => 6,
        Kind::Symlink(_) => 7,
    }
}
