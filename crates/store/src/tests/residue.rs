//! What is found on disk, and what is done about it: one test for each row of the table in
//! docs/format.md.

use std::fs;

use super::snapshots::{fresh, overwrite, saved};
use super::{assert_whole, record};
use crate::{
    Digest, Error, GarbageKind, Name, Named, Owned, Pinned, Recovered, Silent, Store, Target,
};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn reopened(store: &Store) -> Store {
    Store::open(store.root()).unwrap()
}

fn save_over(store: &Store, owned: &Owned, text: &str, replace: bool) -> Result<Pinned, Error> {
    let state = owned.states().unwrap().readable.swap_remove(0);
    let name = name(text);
    store.save(
        owned,
        &state.id,
        &super::spec(),
        Target::Name {
            name: &name,
            replace,
        },
        &Silent,
    )
}

#[test]
fn half_a_staging_directory_is_removed_when_its_maker_is_gone() {
    let (_dir, store) = fresh();
    let (_owned, snapshot) = saved(&store, "s");
    let shell = store.root().join("staging/0123456789abcdef");
    fs::create_dir_all(shell.join("tree/blobs")).unwrap();
    fs::write(shell.join("lock"), "").unwrap();
    fs::write(
        shell.join("tree/blobs").join(Digest::of(b"x").as_str()),
        "half",
    )
    .unwrap();
    fs::write(shell.join("pin.new"), "snap").unwrap();
    let store = reopened(&store);
    assert_eq!(store.recovered(), [Recovered::Unfinished]);
    assert!(!shell.exists());
    assert_whole(
        &store,
        &store.snapshot(&snapshot.digest).unwrap(),
        "beside it",
    );
}

#[test]
fn a_name_without_its_target_is_reported_and_can_be_replaced_and_removed() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let gone = Digest::of(b"gone");
    let dangling = |text: &str| {
        fs::write(
            store.root().join("names/images").join(text),
            format!("snapshot {gone}\n"),
        )
        .unwrap();
    };
    dangling("d");
    assert_eq!(
        store.named(&name("d")).unwrap(),
        Some(Named::Snapshot(gone.clone()))
    );
    assert!(matches!(
        store.snapshot(&gone),
        Err(Error::UnknownSnapshot { .. })
    ));
    assert!(matches!(
        save_over(&store, &owned, "d", false),
        Err(Error::NameInUse { .. })
    ));
    let held_back = store.gc(false).unwrap().held_back.unwrap();
    assert!(
        held_back.contains("name d"),
        "what it listed may be in quarantine: {held_back}"
    );
    save_over(&store, &owned, "d", true).unwrap();
    assert_eq!(
        store.named(&name("d")).unwrap(),
        Some(Named::Snapshot(snapshot.digest.clone()))
    );
    dangling("e");
    assert_eq!(store.remove_snapshot_name(&name("e")).unwrap(), gone);
    assert_eq!(store.named(&name("e")).unwrap(), None);
    assert_eq!(store.gc(false).unwrap().held_back, None);
}

#[test]
fn a_target_without_a_name_is_listed_and_collected() {
    let (_dir, store) = fresh();
    let (_owned, snapshot) = saved(&store, "s");
    let digest = snapshot.digest.clone();
    drop(snapshot);
    fs::remove_file(store.root().join("names/images/s")).unwrap();
    let store = reopened(&store);
    let listed = store.snapshots().unwrap();
    assert_eq!(
        (listed[0].digest.clone(), listed[0].names.len()),
        (digest.clone(), 0)
    );
    let removed = store.gc(false).unwrap().removed;
    assert!(
        removed
            .iter()
            .any(|garbage| garbage.kind == GarbageKind::Snapshot && garbage.id == digest.as_str())
    );
    assert_eq!(store.snapshots().unwrap().len(), 0);
}

#[test]
fn a_missing_parent_breaks_nothing() {
    let (_dir, store) = fresh();
    let (owned, first) = saved(&store, "first");
    let state = owned.states().unwrap().readable.swap_remove(0);
    let spec = crate::SaveSpec {
        parent: Some(first.digest.clone()),
        created_at_unix_ms: 8,
        ..super::spec()
    };
    let target = name("second");
    let target = Target::Name {
        name: &target,
        replace: false,
    };
    let second = store
        .save(&owned, &state.id, &spec, target, &Silent)
        .unwrap()
        .digest
        .clone();
    fs::remove_dir_all(store.root().join("snapshots").join(first.digest.as_str())).unwrap();
    fs::remove_file(store.root().join("names/images/first")).unwrap();
    drop(first);
    let store = reopened(&store);
    assert_eq!(store.gc(false).unwrap().held_back, None);
    let second = store.snapshot(&second).unwrap();
    assert_whole(&store, &second, "the child");
    let origin = crate::Origin::Snapshot {
        snapshot: &second,
        memory: true,
    };
    store.create_sandbox(record("b"), origin).unwrap();
}

#[test]
fn a_layer_of_no_length_is_refused_put_aside_and_healed() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let layer = snapshot.manifest.disk.layers[0].digest.clone();
    let path = store.root().join("layers").join(layer.as_str());
    overwrite(&path, b"");
    assert!(matches!(
        store.snapshot(&snapshot.digest),
        Err(Error::Corrupt { .. })
    ));
    let origin = crate::Origin::Snapshot {
        snapshot: &snapshot,
        memory: false,
    };
    assert!(matches!(
        store.create_sandbox(record("b"), origin),
        Err(Error::Corrupt { .. })
    ));
    save_over(&store, &owned, "t", false).unwrap();
    assert_whole(&store, &store.snapshot(&snapshot.digest).unwrap(), "healed");
    assert_eq!(
        fs::read(
            store
                .root()
                .join("quarantine")
                .join(format!("layer-{layer}"))
        )
        .unwrap(),
        b""
    );
}

#[test]
fn an_unknown_name_file_is_left_alone_and_reported() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let path = store.root().join("names/images/x");
    for foreign in [
        "",
        "snapshot\n",
        &format!("snapshot {0}\nsnapshot {0}\n", snapshot.digest),
        "dear diary\n",
    ] {
        fs::write(&path, foreign).unwrap();
        assert!(
            matches!(store.named(&name("x")), Err(Error::Corrupt { .. })),
            "{foreign:?}"
        );
        assert!(matches!(
            save_over(&store, &owned, "x", true),
            Err(Error::Corrupt { .. })
        ));
        assert!(matches!(
            store.remove_snapshot_name(&name("x")),
            Err(Error::Corrupt { .. })
        ));
        assert!(
            store
                .gc(false)
                .unwrap()
                .held_back
                .unwrap()
                .contains("name x")
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
    }
    assert!(
        store
            .names()
            .unwrap()
            .iter()
            .any(|(name, named)| name.as_str() == "x" && named.is_err())
    );
}

#[test]
fn a_newer_format_is_refused_and_an_older_one_upgraded() {
    let (_dir, store) = fresh();
    let (_owned, snapshot) = saved(&store, "s");
    let format = store.root().join("format");
    fs::write(&format, "sandtree-store 4\n").unwrap();
    assert!(matches!(
        Store::open(store.root()),
        Err(Error::NewerFormat {
            found: 4,
            known: 3,
            ..
        })
    ));
    fs::write(&format, "sandtree-store 2\n").unwrap();
    fs::remove_dir(store.root().join("quarantine")).unwrap();
    let store = reopened(&store);
    assert_eq!(fs::read_to_string(&format).unwrap(), "sandtree-store 3\n");
    assert!(store.root().join("quarantine").is_dir());
    assert_whole(
        &store,
        &store.snapshot(&snapshot.digest).unwrap(),
        "upgraded",
    );
}

#[test]
fn a_manifest_that_is_damaged_holds_everything_back_until_it_is_put_aside() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let digest = snapshot.digest.clone();
    drop(snapshot);
    store.remove_sandbox(owned).unwrap();
    overwrite(
        &store
            .root()
            .join("snapshots")
            .join(digest.as_str())
            .join("manifest.json"),
        b"{}",
    );
    let listed = store.snapshots().unwrap();
    assert!(matches!(listed[0].snapshot, Err(Error::Corrupt { .. })));
    store.remove_snapshot_name(&name("s")).unwrap();
    let before = store.usage().unwrap();
    let report = store.gc(false).unwrap();
    assert!(report.removed.is_empty() && report.held_back.unwrap().contains(digest.as_str()));
    assert_eq!(store.usage().unwrap(), before);
    let verified = store.verify_snapshot(&digest, &Silent).unwrap();
    assert_eq!(verified.damaged[0].what, format!("snapshot {digest}"));
    let report = store.gc(false).unwrap();
    assert!(
        report.held_back.is_none()
            && report
                .removed
                .iter()
                .any(|garbage| garbage.kind == GarbageKind::Layer)
    );
    assert!(
        store
            .root()
            .join("quarantine")
            .join(format!("snapshot-{digest}"))
            .is_dir()
    );
}

#[test]
fn unknown_files_are_left_alone() {
    let (_dir, store) = fresh();
    let unknown = [
        "layers/README",
        "layers/0123",
        "snapshots/notes",
        "quarantine/mine",
        "names/images/UPPER",
    ];
    unknown
        .iter()
        .for_each(|path| fs::write(store.root().join(path), "mine").unwrap());
    let store = reopened(&store);
    let report = store.gc(false).unwrap();
    assert_eq!((report.removed.len(), report.held_back), (0, None));
    assert!(store.snapshots().unwrap().is_empty() && store.names().unwrap().is_empty());
    unknown
        .iter()
        .for_each(|path| assert_eq!(fs::read_to_string(store.root().join(path)).unwrap(), "mine"));
}
