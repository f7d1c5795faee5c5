//! A directory of the host for the host's own programs: what is beneath it, and replacing it file
//! by file.
//!
//! Always: as for guests, nothing outside of the directory is read or changed, and no symlink is
//! followed. A file is replaced as a whole or not at all.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Timespec, Timestamps};
use rustix::io::Errno;
use sandtree_proto::mount::{Attr, MountId};

use crate::directory::{Access, Directory, Owner, View, kind};
use crate::place::{self, Name};

const PERMISSIONS: u32 = 0o777;
/// Where new content is written before it gets its name. A name of its own in each directory: two
/// file systems cannot share one.
const STAGED: &str = ".sandtree-apply-";

#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
    view: View,
}

/// What is at a path.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    pub attr: Attr,
}

impl Found {
    pub fn is_directory(&self) -> bool {
        kind(&self.attr) == FileType::Directory
    }

    pub fn is_file(&self) -> bool {
        kind(&self.attr) == FileType::RegularFile
    }

    pub fn is_symlink(&self) -> bool {
        kind(&self.attr) == FileType::Symlink
    }

    pub fn permissions(&self) -> u32 {
        self.attr.mode & PERMISSIONS
    }
}

impl Tree {
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_as(path, Owner { uid: 0, gid: 0 })
    }

    /// A directory whose files of the host's own user are shown as those of another one.
    pub fn open_as(path: &Path, owner: Owner) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        let directory = Directory {
            mount: MountId(0),
            root,
            path: path.to_owned(),
            access: Access::ReadWrite,
            owner,
        };
        let view = View::new(&directory)?;
        Ok(Self {
            root: directory.root,
            view,
        })
    }

    /// What is at a path, if anything is.
    pub fn find(&self, path: &[u8]) -> io::Result<Option<Found>> {
        match place::pin(&self.root, path) {
            Ok(pinned) => Ok(Some(Found {
                attr: self.view.of(&pinned)?.attr,
            })),
            // A symlink on the way leads elsewhere: nothing is here.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The content of a regular file.
    pub fn read(&self, path: &[u8]) -> io::Result<File> {
        let pinned = place::pin(&self.root, path)?;
        let found = self.view.of(&pinned)?.attr;
        if kind(&found) != FileType::RegularFile {
            return Err(Errno::INVAL.into());
        }
        Ok(place::open(&pinned, OFlags::RDONLY)?.into())
    }

    pub fn read_link(&self, path: &[u8]) -> io::Result<Vec<u8>> {
        let pinned = place::pin(&self.root, path)?;
        Ok(rustix::fs::readlinkat(&pinned, c"", Vec::new())?.into_bytes())
    }

    /// The names in a directory.
    pub fn names(&self, path: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let pinned = place::pin(&self.root, path)?;
        let directory = place::open(&pinned, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut buffer = Vec::with_capacity(32 * 1024);
        let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            let name = entry?.file_name().to_bytes().to_vec();
            if !matches!(name.as_slice(), b"." | b"..") {
                names.push(name);
            }
        }
        Ok(names)
    }

    pub fn make_directory(&self, path: &[u8], permissions: u32) -> io::Result<()> {
        let (directory, name) = self.place(path)?;
        let mode = Mode::from_raw_mode(permissions & PERMISSIONS);
        rustix::fs::mkdirat(&directory, name.as_c_str(), mode)?;
        self.set_permissions(path, permissions)
    }

    pub fn set_permissions(&self, path: &[u8], permissions: u32) -> io::Result<()> {
        let pinned = place::pin(&self.root, path)?;
        let mode = Mode::from_raw_mode(permissions & PERMISSIONS);
        Ok(rustix::fs::chmod(place::by_descriptor(&pinned), mode)?)
    }

    /// Replaces a file, or makes it: its content is on the disk before it has the name.
    pub fn replace_file(
        &self,
        path: &[u8],
        permissions: u32,
        modified_ns: i64,
        content: &mut dyn Read,
    ) -> io::Result<()> {
        let (directory, name) = self.place(path)?;
        let staged = staged(&name)?;
        remove_if_there(&directory, &staged)?;
        let mode = Mode::from_raw_mode(permissions & PERMISSIONS);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(
            &directory,
            staged.as_c_str(),
            flags | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )?;
        let written = write(File::from(file), content, mode, modified_ns);
        let named = written.and_then(|()| self.give_name(path, &directory, (&staged, &name)));
        named.inspect_err(|_| clear(&directory, &staged))
    }

    pub fn replace_symlink(&self, path: &[u8], target: &[u8]) -> io::Result<()> {
        let (directory, name) = self.place(path)?;
        let staged = staged(&name)?;
        remove_if_there(&directory, &staged)?;
        rustix::fs::symlinkat(target, &directory, staged.as_c_str())?;
        let named = self.give_name(path, &directory, (&staged, &name));
        named.inspect_err(|_| clear(&directory, &staged))
    }

    /// Gives staged content its name. A directory in its place goes first: it cannot be renamed
    /// over.
    fn give_name(
        &self,
        path: &[u8],
        directory: &OwnedFd,
        (staged, name): (&Name, &Name),
    ) -> io::Result<()> {
        if self.find(path)?.is_some_and(|found| found.is_directory()) {
            self.remove(path)?;
        }
        let from = staged.as_c_str();
        Ok(rustix::fs::renameat(
            directory,
            from,
            directory,
            name.as_c_str(),
        )?)
    }

    /// Removes what is at a path, with everything in it.
    pub fn remove(&self, path: &[u8]) -> io::Result<()> {
        let Some(found) = self.find(path)? else {
            return Ok(());
        };
        let (directory, name) = self.place(path)?;
        if !found.is_directory() {
            return Ok(rustix::fs::unlinkat(
                &directory,
                name.as_c_str(),
                AtFlags::empty(),
            )?);
        }
        for child in self.names(path)? {
            self.remove(&[path, b"/", &child].concat())?;
        }
        Ok(rustix::fs::unlinkat(
            &directory,
            name.as_c_str(),
            AtFlags::REMOVEDIR,
        )?)
    }

    /// Removes everything beneath the directory, also what its own user may not read.
    pub fn empty(&self) -> io::Result<()> {
        self.set_permissions(b"", 0o700)?;
        for name in self.names(b"")? {
            self.open_up(&name)?;
            self.remove(&name)?;
        }
        Ok(())
    }

    /// Lets this user read and change all directories from a path on.
    fn open_up(&self, path: &[u8]) -> io::Result<()> {
        if !self.find(path)?.is_some_and(|found| found.is_directory()) {
            return Ok(());
        }
        self.set_permissions(path, 0o700)?;
        for name in self.names(path)? {
            self.open_up(&[path, b"/", &name].concat())?;
        }
        Ok(())
    }

    /// The directory of a path, and the last name.
    fn place(&self, path: &[u8]) -> io::Result<(OwnedFd, Name)> {
        let (directory, name) = place::split(path).ok_or(Errno::INVAL)?;
        Ok((place::pin(&self.root, directory)?, Name::new(name)?))
    }
}

fn write(mut file: File, content: &mut dyn Read, mode: Mode, modified_ns: i64) -> io::Result<()> {
    io::copy(content, &mut file)?;
    file.flush()?;
    rustix::fs::fchmod(&file, mode)?;
    let modified = Timespec {
        tv_sec: modified_ns.div_euclid(1_000_000_000),
        tv_nsec: modified_ns.rem_euclid(1_000_000_000),
    };
    let times = Timestamps {
        last_access: modified,
        last_modification: modified,
    };
    rustix::fs::futimens(&file, &times)?;
    file.sync_all()
}

/// A name next to another one. It fits where the other fits: the longest are cut.
fn staged(name: &Name) -> Result<Name, Errno> {
    let kept = name.as_bytes();
    let kept = &kept[..kept.len().min(255 - STAGED.len())];
    Name::new(&[STAGED.as_bytes(), kept].concat())
}

/// Removes staged content after a failure.
fn clear(directory: &OwnedFd, staged: &Name) {
    // What stays has a name that says what it is.
    drop(remove_if_there(directory, staged));
}

fn remove_if_there(directory: impl AsFd, name: &Name) -> io::Result<()> {
    match rustix::fs::unlinkat(directory, name.as_c_str(), AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
