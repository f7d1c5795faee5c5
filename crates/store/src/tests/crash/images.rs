//! Images, and what is brought in by its members, stopped and failed at every file operation.

use super::{Case, Outcome, Simulated, made, name, open};
use crate::publish::Staged;
use crate::tests::artifact::{SMALL, image_spec, put_image, put_snapshot};
use crate::tests::{capture, ground, record, small_disk, warm_record};
use crate::{
    Digest, Error, Image, ImageSpec, Init, Named, Packable, Silent, StateKind, Store, Target,
    WarmOf, WarmRecord,
};

fn derived_spec(image: &Image) -> ImageSpec {
    ImageSpec {
        init: Init::Image,
        ..image_spec(&image.record.kernel)
    }
}

#[test]
fn a_derived_image_is_whole_or_absent() {
    Case {
        prepare: &|store| ground(store),
        verb: &|store, image| {
            let derived = store.derive_image(&image, derived_spec(&image))?;
            store.set_image_name(&name("derived"), &derived.digest)
        },
        check: &|store, outcome| {
            let origin = store.image(&name("tiny")).unwrap();
            match store.image(&name("derived")) {
                Ok(image) => assert_eq!(image.record.rootfs, origin.record.rootfs),
                Err(error) => {
                    assert!(matches!(error, Error::UnknownImage { .. }), "{error}");
                    assert_eq!(outcome, Outcome::Open);
                    drop(store.derive_image(&origin, derived_spec(&origin)).unwrap());
                }
            }
            for digest in store.image_digests().unwrap() {
                assert_eq!(store.verify_image(&digest, &Silent).unwrap(), None);
            }
        },
    }
    .run();
}

#[test]
fn removing_the_name_of_an_image_leaves_it_whole_or_nothing_of_it() {
    let record = record("a");
    let key = Digest::of(b"key");
    Case {
        prepare: &|store| {
            let image = ground(store);
            // It boots with the kernel of another image.
            put_image(store, "other");
            let owned = made(store, &record);
            let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Warm).unwrap();
            let warm = WarmRecord {
                of: WarmOf::Image(image.digest.clone()),
                ..warm_record(&owned)
            };
            store.publish_warm(&key, &warm, &owned, &state.id).unwrap();
        },
        verb: &|store, ()| {
            assert!(store.remove_image_name(&name("tiny"))?.collected);
            Ok(())
        },
        check: &|store, outcome| {
            store.image(&name("other")).unwrap();
            match store.named(&name("tiny")).unwrap() {
                Some(Named::Image(digest)) => {
                    assert_eq!(outcome, Outcome::Open);
                    let image = store.image_by_digest(&digest).unwrap();
                    store.kernel(&image.record.kernel).unwrap();
                    assert!(store.warm(&key).unwrap().is_some());
                }
                _ => {
                    // What an interrupted removal left is garbage, and nothing holds it back.
                    let report = store.gc(false).unwrap();
                    assert_eq!(report.held_back, None);
                    assert!(
                        report.removed.is_empty() || outcome == Outcome::Open,
                        "{report:?}"
                    );
                    assert_eq!(store.image_digests().unwrap().len(), 1);
                    assert!(store.warm(&key).unwrap().is_none());
                }
            }
            let other = store.image(&name("other")).unwrap();
            store.kernel(&other.record.kernel).unwrap();
        },
    }
    .run();
}

/// Every member of a snapshot and of its image, by digest.
struct Packed {
    snapshot: Digest,
    image: Digest,
    members: Vec<(Digest, Vec<u8>)>,
}

fn packed() -> Packed {
    let store = open(&Simulated::new());
    let snapshot = put_snapshot(&store, &put_image(&store, "tiny"), "a", SMALL, 1);
    let what = Packable::Snapshot(&snapshot);
    let content = |digest: &Digest, member: &_| {
        let mut bytes = Vec::new();
        store
            .open_member(&what, member)
            .unwrap()
            .read_to_end(&mut bytes)
            .unwrap();
        (digest.clone(), bytes)
    };
    let members = store.packing(&what).unwrap();
    let members = members
        .iter()
        .map(|member| content(&member.digest, member))
        .collect();
    Packed {
        snapshot: snapshot.digest.clone(),
        image: snapshot.manifest.image.digest.clone(),
        members,
    }
}

/// A staging directory with all members, as somebody fetched them.
fn fetched(store: &Store, packed: &Packed) -> Staged {
    let staged = store.stage().unwrap();
    for (digest, bytes) in &packed.members {
        store
            .files
            .create(&staged.path().join(digest.as_str()), bytes)
            .unwrap();
    }
    staged
}

#[test]
fn unpacking_a_snapshot_is_whole_or_nothing() {
    let packed = packed();
    let unpack = |store: &Store, dir: &Staged| {
        let name = name("x");
        let target = Target::Name {
            name: &name,
            replace: false,
        };
        store
            .unpack_snapshot(&packed.snapshot, dir.path(), target, &Silent)
            .map(drop)
    };
    Case {
        prepare: &|store| fetched(store, &packed),
        verb: &|store, dir| unpack(store, &dir),
        check: &|store, outcome| {
            for listed in store.snapshots().unwrap() {
                assert_eq!(
                    store
                        .verify_snapshot(&listed.digest, &Silent)
                        .unwrap()
                        .damaged,
                    []
                );
            }
            if store.named(&name("x")).unwrap().is_none() {
                assert_eq!(outcome, Outcome::Open);
                unpack(store, &fetched(store, &packed)).unwrap();
            }
            assert_eq!(
                store.named(&name("x")).unwrap(),
                Some(Named::Snapshot(packed.snapshot.clone()))
            );
        },
    }
    .run();
}

#[test]
fn unpacking_an_image_is_whole_or_nothing() {
    let packed = packed();
    let unpack = |store: &Store, dir: &Staged| {
        let image = store.unpack_image(&packed.image, dir.path(), &Silent)?;
        store.set_image_name(&name("x"), &image.digest)
    };
    Case {
        prepare: &|store| fetched(store, &packed),
        verb: &|store, dir| unpack(store, &dir),
        check: &|store, outcome| {
            for digest in store.image_digests().unwrap() {
                assert_eq!(store.verify_image(&digest, &Silent).unwrap(), None);
            }
            for digest in store.kernel_digests().unwrap() {
                assert_eq!(store.verify_kernel(&digest, &Silent).unwrap(), None);
            }
            if store.named(&name("x")).unwrap().is_none() {
                assert_eq!(outcome, Outcome::Open);
                unpack(store, &fetched(store, &packed)).unwrap();
            }
            let image = store.image(&name("x")).unwrap();
            store.kernel(&image.record.kernel).unwrap();
        },
    }
    .run();
}
