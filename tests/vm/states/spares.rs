//! QEMUs that are started ahead of the next revert: used, invisible, and gone with the sandbox.

use std::collections::BTreeSet;

use sandtree::{HostConfig, Spares};

use super::{pid, remove};
use crate::support::exactness::Exactness;
use crate::support::lab::{Lab, config, sh, spares_of, spec, until_async};
use crate::support::lifecycle::{Action, survives};
use crate::support::{World, held, kill, processes_of, until};

const ALWAYS: &[&str] = &["--spares", "always"];

/// Waits until a running sandbox has its spare.
fn spare(world: &World) -> u32 {
    until("a spare is there", || spares_of(world.home()).len() == 1);
    *spares_of(world.home()).first().expect("there is one")
}

#[test]
fn a_revert_uses_the_qemu_that_was_started_after_the_revert_before_it() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    world.ok(["checkpoint", "a", "base"]);
    assert_eq!(
        spares_of(world.home()),
        BTreeSet::new(),
        "none is wanted yet"
    );
    held::write(&world, "a", "two");
    let first = world.json(["revert", "a", "base"]);
    assert_eq!(first["from_spare"], false, "{first}");
    held::assert_holds(&world, "a", "one", 0);
    for _ in 0..2 {
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
