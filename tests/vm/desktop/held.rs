//! Keys that are held when a state is captured: they are not held in the next machine.

use std::process::Child;

use super::{PATIENCE, await_still, begin, end, start_typing, typed, typing};
use crate::support::{World, eventually, finish};

/// Holds a chord, and returns when the terminal shows it.
fn hold(world: &World, name: &str) -> Child {
    let change = ["screenshot", name, "--wait-change", "--timeout", "2m"];
    let seen = begin(world, &[&change[..], &["-o", "/dev/null"]].concat());
    let holding = begin(world, &["key", name, "shift+z", "--hold", "10s"]);
    assert_eq!(finish(seen).code, 0, "the key does not arrive");
    holding
}

/// The key was pressed, repeats no more, and its modifier is up.
#[track_caller]
fn assert_released(world: &World, name: &str) {
    // A key that is down repeats, and the picture changes with it.
    await_still(world, name);
    world.ok(["type", name, " a"]);
    world.ok(["key", name, "enter"]);
    let line = eventually(PATIENCE, || {
        Some(typed(world, name)).filter(|text| text.ends_with('\n'))
    });
    let line = line.expect("the line arrives");
    let held = line.strip_suffix(" a\n");
    let held = held.unwrap_or_else(|| panic!("a key is still down: {line:?}"));
    assert!(!held.is_empty(), "the key was not down");
    assert!(held.chars().all(|key| key == 'Z'), "{line:?}");
}

#[test]
fn a_key_held_at_a_checkpoint_is_not_held_after_the_revert() {
    let world = typing();
    start_typing(&world, "d");
    let holding = hold(&world, "d");
    world.ok(["checkpoint", "d", "held"]);
    assert_eq!(finish(holding).code, 0);
    world.ok(["revert", "d", "held"]);
    assert_released(&world, "d");
    end(&world, &["d"]);
}

#[test]
fn a_key_held_at_a_fork_or_a_pause_is_not_held_after_it() {
    let world = typing();
    start_typing(&world, "d");
    let holding = hold(&world, "d");
    world.ok(["fork", "d", "-n", "1", "--name", "copy"]);
    world.ok(["pause", "d"]);
    world.ok(["resume", "d"]);
    // Its guest is not the one that the key was sent to.
    finish(holding);
    assert_released(&world, "copy-1");
    assert_released(&world, "d");
    end(&world, &["d", "copy-1"]);
}
