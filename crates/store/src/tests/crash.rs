//! Every verb of the store, stopped and failed at every file operation.
//!
//! After a stop, the store is opened on what each kind of power loss leaves, and must be a store
//! that one of the two states, before or after the verb, explains. After an error, the same must
//! hold at once and after reopening.

mod artifact;
mod images;
mod snapshots;
mod states;
mod volumes;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{assert_whole, is_whole, listed, present, record};
use crate::fs::simulated::{Fault, Loss, Simulated};
use crate::{
    Arch, Digest, Error, ExecDefaults, ImageSpec, Init, Name, Named, Origin, Owned, Phase,
    SandboxDir, SandboxRecord, StateRecord, Store,
};

const ROOT: &str = "/store";
const STAGING: &str = "/store/staging";
const NAMES: &str = "/store/names/sandboxes";
/// Each a directory for the memory of sandboxes; the second is in another file system than the
/// store.
const MEMORY_DIRS: [&str; 2] = ["/store/memory", "/memory"];
const LOSSES: [Loss; 5] = [
    Loss::Nothing,
    Loss::Content,
    Loss::Everything,
    Loss::AllButRemovals,
    Loss::OtherDevices,
];

fn open(fs: &Simulated) -> Store {
    Store::open_on(Arc::new(fs.clone()), Path::new(ROOT)).unwrap()
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn running() -> StateRecord {
    StateRecord::new(Phase::Running, 7)
}

/// A finished sandbox, owned.
fn made(store: &Store, record: &SandboxRecord) -> Owned {
    let mut owned = store.create_sandbox(record.clone(), Origin::Image).unwrap();
    owned.set_state(&running()).unwrap();
    owned
}

/// A verb, the store it works on, and what must hold whatever became of it.
struct Case<'a, P> {
    prepare: &'a dyn Fn(&Store) -> P,
    verb: &'a dyn Fn(&Store, P) -> Result<(), Error>,
    check: &'a dyn Fn(&Store, Outcome),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The verb said it was done.
    Done,
    /// It was stopped, or failed: either state may be found.
    Open,
}

impl<P> Case<'_, P> {
    fn run(&self) {
        let operations = self.stop_at_each_operation();
        assert!(operations > 3, "only {operations} operations were seen");
        for kind in [
            ErrorKind::StorageFull,
            ErrorKind::QuotaExceeded,
            ErrorKind::Other,
        ] {
            (0..operations).for_each(|at| self.fail_at(Fault::ErrorAt(at, kind)));
        }
        (0..operations).for_each(|at| self.fail_at(Fault::ShortWrite(at, ErrorKind::StorageFull)));
    }

    fn armed(&self, fault: Fault) -> (Simulated, Result<(), Error>) {
        let fs = Simulated::new();
        let store = open(&fs);
        let prepared = (self.prepare)(&store);
        fs.arm(fault);
        let result = (self.verb)(&store, prepared);
        (fs, result)
    }

    /// How many operations the verb takes in all.
    fn stop_at_each_operation(&self) -> usize {
        for at in 0.. {
            let (fs, result) = self.armed(Fault::StopAt(at));
            let operations = fs.operations();
            let outcome = if result.is_ok() {
                Outcome::Done
            } else {
                Outcome::Open
            };
            for loss in LOSSES {
                let found = fs.after_power_loss(loss);
                self.check_reopened(&found, outcome, &format!("stop at {at}, {loss:?}"));
            }
            self.lose_power_after_recovery(&fs, outcome, at);
            if operations <= at {
                return at;
            }
        }
        unreachable!("the verb ends")
    }

    /// The process is killed, another one cleans up after it, and only then the power is lost.
    fn lose_power_after_recovery(&self, fs: &Simulated, outcome: Outcome, at: usize) {
        fs.arm(Fault::StopAt(usize::MAX));
        drop(open(fs));
        for loss in LOSSES {
            let found = fs.after_power_loss(loss);
            self.check_reopened(&found, outcome, &format!("stop at {at}, opened, {loss:?}"));
        }
    }

    fn fail_at(&self, fault: Fault) {
        let (fs, result) = self.armed(fault);
        let outcome = if result.is_ok() {
            Outcome::Done
        } else {
            Outcome::Open
        };
        for loss in LOSSES {
            self.check_reopened(
                &fs.after_power_loss(loss),
                outcome,
                &format!("{fault:?}, {loss:?}"),
            );
        }
        self.check_reopened(&fs, outcome, &format!("{fault:?}"));
    }

    fn check_reopened(&self, fs: &Simulated, outcome: Outcome, what: &str) {
        let store = open(fs);
        check_invariants(&store, fs, what);
        (self.check)(&store, outcome);
        // What was cleaned up stays cleaned up: a second open finds nothing to do.
        assert_eq!(open(fs).recovered(), [], "{what}");
        let residue: Vec<_> = fs
            .paths()
            .into_iter()
            .filter(|path| path.parent() == Some(STAGING.as_ref()))
            .collect();
        assert_eq!(residue, Vec::<PathBuf>::new(), "{what}");
    }
}

/// What holds for every store at every time, after open.
fn check_invariants(store: &Store, fs: &Simulated, what: &str) {
    for listed in store.sandboxes().unwrap() {
        let sandbox = listed
            .sandbox
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let state = sandbox
            .state()
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_ne!(
            state.phase,
            Phase::Creating,
            "{what}: an unfinished sandbox is left"
        );
        let by_name = store
            .sandbox(&sandbox.record().name)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(by_name.id(), sandbox.id(), "{what}");
    }
    for path in fs.paths() {
        if path.parent() == Some(NAMES.as_ref()) {
            let name = name(path.file_name().unwrap().to_str().unwrap());
            store
                .sandbox(&name)
                .unwrap_or_else(|error| panic!("{what}: {error}"));
        }
    }
    for named in store.images().unwrap() {
        named
            .image
            .unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    for key in store.warm_keys().unwrap() {
        assert!(
            is_whole(&store.warm(&key).unwrap().unwrap()),
            "{what}: a warm image is not whole"
        );
    }
    check_snapshots(store, what);
    check_memory_dirs(store, fs, what);
    store
        .sandboxes()
        .unwrap()
        .into_iter()
        .for_each(|listed| check_layers(store, &listed.sandbox.unwrap(), what));
}

/// Every snapshot is whole, and so is what every name points at. One that a test damages says so by
/// its name.
fn check_snapshots(store: &Store, what: &str) {
    for (name, named) in store.names().unwrap() {
        if let Named::Snapshot(digest) =
            named.unwrap_or_else(|error| panic!("{what}: {name}: {error}"))
        {
            assert!(
                store.snapshot_digests().unwrap().contains(&digest),
                "{what}: {name} points at nothing"
            );
        }
    }
    for listed in store.snapshots().unwrap() {
        if !listed
            .names
            .iter()
            .any(|name| name.as_str().starts_with("damaged"))
        {
            assert_whole(
                store,
                &listed
                    .snapshot
                    .unwrap_or_else(|error| panic!("{what}: {error}")),
                what,
            );
        }
    }
}

/// Nothing is outside the store that no sandbox of it explains, and what others have there stays.
fn check_memory_dirs(store: &Store, fs: &Simulated, what: &str) {
    for path in fs.paths() {
        if MEMORY_DIRS
            .iter()
            .any(|dir| path.parent() == Some(dir.as_ref()))
        {
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(
                store.sandbox_by_id(&name.parse().unwrap()).is_ok(),
                "{what}: {name} is left"
            );
        }
    }
}

/// The head has its layers, a sealed state is whole, and its owner can clean up everything else.
fn check_layers(store: &Store, sandbox: &SandboxDir, what: &str) {
    let owned = store.try_own(sandbox).unwrap().unwrap();
    let states = owned.states().unwrap();
    for torn in states.unreadable {
        assert!(
            !owned.is_sealed(&torn.id).unwrap(),
            "{what}: {}",
            torn.error
        );
        assert_eq!(owned.collect(&[]).unwrap().files, 0, "{what}");
        owned.remove_state(&torn.id).unwrap();
    }
    for state in &states.readable {
        let source = owned.state_source(&state.id).unwrap();
        assert!(
            !source.is_sealed().unwrap() || is_whole(&source),
            "{what}: a sealed state is not whole"
        );
    }
    let disk: BTreeSet<_> = owned.head().unwrap().disk.into_iter().collect();
    assert!(
        present(&owned).is_superset(&disk),
        "{what}: the head lists what is not there"
    );
    owned.collect(&[]).unwrap();
    assert!(
        present(&owned).is_subset(&listed(&owned)),
        "{what}: a layer is left"
    );
    let entries = owned.files().list(&owned.path().join("states")).unwrap();
    assert_eq!(
        entries.len(),
        states.readable.len(),
        "{what}: an unfinished state is left"
    );
}

#[test]
fn create_is_whole_or_nothing() {
    let record = record("a");
    Case {
        prepare: &|_| (),
        verb: &|store, ()| {
            store
                .create_sandbox(record.clone(), Origin::Image)?
                .set_state(&running())
        },
        check: &|store, outcome| match store.sandbox(&name("a")) {
            Ok(sandbox) => assert_eq!(sandbox.state().unwrap(), running()),
            Err(error) => {
                assert!(matches!(error, Error::UnknownSandbox { .. }), "{error}");
                assert_eq!(outcome, Outcome::Open);
                assert!(store.sandboxes().unwrap().is_empty());
                drop(made(store, &record));
            }
        },
    }
    .run();
}

/// Creates two sandboxes that exist together or not at all.
fn create_both(store: &Store, records: [&SandboxRecord; 2]) -> Result<(), Error> {
    let mut batch = store.begin_batch()?;
    let create = |record: &SandboxRecord| {
        let record = SandboxRecord {
            batch: Some(batch.id().clone()),
            ..record.clone()
        };
        store.create_sandbox(record, Origin::Image)
    };
    let mut first = create(records[0])?;
    let mut second = create(records[1])?;
    batch.commit()?;
    first.set_state(&running())?;
    second.set_state(&running())?;
    batch.finish()
}

#[test]
fn sandboxes_of_a_batch_exist_together_or_not_at_all() {
    let records = [record("a"), record("b")];
    Case {
        prepare: &|_| (),
        verb: &|store, ()| create_both(store, [&records[0], &records[1]]),
        check: &|store, outcome| {
            let found = ["a", "b"].map(|text| store.sandbox(&name(text)));
            let phases = found.map(|found| found.ok().map(|found| found.state().unwrap().phase));
            match phases {
                [None, None] => assert_eq!(outcome, Outcome::Open),
                [Some(a), Some(b)] => {
                    let exists = [Phase::Running, Phase::Crashed];
                    assert!(exists.contains(&a) && exists.contains(&b), "{a} {b}");
                    assert!(outcome == Outcome::Open || (a, b) == (exists[0], exists[0]));
                }
                some => panic!("{some:?}"),
            }
        },
    }
    .run();
}

#[test]
fn a_batch_that_is_committed_waits_for_sandboxes_that_are_still_being_created() {
    let fs = Simulated::new();
    let store = open(&fs);
    let mut batch = store.begin_batch().unwrap();
    let record = SandboxRecord {
        batch: Some(batch.id().clone()),
        ..record("a")
    };
    let mut owned = store.create_sandbox(record, Origin::Image).unwrap();
    let id = batch.id().clone();
    batch.commit().unwrap();
    // The process that committed it is gone; the one that creates the sandbox is not.
    drop(batch);
    drop(open(&fs));
    assert!(store.is_committed(&id).unwrap());
    owned.set_state(&running()).unwrap();
    drop(open(&fs));
    assert!(!store.is_committed(&id).unwrap());
    assert_eq!(owned.state().unwrap(), running());
}

#[test]
fn a_failed_create_leaves_nothing_even_before_the_store_is_reopened() {
    let record = record("a");
    let operations = {
        let fs = Simulated::new();
        let store = open(&fs);
        fs.arm(Fault::StopAt(usize::MAX));
        drop(store.create_sandbox(record.clone(), Origin::Image).unwrap());
        fs.operations()
    };
    for at in 0..operations {
        let fs = Simulated::new();
        let store = open(&fs);
        let before = fs.paths();
        fs.arm(Fault::ErrorAt(at, ErrorKind::StorageFull));
        match store.create_sandbox(record.clone(), Origin::Image) {
            Err(_) => {}
            Ok(_) => panic!("an error at {at} was swallowed"),
        }
        assert_eq!(fs.paths(), before, "error at {at}");
    }
}

#[test]
fn a_name_that_is_taken_is_left_alone() {
    let holder = record("a");
    let late = record("a");
    Case {
        prepare: &|store| drop(made(store, &holder)),
        verb: &|store, ()| match store.create_sandbox(late.clone(), Origin::Image) {
            Err(Error::NameTaken { holder: found, .. }) => {
                assert_eq!(found, holder.id);
                store.cache(&name("x"), &1)
            }
            other => panic!("{other:?}"),
        },
        check: &|store, _| assert_eq!(*store.sandbox(&name("a")).unwrap().id(), holder.id),
    }
    .run();
}

#[test]
fn a_state_is_the_old_one_or_the_new_one() {
    let record = record("a");
    let new = StateRecord::new(Phase::Stopped, 8);
    Case {
        prepare: &|store| made(store, &record),
        verb: &|_, mut owned| owned.set_state(&new),
        check: &|store, outcome| {
            let state = store.sandbox(&name("a")).unwrap().state().unwrap();
            assert!(
                state == new || (outcome == Outcome::Open && state == running()),
                "{state:?}"
            );
        },
    }
    .run();
}

#[test]
fn remove_is_whole_or_nothing() {
    let record = record("a");
    Case {
        prepare: &|store| made(store, &record),
        verb: &|store, owned| store.remove_sandbox(owned),
        check: &|store, outcome| match store.sandbox(&name("a")) {
            Ok(sandbox) => {
                assert_eq!(outcome, Outcome::Open);
                let owned = store.try_own(&sandbox).unwrap().unwrap();
                store.remove_sandbox(owned).unwrap();
            }
            Err(_) => assert!(store.sandboxes().unwrap().is_empty()),
        },
    }
    .run();
}

#[test]
fn removing_and_creating_anew_under_the_same_name() {
    let old = record("a");
    let new = record("a");
    Case {
        prepare: &|store| made(store, &old),
        verb: &|store, owned| {
            store.remove_sandbox(owned)?;
            store
                .create_sandbox(new.clone(), Origin::Image)?
                .set_state(&running())
        },
        check: &|store, outcome| match store.sandbox(&name("a")) {
            Ok(sandbox) => assert!(*sandbox.id() == new.id || outcome == Outcome::Open),
            Err(_) => assert_eq!(outcome, Outcome::Open),
        },
    }
    .run();
}

fn publish(store: &Store, rootfs: &[u8]) -> Result<Digest, Error> {
    let staged = store.stage()?;
    store
        .files
        .create(&staged.path().join("rootfs.raw"), rootfs)?;
    let kernel = Digest::of(b"kernel");
    let init = Init::Agent;
    let defaults = ExecDefaults::default();
    let spec = ImageSpec {
        arch: Arch::X86_64,
        kernel,
        init,
        defaults,
        disk_bytes: None,
    };
    let image = store.publish_image(staged, spec)?;
    store.set_image_name(&name("tiny"), &image.digest)?;
    Ok(image.digest)
}

#[test]
fn an_image_name_points_at_the_old_image_or_the_new_one() {
    let digest_of = |bytes| publish(&open(&Simulated::new()), bytes).unwrap();
    let old = digest_of(b"old");
    let new = digest_of(b"new");
    Case {
        prepare: &|store| drop(publish(store, b"old").unwrap()),
        verb: &|store, ()| publish(store, b"new").map(drop),
        check: &|store, outcome| {
            let image = store.image(&name("tiny")).unwrap();
            assert!(image.digest == new || (outcome == Outcome::Open && image.digest == old));
            // Trying again succeeds, also where the image was published and only its name is
            // missing.
            assert_eq!(publish(store, b"new").unwrap(), new);
        },
    }
    .run();
}

#[test]
fn a_store_that_was_never_finished_is_finished_by_the_next_open() {
    for at in 0.. {
        let fs = Simulated::new();
        fs.arm(Fault::StopAt(at));
        let opened = Store::open_on(Arc::new(fs.clone()), Path::new(ROOT)).is_ok();
        for loss in LOSSES {
            drop(made(&open(&fs.after_power_loss(loss)), &record("a")));
        }
        if opened {
            return;
        }
    }
}

/// One sync that fails costs the verb it is part of, and no other.
#[test]
fn after_a_failed_sync_the_next_verb_works() {
    let fs = Simulated::new();
    let store = open(&fs);
    let mut owned = made(&store, &record("a"));
    // Remove the last temporary file, create and write the new one, sync it.
    fs.arm(Fault::ErrorAt(3, ErrorKind::Other));
    assert!(matches!(
        owned.set_state(&running()),
        Err(Error::Io {
            operation: "sync",
            ..
        })
    ));
    let next = StateRecord::new(Phase::Stopped, 8);
    owned.set_state(&next).unwrap();
    drop(store.stage().unwrap());
    drop(owned);
    for loss in LOSSES {
        assert_eq!(
            open(&fs.after_power_loss(loss))
                .sandbox(&name("a"))
                .unwrap()
                .state()
                .unwrap(),
            next,
            "{loss:?}"
        );
    }
}

/// Each lock is a descriptor, and a process has only so many: what could not be locked was once
/// removed with what was.
#[test]
fn any_number_of_leftovers_is_recovered_with_few_locks() {
    let fs = Simulated::new();
    let store = open(&fs);
    for number in 0..40 {
        let shell = Path::new(STAGING).join(format!("{number:016x}"));
        store.files.create_dir(&shell).unwrap();
        store.files.create(&shell.join("lock"), b"").unwrap();
        store.files.create_dir(&shell.join("tree")).unwrap();
    }
    drop(store);
    let store = open(&fs);
    assert_eq!(store.recovered().len(), 40);
    assert!(store.files.list(Path::new(STAGING)).unwrap().is_empty());
    assert!(fs.locked_at_once() <= 2, "{} locks", fs.locked_at_once());
}
