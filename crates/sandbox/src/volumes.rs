//! Volumes: directories of the store that sandboxes mount, and that clients of the server read and
//! write without a sandbox.
//!
//! Always: guests write to a volume, so everything in it is hostile. Files are found beneath the
//! volume's directory, through no symlink, by the same walk that serves guests. A volume that a
//! sandbox has mounted cannot be removed.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use sandtree_mounts::{Found, Owner, Tree};
use sandtree_proto::FileKind;
use sandtree_store::{SandboxId, VolumeRecord};
use serde::Serialize;

use crate::blocking::{blocking, in_place};
use crate::error::{Error, Result, store_error};
use crate::host::Host;
use crate::info::rfc3339;
use crate::moment::now_unix_ms;
use crate::mounts::MountOwner;

const NAME_MAX: usize = 128;
const VOLUMES_MAX: usize = 1000;
/// The entries of one listing.
const LISTED_MAX: usize = 100_000;
/// The user that sandboxes of the server have by default.
pub const VOLUME_OWNER: MountOwner = MountOwner {
    uid: 1000,
    gid: 1000,
};
/// Of a new volume's directory: every user of a guest may write to it.
const ROOT_MODE: u32 = 0o777;

/// A volume as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VolumeInfo {
    pub id: String,
    pub name: String,
    /// RFC 3339, in UTC.
    pub created_at: String,
    /// Its directory on the host, to mount.
    pub path: PathBuf,
}

/// What became of a volume that was to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeRemoval {
    Removed,
    Unknown,
    /// By these sandboxes, so it stays.
    Mounted(Vec<String>),
}

impl Host {
    /// Makes a volume. `None`: another one has the name.
    pub fn create_volume(&self, name: &str) -> Result<Option<VolumeInfo>> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(is_plain) {
            let rule = "1 to 128 of a-z, A-Z, 0-9, '-' and '_'";
            return Err(Error::invalid("volume name", name, rule));
        }
        if self.volumes()?.len() >= VOLUMES_MAX {
            let rule = "at most 1000: remove some";
            return Err(Error::invalid("number of volumes", VOLUMES_MAX + 1, rule));
        }
        let made = in_place(|| self.inner.store.create_volume(name, now_unix_ms()));
        let Some(record) = made.map_err(store_error("make a volume"))? else {
            return Ok(None);
        };
        let info = self.volume_info(record)?;
        let opened = in_place(|| Tree::open(&info.path)?.set_permissions(b"", ROOT_MODE));
        opened.map_err(|e| Error::io("open", &info.path, e))?;
        Ok(Some(info))
    }

    /// All volumes, oldest first.
    pub fn volumes(&self) -> Result<Vec<VolumeInfo>> {
        let volumes = in_place(|| self.inner.store.volumes());
        let volumes = volumes.map_err(store_error("list its volumes"))?;
        volumes
            .into_iter()
            .map(|record| self.volume_info(record))
            .collect()
    }

    /// A volume by its id.
    pub fn volume(&self, id: &str) -> Result<Option<VolumeInfo>> {
        let Ok(id) = id.parse::<SandboxId>() else {
            return Ok(None);
        };
        let found = in_place(|| self.inner.store.volume(&id));
        let found = found.map_err(store_error("read a volume"))?;
        found.map(|record| self.volume_info(record)).transpose()
    }

    /// Removes a volume with its files, unless a sandbox has it mounted, in whatever state.
    pub async fn remove_volume(&self, id: &str) -> Result<VolumeRemoval> {
        let Some(volume) = self.volume(id)? else {
            return Ok(VolumeRemoval::Unknown);
        };
        let (all, _) = self.list()?;
        let has_it = |mount: &crate::mounts::MountInfo| mount.host.as_ref() == Some(&volume.path);
        let users = all.iter().filter(|info| info.mounts.iter().any(has_it));
        let users: Vec<String> = users.map(|info| info.id.clone()).collect();
        if !users.is_empty() {
            return Ok(VolumeRemoval::Mounted(users));
        }
        let host = self.inner.clone();
        let id: SandboxId = parse_id(&volume.id)?;
        let taken = blocking(move || -> Result<bool> {
            let taken = host.store.take_volume(&id);
            let Some((_staged, data)) = taken.map_err(store_error("remove a volume"))? else {
                return Ok(false);
            };
            let emptied = Tree::open(&data).and_then(|tree| tree.empty());
            emptied.map_err(|e| Error::io("remove the files of", data, e))?;
            Ok(true)
        });
        if taken.await? {
            Ok(VolumeRemoval::Removed)
        } else {
            Ok(VolumeRemoval::Unknown)
        }
    }

    /// The files of a volume.
    pub fn volume_files(&self, volume: &VolumeInfo) -> Result<VolumeFiles> {
        let owner = Owner {
            uid: VOLUME_OWNER.uid,
            gid: VOLUME_OWNER.gid,
        };
        let tree = in_place(|| Tree::open_as(&volume.path, owner));
        let tree = tree.map_err(|e| Error::io("open", &volume.path, e))?;
        Ok(VolumeFiles { tree })
    }

    fn volume_info(&self, record: VolumeRecord) -> Result<VolumeInfo> {
        let id = parse_id(&record.id)?;
        Ok(VolumeInfo {
            path: self.inner.store.volume_data(&id),
            id: record.id,
            name: record.name,
            created_at: rfc3339(record.created_at_unix_ms),
        })
    }
}

fn parse_id(id: &str) -> Result<SandboxId> {
    let rule = "16 hexadecimal digits";
    id.parse()
        .map_err(|_| Error::invalid("id of a volume", id, rule))
}

/// The files of a volume. Paths are those that guests see below its mount point.
#[derive(Debug)]
pub struct VolumeFiles {
    tree: Tree,
}

/// A file of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeEntry {
    /// It begins with a slash.
    pub path: String,
    pub kind: FileKind,
    pub bytes: u64,
    /// The permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub accessed_ns: i64,
    pub modified_ns: i64,
    pub changed_ns: i64,
    /// Of a symlink.
    pub target: Option<String>,
}

/// Whether missing directories above a path are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parents {
    Make,
    Require,
}

impl VolumeFiles {
    pub fn stat(&self, path: &str) -> io::Result<VolumeEntry> {
        self.entry(&inner(path)?)
    }

    /// What is in a directory, to a depth of at least 1.
    pub fn list(&self, path: &str, depth: usize) -> io::Result<Vec<VolumeEntry>> {
        let mut found = Vec::new();
        self.list_below(&inner(path)?, depth, &mut found)?;
        Ok(found)
    }

    fn list_below(
        &self,
        directory: &str,
        depth: usize,
        found: &mut Vec<VolumeEntry>,
    ) -> io::Result<()> {
        let mut names = self.tree.names(directory.as_bytes())?;
        names.sort();
        for name in names {
            // JSON has no other names.
            let Ok(name) = String::from_utf8(name) else {
                continue;
            };
            let path = joined(directory, &name);
            let entry = match self.entry(&path) {
                // It went meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            let is_dir = entry.kind == FileKind::Dir;
            found.push(entry);
            if found.len() > LISTED_MAX {
                return Err(io::Error::other(
                    "the directory has more than 100000 entries",
                ));
            }
            if is_dir && depth > 1 {
                self.list_below(&path, depth - 1, found)?;
            }
        }
        Ok(())
    }

    pub fn read(&self, path: &str) -> io::Result<File> {
        self.tree.read(inner(path)?.as_bytes())
    }

    /// Replaces a file, or makes it. `None`: the mode that it had, or 0644.
    pub fn write(
        &self,
        path: &str,
        mode: Option<u32>,
        parents: Parents,
        content: &mut dyn Read,
    ) -> io::Result<VolumeEntry> {
        let path = named(path)?;
        self.make_parents(&path, parents)?;
        let found = self.tree.find(path.as_bytes())?;
        if found.is_some_and(|found| found.is_directory()) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let before = found
            .filter(Found::is_file)
            .map(|found| found.permissions());
        let mode = mode.or(before).unwrap_or(0o644);
        let now_ns = i64::try_from(now_unix_ms()).unwrap_or(i64::MAX / 1_000_000) * 1_000_000;
        self.tree
            .replace_file(path.as_bytes(), mode, now_ns, content)?;
        self.entry(&path)
    }

    /// Makes a directory. One that exists is an error, unless its parents are made, too.
    pub fn make_dir(
        &self,
        path: &str,
        mode: Option<u32>,
        parents: Parents,
    ) -> io::Result<VolumeEntry> {
        let path = named(path)?;
        self.make_parents(&path, parents)?;
        let made = self
            .tree
            .make_directory(path.as_bytes(), mode.unwrap_or(0o755));
        match made {
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists && parents == Parents::Make => {}
            made => made?,
        }
        let entry = self.entry(&path)?;
        if entry.kind != FileKind::Dir {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Ok(entry)
    }

    pub fn set_mode(&self, path: &str, mode: u32) -> io::Result<VolumeEntry> {
        let path = inner(path)?;
        if self.entry(&path)?.kind == FileKind::Symlink {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a symlink has no mode",
            ));
        }
        self.tree.set_permissions(path.as_bytes(), mode)?;
        self.entry(&path)
    }

    /// Removes a file, or a directory with everything in it.
    pub fn remove(&self, path: &str) -> io::Result<()> {
        let path = named(path)?;
        if self.tree.find(path.as_bytes())?.is_none() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.tree.remove(path.as_bytes())
    }

    fn make_parents(&self, path: &str, parents: Parents) -> io::Result<()> {
        if parents == Parents::Require {
            return Ok(());
        }
        for (end, _) in path.match_indices('/') {
            let made = self.tree.make_directory(&path.as_bytes()[..end], 0o755);
            match made {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
        }
        Ok(())
    }

    fn entry(&self, path: &str) -> io::Result<VolumeEntry> {
        let found = self.tree.find(path.as_bytes())?;
        let found = found.ok_or(io::ErrorKind::NotFound)?;
        let target = if found.is_symlink() {
            let target = self.tree.read_link(path.as_bytes())?;
            Some(String::from_utf8_lossy(&target).into_owned())
        } else {
            None
        };
        let attr = found.attr;
        Ok(VolumeEntry {
            path: format!("/{path}"),
            kind: kind(&found),
            bytes: attr.version.size,
            mode: found.permissions(),
            uid: attr.uid,
            gid: attr.gid,
            accessed_ns: attr.atime_ns,
            modified_ns: attr.version.mtime_ns,
            changed_ns: attr.version.ctime_ns,
            target,
        })
    }
}

fn kind(found: &Found) -> FileKind {
    if found.is_directory() {
        FileKind::Dir
    } else if found.is_file() {
        FileKind::File
    } else if found.is_symlink() {
        FileKind::Symlink
    } else {
        FileKind::Other
    }
}

/// A path beneath the volume, in its only spelling: no leading slash, and empty for the volume.
fn inner(path: &str) -> io::Result<String> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                let rule = "a path in a volume has no \"..\"";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, rule));
            }
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

/// A path that is not the volume itself.
fn named(path: &str) -> io::Result<String> {
    let path = inner(path)?;
    if path.is_empty() {
        let rule = "this is the volume itself";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, rule));
    }
    Ok(path)
}

fn joined(directory: &str, name: &str) -> String {
    if directory.is_empty() {
        name.to_owned()
    } else {
        format!("{directory}/{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &std::path::Path) -> VolumeFiles {
        let tree = Tree::open(dir).unwrap();
        VolumeFiles { tree }
    }

    #[test]
    fn a_path_has_one_spelling_and_leads_nowhere_else() {
        assert_eq!(inner("/a//b/./c/").unwrap(), "a/b/c");
        assert_eq!(inner("/").unwrap(), "");
        assert!(inner("/a/../b").is_err());
        assert!(named("/").is_err());
    }

    #[test]
    fn files_are_written_listed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let missing = files.write("/a/b", None, Parents::Require, &mut &b"x"[..]);
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
        let made = files.write("/a/b", Some(0o600), Parents::Make, &mut &b"one"[..]);
        assert_eq!(
            (made.as_ref().unwrap().bytes, made.unwrap().mode),
            (3, 0o600)
        );
        let again = files.write("/a/b", None, Parents::Require, &mut &b"2"[..]);
        assert_eq!(again.unwrap().mode, 0o600);
        let names = |depth| -> Vec<String> {
            let listed = files.list("/", depth).unwrap();
            listed.into_iter().map(|entry| entry.path).collect()
        };
        assert_eq!(names(1), ["/a"]);
        assert_eq!(names(2), ["/a", "/a/b"]);
        files.remove("/a").unwrap();
        assert!(names(2).is_empty());
        assert!(files.remove("/a").is_err());
    }

    #[test]
    fn a_symlink_of_a_guest_leads_nowhere() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "s").unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("out")).unwrap();
        let files = files(dir.path());
        assert!(files.read("/out/secret").is_err());
        assert!(files.list("/out", 1).is_err());
        let written = files.write("/out/new", None, Parents::Make, &mut &b""[..]);
        assert!(written.is_err());
        assert!(files.set_mode("/out", 0o777).is_err());
        assert_eq!(files.stat("/out").unwrap().kind, FileKind::Symlink);
        files.remove("/out").unwrap();
        assert!(outside.path().join("secret").exists());
    }
}
