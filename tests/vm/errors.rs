//! Errors that a user must be able to act on: one clear sentence, its cause, a hint, exit code 125,
//! and nothing left behind.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::mount::Mount;
use crate::support::{self, Answer, DEADLINE, World, eventually, finish, kill, until, wait};

/// The error that a command prints with `--json`.
fn json_error(answer: &Answer) -> Value {
    assert_eq!(answer.code, 125, "{answer:?}");
    let said: Value =
        serde_json::from_slice(&answer.stderr).unwrap_or_else(|e| panic!("{e}: {answer:?}"));
    said["error"].clone()
}

#[test]
fn an_unknown_image_is_named() {
    let world = World::new();
    world
        .run(["run", "-d", "nosuch"])
        .failed_with(&["there is no image nosuch", "hint: `debian` and `tiny`"]);
    let error = json_error(&world.run(["--json", "run", "-d", "nosuch"]));
    assert_eq!(error["kind"], "not_found", "{error}");
    assert_eq!(error["code"], "no_image", "{error}");
    assert_eq!(error["arguments"], json!({ "name": "nosuch" }), "{error}");
    assert!(
        error["message"].as_str().unwrap().contains("nosuch") && error["hint"].is_string(),
        "{error}"
    );
    world.assert_empty();
}

#[test]
fn a_bad_name_is_refused_before_anything_is_touched() {
    let dir = tempfile::Builder::new().prefix("st-").tempdir().unwrap();
    let world = World::empty_at(dir.path().join("home"));
    for name in ["", "../x", "A", ".a", "a/b", &"z".repeat(64)] {
        let commands: [&[&str]; 9] = [
            &["run", "-d", "--name", name, "tiny"],
            &["exec", name, "--", "true"],
            &["inspect", name],
            &["logs", name],
            &["stats", name],
            &["stop", name],
            &["start", name],
            &["rm", name],
            &["rm", "-f", "a", name],
        ];
        for command in commands {
            let answer = world.run(command);
            answer.failed_with(&[&format!("{name:?}"), "a-z"]);
        }
        // Where an image is expected, a name that looks like a path is the directory of a snapshot.
        let what = if name.starts_with('.') || name.contains('/') {
            "there is no snapshot"
        } else {
            "a-z"
        };
        world
            .run(["run", name, "--", "true"])
            .failed_with(&[name, what]);
        assert!(!world.home().exists(), "{name:?}: the store was made");
    }
    world
        .run(["cp", "A:/x", "-"])
        .failed_with(&["\"A\"", "a-z"]);
    assert!(!world.home().exists(), "the store was made for a copy");
}

#[test]
fn a_bad_name_among_good_ones_touches_nothing() {
    let world = World::new();
    world.start("a", &[]);
    let before = listing(world.home());
    world.run(["rm", "-f", "a", "../x"]).failed_with(&["../x"]);
    world.run(["stop", "a", "A"]).failed_with(&["\"A\""]);
    assert_eq!(world.inspect("a")["state"], "running");
    assert_eq!(listing(world.home()), before);
    world.ok(["rm", "-f", "a"]);
}

/// Every path below a directory, with its change time, except logs and disks, which grow.
fn listing(dir: &Path) -> Vec<(PathBuf, i64, i64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let status = entry.metadata().unwrap();
        let grows = [".log", ".qcow2"]
            .iter()
            .any(|end| entry.file_name().to_string_lossy().ends_with(end));
        if status.is_dir() {
            found.extend(listing(&entry.path()));
        }
        if !grows {
            found.push((entry.path(), status.mtime(), status.mtime_nsec()));
        }
    }
    found.sort();
    found
}

#[test]
fn bad_sizes_and_shapes_are_refused() {
    let world = World::new();
    let refused: [(&[&str], &str); 8] = [
        (&["--memory", "lots"], "use a number, with K, M, G or T"),
        (&["--memory", "1M"], "64 MiB"),
        (&["--memory", "0"], "64 MiB"),
        (&["--memory", "9999T"], "4 TiB"),
        (&["--disk=-1"], "--disk"),
        (&["--disk", "1M"], "at least as large as the image"),
        (&["--cpus", "0"], "1 to 64"),
        (&["--cpus", "65"], "1 to 64"),
    ];
    for (options, word) in refused {
        let args = [&["run", "-d"], options, &["tiny"]].concat();
        world.run(&args).failed_with(&[word]);
        let error = json_error(&world.run([&["--json"], &args[..]].concat()));
        assert_eq!(error["kind"], "invalid", "{options:?}: {error}");
    }
    world.assert_empty();
}

#[test]
fn more_memory_than_the_host_has_is_refused_before_anything_starts() {
    let world = World::new();
    world
        .run(["run", "-d", "--memory", "4T", "tiny"])
        .failed_with(&["MiB of memory", "4194304 MiB", "--memory"]);
    let error = json_error(&world.run(["--json", "run", "--memory", "4T", "tiny"]));
    assert_eq!(error["kind"], "exhausted", "{error}");
    world.assert_empty();
}

/// A program in place of QEMU.
fn fake_qemu(dir: &Path, script: &str) -> PathBuf {
    let path = dir.join("qemu-system-x86_64");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_missing_or_old_qemu_is_reported_with_a_remedy() {
    let world = World::new();
    world
        .run(["--qemu", "/nonexistent/qemu", "run", "-d", "tiny"])
        .failed_with(&["/nonexistent/qemu", "install QEMU"]);
    let mut without = world.command();
    without
        .env("PATH", "/nonexistent/bin")
        .args(["run", "-d", "tiny"]);
    let answer = finish(
        without
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    answer.failed_with(&[
        "no qemu-system-x86_64 found",
        "/nonexistent/bin",
        "install QEMU",
    ]);
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let old = fake_qemu(dir.path(), "echo 'QEMU emulator version 6.2.0'");
    let old = old.to_str().unwrap();
    world
        .run(["--qemu", old, "run", "-d", "tiny"])
        .failed_with(&["6.2.0", "too old", "7.2", "newer QEMU"]);
    let doctor = world.run(["--qemu", old, "doctor"]);
    assert_eq!(doctor.code, 125, "{doctor:?}");
    assert!(doctor.err().contains("too old"), "{doctor:?}");
    fake_qemu(dir.path(), "echo 'something else' >&2");
    world
        .run(["--qemu", old, "run", "-d", "tiny"])
        .failed_with(&["does not print a QEMU version", "something else"]);
    world.assert_empty();
}

#[test]
fn a_qemu_that_does_not_start_is_quoted() {
    let world = World::new();
    let answer = world.run(["run", "-d", "--qemu-arg=-nonsense", "tiny"]);
    answer.failed_with(&[
        "QEMU ended while starting",
        "nonsense: invalid option",
        "--qemu-arg",
    ]);
    let error = json_error(&world.run(["--json", "run", "-d", "--qemu-arg=-nonsense", "tiny"]));
    assert_eq!(error["kind"], "engine", "{error}");
    world.assert_empty();
}

#[test]
fn an_accelerator_that_does_not_work_says_why() {
    let world = World::new();
    let found = world.json(["doctor"])["qemu"]["found"].clone();
    let answer = world.run(["run", "--accel", "kvm", "tiny", "--", "true"]);
    match found["kvm_refused"].as_str() {
        Some(reason) => answer.failed_with(&["kvm", reason, "--accel auto"]),
        None => assert_eq!(answer.code, 0, "{answer:?}"),
    }
    world.assert_empty();
}

#[test]
fn a_kernel_that_panics_while_it_boots_is_quoted() {
    let world = World::new();
    let nowhere = "--qemu-arg=console=ttyS0 loglevel=4 panic=-1 rdinit=/nowhere";
    let answer = world.run(["run", "-d", "--qemu-arg=-append", nowhere, "tiny"]);
    answer.failed_with(&[
        "the guest ended while it started",
        "the guest's kernel panicked",
        "Kernel panic - not syncing",
    ]);
    world.assert_empty();
}

#[test]
fn an_agent_that_does_not_answer_in_time_is_reported_with_the_console() {
    let world = World::new();
    // A kernel with a console that never starts the agent. It must have begun to print.
    let silent = "--qemu-arg=console=ttyS0 loglevel=7 rdinit=/nowhere panic=0";
    let args = [
        "run",
        "-d",
        "--boot-timeout",
        "15s",
        "--qemu-arg=-append",
        silent,
        "--qemu-arg=-action",
        "--qemu-arg=panic=none",
        "tiny",
    ];
    world.run(args).failed_with(&[
        "did not come up within 15 s; its console ends with:\n  [",
        "--boot-timeout",
    ]);
    world.assert_empty();
    let error = json_error(&world.run([
        "--json",
        "run",
        "-d",
        "--cold",
        "--boot-timeout",
        "1ms",
        "tiny",
    ]));
    assert_eq!(error["kind"], "timeout", "{error}");
    world.assert_empty();
}

#[test]
fn a_taken_name_stays_with_its_owner() {
    let world = World::new();
    let first = world.start("x", &[]);
    let answer = world.run(["run", "-d", "--name", "x", "tiny"]);
    answer.failed_with(&[
        "the name x is taken",
        first["id"].as_str().unwrap(),
        "--name",
    ]);
    let error = json_error(&world.run(["--json", "run", "-d", "--name", "x", "tiny"]));
    assert_eq!(error["kind"], "already_exists", "{error}");
    assert_eq!(world.sh("x", "echo here").out(), "here\n");
    world.ok(["rm", "-f", "x"]);
    world.assert_empty();
}

#[test]
fn one_of_several_concurrent_creations_gets_the_name() {
    let world = World::new();
    let begin = || {
        let mut command = world.command();
        command
            .args(["run", "-d", "--name", "x", "tiny"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..3).map(|_| begin()).collect();
    let answers: Vec<Answer> = children.into_iter().map(finish).collect();
    let (won, lost): (Vec<&Answer>, Vec<&Answer>) =
        answers.iter().partition(|answer| answer.code == 0);
    assert_eq!(won.len(), 1, "{answers:?}");
    lost.iter()
        .for_each(|answer| answer.failed_with(&["taken"]));
    assert_eq!(world.inspect("x")["id"], won[0].out().trim());
    // The directory and the name of the sandbox that was created.
    assert_eq!(world.residue().len(), 2, "{:?}", world.residue());
    world.ok(["rm", "-f", "x"]);
    world.assert_empty();
}

#[test]
fn a_sandbox_that_does_not_run_says_so_and_one_that_runs_is_not_removed() {
    let world = World::new();
    world.start("a", &[]);
    world
        .run(["rm", "a"])
        .failed_with(&["sandbox a is running", "rm -f"]);
    world
        .run(["start", "a"])
        .failed_with(&["sandbox a is running", "cannot be started"]);
    assert_eq!(world.sh("a", "echo here").out(), "here\n");
    world.ok(["stop", "a"]);
    let down: [&[&str]; 3] = [
        &["exec", "a", "--", "true"],
        &["stats", "a"],
        &["cp", "a:/etc/hosts", "-"],
    ];
    for command in down {
        world
            .run(command)
            .failed_with(&["sandbox a is stopped", "sandtree start"]);
    }
    world
        .run(["stop", "a"])
        .failed_with(&["sandbox a is stopped", "cannot be stopped"]);
    let error = json_error(&world.run(["--json", "exec", "a", "--", "true"]));
    assert_eq!(error["kind"], "wrong_state", "{error}");
    assert_eq!(error["code"], "wrong_state", "{error}");
    let arguments = json!({ "sandbox": "a", "phase": "stopped", "verb": "use", "reason": null });
    assert_eq!(error["arguments"], arguments, "{error}");
    assert!(error["hint"].is_string(), "{error}");
    world.ok(["rm", "a"]);
    world
        .run(["rm", "a"])
        .failed_with(&["there is no sandbox a", "ps -a"]);
    world.assert_empty();
}

#[test]
fn a_port_that_is_taken_is_named() {
    let world = World::new();
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let answer = world.run(["run", "-d", "--publish", &format!("{port}:80"), "tiny"]);
    answer.failed_with(&[&format!("127.0.0.1:{port}"), "in use", "another host port"]);
    world.assert_empty();
}

#[test]
fn waiting_callers_learn_that_a_keeper_died() {
    let world = World::new();
    world.start("a", &[]);
    let info = world.inspect("a");
    let pid = |field: &str| u32::try_from(info[field].as_u64().unwrap()).unwrap();
    let mut command = world.command();
    let args = [
        "exec",
        "a",
        "--",
        "sh",
        "-c",
        "touch /run/waits; sleep 1000",
    ];
    let mut waiting = command
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("the command runs", || {
        world.sh("a", "test -e /run/waits").code == 0
    });
    kill(pid("keeper_pid"), "KILL");
    wait(&mut waiting, Duration::from_secs(20)).expect("a waiting command ends at once");
    finish(waiting).failed_with(&[
        "cannot wait for sh",
        "connection to the guest ended",
        "inspect",
    ]);
    until("no QEMU outlives its keeper", || {
        !support::is_alive(pid("qemu_pid"))
    });
    world.sh("a", "true").failed_with(&[
        "crashed",
        &format!("its keeper, process {}, died", pid("keeper_pid")),
    ]);
    world.ok(["rm", "a"]);
    world.assert_empty();
}

#[test]
fn waiting_callers_learn_why_a_sandbox_died() {
    let world = World::new();
    world.start("a", &[]);
    let waits = |mark: &str| {
        let line = format!("touch /run/{mark}; sleep 1000");
        let mut command = world.command();
        let child = command
            .args(["exec", "a", "--", "sh", "-c", &line])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = child.spawn().unwrap();
        until("the command runs", || {
            world.sh("a", &format!("test -e /run/{mark}")).code == 0
        });
        child
    };
    let first = waits("first");
    kill(
        u32::try_from(world.inspect("a")["qemu_pid"].as_u64().unwrap()).unwrap(),
        "KILL",
    );
    finish(first).failed_with(&["cannot wait for sh", "QEMU ended", "signal: 9"]);
    world.ok(["start", "a"]);
    let second = waits("second");
    world.ok(["stop", "--grace", "1s", "a"]);
    finish(second).failed_with(&["cannot wait for sh", "stopped"]);
    world.ok(["start", "a"]);
    let third = waits("third");
    world.ok(["rm", "-f", "a"]);
    finish(third).failed_with(&["cannot wait for sh", "removed"]);
    world.assert_empty();
}

#[test]
fn a_full_host_disk_is_reported_before_anything_starts() {
    let Some(disk) = Mount::tmpfs(400) else {
        return;
    };
    let world = World::at(disk.path().join("home"));
    disk.fill(32 << 10);
    let answer = world.run(["run", "-d", "tiny"]);
    answer.failed_with(&["MiB free", "needs 64 MiB to start", "free some space"]);
    world.assert_empty();
}

#[test]
fn a_guest_waits_while_the_host_disk_is_full() {
    let Some(disk) = Mount::tmpfs(600) else {
        return;
    };
    let world = World::at(disk.path().join("home"));
    world.start("a", &["--disk", "1G"]);
    disk.fill(40 << 10);
    let mut command = world.command();
    let line = "dd if=/dev/urandom of=/srv/big bs=1M count=100 2>/dev/null && sync && sha256sum /srv/big && echo done";
    let mut writing = command
        .args(["exec", "a", "--", "sh", "-c", line])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stalled = eventually(DEADLINE, || {
        let mut command = world.command();
        let asked = command
            .args(["exec", "a", "--", "true"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut asking = asked.spawn().unwrap();
        if wait(&mut asking, Duration::from_secs(5)).is_none() {
            // A command that started just before waits together with the guest.
            kill(asking.id(), "KILL");
        }
        Some(finish(asking)).filter(|answer| answer.err().contains("disk is full"))
    });
    stalled.expect("the guest stalls").failed_with(&[
        "the host's disk is full",
        "waits",
        "hint: free some space",
    ]);
    assert_eq!(writing.try_wait().unwrap(), None, "the command waits");
    assert_eq!(world.inspect("a")["state"], "running");
    disk.empty_again();
    let written = finish(writing);
    assert!(
        written.code == 0 && written.out().ends_with("done\n"),
        "{written:?}"
    );
    let again = world.sh("a", "echo 3 > /proc/sys/vm/drop_caches; sha256sum /srv/big");
    assert_eq!(
        written.out(),
        format!("{}done\n", again.out()),
        "what was written in between is whole"
    );
    world.ok(["stop", "a"]);
    world.ok(["rm", "a"]);
    world.assert_empty();
}
