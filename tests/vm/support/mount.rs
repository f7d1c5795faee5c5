//! File systems of a test, unmounted when they are dropped.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub struct Mount {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Mount {
    /// A file system in memory of a given size. `None` without the privilege to mount.
    pub fn tmpfs(mib: u32) -> Option<Mount> {
        let options = format!("size={mib}m,mode=0755");
        Self::mounted(&["-t", "tmpfs", "-o", &options, "none"], tempfile_dir())
    }

    /// A file system of a given kind, in a sparse file. `None` without the privilege to mount.
    pub fn of_kind(kind: &str, mib: u64) -> Option<Mount> {
        Self::of_image(kind, &["-q"], mib, |image| {
            ["-t", kind, "-o", "loop", image]
                .map(str::to_owned)
                .to_vec()
        })
    }

    /// exFAT by FUSE: no hard links, no owners, no sockets.
    pub fn exfat(mib: u64) -> Option<Mount> {
        let mount = |image: &str| {
            ["-t", "exfat-fuse", "-o", "loop,umask=077", image]
                .map(str::to_owned)
                .to_vec()
        };
        is_fuse()
            .then(|| Self::of_image("exfat", &[], mib, mount))
            .flatten()
    }

    /// ext4 by FUSE: a rename accepts no flags, and an open file that is removed stays under
    /// another name.
    pub fn fuse(options: &str, mib: u64) -> Option<Mount> {
        let mount = |image: &str| {
            ["-t", "fuse.fuse2fs", "-o", options, image]
                .map(str::to_owned)
                .to_vec()
        };
        is_fuse()
            .then(|| Self::of_image("ext4", &["-q", "-O", "^has_journal"], mib, mount))
            .flatten()
    }

    /// An overlay over a directory, as a container has one over its image.
    pub fn overlay(lower: &Path, upper: &Mount) -> Option<Mount> {
        let [upper, work] = ["upper", "work"].map(|name| upper.path().join(name));
        [&upper, &work]
            .iter()
            .for_each(|dir| fs::create_dir(dir).unwrap());
        let dirs = [
            ("lowerdir", lower),
            ("upperdir", &upper),
            ("workdir", &work),
        ];
        let options = dirs
            .map(|(name, dir)| format!("{name}={}", dir.display()))
            .join(",");
        Self::mounted(&["-t", "overlay", "-o", &options, "none"], tempfile_dir())
    }

    fn of_image(
        kind: &str,
        options: &[&str],
        mib: u64,
        mount: impl Fn(&str) -> Vec<String>,
    ) -> Option<Mount> {
        let dir = tempfile_dir();
        let image = dir.path().join("image");
        fs::File::create(&image)
            .unwrap()
            .set_len(mib << 20)
            .unwrap();
        // starts: mkfs.btrfs, mkfs.exfat, mkfs.ext4, mkfs.xfs
        let made = Command::new(format!("/usr/sbin/mkfs.{kind}"))
            .args(options)
            .arg(&image)
            .output();
        let made = made.unwrap_or_else(|e| panic!("mkfs.{kind}: {e}; scripts/setup installs it"));
        assert!(
            made.status.success(),
            "mkfs.{kind}: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        let args = mount(image.to_str().unwrap());
        Self::mounted(&args.iter().map(String::as_str).collect::<Vec<_>>(), dir)
    }

    fn mounted(args: &[&str], dir: tempfile::TempDir) -> Option<Mount> {
        let path = dir.path().join("mounted");
        fs::create_dir(&path).unwrap();
        if !is_root() {
            eprintln!("not checked: mounting a file system takes root");
            return None;
        }
        let mounted = Command::new("mount")
            .args(args)
            .arg(&path)
            .status()
            .unwrap();
        assert!(mounted.success(), "mount {args:?}");
        Some(Mount { path, _dir: dir })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills the file system except for this many KiB.
    pub fn fill(&self, leave_kib: u64) {
        let status = rustix::fs::statvfs(&self.path).unwrap();
        let free = status.f_bavail * status.f_frsize;
        let file = fs::File::create(self.filler()).unwrap();
        rustix::fs::fallocate(
            &file,
            rustix::fs::FallocateFlags::empty(),
            0,
            free - (leave_kib << 10),
        )
        .unwrap();
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
        // A lazy unmount, because a failing test may leave a process in it for a moment.
        let status = Command::new("umount").arg("-l").arg(&self.path).status();
        assert!(
            status.unwrap().success() || std::thread::panicking(),
            "{} stays mounted",
            self.path.display()
        );
    }
}

fn tempfile_dir() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("st-").tempdir().unwrap()
}

fn is_fuse() -> bool {
    let is_fuse = Path::new("/dev/fuse").exists();
    if !is_fuse {
        eprintln!("not checked: there is no /dev/fuse here");
    }
    is_fuse
}

pub fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}
