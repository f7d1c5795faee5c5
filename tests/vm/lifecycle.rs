//! The lifecycle of a sandbox: its phases, how commands show them, and which files survive.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;

use sandtree_store::{ImageSpec, Init, Store};

use crate::support::lifecycle::{Action, act, survives};
use crate::support::{self, World, finish, kill, until};

/// Writes a file of random bytes in the guest and returns its digest.
fn write_file(world: &World, sandbox: &str, path: &str) -> String {
    let line =
        format!("dd if=/dev/urandom of={path} bs=64k count=24 2>/dev/null && sha256sum {path}");
    let written = world.sh(sandbox, &line);
    assert_eq!(written.code, 0, "{written:?}");
    written.out().to_owned()
}

fn digest(world: &World, sandbox: &str, path: &str) -> String {
    let read = world.sh(sandbox, &format!("sha256sum {path}"));
    assert_eq!(read.code, 0, "{read:?}");
    read.out().to_owned()
}

#[test]
fn a_synced_file_survives_every_end_from_inside_the_guest() {
    let world = World::new();
    world.start("a", &[]);
    let written = write_file(&world, "a", "/srv/file");
    assert_eq!(world.sh("a", "sync").code, 0);
    let check = |name: &str| assert_eq!(digest(&world, name, "/srv/file"), written);
    survives(&world, "a", &[Action::GuestPoweroff], check);
    survives(&world, "a", &[Action::GuestReboot], check);
    act(&world, "a", Action::GuestPanic);
    let console = world.ok(["logs", "a"]);
    assert!(
        console.err().is_empty()
            && String::from_utf8_lossy(&console.stdout).contains("Kernel panic")
    );
    survives(&world, "a", &[], check);
    // The log still has the panic of an earlier boot, which must not count for this one.
    survives(&world, "a", &[Action::GuestPoweroff], check);
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[test]
fn a_synced_file_survives_every_end_from_the_host() {
    let world = World::new();
    world.start("a", &[]);
    let written = write_file(&world, "a", "/srv/file");
    assert_eq!(world.sh("a", "sync").code, 0);
    let check = |name: &str| assert_eq!(digest(&world, name, "/srv/file"), written);
    survives(&world, "a", &[Action::KillQemu], check);
    survives(&world, "a", &[Action::KillKeeper], check);
    survives(
        &world,
        "a",
        &[
            Action::Stop,
            Action::Start,
            Action::KillKeeper,
            Action::Start,
            Action::KillQemu,
        ],
        check,
    );
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

/// Nothing is synced here: a state holds unsynced data as well.
#[test]
fn a_file_survives_every_sequence_of_states() {
    use Action::{
        Checkpoint, Fork, GuestPanic, KillKeeper, KillQemu, Pause, Resume, Revert, Start, Stop,
    };
    let world = World::new();
    world.start("a", &["--publish", "0:80"]);
    let written = write_file(&world, "a", "/srv/file");
    let in_memory = write_file(&world, "a", "/run/file");
    let mut name = "a".to_owned();
    // Sequences that end with a boot come last, because a boot loses the memory.
    let exact: [&[Action]; 8] = [
        &[Checkpoint, Revert],
        &[Pause],
        &[Pause, Resume, Checkpoint, Pause, Revert],
        &[Checkpoint, KillQemu, Revert],
        &[Checkpoint, GuestPanic, Revert],
        &[Checkpoint, KillKeeper, Revert],
        &[Fork, Checkpoint, Stop, Revert, Pause],
        &[Checkpoint, Stop, Start, Revert, Fork, Fork],
    ];
    for actions in exact {
        name = survives(&world, &name, actions, |name| {
            assert_eq!(digest(&world, name, "/srv/file"), written, "{actions:?}");
            assert_eq!(digest(&world, name, "/run/file"), in_memory, "{actions:?}");
        });
    }
    assert_eq!(name, "a-1-1-1");
    name = survives(
        &world,
        &name,
        &[Fork, Pause, Resume, Checkpoint, Revert, Stop],
        |name| {
            assert_eq!(digest(&world, name, "/srv/file"), written);
        },
    );
    world.ok(["rm", "-f", &name]);
    world.assert_empty();
}

#[test]
fn stop_writes_out_unsynced_files() {
    let world = World::new();
    world.start("a", &[]);
    let written = write_file(&world, "a", "/srv/file");
    survives(&world, "a", &[Action::Stop], |name| {
        assert_eq!(digest(&world, name, "/srv/file"), written)
    });
    let journal = world.sh("a", "dmesg | grep -c 'recovery complete'");
    assert_eq!(
        journal.out(),
        "0\n",
        "the file system was not unmounted cleanly"
    );
    let console = world.ok(["logs", "a"]);
    assert!(
        String::from_utf8_lossy(&console.stdout).contains("Power down"),
        "the guest did not power off by itself"
    );
    world.ok(["stop", "a"]);
    assert_eq!(state(&world)["clean"], true, "stop answers after the sync");
    world.ok(["rm", "a"]);
    world.assert_empty();
}

#[test]
fn a_failed_or_interrupted_start_leaves_the_sandbox_stopped() {
    let world = World::new();
    world.start("a", &[]);
    let written = write_file(&world, "a", "/srv/file");
    world.ok(["stop", "a"]);
    world
        .run(["start", "--boot-timeout", "1ms", "a"])
        .failed_with(&["did not come up"]);
    assert_eq!(world.inspect("a")["state"], "stopped");
    let mut command = world.command();
    let starting = command
        .args(["start", "a"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // First the keeper holds the sandbox's files, then the machine does, too.
    until("the machine starts", || {
        support::processes_of(world.home()).len() >= 2
    });
    kill(starting.id(), "INT");
    assert_eq!(finish(starting).code, 130);
    assert_eq!(world.inspect("a")["state"], "stopped");
    assert_eq!(
        state(&world)["clean"],
        false,
        "what a boot wrote before it was given up is not synced"
    );
    survives(&world, "a", &[], |name| {
        assert_eq!(digest(&world, name, "/srv/file"), written)
    });
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

fn state(world: &World) -> serde_json::Value {
    serde_json::from_slice(&fs::read(sandbox_file(world, "state.json")).unwrap()).unwrap()
}

/// A file of the only sandbox.
fn sandbox_file(world: &World, name: &str) -> PathBuf {
    let mut dirs = fs::read_dir(world.home().join("sandboxes")).unwrap();
    let dir = dirs.next().expect("there is a sandbox").unwrap().path();
    assert!(dirs.next().is_none());
    dir.join(name)
}

/// The active overlay of the only sandbox.
fn active_overlay(world: &World) -> PathBuf {
    let head: serde_json::Value =
        serde_json::from_slice(&fs::read(sandbox_file(world, "head.json")).unwrap()).unwrap();
    let layer = head["disk"]
        .as_array()
        .unwrap()
        .last()
        .expect("a sandbox has a disk")
        .as_str()
        .unwrap();
    sandbox_file(world, "disks").join(format!("{layer}.qcow2"))
}

/// Leaves the store as after a power cut: a dead keeper, and a record of another boot of the host.
fn cut_the_power(world: &World) {
    let info = world.inspect("a");
    let pid = |field: &str| u32::try_from(info[field].as_u64().unwrap()).unwrap();
    kill(pid("keeper_pid"), "KILL");
    // Its socket accepts connections until it is gone.
    until("keeper and QEMU are gone", || {
        ["keeper_pid", "qemu_pid"].map(|field| support::is_alive(pid(field))) == [false; 2]
    });
    let path = sandbox_file(world, "state.json");
    let mut state: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(state["phase"], "running");
    state["boot_id"] = "00000000-0000-0000-0000-000000000000".into();
    fs::write(&path, serde_json::to_vec(&state).unwrap()).unwrap();
}

#[test]
fn after_a_power_cut_the_disk_is_checked_before_it_is_used() {
    let world = World::new();
    world.start("a", &[]);
    let written = write_file(&world, "a", "/srv/file");
    assert_eq!(world.sh("a", "sync").code, 0);
    cut_the_power(&world);
    world
        .sh("a", "true")
        .failed_with(&["crashed", "the host went down", "sandtree start"]);
    assert_eq!(world.inspect("a")["state"], "crashed");
    world.ok(["start", "a"]);
    assert_eq!(digest(&world, "a", "/srv/file"), written);

    cut_the_power(&world);
    let overlay = active_overlay(&world);
    damage_the_first_table(&overlay);
    let damaged = fs::read(&overlay).unwrap();
    world
        .run(["start", "a"])
        .failed_with(&["disk of sandbox a is damaged", "hint"]);
    assert!(
        fs::read(&overlay).unwrap() == damaged,
        "a damaged disk is left as it is"
    );
    assert_eq!(world.inspect("a")["state"], "crashed");
    world.ok(["rm", "a"]);
    world.assert_empty();
}

/// Points the first entry of a qcow2's first-level table behind the end of the file.
fn damage_the_first_table(overlay: &std::path::Path) {
    let file = File::options()
        .read(true)
        .write(true)
        .open(overlay)
        .unwrap();
    let mut offset = [0; 8];
    file.read_exact_at(&mut offset, 40).unwrap();
    let table = u64::from_be_bytes(offset);
    let end = file.metadata().unwrap().len();
    let behind = (end + (1 << 30)) & !0xffff | 1 << 63;
    file.write_all_at(&behind.to_be_bytes(), table).unwrap();
}

#[test]
fn a_guest_has_the_requested_shape() {
    let world = World::new();
    world.start("big", &["--disk", "2G", "--memory", "768M", "--cpus", "2"]);
    world.start("plain", &[]);
    let number = |sandbox: &str, line: &str| -> u64 {
        let said = world.sh(sandbox, line);
        said.out()
            .trim()
            .parse()
            .unwrap_or_else(|_| panic!("{said:?}"))
    };
    let disk_kib = "df -k / | tail -n 1 | awk '{print $2}'";
    let memory_kib = "awk '/MemTotal/ {print $2}' /proc/meminfo";
    assert!((1_900_000..2_100_000).contains(&number("big", disk_kib)));
    assert!(
        (30_000..66_000).contains(&number("plain", disk_kib)),
        "the image's own size"
    );
    assert!((650_000..786_432).contains(&number("big", memory_kib)));
    assert!((400_000..524_288).contains(&number("plain", memory_kib)));
    assert_eq!((number("big", "nproc"), number("plain", "nproc")), (2, 1));
    let written = world.sh(
        "big",
        "dd if=/dev/zero of=/srv/large bs=1M count=200 2>&1 && sync",
    );
    assert_eq!(written.code, 0, "{written:?}");
    // A file system that was enlarged stays so, and is not enlarged again.
    survives(&world, "big", &[Action::Stop], |name| {
        assert!((1_900_000..2_100_000).contains(&number(name, disk_kib)))
    });
    world.ok(["rm", "-f", "big", "plain"]);
    world.assert_empty();
}

/// The image `tiny`, with its own init as process 1.
fn publish_with_own_init(world: &World) {
    let store = Store::open(world.home()).unwrap();
    let tiny = store.image(&"tiny".parse().unwrap()).unwrap();
    let staged = store.stage().unwrap();
    fs::copy(tiny.rootfs(), staged.path().join("rootfs.raw")).unwrap();
    let spec = ImageSpec {
        arch: tiny.record.arch,
        kernel: tiny.record.kernel.clone(),
        init: Init::Image,
        defaults: tiny.record.defaults.clone(),
        disk_bytes: None,
    };
    let image = store.publish_image(staged, spec).unwrap();
    store
        .set_image_name(&"tiny-init".parse().unwrap(), &image.digest)
        .unwrap();
}

#[test]
fn an_image_may_bring_its_own_init() {
    let world = World::new();
    publish_with_own_init(&world);
    world.ok(["run", "-d", "--name", "a", "tiny-init"]);
    assert_eq!(world.sh("a", "cat /proc/1/comm").out(), "init\n");
    assert_eq!(world.sh("a", "echo out; exit 7").code, 7);
    // Every process that an ordinary user may end; the agent is not among them.
    let all = world.run([
        "exec",
        "--user",
        "user",
        "a",
        "--",
        "sh",
        "-c",
        "sleep 1000 & kill -9 -1; wait $!",
    ]);
    assert_eq!(all.code, 137, "{all:?}");
    let written = write_file(&world, "a", "/srv/file");
    survives(&world, "a", &[Action::Stop], |name| {
        assert_eq!(digest(&world, name, "/srv/file"), written)
    });
    let console = world.ok(["logs", "a"]);
    assert!(
        String::from_utf8_lossy(&console.stdout).contains("Power down"),
        "init did not power off"
    );
    assert_eq!(
        world.sh("a", "dmesg | grep -c 'recovery complete'").out(),
        "0\n"
    );
    // The image's init obeys `poweroff`, too.
    world.sh("a", "poweroff");
    until("it has powered off", || {
        world.inspect("a")["state"] == "stopped"
    });
    assert_eq!(world.inspect("a")["reason"], "the guest powered off");
    world.ok(["rm", "a"]);
    world.assert_empty();
}

/// Under another init the agent is an ordinary process, and root may kill it. Callers must not wait
/// for it without end.
#[test]
fn an_agent_killed_by_root_is_reported_and_the_guest_can_be_restarted() {
    let world = World::new();
    publish_with_own_init(&world);
    world.ok(["run", "-d", "--name", "a", "tiny-init"]);
    let waiting = world.sh("a", "kill -9 -1; sleep 1000");
    waiting.failed_with(&["the agent in the guest ended"]);
    world
        .sh("a", "true")
        .failed_with(&["the agent in the guest ended"]);
    world.ok(["stop", "a"]);
    world.ok(["start", "a"]);
    assert_eq!(world.sh("a", "echo back").out(), "back\n");
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[test]
fn nothing_a_guest_does_to_itself_silences_its_agent() {
    let world = World::new();
    world.start("a", &[]);
    let answers = || assert_eq!(world.sh("a", "echo here").out(), "here\n");
    let all = world.sh("a", "sleep 1000 & kill -9 -1; wait $!");
    assert_eq!(all.code, 137, "{all:?}");
    answers();
    let bomb = world.run([
        "exec",
        "--timeout",
        "5s",
        "a",
        "--",
        "sh",
        "-c",
        "f() { f | f; }; f",
    ]);
    assert!([124, 2].contains(&bomb.code), "{bomb:?}");
    answers();
    let few = world
        .sh("a", "ps | wc -l")
        .out()
        .trim()
        .parse::<u32>()
        .unwrap();
    assert!(few < 150, "{few} processes: the bomb outlived its timeout");
    let filled = world.sh("a", "dd if=/dev/zero of=/tmp/fill bs=1M");
    assert!(
        filled.code != 0 && filled.err().contains("No space left"),
        "{filled:?}"
    );
    answers();
    let upload = world.run_with_input(["cp", "-", "a:/tmp/more"], &vec![1; 4 << 20]);
    upload.failed_with(&["No space left"]);
    world.ok(["stop", "a"]);
    world.ok(["rm", "a"]);
    world.assert_empty();
}

#[test]
fn poweroff_and_reboot_work_when_the_agent_is_init() {
    let world = World::new();
    world.start("a", &[]);
    let written = write_file(&world, "a", "/srv/file");
    world.sh("a", "poweroff");
    until("poweroff is obeyed", || {
        world.inspect("a")["state"] == "stopped"
    });
    assert_eq!(world.inspect("a")["reason"], "the guest powered off");
    survives(&world, "a", &[], |name| {
        assert_eq!(digest(&world, name, "/srv/file"), written)
    });
    world.sh("a", "reboot");
    until("reboot is obeyed", || {
        world.inspect("a")["state"] == "stopped"
    });
    assert_eq!(world.inspect("a")["reason"], "the guest rebooted");
    world.ok(["rm", "a"]);
    world.assert_empty();
}
