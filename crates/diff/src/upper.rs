//! The upper directory of an overlay: what was changed on top of another directory.
//!
//! A device 0:0 stands for a removed file, and the attribute `overlay.opaque` for a directory that
//! replaces the one below. The overlay must not redirect directories.

use sandtree_disk::ext4::read::{Error, FileSystem, Inode, Kind, Node, Path, Xattrs};

/// ext4's number for `trusted.`.
const TRUSTED: u8 = 4;
const OPAQUE: &[u8] = b"overlay.opaque";
/// More than any overlay of ours has; the disk is hostile.
const ENTRIES_MAX: usize = 1 << 20;
const DEPTH_MAX: usize = 512;

/// One file of an upper directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upper {
    /// Below the upper directory, without a slash in front.
    pub path: Vec<u8>,
    pub what: UpperKind,
    pub node: Node,
    pub modified_unix_ns: i64,
    /// When the file was changed for the first time; `None` where that is unknown.
    pub born_unix_ns: Option<i64>,
    /// The value of the attribute that was asked for.
    pub stamp: Option<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpperKind {
    /// The file below is removed.
    Removed,
    Directory,
    /// Nothing of the directory below shows.
    Opaque,
    File,
    Symlink,
    /// A device, a socket or a FIFO.
    Special,
}

/// Everything in an upper directory, sorted by path. A directory that does not
/// exist is empty. `stamp` is the name of a `trusted.` attribute, without that.
pub fn upper(fs: &FileSystem<'_>, root: &Path, stamp: &[u8]) -> Result<Vec<Upper>, Error> {
    let mut found = Vec::new();
    let Some(inode) = fs.find(root)? else {
        return Ok(found);
    };
    let mut waiting = vec![Waiting {
        inode,
        path: Vec::new(),
        depth: 0,
        below: UpperKind::Directory,
    }];
    while let Some(directory) = waiting.pop() {
        for (name, number) in fs.entries(&directory.inode)? {
            let inode = fs.inode(number)?;
            let path = joined(&directory.path, &name);
            let mut entry = entry(fs, &inode, path, stamp)?;
            if entry.what == UpperKind::Directory {
                entry.what = directory.below;
            }
            if matches!(entry.what, UpperKind::Directory | UpperKind::Opaque) {
                waiting.push(Waiting {
                    inode,
                    path: entry.path.clone(),
                    depth: directory.depth + 1,
                    below: entry.what,
                });
            }
            found.push(entry);
            if found.len() > ENTRIES_MAX || directory.depth > DEPTH_MAX {
                let what = format!("the changes below {root}");
                return Err(Error::TooLarge {
                    what,
                    limit_bytes: ENTRIES_MAX as u64,
                });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// A directory whose entries are to be read.
struct Waiting {
    inode: Inode,
    path: Vec<u8>,
    depth: usize,
    /// What a directory in it is: below one that hides another, each hides what had its place.
    below: UpperKind,
}

fn joined(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() {
        return name.to_vec();
    }
    [directory, b"/", name].concat()
}

fn entry(fs: &FileSystem<'_>, inode: &Inode, path: Vec<u8>, stamp: &[u8]) -> Result<Upper, Error> {
    let node = fs.node(inode)?;
    let xattrs = fs.xattrs(inode)?;
    Ok(Upper {
        path,
        what: what(&node, &xattrs),
        node,
        modified_unix_ns: modified(inode),
        born_unix_ns: inode.born_unix_ns,
        stamp: value(&xattrs, stamp).map(<[u8]>::to_vec),
    })
}

fn what(node: &Node, xattrs: &Xattrs) -> UpperKind {
    match node.kind {
        Kind::CharDevice if node.device == Some((0, 0)) => UpperKind::Removed,
        Kind::Directory if value(xattrs, OPAQUE) == Some(b"y") => UpperKind::Opaque,
        Kind::Directory => UpperKind::Directory,
        Kind::File => UpperKind::File,
        Kind::Symlink => UpperKind::Symlink,
        _ => UpperKind::Special,
    }
}

fn value<'a>(xattrs: &'a Xattrs, name: &[u8]) -> Option<&'a [u8]> {
    xattrs.get(&(TRUSTED, name.into())).map(Vec::as_slice)
}

fn modified(inode: &Inode) -> i64 {
    let seconds = inode.modified_unix_s.saturating_mul(1_000_000_000);
    seconds.saturating_add(inode.modified_ns.into())
}
