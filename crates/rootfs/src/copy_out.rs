//! Copies the files of a tree to the host, for archives that contain an image rather than a root
//! file system.
//!
//! Always: the bytes of a file are written once, for any number of names and links; further names
//! are hard links.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sandtree_disk::ext4::write::{BLOCK_BYTES, Content, Kind, NodeId, Tree};

use crate::error::{Error, io_error};
use crate::fault::shown;
use crate::staging::Staging;
use crate::watch::{Stop, Watch};

/// The deepest directory; image archives are not deeper.
const DEPTH_MAX: usize = 8;
/// How many blocks are copied at once.
const BLOCKS: u64 = 256;

/// Writes every file and its directories into an empty directory. Attributes are dropped, symbolic
/// links to files become hard links, and other nodes are skipped. Nothing outside the directory is
/// touched, because no name in a tree leads out of it.
pub(crate) fn copy_out(
    staging: &Staging,
    dir: &Path,
    limit_bytes: u64,
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    let mut copy = Copy {
        staging,
        dir,
        limit_bytes,
        watch,
        bytes: 0,
        places: HashMap::new(),
    };
    copy.dir(Tree::ROOT, &mut Vec::new(), 0)
}

struct Copy<'c, 'w> {
    staging: &'c Staging,
    dir: &'c Path,
    limit_bytes: u64,
    watch: &'w mut Watch<'w>,
    /// The bytes written so far.
    bytes: u64,
    /// The directory and name of each node that was copied.
    places: HashMap<NodeId, (NodeId, &'c [u8])>,
}

impl<'c> Copy<'c, '_> {
    fn dir(&mut self, id: NodeId, path: &mut Vec<u8>, depth: usize) -> Result<(), Error> {
        let staging = self.staging;
        let Kind::Dir(entries) = &staging.tree.node(id).kind else {
            return Ok(());
        };
        if depth > DEPTH_MAX {
            return Err(Error::Refused {
                name: shown(path),
                rule: "its directory is deeper than in any image archive",
            });
        }
        for (name, child) in entries {
            self.report()?;
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
        match &self.staging.tree.node(child).kind {
            Kind::Dir(_) => {
                let target = self.host(place);
                fs::create_dir(&target).map_err(io_error("create directory", &target))?;
                self.places.insert(child, place);
                self.dir(child, path, depth + 1)
            }
            Kind::File(content) => self.file(place, child, content, path),
            Kind::Symlink(_) => {
                let Ok(Some(found)) = self.staging.find(path) else {
                    return Ok(());
                };
                match &self.staging.tree.node(found).kind {
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
                    return Err(Error::Limit {
                        name: shown(path),
                        limit: "bytes to copy",
                        allowed: self.limit_bytes,
                    });
                }
                let piece = self
                    .staging
                    .area
                    .read_blocks(extent.physical + block, bytes)?;
                file.write_all_at(&piece, at)
                    .map_err(io_error("write", to))?;
                self.report()?;
                block += count;
            }
        }
        Ok(())
    }

    /// The path on the host of a name whose directory was copied.
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

    fn report(&mut self) -> Result<(), Error> {
        (self.watch)(self.bytes).map_err(|Stop| Error::GivenUp)
    }
}
