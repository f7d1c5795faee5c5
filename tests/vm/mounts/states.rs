//! Mounts over checkpoint, revert, fork, pause, stop and save.

use std::fs;

use sandtree::{ExecSpec, MountAccess, MountSpec, SandboxSpec};

use super::Mounted;
use crate::support::lab::{self, Lab};
use crate::support::lifecycle::{Action, survives};
use crate::support::{DEADLINE, until};

/// Holds files open, mapped and locked in the guest.
fn hold(m: &Mounted, sandbox: &str) {
    m.write("kept", "kept\n");
    m.give_worker(sandbox);
    let line = "/dev/shm/worker hold /work > /tmp/said 2>&1";
    m.world.ok(["exec", "-d", sandbox, "--", "sh", "-c", line]);
    until("the files are held", || {
        m.world.sh(sandbox, "grep -c : /tmp/said").out().trim() == "5"
    });
}

/// The program that holds files still works with them, and has met no error.
fn is_held(m: &Mounted, sandbox: &str) {
    let lines = || m.say(sandbox, "wc -l < /work/log").parse::<u64>().unwrap();
    let before = lines();
    until("the guest appends to its file", || lines() > before);
    // A revert meets the names of a later moment.
    let said = m.say(sandbox, "grep -v ^move: /tmp/said");
    assert!(!said.contains("error") && !said.contains("lost"), "{said}");
}

#[test]
fn open_files_survive_every_state_change() {
    let m = Mounted::with("");
    hold(&m, "a");
    let check = |name: &str| is_held(&m, name);
    survives(&m.world, "a", &[Action::Checkpoint], check);
    survives(&m.world, "a", &[Action::Revert], check);
    survives(&m.world, "a", &[Action::Pause, Action::Resume], check);
    survives(&m.world, "a", &[Action::Revert, Action::Checkpoint], check);
    let snapshot = ["save", "a", "with-mount", "--memory"];
    m.world.ok(snapshot);
    is_held(&m, "a");
    // A boot begins without the program, and has the mount.
    survives(&m.world, "a", &[Action::Stop], |name| {
        assert_eq!(m.say(name, "cat /work/kept"), "kept");
    });
}

/// The host's directory does not go back with the guest.
#[test]
fn the_first_command_after_a_revert_sees_the_hosts_present() {
    let m = Mounted::with("");
    m.write("edited", "old");
    m.write("removed", "x");
    fs::create_dir(m.path("d")).unwrap();
    m.say(
        "a",
        "cat /work/edited /work/removed; ls /work/absent /work/d/absent; cat /work/edited",
    );
    m.say(
        "a",
        "exec 9< /work/edited; sleep 1000 <&9 > /dev/null 2>&1 &",
    );
    for round in 0..3 {
        m.world.ok(["checkpoint", "--force", "a", "c"]);
        m.write("edited", &format!("new {round}"));
        fs::remove_file(m.path("removed")).unwrap();
        m.write("absent", "there");
        m.write(&format!("d/{round}"), "there");
        m.world.ok(["revert", "a", "c"]);
        let look = format!("cat /work/edited /work/absent /work/d/{round}; ls /work");
        let seen = m.say("a", &look);
        assert_eq!(seen, format!("new {round}therethereabsent\nd\nedited"));
        fs::remove_file(m.path("absent")).unwrap();
        m.write("removed", "x");
    }
}

/// A command that was begun while the guest was paused runs when its mounts are up to date.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_waits_for_a_resume_sees_the_hosts_present() {
    let lab = Lab::open().await;
    let dir = tempfile::tempdir().unwrap();
    let mount = MountSpec {
        host: dir.path().to_owned(),
        guest: "/work".into(),
        access: MountAccess::ReadWrite,
        owner: None,
    };
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    // To compare all of them takes a while, and what the guest learns last is compared last.
    for number in 0..20_000 {
        write(&format!("file-{number}"), "");
    }
    fs::create_dir(dir.path().join("last")).unwrap();
    write("last/edited", "old");
    let spec = SandboxSpec {
        mounts: vec![mount],
        ..lab::spec("a")
    };
    let sandbox = lab.host.create(spec).await.expect("it is created");
    let look = "cat /work/last/edited";
    lab::sh(&sandbox, "ls -l /work > /dev/null").await;
    assert_eq!(lab::sh(&sandbox, look).await, "old");
    let guest = sandbox.guest().await.expect("it runs");
    // A paused sandbox waits for clients that have something to wait for.
    let sleep = guest.exec(ExecSpec::shell("sleep 1000")).await;
    let sleep = sleep.expect("it begins");
    for round in 0..3 {
        sandbox.pause().await.expect("it is paused");
        let guest = guest.clone();
        let waiting = tokio::spawn(async move {
            let began = guest.exec(ExecSpec::shell(look)).await;
            began.expect("it begins").output(1 << 10).await
        });
        let text = format!("new {round}");
        write("last/edited", &text);
        sandbox.resume().await.expect("it is resumed");
        let said = tokio::time::timeout(DEADLINE, waiting).await;
        let said = said.expect("it ends").unwrap().expect("it answers");
        assert_eq!(String::from_utf8_lossy(&said.stdout), text);
    }
    drop(sleep);
    sandbox.remove().await.expect("it is removed");
}

#[test]
fn copies_read_a_shared_mount_and_write_only_if_they_may() {
    let m = Mounted::with("");
    m.write("f", "1");
    m.world
        .ok(["fork", "a", "--name", "w", "--mounts", "shared"]);
    hold(&m, "a");
    m.world.ok(["fork", "a", "-n", "2", "--name", "r"]);
    let refused = m.world.sh("r-1", "cat /work/f; echo no > /work/f");
    assert!(
        refused.out() == "1" && refused.err().contains("Read-only"),
        "{refused:#?}"
    );
    assert_eq!(m.world.inspect("r-2")["mounts"][0]["access"], "read_only");
    m.say("w-1", "echo yes > /work/f");
    assert_eq!(m.say("r-2", "cat /work/f"), "yes");
    assert_eq!(m.say("a", "cat /work/f"), "yes");
    is_held(&m, "a");
}

/// Snapshots name mount points, and no directories of the host.
#[test]
fn a_snapshot_asks_for_its_directories_again() {
    let m = Mounted::with("");
    m.write("f", "1");
    m.say("a", "cat /work/f");
    m.world.ok(["save", "a", "warm", "--memory"]);
    m.world.ok(["save", "a", "cold"]);
    let store = m.world.home().join("snapshots");
    for snapshot in fs::read_dir(store).unwrap() {
        let manifest = fs::read_to_string(snapshot.unwrap().path().join("manifest.json")).unwrap();
        let host = m.dir.path().to_str().unwrap();
        assert!(
            manifest.contains("/work") && !manifest.contains(host),
            "{manifest}"
        );
    }
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("f"), "other").unwrap();
    let mount = format!("{}:/work", other.path().display());
    for (number, snapshot) in ["warm", "cold"].into_iter().enumerate() {
        let name = format!("without-{number}");
        let run = m.world.ok(["run", "-d", "--name", &name, snapshot]);
        assert!(run.err().contains("/work"), "{run:#?}");
        let shown = m.world.inspect(&name);
        assert_eq!(shown["degraded"][0]["code"], "mount_unavailable", "{shown}");
        assert!(shown["mounts"][0]["problem"].is_string(), "{shown}");
        assert_ne!(m.world.sh(&name, "cat /work/f").code, 0);
        assert_eq!(m.say(&name, "echo the rest works"), "the rest works");
        let name = format!("with-{number}");
        m.world
            .ok(["run", "-d", "--name", &name, "--mount", &mount, snapshot]);
        assert_eq!(m.say(&name, "cat /work/f"), "other", "{snapshot}");
    }
}

/// The guest is paused and reverted while it writes. A revert meets the files of a later moment: an
/// open one may be gone, and a name may be that of another. A pause meets its own.
#[test]
fn a_guest_that_writes_continues_after_every_restore() {
    let m = Mounted::with("");
    let line =
        "i=0; while :; do i=$((i+1)); dd if=/dev/zero of=/work/new bs=1M count=8 2>/dev/null &&
        mv /work/new /work/last && echo $i > /work/count || echo failed >> /work/failed; done";
    m.world.ok(["exec", "-d", "a", "--", "sh", "-c", line]);
    until("the guest writes", || m.path("count").exists());
    let continues = || {
        let before = m.read("count");
        until("it continues to write", || {
            let count = fs::read_to_string(m.path("count"));
            count.is_ok_and(|count| !count.is_empty() && count != before)
        });
    };
    for _ in 0..3 {
        m.world.ok(["pause", "a"]);
        m.world.ok(["resume", "a"]);
        continues();
        assert_eq!(fs::metadata(m.path("last")).unwrap().len(), 8 << 20);
    }
    assert!(!m.path("failed").exists());
    for _ in 0..3 {
        m.world.ok(["checkpoint", "--force", "a", "c"]);
        m.world.ok(["revert", "a", "c"]);
        continues();
    }
}

/// Each copy has its own server on the same directory.
#[test]
fn ten_copies_of_a_busy_mount_all_continue() {
    let m = Mounted::with(":cow");
    m.write("kept", "kept\n");
    let line = "while :; do date > /work/now; cat /work/kept > /work/copy; done";
    m.world.ok(["exec", "-d", "a", "--", "sh", "-c", line]);
    m.world.ok(["fork", "a", "-n", "10", "--name", "f"]);
    for number in 1..=10 {
        let name = format!("f-{number}");
        m.say(&name, "rm -f /work/now");
        until("the copy writes", || {
            m.world.sh(&name, "cat /work/now").code == 0
        });
        assert_eq!(m.say(&name, "cat /work/kept"), "kept");
    }
    assert_eq!(super::names(m.dir.path()), ["kept"]);
}
