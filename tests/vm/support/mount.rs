//! File systems of a test's own, unmounted when they are dropped.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct Mount {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Mount {
    /// A file system in memory, as small as it is asked to be. Nothing if we may not mount.
    pub fn tmpfs(mib: u32) -> Option<Mount> {
        let options = format!("size={mib}m,mode=0755");
        Self::mounted(&["-t", "tmpfs", "-o", &options, "none"], tempfile_dir())
    }

    /// A file system of a kind, in a sparse file. Nothing if we may not mount.
    pub fn of_kind(kind: &str, mib: u64) -> Option<Mount> {
        let dir = tempfile_dir();
        let image = dir.path().join("image");
        fs::File::create(&image).unwrap().set_len(mib << 20).unwrap();
        // starts: mkfs.btrfs, mkfs.exfat, mkfs.ext4, mkfs.xfs
        let made = Command::new(format!("/usr/sbin/mkfs.{kind}")).arg("-q").arg(&image).output();
        let made = made.unwrap_or_else(|e| panic!("mkfs.{kind}: {e}; scripts/setup installs it"));
        assert!(made.status.success(), "mkfs.{kind}: {}", String::from_utf8_lossy(&made.stderr));
        Self::mounted(&["-t", kind, "-o", "loop", image.to_str().unwrap()], dir)
    }

    fn mounted(args: &[&str], dir: tempfile::TempDir) -> Option<Mount> {
        let path = dir.path().join("mounted");
        fs::create_dir(&path).unwrap();
        if !is_root() {
            eprintln!("not checked: mounting a file system takes root");
            return None;
        }
        let mounted = Command::new("mount").args(args).arg(&path).status().unwrap();
        assert!(mounted.success(), "mount {args:?}");
        Some(Mount { path, _dir: dir })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves so many KiB.
    pub fn fill(&self, leave_kib: u64) {
        let status = rustix::fs::statvfs(&self.path).unwrap();
        let free = status.f_bavail * status.f_frsize;
        let file = fs::File::create(self.filler()).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, free - (leave_kib << 10)).unwrap();
    }

    pub fn empty_again(&self) {
        fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily, for a test that fails may leave a process in it for a moment.
        let status = Command::new("umount").arg("-l").arg(&self.path).status();
        assert!(status.unwrap().success() || std::thread::panicking(), "{} stays mounted", self.path.display());
    }
}

fn tempfile_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("st-").tempdir().unwrap()
}

pub fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}
