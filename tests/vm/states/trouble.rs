//! Reverts with a problem: in the present, in the store, or in the states.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;

use super::{dir_of, json_error, layers, pid, remove, tags, until_gone};
use crate::support::held;
use crate::support::mount::Mount;
use crate::support::{World, finish, kill, until};

/// A sandbox that holds `two`, with a checkpoint `base` that holds `one`.
fn with_base(world: &World, options: &[&str]) -> Value {
    let made = world.start("a", options);
    held::begin(world, "a", "one");
    world.ok(["checkpoint", "a", "base"]);
    held::write(world, "a", "two");
    made
}

/// Reverts to `base` in any condition of the present, and returns the answer.
fn revert(world: &World, made: &Value) -> Value {
    let reverted = world.json(["revert", "a", "base"]);
    held::assert_holds(world, "a", "one", 0);
    let info = world.inspect("a");
    assert_eq!(
        (&info["id"], &info["state"], &info["ports"]),
        (&made["id"], &"running".into(), &made["ports"])
    );
    reverted
}

#[test]
fn a_sandbox_at_rest_is_reverted_and_its_disk_is_kept() {
    let world = World::new();
    let made = with_base(&world, &["--publish", "0:80"]);
    world.ok(["stop", "a"]);
    let reverted = revert(&world, &made);
    assert!(
        reverted["left"].is_string() && reverted["dropped"].is_null(),
        "{reverted}"
    );
    // The left state has no memory: returning to it is a boot of its disk.
    world.ok(["undo", "a"]);
    held::assert_disk_holds(&world, "a", "two");
    world.ok(["revert", "a", "base"]);
    held::assert_holds(&world, "a", "one", 0);

    held::write(&world, "a", "three");
    world.ok(["pause", "a"]);
    let reverted = revert(&world, &made);
    assert!(
        reverted["left"].is_string() && reverted["dropped"].is_null(),
        "{reverted}"
    );
    // The left state is the one that the sandbox was paused in.
    world.ok(["undo", "a"]);
    held::assert_holds(&world, "a", "three", 0);
    remove(&world, &["a"]);
}

#[test]
fn a_crashed_sandbox_is_reverted() {
    let world = World::new();
    let made = with_base(&world, &["--publish", "0:80"]);
    assert_eq!(world.sh("a", "sync").code, 0);
    kill(pid(&world, "a", "qemu_pid"), "KILL");
    until("it has crashed", || {
        world.inspect("a")["state"] == "crashed"
    });
    let reverted = revert(&world, &made);
    assert!(
        reverted["left"].is_string(),
        "its disk is there: {reverted}"
    );

    world
        .sh("a", "echo c > /proc/sysrq-trigger")
        .failed_with(&["panic"]);
    until("it has crashed", || {
        world.inspect("a")["state"] == "crashed"
    });
    revert(&world, &made);

    let keeper = pid(&world, "a", "keeper_pid");
    let qemu = pid(&world, "a", "qemu_pid");
    kill(keeper, "KILL");
    until_gone(qemu);
    revert(&world, &made);
    world.ok(["undo", "-n", "3", "a"]);
    held::assert_disk_holds(&world, "a", "two");
    remove(&world, &["a"]);
}

#[test]
fn a_guest_whose_agent_hangs_is_reverted_and_kept() {
    let world = World::new();
    let made = with_base(&world, &[]);
    // The agent is process 1, which signals from inside the guest cannot stop. A frozen control
    // group stops it.
    let freeze = "mkdir /sys/fs/cgroup/ice; echo 1 > /sys/fs/cgroup/ice/cgroup.procs; \
        echo 1 > /sys/fs/cgroup/ice/cgroup.freeze; sleep 1000";
    let mut command = world.command();
    let waiting = command
        .args(["exec", "a", "--", "sh", "-c", freeze])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let waiting = waiting.spawn().unwrap();
    until("the agent is deaf", || {
        world.run(["--json", "stats", "a"]).code != 0
    });
    let reverted = revert(&world, &made);
    assert!(
        reverted["left"].is_string(),
        "its memory is there: {reverted}"
    );
    finish(waiting).failed_with(&["the sandbox was reverted to base"]);
    remove(&world, &["a"]);
}

#[test]
fn a_hanging_machine_is_dropped_and_reported() {
    let world = World::new();
    let made = with_base(&world, &["--publish", "0:80"]);
    let qemu = pid(&world, "a", "qemu_pid");
    kill(qemu, "STOP");
    let reverted = revert(&world, &made);
    assert!(reverted["left"].is_null(), "{reverted}");
    let why = reverted["dropped"]
        .as_str()
        .expect("it says what was dropped");
    assert!(why.contains("QEMU") && why.contains("answer"), "{why}");
    until_gone(qemu);
    assert_eq!(
        tags(&world, "a"),
        ["base"],
        "nothing of the present is left"
    );
    remove(&world, &["a"]);
}

#[test]
fn a_full_store_does_not_prevent_a_revert() {
    let Some(disk) = Mount::tmpfs(600) else {
        return;
    };
    let world = World::at(disk.path().join("home"));
    let made = with_base(&world, &[]);
    // More than fits on the disk, so that the present cannot be kept.
    assert_eq!(
        world
            .sh("a", "dd if=/dev/urandom of=/run/big bs=1M count=24")
            .code,
        0
    );
    disk.fill(8 << 10);
    let answer = world.run(["checkpoint", "a", "more"]);
    answer.failed_with(&["No space left"]);
    assert_eq!(
        tags(&world, "a"),
        ["base"],
        "nothing is left of a checkpoint that failed"
    );
    held::assert_holds(&world, "a", "two", 0);
    let reverted = revert(&world, &made);
    assert!(
        reverted["left"].is_null()
            && reverted["dropped"]
                .as_str()
                .unwrap()
                .contains("No space left"),
        "{reverted}"
    );
    let shown = world.ok(["revert", "a", "base"]);
    assert!(
        !shown.err().contains("could not be kept"),
        "what is small fits: {shown:?}"
    );
    // With no free byte: the sandbox has a reserve.
    disk.empty_again();
    disk.fill(0);
    let reverted = revert(&world, &made);
    assert!(
        reverted["dropped"]
            .as_str()
            .unwrap()
            .contains("No space left"),
        "{reverted}"
    );
    disk.empty_again();
    world.ok(["checkpoint", "a", "more"]);
    held::assert_holds(&world, "a", "one", 1);
    remove(&world, &["a"]);
}

/// Changes bytes of a file of a state, in a new file: others may link to the old one.
fn damage(path: &Path, offset: u64) {
    let mut bytes = fs::read(path).unwrap();
    let at = usize::try_from(offset).unwrap();
    bytes[at..at + 8].iter_mut().for_each(|byte| *byte = !*byte);
    replace(path, &bytes);
}

fn replace(path: &Path, bytes: &[u8]) {
    let new = path.with_extension("new");
    fs::write(&new, bytes).unwrap();
    fs::rename(new, path).unwrap();
}

/// The memory layers and disk layers of a state.
fn layers_of(world: &World, tag: &str) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let dir = dir_of(world, "a");
    let states = world.json(["log", "a"]);
    let state = states
        .as_array()
        .unwrap()
        .iter()
        .find(|state| state["tag"] == tag)
        .unwrap();
    let manifest = dir
        .join("states")
        .join(state["id"].as_str().unwrap())
        .join("manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    let paths = |list: &Value, place: &str, end: &str| -> Vec<PathBuf> {
        let ids = list
            .as_array()
            .unwrap_or_else(|| panic!("{manifest}"))
            .iter();
        ids.map(|id| {
            dir.join(place)
                .join(format!("{}{end}", id.as_str().unwrap()))
        })
        .collect()
    };
    let memory = manifest["memory"]
        .as_object()
        .unwrap()
        .values()
        .find_map(|value| {
            value
                .get("layers")
                .or(Some(value))
                .filter(|value| value.is_array())
        });
    (
        paths(memory.unwrap(), "memory", ".mem"),
        paths(&manifest["disk"], "disks", ".qcow2"),
    )
}

#[test]
fn an_incomplete_state_is_refused_before_anything_changes() {
    let world = World::new();
    with_base(&world, &[]);
    let (memory, disk) = layers_of(&world, "base");
    let memory = memory.last().unwrap();
    let disk = disk.last().unwrap();
    let qemu = pid(&world, "a", "qemu_pid");
    let mut times = 0;
    let mut refused = |what: &str, word: &str| {
        let answer = world.run(["revert", "a", "base"]);
        answer.failed_with(&["state base is not whole", word, "sandtree log"]);
        assert_eq!(
            json_error(&world.run(["--json", "revert", "a", "base"]))["kind"],
            "corrupt",
            "{what}"
        );
        assert_eq!(pid(&world, "a", "qemu_pid"), qemu, "{what}");
        assert_eq!(
            tags(&world, "a"),
            ["base"],
            "{what}: nothing was kept of the present, for it was not left"
        );
        held::assert_holds(&world, "a", "two", times);
        times += 1;
    };
    let aside = |path: &Path| path.with_extension("aside");
    for path in [memory, disk] {
        fs::rename(path, aside(path)).unwrap();
        refused("missing", path.file_name().unwrap().to_str().unwrap());
        let whole = fs::read(aside(path)).unwrap();
        replace(path, &whole[..whole.len() / 2]);
        refused("cut", path.file_name().unwrap().to_str().unwrap());
        replace(path, &whole);
        // The checksum of a memory layer's header, and the table of a disk layer.
        damage(
            path,
            if path == memory {
                16
            } else {
                first_table(path)
            },
        );
        refused("damaged", path.file_name().unwrap().to_str().unwrap());
        fs::rename(aside(path), path).unwrap();
    }
    world.ok(["revert", "a", "base"]);
    held::assert_holds(&world, "a", "one", 0);
    world
        .run(["revert", "a", "nosuch"])
        .failed_with(&["sandbox a has no state nosuch", "sandtree log"]);
    assert_eq!(
        json_error(&world.run(["--json", "revert", "a", "nosuch"]))["kind"],
        "not_found"
    );
    remove(&world, &["a"]);
}

/// The offset of a qcow2's first-level table.
fn first_table(path: &Path) -> u64 {
    let mut offset = [0; 8];
    File::open(path)
        .unwrap()
        .read_exact_at(&mut offset, 40)
        .unwrap();
    u64::from_be_bytes(offset)
}

#[test]
fn a_checkpoint_over_lost_layers_is_complete_and_reports_it() {
    let world = World::new();
    with_base(&world, &[]);
    world.ok(["checkpoint", "a", "next"]);
    held::write(&world, "a", "three");
    let line =
        "dd if=/dev/urandom of=/srv/file bs=64k count=40 2>/dev/null; sync; sha256sum /srv/file";
    let digest = world.sh("a", line).out().to_owned();
    let (memory, disk) = layers_of(&world, "next");
    fs::remove_file(memory.last().unwrap()).unwrap();
    let taken = world.json(["checkpoint", "a", "memory"]);
    assert_eq!(taken["degraded"][0]["code"], "whole_memory", "{taken}");
    assert!(
        taken["degraded"]
            .to_string()
            .contains("all of memory was captured"),
        "{taken}"
    );
    assert!(
        !taken["degraded"].to_string().contains("disk"),
        "the disk is whole: {taken}"
    );
    damage(disk.last().unwrap(), first_table(disk.last().unwrap()));
    let shown = world.ok(["checkpoint", "a", "disk"]);
    assert!(
        shown.err().contains("note: the whole disk was copied"),
        "{shown:?}"
    );
    let both = fs::read(disk.first().unwrap())
        .map(|_| disk.first().unwrap().clone())
        .unwrap();
    held::write(&world, "a", "four");

    // All earlier states are removed; a complete checkpoint does not need them.
    let (kept_memory, kept_disk) = layers_of(&world, "disk");
    for path in memory
        .iter()
        .chain(&disk)
        .chain([&both])
        .filter(|path| path.exists())
    {
        assert!(
            !kept_memory.contains(path) && !kept_disk.contains(path),
            "{} is still stood on",
            path.display()
        );
        fs::remove_file(path).unwrap();
    }
    world.ok(["revert", "a", "disk"]);
    held::assert_holds(&world, "a", "three", 0);
    let again = world.sh(
        "a",
        "echo 3 > /proc/sys/vm/drop_caches; sha256sum /srv/file",
    );
    assert_eq!(again.out(), digest);
    world
        .run(["revert", "a", "base"])
        .failed_with(&["state base is not whole", "is missing"]);
    // From here on, checkpoints are as usual.
    let taken = world.json(["checkpoint", "a", "after"]);
    assert_eq!(taken["degraded"], Value::Array(Vec::new()), "{taken}");
    assert!(!layers(&dir_of(&world, "a").join("memory"), ".mem").is_empty());
    remove(&world, &["a"]);
}
