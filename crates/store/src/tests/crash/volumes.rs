//! Volumes and documents of the server, stopped and failed at every file operation.

use super::{Case, Outcome, name};
use crate::{SandboxId, Shelf, Store};

fn volumes(store: &Store) -> Vec<String> {
    let volumes = store.volumes().unwrap();
    volumes.into_iter().map(|volume| volume.name).collect()
}

#[test]
fn a_volume_is_whole_or_absent_and_its_name_is_taken_once() {
    Case {
        prepare: &|_| (),
        verb: &|store, ()| store.create_volume("v", 1).map(drop),
        check: &|store, outcome| {
            let found = volumes(store);
            assert!(found == ["v"] || (outcome == Outcome::Open && found.is_empty()));
            let again = store.create_volume("v", 2).unwrap();
            assert_eq!(again.is_none(), !found.is_empty());
        },
    }
    .run();
}

#[test]
fn a_volume_that_is_removed_does_not_come_back() {
    Case {
        prepare: &|store| {
            let made = store.create_volume("v", 1).unwrap().unwrap();
            made.id.parse::<SandboxId>().unwrap()
        },
        verb: &|store, id| store.take_volume(&id).map(drop),
        check: &|store, outcome| {
            let found = volumes(store);
            assert!(found.is_empty() || (outcome == Outcome::Open && found == ["v"]));
        },
    }
    .run();
}

#[test]
fn a_document_has_its_old_content_or_its_new_one() {
    let put =
        |store: &Store, text: &str| store.put_document(Shelf::Builds, &name("b"), text.to_owned());
    Case {
        prepare: &|store| put(store, "old").unwrap(),
        verb: &|store, ()| put(store, "new"),
        check: &|store, outcome| {
            let found: Option<String> = store.document(Shelf::Builds, &name("b")).unwrap();
            let is_old = found.as_deref() == Some("old");
            assert!(found.as_deref() == Some("new") || (is_old && outcome == Outcome::Open));
            assert_eq!(store.documents(Shelf::Builds).unwrap(), [name("b")]);
        },
    }
    .run();
}

#[test]
fn a_first_document_is_whole_or_absent() {
    Case {
        prepare: &|_| (),
        verb: &|store, ()| store.put_document(Shelf::Templates, &name("t"), 7),
        check: &|store, outcome| {
            let found: Option<u32> = store.document(Shelf::Templates, &name("t")).unwrap();
            assert!(found == Some(7) || (outcome == Outcome::Open && found.is_none()));
        },
    }
    .run();
}
