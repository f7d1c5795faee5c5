//! States and layers on a real disk.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::{is_whole, listed, present, record};
use crate::{
    Error, Origin, Owned, Phase, SandboxRecord, StateKind, StateManifest, StateRecord, Store,
};

fn fresh() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("home")).unwrap();
    (dir, store)
}

fn made(store: &Store, record: SandboxRecord, origin: Origin<'_>) -> Owned {
    let mut owned = store.create_sandbox(record, origin).unwrap();
    owned
        .set_state(&StateRecord::new(Phase::Running, 1))
        .unwrap();
    owned
}

fn capture(owned: &Owned, kind: StateKind) -> Result<StateManifest, Error> {
    super::capture(owned, owned.create_disk(1 << 30)?, kind)
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[test]
fn a_sandbox_made_from_a_state_shares_its_layers_and_writes_its_own() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let state = capture(&a, StateKind::Fork).unwrap();
    let b = made(
        &store,
        record("b"),
        Origin::State(&a.state_source(&state.id).unwrap()),
    );
    for layer in &state.disk {
        assert_eq!(inode(&a.disk_layer(layer)), inode(&b.disk_layer(layer)));
        assert_eq!(
            fs::metadata(b.disk_layer(layer))
                .unwrap()
                .permissions()
                .mode()
                & 0o777,
            0o444
        );
    }
    let head = b.head().unwrap();
    assert_eq!(head.disk[..head.disk.len() - 1], state.disk);
    assert_eq!(
        b.disk_bytes(head.active().unwrap()).unwrap(),
        state.disk_bytes
    );
    assert_eq!(
        head.parent, None,
        "a fork continues from the state that its source continued from"
    );
    assert_eq!(b.check_chain().unwrap(), []);
    b.sync_disks().unwrap();
    assert_eq!(fs::read(b.execs_of_origin().join("out")).unwrap(), b"hello");
    store.remove_sandbox(a).unwrap();
    assert_eq!(b.check_chain().unwrap(), []);
    assert_eq!(present(&b).len(), 3);
    assert_eq!(b.collect(state.memory.layers()).unwrap().files, 0);
    assert_eq!(b.collect(&[]).unwrap().files, 1);
}

#[test]
fn memory_of_a_state_elsewhere_is_linked_until_nothing_lists_it() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let state = capture(&a, StateKind::Warm).unwrap();
    Owned::seal_state(&a, &state.id).unwrap();
    let source = a.state_source(&state.id).unwrap();
    let b = made(&store, record("b"), Origin::Image);
    b.adopt_memory(&source).unwrap();
    b.adopt_memory(&source).unwrap();
    let layer = &state.memory.layers()[0];
    let inode = |owned: &Owned| fs::metadata(owned.memory_layer(layer)).unwrap().ino();
    assert_eq!(inode(&a), inode(&b));
    let known = b.known_digests().unwrap();
    assert!(known.keys().any(|name| name.contains(layer.as_str())));
    store.remove_sandbox(a).unwrap();
    assert_eq!(b.collect(state.memory.layers()).unwrap().files, 0);
    assert_eq!(b.collect(&[]).unwrap().files, 1);
    assert!(!b.memory_layer(layer).exists());
}

#[test]
fn memory_in_another_file_system_is_copied_and_goes_with_its_sandbox() {
    let (_dir, store) = fresh();
    let Ok(shm) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("SKIPPED: no second file system at /dev/shm");
        return;
    };
    fs::write(shm.path().join("others"), "stay").unwrap();
    let a = made(&store, record("a"), Origin::Image);
    let state = capture(&a, StateKind::Checkpoint).unwrap();
    Owned::seal_state(&a, &state.id).unwrap();
    let asked = SandboxRecord {
        memory_dir: Some(shm.path().to_owned()),
        ..record("b")
    };
    let b = made(
        &store,
        asked,
        Origin::State(&a.state_source(&state.id).unwrap()),
    );
    let memory = &state.memory.layers()[0];
    assert!(b.memory_layer(memory).starts_with(shm.path()));
    assert_eq!(
        fs::read(b.memory_layer(memory)).unwrap(),
        fs::read(a.memory_layer(memory)).unwrap()
    );
    // As after a boot of the host.
    fs::remove_dir_all(shm.path().join(b.id().as_str())).unwrap();
    let (layer, mut file) = b.memory_file().unwrap();
    file.write_all(b"pages").unwrap();
    assert_eq!(fs::read(b.memory_layer(&layer)).unwrap(), b"pages");
    assert_eq!(b.collect(&[]).unwrap().bytes, 5);
    store.remove_sandbox(b).unwrap();
    assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 1);
}

#[test]
fn a_memory_directory_must_be_an_absolute_one_that_exists() {
    let (dir, store) = fresh();
    fs::write(dir.path().join("file"), "").unwrap();
    for wrong in [
        Path::new("relative"),
        &dir.path().join("missing"),
        &dir.path().join("file"),
    ] {
        let asked = SandboxRecord {
            memory_dir: Some(wrong.to_owned()),
            ..record("a")
        };
        let refused = store.create_sandbox(asked, Origin::Image);
        assert!(
            matches!(refused, Err(Error::MemoryDir { .. })),
            "{}",
            wrong.display()
        );
    }
    let asked = SandboxRecord {
        memory_dir: Some(dir.path().to_owned()),
        ..record("a")
    };
    let taken = dir.path().join(asked.id.as_str());
    fs::create_dir(&taken).unwrap();
    assert!(matches!(
        store.create_sandbox(asked, Origin::Image),
        Err(Error::MemoryDir { .. })
    ));
    assert!(taken.is_dir());
}

#[test]
fn an_overlay_that_a_state_has_is_never_written_again() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    assert_eq!(a.writable_head().unwrap(), a.head().unwrap());
    // A capture that ended before it set the head.
    let before = a.head().unwrap();
    capture(&a, StateKind::Checkpoint).unwrap();
    a.set_head(&before).unwrap();
    let head = a.writable_head().unwrap();
    assert_eq!((head.disk.len(), a.head().unwrap()), (2, head.clone()));
    assert_eq!(
        a.disk_bytes(&head.disk[1]).unwrap(),
        a.disk_bytes(&head.disk[0]).unwrap()
    );
    assert_eq!(a.writable_head().unwrap(), head);
    // Another sandbox has it.
    fs::hard_link(a.disk_layer(&head.disk[1]), a.path().join("elsewhere")).unwrap();
    assert_eq!(a.writable_head().unwrap().disk.len(), 3);
}

#[test]
fn what_cannot_be_read_keeps_everything_and_is_reported() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let kept = capture(&a, StateKind::Auto).unwrap();
    let torn = capture(&a, StateKind::Auto).unwrap();
    fs::write(
        a.state_devices(&torn.id).with_file_name("manifest.json"),
        "",
    )
    .unwrap();
    a.create_disk(1 << 30).unwrap();
    let collected = a.collect(&[]).unwrap();
    assert_eq!(
        (collected.files, &collected.unreadable[0].id),
        (0, &torn.id)
    );
    assert!(matches!(
        collected.unreadable[0].error,
        Error::Corrupt { .. }
    ));
    assert_eq!(a.states().unwrap().readable, [kept]);
    assert!(matches!(a.manifest(&torn.id), Err(Error::Corrupt { .. })));
    a.remove_state(&torn.id).unwrap();
    a.remove_state(&torn.id).unwrap();
    assert!(matches!(
        a.manifest(&torn.id),
        Err(Error::UnknownState { .. })
    ));
    assert_eq!(a.collect(&[]).unwrap().files, 2);
    assert_eq!(present(&a), listed(&a));
}

#[test]
fn a_state_under_anothers_name_or_with_paths_that_lead_out_is_refused() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let one = capture(&a, StateKind::Auto).unwrap();
    let two = capture(&a, StateKind::Auto).unwrap();
    let file = |id| a.state_devices(id).with_file_name("manifest.json");
    fs::copy(file(&one.id), file(&two.id)).unwrap();
    assert!(matches!(a.manifest(&two.id), Err(Error::Corrupt { .. })));
    assert_eq!(fs::read_dir(a.path().join("states")).unwrap().count(), 2);
}

#[test]
fn collecting_leaves_a_state_in_the_making_alone() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let staged = a.stage_state().unwrap();
    a.collect(&[]).unwrap();
    assert!(staged.path().is_dir());
    let left = a.path().join("states/.0123456789abcdef");
    fs::create_dir(&left).unwrap();
    drop(staged);
    a.collect(&[]).unwrap();
    assert_eq!(fs::read_dir(a.path().join("states")).unwrap().count(), 0);
}

#[test]
fn unlisted_states_go_and_others_stay() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let fork = capture(&a, StateKind::Fork).unwrap();
    let paused = capture(&a, StateKind::Paused).unwrap();
    assert_eq!(a.remove_unlisted().unwrap(), [fork.id]);
    assert_eq!(a.states().unwrap().readable, [paused]);
}

#[test]
fn a_state_that_goes_while_it_is_sealed_does_no_harm() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let gone = capture(&a, StateKind::Auto).unwrap();
    let torn = capture(&a, StateKind::Auto).unwrap();
    a.remove_state(&gone.id).unwrap();
    assert!(matches!(
        Owned::seal_state(&a, &gone.id),
        Err(Error::UnknownState { .. })
    ));
    fs::remove_file(a.memory_layer(&torn.memory.layers()[0])).unwrap();
    assert!(matches!(
        Owned::seal_state(&a, &torn.id),
        Err(Error::Io { .. })
    ));
    let next = capture(&a, StateKind::Auto).unwrap();
    Owned::seal_state(&a, &next.id).unwrap();
    Owned::seal_state(&a, &next.id).unwrap();
    assert!(is_whole(&a.state_source(&next.id).unwrap()));
    assert!(!a.is_sealed(&torn.id).unwrap());
}

#[test]
fn a_layer_is_read_once_however_many_states_have_it() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let first = capture(&a, StateKind::Auto).unwrap();
    Owned::seal_state(&a, &first.id).unwrap();
    let b = made(
        &store,
        record("b"),
        Origin::State(&a.state_source(&first.id).unwrap()),
    );
    let layer = first.disk[0].clone();
    let known = b.known_digests().unwrap();
    assert_eq!(known.len(), 2);
    assert_eq!(
        known.get(&format!("disks/{layer}.qcow2")),
        a.known_digests().unwrap().values().next()
    );
}

/// Publishes a state as a clock that shows `unix_ms` dates it.
fn dated(owned: &Owned, unix_ms: u64) -> StateManifest {
    let manifest = super::manifest(
        owned.head().unwrap().disk,
        crate::LayerId::random().unwrap(),
    );
    let manifest = StateManifest {
        created_at_unix_ms: unix_ms,
        ..manifest
    };
    owned
        .publish_state(owned.stage_state().unwrap(), manifest)
        .unwrap()
}

#[test]
fn states_are_in_the_order_of_their_capture_whatever_the_clock_said() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let taken: Vec<_> = [5000, 4000, 9000, 1000]
        .map(|unix_ms| dated(&a, unix_ms))
        .into();
    assert_eq!(a.states().unwrap().readable, taken);
    // The number of one that is gone is free, and its place is still the last.
    a.remove_state(&taken[3].id).unwrap();
    let next = dated(&a, 1);
    assert_eq!(
        a.states().unwrap().readable,
        [&taken[..3], &[next]].concat()
    );
}

#[test]
fn states_of_older_programs_come_first_by_their_time() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let one = dated(&a, 5000);
    let two = dated(&a, 4000);
    for state in [&one, &two] {
        let path = a.state_devices(&state.id).with_file_name("manifest.json");
        let mut manifest: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        manifest
            .as_object_mut()
            .unwrap()
            .remove("sequence")
            .unwrap();
        fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
    }
    let new = dated(&a, 1000);
    let order: Vec<_> = a
        .states()
        .unwrap()
        .readable
        .into_iter()
        .map(|state| state.id)
        .collect();
    assert_eq!(order, [two.id, one.id, new.id]);
}

/// The new file may have the number and the length of the old one.
#[test]
fn a_manifest_that_was_replaced_is_read_again() {
    let (_dir, store) = fresh();
    let a = made(&store, record("a"), Origin::Image);
    let taken = dated(&a, 5000);
    assert_eq!(a.states().unwrap().readable, std::slice::from_ref(&taken));
    let path = a.state_devices(&taken.id).with_file_name("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let changed = |path: &Path| {
        let found = fs::metadata(path).unwrap();
        (found.ctime(), found.ctime_nsec())
    };
    let before = changed(&path);
    // The clock of a file system may take some milliseconds to move.
    while changed(&path) == before {
        fs::remove_file(&path).unwrap();
        fs::write(&path, text.replace("5000", "6000")).unwrap();
    }
    let read = &a.states().unwrap().readable[0];
    assert_eq!(read.created_at_unix_ms, 6000);
}

/// After a boot of the host, a memory directory may be empty, and anyone who may write there may be
/// first.
#[test]
fn memory_is_not_written_into_somebody_elses_directory() {
    let (dir, store) = fresh();
    let asked = SandboxRecord {
        memory_dir: Some(dir.path().to_owned()),
        ..record("a")
    };
    let a = made(&store, asked, Origin::Image);
    let own = dir.path().join(a.id().as_str());
    a.memory_file().unwrap();
    fs::remove_dir_all(&own).unwrap();
    fs::create_dir(&own).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = a.memory_file();
    assert!(
        matches!(&refused, Err(Error::MemoryDir { path, .. }) if *path == own),
        "{refused:?}"
    );
    assert_eq!(fs::read_dir(&own).unwrap().count(), 0);
    fs::set_permissions(&own, fs::Permissions::from_mode(0o700)).unwrap();
    a.memory_file().unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&own, Some(65534), None).unwrap();
        assert!(matches!(a.memory_file(), Err(Error::MemoryDir { .. })));
    }
}

/// A keeper lends a state, ends, and the next one does not know the loan.
#[test]
fn a_state_that_is_held_is_not_removed_with_the_unlisted_ones() {
    let (_dir, store) = fresh();
    let owned = made(&store, record("a"), Origin::Image);
    let state = capture(&owned, StateKind::Fork).unwrap();
    let held = owned.hold_state(&state.id).unwrap();
    assert!(owned.is_held(&state.id).unwrap());
    assert_eq!(owned.remove_unlisted().unwrap(), []);
    drop(held);
    assert!(!owned.is_held(&state.id).unwrap());
    assert_eq!(
        owned.remove_unlisted().unwrap(),
        std::slice::from_ref(&state.id)
    );
    assert!(matches!(
        owned.hold_state(&state.id),
        Err(Error::UnknownState { .. })
    ));
}
