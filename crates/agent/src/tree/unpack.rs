//! Unpacks a tar stream into a directory.
//!
//! Always: nothing is written outside of the directory. The kernel resolves every name with the
//! directory as its root (`RESOLVE_IN_ROOT`), so no link in the archive or on the disk leads out.
//! Blocks of zeros become holes. A directory's times are set last, after its members. When it
//! fails: the entries unpacked so far stay.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use sandtree_proto::Failure;
use tar::{Archive, Entry, EntryType};

use super::{LeftOut, XATTR_KEY};
use crate::failure::{OrFailure, refusal};
use crate::feed::Intake;
use crate::files;
use crate::sparse::write_sparse;

/// Unpacks `input` below `path`, which is created if missing, and lists what it leaves out.
pub fn unpack(path: &Path, input: Intake, left_out: &mut LeftOut) -> Result<(), Failure> {
    let message = || format!("cannot unpack into {}", path.display());
    std::fs::create_dir_all(path).or_failure(message)?;
    let root = rustix::fs::open(
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let mut unpacking = Unpacking {
        root: root.or_failure(message)?,
        dirs: Vec::new(),
        left_out,
    };
    let mut archive = Archive::new(input);
    for entry in archive.entries().or_failure(message)? {
        unpacking.add(path, entry.or_failure(message)?)?;
    }
    unpacking.finish_dirs().or_failure(message)?;
    // Data after the end of the archive is read from the link; otherwise the host would wait.
    files::copy(&mut archive.into_inner(), &mut io::sink()).or_failure(message)
}

struct Unpacking<'a> {
    root: OwnedFd,
    dirs: Vec<(PathBuf, Attributes)>,
    left_out: &'a mut LeftOut,
}

/// The attributes of an entry's file, apart from its content.
struct Attributes {
    mode: Mode,
    owner: (Uid, Gid),
    times: Timestamps,
    xattrs: Vec<(OsString, Vec<u8>)>,
}

impl Unpacking<'_> {
    fn add(&mut self, root: &Path, mut entry: Entry<'_, Intake>) -> Result<(), Failure> {
        let name = PathBuf::from(OsStr::from_bytes(&entry.path_bytes()));
        let message = || format!("cannot unpack {}", root.join(&name).display());
        let Some(inner) = inside(&name) else {
            return Err(refusal(
                Errno::INVAL,
                format!("the archive names {}, which leads out", name.display()),
            ));
        };
        if let Some(why) = unsupported(entry.header().entry_type()) {
            self.left_out.add(&root.join(&inner), &why);
            return Ok(());
        }
        let attributes = attributes(&mut entry).or_failure(message)?;
        self.place(&inner, &mut entry, attributes)
            .or_failure(message)
    }

    fn place(
        &mut self,
        name: &Path,
        entry: &mut Entry<'_, Intake>,
        attributes: Attributes,
    ) -> io::Result<()> {
        let kind = entry.header().entry_type();
        let Some((parent, last)) = self.parent(name)? else {
            // The root itself exists already, and only gets attributes.
            self.dirs.push((PathBuf::from("."), attributes));
            return Ok(());
        };
        match kind {
            EntryType::Directory => {
                make_dir(&parent, &last)?;
                self.dirs.push((name.to_path_buf(), attributes));
                Ok(())
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                clear(&parent, &last)?;
                write_file(&parent, &last, entry, &attributes)
            }
            EntryType::Symlink => {
                let target = link_name(entry)?;
                clear(&parent, &last)?;
                rustix::fs::symlinkat(&target, &parent, &last)?;
                attributes.apply_to_name(&parent, &last, kind)
            }
            EntryType::Link => self.link(&parent, &last, &link_name(entry)?),
            EntryType::Fifo | EntryType::Char | EntryType::Block => {
                clear(&parent, &last)?;
                make_node(&parent, &last, entry, kind)?;
                attributes.apply_to_name(&parent, &last, kind)
            }
            // A header for the whole archive, which names no file.
            _ => Ok(()),
        }
    }

    fn link(&self, parent: &OwnedFd, last: &OsStr, target: &Path) -> io::Result<()> {
        let target = inside(target).ok_or(Errno::INVAL)?;
        let (from, name) = self.parent(&target)?.ok_or(Errno::INVAL)?;
        clear(parent, last)?;
        rustix::fs::linkat(&from, &name, parent, last, AtFlags::empty())?;
        Ok(())
    }

    /// The directory of an entry, created if missing, and the entry's name in it; none for the root
    /// itself.
    fn parent(&self, name: &Path) -> io::Result<Option<(OwnedFd, OsString)>> {
        let Some(last) = name.file_name() else {
            return Ok(None);
        };
        let parent = name.parent().unwrap_or(Path::new(""));
        let dir = match self.open(parent) {
            Err(Errno::NOENT) => {
                self.make_parents(parent)?;
                self.open(parent)?
            }
            other => other?,
        };
        Ok(Some((dir, last.to_owned())))
    }

    fn make_parents(&self, path: &Path) -> io::Result<()> {
        let mut made = PathBuf::new();
        for component in path.components() {
            let dir = self.open(&made)?;
            make_dir(&dir, component.as_os_str())?;
            made.push(component);
        }
        Ok(())
    }

    fn open(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve)
    }

    /// Innermost first, so that setting one does not change another's times.
    fn finish_dirs(&mut self) -> io::Result<()> {
        for (path, attributes) in std::mem::take(&mut self.dirs).into_iter().rev() {
            attributes.apply(&File::from(self.open(&path)?))?;
        }
        Ok(())
    }
}

/// Why an entry cannot become a file: a file system here cannot hold the kinds of other systems and
/// extensions.
fn unsupported(kind: EntryType) -> Option<String> {
    use EntryType::{
        Block, Char, Continuous, Directory, Fifo, GNUSparse, Link, Regular, Symlink, XGlobalHeader,
    };
    match kind {
        Directory | Regular | Continuous | GNUSparse | Symlink | Link | Fifo | Char | Block
        | XGlobalHeader => None,
        other => Some(format!(
            "an entry of type {:?} cannot be unpacked",
            char::from(other.as_byte())
        )),
    }
}

/// The name without redundant parts; `None` if it could lead out.
fn inside(name: &Path) -> Option<PathBuf> {
    let mut inner = PathBuf::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => inner.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(inner)
}

fn link_name(entry: &Entry<'_, Intake>) -> io::Result<PathBuf> {
    let bytes = entry.link_name_bytes().ok_or(Errno::INVAL)?;
    Ok(PathBuf::from(OsStr::from_bytes(&bytes)))
}

fn make_dir(parent: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        // If it is no directory, opening it fails.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes an existing file in the place of an entry. The kernel refuses to remove a directory.
fn clear(parent: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn write_file(
    parent: &OwnedFd,
    name: &OsStr,
    entry: &mut Entry<'_, Intake>,
    with: &Attributes,
) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(
        parent,
        name,
        flags,
        Mode::from_raw_mode(0o600),
    )?);
    write_sparse(&file, entry)?;
    with.apply(&file)
}

fn make_node(
    parent: &OwnedFd,
    name: &OsStr,
    entry: &Entry<'_, Intake>,
    kind: EntryType,
) -> io::Result<()> {
    let header = entry.header();
    let number = |part: io::Result<Option<u32>>| part.map(|number| number.unwrap_or(0));
    let device = rustix::fs::makedev(
        number(header.device_major())?,
        number(header.device_minor())?,
    );
    let kind = match kind {
        EntryType::Fifo => FileType::Fifo,
        EntryType::Char => FileType::CharacterDevice,
        _ => FileType::BlockDevice,
    };
    rustix::fs::mknodat(parent, name, kind, Mode::from_raw_mode(0o600), device)?;
    Ok(())
}

fn attributes(entry: &mut Entry<'_, Intake>) -> io::Result<Attributes> {
    let mut xattrs = Vec::new();
    if let Some(extensions) = entry.pax_extensions()? {
        for extension in extensions {
            let extension = extension?;
            if let Some(name) = extension.key_bytes().strip_prefix(XATTR_KEY.as_bytes()) {
                xattrs.push((
                    OsStr::from_bytes(name).to_owned(),
                    extension.value_bytes().to_vec(),
                ));
            }
        }
    }
    let header = entry.header();
    let modified = Timespec {
        tv_sec: header.mtime()? as i64,
        tv_nsec: 0,
    };
    Ok(Attributes {
        mode: Mode::from_raw_mode(header.mode()? & 0o7777),
        owner: (
            Uid::from_raw(number(header.uid()?)?),
            Gid::from_raw(number(header.gid()?)?),
        ),
        times: Timestamps {
            last_access: modified,
            last_modification: modified,
        },
        xattrs,
    })
}

/// The kernel uses the largest number for "do not change".
fn number(id: u64) -> io::Result<u32> {
    u32::try_from(id)
        .ok()
        .filter(|&id| id != u32::MAX)
        .ok_or_else(|| Errno::INVAL.into())
}

impl Attributes {
    /// The owner first: changing it clears set-id bits and capabilities.
    fn apply(&self, file: &File) -> io::Result<()> {
        files::own(file, self.owner.0.as_raw(), self.owner.1.as_raw())?;
        rustix::fs::fchmod(file, self.mode)?;
        for (name, value) in &self.xattrs {
            rustix::fs::fsetxattr(file, name, value, XattrFlags::empty())?;
        }
        rustix::fs::futimens(file, &self.times)?;
        Ok(())
    }

    /// For files that cannot be opened: links and nodes. The name is a plain name in an open
    /// directory.
    fn apply_to_name(&self, parent: impl AsFd, name: &OsStr, kind: EntryType) -> io::Result<()> {
        if rustix::process::geteuid().is_root() {
            let (uid, gid) = self.owner;
            rustix::fs::chownat(
                &parent,
                name,
                Some(uid),
                Some(gid),
                AtFlags::SYMLINK_NOFOLLOW,
            )?;
        }
        if kind != EntryType::Symlink {
            rustix::fs::chmodat(&parent, name, self.mode, AtFlags::empty())?;
        }
        rustix::fs::utimensat(&parent, name, &self.times, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_out_are_refused() {
        assert_eq!(inside(Path::new("/a/./b")), Some(PathBuf::from("a/b")));
        assert_eq!(inside(Path::new("a/../../b")), None);
    }
}
