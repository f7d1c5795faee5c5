//! The directories in an image's `/run`. A new file system hides that directory, and some images
//! need directories there, such as a daemon's for its socket.
//!
//! Always: only directories and links are copied, up to a limit. A file there belongs to an earlier
//! run.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use super::complain;

const ENTRIES_MAX: usize = 1024;
const DEPTH_MAX: usize = 8;

pub fn carry_over(from: &Path, to: &Path) {
    let mut left = ENTRIES_MAX;
    match copy_below(from, to, DEPTH_MAX, &mut left) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            complain("carry over the image's /run", &error)
        }
        _ => {}
    }
}

fn copy_below(from: &Path, to: &Path, depth: usize, left: &mut usize) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        if depth == 0 || *left == 0 {
            return Ok(());
        }
        *left -= 1;
        let entry = entry?;
        copy(&entry.path(), &to.join(entry.file_name()), depth, left)?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path, depth: usize, left: &mut usize) -> io::Result<()> {
    let metadata = fs::symlink_metadata(from)?;
    // The agent has made this one itself.
    if to.symlink_metadata().is_ok() {
        return Ok(());
    }
    if metadata.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if metadata.is_dir() {
        fs::create_dir(to)?;
        chown(to, Some(metadata.uid()), Some(metadata.gid()))?;
        fs::set_permissions(to, fs::Permissions::from_mode(metadata.mode() & 0o7777))?;
        return copy_below(from, to, depth - 1, left);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_and_links_are_copied_and_files_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        let to = dir.path().join("to");
        fs::create_dir_all(from.join("daemon/deep")).unwrap();
        fs::create_dir_all(from.join("lock/theirs")).unwrap();
        fs::set_permissions(from.join("daemon"), fs::Permissions::from_mode(0o3775)).unwrap();
        fs::write(from.join("daemon/pid"), "1").unwrap();
        symlink("daemon", from.join("link")).unwrap();
        fs::create_dir_all(to.join("lock")).unwrap();
        carry_over(&from, &to);
        assert_eq!(
            fs::metadata(to.join("daemon")).unwrap().mode() & 0o7777,
            0o3775
        );
        assert!(to.join("link/deep").is_dir());
        assert!(!to.join("daemon/pid").exists() && !to.join("lock/theirs").exists());
    }

    #[test]
    fn a_deep_tree_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        let to = dir.path().join("to");
        fs::create_dir_all(from.join("d/".repeat(40))).unwrap();
        fs::create_dir(&to).unwrap();
        carry_over(&from, &to);
        assert!(
            to.join("d/".repeat(DEPTH_MAX)).is_dir()
                && !to.join("d/".repeat(DEPTH_MAX + 1)).exists()
        );
    }
}
