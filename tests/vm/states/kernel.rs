//! Kernel states: boots of one shape continue from one kernel, each on its own disk.

use std::fs;
use std::path::{Path, PathBuf};

use sandtree::{ErrorKind, Fault, Step};
use serde_json::{Value, json};

use super::warm::{boot_of, damage};
use super::{layers, remove};
use crate::support::lab::{Lab, spec};
use crate::support::lifecycle::{Action, act, survives};
use crate::support::{World, entries, kernel_states, say, warm_states};

fn assert_not_degraded(world: &World, sandbox: &str) {
    assert_eq!(world.inspect(sandbox)["degraded"], json!([]));
}

fn again(world: &World, sandbox: &str) {
    world.ok(["stop", sandbox]);
    world.ok(["start", sandbox]);
}

fn memory_of(state: &Path) -> PathBuf {
    layers(&state.join("memory"), ".mem")
        .pop()
        .expect("it has memory")
}

#[test]
fn a_start_continues_from_a_kernel_state_with_its_own_disk_names_and_randomness() {
    let world = World::new();
    world.start("a", &[]);
    say(&world, "a", "echo mine > /srv/file && sync");
    let machine_id = say(&world, "a", "cat /etc/machine-id");
    let told = || {
        [
            "cat /proc/sys/kernel/random/boot_id",
            "cat /proc/sys/kernel/random/uuid",
            "head -c 16 /dev/urandom | od -An -tx1",
        ]
        .map(|line| say(&world, "a", line))
    };
    again(&world, "a");
    let kernel = boot_of(&world, "a");
    let first = told();
    again(&world, "a");
    let second = told();
    assert_eq!(
        boot_of(&world, "a"),
        kernel,
        "both continue from one kernel"
    );
    for (first, second) in first.iter().zip(&second) {
        assert_ne!(first, second);
    }
    assert_eq!(say(&world, "a", "cat /srv/file"), "mine");
    assert_eq!(say(&world, "a", "hostname"), "a");
    assert_eq!(say(&world, "a", "cat /etc/machine-id"), machine_id);
    let log = world.ok(["logs", "a"]);
    assert!(!log.out().contains("Linux version"), "no kernel has booted");
    assert_not_degraded(&world, "a");
    // Another sandbox of the same shape has another identity.
    world.start("b", &[]);
    again(&world, "b");
    assert_eq!(boot_of(&world, "b"), kernel);
    assert_ne!(
        say(&world, "b", "cat /proc/sys/kernel/random/boot_id"),
        second[0]
    );
    world.start("cold", &["--cold"]);
    assert_ne!(boot_of(&world, "cold"), kernel, "--cold boots a kernel");
    assert_eq!(kernel_states(world.home()).len(), 1);
    remove(&world, &["a", "b", "cold"]);
}

#[test]
fn a_disk_save_and_a_disk_of_another_size_start_from_the_kernel_state() {
    let world = World::new();
    world.start("a", &[]);
    say(&world, "a", "echo saved > /srv/file");
    world.ok(["save", "a", "env"]);
    again(&world, "a");
    let kernel = boot_of(&world, "a");
    world.ok(["run", "-d", "--name", "b", "--disk", "300M", "env"]);
    assert_eq!(boot_of(&world, "b"), kernel);
    assert_eq!(say(&world, "b", "cat /srv/file"), "saved");
    let kib: u64 = say(&world, "b", "df -k / | tail -n 1 | awk '{print $2}'")
        .parse()
        .unwrap();
    assert!((250_000..310_000).contains(&kib), "{kib}");
    assert_not_degraded(&world, "b");
    world.ok(["run", "-d", "--cold", "--name", "cold", "env"]);
    assert_ne!(boot_of(&world, "cold"), kernel);
    remove(&world, &["a", "b", "cold"]);
}

#[test]
fn every_verb_works_after_a_start_from_a_kernel_state() {
    let world = World::new();
    world.start("a", &[]);
    again(&world, "a");
    say(
        &world,
        "a",
        "echo disk > /srv/file; echo memory > /dev/shm/file",
    );
    let check = |name: &str| {
        assert_eq!(say(&world, name, "cat /srv/file"), "disk");
        assert_eq!(say(&world, name, "cat /dev/shm/file"), "memory");
    };
    let name = survives(
        &world,
        "a",
        &[
            Action::Checkpoint,
            Action::Revert,
            Action::Pause,
            Action::Resume,
            Action::Fork,
        ],
        check,
    );
    // The state is based on the kernel state's memory, and does not need the kernel state.
    world.ok(["checkpoint", &name, "base"]);
    for state in kernel_states(world.home()) {
        fs::remove_dir_all(state).unwrap();
    }
    act(&world, &name, Action::Stop);
    world.ok(["revert", &name, "base"]);
    check(&name);
    remove(&world, &[&name]);
}

#[test]
fn a_damaged_kernel_state_is_reported_and_made_again() {
    let world = World::new();
    world.start("a", &[]);
    let [state] = &kernel_states(world.home())[..] else {
        panic!("one shape, one kernel state")
    };
    let memory = memory_of(state);
    damage(&memory);
    world.ok(["stop", "a"]);
    let answer = world.ok(["start", "a"]);
    assert!(
        answer.err().contains("a kernel state did not load"),
        "{answer:?}"
    );
    let degraded = world.inspect("a")["degraded"].to_string();
    assert!(degraded.contains("kernel_state_unusable"), "{degraded}");
    let [state] = &kernel_states(world.home())[..] else {
        panic!("it was made again")
    };
    assert_ne!(memory_of(state), memory);
    let kernel = boot_of(&world, "a");
    again(&world, "a");
    assert_eq!(boot_of(&world, "a"), kernel);
    assert_not_degraded(&world, "a");
    remove(&world, &["a"]);
}

#[test]
fn a_kernel_state_goes_with_the_last_image_of_its_kernel() {
    let world = World::new();
    let listed = || world.json(["image", "warm", "--ls"]);
    let of_kernels = |listed: &Value| {
        let listed = listed.as_array().unwrap();
        listed
            .iter()
            .filter(|state| state["kernel"].is_string())
            .count()
    };
    assert_eq!(of_kernels(&listed()), 1);
    world.ok(["image", "warm", "--rm", "tiny"]);
    assert_eq!(warm_states(world.home()).len(), 0);
    assert_eq!(of_kernels(&listed()), 1, "other images may use it");
    world.ok(["gc"]);
    assert_eq!(of_kernels(&listed()), 1);
    world.ok(["image", "rm", "tiny"]);
    assert_eq!(entries(&world.home().join("warm")).len(), 0);
    world.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_whose_kernel_state_cannot_be_kept_boots_and_reports_it() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("a")).await.expect("it is created");
    sandbox.stop(None).await.expect("it stops");
    for state in kernel_states(lab.world.home()) {
        fs::remove_dir_all(state).unwrap();
    }
    lab.fault(Step::CapturePublish, Fault::Error);
    sandbox.start(None).await.expect("it starts");
    lab.no_fault();
    let degraded = lab.world.inspect("a")["degraded"].to_string();
    assert!(degraded.contains("kernel_state_not_kept"), "{degraded}");
    assert_eq!(kernel_states(lab.world.home()).len(), 0);
    sandbox.stop(None).await.expect("it stops");
    sandbox.start(None).await.expect("it starts");
    assert_not_degraded(&lab.world, "a");
    assert_eq!(kernel_states(lab.world.home()).len(), 1);
    // A kill of the machine says nothing about the state.
    sandbox.stop(None).await.expect("it stops");
    lab.fault(Step::Machine, Fault::MachineDies);
    let error = sandbox.start(None).await.expect_err("its machine dies");
    assert_eq!(error.kind(), ErrorKind::Engine, "{error:?}");
    lab.no_fault();
    assert_eq!(kernel_states(lab.world.home()).len(), 1);
    sandbox.start(None).await.expect("it starts");
    sandbox.remove().await.expect("it is removed");
    lab.world.assert_empty();
}

/// A boot from power-on needs no memory layers, so a memory directory that went away with its file
/// system does not prevent it.
#[test]
fn a_sandbox_whose_memory_directory_is_gone_starts_from_power_on() {
    let world = World::new();
    let place = tempfile::tempdir().unwrap();
    let memory = place.path().join("memory");
    fs::create_dir(&memory).unwrap();
    world.start("a", &["--memory-dir", memory.to_str().unwrap()]);
    say(&world, "a", "echo mine > /srv/file && sync");
    world.ok(["stop", "a"]);
    fs::remove_dir_all(&memory).unwrap();
    world.ok(["start", "a"]);
    let degraded = world.inspect("a")["degraded"].clone();
    assert_eq!(degraded[0]["code"], "kernel_state_unusable", "{degraded}");
    assert_eq!(say(&world, "a", "cat /srv/file"), "mine");
    assert_eq!(kernel_states(world.home()).len(), 1, "others still use it");
    remove(&world, &["a"]);
}
