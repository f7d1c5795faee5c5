//! Places of stores and memory layers: other file systems, other directories, other users.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{dir_of, layers, remove};
use crate::support::World;
use crate::support::held;
use crate::support::mount::{Mount, is_root};
use crate::support::ordinary::Ordinary;

/// Each verb that creates, moves or removes layers, once.
fn everything(world: &World, options: &[&str]) {
    world.start("a", options);
    held::begin(world, "a", "one");
    let taken = world.json(["checkpoint", "a", "base"]);
    assert_eq!(taken["degraded"], Value::Array(Vec::new()), "{taken}");
    held::write(world, "a", "two");
    world.ok(["fork", "a", "--name", "b"]);
    held::assert_holds(world, "b-1", "two", 0);
    world.ok(["revert", "a", "base"]);
    held::assert_holds(world, "a", "one", 0);
    world.ok(["undo", "a"]);
    held::assert_holds(world, "a", "two", 0);
    world.ok(["pause", "a", "b-1"]);
    world.ok(["resume", "a", "b-1"]);
    held::assert_holds(world, "a", "two", 1);
    held::assert_holds(world, "b-1", "two", 1);
}

fn on(kind: &str) {
    let mount = if kind == "tmpfs" {
        Mount::tmpfs(1024)
    } else {
        Mount::of_kind(kind, 1024)
    };
    let Some(mount) = mount else { return };
    let world = World::at(mount.path().join("home"));
    everything(&world, &[]);
    remove(&world, &["a", "b-1"]);
}

#[test]
fn a_store_may_be_on_ext4() {
    on("ext4");
}

#[test]
fn a_store_may_be_on_xfs() {
    on("xfs");
}

#[test]
fn a_store_may_be_on_btrfs() {
    on("btrfs");
}

#[test]
fn a_store_may_be_on_tmpfs() {
    on("tmpfs");
}

#[test]
fn memory_may_be_kept_on_another_file_system() {
    let Some(mount) = Mount::tmpfs(800) else {
        return;
    };
    let world = World::new();
    let place = mount.path().to_str().unwrap();
    everything(&world, &["--memory-dir", place]);
    for name in ["a", "b-1"] {
        let own = mount
            .path()
            .join(world.inspect(name)["id"].as_str().unwrap());
        assert!(!layers(&own, ".mem").is_empty(), "{name} keeps none there");
        assert_eq!(
            layers(&dir_of(&world, name).join("memory"), ".mem"),
            Vec::<std::path::PathBuf>::new()
        );
    }
    world.ok(["rm", "-f", "b-1"]);
    held::assert_holds(&world, "a", "two", 2);
    remove(&world, &["a"]);
    assert_eq!(entries(mount.path()), 0, "something is left in {place}");
    world
        .run(["run", "-d", "--memory-dir", "/nonexistent/dir", "tiny"])
        .failed_with(&["/nonexistent/dir"]);
    world.assert_empty();
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

/// A full memory directory fails the capture, and nothing else.
#[test]
fn a_full_memory_directory_does_not_prevent_a_revert() {
    let Some(mount) = Mount::tmpfs(300) else {
        return;
    };
    let world = World::new();
    world.start("a", &["--memory-dir", mount.path().to_str().unwrap()]);
    held::begin(&world, "a", "one");
    world.ok(["checkpoint", "a", "base"]);
    held::write(&world, "a", "two");
    mount.fill(0);
    world
        .run(["checkpoint", "a"])
        .failed_with(&["No space left"]);
    world.run(["pause", "a"]).failed_with(&["No space left"]);
    world.run(["fork", "a"]).failed_with(&["No space left"]);
    held::assert_holds(&world, "a", "two", 0);
    let reverted = world.json(["revert", "a", "base"]);
    assert!(
        reverted["dropped"]
            .as_str()
            .unwrap()
            .contains("No space left"),
        "{reverted}"
    );
    held::assert_holds(&world, "a", "one", 0);
    mount.empty_again();
    // The failed capture is in no state, and the next one lacks nothing.
    held::write(&world, "a", "three");
    world.ok(["checkpoint", "a", "after"]);
    held::write(&world, "a", "four");
    world.ok(["revert", "a", "after"]);
    held::assert_holds(&world, "a", "three", 0);
    remove(&world, &["a"]);
}

#[test]
fn an_ordinary_user_can_use_states() {
    if !is_root() {
        return eprintln!("not checked: every other test of an ordinary user's run is this one");
    }
    let user = Ordinary::new();
    let json = |args: &[&str]| -> Value {
        serde_json::from_slice(&user.ok(&[&["--json"], args].concat()).stdout).unwrap()
    };
    user.ok(&["run", "-d", "--name", "a", "tiny"]);
    let put = |word: &str| {
        drop(user.ok(&[
            "exec",
            "a",
            "--",
            "sh",
            "-c",
            &format!("echo {word} | tee /srv/w > /run/w"),
        ]))
    };
    let has = |sandbox: &str| {
        user.ok(&["exec", sandbox, "--", "cat", "/srv/w", "/run/w"])
            .out()
            .to_owned()
    };
    put("one");
    let taken = json(&["checkpoint", "a", "base"]);
    assert_eq!(taken["degraded"], Value::Array(Vec::new()), "{taken}");
    put("two");
    user.ok(&["fork", "a", "--name", "b", "-n", "2"]);
    user.ok(&["revert", "a", "base"]);
    assert_eq!(
        (has("a"), has("b-1"), has("b-2")),
        (
            "one\none\n".into(),
            "two\ntwo\n".into(),
            "two\ntwo\n".into()
        )
    );
    user.ok(&["undo", "a"]);
    user.ok(&["pause", "a"]);
    user.ok(&["resume", "a"]);
    assert_eq!(has("a"), "two\ntwo\n");
    user.ok(&["redo", "a"]);
    user.ok(&["checkpoint", "rm", "a", "--all"]);
    user.ok(&["stop", "a"]);
    user.ok(&["rm", "-f", "a", "b-1", "b-2"]);
    user.world.assert_empty();
}
