//! Taking states, moving between them, and removing them.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;

use super::{dir_of, json_error, pid, remove, tags};
use crate::support::held;
use crate::support::{DEADLINE, World};

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn a_checkpoint_reports_its_figures_and_its_tag_is_unique() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    let first = world.json(["checkpoint", "a"]);
    let fields = [
        "tag",
        "id",
        "mode",
        "degraded",
        "pause_ms",
        "total_ms",
        "memory_bytes",
        "disk_bytes",
    ];
    assert_eq!(keys(&first), BTreeSet::from(fields), "{first}");
    assert_eq!(
        (&first["tag"], &first["degraded"]),
        (&"c1".into(), &Value::Array(Vec::new())),
        "{first}"
    );
    let number = |field: &str| {
        first[field]
            .as_f64()
            .unwrap_or_else(|| panic!("{field}: {first}"))
    };
    assert!(
        number("pause_ms") > 0.0 && number("pause_ms") <= number("total_ms"),
        "{first}"
    );
    assert!(
        number("memory_bytes") > 4096.0 && number("disk_bytes") > 0.0,
        "{first}"
    );
    let id = first["id"].as_str().unwrap();
    let shown = world.ok(["checkpoint", "a", "base"]);
    for word in ["base", "pause", "total", "memory", "disk"] {
        assert!(shown.out().contains(word), "{shown:?}");
    }
    assert_eq!(
        world.json(["checkpoint", "a"])["tag"],
        "c2",
        "the next free number"
    );

    world
        .run(["checkpoint", "a", "base"])
        .failed_with(&["the tag base is taken in sandbox a", "--force"]);
    assert_eq!(
        json_error(&world.run(["--json", "checkpoint", "a", "base"]))["kind"],
        "already_exists"
    );
    for bad in ["", "a b", "../x", &"x".repeat(200)] {
        assert_eq!(
            json_error(&world.run(["--json", "checkpoint", "a", bad]))["kind"],
            "invalid",
            "{bad:?}"
        );
    }
    assert_eq!(
        tags(&world, "a"),
        ["c1", "base", "c2"],
        "what was refused is not there"
    );

    held::write(&world, "a", "two");
    let replaced = world.json(["checkpoint", "--force", "a", "base"]);
    assert_eq!(tags(&world, "a"), ["c1", "c2", "base"]);
    held::write(&world, "a", "three");
    assert_eq!(world.json(["revert", "a", "base"])["id"], replaced["id"]);
    held::assert_holds(&world, "a", "two", 0);
    // An id works like a tag.
    assert_eq!(world.json(["revert", "a", id])["tag"], "c1");
    held::assert_holds(&world, "a", "one", 0);
    remove(&world, &["a"]);
}

#[test]
fn a_revert_restores_files_and_memory_and_keeps_the_identity() {
    let world = World::new();
    let made = world.start("a", &["--publish", "0:80"]);
    held::begin(&world, "a", "one");
    assert_eq!(
        world
            .sh(
                "a",
                "mkdir /run/www; cat /srv/word > /run/www/page; httpd -p 80 -h /run/www"
            )
            .code,
        0
    );
    let before = world.inspect("a");
    let keeper = pid(&world, "a", "keeper_pid");
    world.ok(["checkpoint", "a", "base"]);
    held::write(&world, "a", "two");
    assert_eq!(
        world
            .sh(
                "a",
                "cp /srv/word /run/www/page; touch /srv/new; rm /etc/group"
            )
            .code,
        0
    );
    let port = made["ports"][0]["host"].as_u64().unwrap() as u16;
    assert!(page(port).ends_with("two\n"));

    let reverted = world.json(["revert", "a", "base"]);
    assert_eq!(
        (&reverted["tag"], &reverted["dropped"]),
        (&"base".into(), &Value::Null),
        "{reverted}"
    );
    assert!(
        reverted["left"].is_string() && reverted["degraded"] == Value::Array(Vec::new()),
        "{reverted}"
    );
    let order = ["running_ms", "acknowledged_ms", "total_ms"]
        .map(|field| reverted[field].as_f64().unwrap());
    assert!(order[0] > 0.0 && order.is_sorted(), "{reverted}");
    held::assert_holds(&world, "a", "one", 0);
    assert_eq!(
        world.sh("a", "ls /srv/new").code,
        1,
        "a file that came later"
    );
    assert_eq!(
        world.sh("a", "cat /etc/group > /dev/null").code,
        0,
        "a file that was removed later"
    );
    assert!(
        page(port).ends_with("one\n"),
        "the server of then answers on the same port"
    );
    let after = world.inspect("a");
    for field in ["id", "name", "ports", "created_at", "image", "state"] {
        assert_eq!(before[field], after[field], "{field}");
    }
    assert_ne!(before["qemu_pid"], after["qemu_pid"]);
    assert_eq!(
        pid(&world, "a", "keeper_pid"),
        keeper,
        "a connected client stays connected"
    );

    // The left state is a state, too, and as exact.
    world.ok(["undo", "a"]);
    held::assert_holds(&world, "a", "two", 0);
    assert!(page(port).ends_with("two\n"));
    remove(&world, &["a"]);
    assert!(
        TcpStream::connect(("127.0.0.1", port)).is_err(),
        "a port outlives its sandbox"
    );
}

fn page(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET /page HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn undo_and_redo_work_as_in_an_editor() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    for next in ["two", "three", "four"] {
        world.ok(["checkpoint", "a"]);
        held::write(&world, "a", next);
    }
    let go = |args: &[&str], word: &str| {
        world.ok(args);
        held::assert_holds(&world, "a", word, 0);
    };
    go(&["undo", "a"], "three");
    go(&["undo", "a"], "two");
    // A redo returns to the state that the undo left. Its process was asked once in between.
    let again = |args: &[&str], word: &str| {
        world.ok(args);
        held::assert_holds(&world, "a", word, 1);
    };
    again(&["redo", "a"], "three");
    go_back_to_the_end(&world);
    world
        .run(["redo", "a"])
        .failed_with(&["has 0 states to go forward to", "sandtree log"]);
    world.ok(["undo", "-n", "3", "a"]);
    held::assert_holds(&world, "a", "one", 0);
    world
        .run(["undo", "a"])
        .failed_with(&["has 0 states to go back to, not 1", "sandtree log"]);
    held::assert_holds(&world, "a", "one", 1);
    for _ in 0..3 {
        world.ok(["redo", "a"]);
    }
    assert_eq!(world.sh("a", "cat /srv/word").out(), "four\n");

    world
        .run(["undo", "-n", "4", "a"])
        .failed_with(&["has 3 states to go back to, not 4"]);
    world.run(["undo", "-n", "0", "a"]).failed_with(&["not 0"]);
    world.ok(["undo", "a"]);
    // After new work, there is nothing to redo.
    world.ok(["checkpoint", "a", "new"]);
    world
        .run(["redo", "a"])
        .failed_with(&["has 0 states to go forward to"]);
    assert_eq!(
        json_error(&world.run(["--json", "redo", "a"]))["kind"],
        "not_found"
    );
    remove(&world, &["a"]);
}

fn go_back_to_the_end(world: &World) {
    world.ok(["redo", "a"]);
    held::assert_holds(world, "a", "four", 0);
}

#[test]
fn the_log_shows_the_tree_of_states_and_the_present() {
    let world = World::new();
    world.start("a", &[]);
    assert_eq!(world.ok(["log", "a"]).out(), "└─ a  (now)\n");
    let ids = ["base", "left"].map(|tag| world.json(["checkpoint", "a", tag])["id"].clone());
    world.ok(["revert", "a", "base"]);
    let right = world.json(["checkpoint", "a", "right"])["id"].clone();
    let states = world.json(["log", "a"]);
    let state = |id: &Value| {
        states
            .as_array()
            .unwrap()
            .iter()
            .find(|state| state["id"] == *id)
            .unwrap()
            .clone()
    };
    assert_eq!(
        (
            state(&ids[0])["parent"].clone(),
            state(&ids[1])["parent"].clone()
        ),
        (Value::Null, ids[0].clone())
    );
    assert_eq!(
        (&state(&right)["parent"], &state(&right)["current"]),
        (&ids[0], &true.into())
    );
    let current = states
        .as_array()
        .unwrap()
        .iter()
        .filter(|state| state["current"] == true)
        .count();
    assert_eq!(current, 1, "{states}");
    let created = humantime::parse_rfc3339(state(&right)["created_at"].as_str().unwrap()).unwrap();
    assert!(created.elapsed().unwrap().as_secs() < 120, "{states}");
    let shown = world.ok(["log", "a"]);
    let starts = [
        "└─ base  ",
        "   ├─ left  ",
        "   │  └─ (left) ",
        "   └─ right  ",
        "      └─ a  (now)",
    ];
    assert_eq!(shown.out().lines().count(), starts.len(), "{}", shown.out());
    for (line, start) in shown.out().lines().zip(starts) {
        assert!(line.starts_with(start), "{line:?} is not {start:?}");
    }
    assert!(
        shown.out().lines().next().unwrap().contains("memory ") && shown.out().contains("disk ")
    );
    remove(&world, &["a"]);
}

/// The disk space of a directory that is shared with no other file.
fn own_bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let size = |entry: std::fs::DirEntry| match entry.metadata().unwrap() {
        status if status.is_dir() => own_bytes(&entry.path()),
        status if status.nlink() == 1 => status.blocks() * 512,
        _ => 0,
    };
    entries.map(size).sum()
}

#[test]
fn removing_a_state_frees_its_space_and_changes_no_other() {
    let world = World::new();
    world.start("a", &["--disk", "1G"]);
    held::begin(&world, "a", "one");
    for (tag, next) in [
        ("one", "two"),
        ("two", "three"),
        ("three", "four"),
        ("four", "five"),
    ] {
        world.ok(["checkpoint", "a", tag]);
        held::write(&world, "a", next);
    }
    world
        .run(["checkpoint", "rm", "a", "two", "nosuch"])
        .failed_with(&["sandbox a has no state nosuch", "log"]);
    assert_eq!(
        tags(&world, "a"),
        ["one", "two", "three", "four"],
        "one that is not there: none is removed"
    );
    assert_eq!(
        world.json(["checkpoint", "rm", "a", "two"])["states"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    for word in ["one", "three", "four"] {
        world.ok(["revert", "a", word]);
        held::assert_holds(&world, "a", word, 0);
    }
    // States that reverts left are not counted, because they are no checkpoints.
    let removed = world.json(["checkpoint", "rm", "a", "--keep", "1"]);
    assert_eq!(removed["states"].as_array().unwrap().len(), 2, "{removed}");
    assert_eq!(
        tags(&world, "a")
            .iter()
            .filter(|tag| *tag != "-")
            .collect::<Vec<_>>(),
        ["four"]
    );
    world.ok(["revert", "a", "four"]);
    held::assert_holds(&world, "a", "four", 0);

    let line = "dd if=/dev/urandom of=/srv/big bs=1M count=20 && cp /srv/big /run/big && sync";
    assert_eq!(world.sh("a", line).code, 0);
    world.ok(["checkpoint", "a", "big"]);
    world.ok(["revert", "a", "four"]);
    let before = own_bytes(&dir_of(&world, "a"));
    let shown = world.json(["checkpoint", "rm", "a", "--all"]);
    let freed = before - own_bytes(&dir_of(&world, "a"));
    assert!(shown["freed_bytes"].as_u64().unwrap() > 40 << 20, "{shown}");
    assert!(freed > 40 << 20, "only {freed} bytes of {before} came back");
    assert_eq!(tags(&world, "a"), Vec::<String>::new());
    world.run(["undo", "a"]).failed_with(&["has 0 states"]);
    // The present uses layers of removed states, and continues.
    held::assert_holds(&world, "a", "four", 0);
    world.ok(["checkpoint", "a", "new"]);
    held::write(&world, "a", "six");
    world.ok(["revert", "a", "new"]);
    held::assert_holds(&world, "a", "four", 1);
    world
        .run(["checkpoint", "rm", "a"])
        .failed_with(&["--all", "--keep"]);
    remove(&world, &["a"]);
}

#[test]
fn automatic_checkpoints_let_undo_count_commands() {
    let world = World::new();
    world.start("a", &["--auto-checkpoint", "--auto-checkpoints", "4"]);
    let put = |word: &str| assert_eq!(world.sh("a", &format!("echo {word} >> /srv/words")).code, 0);
    // Copying out of the guest starts no command, so no checkpoint is taken.
    let words = || {
        world
            .ok(["cp", "a:/srv/words", "-"])
            .out()
            .replace('\n', " ")
    };
    ["a", "b", "c", "d"].into_iter().for_each(put);
    assert_eq!(words(), "a b c d ");
    world.ok(["undo", "-n", "2", "a"]);
    assert_eq!(words(), "a b ");
    // Commands are counted from here.
    put("x");
    world.ok(["undo", "a"]);
    assert_eq!(words(), "a b ");
    ["y", "z"].into_iter().for_each(put);
    world.ok(["undo", "-n", "2", "a"]);
    assert_eq!(words(), "a b ");
    world.ok(["redo", "a"]);
    world.ok(["redo", "a"]);
    assert_eq!(words(), "a b y z ");

    let autos = || {
        world
            .json(["log", "a"])
            .as_array()
            .unwrap()
            .iter()
            .filter(|s| s["kind"] == "auto")
            .count()
    };
    ["1", "2", "3", "4", "5", "6"].into_iter().for_each(put);
    assert_eq!(autos(), 4, "the oldest went");
    world.ok(["undo", "-n", "4", "a"]);
    assert_eq!(words(), "a b y z 1 2 ");
    // A checkpoint that is still current is not taken again.
    world.ok(["checkpoint", "a", "mark"]);
    let before = autos();
    put("w");
    assert_eq!(autos(), before);
    world.ok(["undo", "a"]);
    assert_eq!(words(), "a b y z 1 2 ");
    remove(&world, &["a"]);
}

/// Most memory is copied while the guest runs, in layers in addition to that of the stop.
#[test]
fn a_checkpoint_counts_memory_copied_before_the_stop() {
    let world = World::new();
    world.start("a", &[]);
    world.ok(["checkpoint", "a", "base"]);
    assert_eq!(
        world
            .sh(
                "a",
                "dd if=/dev/urandom of=/dev/shm/much bs=1M count=32 2> /dev/null"
            )
            .code,
        0
    );
    let taken = world.json(["checkpoint", "a", "much"]);
    let counted = taken["memory_bytes"].as_u64().unwrap();
    assert!(counted >= 32 << 20, "{taken}");
    let listed = world.json(["log", "a"]);
    let listed = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|state| state["tag"] == "much")
        .unwrap();
    assert_eq!(listed["memory_bytes"].as_u64(), Some(counted), "{listed}");
    remove(&world, &["a"]);
}
