//! Adds the tree of an ext4 file system, so that files can be added to an image without a machine.
//!
//! Always: what the writer cannot store again is refused and never dropped: access lists, and
//! extended attributes of other kinds than `user`, `trusted` and `security`. Numbers of inodes,
//! times of creation and the UUID are the writer's own. The reader checks every number; names,
//! nodes and bytes are limited as those of an archive are.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sandtree_disk::Blocks;
use sandtree_disk::ext4::read::{self, FileReader, FileSystem, Inode, Next};
use sandtree_disk::ext4::write::{
    Attributes, Content, Device, Kind, MAX_FILE_BYTES, NodeId, Time, Tree, xattr_name,
};

use crate::error::{Error, io_error};
use crate::fault::{Fault, require, shown};
use crate::path::{check_depth, check_name};
use crate::staging::Staging;
use crate::watch::{Stop, Watch};

const BUFFER_BYTES: usize = 256 << 10;
/// A file of this name in the root is the writer's.
const LOST_AND_FOUND: &[u8] = b"lost+found";

/// Adds all of a file system on top of the tree. Returns the number of bytes in its files.
pub(crate) fn add(
    staging: &mut Staging,
    image: &Path,
    watch: &mut Watch<'_>,
) -> Result<u64, Error> {
    let file = File::open(image).map_err(io_error("open", image))?;
    let bytes = file.metadata().map_err(io_error("look at", image))?.len();
    let disk = Raw { file, bytes };
    let fs = FileSystem::open(&disk).map_err(unreadable(b"/"))?;
    let mut import = Import {
        staging,
        watch,
        fs: &fs,
        links: HashMap::new(),
        bytes: 0,
        buffer: vec![0; BUFFER_BYTES],
    };
    import.all()?;
    Ok(import.bytes)
}

struct Raw {
    file: File,
    bytes: u64,
}

impl Blocks for Raw {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }
}

/// A directory whose names were not added yet.
struct Level {
    inode: Inode,
    node: NodeId,
    path: Vec<u8>,
    depth: usize,
}

struct Import<'c, 'w> {
    staging: &'c mut Staging,
    watch: &'w mut Watch<'w>,
    fs: &'c FileSystem<'c>,
    /// Nodes of files with several names, by inode.
    links: HashMap<u32, NodeId>,
    bytes: u64,
    buffer: Vec<u8>,
}

impl Import<'_, '_> {
    fn all(&mut self) -> Result<(), Error> {
        let inode = self.fs.root().map_err(unreadable(b"/"))?;
        let attributes = self.attributes(&inode, b"/")?;
        let described = self.staging.describe(Tree::ROOT, attributes);
        described.map_err(|fault| fault.of(b"/"))?;
        let mut levels = vec![Level {
            inode,
            node: Tree::ROOT,
            path: Vec::new(),
            depth: 0,
        }];
        while let Some(level) = levels.pop() {
            let entries = self.fs.entries(&level.inode);
            for (name, number) in entries.map_err(unreadable(&level.path))? {
                if level.depth == 0 && *name == *LOST_AND_FOUND {
                    continue;
                }
                let path = [&level.path[..], b"/", &name].concat();
                check_name(&name).map_err(|fault| fault.of(&path))?;
                levels.extend(self.take(&level, &name, number, path)?);
            }
        }
        Ok(())
    }

    /// Adds one name. Returns the directory to visit later, if it is one.
    fn take(
        &mut self,
        level: &Level,
        name: &[u8],
        number: u32,
        path: Vec<u8>,
    ) -> Result<Option<Level>, Error> {
        if let Some(node) = self.links.get(&number) {
            let linked = self.staging.link(level.node, name, *node);
            return linked.map(|()| None).map_err(|fault| fault.of(&path));
        }
        let inode = self.fs.inode(number).map_err(unreadable(&path))?;
        let attributes = self.attributes(&inode, &path)?;
        let kind = self.kind(&inode, &path)?;
        let placed = self.staging.place(level.node, name, kind, attributes);
        let node = placed.map_err(|fault| fault.of(&path))?;
        if inode.kind == read::Kind::Directory {
            let depth = level.depth + 1;
            check_depth(depth).map_err(|fault| fault.of(&path))?;
            return Ok(Some(Level {
                inode,
                node,
                path,
                depth,
            }));
        }
        if inode.links > 1 {
            self.links.insert(number, node);
        }
        Ok(None)
    }

    fn kind(&mut self, inode: &Inode, path: &[u8]) -> Result<Kind, Error> {
        let device = inode.device().map(|(major, minor)| Device { major, minor });
        let device = device.unwrap_or(Device { major: 0, minor: 0 });
        Ok(match inode.kind {
            read::Kind::Directory => Kind::Dir(BTreeMap::new()),
            read::Kind::File => Kind::File(self.content(inode, path)?),
            read::Kind::Symlink => {
                let node = self.fs.node(inode).map_err(unreadable(path))?;
                let target = node.target.map(|target| target.as_bytes().to_vec());
                Kind::Symlink(target.unwrap_or_default())
            }
            read::Kind::CharDevice => Kind::CharDevice(device),
            read::Kind::BlockDevice => Kind::BlockDevice(device),
            read::Kind::Fifo => Kind::Fifo,
            read::Kind::Socket => Kind::Socket,
        })
    }

    /// Copies the bytes of a file into the image.
    fn content(&mut self, inode: &Inode, path: &[u8]) -> Result<Content, Error> {
        let mut from = FileReader::of(self.fs, inode.clone()).map_err(unreadable(path))?;
        let bytes = from.size();
        require(bytes <= MAX_FILE_BYTES, "it is larger than 16 TiB")
            .map_err(|fault| fault.of(path))?;
        let max_extents = self.staging.meter.extents_left();
        let mut file = self.staging.area.file(bytes, max_extents)?;
        loop {
            let wanted = match from.next() {
                Next::End => return Ok(file.finish()?),
                Next::Zeros(zeros) => {
                    file.skip(zeros)?;
                    from.skip(zeros);
                    continue;
                }
                stored => stored.bytes().min(BUFFER_BYTES as u64),
            };
            let taken = self.staging.meter.take_bytes(wanted);
            taken.map_err(|fault| fault.of(path))?;
            let read = &mut self.buffer[..wanted as usize];
            from.read_exactly(read).map_err(unreadable(path))?;
            file.write(read)?;
            self.bytes += wanted;
            (self.watch)(self.bytes).map_err(|Stop| Error::GivenUp)?;
        }
    }

    fn attributes(&self, inode: &Inode, path: &[u8]) -> Result<Attributes, Error> {
        let found = self.fs.xattrs(inode).map_err(unreadable(path))?;
        let named = |((prefix, name), value): ((u8, Box<[u8]>), Vec<u8>)| {
            let name = xattr_name(prefix, &name);
            let refused = Fault::Refused("it has extended attributes that are not carried over");
            Ok((name.ok_or(refused)?, value))
        };
        let xattrs: Result<BTreeMap<_, _>, Fault> = found.into_iter().map(named).collect();
        Ok(Attributes {
            mode: inode.mode,
            uid: inode.uid,
            gid: inode.gid,
            modified: Time {
                seconds: inode.modified_unix_s,
                nanoseconds: inode.modified_ns,
            },
            xattrs: xattrs.map_err(|fault| fault.of(path))?,
        })
    }
}

fn unreadable(path: &[u8]) -> impl FnOnce(read::Error) -> Error {
    let name = shown(path);
    move |error| Error::Bytes {
        name,
        source: io::Error::other(error),
    }
}
