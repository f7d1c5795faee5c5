//! Other kernels: the full one, and the user's own, which is the store's kernel imported from a
//! file.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{digest, end, files, image, say, text};
use crate::support::World;

/// Modules of the image that Debian's kernel for virtual machines has built in.
const BUILT_IN: &str = "kernel/fs/ext4/ext4.ko\nkernel/drivers/virtio/virtio_pci.ko\nkernel/drivers/char/virtio_console.ko\n";

/// The kernel and the modules of `tiny`, as files that a user could have built.
fn own(world: &World, dir: &Path) -> (PathBuf, PathBuf) {
    let bundle = world
        .home()
        .join("kernels")
        .join(text(&image(world, "tiny")["kernel"]));
    let kernel = dir.join("vmlinux");
    let modules = dir.join("modules");
    fs::copy(bundle.join("kernel"), &kernel).unwrap();
    fs::create_dir(&modules).unwrap();
    for module in fs::read_dir(bundle.join("modules")).unwrap().flatten() {
        fs::copy(module.path(), modules.join(module.file_name())).unwrap();
    }
    fs::write(modules.join("modules.builtin"), BUILT_IN).unwrap();
    (kernel, modules)
}

fn cpio(dir: &Path) -> PathBuf {
    let file = dir.join("early");
    let archive = dir.join("own.cpio");
    fs::write(file, "early").unwrap();
    let mut command = Command::new("cpio");
    command
        .args(["-o", "-H", "newc", "--quiet"])
        .current_dir(dir)
        .stdin(Stdio::piped());
    let mut child = command
        .stdout(fs::File::create(&archive).unwrap())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"early\n").unwrap();
    assert!(child.wait().unwrap().success());
    archive
}

#[test]
fn a_users_own_kernel_boots_the_same_root() {
    let world = World::new();
    let dir = files();
    let (kernel, modules) = own(&world, dir.path());
    let archive = cpio(dir.path());
    let before = image(&world, "tiny");
    let release = world.ok(["run", "tiny", "--", "uname", "-r"]);
    let options: [&std::ffi::OsStr; 6] = [
        "--kernel".as_ref(),
        kernel.as_ref(),
        "--modules".as_ref(),
        modules.as_ref(),
        "--initramfs".as_ref(),
        archive.as_ref(),
    ];
    let run = ["run", "-d", "--name", "a"].map(std::ffi::OsStr::new);
    world.ok(run.into_iter().chain(options).chain(["tiny".as_ref()]));
    assert_eq!(say(&world, "a", "uname -r"), release.out().trim_end());
    // The sandbox keeps this kernel; the image keeps its own.
    world.ok(["stop", "a"]);
    world.ok(["start", "a"]);
    assert_eq!(say(&world, "a", "uname -r"), release.out().trim_end());
    world.ok(["rm", "-f", "a"]);
    assert_eq!(image(&world, "tiny")["kernel"], before["kernel"]);
    assert_eq!(digest(&world, "tiny"), text(&before["digest"]));
    // A file that is no kernel is refused before anything starts.
    let no_kernel = dir.path().join("early");
    world
        .run(["run", "--kernel", no_kernel.to_str().unwrap(), "tiny"])
        .failed_with(&["bzImage"]);
    end(&world, &["tiny"]);
    assert_eq!(
        super::entries(&world.home().join("kernels")).len(),
        1,
        "the other kernel is unused and removed"
    );
}

/// The full kernel has the drivers that a desktop needs, and its machines are stopped, captured and
/// copied like others.
#[test]
fn the_full_kernel_boots_and_has_a_driver_for_a_screen() {
    let world = World::new();
    let dir = files();
    let recipe = dir.path().join("desk.toml");
    fs::write(&recipe, "from = \"tiny\"\nkernel = \"full\"\n").unwrap();
    world.ok(["image".as_ref(), "build".as_ref(), recipe.as_os_str()]);
    assert_ne!(
        image(&world, "desk")["kernel"],
        image(&world, "tiny")["kernel"]
    );
    world.ok(["run", "-d", "--name", "a", "desk"]);
    let release = say(&world, "a", "uname -r");
    assert!(!release.contains("cloud"), "{release}");
    assert_eq!(
        say(
            &world,
            "a",
            "cd /sys/module; ls -d virtio_gpu virtio_input ext4"
        ),
        "ext4\nvirtio_gpu\nvirtio_input"
    );
    world.ok(["checkpoint", "a", "before"]);
    say(&world, "a", "touch /after");
    world.ok(["revert", "a", "before"]);
    assert_eq!(
        say(&world, "a", "ls /after 2>&1 || uname -r")
            .lines()
            .last(),
        Some(release.as_str())
    );
    world.ok(["stop", "a"]);
    world.ok(["rm", "a"]);
    end(&world, &["desk", "tiny"]);
}
