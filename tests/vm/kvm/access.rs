//! Who may use `/dev/kvm`, what other users see, and what happens when the permissions change.

use serde_json::Value;

use super::outer::{Outer, STORE};

/// Replaces the device by one that opens but is not KVM.
const BROKEN_DEVICE: &str = "rmmod kvm_amd && mknod -m 0666 /dev/kvm c 1 3";

/// Users of the outer guest: `member` is in the group `kvm`, `other` is not.
#[derive(Clone, Copy)]
enum User {
    Root,
    Ordinary(&'static str),
}

use User::{Ordinary, Root};

/// A line for the shell that runs `sandtree` as a user, in the user's own store.
fn as_user(user: User, args: &str) -> String {
    match user {
        Root => format!("SANDTREE_HOME={STORE} sandtree {args}"),
        // `su` takes the groups from /etc/group, as a login does.
        Ordinary(name) => {
            format!("su {name} -c 'cd; SANDTREE_HOME=/home/{name}/store sandtree {args}'")
        }
    }
}

/// What `doctor` reports about QEMU to a user.
fn doctor(outer: &Outer, user: User) -> Value {
    let report = outer.say(&as_user(user, "--json doctor"));
    let report: Value = serde_json::from_str(&report).unwrap_or_else(|e| panic!("{e}: {report}"));
    report["qemu"]["found"].clone()
}

#[track_caller]
fn assert_kvm(outer: &Outer, user: User, why: &str) {
    let found = doctor(outer, user);
    assert_eq!(
        (&found["accelerator"], &found["kvm_refused"]),
        (&"kvm".into(), &Value::Null),
        "{why}: {found}"
    );
}

/// Asserts that the emulator is used and that `doctor` gives the reason in these words.
#[track_caller]
fn assert_refused(outer: &Outer, user: User, words: &[&str]) {
    let found = doctor(outer, user);
    assert_eq!(found["accelerator"], "tcg", "{found}");
    let reason = found["kvm_refused"].as_str().unwrap_or_default();
    for word in words {
        assert!(reason.contains(word), "{word:?} is not in: {reason}");
    }
}

/// Runs a sandbox of the shape whose warm state every store here has.
fn run(accel: &str, line: &str) -> String {
    format!("run --accel {accel} --memory 128M tiny -- {line}")
}

/// Gives an ordinary user a store with the image and its warm states.
fn give_store(outer: &Outer, name: &str) {
    outer.say(&format!(
        "cp -a {STORE} /home/{name}/store && chown -R {name}:{name} /home/{name}/store"
    ));
}

/// Each of root's machines has a user id of its own, which is in no group; the jail adds the group
/// of the device.
#[test]
fn the_group_of_the_device_is_enough() {
    let outer = Outer::start();
    assert_eq!(outer.say("stat -c '%U:%G %a' /dev/kvm"), "root:kvm 660");
    assert_eq!(outer.say(&as_user(Root, &run("kvm", "echo up"))), "up");
    assert_eq!(doctor(&outer, Root)["own_uid"], true);

    give_store(&outer, "member");
    assert_kvm(&outer, Ordinary("member"), "a member of the group");
    assert_eq!(
        outer.say(&as_user(Ordinary("member"), &run("auto", "echo up"))),
        "up"
    );
    let started = as_user(Ordinary("member"), "run -d --name a --memory 128M tiny");
    outer.say(&started);
    let info = outer.say(&as_user(Ordinary("member"), "--json inspect a"));
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(
        (&info["accelerator"], &info["degraded"]),
        (&"kvm".into(), &serde_json::json!([])),
        "{info}"
    );
    for verb in [
        "checkpoint a c1",
        "revert a c1",
        "exec a -- true",
        "rm -f a",
    ] {
        outer.say(&as_user(Ordinary("member"), verb));
    }

    give_store(&outer, "other");
    let other = Ordinary("other");
    assert_refused(
        &outer,
        other,
        &["/dev/kvm", "Permission denied", "usermod -aG kvm"],
    );
    let refused = outer.sh(&as_user(other, &run("kvm", "true")));
    refused.failed_with(&[
        "kvm",
        "Permission denied",
        "usermod -aG kvm",
        "--accel auto",
    ]);
    outer.end();
}

/// A verdict is kept. The probe runs again when the device, its permissions or the user's groups
/// change.
#[test]
fn a_verdict_follows_the_device() {
    let outer = Outer::start();
    give_store(&outer, "other");
    let other = Ordinary("other");
    assert_kvm(&outer, Root, "mode 0660");
    assert_refused(&outer, other, &["Permission denied"]);

    outer.say("chmod 0666 /dev/kvm");
    assert_kvm(&outer, other, "mode 0666");
    outer.say("chmod 0600 /dev/kvm");
    assert_refused(
        &outer,
        Root,
        &["/dev/kvm", "mode 0600", "chgrp kvm", "chmod 0660"],
    );
    assert_refused(&outer, other, &["Permission denied"]);
    outer.say("chmod 0660 /dev/kvm");
    assert_kvm(&outer, Root, "mode 0660 again");
    outer.say("sed -i s/^kvm:.*/kvm:x:104:member,other/ /etc/group");
    assert_kvm(&outer, other, "a new member of the group");
    outer.say("chgrp root /dev/kvm");
    assert_refused(&outer, other, &["Permission denied"]);
    assert_kvm(&outer, Root, "of the group root");

    outer.say("rmmod kvm_amd");
    assert_refused(&outer, Root, &["/dev/kvm"]);
    outer.say("insmod /lib/kvm/kvm-amd.ko && chgrp kvm /dev/kvm && chmod 0660 /dev/kvm");
    assert_kvm(&outer, Root, "loaded again");
    outer.end();
}

/// The device exists and opens, but runs no guest.
#[test]
fn a_device_that_runs_no_guest_means_emulation() {
    let outer = Outer::start();
    assert_kvm(&outer, Root, "as it was");
    outer.say(BROKEN_DEVICE);
    assert_refused(&outer, Root, &["a test guest did not run"]);
    let refused = outer.sh(&as_user(Root, &run("kvm", "true")));
    refused.failed_with(&["kvm", "a test guest did not run", "--accel auto"]);
    assert_eq!(
        outer.accelerator_of("run -d --name a --memory 128M tiny", "a"),
        "tcg"
    );
    outer.end();
}
