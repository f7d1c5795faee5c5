//! Files of a tree, written to the host: for archives that hold an image, and not a root file
//! system.
//!
//! Always: the bytes of a file are written once, however many names and links it has; the others
//! are hard links.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::builder::{Stop, Watch};
use crate::edit::Canvas;
use crate::error::{Error, io_error};
use crate::fault::shown;
use crate::tree::{BLOCK_BYTES, Content, Kind, NodeId, Tree};

/// Deep enough for every image archive.
const DEPTH_MAX: usize = 8;
/// Blocks that are copied at once.
const BLOCKS: u64 = 256;

/// Writes every file into an empty directory, with the directories it is in. Of attributes nothing
/// is kept; links to files become more names of them; what is neither is left out. Nothing outside
/// of the directory is touched, for a tree has no names that lead there.
pub(crate) fn copy_out(
    canvas: &Canvas,
    dir: &Path,
    limit_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    let mut copy = Copy {
        canvas,
        dir,
        limit_bytes,
        watch,
        bytes: 0,
        places: HashMap::new(),
    };
    copy.dir(Tree::ROOT, &mut Vec::new(), 0)
}

struct Copy<'c, 'w> {
    canvas: &'c Canvas,
    dir: &'c Path,
    limit_bytes: u64,
    watch: &'w mut Watch<'w>,
    /// Written so far.
    bytes: u64,
    /// Directory and name of what is on the host.
    places: HashMap<NodeId, (NodeId, &'c [u8])>,
}

impl<'c> Copy<'c, '_> {
    fn dir(&mut self, id: NodeId, path: &mut Vec<u8>, depth: usize) -> Result<(), Error> {
        let canvas = self.canvas;
        let Kind::Dir(entries) = &canvas.tree.node(id).kind else {
            return Ok(());
        };
        if depth > DEPTH_MAX {
            return Err(Error::Refused {
                name: shown(path),
                rule: "no archive of an image is as deep",
            });
        }
        for (name, child) in entries {
            self.tell()?;
            let before = path.len();
            path.push(b'/');
            path.extend_from_slice(name);
            self.entry((id, name), *child, path, depth)?;
            path.truncate(before);
        }
        Ok(())
    }

    fn entry(
        &mut self,
        place: (NodeId, &'c [u8]),
        child: NodeId,
        path: &mut Vec<u8>,
        depth: usize,
    ) -> Result<(), Error> {
        match &self.canvas.tree.node(child).kind {
            Kind::Dir(_) => {
                let target = self.host(place);
                fs::create_dir(&target).map_err(io_error("create directory", &target))?;
                self.places.insert(child, place);
                self.dir(child, path, depth + 1)
            }
            Kind::File(content) => self.file(place, child, content, path),
            Kind::Symlink(_) => {
                let Ok(Some(found)) = self.canvas.find(path) else {
                    return Ok(());
                };
                match &self.canvas.tree.node(found).kind {
                    Kind::File(content) => self.file(place, found, content, path),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    fn file(
        &mut self,
        place: (NodeId, &'c [u8]),
        id: NodeId,
        content: &Content,
        path: &[u8],
    ) -> Result<(), Error> {
        let to = self.host(place);
        if let Some(first) = self.places.get(&id) {
            return fs::hard_link(self.host(*first), &to).map_err(io_error("link", &to));
        }
        self.places.insert(id, place);
        self.write(content, &to, path)
    }

    fn write(&mut self, content: &Content, to: &Path, path: &[u8]) -> Result<(), Error> {
        let file = File::create_new(to).map_err(io_error("create", to))?;
        file.set_len(content.bytes).map_err(io_error("grow", to))?;
        for extent in &content.extents {
            let mut block = 0;
            while block < u64::from(extent.blocks) {
                let count = BLOCKS.min(u64::from(extent.blocks) - block);
                let at = (u64::from(extent.logical) + block) * BLOCK_BYTES;
                let bytes = (count * BLOCK_BYTES).min(content.bytes.saturating_sub(at));
                self.bytes += bytes;
                if self.bytes > self.limit_bytes {
                    let (limit, allowed) = ("bytes to be copied", self.limit_bytes);
                    return Err(Error::Limit {
                        name: shown(path),
                        limit,
                        allowed,
                    });
                }
                let piece = self
                    .canvas
                    .area
                    .read_blocks(extent.physical + block, bytes)?;
                file.write_all_at(&piece, at)
                    .map_err(io_error("write", to))?;
                self.tell()?;
                block += count;
            }
        }
        Ok(())
    }

    /// Where something is on the host, whose directory is there.
    fn host(&self, (mut dir, name): (NodeId, &[u8])) -> PathBuf {
        let mut names = vec![name];
        while let Some((above, name)) = self.places.get(&dir) {
            names.push(name);
            dir = *above;
        }
        names.iter().rev().fold(self.dir.to_owned(), |path, name| {
            path.join(OsStr::from_bytes(name))
        })
    }

    fn tell(&mut self) -> Result<(), Error> {
        (self.watch)(self.bytes).map_err(|Stop| Error::GivenUp)
    }
}
