//! The index is a cache: whatever becomes of it, everything is said as before.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::Value;

use super::{assert_nothing_staged, put, remove, stopped};
use crate::support::World;
use crate::support::mount::is_root;
use crate::support::ordinary::Ordinary;

/// All that is said of snapshots.
fn said(world: &World) -> Vec<Value> {
    let all = [
        ["snapshot", "ls"].as_slice(),
        &["snapshot", "ls", "--label", "k=v"],
        &["log", "--all"],
    ];
    let inspected = ["s-1", "s-2", "s-3"].map(|name| world.json(["snapshot", "inspect", name]));
    all.iter()
        .map(|args| world.json(*args))
        .chain(inspected)
        .collect()
}

fn index(world: &World) -> PathBuf {
    world.home().join("index.sqlite")
}

#[test]
fn whatever_becomes_of_the_index_nothing_else_is_said() {
    let world = World::new();
    stopped(&world, "a", "one");
    for name in ["s-1", "s-2", "s-3"] {
        world.ok([
            "save",
            "a",
            name,
            "--label",
            "k=v",
            "--label",
            &format!("name={name}"),
        ]);
    }
    let expected = said(&world);
    let path = index(&world);
    let whole = fs::read(&path).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0xff;
        bytes
    };
    let mut cases = vec![
        Vec::new(),
        whole[..whole.len() / 2].to_vec(),
        whole[..50].to_vec(),
        vec![0; whole.len()],
    ];
    cases.extend([b"this is no database".to_vec(), vec![0xa5; 100_000]]);
    cases.extend((0..8).map(|part| flipped((whole.len() - 1) * part / 7)));
    for (number, case) in cases.iter().enumerate() {
        put(&path, case);
        assert_eq!(said(&world), expected, "case {number}");
    }
    fs::remove_file(&path).unwrap();
    assert_eq!(said(&world), expected, "without it");
    assert!(path.exists(), "it is made again");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(said(&world), expected, "a directory in its place");
    let told = world.ok(["snapshot", "ls"]);
    assert!(told.err().contains("the index is of no use"), "{told:?}");
    // Verbs that change something do not mind it either.
    world.ok(["save", "a", "s-4"]);
    world.ok(["snapshot", "rm", "s-4"]);
    assert_eq!(said(&world), expected);
    fs::remove_dir(&path).unwrap();
    assert!(
        world
            .ok(["snapshot", "reindex"])
            .out()
            .starts_with("3 snapshots")
    );
    assert_eq!(said(&world), expected);
    put(&path, b"garbage");
    assert_eq!(world.json(["snapshot", "reindex"])["snapshots"], 3);
    let told = world.ok(["snapshot", "ls"]);
    assert_eq!(told.err(), "", "{told:?}");
    // What came and went behind its back.
    let old = fs::read(&path).unwrap();
    world.ok(["snapshot", "rm", "s-2"]);
    world.ok(["save", "a", "s-5"]);
    put(&path, &old);
    assert_eq!(super::names(&world), ["s-1", "s-3", "s-5"]);
    assert_nothing_staged(&world);
    remove(&world, &["a"]);
}

/// An index that cannot be written is told of, and fails nothing.
#[test]
fn an_index_that_cannot_be_written_fails_nothing() {
    let user = is_root().then(Ordinary::new);
    let own = user.is_none().then(World::new);
    let world = own
        .as_ref()
        .or(user.as_ref().map(|user| &user.world))
        .unwrap();
    let run = |args: &[&str]| match &user {
        Some(user) => user.run(args),
        None => world.run(args),
    };
    let ok = |args: &[&str]| {
        let answer = run(args);
        assert_eq!(answer.code, 0, "{args:?}: {answer:?}");
        answer
    };
    ok(&["run", "-d", "--name", "a", "tiny"]);
    ok(&["stop", "a"]);
    ok(&["save", "a", "s-1"]);
    ok(&["snapshot", "ls"]);
    let set_mode =
        |mode| fs::set_permissions(index(world), fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o400);
    ok(&["save", "a", "s-2"]);
    let told = ok(&["snapshot", "ls"]);
    assert!(
        told.out().contains("s-1") && told.out().contains("s-2"),
        "{told:?}"
    );
    assert!(told.err().contains("index"), "{told:?}");
    set_mode(0o000);
    let told = ok(&["snapshot", "ls"]);
    assert!(
        told.out().contains("s-1") && told.out().contains("s-2"),
        "{told:?}"
    );
    ok(&["snapshot", "verify", "s-2"]);
    ok(&["snapshot", "reindex"]);
    let told = ok(&["snapshot", "ls"]);
    assert_eq!(told.err(), "", "{told:?}");
    ok(&["snapshot", "rm", "s-1", "s-2"]);
    ok(&["rm", "-f", "a"]);
    world.assert_empty();
}
