//! The answers to requests. Each request names its files anew; nothing is kept between two of them
//! but [`Kept`] files and [`Watches`].

mod change;
mod data;
mod list;
mod look;
mod names;
mod xattr;

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandtree_proto::mount::{Answer, Attr, MountId, Node, Request, Version};

use self::data::At;
use crate::directory::{Access, Directory, Seen, View, is_directory, is_regular};
use crate::kept::Kept;
use crate::place::{self, Name};
use crate::watch::{Own, Watch, Watches};

/// Permissions that a guest may give. Setuid, setgid and sticky never reach the host.
const PERMISSIONS: u32 = 0o777;

/// A directory that is served.
#[derive(Debug)]
pub(crate) struct Mount {
    pub directory: Directory,
    pub view: View,
}

impl Mount {
    pub(crate) fn new(directory: Directory) -> Result<Self, Errno> {
        place::pin(&directory.root, b"")?;
        let view = View::new(&directory)?;
        Ok(Self { directory, view })
    }

    pub(crate) fn id(&self) -> MountId {
        self.directory.mount
    }

    /// Whether the directory has no name on the host any longer.
    pub(crate) fn is_removed(&self) -> bool {
        let root = self.view.of(&self.directory.root);
        root.is_ok_and(|root| root.attr.links == 0)
    }
}

/// One request and what its answer needs.
#[derive(Debug)]
pub(crate) struct Desk<'a> {
    pub mount: &'a Mount,
    pub watches: &'a mut Watches,
    pub kept: &'a mut Kept,
    pub own: &'a mut Own,
    /// The request may have been done already.
    pub replay: bool,
    /// What follows the request.
    pub data: &'a [u8],
    /// What follows the answer.
    pub out: &'a mut Vec<u8>,
}

/// A file that a request names.
#[derive(Debug)]
struct Found {
    file: OwnedFd,
    attr: Attr,
    /// It belongs to the host's user.
    is_own: bool,
    /// Of the directory in which its name is, if the request needs it.
    parent: Option<Watch>,
    /// The last component of its path.
    name: Vec<u8>,
    /// Of a directory: its own watch.
    watch: Option<Watch>,
}

impl Found {
    fn new(file: OwnedFd, seen: Seen) -> Self {
        Self {
            file,
            attr: seen.attr,
            is_own: seen.is_own,
            parent: None,
            name: Vec::new(),
            watch: None,
        }
    }
}

impl Desk<'_> {
    pub(crate) fn answer(&mut self, request: &Request) -> Result<Answer, Errno> {
        if changes(request) && self.mount.directory.access == Access::ReadOnly {
            return Err(Errno::ROFS);
        }
        match request {
            Request::Root => self.root(),
            Request::Lookup { directory, name } => self.lookup(directory, name),
            Request::Stat { node } => self.stat(node),
            Request::ReadLink { node } => self.read_link(node),
            Request::Space => self.space(),
            Request::Revalidate => self.revalidate(),
            Request::Change { node, change } => self.change(node, change),
            Request::Make {
                directory,
                name,
                what,
            } => self.make(directory, name, what),
            Request::Remove { .. } => self.remove(request),
            Request::Rename { .. } => self.rename(request),
            Request::Link {
                node,
                directory,
                name,
            } => self.link(node, directory, name),
            Request::Read {
                node,
                offset,
                length,
            } => self.read(node, *offset, *length),
            Request::Write {
                node,
                offset,
                append,
            } => {
                let at = if *append { At::End } else { At::Offset };
                self.write(node, *offset, at)
            }
            Request::List { .. } => self.list(request),
            Request::Sync { node } => self.sync(node),
            Request::Allocate { .. } => self.allocate(request),
            Request::Copy { .. } => self.copy(request),
            Request::Seek { node, offset, what } => self.seek(node, *offset, *what),
            Request::GetXattr { node, name } => self.get_xattr(node, name),
            Request::SetXattr { node, name, flags } => self.set_xattr(node, name, *flags),
            Request::ListXattr { node } => self.list_xattr(node),
            Request::RemoveXattr { node, name } => self.remove_xattr(node, name),
        }
    }

    /// The file that is meant, without a word about its directory.
    fn locate(&self, node: &Node) -> Result<Found, Errno> {
        if node.kept {
            return self.locate_kept(node);
        }
        let pinned = place::pin(&self.mount.directory.root, &node.path);
        let file = pinned.map_err(|errno| stale(node, errno))?;
        let seen = self.mount.view.of(&file)?;
        same(node, &seen.attr)?;
        Ok(Found::new(file, seen))
    }

    fn locate_kept(&self, node: &Node) -> Result<Found, Errno> {
        let kept = self.kept.find(self.mount.id(), node.id);
        let file = kept.ok_or(Errno::STALE)?.try_clone_to_owned();
        let file = file.map_err(|_| Errno::MFILE)?;
        let seen = self.mount.view.of(&file)?;
        Ok(Found::new(file, seen))
    }

    /// The file that is meant. Its directory is watched first, so that its attributes are reported
    /// when they change after this look.
    fn find(&mut self, node: &Node) -> Result<Found, Errno> {
        place::check(&node.path)?;
        let Some((parent, name)) = place::split(&node.path).filter(|_| !node.kept) else {
            let found = self.locate(node)?;
            return self.watch_itself(found);
        };
        let name = Name::new(name)?;
        let parent = place::pin(&self.mount.directory.root, parent);
        let parent = parent.map_err(|errno| stale(node, errno))?;
        let parent_id = self.mount.view.of(&parent)?.attr.id;
        let watch = self.watches.watch(self.mount.id(), parent_id, &parent);
        let file = place::pin_child(&parent, &name).map_err(|errno| stale(node, errno))?;
        let seen = self.mount.view.of(&file)?;
        same(node, &seen.attr)?;
        let found = Found {
            parent: watch,
            name: name.as_bytes().to_vec(),
            ..Found::new(file, seen)
        };
        self.watch_itself(found)
    }

    /// A directory in which a request does something. It is watched before its content is looked
    /// at.
    fn directory(&mut self, node: &Node) -> Result<Found, Errno> {
        let found = self.locate(node)?;
        if !is_directory(&found.attr) {
            return Err(Errno::NOTDIR);
        }
        self.watch_itself(found)
    }

    /// Sets the `watched` bit, for which a directory needs a watch of its own: its parent's does
    /// not report what changes inside.
    fn watch_itself(&mut self, mut found: Found) -> Result<Found, Errno> {
        if is_directory(&found.attr) {
            let id = found.attr.id;
            found.watch = self.watches.watch(self.mount.id(), id, &found.file);
            found.attr = self.mount.view.of(&found.file)?.attr;
        }
        found.attr.watched = is_reported(&found.attr, found.parent, found.watch);
        Ok(found)
    }

    /// The attributes after the request's own change, as the reply reports them.
    fn after(&mut self, found: &Found) -> Result<Attr, Errno> {
        let mut attr = self.mount.view.of(&found.file)?.attr;
        attr.watched = is_reported(&attr, found.parent, found.watch);
        let at = (found.file.as_fd(), CString::default());
        self.own.show(found.parent, &found.name, at, attr);
        Ok(attr)
    }

    /// Looks again right before a change, so that little can happen in between.
    fn before(&mut self, found: &Found) -> Result<Version, Errno> {
        Ok(self.mount.view.of(&found.file)?.attr.version)
    }

    /// As [`after`](Self::after), with the size that the request explains.
    fn after_sized(&mut self, found: &Found, size: u64) -> Result<Attr, Errno> {
        let attr = self.after(found)?;
        if attr.version.size != size {
            self.own.doubt(found.parent, &found.name);
        }
        Ok(attr)
    }

    /// The attributes of what has a name in a watched directory. A directory gets a watch, too.
    fn child(&mut self, directory: &Found, name: &Name) -> Result<Attr, Errno> {
        let mut attr = self.mount.view.child(&directory.file, name.as_c_str())?;
        let mut own = None;
        if is_directory(&attr) {
            let pinned = place::pin_child(&directory.file, name)?;
            attr = self.mount.view.of(&pinned)?.attr;
            own = self.watches.watch(self.mount.id(), attr.id, &pinned);
            attr = self.mount.view.of(&pinned)?.attr;
        }
        // The name is part of the answer: that is the parent's to report.
        attr.watched = directory.watch.is_some() && is_reported(&attr, directory.watch, own);
        Ok(attr)
    }

    /// As [`child`](Self::child), after the request's own change.
    fn child_after(&mut self, directory: &Found, name: &Name) -> Result<Attr, Errno> {
        let attr = self.child(directory, name)?;
        let at = (directory.file.as_fd(), name.as_c_str().to_owned());
        self.own.show(directory.watch, name.as_bytes(), at, attr);
        Ok(attr)
    }

    /// The attributes of a directory in which the request did something.
    fn directory_after(&mut self, directory: &Found) -> Result<Attr, Errno> {
        let mut attr = self.mount.view.of(&directory.file)?.attr;
        attr.watched = directory.watch.is_some();
        Ok(attr)
    }

    /// Opens a regular file.
    fn open(&mut self, found: &Found, flags: OFlags) -> Result<OwnedFd, Errno> {
        if is_directory(&found.attr) {
            return Err(Errno::ISDIR);
        }
        if !is_regular(&found.attr) {
            return Err(Errno::NXIO);
        }
        let may_change = self.mount.directory.access == Access::ReadWrite;
        match place::open(&found.file, flags) {
            Err(Errno::ACCESS) if found.is_own && may_change => self.open_as_owner(found, flags),
            done => done,
        }
    }

    /// A program in the guest may write to a file that it created without write permission, as git
    /// does; the guest's kernel has checked that. The host's kernel checks again, because each
    /// request opens anew: the owner gives itself permission for the moment of the open.
    fn open_as_owner(&mut self, found: &Found, flags: OFlags) -> Result<OwnedFd, Errno> {
        let path = place::by_descriptor(&found.file);
        let mode = Mode::from_raw_mode(found.attr.mode & 0o7777);
        self.expect_content(found);
        self.expect_content(found);
        rustix::fs::chmod(&path, mode | Mode::RUSR | Mode::WUSR)?;
        let opened = place::open(&found.file, flags);
        rustix::fs::chmod(&path, mode)?;
        opened
    }

    /// One event that a change of content or attributes causes.
    fn expect_content(&mut self, found: &Found) {
        self.own.expect(found.parent, &found.name, Own::CONTENT);
        self.own.expect(found.watch, b"", Own::CONTENT);
    }
}

/// Whether the host reports every change of these attributes. A file with several names may be
/// changed through one whose directory is not watched.
fn is_reported(attr: &Attr, parent: Option<Watch>, own: Option<Watch>) -> bool {
    if is_directory(attr) {
        own.is_some()
    } else {
        parent.is_some() && attr.links <= 1
    }
}

/// The guest knows a file that is not where it was.
fn stale(node: &Node, errno: Errno) -> Errno {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP if is_known(node) => Errno::STALE,
        other => other,
    }
}

fn same(node: &Node, attr: &Attr) -> Result<(), Errno> {
    if is_known(node) && attr.id != node.id {
        return Err(Errno::STALE);
    }
    Ok(())
}

/// No file has the number 0: such a node is whatever has its path.
fn is_known(node: &Node) -> bool {
    node.id.ino != 0
}

/// Whether a request changes anything on the host.
fn changes(request: &Request) -> bool {
    match request {
        Request::Change { .. }
        | Request::Make { .. }
        | Request::Remove { .. }
        | Request::Rename { .. }
        | Request::Link { .. }
        | Request::Write { .. }
        | Request::Allocate { .. }
        | Request::Copy { .. }
        | Request::SetXattr { .. }
        | Request::RemoveXattr { .. } => true,
        Request::Root
        | Request::Lookup { .. }
        | Request::Stat { .. }
        | Request::ReadLink { .. }
        | Request::Read { .. }
        | Request::List { .. }
        | Request::Sync { .. }
        | Request::Seek { .. }
        | Request::Space
        | Request::Revalidate
        | Request::GetXattr { .. }
        | Request::ListXattr { .. } => false,
    }
}
