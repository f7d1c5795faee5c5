//! The guest's RAM: laid from layers, and seen from outside.

use std::fs::{self, File};
use std::path::Path;

use sandtree_engine::{
    ByteRun, Error, GuestMemory, Machine, MachineSpec, MapEntry, Mapped, Memory, Preload, Start,
    Tracking, Verdict,
};

use crate::support::{COUNTER, engine, file, spec};
use crate::{children, holds, start, wait_until, within};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn page(offset: u64) -> ByteRun {
    ByteRun {
        offset,
        bytes: PAGE,
    }
}

pub fn read(memory: &GuestMemory, runs: &[ByteRun]) -> Vec<u8> {
    let mut bytes = Vec::new();
    memory.read(runs, &mut bytes).unwrap();
    bytes
}

/// Pages of equal bytes.
pub fn pages(marks: &[u8]) -> Vec<u8> {
    marks
        .iter()
        .flat_map(|mark| [*mark; PAGE as usize])
        .collect()
}

fn entry(guest_offset: u64, pages: u64, layer: usize, file_page: u64) -> MapEntry {
    MapEntry {
        guest_offset,
        bytes: pages * PAGE,
        layer,
        file_offset: file_page * PAGE,
    }
}

/// A machine that waits, so that nothing but the start touches its memory.
async fn waiting(dir: &Path, memory: Memory, preload: Preload) -> Result<Machine, Error> {
    let spec = MachineSpec {
        memory,
        preload,
        start: Start::Incoming,
        ..spec(dir, "wait")
    };
    within(engine().await.start(spec)).await
}

/// Four pages of one layer at 8 MiB, the second of them under a page of another.
pub fn two_layers(dir: &Path) -> (Vec<MapEntry>, Vec<File>) {
    let lower = file(&dir.join("lower"), &pages(&[9, 1, 2, 3, 4]));
    let upper = file(&dir.join("upper"), &pages(&[5]));
    (
        vec![entry(8 * MIB, 4, 0, 1), entry(8 * MIB + PAGE, 1, 1, 0)],
        vec![lower, upper],
    )
}

#[tokio::test]
async fn empty_memory_is_laid_by_the_library_and_tracked_where_the_kernel_can() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "wait").await;
    assert_eq!(machine.memory().bytes(), 64 * MIB);
    assert_eq!(machine.memory().mapped(), Mapped::Preload { regions: 0 });
    let tracked = engine().await.verdicts().tracking.write_protect == Verdict::Usable;
    assert_eq!(
        machine.memory().write_protected().is_ok(),
        tracked,
        "{:?}",
        machine.memory().write_protected()
    );
}

#[tokio::test]
async fn layers_show_the_newest_bytes_over_zeros_and_never_change() {
    let dir = tempfile::tempdir().unwrap();
    let (entries, layers) = two_layers(dir.path());
    let machine = waiting(dir.path(), Memory::Mapped { entries, layers }, Preload::Use)
        .await
        .unwrap();
    assert_eq!(machine.memory().mapped(), Mapped::Preload { regions: 2 });
    let runs = [
        ByteRun {
            offset: 8 * MIB - PAGE,
            bytes: 6 * PAGE,
        },
        page(8 * MIB + PAGE),
    ];
    assert_eq!(read(machine.memory(), &runs), pages(&[0, 1, 5, 3, 4, 0, 5]));
    // No descriptor of a layer stays in QEMU.
    assert!(!holds(machine.pid(), &dir.path().join("lower")));
    assert!(!holds(machine.pid(), &dir.path().join("upper")));

    poke(machine.pid(), machine.memory(), 8 * MIB);
    assert_eq!(read(machine.memory(), &[page(8 * MIB)])[..2], [0xee, 1]);
    assert_eq!(
        fs::read(dir.path().join("lower")).unwrap(),
        pages(&[9, 1, 2, 3, 4])
    );
}

#[tokio::test]
async fn a_flat_file_shows_the_same_with_the_library_and_without() {
    for preload in [Preload::Use, Preload::Skip] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flat");
        drop(file(&path, &[]));
        let flat = File::options().read(true).write(true).open(&path).unwrap();
        flat.set_len(64 * MIB).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&flat, &pages(&[1, 5, 3, 4]), 8 * MIB).unwrap();
        let machine = waiting(dir.path(), Memory::Flat { file: flat }, preload)
            .await
            .unwrap();
        let runs = [ByteRun {
            offset: 8 * MIB - PAGE,
            bytes: 6 * PAGE,
        }];
        assert_eq!(read(machine.memory(), &runs), pages(&[0, 1, 5, 3, 4, 0]));

        poke(machine.pid(), machine.memory(), 8 * MIB);
        assert_eq!(
            machine.memory().written(Tracking::Anonymous).unwrap(),
            [page(8 * MIB)]
        );
        assert_eq!(fs::read(&path).unwrap()[8 * MIB as usize], 1);
    }
}

#[tokio::test]
async fn without_the_library_it_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let spec = MachineSpec {
        preload: Preload::Skip,
        ..spec(dir.path(), "busy")
    };
    let machine = within(engine().await.start(spec)).await.unwrap();
    let reason = "the library was not asked for".to_owned();
    assert_eq!(
        machine.memory().mapped(),
        Mapped::File {
            reason: reason.clone()
        }
    );
    assert_eq!(
        machine.memory().write_protected().unwrap_err().to_string(),
        reason
    );
    assert!(matches!(
        machine.memory().written(Tracking::WriteProtect),
        Err(Error::Untracked { .. })
    ));
    let counted = counts(&machine).await;
    assert!(
        machine
            .memory()
            .written(Tracking::Anonymous)
            .unwrap()
            .iter()
            .any(|run| covers(run, COUNTER))
    );
    assert_ne!(counted, 0);
}

#[tokio::test]
async fn a_written_page_is_reported_exactly_once() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "busy").await;
    if machine.memory().write_protected().is_err() {
        return;
    }
    counts(&machine).await;
    machine.stop().await.unwrap();
    let first = machine.memory().written(Tracking::WriteProtect).unwrap();
    assert!(first.iter().any(|run| covers(run, COUNTER)), "{first:?}");
    assert_eq!(
        machine.memory().written(Tracking::WriteProtect).unwrap(),
        []
    );

    machine.cont().await.unwrap();
    counts(&machine).await;
    machine.stop().await.unwrap();
    // A device may write a page of its own when the guest continues; nothing else may.
    let second = machine.memory().written(Tracking::WriteProtect).unwrap();
    assert!(
        second.contains(&page(COUNTER)) && second.len() <= 2,
        "{second:?}"
    );
    assert_eq!(
        machine.memory().written(Tracking::WriteProtect).unwrap(),
        []
    );
}

/// Pages that are only read are not copies of their own, whether of a layer or of nothing.
#[tokio::test]
async fn a_first_scan_reports_no_page_that_was_only_read() {
    let dir = tempfile::tempdir().unwrap();
    let (entries, layers) = two_layers(dir.path());
    let machine = waiting(dir.path(), Memory::Mapped { entries, layers }, Preload::Use)
        .await
        .unwrap();
    if machine.memory().write_protected().is_err() {
        return;
    }
    read(
        machine.memory(),
        &[ByteRun {
            offset: 8 * MIB,
            bytes: MIB,
        }],
    );
    poke(machine.pid(), machine.memory(), 8 * MIB + 2 * PAGE);
    assert_eq!(
        machine.memory().written(Tracking::WriteProtect).unwrap(),
        [page(8 * MIB + 2 * PAGE)]
    );
}

#[tokio::test]
async fn a_plan_that_cannot_be_laid_is_refused_and_leaves_no_process() {
    for (bad, reason) in [
        (
            entry(64 * MIB, 1, 0, 0),
            "a region is not one of the guest's memory",
        ),
        (
            entry(8 * MIB + 1, 1, 0, 0),
            "a region is not one of the guest's memory",
        ),
        (
            entry(8 * MIB, 6, 0, 0),
            "region 1 ends behind the 20480 bytes of layer 0",
        ),
        (entry(8 * MIB, 1, 2, 0), "layer 2, which is not there"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (mut entries, layers) = two_layers(dir.path());
        entries[1] = bad;
        let error = waiting(dir.path(), Memory::Mapped { entries, layers }, Preload::Use)
            .await
            .unwrap_err();
        assert!(matches!(error, Error::NotMapped { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        wait_until(|| {
            !children()
                .iter()
                .any(|pid| holds(*pid, &dir.path().join("kernel")))
        });
    }
}

/// Each region alone between zeros takes two of the 65,530 mappings Linux allows a process.
#[tokio::test]
async fn more_regions_than_the_kernel_maps_are_an_error_and_many_are_not() {
    for (regions, fits) in [(8_000, true), (33_000, false)] {
        let dir = tempfile::tempdir().unwrap();
        let layers = vec![file(&dir.path().join("layer"), &pages(&[7]))];
        let entries = (0..regions)
            .map(|region| entry(8 * MIB + 2 * region * PAGE, 1, 0, 0))
            .collect();
        let memory = Memory::Mapped { entries, layers };
        let spec = MachineSpec {
            memory,
            memory_bytes: 272 * MIB,
            start: Start::Incoming,
            ..spec(dir.path(), "wait")
        };
        match within(engine().await.start(spec)).await {
            Ok(machine) => {
                assert!(fits);
                let end = [ByteRun {
                    offset: 8 * MIB + 2 * (regions - 1) * PAGE,
                    bytes: 2 * PAGE,
                }];
                assert_eq!(read(machine.memory(), &end), pages(&[7, 0]));
            }
            Err(error) => {
                assert!(!fits, "{error}");
                assert!(
                    matches!(&error, Error::NotMapped { reason } if reason.contains("cannot be mapped")),
                    "{error}"
                );
            }
        }
    }
}

#[tokio::test]
async fn the_memory_of_a_machine_that_is_gone_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "wait").await;
    let memory = machine.memory().clone();
    within(machine.kill()).await;
    assert!(memory.read(&[page(0)], &mut Vec::new()).is_err());
    assert!(memory.written(Tracking::Anonymous).is_err());
}

/// Waits until the busy guest has counted on.
pub async fn counts(machine: &Machine) -> u8 {
    let now = || read(machine.memory(), &[page(COUNTER)])[0];
    let before = now();
    within(async {
        while now() == before {
            tokio::task::yield_now().await;
        }
    })
    .await;
    now()
}

fn covers(run: &ByteRun, offset: u64) -> bool {
    (run.offset..run.offset + run.bytes).contains(&offset)
}

/// Writes one byte as the guest would, through the mapping.
fn poke(pid: u32, memory: &GuestMemory, offset: u64) {
    let address = memory.address() + offset;
    let mem = File::options()
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&mem, &[0xee], address).unwrap();
}
