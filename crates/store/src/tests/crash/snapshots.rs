//! Snapshots, their names and what is made from them, stopped and failed at every file operation.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::{Case, Fault, LOSSES, Outcome, ROOT, Simulated, name, open, running};
use crate::tests::{
    assert_whole, capture, grounded, is_whole, publish_kernel, record, small_disk, spec,
    warm_record, write_something,
};
use crate::{
    Blob, Digest, Error, LayerId, Name, Named, Origin, Owned, SandboxDir, SandboxRecord, SaveSpec,
    Silent, StateId, StateKind, Store, Target, WarmOf, WarmRecord,
};

/// A sandbox with something on its disk, and a state of it that is not sealed.
fn captured(store: &Store, record: &SandboxRecord) -> (Owned, StateId) {
    let owned = grounded(store, record);
    write_something(&owned);
    let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Save).unwrap();
    (owned, state.id)
}

fn save(
    store: &Store,
    from: &SandboxDir,
    state: &StateId,
    text: &str,
    spec: &SaveSpec,
) -> Result<Digest, Error> {
    let name = name(text);
    let target = Target::Name {
        name: &name,
        replace: true,
    };
    Ok(store
        .save(from, state, spec, target, &Silent)?
        .digest
        .clone())
}

/// A later save of the same sandbox: some layers are those of the one before.
fn save_again(store: &Store, owned: &Owned, text: &str) -> Digest {
    write_something(owned);
    let state = capture(owned, small_disk(owned).unwrap(), StateKind::Save).unwrap();
    save(
        store,
        owned,
        &state.id,
        text,
        &SaveSpec {
            created_at_unix_ms: 4,
            ..spec()
        },
    )
    .unwrap()
}

fn pointed_at(store: &Store, name: &Name) -> Option<Digest> {
    match store.named(name).unwrap() {
        Some(Named::Snapshot(digest)) => Some(digest),
        None => None,
        other => panic!("{other:?}"),
    }
}

fn elsewhere(store: &Store) {
    store.files.create_dir(Path::new("/memory")).unwrap();
    store.files.sync_dir(Path::new("/")).unwrap();
}

#[test]
fn a_save_is_whole_or_absent() {
    for compress in [false, true] {
        let record = record("a");
        let spec = SaveSpec { compress, ..spec() };
        Case {
            prepare: &|store| captured(store, &record),
            verb: &|store, (owned, state)| save(store, &owned, &state, "s", &spec).map(drop),
            check: &|store, outcome| {
                assert!(pointed_at(store, &name("s")).is_some() || outcome == Outcome::Open)
            },
        }
        .run();
    }
}

#[test]
fn a_save_of_memory_in_another_file_system_is_whole_or_absent() {
    let record = SandboxRecord {
        memory_dir: Some("/memory".into()),
        ..record("a")
    };
    Case {
        prepare: &|store| {
            elsewhere(store);
            captured(store, &record)
        },
        verb: &|store, (owned, state)| save(store, &owned, &state, "s", &spec()).map(drop),
        check: &|store, outcome| {
            assert!(pointed_at(store, &name("s")).is_some() || outcome == Outcome::Open)
        },
    }
    .run();
}

#[test]
fn a_name_that_is_replaced_shows_the_old_snapshot_or_the_new_one() {
    let record = record("a");
    Case {
        prepare: &|store| {
            let (owned, state) = captured(store, &record);
            let old = save(store, &owned, &state, "s", &spec()).unwrap();
            write_something(&owned);
            let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Save).unwrap();
            // The old one has another name, by which it is known again.
            store.tag_snapshot(&old, &name("old"), false).unwrap();
            (owned, state.id)
        },
        verb: &|store, (owned, state)| save(store, &owned, &state, "s", &spec()).map(drop),
        check: &|store, outcome| {
            let old = pointed_at(store, &name("old")).unwrap();
            let found = pointed_at(store, &name("s")).unwrap();
            assert!(found != old || outcome == Outcome::Open);
        },
    }
    .run();
}

#[test]
fn a_checkpoint_that_is_promoted_stays_one() {
    let record = record("a");
    Case {
        prepare: &|store| {
            let owned = grounded(store, &record);
            let state =
                capture(&owned, small_disk(&owned).unwrap(), StateKind::Checkpoint).unwrap();
            Owned::seal_state(&owned, &state.id).unwrap();
            (owned, state.id)
        },
        verb: &|store, (owned, state)| save(store, &owned, &state, "s", &spec()).map(drop),
        check: &|store, outcome| {
            assert!(pointed_at(store, &name("s")).is_some() || outcome == Outcome::Open);
            let sandbox = store.sandbox(&name("a")).unwrap();
            let states = sandbox.states().unwrap().readable;
            assert!(is_whole(&sandbox.state_source(&states[0].id).unwrap()));
        },
    }
    .run();
}

#[test]
fn removing_a_name_leaves_the_snapshots_that_share_layers_whole() {
    let record = record("a");
    Case {
        prepare: &|store| {
            let (owned, state) = captured(store, &record);
            save(store, &owned, &state, "s", &spec()).unwrap();
            save_again(store, &owned, "t");
        },
        verb: &|store, ()| store.remove_snapshot_name(&name("s")).map(drop),
        check: &|store, outcome| {
            let kept = pointed_at(store, &name("t")).unwrap();
            let gone = pointed_at(store, &name("s")).is_none();
            assert!(gone || outcome == Outcome::Open);
            if gone {
                // What an interrupted removal left is garbage, and nothing holds it back.
                assert_eq!(store.gc(false).unwrap().held_back, None);
                let snapshot = store.snapshot(&kept).unwrap();
                assert_eq!(store.snapshot_digests().unwrap(), [kept]);
                assert_eq!(
                    store.files.list(&store.layout.layers()).unwrap().len(),
                    snapshot.blobs().count()
                );
            }
        },
    }
    .run();
}

#[test]
fn gc_takes_what_nothing_reaches_and_nothing_else() {
    let late = record("b");
    let record = record("a");
    Case {
        prepare: &|store| {
            let (owned, state) = captured(store, &record);
            save(
                store,
                &owned,
                &state,
                "s",
                &SaveSpec {
                    compress: true,
                    ..spec()
                },
            )
            .unwrap();
            let unnamed = SaveSpec {
                created_at_unix_ms: 5,
                ..spec()
            };
            drop(
                store
                    .save(&owned, &state, &unnamed, Target::Unnamed, &Silent)
                    .unwrap(),
            );
            save_again(store, &owned, "t");
            save_again(store, &owned, "t");
            // Its sandbox was never made.
            store.reserve_name(&name("r"), &late.id).unwrap();
            let lost = super::publish(store, b"an image that loses its name").unwrap();
            let warm = WarmRecord {
                of: WarmOf::Image(lost),
                ..warm_record(&owned)
            };
            store
                .publish_warm(&Digest::of(b"key"), &warm, &owned, &state)
                .unwrap();
            drop(publish_kernel(store, b"a kernel without an image"));
            store
                .set_image_name(&name("tiny"), &owned.record().image_digest)
                .unwrap();
        },
        verb: &|store, ()| {
            let report = store.gc(false)?;
            assert_eq!(report.held_back, None);
            let kinds: BTreeSet<_> = report.removed.iter().map(|garbage| garbage.kind).collect();
            assert_eq!(kinds.len(), 6, "{report:?}");
            Ok(())
        },
        check: &|store, outcome| {
            let s = pointed_at(store, &name("s")).unwrap();
            let t = pointed_at(store, &name("t")).unwrap();
            if outcome == Outcome::Done {
                assert_eq!(store.gc(true).unwrap().removed, []);
                assert_eq!(store.snapshot_digests().unwrap().len(), 2);
            }
            [s, t]
                .iter()
                .for_each(|digest| assert_whole(store, &store.snapshot(digest).unwrap(), "kept"));
            assert_eq!(store.gc(false).unwrap().held_back, None);
            assert_eq!(store.files.list(&store.layout.images()).unwrap().len(), 1);
        },
    }
    .run();
}

/// A disk layer and a memory layer in the pool with other content of the same length, under a name
/// that says so.
fn damaged(store: &Store, record: &SandboxRecord) -> Digest {
    let (owned, state) = captured(store, record);
    let digest = save(store, &owned, &state, "damaged", &spec()).unwrap();
    for layer in two_layers(store, &digest) {
        let path = store.layout.layer(&layer.digest);
        store.files.remove_file(&path).unwrap();
        store
            .files
            .create(&path, &vec![b'x'; layer.bytes as usize])
            .unwrap();
        store.files.sync_file(&path).unwrap();
    }
    store.files.sync_dir(&store.layout.layers()).unwrap();
    digest
}

fn two_layers(store: &Store, digest: &Digest) -> [Blob; 2] {
    let manifest = store.read_snapshot(digest).unwrap().manifest;
    [
        manifest.disk.layers[0].clone(),
        manifest.memory.unwrap().layers[0].clone(),
    ]
}

#[test]
fn what_verify_finds_damaged_is_in_its_place_or_in_quarantine() {
    let record = record("a");
    Case {
        prepare: &|store| damaged(store, &record),
        verb: &|store, digest| {
            assert_eq!(store.verify_snapshot(&digest, &Silent)?.damaged.len(), 2);
            Ok(())
        },
        check: &|store, outcome| {
            for Blob { digest, .. } in
                two_layers(store, &pointed_at(store, &name("damaged")).unwrap())
            {
                let places = [
                    store.layout.layer(&digest),
                    store.layout.quarantine().join(format!("layer-{digest}")),
                ];
                let there = places.map(|path| store.files.read_if_exists(&path).unwrap().is_some());
                assert!(
                    there == [false, true] || (outcome == Outcome::Open && there == [true, false]),
                    "{there:?}"
                );
            }
            // Its name holds it, and what is left of it is not collected.
            assert_eq!(store.gc(false).unwrap().removed, []);
        },
    }
    .run();
}

#[test]
fn create_from_a_snapshot_is_whole_or_nothing() {
    let source = record("a");
    for (compress, memory, memory_dir) in [
        (false, true, None),
        (true, true, None),
        (false, false, None),
        (false, true, Some("/memory".into())),
    ] {
        let record = SandboxRecord {
            memory_dir,
            ..record("b")
        };
        Case {
            prepare: &|store| {
                elsewhere(store);
                let (owned, state) = captured(store, &source);
                let spec = SaveSpec { compress, ..spec() };
                let digest = save(store, &owned, &state, "s", &spec).unwrap();
                store.remove_sandbox(owned).unwrap();
                store.pin(&digest).unwrap()
            },
            verb: &|store, pinned| {
                let origin = Origin::Snapshot {
                    snapshot: &pinned,
                    memory,
                };
                store
                    .create_sandbox(record.clone(), origin)?
                    .set_state(&running())
            },
            check: &|store, outcome| match store.sandbox(&name("b")) {
                Ok(sandbox) => {
                    let snapshot = store
                        .snapshot(&pointed_at(store, &name("s")).unwrap())
                        .unwrap();
                    let layers = snapshot
                        .manifest
                        .disk
                        .layers
                        .iter()
                        .map(|layer| LayerId::of(&layer.digest));
                    assert!(
                        sandbox
                            .head()
                            .unwrap()
                            .disk
                            .starts_with(&layers.collect::<Vec<_>>())
                    );
                    if memory {
                        assert!(is_whole(
                            &sandbox.state_source(&snapshot.state_id()).unwrap()
                        ));
                    }
                }
                Err(error) => {
                    assert!(matches!(error, Error::UnknownSandbox { .. }), "{error}");
                    assert_eq!(outcome, Outcome::Open);
                }
            },
        }
        .run();
    }
}

#[test]
fn a_reservation_is_made_kept_or_given_back() {
    let record = record("a");
    Case {
        prepare: &|store| {
            let (owned, state) = captured(store, &record);
            store.reserve_name(&name("kept"), &record.id).unwrap();
            (owned, state)
        },
        verb: &|store, (owned, state)| {
            store.reserve_name(&name("r"), owned.id())?;
            save(store, &owned, &state, "r", &spec())?;
            store.release_name(&name("kept"), owned.id())
        },
        check: &|store, outcome| {
            let found = (
                store.named(&name("r")).unwrap(),
                store.named(&name("kept")).unwrap(),
            );
            let reserved = Named::Reserved(record.id.clone());
            assert!(found.1.is_none_or(|found| found == reserved));
            if outcome == Outcome::Done {
                assert!(matches!(found.0, Some(Named::Snapshot(_))));
            }
        },
    }
    .run();
}

#[test]
fn an_upgrade_that_was_interrupted_is_finished_by_the_next_open() {
    for at in 0.. {
        let fs = Simulated::new();
        drop(grounded(&open(&fs), &record("a")));
        as_format_2(&fs);
        fs.arm(Fault::StopAt(at));
        let opened = Store::open_on(Arc::new(fs.clone()), Path::new(ROOT)).is_ok();
        for loss in LOSSES {
            let store = open(&fs.after_power_loss(loss));
            store.image(&name("tiny")).unwrap();
            store.sandbox(&name("a")).unwrap();
            assert_eq!(
                store.snapshots().unwrap().len(),
                0,
                "stop at {at}, {loss:?}"
            );
        }
        if opened {
            return;
        }
    }
}

/// What the version before this one left: no pool, no snapshots, no quarantine.
fn as_format_2(fs: &Simulated) {
    let store = open(fs);
    for dir in [
        store.layout.layers(),
        store.layout.snapshots(),
        store.layout.quarantine(),
    ] {
        store.files.remove_dir(&dir).unwrap();
    }
    crate::publish::replace(&store.files, &store.layout.format(), b"sandtree-store 2\n").unwrap();
}
