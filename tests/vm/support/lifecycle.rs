//! The events that a sandbox must survive, and checks after them.
//!
//! A new verb of the product becomes a new [`Action`]; every existing check then applies to it.

use serde_json::Value;

use super::{World, is_alive, kill, until};

/// The tag of the only checkpoint.
const TAG: &str = "survives";

/// One event of a sandbox, from inside or from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Start,
    Stop,
    GuestPoweroff,
    GuestReboot,
    GuestPanic,
    KillQemu,
    KillKeeper,
    /// Takes the checkpoint that `Revert` returns to.
    Checkpoint,
    Revert,
    Pause,
    Resume,
    /// The checks continue with the copy, and the source is removed.
    Fork,
}

/// The expected phase and reason after an action.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    pub state: &'static str,
    /// A word of the reason; empty if there is no reason.
    pub reason: &'static str,
}

impl Action {
    pub fn expected(self) -> Expected {
        let (state, reason) = match self {
            Action::Start => ("running", ""),
            Action::Stop => ("stopped", "stopped"),
            Action::GuestPoweroff => ("stopped", "powered off"),
            Action::GuestReboot => ("stopped", "rebooted"),
            Action::GuestPanic => ("crashed", "panic"),
            Action::KillQemu => ("crashed", "QEMU ended"),
            Action::KillKeeper => ("crashed", "keeper"),
            Action::Checkpoint | Action::Revert | Action::Resume | Action::Fork => ("running", ""),
            Action::Pause => ("paused", ""),
        };
        Expected { state, reason }
    }

    fn begin(self, world: &World, name: &str, before: &Value) {
        let pid = |field: &str| u32::try_from(before[field].as_u64().unwrap()).unwrap();
        match self {
            Action::Start => drop(world.ok(["start", name])),
            Action::Stop => drop(world.ok(["stop", name])),
            Action::GuestPoweroff => ends_the_guest(world, name, "poweroff -f", "powered off"),
            Action::GuestReboot => ends_the_guest(world, name, "reboot -f", "rebooted"),
            Action::GuestPanic => {
                ends_the_guest(world, name, "echo c > /proc/sysrq-trigger", "panic")
            }
            Action::KillQemu => kill(pid("qemu_pid"), "KILL"),
            Action::KillKeeper => kill(pid("keeper_pid"), "KILL"),
            Action::Checkpoint => drop(world.ok(["checkpoint", "--force", name, TAG])),
            Action::Revert => drop(world.ok(["revert", name, TAG])),
            Action::Pause => drop(world.ok(["pause", name])),
            Action::Resume => drop(world.ok(["resume", name])),
            Action::Fork => {
                world.ok(["fork", name]);
                world.ok(["rm", "-f", name]);
            }
        }
    }

    /// The sandbox's name after the action.
    fn renamed(self, name: &str) -> String {
        if self == Action::Fork {
            format!("{name}-1")
        } else {
            name.to_owned()
        }
    }
}

/// Runs a line that ends the guest. The waiting command reports why no answer comes.
fn ends_the_guest(world: &World, name: &str, line: &str, why: &str) {
    world.sh(name, line).failed_with(&[why]);
}

/// Does one action, and waits until its effect is visible. Returns the sandbox's name.
pub fn act(world: &World, name: &str, action: Action) -> String {
    let before = world.inspect(name);
    action.begin(world, name, &before);
    let name = action.renamed(name);
    let name = name.as_str();
    let expected = action.expected();
    until(&format!("{action:?} leads to {}", expected.state), || {
        world.inspect(name)["state"] == expected.state
    });
    assert_shown(world, name, expected);
    if expected.state != "running" {
        assert_processes_end(&before);
    }
    name.to_owned()
}

/// Does actions one after the other, starts the sandbox if necessary, and runs the check. Returns
/// the sandbox's name.
pub fn survives(world: &World, name: &str, actions: &[Action], check: impl Fn(&str)) -> String {
    let name = actions
        .iter()
        .fold(name.to_owned(), |name, action| act(world, &name, *action));
    match world.inspect(&name)["state"].as_str() {
        Some("running") => {}
        Some("paused") => drop(act(world, &name, Action::Resume)),
        _ => drop(act(world, &name, Action::Start)),
    }
    check(&name);
    name
}

/// `inspect`, `ps` and `ps -a` agree on a sandbox's state.
pub fn assert_shown(world: &World, name: &str, expected: Expected) {
    let info = world.inspect(name);
    let running = expected.state == "running";
    assert!(
        info["reason"]
            .as_str()
            .unwrap_or_default()
            .contains(expected.reason),
        "{info}"
    );
    assert_eq!(info["qemu_pid"].is_u64(), running, "{info}");
    let listed = world.ok(["ps", "-a"]);
    let row = listed
        .out()
        .lines()
        .find(|line| line.starts_with(name))
        .expect("ps -a lists it")
        .to_owned();
    assert!(
        row.contains(expected.state) && row.contains(expected.reason),
        "{row}"
    );
    let is_listed = world
        .json(["ps"])
        .as_array()
        .unwrap()
        .iter()
        .any(|info| info["name"] == name);
    assert_eq!(is_listed, running, "ps lists what runs");
}

/// Asserts that keeper and machine of a sandbox at rest are gone.
fn assert_processes_end(before: &Value) {
    for field in ["qemu_pid", "keeper_pid"] {
        let Some(pid) = before[field].as_u64() else {
            continue;
        };
        until(&format!("{field} {pid} ends"), || {
            !is_alive(u32::try_from(pid).unwrap())
        });
    }
}
