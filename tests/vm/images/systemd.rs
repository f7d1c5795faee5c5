//! An image whose init is systemd: it comes up, is stopped in good order, and its copies are somebody else.

use crate::debian::world;
use crate::{end, say};

#[test]
fn systemd_boots_beside_the_agent() {
    let world = world();
    world.ok(["run", "-d", "--name", "s", "--memory", "1G", "with-systemd"]);
    assert_eq!(say(&world, "s", "cat /proc/1/comm"), "systemd");
    let running = world.sh("s", "systemctl is-system-running --wait; systemctl --failed --plain --no-legend");
    assert_eq!(running.out(), "running\n", "{running:?}");
    assert_eq!(say(&world, "s", "hello"), "Hello, world!");
    // Another machine has another name to itself, and knows of no boot but its own.
    world.ok(["fork", "s", "--name", "t"]);
    let ids = ["s", "t-1"].map(|name| say(&world, name, "cat /etc/machine-id"));
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.len() == 32), "{ids:?}");
    assert_eq!(say(&world, "t-1", "systemctl is-system-running"), "running");
    world.ok(["rm", "-f", "t-1"]);
    world.ok(["stop", "s"]);
    let console = world.ok(["logs", "s"]);
    let console = String::from_utf8_lossy(&console.stdout).into_owned();
    assert!(console.contains("Power down"), "it did not power off by itself: {console}");
    world.ok(["rm", "s"]);
    end(&world, &["debian", "with-systemd"]);
}
