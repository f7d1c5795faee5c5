//! States of sandboxes at rest: paused, stopped, removed. And the verbs that they refuse.

use std::fs;
use std::process::{Child, Stdio};

use serde_json::Value;

use super::{dir_of, json_error, pid, remove, tags, until_gone};
use crate::support::held;
use crate::support::{World, finish, kill, processes_of, until};

#[test]
fn a_paused_sandbox_has_no_process_and_continues_exactly() {
    let world = World::new();
    let made = world.start("a", &["--publish", "0:80"]);
    held::begin(&world, "a", "one");
    let qemu = pid(&world, "a", "qemu_pid");
    let keeper = pid(&world, "a", "keeper_pid");
    let paused = world.json(["pause", "a"]);
    assert_eq!(paused["sandbox"], "a", "{paused}");
    until_gone(qemu);
    until_gone(keeper);
    until("no process is left", || {
        processes_of(world.home()).is_empty()
    });
    assert_eq!(
        (&world.inspect("a")["state"], world.json(["ps"])),
        (&"paused".into(), Value::Array(Vec::new()))
    );
    assert!(world.ok(["ps", "-a"]).out().contains("paused"));
    let resumed = world.json(["resume", "a"]);
    assert!(
        resumed["resumed"]["acknowledged_ms"].as_f64().unwrap() > 0.0,
        "{resumed}"
    );
    held::assert_holds(&world, "a", "one", 0);
    let info = world.inspect("a");
    assert_eq!(
        (&info["id"], &info["ports"], &info["state"]),
        (&made["id"], &made["ports"], &"running".into())
    );
    assert_eq!(
        tags(&world, "a"),
        Vec::<String>::new(),
        "the state it was paused in is gone"
    );
    // Again, with text output: each pause is a state on top of the last one.
    assert!(world.ok(["pause", "a"]).out().starts_with("a  paused in "));
    assert!(
        world
            .ok(["resume", "a"])
            .out()
            .starts_with("a  running after ")
    );
    held::assert_holds(&world, "a", "one", 1);
    remove(&world, &["a"]);
}

fn waiting(world: &World) -> Child {
    let line = "touch /run/waits; read word; echo $word";
    let mut command = world.command();
    command
        .args(["exec", "-i", "a", "--", "sh", "-c", line])
        .stdin(Stdio::piped());
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("the command runs", || {
        world.sh("a", "test -e /run/waits").code == 0
    });
    child
}

/// A keeper stays for a waiting client. If the keeper is killed, the client's call ends, and
/// nothing else is lost.
#[test]
fn a_paused_sandbox_whose_keeper_is_killed_is_resumed_by_another() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    let client = waiting(&world);
    let qemu = pid(&world, "a", "qemu_pid");
    let keeper = pid(&world, "a", "keeper_pid");
    world.ok(["pause", "a"]);
    until_gone(qemu);
    assert!(super::is_alive(keeper), "the keeper left its client");
    kill(keeper, "KILL");
    until_gone(keeper);
    finish(client).failed_with(&["connection to the guest ended"]);
    assert_eq!(world.inspect("a")["state"], "paused");
    world.ok(["resume", "a"]);
    held::assert_holds(&world, "a", "one", 0);
    assert_ne!(pid(&world, "a", "keeper_pid"), keeper);
    // While the sandbox runs, the death of its keeper is a crash.
    kill(pid(&world, "a", "keeper_pid"), "KILL");
    until("it has crashed", || {
        world.inspect("a")["state"] == "crashed"
    });
    world
        .run(["resume", "a"])
        .failed_with(&["crashed", "cannot be resumed", "sandtree start"]);
    world.ok(["rm", "a"]);
    world.assert_empty();
}

/// The last client of a paused sandbox leaves while another one resumes it: the keeper must not
/// end.
#[test]
fn a_client_that_leaves_while_its_sandbox_is_resumed_does_not_end_it() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    for round in 0..4 {
        let mut client = waiting(&world);
        world.ok(["pause", "a"]);
        let mut command = world.command();
        let resuming = command
            .args(["resume", "a"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        until("the new machine starts", || {
            processes_of(world.home()).len() >= 2 || world.inspect("a")["state"] == "running"
        });
        client.kill().unwrap();
        client.wait().unwrap();
        let resumed = finish(resuming);
        assert_eq!(resumed.code, 0, "{resumed:?}");
        held::assert_holds(&world, "a", "one", round);
        assert_eq!(world.sh("a", "rm /run/waits").code, 0);
        assert_eq!(world.inspect("a")["state"], "running");
    }
    remove(&world, &["a"]);
}

/// Changes a field of a state's manifest.
fn edit_manifest(world: &World, state: &str, field: &str, value: &str) {
    let path = dir_of(world, "a")
        .join("states")
        .join(state)
        .join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest[field] = value.into();
    fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
}

/// Only the boot id of a state shows that the host has booted again.
#[test]
fn a_host_that_went_down_loses_only_states_that_were_not_synced() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    let state = world.json(["checkpoint", "a", "base"])["id"]
        .as_str()
        .unwrap()
        .to_owned();
    held::write(&world, "a", "two");
    world.ok(["pause", "a"]);
    let states = world.json(["log", "a"]);
    let paused = states
        .as_array()
        .unwrap()
        .iter()
        .find(|state| state["kind"] == "paused")
        .expect("it is listed");
    let other_boot = "00000000-0000-0000-0000-000000000000";
    edit_manifest(&world, &state, "boot_id", other_boot);
    edit_manifest(
        &world,
        paused["id"].as_str().unwrap(),
        "boot_id",
        other_boot,
    );
    until("no process is left", || {
        processes_of(world.home()).is_empty()
    });
    world.ok(["resume", "a"]);
    held::assert_holds(&world, "a", "two", 0);
    let sealed = dir_of(&world, "a")
        .join("states")
        .join(&state)
        .join("sealed.json");
    until("the checkpoint is written out", || sealed.exists());
    world.ok(["revert", "a", "base"]);
    held::assert_holds(&world, "a", "one", 0);
    fs::remove_file(sealed).unwrap();
    world
        .run(["revert", "a", "base"])
        .failed_with(&["not whole", "the host went down before it was written out"]);
    held::assert_holds(&world, "a", "one", 1);
    remove(&world, &["a"]);
}

#[test]
fn checkpoints_survive_stop_and_start_and_are_removed_with_the_sandbox() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    world.ok(["checkpoint", "a", "base"]);
    held::write(&world, "a", "two");
    world.ok(["stop", "a"]);
    assert_eq!(tags(&world, "a"), ["base"]);
    world.ok(["start", "a"]);
    held::assert_disk_holds(&world, "a", "two");
    assert_eq!(tags(&world, "a"), ["base"]);
    // A boot starts a new history: its checkpoints need no earlier layer.
    assert_eq!(
        world.json(["checkpoint", "a", "booted"])["degraded"],
        Value::Array(Vec::new())
    );
    world.ok(["revert", "a", "base"]);
    held::assert_holds(&world, "a", "one", 0);
    world.ok(["revert", "a", "booted"]);
    held::assert_disk_holds(&world, "a", "two");
    world.ok(["stop", "a"]);
    // Without a keeper, too.
    let removed = world.json(["checkpoint", "rm", "a", "booted"]);
    assert_eq!(removed["states"].as_array().unwrap().len(), 1, "{removed}");
    world.ok(["revert", "a", "base"]);
    held::assert_holds(&world, "a", "one", 0);
    remove(&world, &["a"]);
}

#[test]
fn an_illegal_verb_is_refused_with_the_reason_and_the_legal_verbs() {
    let world = World::new();
    world.start("a", &[]);
    let refused = |args: &[&str], words: &[&str]| {
        world.run(args).failed_with(words);
        assert_eq!(
            json_error(&world.run([&["--json"], args].concat()))["kind"],
            "wrong_state",
            "{args:?}"
        );
    };
    refused(
        &["resume", "a"],
        &["sandbox a is running", "cannot be resumed"],
    );
    world.ok(["pause", "a"]);
    let paused: [(&[&str], &str); 6] = [
        (&["exec", "a", "--", "true"], "be worked in"),
        (&["checkpoint", "a"], "be checkpointed"),
        (&["pause", "a"], "be paused"),
        (&["stop", "a"], "be stopped"),
        (&["start", "a"], "be started"),
        (&["cp", "a:/etc/hosts", "-"], "be worked in"),
    ];
    for (args, word) in paused {
        refused(args, &["sandbox a is paused", word, "sandtree resume"]);
    }
    let state = world.json(["log", "a"])[0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    refused(
        &["checkpoint", "rm", "a", &state],
        &["the sandbox is paused in it", "resume"],
    );
    assert_eq!(
        world.json(["checkpoint", "rm", "a", "--all"])["states"],
        Value::Array(Vec::new())
    );
    world.ok(["resume", "a"]);
    world.ok(["stop", "a"]);
    for (args, word) in [
        (&["checkpoint", "a"][..], "be checkpointed"),
        (&["pause", "a"], "be paused"),
        (&["resume", "a"], "be resumed"),
    ] {
        refused(args, &["sandbox a is stopped", word, "sandtree start"]);
    }
    for verb in [
        "checkpoint",
        "undo",
        "redo",
        "log",
        "fork",
        "pause",
        "resume",
    ] {
        world
            .run([verb, "nosuch"])
            .failed_with(&["there is no sandbox nosuch", "ps -a"]);
        world.run([verb, "../x"]).failed_with(&["../x", "a-z"]);
    }
    world
        .run(["revert", "nosuch", "c1"])
        .failed_with(&["there is no sandbox nosuch"]);
    world.ok(["rm", "a"]);
    world.assert_empty();
}
