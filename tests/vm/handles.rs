//! One handle for a sandbox in any process: every verb in this process, through a keeper and at
//! rest; `kill`, `stop` and panics during other verbs; watching; and the one commit of several new
//! sandboxes.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use sandtree::{
    Error, ErrorKind, ExecSpec, Fault, Faults, Forget, ForkSpec, Goal, Host, HostConfig, Phase,
    Progress, Replace, Report, RunIn, Sandbox, SandboxSpec, SaveSpec, Step,
};
use serde_json::Value;

use crate::support::lab::{Lab, config, in_keepers, sh, spec, until_async};
use crate::support::{World, dir_of, entries, finish, kill, processes_of, until};

/// Less than the 10 s that QEMU may take to answer.
const PROMPT: Duration = Duration::from_secs(7);

async fn host(world: &World, run_in: RunIn) -> Host {
    let config = HostConfig {
        run_in,
        ..config(world.home())
    };
    Host::open(config).await.expect("the store opens")
}

/// Runs every verb. Each handle is looked up again, so that it knows nothing but the store.
async fn every_verb(host: &Host) {
    let sandbox = || host.sandbox("a").expect("it exists");
    // A sandbox of this process ends with its last handle, so one is held.
    let held = host.create(spec("a")).await.expect("it is created");
    assert_eq!(
        sh(&sandbox(), "echo one > /srv/word; cat /srv/word").await,
        "one"
    );
    let taken = sandbox().checkpoint(Some("one"), Replace::No).await;
    assert_eq!(taken.expect("it is taken").tag.as_deref(), Some("one"));
    sh(&sandbox(), "echo two > /srv/word").await;
    sandbox().revert("one").await.expect("it is reverted");
    assert_eq!(sh(&sandbox(), "cat /srv/word").await, "one");
    sandbox()
        .go_to(Goal::Undo { steps: 1 })
        .await
        .expect("it is undone");
    assert_eq!(sh(&sandbox(), "cat /srv/word").await, "two");

    let (forks, report) = sandbox()
        .fork(ForkSpec::new(2))
        .await
        .expect("it is forked");
    assert!(report.pause_ms > 0.0);
    for fork in &forks {
        assert_eq!(sh(fork, "cat /srv/word").await, "two");
        fork.remove().await.expect("it is removed");
    }
    let save = SaveSpec::new("kept").expect("it is a name");
    sandbox()
        .save(save, Progress::silent())
        .await
        .expect("it is saved");

    sandbox().pause().await.expect("it is paused");
    assert_eq!(sandbox().state().phase, Some(Phase::Paused));
    at_rest(host, &sandbox()).await;
    sandbox().resume().await.expect("it is resumed");
    assert_eq!(sh(&sandbox(), "cat /srv/word").await, "two");

    sandbox().stop(None).await.expect("it is stopped");
    at_rest(host, &sandbox()).await;
    sandbox().start(None).await.expect("it is started");
    assert_eq!(sh(&sandbox(), "cat /srv/word").await, "two");
    sandbox().kill().await.expect("it is killed");
    assert_eq!(sandbox().state().phase, Some(Phase::Stopped));
    sandbox()
        .revert("one")
        .await
        .expect("it is reverted from rest");
    assert_eq!(sh(&sandbox(), "cat /srv/word").await, "one");
    sandbox()
        .forget(Forget::All)
        .await
        .expect("states are removed");
    sandbox().remove().await.expect("it is removed");
    drop(held);
    assert_eq!(
        host.sandbox("a").expect_err("it is gone").kind(),
        ErrorKind::NotFound
    );
}

/// Errors of several verbs and of the guest, as data.
async fn errors(host: &Host) -> Vec<Report> {
    let sandbox = host.create(spec("a")).await.expect("it is created");
    let tag = || sandbox.checkpoint(Some("one"), Replace::No);
    tag().await.expect("it is taken");
    let guest = sandbox.guest().await.expect("it runs");
    let mut errors = vec![
        tag().await.expect_err("the tag is taken"),
        sandbox.revert("nosuch").await.expect_err("there is none"),
        sandbox
            .go_to(Goal::Undo { steps: 5 })
            .await
            .expect_err("there are not so many"),
        sandbox.resume().await.expect_err("it is not paused"),
        guest
            .files()
            .stat("/nosuch")
            .await
            .expect_err("there is no such file"),
    ];
    sandbox.stop(None).await.expect("it is stopped");
    errors.push(sandbox.resume().await.expect_err("it is not paused"));
    sandbox.remove().await.expect("it is removed");
    errors.iter().map(Error::report).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_a_keeper_has_the_code_and_arguments_of_one_of_this_process() {
    let world = World::new();
    let here = errors(&host(&world, RunIn::ThisProcess).await).await;
    let kept = errors(&host(&world, in_keepers()).await).await;
    assert_eq!(here, kept);
    let codes: Vec<&str> = here.iter().map(|report| report.code.as_str()).collect();
    assert_eq!(
        codes,
        [
            "tag_taken",
            "no_state",
            "no_step",
            "wrong_state",
            "file_not_found",
            "wrong_state"
        ]
    );
    assert_eq!(here[0].text("tag"), Some("one"));
    assert_eq!(
        (here[3].text("phase"), here[3].text("verb")),
        (Some("running"), Some("resume"))
    );
    assert_eq!(here[4].arguments["errno"], 2);
    world.assert_empty();
}

/// What a sandbox without a machine can do and what it refuses.
async fn at_rest(host: &Host, sandbox: &Sandbox) {
    let refused = sandbox.checkpoint(None, Replace::No).await;
    assert_eq!(
        refused.expect_err("it has no machine").kind(),
        ErrorKind::WrongState
    );
    let refused = sandbox.guest().await.map(drop);
    assert_eq!(
        refused.expect_err("it has no machine").kind(),
        ErrorKind::WrongState
    );
    let save = SaveSpec {
        replace: Replace::Yes,
        ..SaveSpec::new("kept").expect("it is a name")
    };
    sandbox
        .save(save, Progress::silent())
        .await
        .expect("it is saved");
    let (forks, _) = sandbox.fork(ForkSpec::new(1)).await.expect("it is forked");
    assert_eq!(sh(&forks[0], "cat /srv/word").await, "two");
    forks[0].remove().await.expect("it is removed");
    assert_eq!(host.list().expect("it lists").0.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_verb_works_in_this_process_and_at_rest() {
    let world = World::new();
    every_verb(&host(&world, RunIn::ThisProcess).await).await;
    world.ok(["snapshot", "rm", "kept"]);
    world.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_verb_works_through_keepers_and_at_rest() {
    let world = World::new();
    every_verb(&host(&world, in_keepers()).await).await;
    world.ok(["snapshot", "rm", "kept"]);
    world.assert_empty();
}

/// A command that a shutdown waits for as long as it may, because the command ignores signals.
fn start_deaf_command(world: &World) {
    let deaf = "trap '' TERM; touch /run/deaf; while :; do sleep 1000; done";
    world.ok(["exec", "-d", "a", "--", "sh", "-c", deaf]);
    until("the command ignores the signal", || {
        world.sh("a", "test -e /run/deaf").code == 0
    });
}

fn begin_stop(world: &World, grace: &str) -> Child {
    let mut command = world.command();
    let stopping = command
        .args(["stop", "--grace", grace, "a"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    until("it is stopping", || {
        world.inspect("a")["state"] == "stopping"
    });
    stopping
}

#[test]
fn kill_ends_a_machine_whatever_verb_is_running() {
    let world = World::new();
    world.start("a", &[]);
    start_deaf_command(&world);
    let stopping = begin_stop(&world, "10m");
    assert_eq!(world.json(["kill", "a"])["killed"], "a");
    assert_eq!(finish(stopping).code, 0, "the stop found it stopped");
    assert_eq!(world.inspect("a")["state"], "stopped");
    world.run(["kill", "a"]).failed_with(&["stopped"]);
    world.ok(["rm", "a"]);
    world.assert_empty();
}

#[test]
fn a_removal_interrupts_a_stop_and_a_second_stop_waits_for_the_first() {
    let world = World::new();
    world.start("a", &[]);
    start_deaf_command(&world);
    let first = begin_stop(&world, "10m");
    let second = begin_stop(&world, "10m");
    let is_connected = |pid: u32| {
        let mut open = entries(Path::new(&format!("/proc/{pid}/fd"))).into_iter();
        open.any(|fd| {
            fd.read_link()
                .is_ok_and(|to| to.to_string_lossy().starts_with("socket:"))
        })
    };
    until("the second waits", || is_connected(second.id()));
    world.ok(["kill", "a"]);
    for stop in [first, second] {
        assert_eq!(finish(stop).code, 0);
    }
    assert_eq!(world.inspect("a")["state"], "stopped");

    world.ok(["start", "a"]);
    start_deaf_command(&world);
    let stopping = begin_stop(&world, "10m");
    world.ok(["rm", "-f", "a"]);
    finish(stopping);
    world.assert_empty();
}

/// At every moment, the guest's synced data is in the present or in the left state.
#[test]
fn a_kill_during_a_revert_loses_nothing() {
    let world = World::new();
    world.start("a", &[]);
    world.ok(["checkpoint", "a", "base"]);
    for delay_ms in [0, 20, 50, 100, 200, 400] {
        let word = format!("written-{delay_ms}");
        let line = format!("echo {word} > /srv/word; sync");
        assert_eq!(world.sh("a", &line).code, 0);
        let mut command = world.command();
        let reverting = command
            .args(["revert", "a", "base"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        // The moment is the point of this test; nothing is lost at any moment.
        std::thread::sleep(Duration::from_millis(delay_ms));
        world.ok(["kill", "a"]);
        finish(reverting);
        // If the kill came first, the sandbox is stopped, and the revert starts it.
        if world.inspect("a")["state"] != "running" {
            world.ok(["start", "a"]);
        }
        let read = "cat /srv/word 2> /dev/null || true";
        if world.sh("a", read).out().trim() != word {
            world.ok(["undo", "a"]);
            assert_eq!(
                world.sh("a", read).out().trim(),
                word,
                "after {delay_ms} ms"
            );
        }
    }
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_fails_one_verb_and_the_sandbox_continues() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("a")).await.expect("it is created");
    sh(&sandbox, "echo kept > /srv/word").await;
    for step in [
        Step::CapturePrepared,
        Step::CaptureStopped,
        Step::CapturePublish,
    ] {
        lab.fault(step, Fault::Panic);
        let failed = sandbox.checkpoint(None, Replace::No).await;
        let error = failed.expect_err("it panicked");
        assert_eq!(error.kind(), ErrorKind::Internal, "{step}: {error}");
        assert!(
            error.to_string().contains("injected a panic"),
            "{step}: {error}"
        );
        lab.no_fault();
        assert_eq!(sh(&sandbox, "cat /srv/word").await, "kept", "{step}");
        let taken = sandbox.checkpoint(None, Replace::No).await;
        taken.unwrap_or_else(|error| panic!("{step}: {error}"));
    }
    sandbox.remove().await.expect("it is removed");
}

fn with_automatic_checkpoints() -> SandboxSpec {
    SandboxSpec {
        auto_checkpoint: Some(3),
        ..spec("a")
    }
}

/// Runs a command that does nothing.
async fn run_true(sandbox: Sandbox) -> Result<(), Error> {
    let command = sandbox.exec(ExecSpec::shell("true")).await?;
    command.output(1 << 10).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_an_automatic_checkpoint_fails_one_command() {
    let lab = Lab::open().await;
    let created = lab.host.create(with_automatic_checkpoints()).await;
    let sandbox = created.expect("it is created");
    sh(&sandbox, "echo kept > /srv/word").await;
    lab.fault(Step::CapturePrepared, Fault::Panic);
    let failed = run_true(sandbox.clone()).await;
    let error = failed.expect_err("its checkpoint panicked");
    assert!(
        format!("{error:?}").contains("injected a panic"),
        "{error:?}"
    );
    lab.no_fault();
    assert_eq!(sh(&sandbox, "cat /srv/word").await, "kept");
    sandbox.remove().await.expect("it is removed");
}

/// QEMU is held, so its checkpoint takes as long as it may.
#[tokio::test(flavor = "multi_thread")]
async fn kill_interrupts_an_automatic_checkpoint() {
    let lab = Lab::open().await;
    let created = lab.host.create(with_automatic_checkpoints()).await;
    let sandbox = created.expect("it is created");
    let disks = lab.dir(&sandbox).join("disks");
    let before = entries(&disks);
    kill(lab.machine(&sandbox), "STOP");
    let command = tokio::spawn(run_true(sandbox.clone()));
    until_async("its checkpoint begins", || entries(&disks) != before).await;
    let killed = tokio::time::timeout(PROMPT, sandbox.kill()).await;
    killed
        .expect("it does not wait for the checkpoint")
        .expect("it is killed");
    assert_eq!(sandbox.state().phase, Some(Phase::Stopped));
    let failed = command.await.expect("it ends");
    failed.expect_err("its machine was killed");
    sandbox.remove().await.expect("it is removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_fork_returns_the_states_it_borrowed() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("a")).await.expect("it is created");
    let states = lab.dir(&sandbox).join("states");
    let forking = {
        let sandbox = sandbox.clone();
        tokio::spawn(async move { sandbox.fork(ForkSpec::new(4)).await.map(drop) })
    };
    until_async("a state is lent", || !entries(&states).is_empty()).await;
    forking.abort();
    until_async("it is returned", || entries(&states).is_empty()).await;
    assert!(forking.await.is_err_and(|error| error.is_cancelled()));
    sandbox
        .checkpoint(None, Replace::No)
        .await
        .expect("it continues");
    sandbox.remove().await.expect("it is removed");
}

#[test]
fn a_watch_reports_every_state_until_the_end() {
    let world = World::new();
    world.start("a", &[]);
    let mut command = world.command();
    let mut watching = command
        .args(["--json", "watch", "a"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(watching.stdout.take().expect("it is piped")).lines();
    let mut next = || {
        lines
            .next()
            .expect("the output continues")
            .expect("it is read")
    };
    let phase = |line: &str| -> Value {
        let state: Value = serde_json::from_str(line).expect("a line is JSON");
        state["phase"].clone()
    };
    // A state that lasts is reported; the watcher looks for the next keeper a few times a second.
    let mut until_shown = |expected: &Value| while phase(&next()) != *expected {};
    until_shown(&"running".into());
    for (verb, expected) in [
        ("stop", "stopped"),
        ("start", "running"),
        ("pause", "paused"),
    ] {
        world.ok([verb, "a"]);
        until_shown(&expected.into());
    }
    world.ok(["rm", "a"]);
    until_shown(&Value::Null);
    assert_eq!(finish(watching).code, 0);
    world.assert_empty();
}

/// A command that a client waits for keeps the keeper of a paused sandbox, and a watch does not.
#[test]
fn a_watch_does_not_keep_the_keeper_of_a_paused_sandbox() {
    let world = World::new();
    world.start("a", &[]);
    let socket = dir_of(&world, "a").join("keeper.sock");
    let waits = "touch /run/begun; sleep 1000";
    let mut command = world.command();
    let waiting = command
        .args(["exec", "a", "--", "sh", "-c", waits])
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    until("the command runs", || {
        world.sh("a", "test -e /run/begun").code == 0
    });
    let mut command = world.command();
    let mut watching = command
        .args(["--json", "watch", "a"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let lines = BufReader::new(watching.stdout.take().expect("it is piped")).lines();
    let mut phases = lines.map(|line| -> Value {
        let state: Value = serde_json::from_str(&line.expect("it is read")).expect("it is JSON");
        state["phase"].clone()
    });
    assert_eq!(phases.next(), Some("running".into()));
    world.ok(["pause", "a"]);
    assert!(phases.any(|phase| phase == "paused"));
    assert!(socket.exists(), "a client waits");
    kill(waiting.id(), "KILL");
    finish(waiting);
    until("the keeper ends", || !socket.exists());
    world.ok(["rm", "a"]);
    assert!(phases.any(|phase| phase == Value::Null));
    assert_eq!(finish(watching).code, 0);
    world.assert_empty();
}

/// A fake keeper that answers every hello with one of its own.
fn pretend_to_be_a_keeper(socket: &Path, hello: &Value) -> std::thread::JoinHandle<()> {
    let listener = UnixListener::bind(socket).expect("it binds");
    let body = hello.to_string();
    let length = u32::try_from(body.len())
        .expect("it is short")
        .to_le_bytes();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client comes");
        let answer = [&length[..], body.as_bytes()].concat();
        stream.write_all(&answer).expect("it is heard");
        // Waits until the client has read it.
        std::io::copy(&mut stream, &mut std::io::sink()).expect("it leaves");
    })
}

#[test]
fn a_keeper_of_another_version_is_refused_by_name() {
    let world = World::new();
    world.start("a", &[]);
    let socket = dir_of(&world, "a").join("keeper.sock");
    let own = socket.with_extension("own");
    std::fs::rename(&socket, &own).expect("it is moved");
    let hello = serde_json::json!({ "protocol": 99, "program": "9.9.9", "features": [] });
    let pretending = pretend_to_be_a_keeper(&socket, &hello);
    world.run(["exec", "a", "--", "true"]).failed_with(&[
        "sandbox a",
        "version 99 (sandtree 9.9.9)",
        "version 3",
    ]);
    pretending.join().expect("it ends");
    std::fs::rename(&own, &socket).expect("it is moved back");
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

/// The existing copies of `a`, with their phases.
fn copies(world: &World) -> BTreeMap<String, String> {
    let listed = world.json(["ps", "-a"]);
    let text = |value: &Value| value.as_str().expect("it is a text").to_owned();
    let of = |sandbox: &Value| (text(&sandbox["name"]), text(&sandbox["state"]));
    let listed = listed.as_array().expect("it is a list").iter().map(of);
    listed.filter(|(name, _)| name != "a").collect()
}

fn assert_none(world: &World, what: &str) {
    until("no process of a copy is left", || {
        processes_of(world.home()).len() == 2
    });
    assert_eq!(copies(world), BTreeMap::new(), "{what}");
    assert_eq!(entries(&world.home().join("staging")).len(), 0, "{what}");
    assert_eq!(
        entries(&dir_of(world, "a").join("states")).len(),
        0,
        "{what}"
    );
}

/// A fork fails at the commit, and right after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_fork_has_one_commit_point() {
    let world = World::new();
    tokio::task::block_in_place(|| world.start("a", &[]));
    let failing = |step| {
        let config = HostConfig {
            run_in: in_keepers(),
            faults: Faults {
                fault: Some((step, Fault::Error)),
                ..Faults::default()
            },
            ..config(world.home())
        };
        async {
            let host = Host::open(config).await.expect("the store opens");
            let source = host.sandbox("a").expect("it exists");
            source.fork(ForkSpec::new(3)).await.map(drop)
        }
    };
    let error = failing(Step::Commit)
        .await
        .expect_err("it fails before the commit");
    assert!(matches!(error, Error::Injected { .. }), "{error}");
    tokio::task::block_in_place(|| assert_none(&world, "before the commit"));
    failing(Step::Committed)
        .await
        .expect_err("it fails after the commit");
    tokio::task::block_in_place(|| {
        until("all run", || {
            copies(&world)
                .values()
                .filter(|state| *state == "running")
                .count()
                == 3
        });
        for name in copies(&world).keys() {
            assert_eq!(world.sh(name, "true").code, 0, "{name}");
        }
        world.ok(["rm", "-f", "a-1", "a-2", "a-3"]);
        assert_none(&world, "after the copies are removed");
        world.ok(["rm", "-f", "a"]);
        world.assert_empty();
    });
}

/// `fork` and `run --count` are killed at many moments, and so is one of their keepers.
#[test]
fn several_sandboxes_exist_together_or_not_at_all_after_any_kill() {
    let world = World::new();
    world.start("a", &[]);
    let fork: &[&str] = &["fork", "a", "-n", "3", "--name", "p"];
    let run: &[&str] = &["run", "-d", "--count", "3", "--name", "p", "tiny"];
    for (args, delay_ms) in [fork, run]
        .into_iter()
        .flat_map(|args| [50, 200, 400, 600, 900, 1300].map(|delay| (args, delay)))
    {
        let what = format!("{} killed after {delay_ms} ms", args[0]);
        let mut command = world.command();
        let creating = command
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        // The moment is the point of this test; at any moment the result must be one of two.
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(creating.id(), "KILL");
        finish(creating);
        until("keepers have noticed", || {
            let found = copies(&world);
            let is_settled = found.values().all(|state| state == "running");
            let processes = 2 + 2 * found.len();
            is_settled && processes_of(world.home()).len() == processes
        });
        let found = copies(&world);
        assert!([0, 3].contains(&found.len()), "{what}: {found:?}");
        assert_eq!(entries(&world.home().join("staging")).len(), 0, "{what}");
        for name in found.keys() {
            assert_eq!(world.sh(name, "true").code, 0, "{what}: {name}");
            world.ok(["rm", "-f", name]);
        }
    }
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_that_dies_before_the_commit_leaves_none() {
    let world = World::new();
    tokio::task::block_in_place(|| world.start("a", &[]));
    let known = processes_of(world.home());
    let host = host(&world, in_keepers()).await;
    let source = host.sandbox("a").expect("it exists");
    let forking = tokio::spawn(async move { source.fork(ForkSpec::new(3)).await.map(drop) });
    let mut keeper = None;
    until_async("a keeper works", || {
        let new = processes_of(world.home());
        keeper = new.into_iter().find(|pid| !known.contains(pid));
        keeper.is_some()
    })
    .await;
    kill(keeper.expect("it was found"), "KILL");
    forking
        .await
        .expect("it ends")
        .expect_err("a copy is missing");
    tokio::task::block_in_place(|| {
        assert_none(&world, "a keeper died");
        world.ok(["rm", "-f", "a"]);
        world.assert_empty();
    });
}

/// The state says `paused` before the machine has ended and its keeper has left. A client
/// that resumes it then must get the same guest, not an error or a new boot.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_resumed_while_its_keeper_still_pauses_it() {
    let world = World::new();
    let host = host(&world, in_keepers()).await;
    let sandbox = host.create(spec("a")).await.expect("it is created");
    sh(&sandbox, "echo here > /dev/shm/word").await;
    for _ in 0..3 {
        let pausing = tokio::spawn({
            let sandbox = sandbox.clone();
            async move { sandbox.pause().await }
        });
        let other = host.sandbox("a").expect("it exists");
        while other.state().phase == Some(Phase::Running) {
            tokio::task::yield_now().await;
        }
        other.resume().await.expect("it is resumed");
        pausing.await.expect("no panic").expect("it was paused");
        assert_eq!(sh(&other, "cat /dev/shm/word").await, "here");
    }
    sandbox.remove().await.expect("it is removed");
}
