//! Import and export of a directory, stopped and failed at every file operation.

use super::{Case, Outcome, Simulated, name, open};
use crate::artifact::dir;
use crate::tests::artifact::{SMALL, put_image, put_snapshot};
use crate::{Digest, Error, ExportSpec, Named, Silent, Store, Target};

/// An artifact, and which snapshot is in it.
fn artifact() -> (Vec<u8>, Digest) {
    let store = open(&Simulated::new());
    let snapshot = put_snapshot(&store, &put_image(&store, "tiny"), "a", SMALL, 1);
    let mut out = Vec::new();
    let spec = ExportSpec {
        plain: true,
        ..ExportSpec::default()
    };
    store.export(&snapshot, &spec, &mut out, &Silent).unwrap();
    (out, snapshot.digest.clone())
}

fn import(store: &Store, mut artifact: &[u8], replace: bool) -> Result<(), Error> {
    store
        .import(
            &mut artifact,
            Target::Name {
                name: &name("x"),
                replace,
            },
            &Silent,
        )
        .map(drop)
}

/// Whatever is published is whole, to the last byte.
fn check_whole(store: &Store) {
    for listed in store.snapshots().unwrap() {
        assert_eq!(
            store
                .verify_snapshot(&listed.snapshot.unwrap().digest, &Silent)
                .unwrap()
                .damaged,
            []
        );
    }
}

#[test]
fn import_is_whole_or_nothing() {
    let (artifact, digest) = artifact();
    Case {
        prepare: &|_| (),
        verb: &|store, ()| import(store, &artifact, false),
        check: &|store, outcome| {
            check_whole(store);
            match store.named(&name("x")).unwrap() {
                Some(named) => assert_eq!(named, Named::Snapshot(digest.clone())),
                None => {
                    assert_eq!(outcome, Outcome::Open);
                    import(store, &artifact, false).unwrap();
                }
            }
        },
    }
    .run();
}

#[test]
fn an_import_that_replaces_leaves_the_old_or_the_new() {
    let (artifact, digest) = artifact();
    Case {
        prepare: &|store| {
            drop(put_snapshot(
                store,
                &put_image(store, "other"),
                "x",
                SMALL,
                1,
            ))
        },
        verb: &|store, ()| import(store, &artifact, true),
        check: &|store, outcome| {
            check_whole(store);
            let Some(Named::Snapshot(found)) = store.named(&name("x")).unwrap() else {
                panic!("the name is gone")
            };
            assert!(found == digest || outcome == Outcome::Open);
            store.snapshot(&found).unwrap();
        },
    }
    .run();
}

/// Of another file system than the store.
const DIR: &str = "/out/dir";

/// A store with two snapshots, and a place for directories.
fn two_snapshots(store: &Store) -> [Digest; 2] {
    store.files.create_dir("/out".as_ref()).unwrap();
    store.files.sync_dir("/".as_ref()).unwrap();
    let image = put_image(store, "tiny");
    ["a", "b"].map(|name| put_snapshot(store, &image, name, SMALL, 1).digest.clone())
}

fn export_dir(store: &Store, digest: &Digest, replace: bool) -> Result<(), Error> {
    store.export_dir(&store.snapshot(digest)?, DIR.as_ref(), replace, &Silent)
}

/// The snapshot in the directory, of which every byte is right.
fn in_dir(store: &Store) -> Option<Digest> {
    store.files.kind(DIR.as_ref()).unwrap()?;
    assert_eq!(
        dir::verify(&store.files, DIR.as_ref(), &Silent)
            .unwrap()
            .damaged,
        []
    );
    Some(dir::read(&store.files, DIR.as_ref()).unwrap().digest)
}

#[test]
fn a_directory_is_whole_or_not_there() {
    Case {
        prepare: &|store| two_snapshots(store),
        verb: &|store, [digest, _]| export_dir(store, &digest, false),
        check: &|store, outcome| assert!(in_dir(store).is_some() || outcome == Outcome::Open),
    }
    .run();
}

#[test]
fn a_directory_that_is_replaced_is_the_old_or_the_new() {
    let new = std::sync::Mutex::new(None);
    Case {
        prepare: &|store| {
            let [old, digest] = two_snapshots(store);
            export_dir(store, &old, false).unwrap();
            *new.lock().unwrap() = Some(digest.clone());
            digest
        },
        verb: &|store, digest| export_dir(store, &digest, true),
        check: &|store, outcome| {
            let found = in_dir(store);
            assert!(found.is_some(), "the directory is gone");
            assert!(found == *new.lock().unwrap() || outcome == Outcome::Open);
        },
    }
    .run();
}
