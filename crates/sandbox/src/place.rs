//! The place of a store: whether machines, which run as users of their own when we are root, can
//! use files there.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Refuses a FUSE file system that only the user who mounted it can use; even root cannot.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let root = root
        .canonicalize()
        .map_err(|e| Error::io("find", root, e))?;
    if is_closed(&root, &mounts) {
        return Err(Error::ClosedPlace { path: root });
    }
    Ok(())
}

/// A line is `id parent dev root MOUNT options … - TYPE source OPTIONS`. The last line whose mount
/// contains the path counts.
fn is_closed(path: &Path, mounts: &str) -> bool {
    let of_line = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let at = PathBuf::from(unescaped(before.split(' ').nth(4)?));
        let (kind, rest) = after.split_once(' ')?;
        let options = rest.rsplit(' ').next()?;
        let is_fuse = kind == "fuse" || kind == "fuseblk" || kind.starts_with("fuse.");
        let is_closed = is_fuse && !options.split(',').any(|option| option == "allow_other");
        path.starts_with(&at)
            .then_some((at.components().count(), is_closed))
    };
    // Of the mounts that contain it, the deepest; of these, the last one.
    mounts
        .lines()
        .filter_map(of_line)
        .max_by_key(|(depth, _)| *depth)
        .is_some_and(|(_, is_closed)| is_closed)
}

/// The kernel writes spaces, tabs, newlines and backslashes as octal numbers.
fn unescaped(text: &str) -> String {
    [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .iter()
    .fold(text.to_owned(), |text, (octal, character)| {
        text.replace(octal, character)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_that_holds_the_path_decides() {
        let mounts = "22 1 0:1 / / rw - ext4 /dev/vda rw\n\
                      23 22 0:2 / /closed rw,nosuid - fuse.sshfs me@there: rw,user_id=0,group_id=0\n\
                      24 22 0:3 / /with\\040space rw - fuseblk /dev/loop0 rw,default_permissions\n\
                      25 22 0:4 / /open rw shared:1 - fuse.ext4 /img rw,user_id=0,allow_other\n\
                      26 23 0:5 / /closed/inside rw - tmpfs none rw\n";
        for (path, closed) in [
            ("/", false),
            ("/closed", true),
            ("/closed/home", true),
            ("/closedness", false),
            ("/with space/home", true),
            ("/open/home", false),
            ("/closed/inside/home", false),
        ] {
            assert_eq!(is_closed(Path::new(path), mounts), closed, "{path}");
        }
    }
}
