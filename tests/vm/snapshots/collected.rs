//! What is removed and what stays: the middle of a tree, the last name, and the use of the disk.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;

use super::{
    assert_nothing_staged, entries, names, published, put, remove, saved_with_memory, stopped, text,
};
use crate::support::World;
use crate::support::held;

/// The disk space of files that are not in `seen`, and of directories.
fn taken(path: &Path, seen: &mut BTreeSet<(u64, u64)>) -> u64 {
    let stat = fs::symlink_metadata(path).unwrap();
    let own = if seen.insert((stat.dev(), stat.ino())) {
        stat.blocks() * 512
    } else {
        0
    };
    let below = if stat.is_dir() {
        entries(path).iter().map(|entry| taken(entry, seen)).sum()
    } else {
        0
    };
    own + below
}

/// Asserts that `df` reports the real sizes, counted by other means.
fn assert_adds_up(world: &World) -> Value {
    let usage = world.json(["df"]);
    let kinds = usage["kinds"].as_array().unwrap();
    let sum = |field: &str| {
        kinds
            .iter()
            .map(|kind| kind[field].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(usage["bytes"], sum("bytes"), "{usage}");
    assert_eq!(
        usage["reclaimable_bytes"],
        sum("reclaimable_bytes"),
        "{usage}"
    );
    let mut seen = BTreeSet::new();
    let dirs = [
        "images",
        "kernels",
        "snapshots",
        "layers",
        "warm",
        "sandboxes",
        "initramfs",
        "cache",
        "staging",
        "quarantine",
    ];
    let in_dirs: u64 = dirs
        .iter()
        .flat_map(|dir| entries(&world.home().join(dir)))
        .map(|e| taken(&e, &mut seen))
        .sum();
    let index =
        fs::metadata(world.home().join("index.sqlite")).map_or(0, |stat| stat.blocks() * 512);
    assert_eq!(usage["bytes"], in_dirs + index, "{usage}");
    usage
}

fn kind<'a>(usage: &'a Value, kind: &str) -> &'a Value {
    usage["kinds"]
        .as_array()
        .unwrap()
        .iter()
        .find(|found| found["kind"] == kind)
        .expect("it is listed")
}

/// `gc --dry-run` changes nothing, and reports what `gc` then does.
fn collect(world: &World) -> Value {
    let before = published(world);
    let would = world.json(["gc", "--dry-run"]);
    assert!(published(world) == before, "a dry run removed something");
    assert_eq!(world.json(["df"])["reclaimable_bytes"], would["bytes"]);
    let done = world.json(["gc"]);
    assert_eq!(done, would);
    let removed = done["removed"].as_array().unwrap();
    assert_eq!(
        done["bytes"],
        removed
            .iter()
            .map(|garbage| garbage["bytes"].as_u64().unwrap())
            .sum::<u64>()
    );
    assert_nothing_staged(world);
    done
}

#[test]
fn removing_a_middle_snapshot_keeps_its_children_whole() {
    let world = World::new();
    saved_with_memory(&world, "a", "one", "first");
    world.ok(["rm", "-f", "a"]);
    for (from, name, word) in [("first", "second", "two"), ("second", "third", "three")] {
        world.ok(["run", "-d", "--name", name, from]);
        held::write(&world, name, word);
        world.ok(["save", name, name, "--memory"]);
    }
    let digests = ["first", "second", "third"].map(|name| super::digest(&world, name));
    let parent =
        |name: &str| world.json(["snapshot", "inspect", name])["manifest"]["parent"].clone();
    assert_eq!(
        (parent("second"), parent("third")),
        (digests[0].clone().into(), digests[1].clone().into())
    );
    let drawn = world.ok(["log", "--all"]).out().to_owned();
    let depth = |drawn: &str, what: &str| {
        let line = drawn
            .lines()
            .find(|line| line.contains(what))
            .unwrap_or_else(|| panic!("no {what}: {drawn}"));
        line.find(what).unwrap()
    };
    let depths =
        ["snapshot first", "snapshot second", "snapshot third"].map(|what| depth(&drawn, what));
    assert!(depths[0] < depths[1] && depths[1] < depths[2], "{drawn}");

    // The middle snapshot is removed while a sandbox of it runs.
    world.ok(["snapshot", "rm", "second"]);
    collect(&world);
    assert_eq!(names(&world), ["first", "third"]);
    assert!(!world.home().join("snapshots").join(&digests[1]).exists());
    for name in ["first", "third"] {
        world.ok(["snapshot", "verify", name]);
    }
    held::assert_holds(&world, "third", "three", 0);
    held::assert_holds(&world, "second", "two", 0);
    world.ok(["snapshot", "rm", "first"]);
    collect(&world);
    // Running sandboxes keep their memory and disk.
    for (name, word) in [("second", "two"), ("third", "three")] {
        assert_eq!(
            world
                .sh(
                    name,
                    "echo 3 > /proc/sys/vm/drop_caches; sha256sum /bin/busybox"
                )
                .code,
            0
        );
        world.ok(["checkpoint", name, "t"]);
        world.ok(["pause", name]);
        collect(&world);
        world.ok(["resume", name]);
        world.ok(["revert", name, "t"]);
        held::assert_holds(&world, name, word, 1);
    }
    world.ok(["rm", "-f", "second", "third"]);
    world.ok(["run", "-d", "--name", "last", "third"]);
    held::assert_holds(&world, "last", "three", 0);
    assert!(world.ok(["log", "--all"]).out().contains("snapshot third"));
    remove(&world, &["last"]);
    assert_adds_up(&world);
}

#[test]
fn removing_the_last_name_frees_a_snapshots_own_layers() {
    let world = World::new();
    world.start("a", &[]);
    world.ok(["save", "a", "s"]);
    assert_eq!(
        world
            .sh("a", "dd if=/dev/urandom of=/srv/big bs=1M count=8; sync")
            .code,
        0
    );
    world.ok(["save", "a", "big"]);
    world.ok(["snapshot", "tag", "big", "tagged"]);
    world
        .run(["snapshot", "tag", "s", "tagged"])
        .failed_with(&["the name tagged is taken"]);
    world.ok(["rm", "-f", "a"]);
    let full = assert_adds_up(&world);
    assert_eq!(
        (
            &kind(&full, "snapshots")["count"],
            &full["reclaimable_bytes"]
        ),
        (&2.into(), &0.into())
    );
    world.ok(["snapshot", "rm", "big"]);
    let bytes = |usage: &Value| kind(usage, "layers")["bytes"].as_u64().unwrap();
    let same = assert_adds_up(&world);
    assert_eq!(bytes(&same), bytes(&full), "it has another name");
    world.ok(["snapshot", "verify", "tagged"]);
    world.ok(["snapshot", "rm", "tagged"]);
    let freed = assert_adds_up(&world);
    assert!(bytes(&freed) + (8 << 20) <= bytes(&full), "{full} {freed}");
    assert_eq!(freed["reclaimable_bytes"], 0, "nothing is left for gc");
    world.ok(["snapshot", "verify", "s"]);
    world
        .run(["snapshot", "rm", "big"])
        .failed_with(&["there is no snapshot big"]);

    // After a replacement, the old content is removed, too.
    stopped(&world, "b", "two");
    let old = super::digest(&world, "s");
    world.ok(["save", "b", "s", "--force"]);
    assert!(!world.home().join("snapshots").join(old).exists());
    assert_eq!(collect(&world)["removed"], Value::Array(Vec::new()));
    world.ok(["snapshot", "verify", "s"]);
    assert_adds_up(&world);
    remove(&world, &["b"]);
    assert_adds_up(&world);
}

/// Unknown files are not removed, and the reason is reported.
#[test]
fn gc_removes_garbage_and_keeps_unknown_files() {
    let world = World::new();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s"]);
    let name = world.home().join("names/images/s");
    let content = fs::read(&name).unwrap();
    // A snapshot without its name is garbage, together with the layers that only it lists.
    fs::remove_file(&name).unwrap();
    world.ok(["rm", "a"]);
    let strange = world.home().join("layers/strange");
    fs::write(&strange, "mine").unwrap();
    let usage = assert_adds_up(&world);
    assert!(usage["reclaimable_bytes"].as_u64().unwrap() > 0, "{usage}");
    let done = collect(&world);
    let kinds: BTreeSet<&str> = done["removed"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| text(&g["kind"]))
        .collect();
    assert_eq!(kinds, BTreeSet::from(["layer", "snapshot"]), "{done}");
    assert!(strange.exists());
    // A name without a snapshot keeps everything, and is reported; without the name, all is well.
    put(&name, &content);
    let held_back = world.json(["gc"]);
    assert!(
        text(&held_back["held_back"]).contains("name s"),
        "{held_back}"
    );
    assert_eq!(names(&world), ["s"]);
    world
        .run(["run", "-d", "s"])
        .failed_with(&["there is no snapshot s"]);
    world.ok(["snapshot", "rm", "s"]);
    assert_eq!(collect(&world)["held_back"], Value::Null);
    fs::remove_file(strange).unwrap();
    remove(&world, &[]);
}
