//! What a guest sees when its mounts fail.

use std::fs;

use super::Mounted;
use crate::support::mount::Mount;
use crate::support::{kill, until};

#[test]
fn a_directory_that_is_gone_fails_alone() {
    let m = Mounted::new();
    let inner = m.path("inner");
    fs::create_dir(&inner).unwrap();
    m.write("inner/f", "1");
    let mount = format!("{}:/work", inner.display());
    m.world.start("a", &["--mount", &mount]);
    assert_eq!(m.say("a", "cat /work/f"), "1");
    fs::remove_dir_all(&inner).unwrap();
    let gone = m.world.sh("a", "echo x > /work/new");
    assert_ne!(gone.code, 0, "{gone:#?}");
    assert_eq!(m.say("a", "echo fine > /root/f; cat /root/f"), "fine");
    let shown = m.world.inspect("a");
    assert!(
        shown["mounts"][0]["problem"]
            .as_str()
            .unwrap()
            .contains("inner"),
        "{shown}"
    );
    // A sandbox continues without it, and says so.
    m.world.ok(["checkpoint", "a", "c"]);
    let reverted = m.world.json(["revert", "a", "c"]);
    assert_eq!(
        reverted["degraded"][0]["code"], "mount_unavailable",
        "{reverted}"
    );
    m.world.ok(["stop", "a"]);
    m.world.ok(["start", "a"]);
    assert_eq!(m.say("a", "ls /work | wc -l"), "0");
    fs::create_dir(&inner).unwrap();
    m.write("inner/f", "back");
    m.world.ok(["stop", "a"]);
    m.world.ok(["start", "a"]);
    assert_eq!(m.say("a", "cat /work/f"), "back");
}

#[test]
fn a_keeper_that_is_killed_leaves_the_host_whole() {
    let m = Mounted::with("");
    m.say("a", "echo before > /work/f");
    let line = "while :; do date >> /work/log; done";
    m.world.ok(["exec", "-d", "a", "--", "sh", "-c", line]);
    until("the guest writes", || m.path("log").exists());
    let keeper = m.world.inspect("a")["keeper_pid"].as_u64().unwrap();
    kill(u32::try_from(keeper).unwrap(), "KILL");
    until("it has crashed", || {
        m.world.inspect("a")["state"] == "crashed"
    });
    m.world.ok(["start", "a"]);
    assert_eq!(m.say("a", "cat /work/f"), "before");
    m.world.ok(["rm", "-f", "a"]);
    m.world.assert_empty();
}

/// Lists read files. What a keeper adds is left out if the keeper does not answer.
#[test]
fn a_keeper_that_does_not_answer_delays_no_list() {
    let m = Mounted::with("");
    m.say("a", "ls /work");
    let shown = m.world.inspect("a");
    assert!(shown["mounts"][0]["requests"].is_u64(), "{shown}");
    let keeper = u32::try_from(shown["keeper_pid"].as_u64().unwrap()).unwrap();
    kill(keeper, "STOP");
    let shown = m.world.inspect("a");
    assert_eq!(shown["state"], "running", "{shown}");
    assert_eq!(shown["mounts"][0]["guest"], "/work", "{shown}");
    assert!(shown["mounts"][0]["requests"].is_null(), "{shown}");
    let listed = m.world.ok(["mount", "ls", "a"]);
    assert!(listed.out().contains("/work"), "{listed:#?}");
    kill(keeper, "CONT");
    let shown = m.world.inspect("a");
    assert!(shown["mounts"][0]["requests"].is_u64(), "{shown}");
}

#[test]
fn errors_of_the_host_are_errors_of_the_guest() {
    let m = Mounted::new();
    fs::create_dir(m.path("small")).unwrap();
    m.write("long", "x");
    m.run("a", "");
    let said = |line: &str| m.world.sh("a", line).err();
    assert!(said("cat /work/none").contains("No such file"));
    assert!(said("mkdir /work/small").contains("exists"));
    assert!(said("rmdir /work/long").contains("Not a directory"));
    assert!(said("mknod /work/null c 1 3").contains("not permitted"));
    let name = "n".repeat(256);
    assert!(said(&format!("touch /work/{name}")).contains("too long"));
}

/// A full disk of the host is a full disk of the guest, and `inspect` shows it.
#[test]
fn a_full_disk_of_the_host_is_shown() {
    let Some(disk) = Mount::tmpfs(2) else {
        return;
    };
    let m = Mounted::new();
    let mount = format!("{}:/work", disk.path().display());
    m.world.start("a", &["--mount", &mount]);
    assert_eq!(
        m.world.inspect("a")["mounts"][0]["last_error"],
        serde_json::Value::Null
    );
    let full = m
        .world
        .sh("a", "dd if=/dev/zero of=/work/f bs=64k count=100");
    assert!(full.err().contains("No space left"), "{full:#?}");
    let shown = m.world.inspect("a");
    let error = shown["mounts"][0]["last_error"].as_str().unwrap();
    assert!(
        error.contains("write \"f\"") && error.contains("No space left"),
        "{shown}"
    );
    let listed = m.world.ok(["mount", "ls", "a"]);
    assert!(listed.out().contains("No space left"), "{listed:#?}");
    m.say("a", "rm /work/f; echo fits > /work/f");
    assert_eq!(fs::read_to_string(disk.path().join("f")).unwrap(), "fits\n");
}
