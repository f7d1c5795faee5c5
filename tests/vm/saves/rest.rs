//! Saves of sandboxes in every phase, and the layers that two saves share.

use super::{dir_of, end, entries, layers, refused, save, say, say_in, snapshots, start_from};
use crate::support::held;
use crate::support::{World, kill, until};

/// Saves twice, and asserts that the second save consists of the layers of the first.
#[track_caller]
fn assert_shares(world: &World, names: [&str; 2], options: &[&str]) {
    for name in names {
        save(world, &[&["a", name], options].concat());
    }
    let [first, second] = names.map(|name| layers(world, name));
    assert!(!first.is_empty(), "there is something to share");
    assert_eq!(first, second, "{names:?}");
}

#[test]
fn sandboxes_are_saved_in_every_phase_and_share_unchanged_layers() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    assert_shares(&world, ["running-1", "running-2"], &[]);

    world.ok(["pause", "a"]);
    assert_shares(&world, ["paused-1", "paused-2"], &["--memory"]);
    let bare = save(&world, &["a", "bare"]);
    assert_eq!(
        (&bare["memory"], &bare["consistency"]),
        (&false.into(), &"crash".into()),
        "{bare}"
    );
    assert_eq!(bare["degraded"][0]["code"], "unwritten_data", "{bare}");
    let shown = world.ok(["save", "a", "bare-2"]);
    assert!(
        shown.err().contains("not written to its disk") && shown.err().contains("hint: --memory"),
        "it says what is missing: {shown:?}"
    );
    assert_eq!(world.inspect("a")["state"], "paused");
    start_from(&world, "paused-1", "b", &[]);
    held::assert_holds(&world, "b", "one", 0);
    world.ok(["resume", "a"]);
    held::assert_holds(&world, "a", "one", 0);

    held::write(&world, "a", "two");
    world.ok(["stop", "a"]);
    assert_shares(&world, ["stopped-1", "stopped-2"], &[]);
    let stopped = world.json(["snapshot", "inspect", "stopped-1"]);
    assert_eq!(
        stopped["manifest"]["capture"]["consistency"], "stopped",
        "{stopped}"
    );
    refused(
        &world.run(["save", "a", "none", "--memory"]),
        &["a is stopped", "no memory"],
        &["--memory", "disk"],
    );
    assert!(!snapshots(&world).contains("none"));

    // Forks of a sandbox at rest run, too.
    world.ok(["fork", "a", "-n", "2", "--name", "f"]);
    for name in ["f-1", "f-2"] {
        assert_eq!(world.inspect(name)["state"], "running");
        held::assert_disk_holds(&world, name, "two");
    }
    assert_eq!(world.inspect("a")["state"], "stopped");
    world.ok(["rm", "-f", "f-1", "f-2", "b"]);

    world.ok(["start", "a"]);
    say(&world, "a", "echo three > /srv/word; sync");
    kill(
        u32::try_from(world.inspect("a")["qemu_pid"].as_u64().unwrap()).unwrap(),
        "KILL",
    );
    until("it has crashed", || {
        world.inspect("a")["state"] == "crashed"
    });
    let crashed = save(&world, &["a", "crashed"]);
    assert_eq!(crashed["consistency"], "crash", "{crashed}");
    assert_eq!(say_in(&world, "crashed", "cat /srv/word"), "three");
    assert_eq!(world.inspect("a")["state"], "crashed");
    assert_eq!(
        entries(&dir_of(&world, "a").join("states")),
        Vec::<String>::new(),
        "no save leaves a state"
    );
    end(&world, &["a"]);
}
