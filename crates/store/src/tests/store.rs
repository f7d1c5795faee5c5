//! The store on a real disk, with threads.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Barrier;
use std::thread;

use super::record;
use crate::disk::check::Verdict;
use crate::{Error, Name, Origin, Phase, Recovered, SandboxId, StateRecord, Store};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn fresh() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("home")).unwrap();
    (dir, store)
}

#[test]
fn of_many_claims_to_one_name_one_wins() {
    let (_dir, store) = fresh();
    for round in 0..20 {
        let barrier = Barrier::new(8);
        let name = format!("n{round}");
        let claim = || {
            let record = record(&name);
            barrier.wait();
            store.create_sandbox(record, Origin::Image)
        };
        let results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(claim)).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        assert_eq!(won.len(), 1);
        let winner = won[0].as_ref().unwrap().id().clone();
        let lost_to_winner =
            |error| matches!(error, Error::NameTaken { holder, .. } if holder == winner);
        assert!(
            lost.into_iter()
                .all(|result| lost_to_winner(result.unwrap_err()))
        );
        assert_eq!(store.sandboxes().unwrap().len(), 1);
        store
            .remove_sandbox(won.into_iter().next().unwrap().unwrap())
            .unwrap();
    }
}

#[test]
fn opening_beside_work_disturbs_nothing() {
    let (dir, store) = fresh();
    let owned = store.create_sandbox(record("a"), Origin::Image).unwrap();
    let staged = store.stage().unwrap();
    let beside = Store::open(&dir.path().join("home")).unwrap();
    assert_eq!(beside.recovered(), []);
    assert!(staged.path().is_dir());
    let seen = beside.sandbox(&name("a")).unwrap();
    assert!(beside.try_own(&seen).unwrap().is_none());
    drop(owned);
    let id = seen.id().clone();
    let recovered = Store::open(&dir.path().join("home")).unwrap();
    assert_eq!(recovered.recovered(), [Recovered::Sandbox { id }]);
    assert!(matches!(
        recovered.sandbox(&name("a")),
        Err(Error::UnknownSandbox { .. })
    ));
}

#[test]
fn a_sandbox_is_found_by_name_and_by_id_until_it_is_removed() {
    let (_dir, store) = fresh();
    let mut owned = store.create_sandbox(record("a"), Origin::Image).unwrap();
    owned
        .set_state(&StateRecord::new(Phase::Stopped, 2))
        .unwrap();
    assert_eq!(
        owned
            .check_overlay(owned.head().unwrap().active().unwrap())
            .unwrap(),
        Verdict::Clean { leaked_clusters: 0 }
    );
    assert_eq!(owned.check_chain().unwrap(), []);
    let id = owned.id().clone();
    assert_eq!(*store.find_sandbox(&name("a")).unwrap().id(), id);
    assert_eq!(*store.find_sandbox(&name(id.as_str())).unwrap().id(), id);
    drop(owned);
    let again = store
        .try_own(&store.sandbox(&name("a")).unwrap())
        .unwrap()
        .unwrap();
    store.remove_sandbox(again).unwrap();
    assert!(matches!(
        store.find_sandbox(&name(id.as_str())),
        Err(Error::UnknownSandbox { .. })
    ));
    assert_eq!(
        fs::read_dir(store.root().join("staging")).unwrap().count(),
        0
    );
    assert_eq!(
        fs::read_dir(store.root().join("names/sandboxes"))
            .unwrap()
            .count(),
        0
    );
}

#[test]
fn a_name_that_is_an_id_is_its_own_sandboxs_only() {
    let (_dir, store) = fresh();
    let owned = store.create_sandbox(record("a"), Origin::Image).unwrap();
    for taken in [owned.id().as_str(), "0123456789abcdef"] {
        assert!(
            matches!(
                store.create_sandbox(record(taken), Origin::Image),
                Err(Error::NameIsAnId { .. })
            ),
            "{taken}"
        );
    }
    assert_eq!(
        store.find_sandbox(&name(owned.id().as_str())).unwrap().id(),
        owned.id()
    );
    let mut unnamed = record("b");
    unnamed.name = name(unnamed.id.as_str());
    let unnamed = store.create_sandbox(unnamed, Origin::Image).unwrap();
    assert_eq!(
        store
            .find_sandbox(&name(unnamed.id().as_str()))
            .unwrap()
            .id(),
        unnamed.id()
    );
    assert_eq!(
        fs::read_dir(store.root().join("sandboxes"))
            .unwrap()
            .count(),
        2
    );
    store
        .create_sandbox(record("0123456789abcde"), Origin::Image)
        .unwrap();
}

#[test]
fn a_name_whose_sandbox_is_gone_is_free() {
    let (_dir, store) = fresh();
    fs::write(
        store.root().join("names/sandboxes/a"),
        format!("{}\n", SandboxId::random().unwrap()),
    )
    .unwrap();
    assert!(matches!(
        store.sandbox(&name("a")),
        Err(Error::UnknownSandbox { .. })
    ));
    let owned = store.create_sandbox(record("a"), Origin::Image).unwrap();
    assert_eq!(store.sandbox(&name("a")).unwrap().id(), owned.id());
}

#[test]
fn an_unreadable_sandbox_is_listed_with_the_reason_and_kept() {
    let (dir, store) = fresh();
    drop(store.create_sandbox(record("a"), Origin::Image).unwrap());
    let id = store.sandbox(&name("a")).unwrap().id().clone();
    fs::write(
        store
            .root()
            .join("sandboxes")
            .join(id.as_str())
            .join("sandbox.json"),
        "{",
    )
    .unwrap();
    let again = Store::open(&dir.path().join("home")).unwrap();
    assert!(matches!(again.recovered(), [Recovered::Kept { .. }]));
    assert!(matches!(
        again.sandboxes().unwrap()[0].sandbox,
        Err(Error::Corrupt { .. })
    ));
}

#[test]
fn another_format_a_foreign_directory_and_a_newer_record_are_refused() {
    let (dir, store) = fresh();
    let mut newer = record("a");
    newer.schema = 99;
    let id = newer.id.clone();
    drop(store.create_sandbox(newer, Origin::Image).unwrap());
    assert!(matches!(
        store.sandbox_by_id(&id),
        Err(Error::NewerSchema { found: 99, .. })
    ));
    fs::write(store.root().join("format"), "sandtree-store 4\n").unwrap();
    assert!(matches!(
        Store::open(store.root()),
        Err(Error::NewerFormat {
            found: 4,
            known: 3,
            ..
        })
    ));
    fs::write(store.root().join("format"), "sandtree-store 1\n").unwrap();
    assert!(matches!(
        Store::open(store.root()),
        Err(Error::OlderFormat {
            found: 1,
            known: 3,
            ..
        })
    ));
    fs::write(dir.path().join("letter.txt"), "dear").unwrap();
    assert!(matches!(
        Store::open(dir.path()),
        Err(Error::NotAStore { .. })
    ));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn only_the_owner_can_look_inside() {
    let (_dir, store) = fresh();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(store.root()), 0o700);
    let owned = store.create_sandbox(record("a"), Origin::Image).unwrap();
    assert_eq!(
        (
            mode(owned.path()),
            mode(&owned.disk_layer(owned.head().unwrap().active().unwrap()))
        ),
        (0o700, 0o600)
    );
    let initramfs = store
        .publish_initramfs(&crate::Digest::of(b"key"), b"bytes")
        .unwrap();
    assert_eq!(mode(&initramfs), 0o444);
}

#[test]
fn the_cache_forgets_what_it_cannot_read() {
    let (_dir, store) = fresh();
    assert_eq!(store.cached::<u32>(&name("k")).unwrap(), None);
    store.cache(&name("k"), &7).unwrap();
    store.cache(&name("k"), &8).unwrap();
    assert_eq!(store.cached::<u32>(&name("k")).unwrap(), Some(8));
    fs::write(store.root().join("cache/k"), "").unwrap();
    assert_eq!(store.cached::<u32>(&name("k")).unwrap(), None);
}

#[test]
fn an_image_whose_description_was_touched_is_refused() {
    let (_dir, store) = fresh();
    let staged = store.stage().unwrap();
    fs::write(staged.path().join("rootfs.raw"), "root").unwrap();
    let spec = crate::ImageSpec {
        arch: crate::Arch::X86_64,
        kernel: crate::Digest::of(b"kernel"),
        init: crate::Init::Agent,
        defaults: crate::ExecDefaults::default(),
        disk_bytes: None,
    };
    let image = store.publish_image(staged, spec).unwrap();
    let json = store
        .root()
        .join("images")
        .join(image.digest.as_str())
        .join("image.json");
    let text = fs::read_to_string(&json).unwrap();
    fs::remove_file(&json).unwrap();
    for damaged in [
        text.replace(":", ": "),
        text.replace("\"agent\"", "\"image\""),
        text.replacen('{', "{\"a\":1,", 1),
    ] {
        fs::write(&json, damaged).unwrap();
        assert!(matches!(
            store.image_by_digest(&image.digest),
            Err(Error::Corrupt { .. })
        ));
    }
    fs::write(&json, text).unwrap();
    store.image_by_digest(&image.digest).unwrap();
}

#[test]
fn a_root_that_others_may_write_to_is_refused_and_a_new_one_is_closed() {
    let (dir, store) = fresh();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(store.root()), 0o700);
    for open in [0o770, 0o707, 0o777] {
        fs::set_permissions(store.root(), fs::Permissions::from_mode(open)).unwrap();
        let refused = Store::open(store.root());
        assert!(
            matches!(refused, Err(Error::OpenRoot { mode, .. }) if mode == open),
            "{refused:?}"
        );
    }
    // Users who may only read do no harm: the directories in it are closed.
    fs::set_permissions(store.root(), fs::Permissions::from_mode(0o755)).unwrap();
    Store::open(store.root()).unwrap();
    let made = dir.path().join("made");
    fs::create_dir(&made).unwrap();
    fs::set_permissions(&made, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(Store::open(&made), Err(Error::OpenRoot { .. })));
    assert_eq!(
        fs::read_dir(&made).unwrap().count(),
        0,
        "nothing was put there"
    );
}

#[test]
fn a_root_of_somebody_else_is_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can give a directory away");
        return;
    }
    let (_dir, store) = fresh();
    std::os::unix::fs::chown(store.root(), Some(65534), None).unwrap();
    let refused = Store::open(store.root());
    assert!(
        matches!(
            refused,
            Err(Error::ForeignRoot {
                owner: 65534,
                user: 0,
                ..
            })
        ),
        "{refused:?}"
    );
}
