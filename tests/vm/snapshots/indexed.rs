//! The index is a cache: with any damage to it, all answers stay the same.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::Value;

use super::{assert_nothing_staged, put, remove, stopped};
use crate::support::World;
use crate::support::mount::is_root;
use crate::support::ordinary::Ordinary;

/// All answers about snapshots.
fn answers(world: &World) -> Vec<Value> {
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
fn answers_do_not_depend_on_the_index() {
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
    let expected = answers(&world);
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
        assert_eq!(answers(&world), expected, "case {number}");
    }
    fs::remove_file(&path).unwrap();
    assert_eq!(answers(&world), expected, "without it");
    assert!(path.exists(), "it is made again");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(answers(&world), expected, "a directory in its place");
    let listed = world.ok(["snapshot", "ls"]);
    assert!(
        listed.err().contains("the index cannot be used"),
        "{listed:?}"
    );
    // Verbs that change the store work as well.
    world.ok(["save", "a", "s-4"]);
    world.ok(["snapshot", "rm", "s-4"]);
    assert_eq!(answers(&world), expected);
    fs::remove_dir(&path).unwrap();
    assert!(
        world
            .ok(["snapshot", "reindex"])
            .out()
            .starts_with("3 snapshots")
    );
    assert_eq!(answers(&world), expected);
    put(&path, b"garbage");
    assert_eq!(world.json(["snapshot", "reindex"])["snapshots"], 3);
    let listed = world.ok(["snapshot", "ls"]);
    assert_eq!(listed.err(), "", "{listed:?}");
    // Snapshots that were added and removed without the index.
    let old = fs::read(&path).unwrap();
    world.ok(["snapshot", "rm", "s-2"]);
    world.ok(["save", "a", "s-5"]);
    put(&path, &old);
    assert_eq!(super::names(&world), ["s-1", "s-3", "s-5"]);
    assert_nothing_staged(&world);
    remove(&world, &["a"]);
}

/// An unwritable index is reported, and no command fails.
#[test]
fn an_unwritable_index_fails_no_command() {
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
    let listed = ok(&["snapshot", "ls"]);
    assert!(
        listed.out().contains("s-1") && listed.out().contains("s-2"),
        "{listed:?}"
    );
    assert!(listed.err().contains("index"), "{listed:?}");
    set_mode(0o000);
    let listed = ok(&["snapshot", "ls"]);
    assert!(
        listed.out().contains("s-1") && listed.out().contains("s-2"),
        "{listed:?}"
    );
    ok(&["snapshot", "verify", "s-2"]);
    ok(&["snapshot", "reindex"]);
    let listed = ok(&["snapshot", "ls"]);
    assert_eq!(listed.err(), "", "{listed:?}");
    ok(&["snapshot", "rm", "s-1", "s-2"]);
    ok(&["rm", "-f", "a"]);
    world.assert_empty();
}
