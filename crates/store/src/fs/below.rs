//! What a directory takes in which a guest writes while it is read.
//!
//! Always: nothing outside of the directory is looked at, whatever the guest renames or links, and
//! memory and time are bounded. What cannot be read counts as nothing: a guest can make paths that
//! are too long to open.

use std::collections::HashSet;
use std::ffi::{CStr, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, open, openat2, statat};

/// Entries that are counted. Further ones are not.
const ENTRIES_MAX: usize = 1_000_000;
/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// The space of all that is below a directory, and of the directory. A file with several names
/// counts once.
pub(super) fn bytes(dir: &Path) -> u64 {
    let Ok(top) = open(dir, flags(), Mode::empty()) else {
        return 0;
    };
    let mut walk = Walk {
        top,
        left: ENTRIES_MAX,
        linked: HashSet::new(),
        dirs: vec![PathBuf::from(".")],
        bytes: 0,
    };
    // The directory itself is the first entry of its own list.
    while let Some(dir) = walk.dirs.pop() {
        walk.add(&dir);
    }
    walk.bytes
}

fn flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

struct Walk {
    top: OwnedFd,
    left: usize,
    /// Files with several names that were counted.
    linked: HashSet<(u64, u64)>,
    /// Directories that were not read yet, from the top.
    dirs: Vec<PathBuf>,
    bytes: u64,
}

impl Walk {
    fn add(&mut self, dir: &Path) {
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let Ok(opened) = openat2(&self.top, dir, flags(), Mode::empty(), beneath) else {
            return;
        };
        let Ok(entries) = Dir::read_from(&opened) else {
            return;
        };
        for entry in entries.map_while(Result::ok) {
            if self.left == 0 {
                return self.dirs.clear();
            }
            self.left -= 1;
            let name = entry.file_name();
            let Ok(found) = statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            self.add_entry(dir, name, &found);
        }
    }

    fn add_entry(&mut self, dir: &Path, name: &CStr, found: &Stat) {
        let blocks = u64::try_from(found.st_blocks).unwrap_or(0);
        let own_bytes = blocks * BLOCK_BYTES;
        let is_dir = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        match name.to_bytes() {
            b".." => {}
            b"." => self.bytes += own_bytes,
            name if is_dir => self.dirs.push(dir.join(OsStr::from_bytes(name))),
            _ if found.st_nlink == 1 || self.linked.insert((found.st_dev, found.st_ino)) => {
                self.bytes += own_bytes;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn each_file_counts_once_and_links_lead_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        let deep = top.join("a/b");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("file"), vec![1; 1 << 20]).unwrap();
        fs::hard_link(deep.join("file"), top.join("again")).unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("large"), vec![1; 8 << 20]).unwrap();
        symlink(&outside, top.join("link")).unwrap();
        let blocks = |path: &Path| fs::symlink_metadata(path).unwrap().blocks() * BLOCK_BYTES;
        let parts = [
            &top,
            &top.join("a"),
            &deep,
            &deep.join("file"),
            &top.join("link"),
        ];
        let expected: u64 = parts.map(|path| blocks(path)).iter().sum();
        assert_eq!(bytes(&top), expected);
        assert_eq!(bytes(&top.join("link")), 0);
        assert_eq!(bytes(&dir.path().join("absent")), 0);
    }

    /// A walk by recursion would end with the stack, and one by whole paths at their length.
    #[test]
    fn a_path_that_is_too_long_ends_the_walk_and_not_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let mut at = open(dir.path(), flags(), Mode::empty()).unwrap();
        let name = "d".repeat(200);
        for _ in 0..40 {
            rustix::fs::mkdirat(&at, &name, Mode::RWXU).unwrap();
            at = rustix::fs::openat(&at, &name, flags(), Mode::empty()).unwrap();
        }
        assert!(bytes(dir.path()) > 0);
    }
}
