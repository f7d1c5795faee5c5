//! Warm images: a boot happens once per image and shape.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::{layers, remove};
use crate::support::held;
use crate::support::{World, kernel_states, warm_states};

/// The time at which the guest's kernel read its clock during its boot. It identifies the boot,
/// also after restores.
pub(super) fn boot_of(world: &World, sandbox: &str) -> String {
    let answer = world.sh(sandbox, "dmesg | grep 'setting system clock to'");
    assert_eq!(answer.code, 0, "{answer:?}");
    answer.out().to_owned()
}

/// Replaces a layer of the warm state by a file with other bytes, because other stores link to the
/// old file.
pub(super) fn damage(path: &Path) {
    let bytes = fs::read(path).unwrap();
    let new = path.with_extension("new");
    fs::write(&new, &bytes[..bytes.len() / 2]).unwrap();
    fs::rename(new, path).unwrap();
}

/// The memory layer that only the warm image has. It shares the others with the kernel state that
/// it was booted from.
fn warm_memory(world: &World) -> PathBuf {
    let states = warm_states(world.home());
    assert_eq!(states.len(), 1, "one shape, one state");
    let shared: BTreeSet<OsString> = kernel_states(world.home())
        .iter()
        .flat_map(|state| layers(&state.join("memory"), ".mem"))
        .filter_map(|layer| layer.file_name().map(OsStr::to_owned))
        .collect();
    let is_own = |layer: &PathBuf| layer.file_name().is_some_and(|name| !shared.contains(name));
    layers(&states[0].join("memory"), ".mem")
        .into_iter()
        .find(is_own)
        .expect("it has memory of its own")
}

#[test]
fn a_boot_happens_once_and_again_when_needed() {
    let world = World::new();
    world.start("a", &[]);
    world.start("b", &[]);
    assert_eq!(
        boot_of(&world, "a"),
        boot_of(&world, "b"),
        "both continue from one boot"
    );
    for (file, line) in [
        ("machine-id", "cat /etc/machine-id"),
        ("name", "hostname"),
        ("id", "cat /proc/sys/kernel/random/uuid"),
    ] {
        assert_ne!(
            world.sh("a", line).out(),
            world.sh("b", line).out(),
            "{file}"
        );
    }
    assert_eq!(
        (
            world.sh("a", "hostname").out(),
            world.sh("b", "hostname").out()
        ),
        ("a\n", "b\n")
    );
    assert!(
        !world.ok(["logs", "b"]).out().contains("Linux version"),
        "a restored guest has no boot on its console"
    );
    world.start("cold", &["--cold"]);
    assert_ne!(boot_of(&world, "cold"), boot_of(&world, "a"));
    let memory = warm_memory(&world);

    // An unusable warm image is reported and made again.
    world.ok(["rm", "-f", "b"]);
    damage(&memory);
    let answer = world.run(["run", "-d", "--name", "b", "tiny"]);
    assert!(
        answer.code == 0
            && answer
                .err()
                .contains("note: the booted state of its image did not load"),
        "{answer:?}"
    );
    let degraded = world.inspect("b")["degraded"].to_string();
    assert!(
        degraded.contains("did not load") && degraded.contains("warm_image_unusable"),
        "{degraded}"
    );
    assert_ne!(warm_memory(&world), memory, "another one took its place");
    world.start("c", &[]);
    assert_eq!(boot_of(&world, "c"), boot_of(&world, "b"));
    assert_eq!(
        world.inspect("c")["degraded"],
        serde_json::Value::Array(Vec::new())
    );
    // Sandboxes of the old warm image are unharmed.
    assert_eq!(
        world
            .sh("a", "sha256sum /bin/busybox > /dev/null && echo whole")
            .out(),
        "whole\n"
    );
    remove(&world, &["a", "b", "c", "cold"]);
}

#[test]
fn a_larger_disk_grows_in_a_warm_guest() {
    let world = World::new();
    world.start("big", &["--disk", "1G"]);
    world.start("small", &[]);
    assert_eq!(
        boot_of(&world, "big"),
        boot_of(&world, "small"),
        "a disk's size is no other shape"
    );
    let kib = |sandbox: &str| -> u64 {
        world
            .sh(sandbox, "df -k / | tail -n 1 | awk '{print $2}'")
            .out()
            .trim()
            .parse()
            .unwrap()
    };
    assert!((950_000..1_050_000).contains(&kib("big")), "{}", kib("big"));
    assert!((30_000..66_000).contains(&kib("small")), "{}", kib("small"));
    let filled = world.sh(
        "big",
        "dd if=/dev/urandom of=/srv/big bs=1M count=150 2>/dev/null && sync && sha256sum /srv/big",
    );
    assert_eq!(filled.code, 0, "{filled:?}");
    held::begin(&world, "big", "one");
    world.ok(["checkpoint", "big", "base"]);
    world.sh("big", "rm /srv/big");
    world.ok(["revert", "big", "base"]);
    held::assert_holds(&world, "big", "one", 0);
    assert_eq!(world.sh("big", "sha256sum /srv/big").out(), filled.out());
    world.ok(["stop", "big"]);
    world.ok(["start", "big"]);
    assert_eq!(world.sh("big", "sha256sum /srv/big").out(), filled.out());
    assert!((950_000..1_050_000).contains(&kib("big")));
    remove(&world, &["big", "small"]);
}

/// So a restored guest gets them without a write to its disk, and no comparison shows them.
#[test]
fn the_names_of_a_guest_are_in_memory_and_its_own_lines_stay() {
    let world = World::new();
    world.start("a", &[]);
    assert_eq!(world.sh("a", "echo 10.0.0.7 db >> /etc/hosts").code, 0);
    world.ok(["fork", "a", "-n", "1", "--name", "b"]);
    let hosts = world.sh("b-1", "cat /etc/hosts");
    assert!(
        hosts.out().contains("\n127.0.1.1 b-1 # sandtree\n") && hosts.out().contains("10.0.0.7 db"),
        "{hosts:?}"
    );
    assert!(!hosts.out().contains("127.0.1.1 a "), "{hosts:?}");
    assert_eq!(world.sh("b-1", "cat /etc/hostname").out(), "b-1\n");
    world.ok(["save", "a", "of-a"]);
    world.ok(["save", "b-1", "of-b"]);
    let diff = world.json(["snapshot", "diff", "of-a", "of-b"]);
    let changed = diff["changes"].as_array().unwrap();
    assert!(
        changed
            .iter()
            .all(|change| !change["path"].as_str().unwrap().starts_with("/etc")),
        "{diff}"
    );
}
