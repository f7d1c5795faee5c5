//! File systems that the kernel wrote and never unmounted.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path as HostPath, PathBuf};

use sandtree_diff::{FileSystem, Options, diff};
use tempfile::TempDir;

use super::support::{EXT4, Image, both_ways, expected, host_items, items, lines, succeed, tool};

/// A mount that is unmounted at the end of the test.
struct Mounted(TempDir);

impl Mounted {
    /// None if this host does not allow a mount.
    fn new(image: &Image) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = tool("mount")
            .args(["-o", "loop"])
            .arg(image.path())
            .arg(dir.path())
            .output();
        mounted
            .is_ok_and(|output| output.status.success())
            .then_some(Self(dir))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, offset: u64, bytes: &[u8]) {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.path(name))
            .unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        succeed(tool("umount").arg(self.0.path()));
    }
}

/// Commits everything, file by file: the kernel writes to the journal, and updates the tables
/// later.
fn commit(dir: &HostPath) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            commit(&entry.path());
        } else if kind.is_file() {
            File::open(entry.path()).unwrap().sync_all().unwrap();
        }
    }
    File::open(dir).unwrap().sync_all().unwrap();
}

fn first_steps(at: &Mounted) {
    fs::create_dir_all(at.path("dir/deep")).unwrap();
    (0..300).for_each(|index| {
        at.write(
            &format!("dir/a name of some length {index}"),
            0,
            &[index as u8; 10],
        )
    });
    (0..200).for_each(|index| at.write("pieces", index * 16_384, &[index as u8 | 1; 5000]));
    at.write("rewritten", 0, &[1; 300_000]);
    at.write("shrunk", 0, &[2; 300_000]);
    symlink("x".repeat(200), at.path("link")).unwrap();
}

fn second_steps(at: &Mounted) {
    (0..300).step_by(3).for_each(|index| {
        fs::remove_file(at.path(&format!("dir/a name of some length {index}"))).unwrap()
    });
    fs::rename(at.path("pieces"), at.path("dir/deep/pieces")).unwrap();
    fs::hard_link(at.path("shrunk"), at.path("dir/linked")).unwrap();
    at.write("rewritten", 100_000, &[9; 10]);
    File::options()
        .write(true)
        .open(at.path("shrunk"))
        .unwrap()
        .set_len(1000)
        .unwrap();
    fs::set_permissions(at.path("dir/deep"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::remove_file(at.path("link")).unwrap();
    (0..50).for_each(|index| at.write(&format!("new {index}"), 0, &[index as u8; 6000]));
}

#[test]
fn a_mounted_file_system_reads_as_the_kernel_reads_it() {
    for kind in [
        " -b 4096",
        " -b 1024",
        ",^metadata_csum,^64bit -b 4096",
        ",inline_data -b 4096 -I 256",
    ] {
        let image = Image::make(&format!("{EXT4}{kind}"), 64, None);
        let Some(mounted) = Mounted::new(&image) else {
            eprintln!(
                "not checked: file systems written by the kernel; this needs permission to mount"
            );
            return;
        };
        first_steps(&mounted);
        commit(mounted.0.path());
        let before = image.copy();
        let tree_before = host_items(mounted.0.path());
        second_steps(&mounted);
        commit(mounted.0.path());
        let after = image.copy();
        let tree_after = host_items(mounted.0.path());
        drop(mounted);

        let bytes = after.bytes();
        let fs = FileSystem::open(&bytes).unwrap();
        assert_eq!(fs.incomplete(), None, "{kind}");
        assert!(items(&fs) == tree_after, "{kind}");
        let found = both_ways(&before, &after);
        assert_eq!(found.incomplete, None);
        assert_eq!(lines(&found), expected(&tree_before, &tree_after), "{kind}");
        assert_eq!(both_ways(&after, &after.recovered()).changes, [], "{kind}");
        assert!(
            differs_without_journal(&bytes),
            "{kind}: the journal had something to say"
        );
    }
}

/// Fast commits are not replayed, and the result must report that.
#[test]
fn fast_commits_are_reported() {
    let image = Image::make(&format!("{EXT4},fast_commit -b 4096"), 64, None);
    let Some(mounted) = Mounted::new(&image) else {
        eprintln!("not checked: fast commits, which need the right to mount");
        return;
    };
    at_once(&mounted, "first");
    // A full commit must precede fast ones.
    succeed(tool("sync").arg("-f").arg(mounted.0.path()));
    at_once(&mounted, "second");
    let bytes = image.bytes();
    let tree = host_items(mounted.0.path());
    drop(mounted);
    let fs = FileSystem::open(&bytes).unwrap();
    assert!(items(&fs) != tree, "the kernel made a fast commit");
    assert!(
        fs.incomplete()
            .is_some_and(|what| what.contains("fast commits")),
        "{:?}",
        fs.incomplete()
    );
}

fn at_once(at: &Mounted, name: &str) {
    at.write(name, 0, name.as_bytes());
    File::open(at.path(name)).unwrap().sync_all().unwrap();
}

/// Whether the disk reads differently when it is marked as clean.
fn differs_without_journal(bytes: &[u8]) -> bool {
    let mut raw = bytes.to_vec();
    raw[1024 + 96] &= !4;
    diff(&raw, &bytes.to_vec(), None, Options::default())
        .map_or(true, |diff| !diff.changes.is_empty())
}
