//! Writes an ext4 file system into one file.
//!
//! The caller writes the bytes of files into a [`DataArea`] as they arrive, builds a [`Tree`] of
//! names, attributes and places of bytes, and calls [`finish`], which writes everything else.
//!
//! ```text
//! head | journal | bytes of files, in order of arrival | directories, tables | bitmaps, inodes | free
//! ```
//!
//! Always: equal trees and equal bytes in equal order give an equal image: it contains only the
//! tree and constants. Blocks of zeros are holes in the image. Nothing is synced.
//! When it fails: the image stays as it is, and is not a file system.

mod acl;
mod area;
mod dir;
mod error;
mod extents;
mod geometry;
mod groups;
mod hash;
mod identity;
mod inode;
mod layout;
mod numbering;
mod place;
mod reserved;
mod superblock;
mod table;
#[cfg(test)]
mod tests;
mod tree;
mod xattr;

pub use area::{DataArea, FileWriter};
pub use error::Error;
pub use tree::{
    Attributes, BLOCK_BYTES, Content, Device, Extent, Kind, MAX_FILE_BYTES, Node, NodeId, Time,
    Tree,
};
pub use xattr::xattr_name;

use super::format::ROOT_INODE;
use area::Closed;
use geometry::{Geometry, Needs};
use inode::{Inode, KIND_DIR, KIND_FILE, Shape};
use numbering::Numbering;
use place::Places;
use table::Table;

/// The caller's wishes for the file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Free space; the file system may have somewhat more.
    pub free_bytes: u64,
}

/// The result of [`finish`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// The size of the image.
    pub bytes: u64,
    /// The blocks that are used by files and by the file system itself.
    pub used_bytes: u64,
    /// The number of files, directories and so on.
    pub nodes: u64,
}

/// Writes everything except the bytes of files. After it the image is a complete file system.
pub fn finish(mut area: DataArea, tree: &Tree, options: &Options) -> Result<Made, Error> {
    let seed = identity::seed();
    let numbering = Numbering::of(tree)?;
    let places = Places::write(&mut area, tree, &numbering, seed)?;
    let mut image = area.close()?;
    let geometry = Geometry::plan(&image.cursor, needs(&image, &numbering, options))?;
    image.leave_out(geometry.left_out.iter().cloned());
    image.set_blocks(geometry.blocks)?;
    let reserved = Reserved {
        resize: reserved::write_resize(&image, &geometry)?,
        journal: reserved::write_journal(&image)?,
    };
    let journal_map = reserved.journal.map;
    let inodes = Inodes {
        tree,
        numbering: &numbering,
        places: &places,
    };
    let dirs = inodes.write(Table::new(&image, &geometry, seed), reserved)?;
    let groups = groups::write(&image, &geometry, numbering.last_inode, &dirs)?;
    superblock::write(&image, &geometry, &groups, &journal_map)?;
    Ok(Made {
        bytes: geometry.blocks * BLOCK_BYTES,
        used_bytes: (geometry.blocks - groups.free_blocks) * BLOCK_BYTES,
        nodes: numbering.nodes,
    })
}

fn needs(image: &Closed, numbering: &Numbering, options: &Options) -> Needs {
    let freed_blocks = image.free.iter().map(|range| range.end - range.start).sum();
    let free_blocks = options.free_bytes.div_ceil(BLOCK_BYTES);
    Needs {
        freed_blocks,
        free_blocks,
        inodes: numbering.last_inode,
    }
}

/// The blocks of the reserved inodes.
struct Reserved {
    resize: Shape,
    journal: Shape,
}

struct Inodes<'a> {
    tree: &'a Tree,
    numbering: &'a Numbering,
    places: &'a Places,
}

impl Inodes<'_> {
    /// Writes all inodes, ordered by number. Returns the number of directories by group.
    fn write(&self, mut table: Table<'_>, reserved: Reserved) -> Result<Vec<u16>, Error> {
        table.put(ROOT_INODE, &self.inode(Tree::ROOT)?)?;
        let resize = reserved::inode(KIND_FILE | 0o600, 1, reserved.resize);
        table.put(inode::RESIZE, &resize)?;
        let journal = reserved::inode(KIND_FILE | 0o600, 1, reserved.journal);
        table.put(inode::JOURNAL, &journal)?;
        if let Some(shape) = &self.places.lost_and_found {
            let lost_and_found = reserved::inode(KIND_DIR | 0o700, 2, shape.clone());
            table.put(inode::FIRST, &lost_and_found)?;
        }
        for (id, _) in self.tree.nodes().filter(|(id, _)| *id != Tree::ROOT) {
            table.put(self.numbering.inode(id), &self.inode(id)?)?;
        }
        table.finish()
    }

    fn inode(&self, id: NodeId) -> Result<Inode, Error> {
        let node = self.tree.node(id);
        let attributes = &node.attributes;
        Ok(Inode {
            mode: inode::kind_bits(&node.kind) | attributes.mode & 0o7777,
            uid: attributes.uid,
            gid: attributes.gid,
            links: self.numbering.links(id),
            modified: attributes.modified,
            shape: self.places.shape(self.tree, id)?,
            body: place::xattrs(self.tree, id, node)?.body(),
        })
    }
}
