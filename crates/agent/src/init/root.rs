//! The switch from the initramfs to the root file system.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::MountFlags;

use super::options::{Init, Options};
use super::{BootError, make_mount_point, run};
use crate::console;

const NEW_ROOT: &str = "/newroot";
const DISK_APPEARS_WITHIN: Duration = Duration::from_secs(10);

/// Mounts the root disk, frees the initramfs and makes the disk the root. The early mounts move
/// with it.
pub fn enter(options: &Options) -> Result<(), BootError> {
    wait_for(&options.root)?;
    mount_root(options)?;
    if options.init == Init::Agent {
        run::carry_over(&Path::new(NEW_ROOT).join("run"), Path::new("/run"));
    }
    for mounted in ["/dev", "/proc", "/sys", "/run"] {
        move_mount(mounted)?;
    }
    switch().map_err(BootError::Switch)?;
    make_tmp().map_err(BootError::Switch)
}

fn wait_for(device: &str) -> Result<(), BootError> {
    let deadline = Instant::now() + DISK_APPEARS_WITHIN;
    while !Path::new(device).exists() {
        if Instant::now() >= deadline {
            return Err(BootError::NoDisk {
                device: device.to_owned(),
                within: DISK_APPEARS_WITHIN,
            });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn mount_root(options: &Options) -> Result<(), BootError> {
    let Options {
        root, root_type, ..
    } = options;
    let mounted = make_mount_point(Path::new(NEW_ROOT)).and_then(|()| {
        Ok(rustix::mount::mount(
            root.as_str(),
            NEW_ROOT,
            root_type.as_str(),
            MountFlags::empty(),
            c"",
        )?)
    });
    mounted.map_err(|source| BootError::Mount {
        what: root.clone(),
        at: "the root".to_owned(),
        source,
    })
}

fn move_mount(from: &str) -> Result<(), BootError> {
    let to = format!("{NEW_ROOT}{from}");
    let missing = |source| BootError::NoMountPoint {
        at: from.to_owned(),
        source,
    };
    make_mount_point(Path::new(&to)).map_err(missing)?;
    let failed = |errno: Errno| BootError::Mount {
        what: from.to_owned(),
        at: from.to_owned(),
        source: errno.into(),
    };
    rustix::mount::mount_move(from, to.as_str()).map_err(failed)
}

fn switch() -> io::Result<()> {
    free_initramfs();
    rustix::process::chdir(NEW_ROOT)?;
    rustix::mount::mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    Ok(rustix::process::chdir("/")?)
}

/// The initramfs is memory. Files that cannot be removed stay in it, invisible.
pub fn free_initramfs() {
    let freed = fs::metadata("/").and_then(|root| remove_below(Path::new("/"), root.dev()));
    if let Err(error) = freed {
        console::say(format_args!("cannot free the initramfs: {error}"));
    }
}

/// Removes everything on the file system `device`, except mount points and other file systems.
fn remove_below(dir: &Path, device: u64) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let metadata = fs::symlink_metadata(&path)?;
        if metadata.dev() != device {
            continue;
        }
        if metadata.is_dir() {
            remove_below(&path, device)?;
            fs::remove_dir(&path)?;
        } else {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn make_tmp() -> io::Result<()> {
    match fs::create_dir("/tmp") {
        Ok(()) => fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::AlreadyExists | io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            Ok(())
        }
        Err(error) => Err(error),
    }
}
