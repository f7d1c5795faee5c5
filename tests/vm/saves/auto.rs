//! `run --save`: a sandbox is saved whenever it stops.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sandtree::{Fault, Faults, Host, HostConfig, SandboxSpec, SaveOnStop, Step, parse_target};

use super::{end, entries, read, refused, save, say, say_in, snapshots};
use crate::support::lab::{config, in_keepers, spec};
use crate::support::mount::Mount;
use crate::support::{Answer, World, finish, kill, until};

const WAIT: &str = "echo ready > /dev/console; sleep 1000";

fn pid(world: &World, sandbox: &str) -> u32 {
    u32::try_from(
        world.inspect(sandbox)["qemu_pid"]
            .as_u64()
            .expect("it runs"),
    )
    .unwrap()
}

fn digest(world: &World, snapshot: &str) -> String {
    world.json(["snapshot", "inspect", snapshot])["digest"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// Waits until it has stopped and its processes are gone.
fn until_rests(world: &World, sandbox: &str, state: &str) {
    until(&format!("it is {state}"), || {
        world.inspect(sandbox)["state"] == state
    });
}

#[test]
fn a_sandbox_is_saved_under_its_name_however_it_stops() {
    let world = World::new();
    world.start("a", &["--save", "env", "--label", "made=by-stop"]);
    assert_eq!(world.inspect("a")["save_on_stop"], "env");
    // The name is reserved although no snapshot has it yet.
    assert!(snapshots(&world).is_empty());
    refused(
        &world.run(["run", "-d", "--name", "b", "--save", "env", "tiny"]),
        &["env", "taken"],
        &["another name"],
    );
    world.start("c", &[]);
    save(&world, &["c", "blank"]);
    let word = || read(&world, "env", "blank", "/srv/word");
    for options in [&["save", "c", "env"][..], &["save", "c", "env", "--force"]] {
        refused(
            &world.run(options),
            &["env", "taken by the save to come"],
            &[],
        );
    }
    world.run(["inspect", "b"]).failed_with(&["no sandbox b"]);

    say(&world, "a", "echo one > /srv/word");
    world.ok(["checkpoint", "a", "base"]);
    world.ok(["stop", "a"]);
    let first = digest(&world, "env");
    assert_eq!(word(), "one");
    let listed = world.json(["snapshot", "ls", "--label", "made=by-stop"]);
    assert_eq!(listed[0]["digest"], first.as_str(), "{listed}");

    world.ok(["start", "a"]);
    say(&world, "a", "echo two > /srv/word; sync");
    world.sh("a", "poweroff -f").failed_with(&["powered off"]);
    until_rests(&world, "a", "stopped");
    assert_eq!(word(), "two");
    world
        .run(["snapshot", "inspect", &first])
        .failed_with(&["no snapshot"]);

    // A paused sandbox has not stopped.
    world.ok(["start", "a"]);
    let second = digest(&world, "env");
    world.ok(["pause", "a"]);
    assert_eq!(digest(&world, "env"), second);
    world.ok(["resume", "a"]);
    say(&world, "a", "echo three > /srv/word; sync");
    kill(pid(&world, "a"), "KILL");
    until_rests(&world, "a", "crashed");
    assert_eq!(word(), "three");

    // Its checkpoints are unchanged, so it can be saved from there.
    world.ok(["revert", "a", "base"]);
    assert_eq!(say(&world, "a", "cat /srv/word"), "one");
    world.ok(["stop", "a"]);
    assert_eq!(word(), "one");
    assert_eq!(world.inspect("a")["save_failed"], serde_json::Value::Null);

    // By now, another snapshot has the name.
    world.ok(["snapshot", "rm", "env"]);
    save(&world, &["c", "env"]);
    let theirs = digest(&world, "env");
    refused(
        &world.run(["start", "a"]),
        &["the name env is taken"],
        &["another name"],
    );
    assert_eq!(
        world.inspect("a")["state"],
        "stopped",
        "that is settled before it starts"
    );
    assert_eq!(digest(&world, "env"), theirs);
    world.ok(["snapshot", "rm", "env"]);
    world.ok(["start", "a"]);
    world.ok(["stop", "a"]);
    assert_eq!(word(), "one");
    end(&world, &["a", "c"]);
}

fn begin(world: &World, args: &[&str]) -> Child {
    let mut command = world.command();
    command
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the command in the only sandbox has started.
fn until_ready(world: &World, sandbox: &str) {
    until("the command runs", || {
        world.run(["logs", sandbox]).out().contains("ready")
    });
}

#[track_caller]
fn assert_saved(answer: &Answer, code: i32, name: &str) {
    assert_eq!(answer.code, code, "{answer:?}");
    assert!(
        answer.err().contains(&format!("saved as {name}")),
        "{answer:?}"
    );
}

#[test]
fn a_run_in_the_foreground_is_saved_when_its_command_ends() {
    let world = World::new();
    let ran = world.run([
        "run",
        "--save",
        "env",
        "tiny",
        "--",
        "sh",
        "-c",
        "echo one > /srv/word; exit 3",
    ]);
    assert_saved(&ran, 3, "env");
    world.assert_empty();
    assert_eq!(say_in(&world, "env", "cat /srv/word"), "one");

    // By Ctrl-C, which the command receives.
    let line = format!("echo two > /srv/word; {WAIT}");
    let running = begin(
        &world,
        &[
            "run", "--name", "a", "--save", "cut", "tiny", "--", "sh", "-c", &line,
        ],
    );
    until_ready(&world, "a");
    kill(running.id(), "INT");
    assert_saved(&finish(running), 130, "cut");
    world.assert_empty();
    assert_eq!(say_in(&world, "cut", "cat /srv/word"), "two");

    // By the guest itself.
    let line = "echo three > /srv/word; sync; poweroff -f; sleep 1000";
    let ran = world.run(["run", "--save", "off", "tiny", "--", "sh", "-c", line]);
    assert!(
        ran.code == 125 && ran.err().contains("saved as off"),
        "{ran:?}"
    );
    world.assert_empty();
    assert_eq!(say_in(&world, "off", "cat /srv/word"), "three");

    // The name is checked before anything starts.
    for (name, by) in [("env", "taken by snapshot"), ("tiny", "taken by image")] {
        refused(
            &world.run(["run", "--save", name, "tiny", "--", "true"]),
            &[name, by],
            &["another name"],
        );
    }
    refused(
        &world.run(["run", "--save", "tiny", "--force", "tiny", "--", "true"]),
        &["tiny", "image"],
        &[],
    );
    world
        .run(["run", "--save", "", "tiny", "--", "true"])
        .failed_with(&["1 to 63"]);
    world.assert_empty();
    let line = [
        "run",
        "--save",
        "env",
        "--force",
        "env",
        "--",
        "sh",
        "-c",
        "echo four >> /srv/word",
    ];
    assert_saved(&world.run(line), 0, "env");
    assert_eq!(
        say_in(&world, "env", "cat /srv/word"),
        "one\nfour",
        "what it began from stays until it is saved"
    );
    end(&world, &[]);
}

#[test]
fn a_reserved_name_is_free_when_its_sandbox_is_gone() {
    let world = World::new();
    world.start("a", &["--save", "env"]);
    world.ok(["rm", "-f", "a"]);
    assert_eq!(snapshots(&world).len(), 0, "what is removed is not saved");
    world.start("b", &["--save", "env"]);
    // A sandbox with `--save` may replace its own name at any time.
    say(&world, "b", "echo early > /srv/word");
    save(&world, &["b", "env"]);
    assert_eq!(say_in(&world, "env", "cat /srv/word"), "early");
    world.ok(["rm", "-f", "b"]);
    world.start("c", &["--save", "other"]);
    world.ok(["rm", "-f", "c"]);
    let swept = world.json(["gc"]);
    assert!(
        swept["removed"]
            .as_array()
            .unwrap()
            .iter()
            .any(|gone| gone["id"] == "other"),
        "{swept}"
    );
    end(&world, &[]);
}

#[test]
fn a_sandbox_can_be_saved_to_a_directory_when_it_stops() {
    let world = World::new();
    let place = tempfile::tempdir().unwrap();
    let here = |args: &[&str]| {
        let mut command = world.command();
        command
            .args(args)
            .current_dir(place.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish(command.spawn().unwrap())
    };
    let ok = |args: &[&str]| {
        let answer = here(args);
        assert_eq!(answer.code, 0, "{args:?}: {answer:?}");
        answer.out().trim_end().to_owned()
    };
    ok(&["run", "-d", "--name", "a", "--save", "./dir", "tiny"]);
    here(&["run", "-d", "--name", "b", "--save", "./none/x", "tiny"]).failed_with(&["none/x"]);
    for word in ["one", "two"] {
        say(&world, "a", &format!("echo {word} > /srv/word"));
        ok(&["stop", "a"]);
        ok(&["snapshot", "verify", "./dir"]);
        assert_eq!(ok(&["run", "./dir", "--", "cat", "/srv/word"]), word);
        ok(&["start", "a"]);
    }
    world.ok(["rm", "-f", "a"]);
    refused(
        &here(&["run", "-d", "--name", "b", "--save", "./dir", "tiny"]),
        &["dir", "taken"],
        &["--force"],
    );
    ok(&[
        "run",
        "--save",
        "./dir",
        "--force",
        "./dir",
        "--",
        "sh",
        "-c",
        "echo three > /srv/word",
    ]);
    assert_eq!(ok(&["run", "./dir", "--", "cat", "/srv/word"]), "three");
    assert_eq!(entries(place.path()), ["dir"], "nothing is left beside it");
    world.ok(["gc"]);
    end(&world, &[]);
}

/// A keeper of a sandbox that is to be saved as `env`; the save fails.
async fn keeper_that_fails(world: &World, name: &str) {
    let wish = SaveOnStop {
        target: parse_target("env").unwrap(),
        replace: false,
        labels: std::collections::BTreeMap::new(),
        compress: false,
    };
    let config = HostConfig {
        faults: Faults {
            fault: Some((Step::SavePublish, Fault::Error)),
            ..Faults::default()
        },
        run_in: in_keepers(),
        ..config(world.home())
    };
    let spec = SandboxSpec {
        save_on_stop: Some(wish),
        auto_remove: true,
        ..spec(name)
    };
    let host = Host::open(config).await.expect("the store opens");
    host.create(spec).await.expect("its sandbox runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_save_at_the_stop_keeps_the_sandbox_and_is_reported() {
    let world = World::new();
    keeper_that_fails(&world, "a").await;
    tokio::task::block_in_place(|| {
        say(&world, "a", "echo kept > /srv/word");
        refused(
            &world.run(["stop", "a"]),
            &["a stopped", "not saved as env"],
            &["sandtree save"],
        );
        let info = world.inspect("a");
        assert_eq!(
            (&info["state"], &info["save_on_stop"]),
            (&"stopped".into(), &"env".into()),
            "{info}"
        );
        assert!(
            info["save_failed"]
                .as_str()
                .unwrap()
                .contains("injected a fault"),
            "{info}"
        );
        refused(
            &world.run(["run", "--save", "env", "tiny", "--", "true"]),
            &["taken by the save to come"],
            &[],
        );
        save(&world, &["a", "env"]);
        assert_eq!(say_in(&world, "env", "cat /srv/word"), "kept");
        // With a keeper without the fault, it is saved when it stops.
        world.ok(["snapshot", "rm", "env"]);
        world.ok(["start", "a"]);
        say(&world, "a", "echo again > /srv/word");
        world.ok(["stop", "a"]);
        until("it is removed", || world.run(["inspect", "a"]).code != 0);
        assert_eq!(say_in(&world, "env", "cat /srv/word"), "again");
        end(&world, &[]);
    });
}

#[test]
fn a_full_store_at_the_stop_keeps_the_sandbox() {
    let Some(disk) = Mount::tmpfs(600) else {
        return;
    };
    let world = World::at(disk.path().join("home"));
    let line = format!("echo kept > /srv/word; sync; {WAIT}");
    let running = begin(
        &world,
        &[
            "run", "--name", "a", "--save", "env", "tiny", "--", "sh", "-c", &line,
        ],
    );
    until_ready(&world, "a");
    let hungry = Hungry::in_dir(disk.path());
    kill(running.id(), "INT");
    let ran = finish(running);
    drop(hungry);
    refused(&ran, &["a stopped", "not saved as env"], &["sandtree save"]);
    assert_eq!(snapshots(&world).len(), 0);
    assert!(world.inspect("a")["save_failed"].is_string());
    save(&world, &["a", "env"]);
    world.ok(["rm", "-f", "a"]);
    assert_eq!(say_in(&world, "env", "cat /srv/word"), "kept");
    end(&world, &[]);
}

/// Takes all free space, and all that becomes free, until it is dropped.
struct Hungry {
    path: PathBuf,
    has_enough: Arc<AtomicBool>,
    eating: Option<JoinHandle<()>>,
}

impl Hungry {
    fn in_dir(dir: &Path) -> Self {
        let path = dir.join("hungry");
        let has_enough = Arc::new(AtomicBool::new(false));
        let mut file = fs::File::create(&path).unwrap();
        let enough = has_enough.clone();
        let eating = std::thread::spawn(move || {
            while !enough.load(Ordering::Relaxed) {
                if file.write_all(&[1; 4096]).is_err() {
                    std::thread::park_timeout(Duration::from_micros(200));
                }
            }
        });
        until("there is no room", || {
            rustix::fs::statvfs(dir).unwrap().f_bavail == 0
        });
        Self {
            path,
            has_enough,
            eating: Some(eating),
        }
    }
}

impl Drop for Hungry {
    fn drop(&mut self) {
        self.has_enough.store(true, Ordering::Relaxed);
        self.eating.take().map(JoinHandle::join);
        fs::remove_file(&self.path).unwrap();
    }
}
