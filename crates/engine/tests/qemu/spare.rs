//! Machines that were started ahead of time, compared with machines that were started when needed.

use std::fs::File;
use std::path::Path;

use sandtree_engine::qmp::QueryStatus;
use sandtree_engine::{
    ByteRun, DiskChain, Limits, Machine, MachineSpec, Mapped, Memory, Spare, Start, Verdict,
};

use crate::devices::{capture, counter, saved};
use crate::memory::{counts, pages, read, two_layers};
use crate::support::{engine, file, spec};
use crate::{exists, holds, start, wait_until, within};

const DISK_BYTES: u64 = 1 << 20;
const MIB: u64 = 1 << 20;

fn waiting(dir: &Path, memory: Memory) -> MachineSpec {
    MachineSpec {
        memory,
        start: Start::Incoming,
        ..spec(dir, "wait")
    }
}

async fn spare(dir: &Path) -> Spare {
    let spec = waiting(dir, Memory::Empty);
    within(engine().await.prepare(spec, DISK_BYTES))
        .await
        .expect("a spare starts")
}

async fn filled(dir: &Path, memory: Memory) -> Machine {
    let spare = spare(dir).await;
    let spec = waiting(dir, memory);
    assert!(spare.fits(&spec), "{spare:?}");
    within(spare.fill(spec))
        .await
        .expect("it becomes a machine")
}

#[tokio::test]
async fn a_spare_gets_the_bytes_of_layers_and_keeps_no_way_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let (entries, layers) = two_layers(dir.path());
    let machine = filled(dir.path(), Memory::Mapped { entries, layers }).await;
    assert_eq!(machine.memory().mapped(), Mapped::Preload { regions: 2 });
    let runs = [ByteRun {
        offset: 8 * MIB - 4096,
        bytes: 6 * 4096,
    }];
    assert_eq!(read(machine.memory(), &runs), pages(&[0, 1, 5, 3, 4, 0]));
    assert!(!holds(machine.pid(), &dir.path().join("lower")));
    assert!(!holds(machine.pid(), &dir.path().join("upper")));
    let tracked = engine().await.verdicts().tracking.write_protect == Verdict::Usable;
    assert_eq!(machine.memory().write_protected().is_ok(), tracked);
}

/// A machine on the state of a busy one.
struct Loaded {
    machine: Machine,
    count: u8,
    devices: Vec<u8>,
}

async fn loaded(machine: Machine, state: &File) -> Loaded {
    within(machine.load(state.try_clone().unwrap().into()))
        .await
        .unwrap();
    let count = counter(&machine);
    let devices = within(saved(&machine)).await;
    Loaded {
        machine,
        count,
        devices,
    }
}

#[tokio::test]
async fn a_spare_loads_a_state_as_a_fresh_machine_does() {
    let dir = tempfile::tempdir().unwrap();
    let source = start(dir.path(), "busy").await;
    counts(&source).await;
    source.stop().await.unwrap();
    let devices = within(saved(&source)).await;
    let state = file(&dir.path().join("devices"), &devices);

    let other = tempfile::tempdir().unwrap();
    let memory = capture(&source, &other.path().join("memory"));
    let spec = waiting(other.path(), memory);
    let fresh = within(engine().await.start(spec)).await.unwrap();
    let fresh = loaded(fresh, &state).await;

    let other = tempfile::tempdir().unwrap();
    let memory = capture(&source, &other.path().join("memory"));
    let spare = loaded(filled(other.path(), memory).await, &state).await;

    assert_eq!(spare.count, counter(&source));
    assert_eq!(spare.count, fresh.count);
    assert_eq!(spare.devices.len(), fresh.devices.len());
    let differing = spare.devices.iter().zip(&fresh.devices);
    let differing = differing.filter(|(spare, fresh)| spare != fresh).count();
    // The address of vmgenid's buffer, and the host's clock in the RTC, differ between two fresh
    // machines as well.
    assert!(differing <= 64, "{differing} bytes of the devices differ");
    assert_eq!(
        within(spare.machine.qmp().run(QueryStatus {}))
            .await
            .unwrap()
            .status,
        "paused"
    );
    spare.machine.cont().await.unwrap();
    counts(&spare.machine).await;
}

#[tokio::test]
async fn the_disk_of_a_spare_pivots_and_is_written_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let (entries, layers) = two_layers(dir.path());
    let machine = filled(dir.path(), Memory::Mapped { entries, layers }).await;
    assert!(holds(machine.pid(), &dir.path().join("active")));
    assert!(holds(machine.pid(), &dir.path().join("frozen")));
    let next = dir.path().join("next");
    drop(file(&next, &crate::support::overlay(1 << 20)));
    let next = File::options().read(true).write(true).open(&next).unwrap();
    let prepared = within(machine.prepare_overlay(next)).await.unwrap();
    within(machine.pivot(prepared)).await.unwrap();
    let frozen = File::open(dir.path().join("active")).unwrap();
    within(machine.give_up_writing(frozen)).await.unwrap();
}

#[tokio::test]
async fn a_spare_has_closed_images_open_and_no_active_one() {
    let dir = tempfile::tempdir().unwrap();
    let spare = spare(dir.path()).await;
    assert!(holds(spare.pid(), &dir.path().join("base")));
    assert!(holds(spare.pid(), &dir.path().join("frozen")));
    assert!(!holds(spare.pid(), &dir.path().join("active")));
}

/// Of a disk with other overlays than the ones that a spare has opened, it gets these, and keeps
/// none of its own.
#[tokio::test]
async fn a_spare_gets_the_overlays_that_it_did_not_open() {
    let dir = tempfile::tempdir().unwrap();
    let of_source = tempfile::tempdir().unwrap();
    let source = start(of_source.path(), "busy").await;
    source.stop().await.unwrap();
    let devices = within(saved(&source)).await;
    let spare = spare(dir.path()).await;
    let other = |name: &str| {
        let path = dir.path().join(name);
        file(&path, &crate::support::overlay(1 << 20))
    };
    let (entries, layers) = two_layers(dir.path());
    let mut spec = waiting(dir.path(), Memory::Mapped { entries, layers });
    spec.disk.overlays.splice(..1, [other("one"), other("two")]);
    assert!(spare.fits(&spec), "{spare:?}");
    let machine = within(spare.fill(spec)).await.unwrap();
    let state = file(&dir.path().join("devices"), &devices);
    within(machine.load(state.into())).await.unwrap();
    within(machine.cont()).await.unwrap();
    within(machine.close_unneeded()).await.unwrap();
    for (name, is_held) in [
        ("base", true),
        ("frozen", false),
        ("one", true),
        ("two", true),
        ("active", true),
    ] {
        let path = dir.path().join(name);
        assert_eq!(holds(machine.pid(), &path), is_held, "{name}");
    }
    drop(other("next"));
    let next = dir.path().join("next");
    let next = File::options().read(true).write(true).open(&next).unwrap();
    let prepared = within(machine.prepare_overlay(next)).await.unwrap();
    within(machine.pivot(prepared)).await.unwrap();
    let frozen = File::open(dir.path().join("active")).unwrap();
    within(machine.give_up_writing(frozen)).await.unwrap();
    within(machine.rebase(vec![other("all")])).await.unwrap();
    assert!(!holds(machine.pid(), &dir.path().join("two")));
}

#[tokio::test]
async fn a_spare_becomes_only_a_machine_with_its_arguments_user_and_limits() {
    let dir = tempfile::tempdir().unwrap();
    let spare = spare(dir.path()).await;
    let layers = || {
        let (entries, layers) = two_layers(dir.path());
        Memory::Mapped { entries, layers }
    };
    let wanted = || waiting(dir.path(), layers());
    assert!(spare.fits(&wanted()));
    let others = [
        MachineSpec {
            cpus: 2,
            ..wanted()
        },
        MachineSpec {
            memory_bytes: 128 << 20,
            ..wanted()
        },
        MachineSpec {
            cpu: "max".into(),
            ..wanted()
        },
        MachineSpec {
            name: "other".into(),
            ..wanted()
        },
        MachineSpec {
            start: Start::Run,
            ..wanted()
        },
        MachineSpec {
            memory: Memory::Empty,
            ..wanted()
        },
        MachineSpec {
            limits: Limits {
                open_files: 1000,
                ..Limits::default()
            },
            ..wanted()
        },
        MachineSpec {
            initramfs: file(&dir.path().join("another"), b"nothing"),
            ..wanted()
        },
        MachineSpec {
            disk: DiskChain {
                base: file(&dir.path().join("another base"), &[0; 1 << 20]),
                ..wanted().disk
            },
            ..wanted()
        },
    ];
    for other in others {
        assert!(!spare.fits(&other), "{other:?}");
    }
}

#[tokio::test]
async fn a_spare_that_is_dropped_or_has_ended_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dropped = spare(dir.path()).await;
    let pid = dropped.pid();
    drop(dropped);
    wait_until(|| !exists(pid));

    let ended = spare(dir.path()).await;
    let pid = rustix::process::Pid::from_raw(ended.pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let (entries, layers) = two_layers(dir.path());
    let wanted = waiting(dir.path(), Memory::Mapped { entries, layers });
    wait_until(|| !ended.fits(&wanted));
}
