//! Hosts that misbehave: a wall clock that is set back, a disk that cannot be synced, a file system
//! without hard links, a process that cannot be reaped.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::support::{
    Answer, World, dir_of, finish, is_alive, kill, processes_of, say, text, until,
};

/// A store whose commands and keepers load the library of `tests/vm/shim`.
struct Shimmed {
    world: World,
    orders: tempfile::TempDir,
}

impl Shimmed {
    fn new() -> Self {
        Self {
            world: World::new(),
            orders: tempfile::tempdir().unwrap(),
        }
    }

    fn order(&self, name: &str, what: &str) {
        let path = self.orders.path().join(name);
        let new = self.orders.path().join("new");
        fs::write(&new, what).unwrap();
        fs::rename(new, path).unwrap();
    }

    fn is_ordered(&self, name: &str) -> bool {
        self.orders.path().join(name).exists()
    }

    fn command(&self) -> Command {
        let mut command = self.world.command();
        command
            .env("LD_PRELOAD", shim())
            .env("SANDTREE_SHIM", self.orders.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Answer {
        finish(self.command().args(args).spawn().unwrap())
    }

    #[track_caller]
    fn ok<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Answer {
        let answer = self.run(args);
        assert_eq!(answer.code, 0, "{answer:#?}");
        answer
    }

    #[track_caller]
    fn json(&self, args: &[&str]) -> Value {
        let answer = self.ok([&["--json"], args].concat());
        serde_json::from_slice(&answer.stdout).unwrap_or_else(|e| panic!("{e}: {answer:#?}"))
    }

    #[track_caller]
    fn remove(self, sandboxes: &[&str]) {
        for sandbox in sandboxes {
            self.ok(["rm", "-f", sandbox]);
        }
        self.world.assert_empty();
    }
}

/// The library, built once.
fn shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vm/shim/shim.rs");
        let built =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{}.so", std::process::id()));
        // starts: rustc
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc.args(["--edition", "2024", "-O", "--crate-type", "cdylib"]);
        let status = rustc.arg("-o").arg(&built).arg(source).status();
        assert!(
            status.expect("rustc runs").success(),
            "the library cannot be built"
        );
        built
    })
}

fn states(shimmed: &Shimmed, kind: &str) -> Vec<String> {
    let states = shimmed.world.json(["log", "a"]);
    let of_kind = states
        .as_array()
        .unwrap()
        .iter()
        .filter(|state| state["kind"] == kind);
    of_kind.map(|state| text(&state["id"]).to_owned()).collect()
}

/// A clock that was fast is corrected between two pauses.
#[test]
fn a_sandbox_is_resumed_where_it_was_paused_regardless_of_the_clock() {
    let shimmed = Shimmed::new();
    let world = &shimmed.world;
    shimmed.ok(["run", "-d", "--name", "a", "tiny"]);
    say(world, "a", "echo first > /dev/shm/word");
    shimmed.ok(["checkpoint", "a", "base"]);
    shimmed.order("clock", "3600");
    shimmed.ok(["pause", "a"]);
    let first = states(&shimmed, "paused");
    shimmed.ok(["revert", "a", "base"]);
    say(world, "a", "echo second > /dev/shm/word");
    shimmed.order("clock", "0");
    shimmed.ok(["pause", "a"]);
    let paused = states(&shimmed, "paused");
    assert_eq!(
        (paused.len(), states(&shimmed, "left")),
        (1, first.clone()),
        "what a revert left is no pause"
    );
    until("no keeper is left", || {
        processes_of(world.home()).is_empty()
    });
    shimmed.ok(["fork", "a", "--name", "copy"]);
    assert_eq!(say(world, "copy-1", "cat /dev/shm/word"), "second");
    world
        .run(["checkpoint", "rm", "a", &paused[0]])
        .failed_with(&["the sandbox is paused in it"]);
    shimmed.ok(["resume", "a"]);
    assert_eq!(say(world, "a", "cat /dev/shm/word"), "second");
    assert_eq!(
        (states(&shimmed, "paused"), states(&shimmed, "left")),
        (Vec::new(), first)
    );
    shimmed.remove(&["a", "copy-1"]);
}

/// By the clock, each checkpoint is older than the one before it.
#[test]
fn undo_ignores_a_clock_that_was_set_back() {
    let shimmed = Shimmed::new();
    shimmed.ok([
        "run",
        "-d",
        "--name",
        "a",
        "--auto-checkpoint",
        "--auto-checkpoints",
        "2",
        "tiny",
    ]);
    for round in 0..4 {
        shimmed.order("clock", &format!("-{}", round * 3600));
        shimmed.ok([
            "exec",
            "a",
            "--",
            "sh",
            "-c",
            &format!("echo {round} > /dev/shm/round"),
        ]);
    }
    let autos = states(&shimmed, "auto");
    assert_eq!(autos.len(), 2, "{autos:?}");
    for round in ["2", "1"] {
        shimmed.ok(["undo", "a"]);
        let copied = shimmed.orders.path().join("copied");
        // A copy is no command, so no checkpoint is taken before it.
        shimmed.ok([
            "cp".as_ref(),
            "a:/dev/shm/round".as_ref(),
            copied.as_os_str(),
        ]);
        assert_eq!(
            fs::read_to_string(&copied).unwrap().trim(),
            round,
            "one command is undone, not more"
        );
    }
    // The order of capture also decides which checkpoints are the newest.
    for (tag, clock) in [("one", "-90000"), ("two", "-180000"), ("three", "-270000")] {
        shimmed.order("clock", clock);
        shimmed.ok(["checkpoint", "a", tag]);
    }
    shimmed.ok(["checkpoint", "rm", "a", "--keep", "1"]);
    assert_eq!(
        shimmed
            .json(&["log", "a"])
            .as_array()
            .unwrap()
            .iter()
            .filter(|s| s["tag"] == "three")
            .count(),
        1
    );
    shimmed.remove(&["a"]);
}

fn active_overlay(world: &World) -> String {
    let head = fs::read(dir_of(world, "a").join("head.json")).unwrap();
    let head: Value = serde_json::from_slice(&head).unwrap();
    text(head["disk"].as_array().unwrap().last().unwrap()).to_owned()
}

/// One sync fails while a checkpoint is written out in the background. The guest is unharmed, and
/// every later verb works.
#[test]
fn one_failed_sync_costs_one_checkpoint_its_durability_and_nothing_else() {
    let shimmed = Shimmed::new();
    let world = &shimmed.world;
    shimmed.ok(["run", "-d", "--name", "a", "tiny"]);
    say(world, "a", "echo one > /dev/shm/word; echo one > /srv/word");
    for what in ["memory", "disk"] {
        // For the disk, this is the overlay in use; the next one is synced before the guest stops.
        let part = if what == "disk" {
            active_overlay(world)
        } else {
            "/memory/".into()
        };
        shimmed.order("fsync", &part);
        let torn =
            text(&shimmed.json(&["checkpoint", "a", &format!("torn-{what}")])["id"]).to_owned();
        until("the sync failed", || !shimmed.is_ordered("fsync"));
        let failed = || {
            let inspected = shimmed.json(&["inspect", "a"]);
            let listed = inspected["not_durable"].as_array().unwrap().clone();
            listed
                .iter()
                .any(|state| state["id"] == torn.as_str() && state["durability"] == "failed")
        };
        until("it is reported", failed);
        assert!(
            world
                .ok(["inspect", "a"])
                .out()
                .contains("could not be synced")
        );
        assert!(world.ok(["log", "a"]).out().contains("not durable"));
        // The next checkpoint does not depend on it, and is durable.
        let next = shimmed.json(&["checkpoint", "a", &format!("next-{what}")]);
        assert!(
            next["degraded"].to_string().contains("could not be synced"),
            "{next}"
        );
        let is_durable = || {
            let states = world.json(["log", "a"]);
            states
                .as_array()
                .unwrap()
                .iter()
                .any(|s| s["id"] == next["id"] && s["durability"] == "durable")
        };
        until("the next one is durable", is_durable);
        say(world, "a", &format!("echo {what} > /dev/shm/word"));
        shimmed.ok(["undo", "a"]);
        assert_ne!(say(world, "a", "cat /dev/shm/word"), what);
        // The state itself is usable until the host goes down.
        shimmed.ok(["revert", "a", &torn]);
        assert_eq!(say(world, "a", "cat /srv/word"), "one");
        shimmed.ok(["revert", "a", &format!("next-{what}")]);
    }
    shimmed.ok(["save", "--memory", "a", "whole"]);
    shimmed.ok(["pause", "a"]);
    shimmed.ok(["resume", "a"]);
    assert_eq!(say(world, "a", "cat /srv/word"), "one");
    shimmed.ok(["stop", "a"]);
    assert_eq!(world.inspect("a")["state"], "stopped");
    shimmed.ok(["start", "a"]);
    assert_eq!(say(world, "a", "cat /srv/word"), "one");
    shimmed.remove(&["a"]);
}

/// The target may be on another kind of file system, such as a memory stick.
#[test]
fn an_export_needs_no_hard_links_and_is_durable_and_private() {
    let shimmed = Shimmed::new();
    shimmed.ok(["run", "-d", "--name", "a", "tiny"]);
    shimmed.ok(["save", "--memory", "a", "saved"]);
    shimmed.order("linkat", "");
    shimmed.order("fsyncs", "");
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().canonicalize().unwrap();
    let file = dir.join("saved.sandtree");
    let export: [&OsStr; 5] = [
        "snapshot".as_ref(),
        "export".as_ref(),
        "saved".as_ref(),
        "--output".as_ref(),
        file.as_ref(),
    ];
    shimmed.ok(export);
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600,
        "it holds a guest's memory"
    );
    let synced = fs::read_to_string(shimmed.orders.path().join("fsyncs")).unwrap();
    let last: Vec<&str> = synced.lines().rev().take(2).collect();
    assert_eq!(
        last[0],
        dir.to_str().unwrap(),
        "its name is durable: {synced}"
    );
    assert!(
        last[1].starts_with(dir.to_str().unwrap()),
        "after its content: {synced}"
    );
    let before = fs::read(&file).unwrap();
    shimmed.run(export).failed_with(&["it exists", "--force"]);
    shimmed.ok([&export[..], &["--force".as_ref()]].concat());
    assert!(
        fs::read(&file).unwrap() == before,
        "an export is reproducible"
    );
    assert_eq!(
        fs::read_dir(&dir).unwrap().count(),
        1,
        "nothing is left beside it"
    );
    fs::remove_file(shimmed.orders.path().join("linkat")).unwrap();
    shimmed.ok(["snapshot", "rm", "saved"]);
    shimmed.remove(&["a"]);
}

/// Others could replace any file in a directory that they may write to.
#[test]
fn a_store_that_others_may_write_to_is_refused_with_a_remedy() {
    let world = World::new();
    fs::set_permissions(world.home(), fs::Permissions::from_mode(0o777)).unwrap();
    let home = world.home().to_str().unwrap();
    world.run(["ps"]).failed_with(&[
        "other users may write to",
        home,
        "0777",
        &format!("chmod go-w {home}"),
    ]);
    fs::set_permissions(world.home(), fs::Permissions::from_mode(0o700)).unwrap();
    world.ok(["ps"]);
}

/// A process whose tracer does not wait for it cannot be reaped, like one that waits for a disk
/// that does not answer.
#[test]
fn a_machine_that_cannot_be_reaped_is_reported_after_a_deadline() {
    let world = World::new();
    world.start("a", &[]);
    let qemu = world.inspect("a")["qemu_pid"].as_u64().unwrap();
    let tracer = Command::new("strace")
        .args(["-f", "-o", "/dev/null", "-p", &qemu.to_string()])
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut tracer) = tracer else {
        eprintln!("SKIPPED: no strace");
        world.ok(["rm", "-f", "a"]);
        return;
    };
    let status = || fs::read_to_string(format!("/proc/{qemu}/status")).unwrap_or_default();
    let traced = format!("TracerPid:\t{}", tracer.id());
    until("it is traced", || status().contains(&traced));
    kill(tracer.id(), "STOP");
    world.run(["rm", "-f", "a"]).failed_with(&[
        &format!("process {qemu}"),
        "has not ended within 30s",
        "try again",
    ]);
    assert_eq!(
        world.inspect("a")["state"],
        "running",
        "it is not removed under a machine that may still write"
    );
    kill(tracer.id(), "CONT");
    tracer.wait().unwrap();
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

/// Lets QEMU sync by system calls, which a tracer sees; syncs by io_uring are invisible.
fn without_io_uring(world: &World) {
    world.ok(["doctor"]);
    let path = world.home().join("cache/engine-2");
    let mut verdicts: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    verdicts["aio"] = "threads".into();
    // A new file, because other stores link to the old one.
    fs::remove_file(&path).unwrap();
    fs::write(&path, serde_json::to_vec(&verdicts).unwrap()).unwrap();
    assert_eq!(
        world.json(["doctor"])["qemu"]["found"]["disk_aio"],
        "threads"
    );
}

/// How often QEMU syncs a file while a guest writes and syncs.
fn syncs_of(world: &World, sandbox: &str) -> usize {
    let qemu = world.inspect(sandbox)["qemu_pid"].as_u64().unwrap();
    let notes = tempfile::NamedTempFile::new().unwrap();
    let mut strace = Command::new("strace");
    strace
        .args([
            "-f",
            "-e",
            "trace=fsync,fdatasync",
            "-p",
            &qemu.to_string(),
            "-o",
        ])
        .arg(notes.path());
    let mut tracer = strace.stderr(Stdio::null()).spawn().unwrap();
    let status = || fs::read_to_string(format!("/proc/{qemu}/status")).unwrap_or_default();
    until("it is traced", || {
        status().contains(&format!("TracerPid:\t{}", tracer.id()))
    });
    say(
        world,
        sandbox,
        "for n in 1 2 3; do echo $n > /srv/synced; sync; done",
    );
    kill(tracer.id(), "INT");
    tracer.wait().unwrap();
    fs::read_to_string(notes.path())
        .unwrap()
        .matches("sync(")
        .count()
}

#[test]
fn the_host_syncs_for_a_durable_guest_and_for_no_other() {
    if Command::new("strace")
        .arg("-V")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        eprintln!("SKIPPED: no strace");
        return;
    }
    let world = World::new();
    without_io_uring(&world);
    world.start("fast", &[]);
    world.start("sure", &["--durable"]);
    let durable = |sandbox: &str| world.inspect(sandbox)["durable"].clone();
    assert_eq!(
        (durable("fast"), durable("sure")),
        (false.into(), true.into())
    );
    assert_eq!(syncs_of(&world, "fast"), 0);
    assert!(
        syncs_of(&world, "sure") >= 3,
        "each sync of the guest is one of the host"
    );
    // Also on the overlay after a checkpoint, and in a copy.
    world.ok(["checkpoint", "sure"]);
    assert!(syncs_of(&world, "sure") >= 3);
    world.ok(["fork", "sure", "--name", "copy"]);
    assert!(syncs_of(&world, "copy-1") >= 3);
    for sandbox in ["fast", "sure", "copy-1"] {
        world.ok(["rm", "-f", sandbox]);
    }
    world.assert_empty();
}

/// Only the boot id shows that the host has booted again.
#[test]
fn a_start_after_the_host_went_down_reports_possible_losses() {
    let world = World::new();
    for (sandbox, options) in [("fast", &[][..]), ("sure", &["--durable"])] {
        world.start(sandbox, options);
        world.ok(["checkpoint", sandbox, "base"]);
        let keeper = world.inspect(sandbox)["keeper_pid"].as_u64().unwrap();
        let path = dir_of(&world, sandbox).join("state.json");
        kill(keeper as u32, "KILL");
        until("its lock is free", || {
            processes_of(&path).is_empty() && !is_alive(keeper as u32)
        });
        let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        state["boot_id"] = "00000000-0000-0000-0000-000000000000".into();
        fs::write(&path, serde_json::to_vec(&state).unwrap()).unwrap();
    }
    until("no machine is left", || {
        processes_of(world.home()).is_empty()
    });
    let started = world.ok(["start", "fast"]);
    for word in [
        "the host went down while fast ran",
        "damaged",
        "sandtree revert fast",
    ] {
        assert!(started.err().contains(word), "{started:?}");
    }
    assert!(!world.ok(["start", "sure"]).err().contains("damaged"));
    for sandbox in ["fast", "sure"] {
        world.ok(["rm", "-f", sandbox]);
    }
    world.assert_empty();
}

/// Files that are otherwise shared by hard links are copied.
#[test]
fn a_store_on_a_file_system_without_hard_links_works() {
    let shimmed = Shimmed::new();
    let world = &shimmed.world;
    shimmed.order("linkat", "");
    shimmed.ok(["run", "-d", "--name", "a", "tiny"]);
    say(world, "a", "echo one > /dev/shm/word; echo one > /srv/word");
    shimmed.ok(["checkpoint", "a", "base"]);
    shimmed.ok(["fork", "a", "--name", "copy"]);
    assert_eq!(
        say(world, "copy-1", "cat /dev/shm/word /srv/word"),
        "one\none"
    );
    shimmed.ok(["save", "--memory", "a", "saved"]);
    shimmed.ok(["run", "-d", "--name", "b", "saved"]);
    assert_eq!(say(world, "b", "cat /dev/shm/word /srv/word"), "one\none");
    shimmed
        .run(["run", "-d", "--name", "b", "tiny"])
        .failed_with(&["b", "taken"]);
    shimmed.ok(["snapshot", "verify", "saved"]);
    shimmed.ok(["snapshot", "rm", "saved"]);
    shimmed.remove(&["a", "b", "copy-1"]);
}
