//! Requests that give and take names: make, remove, rename, link.

use std::os::fd::OwnedFd;

use rustix::fs::inotify::ReadFlags;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, RenameFlags};
use rustix::io::Errno;
use sandtree_proto::mount::{Answer, Attr, FileId, Make, Node, Remove, Rename, Request};

use super::{Desk, Found, PERMISSIONS};
use crate::directory::{is_directory, is_regular, kind};
use crate::place::{self, Name};

/// Another program may remove a file between two looks at it.
const ATTEMPTS: usize = 16;

struct Renaming {
    from: Found,
    name: Name,
    to: Found,
    new_name: Name,
    how: Rename,
}

impl Renaming {
    fn run(&self) -> Result<(), Errno> {
        let flags = match self.how {
            Rename::Replace => RenameFlags::empty(),
            Rename::NoReplace => RenameFlags::NOREPLACE,
            Rename::Exchange => RenameFlags::EXCHANGE,
        };
        rustix::fs::renameat_with(
            &self.from.file,
            self.name.as_c_str(),
            &self.to.file,
            self.new_name.as_c_str(),
            flags,
        )
    }
}

/// Whether the guest has what loses its name open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    Yes,
    No,
}

const KEEP: [Keep; 2] = [Keep::No, Keep::Yes];

/// Whether a file may exist already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Existing {
    Fine,
    Refused,
}

/// Whether a request created the directory that it answers with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Made {
    New,
    Existed,
}

impl Desk<'_> {
    pub(super) fn make(
        &mut self,
        directory: &Node,
        name: &[u8],
        what: &Make,
    ) -> Result<Answer, Errno> {
        let directory = self.directory(directory)?;
        match what {
            Make::File { mode, exclusive } => {
                let existing = if self.replay || !exclusive {
                    Existing::Fine
                } else {
                    Existing::Refused
                };
                let name = Name::new(name)?;
                self.make_file(&directory, &name, permissions(*mode), existing)?;
                self.named(&directory, &name)
            }
            Make::Directory { mode } => {
                let name = Name::new(name)?;
                let made = self.make_directory(&directory, &name, permissions(*mode))?;
                self.named_directory(&directory, &name, made)
            }
            Make::Symlink { target } => {
                let name = Name::new(name)?;
                self.make_symlink(&directory, &name, target)?;
                self.named(&directory, &name)
            }
            Make::Unnamed { mode } => self.make_unnamed(&directory, permissions(*mode)),
        }
    }

    /// The answer about a name that a file or symlink has now.
    fn named(&mut self, directory: &Found, name: &Name) -> Result<Answer, Errno> {
        Ok(Answer::Made {
            attr: self.child_after(directory, name)?,
            watched_from_birth: false,
            directory: self.directory_after(directory)?,
        })
    }

    /// As [`named`](Self::named), of a directory.
    fn named_directory(
        &mut self,
        directory: &Found,
        name: &Name,
        made: Made,
    ) -> Result<Answer, Errno> {
        let attr = self.child_after(directory, name)?;
        let is_new = made == Made::New;
        Ok(Answer::Made {
            attr,
            watched_from_birth: is_new && self.is_empty_and_watched(directory, name, &attr),
            directory: self.directory_after(directory)?,
        })
    }

    /// The file exists as long as it is kept, or gets a name by Link.
    fn make_unnamed(&mut self, directory: &Found, mode: Mode) -> Result<Answer, Errno> {
        let pinned = place::create_unnamed(&directory.file, mode)?;
        let attr = self.mount.view.of(&pinned)?.attr;
        self.kept.keep(self.mount.id(), attr.id, pinned);
        Ok(Answer::Made {
            attr,
            watched_from_birth: false,
            directory: self.directory_after(directory)?,
        })
    }

    /// An existing file is never opened: it may be anything.
    fn make_file(
        &mut self,
        directory: &Found,
        name: &Name,
        mode: Mode,
        existing: Existing,
    ) -> Result<(), Errno> {
        for _ in 0..ATTEMPTS {
            match place::create(&directory.file, name, mode) {
                Ok(_) => {
                    self.expect_name(directory, name, ReadFlags::CREATE);
                    return Ok(());
                }
                Err(Errno::EXIST) if existing == Existing::Fine => {}
                Err(errno) => return Err(errno),
            }
            match self.mount.view.child(&directory.file, name.as_c_str()) {
                Ok(attr) if self.replay && !is_regular(&attr) => return Err(Errno::EXIST),
                Ok(_) => return Ok(()),
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::STALE)
    }

    fn make_directory(
        &mut self,
        directory: &Found,
        name: &Name,
        mode: Mode,
    ) -> Result<Made, Errno> {
        match rustix::fs::mkdirat(&directory.file, name.as_c_str(), mode) {
            Ok(()) => {
                self.expect_name(directory, name, ReadFlags::CREATE);
                Ok(Made::New)
            }
            Err(Errno::EXIST) if self.replay => {
                let attr = self.mount.view.child(&directory.file, name.as_c_str())?;
                if !is_directory(&attr) {
                    return Err(Errno::EXIST);
                }
                Ok(Made::Existed)
            }
            Err(errno) => Err(errno),
        }
    }

    fn make_symlink(&mut self, directory: &Found, name: &Name, target: &[u8]) -> Result<(), Errno> {
        match rustix::fs::symlinkat(target, &directory.file, name.as_c_str()) {
            Ok(()) => {
                self.expect_name(directory, name, ReadFlags::CREATE);
                Ok(())
            }
            Err(Errno::EXIST) if self.replay => {
                let existing = rustix::fs::readlinkat(&directory.file, name.as_c_str(), Vec::new());
                if !existing.is_ok_and(|existing| existing.as_bytes() == target) {
                    return Err(Errno::EXIST);
                }
                Ok(())
            }
            Err(errno) => Err(errno),
        }
    }

    /// Whether the guest knows all of a new directory: it is watched, and was empty after that.
    fn is_empty_and_watched(&self, directory: &Found, name: &Name, attr: &Attr) -> bool {
        let id = attr.id;
        let is_watched = self.watches.known(self.mount.id(), id).is_some();
        let opened = || {
            let pinned = place::pin_child(&directory.file, name)?;
            let is_same = self.mount.view.of(&pinned)?.attr.id == id;
            let opened = place::open(&pinned, OFlags::RDONLY | OFlags::DIRECTORY)?;
            Ok::<_, Errno>((is_same, opened))
        };
        is_watched && opened().is_ok_and(|(is_same, opened)| is_same && is_empty(&opened))
    }

    pub(super) fn remove(&mut self, request: &Request) -> Result<Answer, Errno> {
        let Request::Remove {
            directory,
            name,
            what,
            keep,
            file,
        } = request
        else {
            return Err(Errno::INVAL);
        };
        let name = Name::new(name)?;
        let directory = self.directory(directory)?;
        let pinned = match place::pin_child(&directory.file, &name) {
            Err(Errno::NOENT) if self.replay => None,
            pinned => Some(pinned?),
        };
        // Somebody has given the name to another file since the first time.
        let pinned = match pinned {
            Some(pinned) if self.replay && !self.is_meant(&pinned, *file)? => None,
            pinned => pinned,
        };
        let lost = match pinned {
            None => None,
            Some(pinned) => {
                unlink(&directory, &name, *what)?;
                self.expect_name(&directory, &name, ReadFlags::DELETE);
                Some(self.lost(pinned, KEEP[usize::from(*keep)])?)
            }
        };
        Ok(Answer::Removed {
            lost,
            directory: self.directory_after(&directory)?,
        })
    }

    /// What lost a name, with the links that are left.
    fn lost(&mut self, pinned: OwnedFd, keep: Keep) -> Result<Attr, Errno> {
        let attr = self.mount.view.of(&pinned)?.attr;
        if keep == Keep::Yes && is_regular(&attr) {
            self.kept.keep(self.mount.id(), attr.id, pinned);
        } else if is_directory(&attr) {
            self.watches.forget(self.mount.id(), attr.id);
        }
        Ok(attr)
    }

    pub(super) fn rename(&mut self, request: &Request) -> Result<Answer, Errno> {
        let Request::Rename {
            from,
            name,
            to,
            new_name,
            how,
            keep,
            file,
        } = request
        else {
            return Err(Errno::INVAL);
        };
        if self.replay && *how == Rename::Exchange && file.ino == 0 {
            // Done twice it is undone, and nothing says whether it was done.
            return Err(Errno::IO);
        }
        let renaming = Renaming {
            name: Name::new(name)?,
            new_name: Name::new(new_name)?,
            from: self.directory(from)?,
            to: self.directory(to)?,
            how: *how,
        };
        let moved = place::pin_child(&renaming.from.file, &renaming.name).ok();
        let other = place::pin_child(&renaming.to.file, &renaming.new_name).ok();
        if self.replay && !self.may_move(moved.as_ref(), *file)? {
            if !self.may_move(other.as_ref(), *file)? {
                return Err(Errno::NOENT);
            }
            return self.renamed(&renaming, None);
        }
        match renaming.run() {
            Ok(()) => {}
            Err(Errno::NOENT) if self.replay => return self.renamed(&renaming, None),
            Err(errno) => return Err(errno),
        }
        self.expect_rename(&renaming, moved.as_ref(), other.as_ref());
        let other = match (other, how) {
            (Some(pinned), Rename::Replace) => Some(self.lost(pinned, KEEP[usize::from(*keep)])?),
            (_, Rename::Exchange) => Some(self.child_after(&renaming.from, &renaming.name)?),
            _ => None,
        };
        self.renamed(&renaming, other)
    }

    /// Whether a file is the one that a request means.
    fn is_meant(&self, pinned: &OwnedFd, file: FileId) -> Result<bool, Errno> {
        Ok(file.ino == 0 || self.mount.view.of(pinned)?.attr.id == file)
    }

    /// Whether a repeated rename finds the file that it means. If the guest does not know it,
    /// rename(2) decides.
    fn may_move(&self, found: Option<&OwnedFd>, file: FileId) -> Result<bool, Errno> {
        match found {
            Some(found) => self.is_meant(found, file),
            None => Ok(file.ino == 0),
        }
    }

    fn renamed(&mut self, renaming: &Renaming, other: Option<Attr>) -> Result<Answer, Errno> {
        let attr = self.child_after(&renaming.to, &renaming.new_name)?;
        Ok(Answer::Renamed {
            attr,
            // Two names of one file: rename(2) does nothing.
            other: other.filter(|other| other.id != attr.id),
            from: self.directory_after(&renaming.from)?,
            to: self.directory_after(&renaming.to)?,
        })
    }

    fn expect_rename(
        &mut self,
        renaming: &Renaming,
        moved: Option<&OwnedFd>,
        other: Option<&OwnedFd>,
    ) {
        let Renaming {
            from,
            to,
            name,
            new_name,
            how,
        } = renaming;
        self.expect_name(from, name, ReadFlags::MOVED_FROM);
        self.expect_name(to, new_name, ReadFlags::MOVED_TO);
        self.expect_move(moved);
        if *how == Rename::Exchange {
            self.expect_name(to, new_name, ReadFlags::MOVED_FROM);
            self.expect_name(from, name, ReadFlags::MOVED_TO);
            self.expect_move(other);
        }
    }

    /// A watched directory reports that it is moved.
    fn expect_move(&mut self, moved: Option<&OwnedFd>) {
        let seen = moved.and_then(|moved| self.mount.view.of(moved).ok());
        if let Some(seen) = seen.filter(|seen| is_directory(&seen.attr)) {
            let watch = self.watches.known(self.mount.id(), seen.attr.id);
            self.own.expect(watch, b"", ReadFlags::MOVE_SELF);
        }
    }

    pub(super) fn link(
        &mut self,
        node: &Node,
        directory: &Node,
        name: &[u8],
    ) -> Result<Answer, Errno> {
        let name = Name::new(name)?;
        let found = match self.locate(node) {
            Err(Errno::STALE) if self.replay && node.kept => {
                return self.linked_before(node, directory, &name);
            }
            found => found?,
        };
        if !matches!(kind(&found.attr), FileType::RegularFile | FileType::Symlink) {
            return Err(Errno::PERM);
        }
        let directory = self.directory(directory)?;
        let path = place::by_descriptor(&found.file);
        let flags = AtFlags::SYMLINK_FOLLOW;
        match rustix::fs::linkat(CWD, path, &directory.file, name.as_c_str(), flags) {
            // A kept file stays kept until the guest forgets it: requests that are under way name
            // it so.
            Ok(()) => self.expect_name(&directory, &name, ReadFlags::CREATE),
            Err(Errno::EXIST) if self.replay => {
                let existing = self.mount.view.child(&directory.file, name.as_c_str())?;
                if existing.id != found.attr.id {
                    return Err(Errno::EXIST);
                }
            }
            Err(errno) => return Err(errno),
        }
        self.named(&directory, &name)
    }

    /// A repeated link of a file without a name that this server does not keep: an earlier one may
    /// have given it the name.
    fn linked_before(
        &mut self,
        node: &Node,
        directory: &Node,
        name: &Name,
    ) -> Result<Answer, Errno> {
        let directory = self.directory(directory)?;
        match self.mount.view.child(&directory.file, name.as_c_str()) {
            Ok(existing) if existing.id == node.id => self.named(&directory, name),
            Ok(_) | Err(Errno::NOENT) => Err(Errno::STALE),
            Err(errno) => Err(errno),
        }
    }

    fn expect_name(&mut self, directory: &Found, name: &Name, bits: ReadFlags) {
        self.own.expect(directory.watch, name.as_bytes(), bits);
    }
}

fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & PERMISSIONS)
}

fn unlink(directory: &Found, name: &Name, what: Remove) -> Result<(), Errno> {
    let flags = match what {
        Remove::File => AtFlags::empty(),
        Remove::Directory => AtFlags::REMOVEDIR,
    };
    rustix::fs::unlinkat(&directory.file, name.as_c_str(), flags)
}

fn is_empty(directory: &OwnedFd) -> bool {
    let mut buffer = [std::mem::MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(directory, &mut buffer);
    let mut names = 0;
    while let Some(Ok(entry)) = entries.next() {
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return false;
        }
        names += 1;
    }
    names > 0
}
