//! Snapshots on a real disk, with threads and processes.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use super::{assert_whole, capture, ground, grounded, record, spec, write_something};
use crate::{
    Digest, Error, GarbageKind, Head, LayerId, MemoryKind, MemoryState, Name, Named, Origin, Owned,
    Pinned, Progress, SandboxRecord, SaveSpec, Silent, Snapshot, StateKind, StateManifest, Store,
    Target, UsageKind,
};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub(super) fn fresh() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("home")).unwrap();
    (dir, store)
}

/// A state of what the sandbox is now; a fresh overlay is active after it, as after every capture.
fn captured(owned: &Owned, kind: StateKind) -> StateManifest {
    capture(owned, owned.create_disk(1 << 30).unwrap(), kind).unwrap()
}

fn save_as(store: &Store, owned: &Owned, text: &str, spec: &SaveSpec) -> Result<Pinned, Error> {
    let state = captured(owned, StateKind::Save);
    let name = name(text);
    store.save(
        owned,
        &state.id,
        spec,
        Target::Name {
            name: &name,
            replace: false,
        },
        &Silent,
    )
}

/// A sandbox with something on its disk, saved under a name.
pub(super) fn saved(store: &Store, text: &str) -> (Owned, Pinned) {
    let owned = grounded(store, &record(&format!("of-{text}")));
    write_something(&owned);
    let pinned = save_as(store, &owned, text, &spec()).unwrap();
    (owned, pinned)
}

/// Asked for like another sandbox.
fn like(owned: &Owned, text: &str) -> SandboxRecord {
    let SandboxRecord { id, name, .. } = record(text);
    SandboxRecord {
        id,
        name,
        ..owned.record().clone()
    }
}

fn pool(store: &Store) -> BTreeMap<String, u64> {
    let entries = fs::read_dir(store.root().join("layers"))
        .unwrap()
        .map(Result::unwrap);
    entries
        .map(|entry| {
            (
                entry.file_name().into_string().unwrap(),
                entry.metadata().unwrap().ino(),
            )
        })
        .collect()
}

fn layer_path(store: &Store, digest: &Digest) -> PathBuf {
    store.root().join("layers").join(digest.as_str())
}

/// Other content under the same name; not in place, because sandboxes have the file, too.
pub(super) fn overwrite(path: &Path, bytes: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn layers_are_links_and_read_only_and_an_empty_overlay_is_none() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    // The overlay of the creation and the two of the capture are empty; what was written is in one
    // layer.
    assert_eq!(snapshot.manifest.disk.layers.len(), 1);
    let layer = &snapshot.manifest.disk.layers[0].digest;
    let pooled = fs::metadata(layer_path(&store, layer)).unwrap();
    assert_eq!(pooled.permissions().mode() & 0o777, 0o444);
    let own = owned
        .head()
        .unwrap()
        .disk
        .into_iter()
        .map(|layer| fs::metadata(owned.disk_layer(&layer)).unwrap().ino());
    assert!(own.into_iter().any(|inode| inode == pooled.ino()));
    let text = fs::read_to_string(
        store
            .root()
            .join("snapshots")
            .join(snapshot.digest.as_str())
            .join("manifest.json"),
    );
    assert!(
        !text.unwrap().contains(store.root().to_str().unwrap()),
        "a path of the host"
    );
    assert_whole(&store, &snapshot, "saved");
}

#[test]
fn what_was_done_in_a_lesser_way_is_what_the_maker_says() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    let degraded = vec!["the guest did not freeze".to_owned()];
    let saved = save_as(
        &store,
        &owned,
        "s",
        &SaveSpec {
            degraded: degraded.clone(),
            ..spec()
        },
    )
    .unwrap();
    assert_eq!(saved.manifest.capture.degraded, degraded);
    // What other programs say becomes a line of bounded length, and no more of them than a manifest
    // may have.
    let degraded = [
        vec![" qemu:\r\n\tno\x1b[2J\n".to_owned(), "ü".repeat(4000)],
        vec![String::new(); 100],
    ]
    .concat();
    let saved = save_as(&store, &owned, "long", &SaveSpec { degraded, ..spec() }).unwrap();
    let notes = &saved.manifest.capture.degraded;
    assert_eq!(
        (notes.len(), &notes[0][..], &notes[1]),
        (64, "qemu: no [2J", &"ü".repeat(512))
    );
}

#[test]
fn saves_of_an_unchanged_sandbox_share_everything() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    write_something(&owned);
    let disk_only = SaveSpec {
        disk_only: true,
        ..spec()
    };
    let first = save_as(&store, &owned, "one", &disk_only).unwrap();
    let before = pool(&store);
    let second = save_as(
        &store,
        &owned,
        "two",
        &SaveSpec {
            created_at_unix_ms: 99,
            ..disk_only
        },
    )
    .unwrap();
    assert_eq!(first.manifest.disk, second.manifest.disk);
    assert_ne!(first.digest, second.digest);
    assert_eq!(pool(&store), before);
    assert!(first.manifest.memory.is_none() && first.manifest.requires.is_empty());
}

#[test]
fn thirty_saves_are_thirty_snapshots_and_each_is_its_own() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    let layers: Vec<_> = (0..30)
        .map(|number| {
            write_something(&owned);
            let saved = save_as(&store, &owned, &format!("s{number}"), &spec()).unwrap();
            saved.manifest.disk.layers.clone()
        })
        .collect();
    assert!(
        layers
            .windows(2)
            .all(|pair| pair[1].starts_with(&pair[0]) && pair[1].len() == pair[0].len() + 1)
    );
    for (number, layers) in layers.iter().enumerate() {
        let Some(Named::Snapshot(digest)) = store.named(&name(&format!("s{number}"))).unwrap()
        else {
            panic!()
        };
        let snapshot = store.snapshot(&digest).unwrap();
        assert_eq!(snapshot.manifest.disk.layers, *layers);
        assert_whole(&store, &snapshot, "one of thirty");
    }
}

/// The files of every layer of a sandbox's head but its own overlay, bottom first.
fn disk_below(owned: &Owned) -> Vec<Vec<u8>> {
    let disk = owned.head().unwrap().disk;
    let below = disk.split_last().unwrap().1;
    below
        .iter()
        .map(|layer| fs::read(owned.disk_layer(layer)).unwrap())
        .collect()
}

#[test]
fn a_sandbox_from_a_snapshot_has_its_disk_its_state_and_saves_as_the_same_layers() {
    let (_dir, store) = fresh();
    for compress in [false, true] {
        let text = if compress { "packed" } else { "plain" };
        let source = grounded(&store, &record(&format!("from-{text}")));
        write_something(&source);
        let state = captured(&source, StateKind::Save);
        let target = name(text);
        let spec = SaveSpec { compress, ..spec() };
        let target = Target::Name {
            name: &target,
            replace: false,
        };
        let snapshot = store
            .save(&source, &state.id, &spec, target, &Silent)
            .unwrap();
        let before = pool(&store);
        let record = SandboxRecord {
            disk_bytes: 2 << 30,
            ..like(&source, &format!("to-{text}"))
        };
        let origin = Origin::Snapshot {
            snapshot: &snapshot,
            memory: true,
        };
        let owned = store.create_sandbox(record, origin).unwrap();
        assert_eq!(owned.head().unwrap().parent, None);
        assert_eq!(
            disk_below(&owned),
            [fs::read(source.disk_layer(&state.disk[1])).unwrap()]
        );
        let found = owned.state_source(&snapshot.state_id()).unwrap();
        assert!(super::is_whole(&found));
        let manifest = found.manifest();
        assert_eq!(
            (manifest.kind, &manifest.machine, &manifest.execs),
            (StateKind::Save, &state.machine, &state.execs)
        );
        assert_eq!(fs::read(found.devices()).unwrap(), b"devices");
        assert_eq!(fs::read(found.execs().join("out")).unwrap(), b"hello");
        let MemoryState::Layers { layers } = &manifest.memory else {
            panic!()
        };
        assert_eq!(
            fs::read(found.memory_layer(&layers[0])).unwrap(),
            fs::read(source.memory_layer(state.memory.layers().first().unwrap())).unwrap()
        );
        // The machine needs the size it knows; the record says what it is to become.
        assert_eq!(
            owned
                .disk_bytes(owned.head().unwrap().active().unwrap())
                .unwrap(),
            1 << 30
        );
        let again = save_as(
            &store,
            &owned,
            &format!("again-{text}"),
            &SaveSpec {
                disk_only: true,
                ..spec
            },
        )
        .unwrap();
        assert_eq!(again.manifest.disk.layers, snapshot.manifest.disk.layers);
        assert_eq!(pool(&store), before);
        assert_whole(&store, &snapshot, "saved, used, saved again");
    }
    assert!(pool(&store).keys().any(|name| name.ends_with(".zst")));
}

#[test]
fn without_memory_the_disk_is_as_large_as_asked_and_never_smaller() {
    let (_dir, store) = fresh();
    let (source, snapshot) = saved(&store, "s");
    let create = |text: &str, disk_bytes| {
        let origin = Origin::Snapshot {
            snapshot: &snapshot,
            memory: false,
        };
        store.create_sandbox(
            SandboxRecord {
                disk_bytes,
                ..like(&source, text)
            },
            origin,
        )
    };
    let owned = create("b", 2 << 30).unwrap();
    assert_eq!(
        owned
            .disk_bytes(owned.head().unwrap().active().unwrap())
            .unwrap(),
        2 << 30
    );
    assert_eq!(owned.states().unwrap().readable.len(), 0);
    assert!(matches!(create("c", 1 << 29), Err(Error::DiskSize { .. })));
    let disk_only = save_as(
        &store,
        &owned,
        "d",
        &SaveSpec {
            disk_only: true,
            ..spec()
        },
    )
    .unwrap();
    let origin = Origin::Snapshot {
        snapshot: &disk_only,
        memory: true,
    };
    assert!(matches!(
        store.create_sandbox(record("e"), origin),
        Err(Error::NoMemory)
    ));
    assert!(matches!(
        store.sandbox(&name("e")),
        Err(Error::UnknownSandbox { .. })
    ));
}

#[test]
fn a_layer_that_is_found_again_further_up_is_kept_there_only() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    let put = |bytes: &[u8]| {
        let layer = LayerId::random().unwrap();
        fs::write(owned.disk_layer(&layer), bytes).unwrap();
        layer
    };
    let one = put(b"one");
    let two = put(b"two");
    let one_again = put(b"one");
    let head = owned.head().unwrap();
    owned
        .set_head(&Head {
            disk: vec![one, two, one_again],
            ..head
        })
        .unwrap();
    let snapshot = save_as(&store, &owned, "s", &spec()).unwrap();
    let digests: Vec<_> = snapshot
        .manifest
        .disk
        .layers
        .iter()
        .map(|layer| layer.digest.clone())
        .collect();
    assert_eq!(digests, [Digest::of(b"two"), Digest::of(b"one")]);
}

#[test]
fn memory_as_a_stream_is_in_the_devices() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    let staged = owned.stage_state().unwrap();
    fs::write(staged.path().join("devices"), b"a whole stream").unwrap();
    let state = StateManifest {
        memory: MemoryState::Stream,
        execs: vec![serde_json::json!({"tag": "t", "z": 1, "a": [2]})],
        ..super::manifest(Vec::new(), LayerId::random().unwrap())
    };
    let state = owned.publish_state(staged, state).unwrap();
    let snapshot = store
        .save(&owned, &state.id, &spec(), Target::Unnamed, &Silent)
        .unwrap();
    let memory = snapshot.manifest.memory.as_ref().unwrap();
    assert_eq!(
        (memory.kind, memory.layers.len(), memory.devices.bytes),
        (MemoryKind::Stream, 0, 14)
    );
    assert_eq!(snapshot.manifest.requires, ["commands", "memory-stream"]);
    let origin = Origin::Snapshot {
        snapshot: &snapshot,
        memory: true,
    };
    let copy = store.create_sandbox(record("b"), origin).unwrap();
    let found = copy.state_source(&snapshot.state_id()).unwrap();
    assert_eq!(
        (&found.manifest().memory, &found.manifest().execs),
        (&MemoryState::Stream, &state.execs)
    );
}

#[test]
fn images_and_snapshots_have_one_namespace() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let in_use = |result: Result<(), Error>| matches!(result, Err(Error::NameInUse { .. }));
    let image = owned.record().image_digest.clone();
    assert!(in_use(store.set_image_name(&name("s"), &image)));
    assert!(in_use(store.tag_snapshot(
        &snapshot.digest,
        &name("tiny"),
        true
    )));
    assert!(in_use(store.tag_snapshot(
        &snapshot.digest,
        &name("s"),
        false
    )));
    assert!(in_use(save_as(&store, &owned, "s", &spec()).map(drop)));
    assert!(in_use(store.reserve_name(&name("s"), owned.id())));
    store
        .tag_snapshot(&snapshot.digest, &name("t"), false)
        .unwrap();
    assert!(matches!(
        store.image(&name("t")),
        Err(Error::OtherKind { .. })
    ));
    assert!(matches!(
        store.remove_snapshot_name(&name("tiny")),
        Err(Error::OtherKind { .. })
    ));
    assert!(matches!(
        store.remove_snapshot_name(&name("none")),
        Err(Error::UnknownSnapshot { .. })
    ));
    assert_eq!(store.images().unwrap().len(), 1);
    assert_eq!(store.snapshots().unwrap()[0].names, [name("s"), name("t")]);
    assert!("../x".parse::<Name>().is_err());
}

#[test]
fn a_reserved_name_is_its_sandboxs_and_free_when_that_is_gone() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    let other = grounded(&store, &record("b"));
    store.reserve_name(&name("r"), owned.id()).unwrap();
    store.reserve_name(&name("r"), owned.id()).unwrap();
    assert_eq!(
        store.named(&name("r")).unwrap(),
        Some(Named::Reserved(owned.id().clone()))
    );
    assert!(matches!(
        store.reserve_name(&name("r"), other.id()),
        Err(Error::NameInUse { .. })
    ));
    assert!(matches!(
        save_as(&store, &other, "r", &spec()),
        Err(Error::NameInUse { .. })
    ));
    store.release_name(&name("r"), other.id()).unwrap();
    assert!(store.named(&name("r")).unwrap().is_some());
    save_as(&store, &owned, "r", &spec()).unwrap();
    store.release_name(&name("r"), owned.id()).unwrap();
    assert!(
        matches!(store.named(&name("r")).unwrap(), Some(Named::Snapshot(_))),
        "what was saved stays"
    );
    store.reserve_name(&name("q"), other.id()).unwrap();
    store.remove_sandbox(other).unwrap();
    assert_eq!(store.named(&name("q")).unwrap(), None);
    store.reserve_name(&name("q"), owned.id()).unwrap();
}

#[test]
fn a_snapshot_goes_with_its_last_name_and_pin() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let digest = snapshot.digest.clone();
    store.tag_snapshot(&digest, &name("t"), false).unwrap();
    drop(snapshot);
    assert_eq!(store.remove_snapshot_name(&name("s")).unwrap(), digest);
    let pinned = store.pin(&digest).unwrap();
    store.remove_snapshot_name(&name("t")).unwrap();
    assert_eq!(store.gc(false).unwrap().removed, []);
    assert_whole(&store, &pinned, "pinned");
    drop(pinned);
    store.remove_sandbox(owned).unwrap();
    let planned = store.gc(true).unwrap();
    assert!(
        planned.bytes > 0
            && planned
                .removed
                .iter()
                .any(|garbage| garbage.kind == GarbageKind::Layer)
    );
    assert_eq!(store.gc(false).unwrap(), planned);
    assert_eq!(
        (pool(&store).len(), store.snapshots().unwrap().len()),
        (0, 0)
    );
    assert!(matches!(
        store.pin(&digest),
        Err(Error::UnknownSnapshot { .. })
    ));
    assert_eq!(
        fs::read_dir(store.root().join("staging")).unwrap().count(),
        0
    );
}

#[test]
fn removing_a_middle_leaves_its_children_whole() {
    let (_dir, store) = fresh();
    let (owned, first) = saved(&store, "first");
    write_something(&owned);
    let child = SaveSpec {
        parent: Some(first.digest.clone()),
        ..spec()
    };
    let second = save_as(&store, &owned, "second", &child).unwrap();
    let gone = first.digest.clone();
    drop(first);
    store.remove_sandbox(owned).unwrap();
    store.remove_snapshot_name(&name("first")).unwrap();
    store.gc(false).unwrap();
    assert!(matches!(
        store.snapshot(&gone),
        Err(Error::UnknownSnapshot { .. })
    ));
    assert_whole(
        &store,
        &store.snapshot(&second.digest).unwrap(),
        "the child",
    );
    assert_eq!(second.manifest.parent, Some(gone));
}

#[test]
fn a_save_needs_its_image() {
    let (_dir, store) = fresh();
    let mut owned = store.create_sandbox(record("a"), Origin::Image).unwrap();
    owned
        .set_state(&crate::StateRecord::new(crate::Phase::Running, 1))
        .unwrap();
    assert!(matches!(
        save_as(&store, &owned, "s", &spec()),
        Err(Error::MissingImage { .. })
    ));
    assert_eq!(store.named(&name("s")).unwrap(), None);
}

#[test]
fn gc_keeps_images_that_sandboxes_and_snapshots_need_or_someone_works_with() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let old = owned.record().image_digest.clone();
    let staged = store.stage().unwrap();
    fs::write(staged.path().join("rootfs.raw"), "another").unwrap();
    let record = store.image_by_digest(&old).unwrap().record;
    let spec = super::artifact::image_spec(&record.kernel);
    let new = store.publish_image(staged, spec).unwrap();
    assert_eq!(
        store.gc(false).unwrap().removed,
        [],
        "it was just published, and somebody is about to name it"
    );
    store.set_image_name(&name("tiny"), &new.digest).unwrap();
    store.remove_sandbox(owned).unwrap();
    assert_eq!(store.gc(false).unwrap().removed, []);
    drop(snapshot);
    store.remove_snapshot_name(&name("s")).unwrap();
    let removed = store.gc(false).unwrap().removed;
    assert_eq!(
        removed
            .iter()
            .map(|garbage| (garbage.kind, garbage.id.as_str()))
            .collect::<Vec<_>>(),
        [(GarbageKind::Image, old.as_str())]
    );
}

/// Ends the work after some bytes.
struct Impatient(AtomicU64);

impl Progress for Impatient {
    fn begin(&self, total_bytes: u64) {
        self.0.store(total_bytes / 2, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        let left = self.0.load(Ordering::Relaxed);
        self.0.store(left.saturating_sub(bytes), Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

#[test]
fn a_save_that_is_cancelled_leaves_nothing() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    write_something(&owned);
    let state = captured(&owned, StateKind::Save);
    let spec = SaveSpec {
        compress: true,
        ..spec()
    };
    let impatient = Impatient(AtomicU64::new(u64::MAX));
    let target = name("s");
    let target = Target::Name {
        name: &target,
        replace: false,
    };
    assert!(matches!(
        store.save(&owned, &state.id, &spec, target, &impatient),
        Err(Error::Cancelled)
    ));
    assert_eq!((pool(&store).len(), store.names().unwrap().len()), (0, 1));
    assert_eq!(
        fs::read_dir(store.root().join("staging")).unwrap().count(),
        0
    );
}

/// The reported steps add up to the announced total.
#[derive(Default)]
struct Counting {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress for Counting {
    fn begin(&self, total_bytes: u64) {
        self.total.store(total_bytes, Ordering::Relaxed);
    }

    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        false
    }
}

#[test]
fn verify_reads_every_byte_and_tells_so() {
    let (_dir, store) = fresh();
    for compress in [false, true] {
        let owned = grounded(&store, &record(&format!("a{compress}")));
        write_something(&owned);
        let snapshot = save_as(
            &store,
            &owned,
            &format!("s{compress}"),
            &SaveSpec { compress, ..spec() },
        )
        .unwrap();
        let counting = Counting::default();
        let verified = store.verify_snapshot(&snapshot.digest, &counting).unwrap();
        assert_eq!(verified.damaged, []);
        let below = b"root file system".len() + b"kernel".len() + b"module".len();
        assert_eq!(verified.bytes, snapshot.bytes() + below as u64);
        let total = counting.total.into_inner();
        let done = counting.done.into_inner();
        assert_eq!((total, done), (verified.bytes, verified.bytes));
    }
}

/// Every file that a snapshot needs.
fn files_of(store: &Store, snapshot: &Snapshot) -> Vec<PathBuf> {
    let root = store.root();
    let image = &snapshot.manifest.image;
    let pool = fs::read_dir(root.join("layers"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let image_dir = root.join("images").join(image.digest.as_str());
    let kernel_dir = root.join("kernels").join(image.kernel.as_str());
    let others = [
        root.join("snapshots")
            .join(snapshot.digest.as_str())
            .join("manifest.json"),
        image_dir.join("image.json"),
        image_dir.join("rootfs.raw"),
        kernel_dir.join("bundle.json"),
        kernel_dir.join("kernel"),
        kernel_dir.join("modules/a.ko"),
    ];
    pool.chain(others).collect()
}

#[test]
fn verify_finds_every_flipped_byte_every_cut_and_every_addition() {
    for compress in [false, true] {
        let count = {
            let (_dir, store) = fresh();
            let owned = grounded(&store, &record("a"));
            write_something(&owned);
            let snapshot = save_as(&store, &owned, "s", &SaveSpec { compress, ..spec() }).unwrap();
            files_of(&store, &snapshot).len()
        };
        for index in 0..count {
            let (_dir, store) = fresh();
            let owned = grounded(&store, &record("a"));
            write_something(&owned);
            let snapshot = save_as(&store, &owned, "s", &SaveSpec { compress, ..spec() }).unwrap();
            let path = files_of(&store, &snapshot).swap_remove(index);
            let whole = fs::read(&path).unwrap();
            let flips = [0, whole.len() / 2, whole.len() - 1].map(|at| {
                let mut bytes = whole.clone();
                bytes[at] ^= 1;
                bytes
            });
            let cuts = [
                Vec::new(),
                whole[..whole.len() - 1].to_vec(),
                [&whole[..], b"x"].concat(),
            ];
            for damaged in flips.into_iter().chain(cuts) {
                overwrite(&path, &damaged);
                let verified = store.verify_snapshot(&snapshot.digest, &Silent).unwrap();
                assert_eq!(
                    verified.damaged.len(),
                    1,
                    "{}: {verified:?}",
                    path.display()
                );
                let aside = verified.damaged[0].quarantined.clone().unwrap();
                assert!(aside.exists() && aside.starts_with(store.root().join("quarantine")));
                put_back(&store, &aside, &path, &whole);
            }
            assert_eq!(
                store
                    .verify_snapshot(&snapshot.digest, &Silent)
                    .unwrap()
                    .damaged,
                []
            );
        }
    }
}

/// Moves what was put aside to its place again, whole.
fn put_back(store: &Store, aside: &Path, path: &Path, whole: &[u8]) {
    let below = path.strip_prefix(store.root()).unwrap();
    let place: PathBuf = store.root().join(below.iter().take(2).collect::<PathBuf>());
    fs::rename(aside, place).unwrap();
    overwrite(path, whole);
}

#[test]
fn a_save_heals_what_was_put_aside() {
    let (_dir, store) = fresh();
    let (owned, snapshot) = saved(&store, "s");
    let layer = snapshot.manifest.disk.layers[0].clone();
    overwrite(
        &layer_path(&store, &layer.digest),
        &vec![b'x'; layer.bytes as usize],
    );
    assert_eq!(
        store
            .verify_snapshot(&snapshot.digest, &Silent)
            .unwrap()
            .damaged
            .len(),
        1
    );
    assert!(matches!(
        store.snapshot(&snapshot.digest),
        Err(Error::Corrupt { .. })
    ));
    save_as(&store, &owned, "again", &spec()).unwrap();
    assert_whole(&store, &store.snapshot(&snapshot.digest).unwrap(), "healed");
}

#[test]
fn what_verify_cannot_understand_is_left_where_it_is() {
    let (_dir, store) = fresh();
    let (_owned, snapshot) = saved(&store, "s");
    let json = String::from_utf8(snapshot.manifest.to_bytes())
        .unwrap()
        .replace("\"schema\":1", "\"schema\":2");
    let newer = Digest::of(json.as_bytes());
    let dir = store.root().join("snapshots").join(newer.as_str());
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("manifest.json"), json).unwrap();
    assert!(matches!(
        store.verify_snapshot(&newer, &Silent),
        Err(Error::Manifest { .. })
    ));
    assert!(dir.exists());
    let report = store.gc(false).unwrap();
    assert!(report.removed.is_empty() && report.held_back.unwrap().contains(newer.as_str()));
}

#[test]
fn usage_counts_every_file_once() {
    let (_dir, store) = fresh();
    let before = store.usage().unwrap();
    let owned = grounded(&store, &record("a"));
    let layer = LayerId::random().unwrap();
    fs::write(owned.disk_layer(&layer), vec![7; 1 << 20]).unwrap();
    let head = owned.head().unwrap();
    owned
        .set_head(&Head {
            disk: [head.disk, vec![layer]].concat(),
            ..head
        })
        .unwrap();
    let pinned = save_as(&store, &owned, "s", &spec()).unwrap();
    let of = |usage: &crate::Usage, kind| {
        usage
            .kinds
            .iter()
            .find(|found| found.kind == kind)
            .copied()
            .unwrap()
    };
    let usage = store.usage().unwrap();
    assert_eq!(
        usage.bytes,
        usage.kinds.iter().map(|kind| kind.bytes).sum::<u64>()
    );
    assert!(
        (1 << 20..2 << 20).contains(&(usage.bytes - before.bytes)),
        "{usage:?}"
    );
    assert!(of(&usage, UsageKind::Layers).bytes >= 1 << 20);
    assert_eq!(
        (
            of(&usage, UsageKind::Snapshots).count,
            of(&usage, UsageKind::Sandboxes).count
        ),
        (1, 1)
    );
    assert_eq!(usage.reclaimable_bytes, 0);
    let volume = store.create_volume("v", 1).unwrap().unwrap();
    let data = store.volume_data(&volume.id.parse().unwrap());
    fs::write(data.join("file"), vec![7; 1 << 20]).unwrap();
    let volumes = of(&store.usage().unwrap(), UsageKind::Volumes);
    assert!(volumes.count == 1 && volumes.bytes >= 1 << 20);
    store.remove_sandbox(owned).unwrap();
    fs::remove_file(store.root().join("names/images/s")).unwrap();
    drop(pinned);
    assert!(of(&store.usage().unwrap(), UsageKind::Layers).reclaimable_bytes >= 1 << 20);
}

#[test]
fn of_two_saves_of_one_name_one_wins_and_both_are_whole() {
    let (_dir, store) = fresh();
    let sandboxes: Vec<_> = (0..4)
        .map(|number| grounded(&store, &record(&format!("a{number}"))))
        .collect();
    for round in 0..10 {
        let barrier = Barrier::new(sandboxes.len());
        let text = format!("s{round}");
        let save = |owned: &Owned| {
            write_something(owned);
            barrier.wait();
            save_as(&store, owned, &text, &spec())
        };
        let results: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = sandboxes
                .iter()
                .map(|owned| scope.spawn(|| save(owned)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        assert_eq!(won.len(), 1);
        assert!(
            lost.into_iter()
                .all(|lost| matches!(lost, Err(Error::NameInUse { .. })))
        );
        let winner = won.into_iter().next().unwrap().unwrap();
        assert_eq!(
            store.named(&name(&text)).unwrap(),
            Some(Named::Snapshot(winner.digest.clone()))
        );
        assert_whole(&store, &winner, "the winner");
    }
}

/// Ends the other threads, also when a panic drops it.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Collects until the test ends it. Nothing that it meets is trouble.
fn collect_until(store: &Store, end: &AtomicBool) -> u32 {
    let mut rounds = 0;
    while !end.load(Ordering::Relaxed) {
        assert_eq!(store.gc(false).unwrap().held_back, None);
        rounds += 1;
    }
    rounds
}

/// Everything at once, each on a store of its own handle: nothing that has a name or a pin is ever
/// not whole.
#[test]
fn saves_removals_and_gc_beside_each_other_disturb_nothing() {
    let (dir, store) = fresh();
    let root = dir.path().join("home");
    let steady = saved(&store, "steady").1.digest.clone();
    let end = AtomicBool::new(false);
    let open = || Store::open(&root).unwrap();
    thread::scope(|scope| {
        let collector = scope.spawn(|| collect_until(&open(), &end));
        let ending = Ending(&end);
        let savers: Vec<_> = (0..2)
            .map(|number| scope.spawn(move || save_and_remove(&open(), number)))
            .collect();
        let ended: Vec<_> = savers.into_iter().map(|saver| saver.join()).collect();
        drop(ending);
        assert!(collector.join().unwrap() > 0);
        ended.into_iter().for_each(|saver| saver.unwrap());
    });
    let store = open();
    assert_whole(&store, &store.snapshot(&steady).unwrap(), "steady");
    store.gc(false).unwrap();
    assert_eq!(store.snapshot_digests().unwrap(), [steady]);
    assert_eq!(
        pool(&store).len(),
        store.snapshots().unwrap()[0]
            .snapshot
            .as_ref()
            .unwrap()
            .blobs()
            .count()
    );
}

fn save_and_remove(store: &Store, number: usize) {
    let owned = grounded(store, &record(&format!("a{number}")));
    for round in 0..15 {
        write_something(&owned);
        let text = format!("s{number}");
        let named = save_as(
            store,
            &owned,
            &text,
            &SaveSpec {
                compress: round % 2 == 0,
                ..spec()
            },
        )
        .unwrap();
        assert_whole(store, &named, "named");
        let pinned = store.pin(&named.digest).unwrap();
        drop(named);
        store.remove_snapshot_name(&name(&text)).unwrap();
        assert_whole(store, &pinned, "pinned");
        let origin = Origin::Snapshot {
            snapshot: &pinned,
            memory: true,
        };
        let made = store
            .create_sandbox(record(&format!("b{number}-{round}")), origin)
            .unwrap();
        drop(pinned);
        let state = made.states().unwrap().readable.swap_remove(0);
        assert!(super::is_whole(&made.state_source(&state.id).unwrap()));
        store.remove_sandbox(made).unwrap();
    }
}

#[test]
fn an_image_is_pinned_from_its_publication_to_its_name() {
    let (dir, store) = fresh();
    let root = dir.path().join("home");
    let end = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| collect_until(&Store::open(&root).unwrap(), &end));
        let _ending = Ending(&end);
        for _ in 0..20 {
            let image = ground(&store);
            assert!(store.kernel(&image.record.kernel).is_ok());
            fs::remove_file(store.root().join("names/images/tiny")).unwrap();
        }
    });
}

/// The machine that wrote an overlay may still have it open, whatever its mode is.
#[test]
fn an_overlay_whose_writer_runs_is_read_again_before_it_is_published() {
    let (_dir, store) = fresh();
    let owned = grounded(&store, &record("a"));
    write_something(&owned);
    let state = captured(&owned, StateKind::Checkpoint);
    Owned::seal_state(&owned, &state.id).unwrap();
    let overlay = owned.disk_layer(&state.disk[0]);
    fs::set_permissions(&overlay, PermissionsExt::from_mode(0o600)).unwrap();
    let mut bytes = fs::read(&overlay).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&overlay, bytes).unwrap();
    let save = |spec| store.save(&owned, &state.id, &spec, Target::Unnamed, &Silent);
    let refused = save(SaveSpec {
        writer_runs: true,
        ..spec()
    });
    assert!(
        matches!(&refused, Err(Error::Corrupt { path, .. }) if *path == overlay),
        "{refused:?}"
    );
    assert_eq!(store.snapshots().unwrap().len(), 0);
    // At rest no process has it open, and it is not read again.
    save(spec()).unwrap();
}
