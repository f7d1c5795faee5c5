//! Names of saves, saves in directories, and what `inspect` shows about them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::{end, entries, keys, refused, save, say, say_in, snapshots, start_from};
use crate::support::{Answer, World};

/// The error that a command prints with `--json`.
fn json_error(answer: &Answer) -> Value {
    assert_eq!(answer.code, 125, "{answer:?}");
    let said: Value =
        serde_json::from_slice(&answer.stderr).unwrap_or_else(|e| panic!("{e}: {answer:?}"));
    said["error"].clone()
}

fn labelled(world: &World, label: &str) -> BTreeSet<String> {
    let listed = world.json(["snapshot", "ls", "--label", label]);
    listed
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["names"][0].as_str().unwrap().to_owned())
        .collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn a_save_has_one_or_more_names_and_never_an_images() {
    let world = World::new();
    world.start("a", &[]);
    say(&world, "a", "echo one > /srv/word");
    let saved = save(
        &world,
        &["a", "env", "--label", "team=red", "--label", "kind=base"],
    );
    let digest = saved["digest"].as_str().unwrap();

    refused(
        &world.run(["save", "a", "env"]),
        &["env", "taken by snapshot"],
        &["--force"],
    );
    for options in [&["a", "tiny"][..], &["a", "tiny", "--force"]] {
        refused(
            &world.run([&["save"], options].concat()),
            &["tiny", "image"],
            &[],
        );
    }
    let long = "a".repeat(64);
    for name in ["", "Upper", "a b", "-x", &long] {
        let said = world.run(["save", "a", "--", name]);
        assert_eq!(said.code, 125, "{name:?}: {said:?}");
    }
    world
        .run(["save", "a", digest])
        .failed_with(&["a digest names content"]);
    for label in ["none", "=x", "Up=x"] {
        world
            .run(["save", "a", "other", "--label", label])
            .failed_with(&["label"]);
    }
    world
        .run(["save", "missing", "other"])
        .failed_with(&["no sandbox missing"]);
    assert_eq!(
        snapshots(&world),
        set(&["env"]),
        "nothing that was refused is there"
    );

    let other = save(&world, &["a", "other", "--label", "team=blue"]);
    assert_eq!(labelled(&world, "team=red"), set(&["env"]));
    assert_eq!(labelled(&world, "team"), set(&["env", "other"]));
    assert_eq!(labelled(&world, "team=green"), set(&[]));

    // Another name for the same snapshot, by name and by digest.
    world.ok(["snapshot", "tag", "env", "same"]);
    refused(
        &world.run(["snapshot", "tag", "env", "other"]),
        &["other", "taken"],
        &["--force"],
    );
    refused(
        &world.run(["snapshot", "tag", "env", "tiny", "--force"]),
        &["tiny", "image"],
        &[],
    );
    refused(
        &world.run(["snapshot", "tag", "none", "more"]),
        &["no snapshot none"],
        &["snapshot ls"],
    );
    world.ok(["snapshot", "tag", digest, "other", "--force"]);
    assert_eq!(
        world.json(["snapshot", "inspect", digest])["names"],
        json!(["env", "other", "same"])
    );
    let replaced = other["digest"].as_str().unwrap();
    world
        .run(["snapshot", "inspect", replaced])
        .failed_with(&["no snapshot"]);
    world.ok(["snapshot", "rm", "env", "other"]);
    assert_eq!(snapshots(&world), set(&["same"]));

    // After a replacement the name has the new content; a sandbox of the old one continues.
    start_from(&world, digest, "b", &[]);
    say(&world, "a", "echo two > /srv/word");
    let again = save(&world, &["a", "same", "--force"]);
    assert_ne!(again["digest"], digest);
    world
        .run(["snapshot", "verify", digest])
        .failed_with(&["snapshot"]);
    assert_eq!(say_in(&world, "same", "cat /srv/word"), "two");
    assert_eq!(
        say(
            &world,
            "b",
            "echo 3 > /proc/sys/vm/drop_caches; cat /srv/word"
        ),
        "one"
    );
    world.ok(["snapshot", "rm", again["digest"].as_str().unwrap()]);
    refused(
        &world.run(["snapshot", "rm", "same"]),
        &["no snapshot same"],
        &["snapshot ls"],
    );
    end(&world, &["a", "b"]);
}

fn copied(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("-r").args([from, to]).status();
    assert!(status.expect("cp runs").success());
}

#[test]
fn a_save_in_a_directory_is_self_contained() {
    let world = World::new();
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("dir");
    let path = dir.to_str().unwrap();
    let workspace = place.path().join("work");
    let workspace = workspace.to_str().unwrap();
    std::fs::create_dir(workspace).unwrap();
    world.start("a", &[]);
    say(&world, "a", "echo one > /srv/word");
    let saved = save(&world, &["a", path]);
    assert_eq!(
        (&saved["path"], &saved["name"]),
        (&path.into(), &Value::Null),
        "{saved}"
    );
    assert_eq!(snapshots(&world), set(&[]), "the store has none of it");
    let inspected = world.json(["snapshot", "inspect", path]);
    assert_eq!(
        (&inspected["digest"], &inspected["path"]),
        (&saved["digest"], &path.into())
    );
    refused(
        &world.run(["save", "a", path]),
        &["dir", "taken"],
        &["--force"],
    );

    // A plain copy of the directory runs in an empty store.
    let copy = place.path().join("copy");
    copied(&dir, &copy);
    let elsewhere = World::new();
    assert_eq!(
        elsewhere.json(["snapshot", "verify", copy.to_str().unwrap()])["whole"],
        true
    );
    assert_eq!(
        say_in(&elsewhere, copy.to_str().unwrap(), "cat /srv/word"),
        "one"
    );
    // Layers that were read from a directory are garbage when their sandbox is gone.
    elsewhere.ok(["gc"]);
    end(&elsewhere, &[]);

    // In a workspace, names are directories, and none leads out of it.
    for name in ["../x", "a/b", ".", ".."] {
        world
            .run(["save", "a", name, "--workspace", workspace])
            .failed_with(&["a name, not a path"]);
    }
    world
        .run(["save", "a", "", "--workspace", workspace])
        .failed_with(&["1 to 63"]);
    assert_eq!(entries(Path::new(workspace)), Vec::<String>::new());
    let before = entries(place.path()).len();
    save(
        &world,
        &["a", "env", "--workspace", workspace, "--label", "team=red"],
    );
    let listed = world.json(["snapshot", "ls", "--workspace", workspace]);
    assert_eq!(
        (&listed[0]["names"], &listed[0]["labels"]),
        (&json!(["env"]), &json!({"team": "red"})),
        "{listed}"
    );
    world.ok(["snapshot", "inspect", "env", "--workspace", workspace]);
    world.ok(["snapshot", "verify", "env", "--workspace", workspace]);
    refused(
        &world.run(["snapshot", "inspect", "env"]),
        &["no snapshot env"],
        &[],
    );
    let ran = world.ok([
        "run",
        "--workspace",
        workspace,
        "--save",
        "next",
        "env",
        "--",
        "cat",
        "/srv/word",
    ]);
    assert_eq!(ran.out(), "one\n");
    world
        .run(["snapshot", "rm", "../dir", "--workspace", workspace])
        .failed_with(&["a name, not a path"]);
    world.ok(["snapshot", "rm", "env", "next", "--workspace", workspace]);
    assert_eq!(entries(Path::new(workspace)), Vec::<String>::new());
    assert_eq!(entries(place.path()).len(), before);
    world.ok(["snapshot", "rm", path]);
    assert!(!dir.exists());
    world.ok(["gc"]);
    end(&world, &["a"]);
}

#[test]
fn a_sandbox_from_a_save_has_its_settings_unless_overridden() {
    let world = World::new();
    let options = [
        "--cold",
        "--memory",
        "256M",
        "--cpus",
        "2",
        "--network",
        "none",
        "--publish",
        "0:80",
    ];
    world.start("a", &options);
    save(&world, &["a", "env"]);
    let was = world.inspect("a");
    world.ok(["rm", "-f", "a"]);
    start_from(&world, "env", "b", &[]);
    let same = world.inspect("b");
    for field in [
        "memory_bytes",
        "cpus",
        "network",
        "ports",
        "disk_bytes",
        "image",
        "image_digest",
    ] {
        assert_eq!(same[field], was[field], "{field}");
    }
    assert_eq!(say(&world, "b", "nproc"), "2");
    // The port is taken by now, and no option asked for it, so another port is used.
    start_from(
        &world,
        "env",
        "c",
        &[
            "--memory",
            "192M",
            "--cpus",
            "1",
            "--network",
            "isolated",
            "--disk",
            "512M",
        ],
    );
    let other = world.inspect("c");
    let asked = [
        ("memory_bytes", json!(192 << 20)),
        ("cpus", json!(1)),
        ("disk_bytes", json!(512 << 20)),
    ];
    asked
        .into_iter()
        .for_each(|(field, value)| assert_eq!(other[field], value, "{field}"));
    assert_eq!(
        (&other["network"], &other["ports"][0]["guest"]),
        (&"isolated".into(), &80.into()),
        "{other}"
    );
    assert_ne!(other["ports"][0]["host"], same["ports"][0]["host"]);
    assert_eq!(say(&world, "c", "nproc"), "1");

    world
        .run(["run", "--snapshot", "env", "tiny", "--", "true"])
        .failed_with(&["--snapshot", "cannot be used with"]);
    refused(
        &world.run(["run", "--snapshot", "tiny", "--", "true"]),
        &["no snapshot tiny"],
        &["snapshot ls"],
    );
    refused(
        &world.run(["run", "none", "--", "true"]),
        &["no image none"],
        &[],
    );
    world
        .run(["run", "--disk", "1M", "env", "--", "true"])
        .failed_with(&["at least as large as the snapshot"]);
    assert_eq!(say_in(&world, "env", "echo runs"), "runs");
    end(&world, &["b", "c"]);
}

#[test]
fn every_verb_answers_in_json_and_fails_with_a_hint() {
    let world = World::new();
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("env.tar.zst");
    let file = file.to_str().unwrap();
    world.start("a", &[]);
    say(&world, "a", "echo one > /srv/word");
    let of = |names: &[&'static str]| BTreeSet::from_iter(names.iter().copied());
    let saved = [
        "digest",
        "name",
        "path",
        "consistency",
        "memory",
        "bytes",
        "degraded",
        "pause_ms",
        "total_ms",
        "removed",
    ];
    assert_eq!(keys(&save(&world, &["a", "env"])), of(&saved));
    say(&world, "a", "echo two > /srv/word");
    assert_eq!(
        keys(&world.json(["snapshot", "create", "a", "next"])),
        of(&saved),
        "the same as save"
    );

    let listed = world.json(["snapshot", "ls"]);
    let fields = [
        "names",
        "digest",
        "path",
        "created_at",
        "created_at_unix_ms",
        "parent",
        "labels",
        "image",
        "image_digest",
        "arch",
        "bytes",
        "memory",
        "memory_bytes",
        "disk_bytes",
        "consistency",
        "unreadable",
    ];
    assert_eq!(
        (listed.as_array().unwrap().len(), keys(&listed[0])),
        (2, of(&fields)),
        "oldest first"
    );
    assert_eq!(
        (&listed[0]["names"], &listed[1]["names"]),
        (&json!(["env"]), &json!(["next"]))
    );
    let inspected = world.json(["snapshot", "inspect", "env"]);
    assert_eq!(
        keys(&inspected),
        of(&["names", "digest", "path", "created_at", "manifest"])
    );
    let manifest = [
        "schema",
        "requires",
        "created_at_unix_ms",
        "parent",
        "labels",
        "image",
        "arch",
        "settings",
        "disk",
        "memory",
        "capture",
    ];
    assert_eq!(keys(&inspected["manifest"]), of(&manifest));
    assert_eq!(
        keys(&world.json(["snapshot", "verify", "env"])),
        of(&["bytes", "whole", "damaged"])
    );
    assert_eq!(
        world.json(["snapshot", "tag", "env", "same"]),
        json!({"name": "same"})
    );
    assert_eq!(world.json(["snapshot", "reindex"]), json!({"snapshots": 2}));
    assert_eq!(
        keys(&world.json(["snapshot", "diff", "env", "next"])),
        keys(&world.json(["snapshot", "diff", "env", "a"]))
    );
    let exported = world.json(["snapshot", "export", "env", "-o", file]);
    assert_eq!(
        keys(&exported),
        of(&["digest", "content_bytes", "file_bytes"])
    );
    let imported = world.json(["snapshot", "import", file, "--name", "back"]);
    assert_eq!(keys(&imported), of(&["digest", "name", "bytes", "memory"]));
    assert_eq!(imported["digest"], exported["digest"]);
    let tree = world.json(["log", "--all"]);
    let kinds: BTreeSet<&str> = tree
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, of(&["image", "snapshot", "sandbox"]), "{tree}");
    assert_eq!(
        world.json(["snapshot", "rm", "same", "back"]),
        json!({"removed": ["same", "back"]})
    );
    for args in [&["gc", "--dry-run"][..], &["gc"]] {
        let swept = world.json(args);
        assert_eq!(
            keys(&swept),
            of(&["removed", "bytes", "held_back"]),
            "{swept}"
        );
        assert_eq!(
            swept["removed"],
            json!([]),
            "nothing is garbage here: {swept}"
        );
    }
    let used = world.json(["df"]);
    assert_eq!(
        keys(&used["kinds"][0]),
        of(&["kind", "count", "bytes", "reclaimable_bytes"]),
        "{used}"
    );

    let failures: [(&[&str], &str); 6] = [
        (&["save", "a", "env"], "already_exists"),
        (&["save", "missing", "x"], "not_found"),
        (&["save", "a", "tag", "--from", "none"], "not_found"),
        (&["snapshot", "inspect", "none"], "not_found"),
        (&["snapshot", "rm", "none"], "not_found"),
        (&["run", "--snapshot", "none", "--", "true"], "not_found"),
    ];
    for (args, kind) in failures {
        let error = json_error(&world.run([&["--json"], args].concat()));
        assert_eq!(
            (&error["kind"], error["hint"].is_string()),
            (&kind.into(), true),
            "{args:?}: {error}"
        );
    }
    end(&world, &["a"]);
}
