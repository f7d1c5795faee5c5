//! A screen without an X server: keys reach the text console, and the pointer programs that read
//! input devices.

use std::fs;

use super::{PATIENCE, begin, end, refused};
use crate::support::{World, eventually, finish, say};

const TYPED: &str = "/tmp/typed";
const SIZE: &str = "1024x768";

/// Kinds and codes of `linux/input-event-codes.h`.
const KEY: u16 = 1;
const ABSOLUTE: u16 = 3;
const KEY_A: u16 = 30;
const BUTTON_LEFT: u16 = 0x110;

#[test]
fn keys_and_pointer_reach_a_guest_without_an_x_server() {
    let world = World::debian();
    let recipe = world.home().with_extension("toml");
    fs::write(
        &recipe,
        "name = \"console\"\nfrom = \"debian\"\nkernel = \"full\"\n",
    )
    .unwrap();
    world.ok(["image", "build", recipe.to_str().unwrap()]);
    fs::remove_file(recipe).unwrap();
    let shape = ["--cpus", "1", "--memory", "512M", "--display", SIZE];
    world.ok([&["run", "-d", "--name", "c"][..], &shape, &["console"]].concat());
    // The size that was asked for is the one that the screen prefers.
    let looking = "cd /sys/class/drm/*-Virtual-1; echo detect > status; head -n 1 modes";
    let preferred = say(&world, "c", looking);
    assert_eq!(preferred, SIZE);
    refused(&world, &["display", "c"], "no_x_server");
    let reading = format!("setsid cat < /dev/tty1 > {TYPED}");
    world.ok(["exec", "-d", "c", "--", "sh", "-c", &reading]);
    world.ok(["exec", "-d", "c", "--", "sh", "-c", "while :; do :; done"]);
    let line: String = (0..1000)
        .map(|index| char::from(b'!' + (index * 7 % 94) as u8))
        .collect();
    world.ok(["type", "c", &format!("{line}\n")]);
    await_typed(&world, &format!("{line}\n"));
    // It is refused whole.
    refused(&world, &["type", "c", "Grüße\n"], "invalid");
    world.ok(["type", "c", "not this"]);
    world.ok(["key", "c", "ctrl+u"]);
    world.ok(["type", "c", "but this\n"]);
    await_typed(&world, &format!("{line}\nbut this\n"));

    refused(&world, &["clipboard", "c", "get"], "no_x_server");
    // The size of a screen that no program has set up.
    refused(&world, &["mouse", "c", "move", "640", "0"], "invalid");
    record(&world, "pointer");
    world.ok(["mouse", "c", "click", "639", "0"]);
    let wanted = [
        (ABSOLUTE, 0, 65484),
        (ABSOLUTE, 1, 68),
        (KEY, BUTTON_LEFT, 1),
        (KEY, BUTTON_LEFT, 0),
    ];
    await_events(&world, "pointer", &wanted);

    record(&world, "keyboard");
    let holding = begin(&world, &["key", "c", "a", "--hold", "8s"]);
    await_events(&world, "keyboard", &[(KEY, KEY_A, 1)]);
    world.ok(["checkpoint", "c", "held"]);
    assert_eq!(finish(holding).code, 0);
    world.ok(["revert", "c", "held"]);
    await_events(&world, "keyboard", &[(KEY, KEY_A, 1), (KEY, KEY_A, 0)]);

    // An orderly end, not a reset.
    say(&world, "c", "echo kept > /kept");
    // The guest may end before it answers.
    world.run(["key", "c", "ctrl+alt+delete"]);
    let stopped = eventually(PATIENCE, || {
        (world.inspect("c")["state"] == "stopped").then_some(())
    });
    assert!(stopped.is_some(), "{}", world.inspect("c"));
    world.ok(["start", "c"]);
    assert_eq!(say(&world, "c", "cat /kept"), "kept");
    end(&world, &["c"]);
}

#[track_caller]
fn await_typed(world: &World, wanted: &str) {
    let mut last = String::new();
    let arrived = eventually(PATIENCE, || {
        last = world.ok(["exec", "c", "--", "cat", TYPED]).out().to_owned();
        (last == wanted).then_some(())
    });
    assert!(arrived.is_some(), "{last:?} instead of {wanted:?}");
}

/// Writes the events of one of the agent's devices to a file.
fn record(world: &World, device: &str) {
    let find = format!("grep -A 5 'Name=\"Sandtree {device}\"' /proc/bus/input/devices");
    let handlers = say(world, "c", &format!("{find} | grep Handlers="));
    let mut words = handlers.split_whitespace();
    let event = words.find(|word| word.starts_with("event"));
    let event = event.unwrap_or_else(|| panic!("no device in {handlers:?}"));
    // The device is open before the file exists.
    let reading = format!("exec < /dev/input/{event}; exec cat > /tmp/{device}");
    world.ok(["exec", "-d", "c", "--", "sh", "-c", &reading]);
    let opened = eventually(PATIENCE, || {
        (world.sh("c", &format!("test -e /tmp/{device}")).code == 0).then_some(())
    });
    assert!(opened.is_some(), "nothing reads {event}");
}

/// Waits until a device has reported these and no other events, apart from the ends of reports.
#[track_caller]
fn await_events(world: &World, device: &str, wanted: &[(u16, u16, i32)]) {
    let mut last = Vec::new();
    let arrived = eventually(PATIENCE, || {
        let file = format!("/tmp/{device}");
        let bytes = world.ok(["exec", "c", "--", "cat", &file]).stdout;
        last = bytes.chunks_exact(24).map(event).collect();
        last.retain(|(kind, ..)| *kind != 0);
        (last == wanted).then_some(())
    });
    assert!(arrived.is_some(), "{last:?} instead of {wanted:?}");
}

/// `struct input_event`: a time, a kind, a code and a value.
fn event(bytes: &[u8]) -> (u16, u16, i32) {
    let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let value = bytes[20..24].try_into().expect("it has four bytes");
    (short(16), short(18), i32::from_le_bytes(value))
}
