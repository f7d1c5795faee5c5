use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::PathBuf;

use sandtree_store::{
    AccelChoice, Arch, Digest, MemoryState, Network, Origin, SandboxId, SandboxRecord, StateId,
    StateKind, StateManifest, Store,
};

use super::*;
use crate::error::ErrorKind;
use crate::manifest::bare_manifest;

fn record() -> SandboxRecord {
    SandboxRecord {
        schema: SandboxRecord::SCHEMA,
        id: SandboxId::random().unwrap(),
        name: "deep".parse().unwrap(),
        image: "tiny".parse().unwrap(),
        image_digest: Digest::of(b"image"),
        kernel_digest: Digest::of(b"kernel"),
        arch: Arch::X86_64,
        memory_bytes: 512 << 20,
        cpus: 1,
        disk_bytes: 1 << 30,
        network: Network::Isolated,
        accel: AccelChoice::Auto,
        qemu_args: Vec::new(),
        nested: false,
        batch: None,
        labels: BTreeMap::new(),
        expiry: None,
        display: None,
        ports: Vec::new(),
        created_at_unix_ms: 1,
        auto_remove: false,
        memory_dir: None,
        memory_mode: None,
        auto_checkpoint: None,
        snapshot: None,
        cpu: None,
        save_on_stop: None,
        durable: false,
        env: Default::default(),
    }
}

/// A sandbox whose head has this many layers, in a store that is removed with the directory.
fn sandbox(layers: usize) -> (tempfile::TempDir, Owned) {
    let home = tempfile::tempdir().unwrap();
    let owned = Store::open(&home.path().join("home"))
        .unwrap()
        .create_sandbox(record(), Origin::Image)
        .unwrap();
    let mut head = owned.head().unwrap();
    head.disk
        .extend((1..layers).map(|_| owned.create_disk(1 << 30).unwrap()));
    owned.set_head(&head).unwrap();
    (home, owned)
}

fn files(owned: &Owned) -> BTreeSet<PathBuf> {
    let disks = owned
        .disk_layer(&owned.head().unwrap().disk[0])
        .parent()
        .unwrap()
        .to_owned();
    disks
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect()
}

fn paths(owned: &Owned, disk: &[LayerId]) -> BTreeSet<PathBuf> {
    disk.iter().map(|id| owned.disk_layer(id)).collect()
}

#[test]
fn a_large_layer_at_the_bottom_is_not_copied_for_small_ones() {
    assert_eq!(begin(&[1000, 1, 1, 1, 1, 1]), 1);
    assert_eq!(begin(&[1000, 4, 1, 1, 1, 1]), 1);
    assert_eq!(begin(&[1000, 300, 1, 1, 1, 1]), 2);
    // As many as there are: the bottom is worth it.
    assert_eq!(begin(&[1000, 300, 300, 300, 300, 1]), 0);
    // Otherwise too few would be folded.
    assert_eq!(begin(&[32, 16, 8, 4, 2, 1]), 0);
    assert_eq!(begin(&[9, 9]), 0);
}

#[tokio::test]
async fn the_layers_on_a_large_one_become_one() {
    let (_home, owned) = sandbox(DISK_LAYERS + 10);
    let before = owned.head().unwrap().disk;
    let bottom = owned.disk_layer(&before[0]);
    let file = std::fs::File::options().write(true).open(bottom);
    // Unused clusters at the end of an overlay.
    let garbage = vec![1; 64 << 20];
    std::os::unix::fs::FileExt::write_all_at(&file.unwrap(), &garbage, 16 << 20).unwrap();
    let disk = head(&owned).await.unwrap();
    assert_eq!(disk.len(), 3);
    assert_eq!(disk.first(), before.first());
    assert_eq!(disk.last(), before.last());
}

#[tokio::test]
async fn a_shallow_disk_stays_unchanged() {
    let (_home, owned) = sandbox(DISK_LAYERS + 1);
    let before = owned.head().unwrap();
    assert_eq!(head(&owned).await.unwrap(), before.disk);
    assert_eq!(owned.head().unwrap(), before);
    assert_eq!(files(&owned), paths(&owned, &before.disk));
}

#[tokio::test]
async fn the_layers_below_the_active_overlay_of_a_deep_disk_become_one() {
    for layers in [DISK_LAYERS + 2, 100, 512] {
        let (_home, owned) = sandbox(layers);
        let before = owned.head().unwrap().disk;
        let disk = head(&owned).await.unwrap();
        assert_eq!(disk.len(), 2, "of {layers}");
        assert_eq!(disk.last(), before.last());
        assert!(!before.contains(&disk[0]));
        assert_eq!(owned.head().unwrap().disk, disk);
        assert!(owned.check_chain().unwrap().is_empty());
        assert!(
            owned
                .disk_layer(&disk[0])
                .metadata()
                .unwrap()
                .permissions()
                .readonly()
        );
        owned.collect(&[]).unwrap();
        assert_eq!(files(&owned), paths(&owned, &disk));
    }
}

#[tokio::test]
async fn a_state_keeps_the_layers_that_were_folded() {
    let (_home, owned) = sandbox(30);
    let before = owned.head().unwrap();
    let manifest = bare_manifest(owned.record(), &before, StateKind::Checkpoint).unwrap();
    owned
        .publish_state(owned.stage_state().unwrap(), manifest.clone())
        .unwrap();
    let disk = head(&owned).await.unwrap();
    owned.collect(&[]).unwrap();
    assert_eq!(files(&owned), paths(&owned, &[before.disk, disk].concat()));
}

/// An unreadable layer is one example of a failing fold.
#[tokio::test]
async fn a_failed_fold_is_an_error_only_beyond_the_limit_of_a_machine() {
    for (layers, startable) in [
        (DISK_LAYERS + 2, true),
        (OVERLAYS_MAX, true),
        (OVERLAYS_MAX + 1, false),
    ] {
        let (_home, owned) = sandbox(layers);
        let before = owned.head().unwrap();
        std::fs::write(owned.disk_layer(&before.disk[3]), "no overlay").unwrap();
        match (head(&owned).await, startable) {
            (Ok(disk), true) => assert_eq!(disk, before.disk),
            (Err(error), false) => {
                assert_eq!(error.kind(), ErrorKind::Exhausted);
                assert!(
                    error.report().message.contains(&format!("{layers} layers")),
                    "{error}"
                );
                assert!(!error.report().causes.is_empty());
            }
            (other, _) => panic!("{layers} layers: {other:?}"),
        }
        assert_eq!(owned.head().unwrap(), before);
        assert_eq!(
            files(&owned),
            paths(&owned, &before.disk),
            "nothing of the fold is left"
        );
    }
}

/// A valid layer of single zero pages: the largest possible number of pieces.
fn scattered(ram_bytes: u64) -> Vec<u8> {
    const RUNS: u64 = 1 << 20;
    let mut start = [
        &b"SandtMem"[..],
        &1u32.to_le_bytes(),
        &4096u32.to_le_bytes(),
        &ram_bytes.to_le_bytes(),
    ]
    .concat();
    start.extend(
        [0u64, 0, RUNS]
            .iter()
            .flat_map(|number| number.to_le_bytes()),
    );
    let runs: Vec<u8> = (0..RUNS)
        .flat_map(|run| [run * 2, 1])
        .flat_map(u64::to_le_bytes)
        .collect();
    let digest = Digest::of(&[&start[..], &runs].concat());
    let byte = |at: usize| u8::from_str_radix(&digest.as_str()[at * 2..at * 2 + 2], 16).unwrap();
    start.extend((0..32).map(byte));
    start.resize(4096, 0);
    [start, runs].concat()
}

/// A foreign snapshot may have 512 layers of a million pieces.
#[test]
fn a_state_with_too_many_pieces_of_memory_is_refused_before_all_are_read() {
    let (_home, owned) = sandbox(1);
    let ram_bytes = 16 << 30;
    let (id, file) = owned.memory_file().unwrap();
    drop(file);
    std::fs::write(owned.memory_layer(&id), scattered(ram_bytes)).unwrap();
    let bare = bare_manifest(owned.record(), &owned.head().unwrap(), StateKind::Save).unwrap();
    let check = |layers: usize| {
        let memory = MemoryState::Layers {
            layers: vec![id.clone(); layers],
        };
        let manifest = StateManifest {
            memory,
            ram_bytes,
            id: StateId::random().unwrap(),
            ..bare.clone()
        };
        let state = owned
            .publish_state(owned.stage_state().unwrap(), manifest)
            .unwrap();
        crate::machine::restore::check(&owned, owned.state_source(&state.id).unwrap()).map(drop)
    };
    check(1).unwrap();
    let refused = check(5).unwrap_err().report();
    assert!(
        format!("{refused:?}").contains("more than 4194304 pieces"),
        "{refused:?}"
    );
}
