//! A save with memory: any number of sandboxes start from it and continue exactly there.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{end, refused, save, say, start_from};
use crate::support::World;
use crate::support::held;

/// A process with a variable, a number and an open file. On request it adds a line to the file
/// through its descriptor.
const WRITER: &str = "mkfifo /run/q /run/r; exec 3> /srv/log; n=0; \
    while read -r word < /run/q; do n=$((n+1)); echo \"$GREETING $n\" >&3; cat /srv/log > /run/r; done";

fn ask(world: &World, sandbox: &str) -> String {
    say(world, sandbox, "echo ask > /run/q; cat /run/r")
}

/// The values that must be unique to a guest, by kind.
fn identity(world: &World, sandbox: &str) -> BTreeMap<&'static str, String> {
    let kinds = [
        "hostname",
        "cat /etc/machine-id",
        "head -c 32 /dev/urandom | sha256sum",
    ];
    kinds
        .into_iter()
        .map(|line| (line, say(world, sandbox, line)))
        .collect()
}

fn sandboxes(world: &World) -> BTreeSet<String> {
    let listed = world.json(["ps", "-a"]);
    listed
        .as_array()
        .unwrap()
        .iter()
        .map(|info| info["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn sandboxes_from_a_save_with_memory_continue_exactly_there() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    world.ok([
        "exec",
        "-d",
        "-e",
        "GREETING=hello",
        "a",
        "--",
        "sh",
        "-c",
        WRITER,
    ]);
    assert_eq!(ask(&world, "a"), "hello 1");
    // For a boot from the save; a start with memory needs no sync.
    say(&world, "a", "sync");
    let saved = save(&world, &["a", "live", "--memory"]);
    assert_eq!(
        (&saved["memory"], &saved["consistency"]),
        (&true.into(), &"exact".into()),
        "{saved}"
    );
    assert!(saved["pause_ms"].as_f64().unwrap() > 0.0, "{saved}");
    assert_eq!(ask(&world, "a"), "hello 1\nhello 2", "it went on");

    let made = world.json(["run", "-d", "--count", "3", "--name", "p", "live"]);
    let names: Vec<&str> = made
        .as_array()
        .unwrap()
        .iter()
        .map(|made| made["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["p-1", "p-2", "p-3"], "{made}");
    let mut own: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for name in ["a", "p-1", "p-2", "p-3"] {
        let times = if name == "a" { 3 } else { 2 };
        let lines: Vec<String> = (1..=times).map(|n| format!("hello {n}")).collect();
        assert_eq!(ask(&world, name), lines.join("\n"), "{name}");
        held::assert_holds(&world, name, "one", 0);
        for (kind, found) in identity(&world, name) {
            own.entry(kind).or_default().insert(found);
        }
    }
    assert!(
        own.values().all(|found| found.len() == 4),
        "some share what must be their own: {own:#?}"
    );
    // A change in one of them does not affect the others.
    held::write(&world, "p-1", "changed");
    held::assert_holds(&world, "p-2", "one", 1);

    all_or_none(&world);
    only_as_it_was_saved(&world);
    let verified = world.json(["snapshot", "verify", "live"]);
    assert_eq!(
        verified["whole"], true,
        "those that ran from it changed nothing: {verified}"
    );
    end(&world, &["a", "p-1", "p-2", "p-3"]);
}

fn all_or_none(world: &World) {
    let before = sandboxes(world);
    world.ok(["rm", "-f", "p-1", "p-3"]);
    let taken = world.run(["run", "-d", "--count", "3", "--name", "p", "live"]);
    refused(&taken, &["p-2", "taken"], &["--name"]);
    assert_eq!(
        sandboxes(world),
        BTreeSet::from(["a".to_owned(), "p-2".to_owned()]),
        "all of them or none"
    );
    world.ok(["rm", "-f", "p-2"]);
    world.ok(["run", "-d", "--count", "3", "--name", "p", "live"]);
    assert_eq!(sandboxes(world), before);
    world
        .run(["run", "-d", "--count", "0", "--name", "q", "live"])
        .failed_with(&["0"]);
    assert_eq!(sandboxes(world), before);
}

/// Memory continues in the machine in which it was captured; `--cold` boots from the disk with any
/// settings.
fn only_as_it_was_saved(world: &World) {
    for (option, value, word) in [
        ("--memory", "256M", "256"),
        ("--cpus", "2", "2"),
        ("--network", "none", "none"),
    ] {
        let asked = world.run(["run", "-d", "--name", "q", option, value, "live"]);
        refused(&asked, &["memory cannot continue", word], &["--cold"]);
    }
    world.ok([
        "run", "-d", "--rm", "--name", "q", "--memory", "512M", "--cpus", "1", "live",
    ]);
    held::assert_holds(world, "q", "one", 0);
    world.ok(["rm", "-f", "q"]);
    start_from(world, "live", "q", &["--cold", "--cpus", "2"]);
    held::assert_disk_holds(world, "q", "one");
    assert_eq!(
        (say(world, "q", "nproc"), &world.inspect("q")["cpus"]),
        ("2".into(), &Value::from(2))
    );
    world.ok(["rm", "-f", "q"]);
}
