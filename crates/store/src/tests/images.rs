//! Images: what they are called by, what is made from them, who uses them, and when they go.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::artifact::{Place, SMALL, compress, image_spec, put_image, put_snapshot};
use super::snapshots::{fresh, saved};
use super::{capture, ground, grounded, publish_kernel, record, small_disk, warm_record};
use crate::disk::Chain;
use crate::{
    Arch, Digest, DisplaySize, Error, ExecDefaults, GarbageKind, Image, ImageSpec, Init,
    KernelFormat, KernelSpec, Name, Named, RemovedImage, Silent, StateKind, Store, UsageKind,
    WarmOf, WarmRecord,
};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

const GOLDEN_IMAGE: &str = r#"{"arch":"x86_64","defaults":{"cmd":["/bin/sh"],"env":{"PATH":"/bin"},"user":"root","workdir":null},"init":"agent","kernel":"6923dd1bc0460082c5d55a831908c24a282860b7f1cd6c2b79cf1bc8857c639c","rootfs":{"bytes":16,"digest":"16c5072362dbf66157a3d5ac6b03030b4bd6a0d8dd3e70e434134541fc91d8be"},"schema":1}"#;
const GOLDEN_IMAGE_DIGEST: &str =
    "28b9caa7aad7787bbf78d79de47a2eabbf128c0b6d3432b2bcde23e1f903dc0e";
const GOLDEN_KERNEL_DIGEST: &str =
    "7eaaccb436675eb3ec04e25fbca1ae13af767320f59ed9486235ea786f8b0654";

fn golden_spec() -> ImageSpec {
    ImageSpec {
        arch: Arch::X86_64,
        kernel: Digest::of(b"kernel"),
        init: Init::Agent,
        defaults: ExecDefaults {
            env: [("PATH".to_owned(), "/bin".to_owned())].into(),
            user: Some("root".to_owned()),
            workdir: None,
            cmd: vec!["/bin/sh".to_owned()],
            ..ExecDefaults::default()
        },
        disk_bytes: None,
    }
}

fn publish(store: &Store, spec: ImageSpec) -> Result<Image, Error> {
    let staged = store.stage().unwrap();
    fs::write(staged.path().join("rootfs.raw"), "root file system").unwrap();
    store.publish_image(staged, spec)
}

fn text(store: &Store, image: &Image) -> String {
    fs::read_to_string(
        store
            .root()
            .join("images")
            .join(image.digest.as_str())
            .join("image.json"),
    )
    .unwrap()
}

#[test]
fn what_schema_1_can_say_keeps_its_digest() {
    let (_dir, store) = fresh();
    let image = publish(&store, golden_spec()).unwrap();
    assert_eq!(
        (text(&store, &image).as_str(), image.digest.as_str()),
        (GOLDEN_IMAGE, GOLDEN_IMAGE_DIGEST)
    );
    assert_eq!(
        publish_kernel(&store, b"kernel").digest.as_str(),
        GOLDEN_KERNEL_DIGEST
    );
    let mut spec = ImageSpec {
        disk_bytes: Some(1 << 30),
        ..golden_spec()
    };
    spec.defaults.entrypoint = vec!["/entry".to_owned()];
    let newer = publish(&store, spec).unwrap();
    assert_eq!(
        (newer.record.schema, newer.record.disk_bytes),
        (2, Some(1 << 30))
    );
    assert_eq!(
        store
            .image_by_digest(&newer.digest)
            .unwrap()
            .record
            .defaults
            .entrypoint,
        ["/entry"]
    );
}

/// Puts a description under its own digest, with a root file system.
fn read_image(store: &Store, text: &str) -> Result<Image, Error> {
    let digest = Digest::of(text.as_bytes());
    let dir = store.root().join("images").join(digest.as_str());
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("image.json"), text).unwrap();
    fs::write(dir.join("rootfs.raw"), "root file system").unwrap();
    store.image_by_digest(&digest)
}

#[test]
fn one_content_has_one_schema_and_no_unknown_fields() {
    let (_dir, store) = fresh();
    read_image(&store, GOLDEN_IMAGE).unwrap();
    let with = |field: &str| GOLDEN_IMAGE.replacen("\"init\"", &format!("{field},\"init\""), 1);
    let sized = with("\"disk_bytes\":1024").replace("\"schema\":1", "\"schema\":2");
    read_image(&store, &sized).unwrap();
    for refused in [
        GOLDEN_IMAGE.replace("\"schema\":1", "\"schema\":2"),
        sized.replace("\"schema\":2", "\"schema\":1"),
        with("\"disk_bytes\":null"),
        with("\"extra\":1"),
        GOLDEN_IMAGE.replace(
            "\"cmd\":[\"/bin/sh\"],",
            "\"cmd\":[\"/bin/sh\"],\"entrypoint\":[],",
        ),
    ] {
        assert!(
            matches!(read_image(&store, &refused), Err(Error::Corrupt { .. })),
            "{refused}"
        );
    }
    let serving = GOLDEN_IMAGE.replace(
        "\"user\"",
        "\"ready\":{\"command\":\"true\",\"timeout_ms\":1000},\"start\":\"a &\",\"user\"",
    );
    let schema = |number: u64| format!("\"schema\":{number}");
    let served = read_image(&store, &serving.replace(&schema(1), &schema(3))).unwrap();
    assert_eq!(served.record.defaults.start.as_deref(), Some("a &"));
    for refused in [
        serving.replace(&schema(1), &schema(2)),
        sized.replace(&schema(2), &schema(3)),
    ] {
        assert!(
            matches!(read_image(&store, &refused), Err(Error::Corrupt { .. })),
            "{refused}"
        );
    }
    let shown = GOLDEN_IMAGE.replace(
        "\"cmd\":[\"/bin/sh\"],",
        "\"cmd\":[\"/bin/sh\"],\"display\":\"1280x800\",",
    );
    let shown = read_image(&store, &shown.replace(&schema(1), &schema(4))).unwrap();
    assert_eq!(shown.record.defaults.display, Some(DisplaySize::DEFAULT));
    let later = GOLDEN_IMAGE.replace("\"schema\":1", "\"schema\":5");
    assert!(matches!(
        read_image(&store, &later),
        Err(Error::NewerSchema {
            found: 5,
            known: 4,
            ..
        })
    ));
}

#[test]
fn a_disk_that_no_sandbox_can_have_is_refused() {
    let (_dir, store) = fresh();
    for bytes in [0, 8, 1000, 1 << 50] {
        let refused = publish(
            &store,
            ImageSpec {
                disk_bytes: Some(bytes),
                ..golden_spec()
            },
        );
        assert!(matches!(refused, Err(Error::DiskSize { .. })), "{bytes}");
    }
    assert_eq!(store.list_images().unwrap().len(), 0);
}

#[test]
fn a_kernel_may_have_an_initial_file_system_of_the_users_own() {
    let (_dir, store) = fresh();
    assert_eq!(publish_kernel(&store, b"kernel").initramfs(), None);
    let staged = store.stage().unwrap();
    for (file, bytes) in [("kernel", "kernel"), ("initramfs", "cpio")] {
        fs::write(staged.path().join(file), bytes).unwrap();
    }
    let release = "6.1".to_owned();
    let format = KernelFormat::Vmlinux;
    let spec = KernelSpec {
        arch: Arch::X86_64,
        release,
        format,
        modules: Vec::new(),
    };
    let bundle = store.publish_kernel(staged, spec).unwrap();
    assert_eq!((bundle.record.schema, bundle.bytes()), (2, 10));
    let path = bundle.initramfs().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"cpio");
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        store.kernel(&bundle.digest),
        Err(Error::Corrupt { .. })
    ));
    fs::write(&path, "opic").unwrap();
    assert!(
        store
            .verify_kernel(&bundle.digest, &Silent)
            .unwrap()
            .is_some(),
        "every byte is looked at"
    );
}

#[test]
fn a_derived_image_shares_its_root_file_system_and_outlives_its_origin() {
    let (_dir, store) = fresh();
    let image = ground(&store);
    let spec = ImageSpec {
        init: Init::Image,
        disk_bytes: Some(1 << 20),
        ..image_spec(&image.record.kernel)
    };
    let derived = store.derive_image(&image, spec).unwrap();
    assert_eq!(
        (derived.record.init, &derived.record.rootfs),
        (Init::Image, &image.record.rootfs)
    );
    let inode = |image: &Image| fs::metadata(image.rootfs()).unwrap().ino();
    assert_eq!(inode(&derived), inode(&image));
    store
        .set_image_name(&name("derived"), &derived.digest)
        .unwrap();
    let of_origin = image.digest.clone();
    drop(image);
    let removed = store.remove_image_name(&name("tiny")).unwrap();
    assert_eq!(
        removed,
        RemovedImage {
            digest: of_origin,
            collected: true
        }
    );
    assert_eq!(store.verify_image(&derived.digest, &Silent).unwrap(), None);
    store.kernel(&derived.record.kernel).unwrap();
    let same = store
        .derive_image(&derived, image_spec(&derived.record.kernel))
        .unwrap();
    assert_ne!(same.digest, derived.digest);
}

#[test]
fn the_last_name_takes_the_image_its_warm_states_and_its_kernel_along() {
    let (_dir, store) = fresh();
    let image = ground(&store);
    store.set_image_name(&name("other"), &image.digest).unwrap();
    let digest = image.digest.clone();
    let kernel = image.record.kernel.clone();
    let kept = RemovedImage {
        digest: digest.clone(),
        collected: false,
    };
    let gone = RemovedImage {
        digest: digest.clone(),
        collected: true,
    };
    assert_eq!(
        store.remove_image_name(&name("other")).unwrap(),
        kept,
        "it has another name"
    );
    store.set_image_name(&name("other"), &digest).unwrap();
    drop(store.remove_image_name(&name("other")).unwrap());
    drop(image);
    let pinned = store.pin_image(&digest).unwrap();
    assert_eq!(
        store.remove_image_name(&name("tiny")).unwrap(),
        kept,
        "somebody works with it"
    );
    store.set_image_name(&name("tiny"), &digest).unwrap();
    drop(pinned);
    let (owned, snapshot) = saved(&store, "s");
    assert_eq!(
        store.remove_image_name(&name("tiny")).unwrap(),
        kept,
        "a sandbox needs it"
    );
    let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Warm).unwrap();
    let key = Digest::of(b"key");
    store
        .publish_warm(&key, &warm_record(&owned), &owned, &state.id)
        .unwrap();
    store.remove_sandbox(owned).unwrap();
    drop(snapshot);
    store.set_image_name(&name("tiny"), &digest).unwrap();
    assert_eq!(
        store.remove_image_name(&name("tiny")).unwrap(),
        kept,
        "a snapshot needs it"
    );
    store.set_image_name(&name("tiny"), &digest).unwrap();
    store.remove_snapshot_name(&name("s")).unwrap();
    assert!(store.warm(&key).unwrap().is_some());
    assert_eq!(
        store.remove_image_name(&name("tiny")).unwrap(),
        gone,
        "a warm state keeps nothing"
    );
    assert!(store.warm(&key).unwrap().is_none());
    assert!(store.kernel(&kernel).is_err());
    assert_eq!(store.gc(true).unwrap().removed, []);
}

#[test]
fn only_the_name_of_an_image_is_taken_away() {
    let (_dir, store) = fresh();
    let (_owned, _snapshot) = saved(&store, "s");
    assert!(matches!(
        store.remove_image_name(&name("s")),
        Err(Error::OtherKind { .. })
    ));
    assert!(matches!(
        store.remove_image_name(&name("x")),
        Err(Error::UnknownImage { .. })
    ));
    assert!(matches!(
        store.named(&name("s")).unwrap(),
        Some(Named::Snapshot(_))
    ));
    let gone = Digest::of(b"gone");
    fs::write(
        store.root().join("names/images/dangling"),
        format!("{gone}\n"),
    )
    .unwrap();
    let removed = store.remove_image_name(&name("dangling")).unwrap();
    assert_eq!(
        removed,
        RemovedImage {
            digest: gone,
            collected: true
        }
    );
}

#[test]
fn the_list_of_images_tells_who_uses_them() {
    let (_dir, store) = fresh();
    let (owned, _snapshot) = saved(&store, "s");
    let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Warm).unwrap();
    store
        .publish_warm(&Digest::of(b"key"), &warm_record(&owned), &owned, &state.id)
        .unwrap();
    let unnamed = publish(&store, golden_spec()).unwrap();
    let gone = Digest::of(b"gone");
    fs::write(
        store.root().join("names/images/dangling"),
        format!("{gone}\n"),
    )
    .unwrap();
    let torn = publish(
        &store,
        ImageSpec {
            disk_bytes: Some(512),
            ..golden_spec()
        },
    )
    .unwrap();
    fs::remove_file(torn.rootfs()).unwrap();
    let listed = store.list_images().unwrap();
    let of = |digest: &Digest| listed.iter().find(|image| image.digest == *digest).unwrap();
    let used = of(&owned.record().image_digest);
    assert_eq!(
        (&used.names[..], used.sandboxes, used.snapshots, used.warm),
        (&[name("tiny")][..], 1, 1, 1)
    );
    assert!(used.warm_bytes > 0 && used.disk_bytes_used > 0);
    assert_eq!(used.image.as_ref().unwrap().bytes(), 16);
    let unused = of(&unnamed.digest);
    assert_eq!(
        (
            unused.names.len(),
            unused.sandboxes,
            unused.snapshots,
            unused.warm
        ),
        (0, 0, 0, 0)
    );
    assert!(of(&torn.digest).image.is_err());
    assert_eq!(
        (of(&gone).image.is_err(), of(&gone).disk_bytes_used),
        (true, 0)
    );
    assert_eq!(listed.len(), 4);
}

#[test]
fn warm_states_are_listed_and_go_with_their_image() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Warm).unwrap();
    let lost = WarmRecord {
        of: WarmOf::Image(Digest::of(b"gone")),
        ..warm_record(&owned)
    };
    let keys = [&b"kept"[..], b"lost", b"older", b"torn"].map(Digest::of);
    for (key, record) in keys.iter().zip([&warm_record(&owned), &lost, &lost, &lost]) {
        store.publish_warm(key, record, &owned, &state.id).unwrap();
    }
    let dir = |key: &Digest| store.root().join("warm").join(key.as_str());
    fs::remove_file(dir(&keys[2]).join("warm.json")).unwrap();
    fs::remove_file(dir(&keys[3]).join("warm.json")).unwrap();
    fs::write(dir(&keys[3]).join("warm.json"), "{").unwrap();
    let listed = store.warm_list().unwrap();
    let of = |key: &Digest| listed.iter().find(|warm| warm.key == *key).unwrap();
    assert_eq!(
        (
            of(&keys[0]).record.as_ref(),
            of(&keys[0]).created_at_unix_ms
        ),
        (Some(&warm_record(&owned)), 2)
    );
    assert!(listed.iter().all(|warm| warm.bytes > 0));
    assert_eq!(
        (&of(&keys[2]).record, &of(&keys[2]).unreadable),
        (&None, &None)
    );
    assert!(of(&keys[3]).unreadable.is_some());
    let usage = store.usage().unwrap();
    let warm = usage
        .kinds
        .iter()
        .find(|kind| kind.kind == UsageKind::Warm)
        .unwrap();
    assert_eq!(warm.count, 4);
    assert!(warm.reclaimable_bytes > 0);
    let removed = store.gc(false).unwrap().removed;
    let found: Vec<_> = removed
        .iter()
        .map(|garbage| (garbage.kind, garbage.id.as_str()))
        .collect();
    assert_eq!(
        found,
        [(GarbageKind::Warm, keys[1].as_str())],
        "of the others, it is not known that nothing needs them"
    );
    assert_eq!(store.warm_list().unwrap().len(), 3);
}

#[test]
fn a_kernel_state_is_of_no_image_and_goes_with_its_kernel() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Warm).unwrap();
    let of_kernel = |kernel: &Digest| WarmRecord {
        of: WarmOf::Kernel(kernel.clone()),
        ..warm_record(&owned)
    };
    let kept = of_kernel(&owned.record().kernel_digest);
    let lost = of_kernel(&Digest::of(b"gone"));
    let keys = [&b"kept"[..], b"lost"].map(Digest::of);
    for (key, record) in keys.iter().zip([&kept, &lost]) {
        store.publish_warm(key, record, &owned, &state.id).unwrap();
    }
    assert_eq!(store.warm_record(&keys[0]).unwrap(), Some(kept));
    let images = store.list_images().unwrap();
    assert!(images.iter().all(|image| image.warm == 0), "{images:?}");
    let removed = store.gc(false).unwrap().removed;
    let found: Vec<_> = removed
        .iter()
        .map(|garbage| (garbage.kind, garbage.id.as_str()))
        .collect();
    assert_eq!(found, [(GarbageKind::Warm, keys[1].as_str())]);
    store.remove_sandbox(owned).unwrap();
    store.remove_image_name(&name("tiny")).unwrap();
    assert_eq!(store.warm_list().unwrap(), []);
}

#[test]
fn a_flattened_disk_is_what_its_guest_would_read_and_becomes_an_image() {
    let place = Place::new();
    let image = put_image(&place.store, "tiny");
    let snapshot = put_snapshot(&place.store, &image, "s", SMALL, 3);
    let flat = || {
        let staged = place.store.stage().unwrap();
        place
            .store
            .flatten(&snapshot.digest, &staged, &Silent)
            .unwrap();
        place
            .store
            .publish_image(staged, image_spec(&image.kernel))
            .unwrap()
    };
    let flattened = flat();
    let files = place.store.disk_files(&snapshot).unwrap();
    let base = place.store.image_by_digest(&image.digest).unwrap().rootfs();
    let chain = Chain::open(&base, files.paths()).unwrap();
    assert_eq!(flattened.record.rootfs.bytes, snapshot.manifest.disk.bytes);
    let [mut found, mut expected] =
        [0, 1].map(|_| vec![0xee; snapshot.manifest.disk.bytes as usize]);
    let raw = fs::File::open(flattened.rootfs()).unwrap();
    raw.read_exact_at(&mut found, 0).unwrap();
    chain.read_at(0, &mut expected).unwrap();
    assert!(found == expected);
    assert!(
        raw.metadata().unwrap().blocks() * 512 < snapshot.manifest.disk.bytes / 2,
        "zeros are holes"
    );
    let digest = flattened.digest.clone();
    snapshot
        .manifest
        .disk
        .layers
        .iter()
        .for_each(|layer| compress(&place.store, layer));
    assert_eq!(flat().digest, digest, "also from compressed layers");
    let gone = Digest::of(b"gone");
    let refused = place
        .store
        .flatten(&gone, &place.store.stage().unwrap(), &Silent);
    assert!(matches!(refused, Err(Error::UnknownSnapshot { .. })));
}

#[test]
fn what_is_cached_can_be_forgotten() {
    let (_dir, store) = fresh();
    store.cache(&name("k"), &7).unwrap();
    store.forget_cached(&name("k")).unwrap();
    store.forget_cached(&name("k")).unwrap();
    assert_eq!(store.cached::<u32>(&name("k")).unwrap(), None);
}
