//! An ext4 file system in one file, written here from a [`Tree`] and the bytes that are already in
//! the file.
//!
//! ```text
//! head | journal | bytes of files, as they came | directories, tables | bitmaps, inodes | free
//! ```
//!
//! Always: equal trees and equal bytes in equal order give an equal image. Nothing but what the
//! tree says and constants gets into it. Blocks of zeros are holes in the image. Nothing is synced.
//! When it fails: the image is left as it is, and is no file system.

mod acl;
mod area;
mod census;
mod dir;
mod extents;
mod format;
mod geometry;
mod groups;
mod hash;
mod inode;
mod layout;
mod own;
mod place;
mod superblock;
mod table;
#[cfg(test)]
mod tests;
mod xattr;

pub(crate) use area::{DataArea, FileWriter};

use crate::{BLOCK_BYTES, Error, NodeId, Tree};
use area::Closed;
use census::Census;
use geometry::{Geometry, Needs};
use inode::{Inode, KIND_DIR, KIND_FILE, Shape};
use place::Places;
use table::Table;

/// What the file system should be like.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Room beyond what is used; there may be somewhat more.
    pub free_bytes: u64,
}

/// What was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// The size of the image.
    pub bytes: u64,
    /// Blocks that files and the file system itself have.
    pub used_bytes: u64,
    /// How many files, directories and so on there are.
    pub nodes: u64,
}

/// Writes everything that is not the bytes of files, after which the image is a whole file system.
pub(crate) fn finish(mut area: DataArea, tree: &Tree, options: &Options) -> Result<Made, Error> {
    let seed = format::seed();
    let census = Census::take(tree)?;
    let places = Places::write(&mut area, tree, &census, seed)?;
    let mut image = area.close()?;
    let geometry = Geometry::plan(&image.cursor, needs(&image, &census, options))?;
    image.leave_out(geometry.left_out.iter().cloned());
    image.set_blocks(geometry.blocks)?;
    let own = Own {
        resize: own::write_resize(&image, &geometry)?,
        journal: own::write_journal(&image)?,
    };
    let journal_map = own.journal.map;
    let inodes = Inodes {
        tree,
        census: &census,
        places: &places,
    };
    let dirs = inodes.write(Table::new(&image, &geometry, seed), own)?;
    let groups = groups::write(&image, &geometry, census.last_inode, &dirs)?;
    superblock::write(&image, &geometry, &groups, &journal_map)?;
    Ok(Made {
        bytes: geometry.blocks * BLOCK_BYTES,
        used_bytes: (geometry.blocks - groups.free_blocks) * BLOCK_BYTES,
        nodes: census.nodes,
    })
}

fn needs(image: &Closed, census: &Census, options: &Options) -> Needs {
    let freed_blocks = image.free.iter().map(|range| range.end - range.start).sum();
    let free_blocks = options.free_bytes.div_ceil(BLOCK_BYTES);
    Needs {
        freed_blocks,
        free_blocks,
        inodes: census.last_inode,
    }
}

/// Where the file system's own inodes have their blocks.
struct Own {
    resize: Shape,
    journal: Shape,
}

struct Inodes<'a> {
    tree: &'a Tree,
    census: &'a Census,
    places: &'a Places,
}

impl Inodes<'_> {
    /// All of them, by number.
    fn write(&self, mut table: Table<'_>, own: Own) -> Result<Vec<u16>, Error> {
        table.put(inode::ROOT, &self.inode(Tree::ROOT)?)?;
        table.put(inode::RESIZE, &own::inode(KIND_FILE | 0o600, 1, own.resize))?;
        table.put(
            inode::JOURNAL,
            &own::inode(KIND_FILE | 0o600, 1, own.journal),
        )?;
        if let Some(shape) = &self.places.lost_and_found {
            table.put(
                inode::FIRST,
                &own::inode(KIND_DIR | 0o700, 2, shape.clone()),
            )?;
        }
        for (id, _) in self.tree.nodes().filter(|(id, _)| *id != Tree::ROOT) {
            table.put(self.census.inode(id), &self.inode(id)?)?;
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
            links: self.census.links(id),
            modified: attributes.modified,
            shape: self.places.shape(self.tree, id)?,
            body: place::xattrs(self.tree, id, node)?.body(),
        })
    }
}
