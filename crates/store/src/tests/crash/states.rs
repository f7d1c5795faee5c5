//! States, layers, warm images and memory directories, stopped and failed at every file operation.

use std::path::Path;

use super::{
    Case, ErrorKind, Fault, Loss, MEMORY_DIRS, Outcome, Simulated, check_invariants, made, name,
    open, running,
};
use crate::tests::{capture, is_whole, record, small_disk, warm_record};
use crate::{
    Digest, Error, Head, Origin, Owned, Phase, Published, SandboxDir, SandboxRecord, StateId,
    StateKind, StateManifest, StateRecord, Store,
};

fn make_memory_dirs(store: &Store) {
    for dir in MEMORY_DIRS {
        store.files.create_dir(Path::new(dir)).unwrap();
        store
            .files
            .sync_dir(Path::new(dir).parent().unwrap())
            .unwrap();
    }
}

/// A record for each place that the memory of a sandbox can be in.
fn records(name: &str) -> Vec<SandboxRecord> {
    let places = [None]
        .into_iter()
        .chain(MEMORY_DIRS.map(|dir| Some(dir.into())));
    places
        .map(|memory_dir| SandboxRecord {
            memory_dir,
            ..record(name)
        })
        .collect()
}

fn sealed(owned: &Owned, kind: StateKind) -> StateManifest {
    let state = capture(owned, small_disk(owned).unwrap(), kind).unwrap();
    Owned::seal_state(owned, &state.id).unwrap();
    state
}

/// A sandbox with two sealed states, and the id of the first.
fn with_states(store: &Store, record: &SandboxRecord) -> (Owned, StateId) {
    make_memory_dirs(store);
    let owned = made(store, record);
    let first = sealed(&owned, StateKind::Checkpoint);
    sealed(&owned, StateKind::Checkpoint);
    (owned, first.id)
}

fn create_from(
    store: &Store,
    record: &SandboxRecord,
    from: &SandboxDir,
    state: &StateId,
) -> Result<Owned, Error> {
    store.create_sandbox(record.clone(), Origin::State(&from.state_source(state)?))
}

fn sandbox(store: &Store, text: &str) -> SandboxDir {
    store.sandbox(&name(text)).unwrap()
}

#[test]
fn create_from_a_state_is_whole_or_nothing() {
    let source = record("a");
    for record in records("b") {
        Case {
            prepare: &|store| with_states(store, &source),
            verb: &|store, (owned, state)| {
                create_from(store, &record, &owned, &state)?.set_state(&running())
            },
            check: &|store, outcome| {
                match store.sandbox(&name("b")) {
                    Ok(sandbox) => assert_eq!(sandbox.head().unwrap().disk.len(), 2),
                    Err(error) => {
                        assert!(matches!(error, Error::UnknownSandbox { .. }), "{error}");
                        assert_eq!(outcome, Outcome::Open);
                    }
                }
                assert_eq!(sandbox(store, "a").states().unwrap().readable.len(), 2);
            },
        }
        .run();
    }
}

#[test]
fn a_failed_create_from_a_state_leaves_nothing_even_before_the_store_is_reopened() {
    let source = record("a");
    for record in records("b") {
        for at in 0.. {
            let fs = Simulated::new();
            let store = open(&fs);
            let (owned, state) = with_states(&store, &source);
            let before = fs.paths();
            fs.arm(Fault::ErrorAt(at, ErrorKind::StorageFull));
            match create_from(&store, &record, &owned, &state) {
                Err(_) => {}
                Ok(_) if fs.operations() <= at => break,
                Ok(_) => panic!("an error at {at} was swallowed"),
            }
            assert_eq!(fs.paths(), before, "error at {at}");
        }
    }
}

#[test]
fn a_fresh_overlay_is_whole_once_the_head_lists_it() {
    let record = record("a");
    Case {
        prepare: &|store| {
            let owned = made(store, &record);
            // A capture that ended before it set the head.
            let before = owned.head().unwrap();
            capture(&owned, small_disk(&owned).unwrap(), StateKind::Checkpoint).unwrap();
            owned.set_head(&before).unwrap();
            owned.sync_disks().unwrap();
            owned
        },
        verb: &|_, owned| owned.writable_head().map(drop),
        check: &|store, outcome| {
            let sandbox = sandbox(store, "a");
            match &sandbox.head().unwrap().disk[..] {
                [_, fresh] => assert_eq!(sandbox.disk_bytes(fresh).unwrap(), record.disk_bytes),
                disk => assert!(disk.len() == 1 && outcome == Outcome::Open, "{disk:?}"),
            }
        },
    }
    .run();
}

#[test]
fn a_sealed_state_is_whole_and_another_one_does_no_harm() {
    for record in records("a") {
        Case {
            prepare: &|store| with_states(store, &record).0,
            verb: &|_, owned| {
                Owned::seal_state(
                    &owned,
                    &capture(&owned, small_disk(&owned)?, StateKind::Checkpoint)?.id,
                )
            },
            check: &|store, outcome| {
                let sandbox = sandbox(store, "a");
                let states = sandbox.states().unwrap().readable;
                let sealed = states
                    .iter()
                    .filter(|state| sandbox.is_sealed(&state.id).unwrap())
                    .count();
                assert!(
                    sealed == 3 || (outcome == Outcome::Open && sealed == 2),
                    "{sealed}"
                );
            },
        }
        .run();
    }
}

#[test]
fn a_head_is_the_old_one_or_the_new_one_with_its_layers() {
    let record = record("a");
    Case {
        prepare: &|store| with_states(store, &record).0,
        verb: &|_, owned| {
            let head = owned.head()?;
            let fresh = owned.create_disk(1 << 30)?;
            owned.set_head(&Head {
                disk: vec![fresh],
                ..head
            })
        },
        check: &|store, outcome| {
            let disk = sandbox(store, "a").head().unwrap().disk;
            assert!(
                disk.len() == 1 || (outcome == Outcome::Open && disk.len() == 3),
                "{disk:?}"
            );
        },
    }
    .run();
}

/// A capture makes the next overlay, lists it, and discards it if it could not.
#[test]
fn an_overlay_that_a_head_lists_is_not_discarded() {
    let record = record("a");
    Case {
        prepare: &|store| with_states(store, &record).0,
        verb: &|_, owned| {
            let mut head = owned.head()?;
            let fresh = owned.create_disk(1 << 30)?;
            owned.sync_overlay(&fresh)?;
            head.disk.push(fresh.clone());
            owned
                .set_head(&head)
                .or_else(|error| owned.discard_disk(&fresh).and(Err(error)))
        },
        check: &|store, outcome| {
            let sandbox = sandbox(store, "a");
            let disk = sandbox.head().unwrap().disk;
            assert!(
                disk.len() == 4 || (outcome == Outcome::Open && disk.len() == 3),
                "{disk:?}"
            );
            if let [_, _, _, fresh] = &disk[..] {
                assert_eq!(sandbox.disk_bytes(fresh).unwrap(), 1 << 30);
            }
        },
    }
    .run();
}

#[test]
fn removing_a_state_and_its_layers_leaves_the_others_whole() {
    for record in records("a") {
        Case {
            prepare: &|store| with_states(store, &record),
            verb: &|_, (owned, first)| {
                // The head moves away from the layers of the first state, so that they can go.
                let fresh = owned.create_disk(1 << 30)?;
                owned.set_head(&Head {
                    disk: vec![fresh],
                    ..owned.head()?
                })?;
                owned.remove_state(&first)?;
                owned.collect(&[]).map(drop)
            },
            check: &|store, outcome| {
                let states = sandbox(store, "a").states().unwrap().readable.len();
                assert!(
                    states == 1 || (outcome == Outcome::Open && states == 2),
                    "{states}"
                );
            },
        }
        .run();
    }
}

/// A process that died between a rename and its sync leaves a head or a state that may come back.
fn collect_after(unsynced: &dyn Fn(&Owned)) {
    let record = record("a");
    Case {
        prepare: &|store| {
            let owned = with_states(store, &record).0;
            unsynced(&owned);
            owned
        },
        verb: &|_, owned| {
            let staged = owned.stage_state()?;
            owned.collect(&[])?;
            drop(staged);
            owned.collect(&[]).map(drop)
        },
        check: &|_, _| {},
    }
    .run();
}

#[test]
fn a_state_that_comes_back_finds_its_layers() {
    collect_after(&|owned| {
        let fresh = small_disk(owned).unwrap();
        owned
            .set_head(&Head {
                disk: vec![fresh],
                ..owned.head().unwrap()
            })
            .unwrap();
        for state in owned.states().unwrap().readable {
            let states = owned.path().join("states");
            let hidden = states.join(format!(".{}", state.id));
            owned
                .files()
                .rename(&states.join(state.id.as_str()), &hidden)
                .unwrap();
        }
    });
}

#[test]
fn a_head_that_comes_back_finds_its_layers() {
    collect_after(&|owned| {
        owned
            .states()
            .unwrap()
            .readable
            .iter()
            .for_each(|state| owned.remove_state(&state.id).unwrap());
        let head = Head {
            disk: vec![small_disk(owned).unwrap()],
            ..owned.head().unwrap()
        };
        let new = owned.path().join("head.new");
        let path = owned.path().join("head.json");
        owned.files().sync_dir(&owned.path().join("disks")).unwrap();
        owned
            .files()
            .create(&new, &crate::record::canonical(&head))
            .unwrap();
        owned.files().sync_file(&new).unwrap();
        owned.files().rename(&new, &path).unwrap();
    });
}

#[test]
fn removing_a_sandbox_leaves_nothing_and_its_copies_whole() {
    let source = record("a");
    for record in records("b") {
        Case {
            prepare: &|store| {
                let (owned, state) = with_states(store, &source);
                let mut copy = create_from(store, &record, &owned, &state).unwrap();
                copy.set_state(&running()).unwrap();
                sealed(&copy, StateKind::Checkpoint);
                copy
            },
            verb: &|store, copy| store.remove_sandbox(copy),
            check: &|store, outcome| {
                assert!(store.sandbox(&name("b")).is_err() || outcome == Outcome::Open);
                assert_eq!(sandbox(store, "a").states().unwrap().readable.len(), 2);
            },
        }
        .run();
    }
}

#[test]
fn a_warm_image_is_whole_or_absent() {
    let record = record("a");
    let key = Digest::of(b"key");
    Case {
        prepare: &|store| {
            make_memory_dirs(store);
            let owned = made(store, &record);
            let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Warm).unwrap();
            (owned, state.id)
        },
        verb: &|store, (owned, state)| {
            store
                .publish_warm(&key, &warm_record(&owned), &owned, &state)
                .map(drop)
        },
        check: &|store, outcome| {
            let warm = store.warm(&key).unwrap();
            assert!(warm.as_ref().is_some_and(is_whole) || outcome == Outcome::Open);
        },
    }
    .run();
}

#[test]
fn removing_a_warm_image_leaves_what_was_made_from_it() {
    let source = record("a");
    let copy = record("b");
    let key = Digest::of(b"key");
    Case {
        prepare: &|store| {
            let (owned, state) = with_states(store, &source);
            assert_eq!(
                store
                    .publish_warm(&key, &warm_record(&owned), &owned, &state)
                    .unwrap(),
                Published::New
            );
            assert_eq!(
                store
                    .publish_warm(&key, &warm_record(&owned), &owned, &state)
                    .unwrap(),
                Published::Already
            );
            store.remove_sandbox(owned).unwrap();
            let warm = store.warm(&key).unwrap().unwrap();
            let mut owned = store
                .create_sandbox(copy.clone(), Origin::State(&warm))
                .unwrap();
            owned
                .set_state(&StateRecord::new(Phase::Running, 1))
                .unwrap();
            sealed(&owned, StateKind::Auto);
        },
        verb: &|store, ()| store.remove_warm(&key),
        check: &|store, outcome| {
            assert!(store.warm(&key).unwrap().is_none() || outcome == Outcome::Open);
            assert_eq!(sandbox(store, "b").states().unwrap().readable.len(), 1);
        },
    }
    .run();
}

/// Whatever sync of a seal fails, nothing claims afterwards that the state is durable if it is not,
/// and the next capture and the next verb are as if nothing had happened.
#[test]
fn a_seal_that_could_not_sync_costs_no_other_state() {
    for record in records("a") {
        for at in 0.. {
            let fs = Simulated::new();
            let store = open(&fs);
            let (owned, _) = with_states(&store, &record);
            let torn = capture(&owned, small_disk(&owned).unwrap(), StateKind::Checkpoint).unwrap();
            fs.arm(Fault::ErrorAt(at, ErrorKind::StorageFull));
            let failed = Owned::seal_state(&owned, &torn.id).is_err();
            if fs.operations() <= at {
                assert!(!failed);
                break;
            }
            fs.arm(Fault::StopAt(usize::MAX));
            // Asked again by this process, and by another.
            let again = Owned::seal_state(&owned, &torn.id);
            let doubtful = matches!(again, Err(Error::Doubtful { .. }));
            assert!(again.is_ok() || doubtful, "error at {at}: {again:?}");
            assert_eq!(
                owned.is_doubtful(&torn.id).unwrap(),
                doubtful,
                "error at {at}"
            );
            drop(owned);
            let store = open(&fs);
            let owned = store.try_own(&sandbox(&store, "a")).unwrap().unwrap();
            assert_eq!(
                Owned::seal_state(&owned, &torn.id).is_err(),
                doubtful,
                "error at {at}"
            );
            // A state that does not stand on it.
            let fresh = small_disk(&owned).unwrap();
            owned
                .set_head(&Head {
                    disk: vec![fresh],
                    ..owned.head().unwrap()
                })
                .unwrap();
            let next = sealed(&owned, StateKind::Checkpoint);
            drop(owned);
            for loss in [
                Loss::Nothing,
                Loss::Content,
                Loss::Everything,
                Loss::AllButRemovals,
            ] {
                let what = format!("error at {at}, {loss:?}");
                let found = fs.after_power_loss(loss);
                let store = open(&found);
                check_invariants(&store, &found, &what);
                assert!(sandbox(&store, "a").is_sealed(&next.id).unwrap(), "{what}");
            }
        }
    }
}

/// A checkpoint of a sandbox with many states costs what one of a new sandbox does.
#[test]
fn a_state_is_published_without_reading_the_others() {
    let fs = Simulated::new();
    let store = open(&fs);
    let owned = made(&store, &record("a"));
    let published = || {
        let before = fs.opened();
        capture(&owned, small_disk(&owned).unwrap(), StateKind::Auto).unwrap();
        fs.opened() - before
    };
    published();
    let early = published();
    let mut late = early;
    for _ in 0..20 {
        late = published();
    }
    assert_eq!(late, early);
}

/// The same file, in a sandbox that was made from the state.
#[test]
fn a_copy_knows_of_the_sync_that_failed() {
    let fs = Simulated::new();
    let store = open(&fs);
    let owned = made(&store, &record("a"));
    let torn = capture(&owned, small_disk(&owned).unwrap(), StateKind::Checkpoint).unwrap();
    // Seal it, sync it.
    fs.arm(Fault::ErrorAt(1, ErrorKind::StorageFull));
    owned
        .files()
        .settle_file(&owned.memory_layer(&torn.memory.layers()[0]))
        .unwrap_err();
    let copy = create_from(&store, &record("b"), &owned, &torn.id).unwrap();
    let layer = copy.memory_layer(&torn.memory.layers()[0]);
    assert!(
        matches!(copy.files().sync_file(&layer), Err(Error::Doubtful { path }) if path == layer)
    );
}
