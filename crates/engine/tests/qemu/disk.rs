//! The disk of a running machine: pivots, exchanges of what lies below, copies.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use sandtree_engine::qmp::Command;
use sandtree_engine::{DiskChain, Event, Flushes, Machine, MachineSpec};
use serde::Serialize;

use crate::memory::counts;
use crate::support::{engine, file, overlay, spec};
use crate::{holds, start, within};

const CLUSTER: u64 = 64 << 10;

/// Writes to the guest's disk without the guest.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Monitor {
    command_line: String,
}

impl Command for Monitor {
    const NAME: &'static str = "human-monitor-command";
    type Reply = String;
}

/// Fills a cluster.
async fn write(machine: &Machine, mark: u8, cluster: u64) {
    let command = format!("write -P {mark} {} {CLUSTER}", cluster * CLUSTER);
    let command_line = format!("qemu-io -d /machine/peripheral/disk/virtio-backend \"{command}\"");
    assert_eq!(
        machine.qmp().run(Monitor { command_line }).await.unwrap(),
        ""
    );
}

/// Checks the first clusters of the disk by a copy of it, which takes a pivot to the overlay of
/// that name.
async fn check(machine: &Machine, dir: &Path, name: &str, marks: &[u8]) {
    pivot(machine, dir, name).await;
    let copy = format!("copy-for-{name}");
    within(machine.copy_disk(fresh(dir, &copy))).await.unwrap();
    let image = read_only(dir, &copy);
    for (number, mark) in (0..).zip(marks) {
        let expected = vec![*mark; CLUSTER as usize];
        assert!(
            cluster(&image, number) == expected,
            "cluster {number} at {name}"
        );
    }
}

/// One cluster of a qcow2 image that has no other below.
fn cluster(image: &File, number: u64) -> Vec<u8> {
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    let word = |at: u64| {
        let mut bytes = [0; 8];
        image.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let mut bytes = vec![0; CLUSTER as usize];
    let table = word(word(40)) & OFFSET;
    if table != 0 {
        let entry = word(table + 8 * number);
        if entry & 1 == 0 && entry & OFFSET != 0 {
            image.read_exact_at(&mut bytes, entry & OFFSET).unwrap();
        }
    }
    bytes
}

/// An empty overlay, open for reading and writing.
pub fn fresh(dir: &Path, name: &str) -> File {
    fresh_of(1 << 20, dir, name)
}

fn fresh_of(bytes: u32, dir: &Path, name: &str) -> File {
    drop(file(&dir.join(name), &overlay(bytes)));
    File::options()
        .read(true)
        .write(true)
        .open(dir.join(name))
        .unwrap()
}

fn read_only(dir: &Path, name: &str) -> File {
    File::open(dir.join(name)).unwrap()
}

async fn pivot(machine: &Machine, dir: &Path, name: &str) {
    let prepared = within(machine.prepare_overlay(fresh(dir, name)))
        .await
        .unwrap();
    within(machine.pivot(prepared))
        .await
        .map_err(|(_, error)| error)
        .unwrap();
}

#[tokio::test]
async fn a_pivot_freezes_what_was_written_and_a_discarded_overlay_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    write(&machine, 1, 0).await;

    let unused = machine
        .prepare_overlay(fresh(dir.path(), "unused"))
        .await
        .unwrap();
    assert!(holds(machine.pid(), &dir.path().join("unused")));
    machine.discard_overlay(unused).await.unwrap();
    assert!(!holds(machine.pid(), &dir.path().join("unused")));

    pivot(&machine, dir.path(), "second").await;
    let frozen = fs::read(dir.path().join("active")).unwrap();
    write(&machine, 2, 1).await;
    write(&machine, 3, 0).await;
    check(&machine, dir.path(), "third", &[3, 2, 0]).await;
    assert_eq!(fs::read(dir.path().join("active")).unwrap(), frozen);
    counts(&machine).await;
}

/// How many descriptors of a process can write to a file.
fn writers(pid: u32, file: &Path) -> usize {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|fd| fd.unwrap());
    let of_file = descriptors.filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == file));
    let can_write = |number: &std::ffi::OsStr| {
        let told =
            fs::read_to_string(Path::new(&format!("/proc/{pid}/fdinfo")).join(number)).unwrap();
        let flags = told
            .lines()
            .find_map(|line| line.strip_prefix("flags:"))
            .unwrap()
            .trim()
            .to_owned();
        i32::from_str_radix(&flags, 8).unwrap() & libc::O_ACCMODE != libc::O_RDONLY
    };
    of_file.filter(|fd| can_write(&fd.file_name())).count()
}

#[tokio::test]
async fn nothing_in_qemu_can_write_to_an_overlay_that_was_frozen() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    for (number, name) in ["active", "second", "third"].iter().enumerate() {
        write(&machine, number as u8 + 1, number as u64).await;
        assert!(writers(machine.pid(), &dir.path().join(name)) > 0);
        pivot(&machine, dir.path(), ["second", "third", "fourth"][number]).await;
        within(machine.give_up_writing(read_only(dir.path(), name)))
            .await
            .unwrap();
        assert_eq!(writers(machine.pid(), &dir.path().join(name)), 0, "{name}");
    }
    write(&machine, 9, 1).await;
    check(&machine, dir.path(), "fifth", &[1, 9, 3, 0]).await;
    // What lies below can still be exchanged, and nothing of it stays open.
    within(machine.rebase(vec![read_only(dir.path(), "copy-for-fifth")]))
        .await
        .unwrap();
    assert!(!holds(machine.pid(), &dir.path().join("second")));
    check(&machine, dir.path(), "sixth", &[1, 9, 3, 0]).await;
    counts(&machine).await;
}

#[tokio::test]
async fn a_refused_pivot_gives_the_overlay_back() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    let other = start(tempfile::tempdir().unwrap().path(), "busy").await;
    // A number this machine does not have.
    pivot(&other, dir.path(), "a").await;
    let foreign = other.prepare_overlay(fresh(dir.path(), "b")).await.unwrap();
    let (foreign, _) = machine.pivot(foreign).await.unwrap_err();
    other
        .pivot(foreign)
        .await
        .map_err(|(_, error)| error)
        .unwrap();
    pivot(&machine, dir.path(), "c").await;
    write(&machine, 1, 0).await;
    check(&machine, dir.path(), "d", &[1]).await;
}

#[tokio::test]
async fn what_lies_below_is_exchanged_under_a_running_guest() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    for (name, mark) in [("second", 1), ("third", 2), ("fourth", 3)] {
        write(&machine, mark, u64::from(mark)).await;
        pivot(&machine, dir.path(), name).await;
    }
    write(&machine, 4, 4).await;
    // Four images lie below: frozen, active, second, third. The first two are read from copies, and
    // the order tells.
    for (from, to) in [
        ("active", "copy-of-active"),
        ("second", "copy-of-second"),
        ("third", "copy-of-third"),
    ] {
        fs::copy(dir.path().join(from), dir.path().join(to)).unwrap();
    }
    let below = ["copy-of-active", "copy-of-second", "copy-of-third"]
        .map(|name| read_only(dir.path(), name));
    within(machine.rebase(below.into())).await.unwrap();
    check(&machine, dir.path(), "fifth", &[0, 1, 2, 3, 4]).await;
    for gone in ["frozen", "active", "second", "third"] {
        assert!(!holds(machine.pid(), &dir.path().join(gone)), "{gone}");
    }
    // And again, from there on.
    write(&machine, 5, 0).await;
    let names = [
        "copy-of-active",
        "copy-of-second",
        "copy-of-third",
        "fourth",
    ];
    within(machine.rebase(names.map(|name| read_only(dir.path(), name)).into()))
        .await
        .unwrap();
    check(&machine, dir.path(), "sixth", &[5, 1, 2, 3, 4]).await;
    counts(&machine).await;
}

#[tokio::test]
async fn an_exchange_that_fails_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    write(&machine, 1, 0).await;
    pivot(&machine, dir.path(), "second").await;
    fs::copy(dir.path().join("active"), dir.path().join("copy")).unwrap();
    let bad = file(&dir.path().join("bad"), &[7; 4096]);
    let error = within(machine.rebase(vec![read_only(dir.path(), "copy"), bad]))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("blockdev-add"), "{error}");
    for name in ["copy", "bad"] {
        assert!(!holds(machine.pid(), &dir.path().join(name)), "{name}");
    }
    check(&machine, dir.path(), "third", &[1, 0]).await;
}

#[tokio::test]
async fn a_copy_holds_what_is_below_the_active_overlay() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    write(&machine, 1, 0).await;
    pivot(&machine, dir.path(), "second").await;
    write(&machine, 2, 1).await;
    within(machine.copy_disk(fresh(dir.path(), "copy")))
        .await
        .unwrap();
    assert!(!holds(machine.pid(), &dir.path().join("copy")));
    let copy = read_only(dir.path(), "copy");
    assert!(cluster(&copy, 0).iter().all(|byte| *byte == 1));
    assert!(cluster(&copy, 1).iter().all(|byte| *byte == 0));
    // The next one finds the way free.
    check(&machine, dir.path(), "third", &[1, 2, 0]).await;
    // A machine starts from the copy as from any other overlay.
    let other = tempfile::tempdir().unwrap();
    let overlays = vec![copy, fresh(other.path(), "top")];
    let disk = DiskChain {
        base: read_only(dir.path(), "base"),
        overlays,
        flushes: Flushes::Ignored,
    };
    let started = within(engine().await.start(MachineSpec {
        disk,
        ..spec(other.path(), "busy")
    }))
    .await
    .unwrap();
    check(&started, other.path(), "next", &[1, 0]).await;
}

/// QEMU 7.2 hangs every few times when it gets both at once.
#[tokio::test]
async fn a_pivot_asked_for_under_a_copy_waits_for_its_end() {
    const BYTES: u32 = 64 << 20;
    let dir = tempfile::tempdir().unwrap();
    let toy = spec(dir.path(), "busy");
    let base = file(&dir.path().join("large"), &vec![6; BYTES as usize]);
    let disk = DiskChain {
        base,
        overlays: vec![fresh_of(BYTES, dir.path(), "first")],
        flushes: Flushes::Ignored,
    };
    let machine = within(engine().await.start(MachineSpec { disk, ..toy }))
        .await
        .unwrap();
    let mut events = machine.events();
    let overlay = machine
        .prepare_overlay(fresh_of(BYTES, dir.path(), "second"))
        .await
        .unwrap();
    let copy = machine.copy_disk(fresh_of(BYTES, dir.path(), "copy"));
    let pivot = async {
        while !matches!(events.next().await, Some(Event::Job { status, .. }) if status == "running")
        {
        }
        machine.pivot(overlay).await.map_err(|(_, error)| error)
    };
    let (copied, pivoted) = within(async { tokio::join!(copy, pivot) }).await;
    copied.unwrap();
    pivoted.unwrap();
    assert!(
        cluster(&read_only(dir.path(), "copy"), 1023)
            .iter()
            .all(|byte| *byte == 6)
    );
    write(&machine, 1, 0).await;
    let image = read_only(dir.path(), "second");
    machine
        .pivot(
            machine
                .prepare_overlay(fresh_of(BYTES, dir.path(), "third"))
                .await
                .unwrap(),
        )
        .await
        .unwrap();
    assert_eq!(cluster(&image, 0)[0], 1);
}

#[tokio::test]
async fn a_disk_grows_under_a_running_guest() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    pivot(&machine, dir.path(), "second").await;
    write(&machine, 7, 15).await;
    within(machine.resize_disk(2 << 20)).await.unwrap();
    write(&machine, 8, 31).await;
    let image = File::open(dir.path().join("second")).unwrap();
    pivot(&machine, dir.path(), "third").await;
    assert_eq!((cluster(&image, 15)[0], cluster(&image, 31)[0]), (7, 8));
}
