//! QEMUs that are started ahead of the next revert: used, invisible, and gone with the sandbox.

use std::collections::BTreeSet;

use sandtree::{HostConfig, Spares};

use super::{pid, remove};
use crate::support::exactness::Exactness;
use crate::support::lab::{Lab, config, opened_by, sh, spares_of, spec, until_async, written_by};
use crate::support::lifecycle::{Action, survives};
use crate::support::{World, held, kill, processes_of, until};

const ALWAYS: &[&str] = &["--spares", "always"];
const AFTER_CHECKPOINT: &[&str] = &["--spares", "after-checkpoint"];

/// Waits until a running sandbox has its spare, with the images that it opens ahead.
fn spare(world: &World) -> u32 {
    let sandboxes = world.home().join("sandboxes");
    let has_images = |pid: &u32| !opened_by(*pid, &sandboxes).is_empty();
    until("a spare is there", || {
        let spares = spares_of(world.home());
        spares.len() == 1 && spares.iter().all(has_images)
    });
    *spares_of(world.home()).first().expect("there is one")
}

#[test]
fn a_revert_uses_the_qemu_that_was_started_after_the_checkpoint_or_revert_before_it() {
    let world = World::new();
    world.start("a", AFTER_CHECKPOINT);
    held::begin(&world, "a", "one");
    assert_eq!(
        spares_of(world.home()),
        BTreeSet::new(),
        "none is wanted yet"
    );
    world.ok(["checkpoint", "a", "base"]);
    for _ in 0..3 {
        let ahead = spare(&world);
        held::write(&world, "a", "two");
        let next = world.json(["revert", "a", "base"]);
        assert_eq!(next["from_spare"], true, "{next}");
        assert_eq!(next["degraded"].as_array().map(Vec::len), Some(0), "{next}");
        assert_eq!(pid(&world, "a", "qemu_pid"), ahead);
        held::assert_holds(&world, "a", "one", 0);
    }
    remove(&world, &["a"]);
    assert_eq!(processes_of(world.home()), Vec::<u32>::new());
}

#[test]
fn checkpoints_that_follow_each_other_start_one_qemu() {
    let world = World::new();
    world.start("a", AFTER_CHECKPOINT);
    held::begin(&world, "a", "one");
    for tag in ["a", "b", "c"] {
        world.ok(["checkpoint", "a", tag]);
    }
    let ahead = spare(&world);
    held::write(&world, "a", "two");
    for tag in ["d", "e", "f"] {
        world.ok(["checkpoint", "a", tag]);
        assert_eq!(spare(&world), ahead);
    }
    let reverted = world.json(["revert", "a", "b"]);
    assert_eq!(reverted["from_spare"], true, "{reverted}");
    held::assert_holds(&world, "a", "one", 0);
    spare(&world);
    held::write(&world, "a", "three");
    let reverted = world.json(["revert", "a", "f"]);
    assert_eq!(reverted["from_spare"], true, "{reverted}");
    held::assert_holds(&world, "a", "two", 0);
    remove(&world, &["a"]);
}

#[test]
fn a_spare_opens_only_images_that_nothing_writes_to() {
    let world = World::new();
    world.start("a", AFTER_CHECKPOINT);
    world.sh("a", "echo one >/srv/word");
    world.ok(["checkpoint", "a", "base"]);
    let ahead = spare(&world);
    let sandboxes = world.home().join("sandboxes");
    until("it has opened the closed overlays", || {
        opened_by(ahead, &sandboxes).len() >= 2
    });
    let active = written_by(pid(&world, "a", "qemu_pid"), &sandboxes);
    assert_eq!(active.len(), 1, "{active:?}");
    for (path, access) in opened_by(ahead, &sandboxes) {
        assert_eq!(access, 0, "{path:?}");
        assert!(!active.contains(&path), "{path:?}");
    }
    remove(&world, &["a"]);
}

#[test]
fn a_host_that_wants_no_spares_has_none() {
    let world = World::new();
    world.start("a", &["--spares", "never"]);
    world.ok(["checkpoint", "a", "base"]);
    for _ in 0..2 {
        let reverted = world.json(["revert", "a", "base"]);
        assert_eq!(reverted["from_spare"], false, "{reverted}");
        // Longer than a spare would take to be started.
        world.ok(["exec", "a", "--", "sleep", "2"]);
        assert_eq!(spares_of(world.home()), BTreeSet::new());
    }
    remove(&world, &["a"]);
}

#[test]
fn a_spare_ends_when_its_sandbox_stops_pauses_or_loses_its_keeper() {
    let world = World::new();
    world.start("a", ALWAYS);
    spare(&world);
    world.ok(["pause", "a"]);
    assert_eq!(spares_of(world.home()), BTreeSet::new(), "after a pause");
    world.ok(["--spares", "always", "resume", "a"]);
    spare(&world);
    world.ok(["stop", "a"]);
    assert_eq!(spares_of(world.home()), BTreeSet::new(), "after a stop");
    world.ok(["--spares", "always", "start", "a"]);
    spare(&world);
    kill(pid(&world, "a", "keeper_pid"), "KILL");
    until("the processes of a killed keeper end", || {
        processes_of(world.home()).is_empty()
    });
    remove(&world, &["a"]);
}

#[test]
fn a_spare_that_died_costs_a_revert_nothing_but_time() {
    let world = World::new();
    world.start("a", ALWAYS);
    held::begin(&world, "a", "one");
    world.ok(["checkpoint", "a", "base"]);
    let died = spare(&world);
    kill(died, "KILL");
    until("it is gone", || !spares_of(world.home()).contains(&died));
    let reverted = world.json(["revert", "a", "base"]);
    assert_eq!(reverted["from_spare"], false, "{reverted}");
    held::assert_holds(&world, "a", "one", 0);
    remove(&world, &["a"]);
}

#[test]
fn sandboxes_with_spares_survive_every_change_of_state() {
    let world = World::new();
    world.start("a", ALWAYS);
    held::begin(&world, "a", "one");
    let is_held = |name: &str| {
        let held = world.sh(name, "cat /srv/word /run/word");
        assert_eq!(held.out(), "one\none\n", "{held:?}");
    };
    for action in [Action::Checkpoint, Action::Revert, Action::Revert] {
        spare(&world);
        survives(&world, "a", &[action], is_held);
    }
    spare(&world);
    let rest = [
        Action::Pause,
        Action::Resume,
        Action::Revert,
        Action::Revert,
    ];
    survives(&world, "a", &rest, is_held);
    remove(&world, &["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_started_ahead_has_every_byte_of_the_state() {
    let world = World::new();
    let config = HostConfig {
        spares: Spares::Always,
        ..config(world.home())
    };
    let lab = Lab::configured(world, config).await;
    let spec = spec("x");
    let sandbox = lab.host.create(spec.clone()).await.expect("it is created");
    let mut exact = Exactness::of(lab, &spec);
    for round in 0..3 {
        sh(
            &sandbox,
            &format!("dd if=/dev/urandom of=/dev/shm/{round} bs=64k count=20"),
        )
        .await;
        exact.checkpoint(&sandbox).await;
    }
    for index in [0, 2, 1] {
        until_async("a spare is there", || {
            spares_of(exact.lab.world.home()).len() == 1
        })
        .await;
        exact.verify(&sandbox, index).await;
    }
    sandbox.remove().await.expect("it is removed");
}
