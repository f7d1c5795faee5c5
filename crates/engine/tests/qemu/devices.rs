//! The state of the devices: out of one machine and into another.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sandtree_engine::qmp::QueryStatus;
use sandtree_engine::{
    ByteRun, Error, Machine, MachineSpec, MapEntry, Memory, Preload, Start, Tracking,
};

use crate::memory::counts;
use crate::support::{COUNTER, engine, file, spec};
use crate::{DEADLINE, exists, start, within};

async fn incoming(dir: &Path, memory: Memory) -> Machine {
    let spec = MachineSpec {
        memory,
        start: Start::Incoming,
        ..spec(dir, "wait")
    };
    within(engine().await.start(spec)).await.unwrap()
}

/// The written memory of a stopped machine as one layer.
pub fn capture(machine: &Machine, path: &Path) -> Memory {
    let runs = machine.memory().written(Tracking::Anonymous).unwrap();
    let mut bytes = Vec::new();
    machine.memory().read(&runs, &mut bytes).unwrap();
    let mut entries = Vec::new();
    let mut file_offset = 0;
    for ByteRun { offset, bytes } in runs {
        entries.push(MapEntry {
            guest_offset: offset,
            bytes,
            layer: 0,
            file_offset,
        });
        file_offset += bytes;
    }
    Memory::Mapped {
        entries,
        layers: vec![file(path, &bytes)],
    }
}

pub fn counter(machine: &Machine) -> u8 {
    let mut page = Vec::new();
    machine
        .memory()
        .read(
            &[ByteRun {
                offset: COUNTER,
                bytes: 4096,
            }],
            &mut page,
        )
        .unwrap();
    page[0]
}

#[tokio::test]
async fn a_captured_machine_continues_in_others_and_in_itself() {
    let dir = tempfile::tempdir().unwrap();
    let source = start(dir.path(), "busy").await;
    counts(&source).await;
    source.stop().await.unwrap();
    let devices = within(saved(&source)).await;
    assert!(devices.len() > 10_000);
    let state = file(&dir.path().join("devices"), &devices);

    for name in ["first", "second"] {
        let dir = tempfile::tempdir().unwrap();
        let memory = capture(&source, &dir.path().join(name));
        let copy = incoming(dir.path(), memory).await;
        within(copy.load(state.try_clone().unwrap().into()))
            .await
            .unwrap();
        assert_eq!(
            copy.qmp().run(QueryStatus {}).await.unwrap().status,
            "paused"
        );
        assert_eq!(counter(&copy), counter(&source));
        copy.cont().await.unwrap();
        counts(&copy).await;
    }
    source.cont().await.unwrap();
    counts(&source).await;
}

#[tokio::test]
async fn a_whole_stream_is_loaded_again_and_its_source_continues() {
    let dir = tempfile::tempdir().unwrap();
    let source = start(dir.path(), "busy").await;
    counts(&source).await;
    source.stop().await.unwrap();
    let path = dir.path().join("stream");
    let stream = File::create(&path).unwrap();
    within(source.save_stream(stream.into(), DEADLINE))
        .await
        .unwrap();
    let saved = counter(&source);
    source.cont().await.unwrap();
    counts(&source).await;
    // Its disk is its own again.
    let overlay = crate::disk::fresh(dir.path(), "next");
    let overlay = source.prepare_overlay(overlay).await.unwrap();
    source.pivot(overlay).await.unwrap();
    source.stop().await.unwrap();
    let again = File::create(dir.path().join("again")).unwrap();
    within(source.save_stream(again.into(), DEADLINE))
        .await
        .unwrap();

    let dir = tempfile::tempdir().unwrap();
    let copy = incoming(dir.path(), Memory::Empty).await;
    within(copy.load(File::open(&path).unwrap().into()))
        .await
        .unwrap();
    assert_eq!(counter(&copy), saved);
    copy.cont().await.unwrap();
    counts(&copy).await;
}

#[tokio::test]
async fn a_state_that_is_none_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let source = start(dir.path(), "busy").await;
    source.stop().await.unwrap();
    let mut devices = saved(&source).await;
    devices.truncate(devices.len() / 2);
    for bad in [b"nonsense".to_vec(), devices, Vec::new()] {
        let dir = tempfile::tempdir().unwrap();
        let machine = incoming(dir.path(), Memory::Empty).await;
        let state = file(&dir.path().join("devices"), &bad);
        let error = within(machine.load(state.into())).await.unwrap_err();
        assert!(matches!(error, Error::NotLoaded { .. }), "{error}");
        drop(machine);
    }
}

#[tokio::test]
async fn a_stream_into_a_full_disk_fails_and_the_guest_continues() {
    let dir = tempfile::tempdir().unwrap();
    let source = start(dir.path(), "busy").await;
    counts(&source).await;
    source.stop().await.unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let error = within(source.save_stream(full.into(), DEADLINE))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::NotSaved { .. }), "{error}");
    source.cont().await.unwrap();
    counts(&source).await;
    assert!(exists(source.pid()));
}

#[tokio::test]
async fn a_machine_without_the_library_loads_a_flat_copy() {
    let dir = tempfile::tempdir().unwrap();
    let source = start(dir.path(), "busy").await;
    counts(&source).await;
    source.stop().await.unwrap();
    let devices = saved(&source).await;
    let mut state = tempfile::tempfile().unwrap();
    state.write_all(&devices).unwrap();
    let flat = tempfile::tempfile().unwrap();
    flat.set_len(source.memory().bytes()).unwrap();
    for run in source.memory().written(Tracking::Anonymous).unwrap() {
        let mut bytes = Vec::new();
        source.memory().read(&[run], &mut bytes).unwrap();
        flat.write_all_at(&bytes, run.offset).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let memory = Memory::Flat { file: flat };
    let spec = MachineSpec {
        memory,
        preload: Preload::Skip,
        start: Start::Incoming,
        ..spec(dir.path(), "wait")
    };
    let copy = within(engine().await.start(spec)).await.unwrap();
    within(copy.load(state.into())).await.unwrap();
    copy.cont().await.unwrap();
    counts(&copy).await;
}

/// The devices of a stopped machine.
pub async fn saved(machine: &Machine) -> Vec<u8> {
    let file = machine.prepare_devices().await.unwrap();
    machine.save_devices(&file).await.unwrap();
    machine.take_devices(file).await.unwrap()
}
