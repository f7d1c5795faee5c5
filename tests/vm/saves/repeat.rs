//! Saves of sandboxes that started from saves: each keeps its content, whatever is made from it.

use std::fs;

use serde_json::Value;

use super::{dir_of, end, entries, layers, manifest, save, say, say_in, snapshots, start_from};
use crate::support::World;

#[test]
fn each_of_thirty_saves_loads_its_own_content() {
    const SAVES: usize = 30;
    let world = World::new();
    world.start("a", &[]);
    for n in 1..=SAVES {
        say(
            &world,
            "a",
            &format!("echo {n} > /srv/n; echo {n} > /srv/of-{n}"),
        );
        save(&world, &["a", &format!("n-{n}")]);
        save(&world, &["--force", "a", "latest"]);
    }
    let mut expected: Vec<String> = (1..=SAVES)
        .map(|n| format!("n-{n}"))
        .chain(["latest".into()])
        .collect();
    expected.sort();
    assert_eq!(snapshots(&world).into_iter().collect::<Vec<_>>(), expected);
    assert_eq!(layers(&world, "latest"), layers(&world, "n-30"));
    world.ok(["rm", "-f", "a"]);
    for (name, n) in [("latest", 30), ("n-7", 7)] {
        assert_eq!(
            say_in(&world, name, "cat /srv/n; ls /srv | grep -c of-"),
            format!("{n}\n{n}"),
            "{name}"
        );
    }
    // The saves before and after it do not need it.
    let all: Vec<String> = (1..=SAVES)
        .filter(|n| *n != 7)
        .map(|n| format!("n-{n}"))
        .collect();
    world.ok(["snapshot", "rm"]
        .into_iter()
        .chain(all.iter().map(String::as_str)));
    assert_eq!(world.json(["snapshot", "verify", "n-7"])["whole"], true);
    end(&world, &[]);
}

#[test]
fn a_save_of_a_loaded_save_contains_both() {
    let world = World::new();
    world.start("a", &["--disk", "256M"]);
    let old = say(
        &world,
        "a",
        "dd if=/dev/urandom of=/srv/old bs=1M count=8 2> /dev/null; sha256sum /srv/old",
    );
    save(&world, &["a", "first"]);
    let first = (
        world.json(["snapshot", "inspect", "first"]),
        layers(&world, "first"),
    );
    world.ok(["rm", "-f", "a"]);

    start_from(&world, "first", "b", &[]);
    assert_eq!(say(&world, "b", "sha256sum /srv/old"), old);
    let new = say(
        &world,
        "b",
        "dd if=/dev/urandom of=/srv/new bs=1M count=8 2> /dev/null; sha256sum /srv/new",
    );
    save(&world, &["b", "second", "--compress"]);
    world.ok(["rm", "-f", "b"]);
    assert_eq!(
        world.json(["snapshot", "inspect", "second"])["manifest"]["parent"],
        first.0["digest"]
    );

    start_from(&world, "second", "c", &[]);
    assert_eq!(
        say(&world, "c", "sha256sum /srv/old /srv/new"),
        format!("{old}\n{new}")
    );
    say(&world, "c", "rm /srv/old; sync");
    save(&world, &["c", "third"]);
    world.ok(["rm", "-f", "c"]);

    // It contains nothing of the sandbox that was run from it.
    assert_eq!(
        (
            world.json(["snapshot", "inspect", "first"]),
            layers(&world, "first")
        ),
        first
    );
    for name in ["first", "second", "third"] {
        assert_eq!(
            world.json(["snapshot", "verify", name])["whole"],
            true,
            "{name}"
        );
    }
    // The middle save is removed, and the others stay whole.
    world.ok(["snapshot", "rm", "second"]);
    assert_eq!(
        say_in(&world, "third", "ls /srv; sha256sum /srv/new"),
        format!("new\n{new}")
    );
    end(&world, &[]);
}

#[test]
fn checkpoints_survive_a_save_and_are_not_part_of_it() {
    let world = World::new();
    world.start("a", &["--disk", "256M"]);
    let fill = |n: u32| {
        format!(
            "echo {n} > /srv/n; dd if=/dev/urandom of=/srv/file-{n} bs=256k count=4 2> /dev/null"
        )
    };
    (1..=18).for_each(|n| drop(say(&world, "a", &fill(n))));
    let without = save(&world, &["a", "without"]);
    world.ok(["rm", "-f", "a"]);

    world.start("a", &["--disk", "256M"]);
    for n in 1..=18 {
        say(&world, "a", &fill(n));
        world.ok(["checkpoint", "a", &format!("c{n}")]);
    }
    let with = save(&world, &["a", "with"]);
    let bytes = |saved: &serde_json::Value| saved["bytes"].as_u64().unwrap();
    assert!(
        2 * bytes(&with) < 3 * bytes(&without),
        "{with} against {without}"
    );
    assert_eq!(
        say_in(&world, "with", "cat /srv/n; ls /srv | grep -c file-"),
        "18\n18"
    );

    // A checkpoint is saved with all its content, although the sandbox has moved on.
    let promoted = save(&world, &["a", "fifth", "--from", "c5"]);
    assert_eq!(
        (&promoted["memory"], &promoted["consistency"]),
        (&true.into(), &"exact".into()),
        "{promoted}"
    );
    assert_eq!(say(&world, "a", "cat /srv/n"), "18");
    assert_eq!(
        say_in(&world, "fifth", "cat /srv/n; ls /srv | grep -c file-"),
        "5\n5"
    );
    let compared = world.json(["snapshot", "diff", "a@c5", "fifth"]);
    assert!(
        !compared.to_string().contains("file-"),
        "a@c5 is what was saved of it: {compared}"
    );
    assert!(
        world
            .json(["snapshot", "diff", "a@c5", "a"])
            .to_string()
            .contains("file-6")
    );
    let unknown = world.run(["save", "a", "none", "--from", "nothing"]);
    super::refused(&unknown, &["no state nothing"], &["sandtree log"]);

    world.ok(["revert", "a", "c9"]);
    assert_eq!(
        say(&world, "a", "cat /srv/n; ls /srv | grep -c file-"),
        "9\n9"
    );
    let saved = save(&world, &["a", "ninth", "--delete-checkpoints"]);
    // With the state that the revert left.
    assert_eq!(saved["removed"].as_array().unwrap().len(), 19, "{saved}");
    assert_eq!(world.json(["log", "a"]), serde_json::json!([]));
    assert_eq!(say(&world, "a", "cat /srv/n"), "9");
    assert_eq!(
        say_in(&world, "ninth", "cat /srv/n; ls /srv | grep -c file-"),
        "9\n9"
    );
    end(&world, &["a"]);
}

#[test]
fn generations_of_saves_do_not_accumulate_layers() {
    const GENERATIONS: usize = 20;
    let world = World::new();
    world.start("g-0", &[]);
    let mut depths = Vec::new();
    for n in 1..=GENERATIONS {
        let parent = format!("g-{}", n - 1);
        let child = format!("g-{n}");
        say(&world, &parent, &format!("echo {n} > /srv/of-{n}; sync"));
        save(&world, &["--memory", &parent, &child]);
        world.ok(["rm", "-f", &parent]);
        depths.push(depth(&world, &child));
        start_from(&world, &child, &child, &[]);
    }
    let last = format!("g-{GENERATIONS}");
    assert_eq!(
        say(&world, &last, "cat /srv/of-* | sort -n | tr '\\n' ' '"),
        numbers(GENERATIONS)
    );
    // Each save adds one layer until they are folded.
    assert!(
        depths.contains(&17) && depths.iter().all(|depth| *depth <= 17),
        "{depths:?}"
    );
    assert_eq!(
        say_in(&world, "g-16", "cat /srv/of-* | sort -n | tr '\\n' ' '"),
        numbers(16)
    );
    end(&world, &[&last]);
}

#[test]
fn a_disk_of_a_hundred_layers_starts_by_run_fork_and_start() {
    let world = World::new();
    world.start("a", &[]);
    say(&world, "a", "echo below > /srv/below; sync");
    world.ok(["stop", "a"]);
    deepen(&world, "a", 100);
    save(&world, &["a", "deep"]);
    assert!(depth(&world, "deep") > 100);
    assert_eq!(say_in(&world, "deep", "cat /srv/below"), "below");
    world.ok(["fork", "a", "--name", "copy"]);
    assert_eq!(say(&world, "copy-1", "cat /srv/below"), "below");

    world.ok(["start", "a"]);
    assert_eq!(
        say(&world, "a", "cat /srv/below; echo above > /srv/above; sync"),
        "below"
    );
    assert_eq!(
        entries(&dir_of(&world, "a").join("disks")).len(),
        2,
        "what was folded is collected"
    );
    save(&world, &["a", "shallow"]);
    assert_eq!(depth(&world, "shallow"), 2);
    assert_eq!(
        say_in(&world, "shallow", "cat /srv/below /srv/above"),
        "below\nabove"
    );
    end(&world, &["a", "copy-1"]);
}

#[test]
fn a_state_of_a_hundred_layers_can_be_reverted_to_and_keeps_them() {
    let world = World::new();
    world.start("a", &[]);
    world.ok(["checkpoint", "a", "first"]);
    say(&world, "a", "echo below > /srv/below; sync");
    world.ok(["stop", "a"]);
    deepen(&world, "a", 100);
    world.ok(["revert", "a", "first"]);
    assert_eq!(say(&world, "a", "ls /srv"), "");
    let disks = dir_of(&world, "a").join("disks");
    for _ in 0..2 {
        world.ok(["undo", "a"]);
        assert_eq!(say(&world, "a", "cat /srv/below"), "below");
        assert!(entries(&disks).len() > 100, "the state has its layers");
        world.ok(["redo", "a"]);
        assert_eq!(say(&world, "a", "ls /srv"), "");
    }
    end(&world, &["a"]);
}

fn depth(world: &World, snapshot: &str) -> usize {
    manifest(world, snapshot)["disk"]["layers"]
        .as_array()
        .unwrap()
        .len()
}

fn numbers(last: usize) -> String {
    (1..=last)
        .map(|n| n.to_string())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Adds layers to a stopped sandbox, as if it had been saved and started as often. Each layer
/// repeats the content of the top of the disk, in a file of its own.
fn deepen(world: &World, sandbox: &str, layers: usize) {
    let dir = dir_of(world, sandbox);
    let path = dir.join("head.json");
    let mut head: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let disk = head["disk"].as_array_mut().unwrap();
    let top = fs::read(dir.join(format!(
        "disks/{}.qcow2",
        disk.last().unwrap().as_str().unwrap()
    )))
    .unwrap();
    for n in 1..=layers {
        let id = format!("{n:016x}");
        let padding = vec![0; 512 * n];
        fs::write(
            dir.join(format!("disks/{id}.qcow2")),
            [&*top, &*padding].concat(),
        )
        .unwrap();
        disk.insert(disk.len() - 1, id.into());
    }
    fs::write(&path, serde_json::to_vec(&head).unwrap()).unwrap();
}
