//! Sandboxes that end after a time, by their keepers.

use crate::support::{World, until};

fn phase(world: &World, sandbox: &str) -> String {
    let info = world.json(["inspect", sandbox]);
    info["state"].as_str().unwrap().to_owned()
}

#[test]
fn a_sandbox_is_removed_paused_or_stopped_when_its_time_is_over() {
    let world = World::new();
    for action in ["remove", "pause", "stop"] {
        let options = ["--expire-after", "2s", "--on-expiry", action];
        world.start(action, &options);
    }
    until("removed", || world.run(["inspect", "remove"]).code != 0);
    until("paused", || phase(&world, "pause") == "paused");
    until("stopped", || phase(&world, "stop") == "stopped");
    // The time counts anew.
    world.ok(["resume", "pause"]);
    until("paused again", || phase(&world, "pause") == "paused");
    world.ok(["rm", "-f", "pause", "stop"]);
    world.assert_empty();
}

#[test]
fn the_time_can_be_changed_and_survives_a_revert() {
    let world = World::new();
    world.start("a", &["--expire-after", "1h"]);
    let expires_at = || world.json(["inspect", "a"])["expires_at"].clone();
    let first = expires_at();
    world.ok(["checkpoint", "a", "c"]);
    world.ok(["revert", "a", "c"]);
    assert_eq!(expires_at(), first);
    let changed = world.json(["expire", "a", "2h"]);
    assert_ne!(changed["expires_at"], first);
    world.ok(["expire", "a", "never"]);
    assert!(expires_at().is_null());
    world.ok(["expire", "a", "1s"]);
    until("removed", || world.run(["inspect", "a"]).code != 0);
    let refused = world.run(["expire", "a", "1s"]);
    assert!(
        refused.err().contains("there is no sandbox a"),
        "{refused:?}"
    );
    world.assert_empty();
}
