//! States of one accelerator on a host with the other: a state of TCG continues under TCG, and a
//! state of KVM needs KVM or a cold boot.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::outer::{Outer, STORE};
use crate::support::{World, say, text};

const SHAPE: [&str; 2] = ["--memory", "128M"];

/// Users whose host gets KVM later have such states.
#[test]
fn a_state_of_the_emulator_continues_where_kvm_works() {
    let world = World::new();
    world.start("a", &[&["--accel", "tcg"], &SHAPE[..]].concat());
    let file = world.home().join("../saved.tar.zst");
    world.ok(["save", "a", "saved", "--memory"]);
    world.ok([
        "snapshot".as_ref(),
        "export".as_ref(),
        "saved".as_ref(),
        "-o".as_ref(),
        file.as_os_str(),
    ]);
    world.ok(["rm", "-f", "a"]);

    let outer = Outer::start();
    let mut tar = Command::new("tar");
    tar.args(["--create", "-C"])
        .arg(file.parent().unwrap())
        .arg("saved.tar.zst");
    outer.send(tar, "/srv");
    let ok = |args: &[&str]| outer.ok(STORE, args);
    ok(&[
        "snapshot",
        "import",
        "/srv/saved.tar.zst",
        "--name",
        "there",
    ]);
    assert_eq!(
        outer.accelerator_of("run -d --name begun there", "begun"),
        "tcg"
    );
    // A request for KVM is refused with an alternative.
    let refused = outer.sandtree(
        STORE,
        &["run", "-d", "--accel", "kvm", "--name", "a", "there"],
    );
    refused.failed_with(&["its accelerator is tcg", "--accel tcg", "--cold"]);
    outer.end();
}

/// Leaves the choice of the accelerator to the program, as most do. On a host with KVM such a
/// sandbox would not be emulated when it is created.
fn leave_the_choice(world: &World, sandbox: &str) {
    let id = text(&world.inspect(sandbox)["id"]).to_owned();
    let path = world.home().join("sandboxes").join(id).join("sandbox.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(record["accel"], "tcg", "{record}");
    record["accel"] = "auto".into();
    fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
}

/// It continues by emulation, and what is saved of it says so to those who want KVM.
#[test]
fn a_paused_sandbox_of_the_emulator_continues_where_kvm_works() {
    let world = World::new();
    world.start("a", &[&["--accel", "tcg"], &SHAPE[..]].concat());
    world.ok(["pause", "a"]);
    leave_the_choice(&world, "a");

    let outer = Outer::start();
    outer.carry_in(&world);
    outer.ok(STORE, &["save", "a", "saved", "--memory"]);
    let refused = outer.sandtree(
        STORE,
        &["run", "-d", "--accel", "kvm", "--name", "b", "saved"],
    );
    refused.failed_with(&["its accelerator is tcg", "--accel tcg", "--cold"]);
    assert_eq!(outer.accelerator_of("resume a", "a"), "tcg");
    outer.end();
}

/// It is refused by name and stays paused; a save of its disk boots by emulation.
#[test]
fn a_paused_sandbox_of_kvm_is_refused_by_name_while_there_is_none() {
    let outer = Outer::start();
    let ok = |args: &[&str]| outer.ok(STORE, args);
    ok(&[&["run", "-d", "--name", "a"], &SHAPE[..], &["tiny"]].concat());
    ok(&["exec", "a", "--", "sh", "-c", "echo one > /dev/shm/word"]);
    ok(&["pause", "a"]);
    outer.say("chmod 0600 /dev/kvm");
    let refused = outer.sandtree(STORE, &["resume", "a"]);
    refused.failed_with(&[
        "its accelerator is kvm",
        "mode 0600",
        "sandtree save SANDBOX NAME",
        "sandtree run --cold",
    ]);
    ok(&["save", "a", "saved"]);
    assert_eq!(
        outer.accelerator_of("run -d --cold --name begun saved", "begun"),
        "tcg"
    );

    outer.say("chmod 0660 /dev/kvm");
    ok(&["resume", "a"]);
    let word = outer.sandtree(STORE, &["exec", "a", "--", "cat", "/dev/shm/word"]);
    assert_eq!((word.code, word.out()), (0, "one\n"), "{word:?}");
    outer.end();
}

/// A host without KVM cannot continue the state. It says so, and boots from the state's disk.
#[test]
fn a_state_of_kvm_is_refused_by_name_without_kvm() {
    let outer = Outer::start();
    let ok = |args: &[&str]| outer.ok(STORE, args);
    ok(&[&["run", "-d", "--name", "a"], &SHAPE[..], &["tiny"]].concat());
    ok(&["exec", "a", "--", "sh", "-c", "echo one > /srv/word; sync"]);
    ok(&["save", "a", "saved", "--memory"]);
    ok(&["snapshot", "export", "saved", "-o", "/srv/saved.tar.zst"]);
    ok(&["rm", "-f", "a"]);

    let world = World::new();
    let file = world.home().join("../saved.tar.zst");
    let mut copying = outer.world.command();
    copying
        .args(["exec", "outer", "--", "cat", "/srv/saved.tar.zst"])
        .stdout(fs::File::create(&file).unwrap());
    assert!(copying.stderr(Stdio::inherit()).status().unwrap().success());
    outer.end();
    world.ok([
        "snapshot".as_ref(),
        "import".as_ref(),
        file.as_os_str(),
        "--name".as_ref(),
        "there".as_ref(),
    ]);
    let refused = world.run(["run", "-d", "--accel", "tcg", "--name", "a", "there"]);
    refused.failed_with(&["its accelerator is kvm", "--cold"]);
    world.ok([
        "run", "-d", "--accel", "tcg", "--cold", "--name", "a", "there",
    ]);
    assert_eq!(say(&world, "a", "cat /srv/word"), "one");
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}
