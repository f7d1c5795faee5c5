//! A list is the same with the index, without it, and with anything in its place.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Barrier;

use rusqlite::Connection;

use crate::{Digest, SnapshotManifest, SnapshotSummary, Store};

const VECTOR: &[u8] = include_bytes!("../../../../docs/vectors/snapshot-manifest.json");
const PAGE: u64 = 4096;

struct World {
    store: Store,
    dir: tempfile::TempDir,
}

impl World {
    fn of(snapshots: u64) -> World {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let world = World { store, dir };
        (0..snapshots).for_each(|number| drop(world.publish(number)));
        world
    }

    /// A snapshot with a name, as the listing finds it.
    fn publish(&self, number: u64) -> Digest {
        let (manifest, _) = SnapshotManifest::parse(VECTOR).unwrap();
        let labels = [("number".to_owned(), format!("{number:08}").repeat(8))].into();
        let bytes = SnapshotManifest {
            created_at_unix_ms: number,
            labels,
            ..manifest
        }
        .to_bytes();
        let digest = Digest::of(&bytes);
        fs::create_dir(self.manifest(&digest).parent().unwrap()).unwrap();
        fs::write(self.manifest(&digest), bytes).unwrap();
        fs::write(
            self.dir.path().join(format!("names/images/s-{number}")),
            format!("snapshot {digest}\n"),
        )
        .unwrap();
        digest
    }

    fn manifest(&self, digest: &Digest) -> PathBuf {
        self.dir
            .path()
            .join("snapshots")
            .join(digest.as_str())
            .join("manifest.json")
    }

    fn index(&self) -> PathBuf {
        self.dir.path().join("index.sqlite")
    }

    #[track_caller]
    fn list(&self) -> Vec<SnapshotSummary> {
        let listing = self.store.list_snapshots().unwrap();
        assert_eq!(listing.trouble, None);
        listing.snapshots
    }

    /// How many rows the index has.
    fn rows(&self) -> u64 {
        let database = Connection::open(self.index()).unwrap();
        database
            .query_row("SELECT count(*) FROM snapshots", [], |row| row.get(0))
            .unwrap()
    }

    /// Whether the index alone answers for a snapshot: its manifest is made unreadable in place,
    /// and good again.
    fn is_known(&self, digest: &Digest) -> bool {
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.manifest(digest))
            .unwrap();
        file.write_all_at(b"#", 0).unwrap();
        let listed = self
            .list()
            .into_iter()
            .find(|summary| summary.digest == *digest)
            .unwrap();
        file.write_all_at(b"{", 0).unwrap();
        listed.unreadable.is_none()
    }
}

#[test]
fn the_index_tells_what_manifests_say() {
    let world = World::of(3);
    let made = world.list();
    let told = world.list();
    assert_eq!(told, made);
    assert_eq!(world.rows(), 3);
    assert!(
        told.iter()
            .all(|summary| summary.unreadable.is_none() && summary.names.len() == 1)
    );
    for summary in &told {
        let snapshot = world.store.read_snapshot(&summary.digest).unwrap();
        assert_eq!(
            *summary,
            SnapshotSummary::new(&snapshot, summary.names.clone())
        );
        assert!(world.is_known(&summary.digest));
    }
    let mode = fs::metadata(world.index()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn what_comes_goes_or_is_named_otherwise_is_seen_at_once() {
    let world = World::of(2);
    world.list();
    let new = world.publish(7);
    fs::rename(
        world.dir.path().join("names/images/s-0"),
        world.dir.path().join("names/images/other"),
    )
    .unwrap();
    let listed = world.list();
    assert_eq!(listed.len(), 3);
    let mut names: Vec<String> = listed
        .iter()
        .flat_map(|summary| &summary.names)
        .map(ToString::to_string)
        .collect();
    names.sort();
    assert_eq!(names, ["other", "s-1", "s-7"]);

    fs::remove_dir_all(world.manifest(&new).parent().unwrap()).unwrap();
    let lost: Vec<_> = world
        .list()
        .into_iter()
        .filter(|summary| summary.unreadable.is_some())
        .collect();
    assert_eq!(
        (lost.len(), &lost[0].digest),
        (1, &new),
        "its name is still there"
    );
    fs::remove_file(world.dir.path().join("names/images/s-7")).unwrap();
    assert_eq!(world.list().len(), 2);
    assert_eq!(
        world.rows(),
        2,
        "a row of a snapshot that is gone goes, too"
    );
}

#[test]
fn a_manifest_that_is_another_file_is_read_again() {
    let world = World::of(1);
    let digest = world.list().remove(0).digest;
    fs::write(world.manifest(&digest), "cut").unwrap();
    let reason = world
        .list()
        .remove(0)
        .unreadable
        .expect("it is not what it was");
    assert!(reason.contains("manifest.json"), "{reason}");
    fs::remove_file(world.manifest(&digest)).unwrap();
    assert!(world.list().remove(0).unreadable.is_some());
}

/// Layers are looked for only where one may be missing; the manifests here list some that never
/// were.
#[test]
fn where_something_was_put_aside_the_list_tells_what_lacks_it() {
    let world = World::of(2);
    let before = world.list();
    let aside = world
        .dir
        .path()
        .join(format!("quarantine/layer-{}", Digest::of(b"x")));
    fs::write(&aside, "damaged").unwrap();
    for summary in world.list() {
        let reason = summary.unreadable.expect("its layers are not there");
        assert!(reason.contains("missing"), "{reason}");
    }
    fs::remove_file(aside).unwrap();
    assert_eq!(world.list(), before);
}

#[test]
fn a_name_that_says_nothing_is_listed_until_it_is_put_aside() {
    let world = World::of(1);
    let path = world.dir.path().join("names/images/odd");
    fs::write(&path, "nothing known").unwrap();
    let is_odd =
        |summary: &SnapshotSummary| summary.names.iter().any(|name| name.as_str() == "odd");
    let listed = world.list().into_iter().find(is_odd).expect("it is listed");
    assert!(listed.unreadable.is_some());
    for name in ["odd", "s-0", "never"] {
        world.store.put_name_aside(&name.parse().unwrap()).unwrap();
    }
    assert_eq!(
        fs::read(world.dir.path().join("quarantine/name-odd")).unwrap(),
        b"nothing known"
    );
    assert!(!path.exists());
    let names: Vec<_> = world
        .list()
        .into_iter()
        .flat_map(|summary| summary.names)
        .collect();
    assert_eq!(names, ["s-0".parse().unwrap()], "what is something stays");
}

#[test]
fn layers_are_looked_at_only_while_one_that_was_put_aside_is_missing() {
    // Nothing that these snapshots list is in the pool, so that a look at their layers is seen.
    let world = World::of(2);
    let layer = Digest::of(b"layer");
    let path = |text: String| world.dir.path().join(text);
    let looked = || {
        world
            .list()
            .iter()
            .all(|summary| summary.unreadable.is_some())
    };
    for other in [
        format!("quarantine/snapshot-{layer}"),
        "quarantine/layer-1".into(),
        "quarantine/mine".into(),
    ] {
        fs::write(path(other), "").unwrap();
    }
    assert!(!looked(), "none of them is a part of a snapshot");
    let places = |kind: &str| match kind {
        "layer" => vec![format!("layers/{layer}"), format!("layers/{layer}.zst")],
        kind => vec![format!("{kind}s/{layer}")],
    };
    for (kind, number) in [
        ("layer", "-1"),
        ("layer", ""),
        ("image", ""),
        ("kernel", "-2"),
    ] {
        let aside = format!("quarantine/{kind}-{layer}{number}");
        fs::write(path(aside.clone()), "").unwrap();
        assert!(looked(), "{aside}");
        for back in places(kind) {
            fs::write(path(back.clone()), "").unwrap();
            assert!(!looked(), "{back} is back");
            fs::remove_file(path(back)).unwrap();
        }
        fs::remove_file(path(aside)).unwrap();
    }
}

#[test]
fn without_an_index_the_list_is_the_same_and_makes_one() {
    let world = World::of(5);
    let expected = world.list();
    fs::remove_file(world.index()).unwrap();
    assert_eq!(world.list(), expected);
    assert_eq!(world.rows(), 5);
}

#[test]
fn an_index_that_is_cut_anywhere_changes_nothing() {
    let world = World::of(40);
    let expected = world.list();
    let good = fs::read(world.index()).unwrap();
    for len in (0..good.len()).step_by(PAGE as usize / 4) {
        fs::write(world.index(), &good[..len]).unwrap();
        assert_eq!(
            world.store.list_snapshots().unwrap().snapshots,
            expected,
            "cut to {len}"
        );
        assert_eq!(world.list(), expected, "after it was cut to {len}");
        assert_eq!(
            world.rows(),
            40,
            "it was made anew after it was cut to {len}"
        );
    }
}

#[test]
fn an_index_with_any_page_overwritten_changes_nothing() {
    let world = World::of(40);
    let expected = world.list();
    let good = fs::read(world.index()).unwrap();
    for page in 0..good.len() as u64 / PAGE {
        for (what, change) in [
            ("flipped", flip as fn(&mut [u8])),
            ("zeroed", |page| page.fill(0)),
            ("bits", sparse),
        ] {
            let mut bytes = good.clone();
            change(&mut bytes[(page * PAGE) as usize..((page + 1) * PAGE) as usize]);
            fs::write(world.index(), &bytes).unwrap();
            assert_eq!(
                world.store.list_snapshots().unwrap().snapshots,
                expected,
                "page {page} {what}"
            );
            assert_eq!(
                world.store.list_snapshots().unwrap().snapshots,
                expected,
                "after page {page} was {what}"
            );
        }
    }
}

fn flip(page: &mut [u8]) {
    page.iter_mut().for_each(|byte| *byte = !*byte);
}

fn sparse(page: &mut [u8]) {
    page.iter_mut().step_by(37).for_each(|byte| *byte ^= 0x10);
}

#[test]
fn a_damaged_index_is_reported_once_and_rebuilt() {
    let world = World::of(3);
    let expected = world.list();
    fs::write(world.index(), [0x55; 9000]).unwrap();
    let listing = world.store.list_snapshots().unwrap();
    assert_eq!(listing.snapshots, expected);
    assert!(
        listing
            .trouble
            .unwrap()
            .starts_with("the index is damaged: ")
    );
    assert_eq!(world.list(), expected);
    assert_eq!(world.rows(), 3);
}

#[test]
fn a_row_that_says_something_else_is_not_believed() {
    let world = World::of(2);
    let expected = world.list();
    for change in [
        "summary = CAST(replace(CAST(summary AS TEXT), 'tiny', 'tony') AS BLOB)",
        "inode = inode + 1",
        "bytes = 2 * bytes",
        "digest = CAST(replace(CAST(digest AS TEXT), 'a', 'b') AS BLOB)",
        "checksum = 'x', summary = 5",
    ] {
        let changed = Connection::open(world.index())
            .unwrap()
            .execute(&format!("UPDATE snapshots SET {change}"), []);
        assert_eq!(changed.unwrap(), 2, "{change}");
        let listing = world.store.list_snapshots().unwrap();
        assert_eq!(listing.snapshots, expected, "{change}");
        let trouble = "the index is damaged: a row is not what was written";
        assert_eq!(listing.trouble.as_deref(), Some(trouble), "{change}");
        assert_eq!(
            (world.list(), world.rows()),
            (expected.clone(), 2),
            "{change}"
        );
    }
}

#[test]
fn an_index_of_another_version_is_made_anew() {
    let world = World::of(2);
    let expected = world.list();
    Connection::open(world.index())
        .unwrap()
        .pragma_update(None, "user_version", 99)
        .unwrap();
    let listing = world.store.list_snapshots().unwrap();
    assert_eq!(
        listing.trouble.as_deref(),
        Some("the index is damaged: its version is 99, not 2")
    );
    assert_eq!(
        (listing.snapshots, world.list()),
        (expected.clone(), expected)
    );
}

#[test]
fn an_index_that_another_holds_is_reported_and_left_alone() {
    let world = World::of(2);
    let expected = world.list();
    let holder = Connection::open(world.index()).unwrap();
    holder.execute_batch("BEGIN EXCLUSIVE").unwrap();
    let listing = world.store.list_snapshots().unwrap();
    assert_eq!(listing.snapshots, expected);
    assert!(
        listing
            .trouble
            .unwrap()
            .starts_with("the index cannot be used: ")
    );
    holder.execute_batch("ROLLBACK").unwrap();
    assert_eq!(world.list(), expected);
}

#[test]
fn something_else_in_the_place_of_the_index_is_reported_and_reindex_fails_or_replaces_it() {
    let world = World::of(2);
    let expected = world.list();
    fs::remove_file(world.index()).unwrap();
    fs::create_dir(world.index()).unwrap();
    let listing = world.store.list_snapshots().unwrap();
    assert_eq!(listing.snapshots, expected);
    assert!(listing.trouble.is_some());
    assert_eq!(world.store.reindex().unwrap().snapshots, 2);
    assert_eq!(world.list(), expected);
}

/// What a process leaves that is killed in the middle of a commit: changed pages, and the journal
/// to undo them.
#[test]
fn a_commit_that_was_killed_is_undone() {
    let world = World::of(300);
    let expected = world.list();
    let writer = Connection::open(world.index()).unwrap();
    writer
        .execute_batch("PRAGMA cache_size = 1; PRAGMA cache_spill = 1; BEGIN")
        .unwrap();
    writer
        .execute(
            "UPDATE snapshots SET summary = zeroblob(600), bytes = 1",
            [],
        )
        .unwrap();
    let files = ["index.sqlite", "index.sqlite-journal"].map(|name| world.dir.path().join(name));
    let torn = files
        .clone()
        .map(|file| fs::read(file).expect("a commit is under way"));
    drop(writer);
    for (file, bytes) in files.iter().zip(&torn) {
        fs::write(file, bytes).unwrap();
    }
    assert_eq!(world.list(), expected);
    assert_eq!(world.rows(), 300);
    assert!(!files[1].exists(), "the journal has done its work");

    // A journal that lost its database, or a database that lost its journal.
    fs::write(&files[0], &torn[0]).unwrap();
    assert_eq!(world.store.list_snapshots().unwrap().snapshots, expected);
    fs::remove_file(&files[0]).unwrap();
    fs::write(&files[1], &torn[1]).unwrap();
    assert_eq!(world.store.list_snapshots().unwrap().snapshots, expected);
    assert_eq!(world.list(), expected);
}

#[test]
fn reindex_makes_it_anew_from_manifests() {
    let world = World::of(4);
    let expected = world.list();
    fs::write(world.index(), "nonsense").unwrap();
    fs::write(world.manifest(&expected[0].digest), "nonsense").unwrap();
    assert_eq!(
        world.store.reindex().unwrap().snapshots,
        3,
        "one cannot be read"
    );
    assert_eq!(world.rows(), 3);
    assert_eq!(world.list()[1..], expected[1..]);
}

#[test]
fn many_who_list_and_publish_at_once_all_see_the_truth() {
    const EACH: u64 = 20;
    let world = &World::of(10);
    let start = &Barrier::new(4);
    std::thread::scope(|scope| {
        for worker in 0..4_u64 {
            scope.spawn(move || {
                let store = Store::open(world.dir.path()).unwrap();
                start.wait();
                for number in 0..EACH {
                    let mine = world.publish(1000 * (worker + 1) + number);
                    if number == EACH / 2 && worker == 0 {
                        let mut file = fs::OpenOptions::new()
                            .write(true)
                            .open(world.index())
                            .unwrap();
                        file.write_all(&[0x77; 64]).unwrap();
                    }
                    let listed = store.list_snapshots().unwrap().snapshots;
                    let listed = listed.into_iter().find(|summary| summary.digest == mine);
                    assert_eq!(
                        listed.expect("what is published is listed").unreadable,
                        None
                    );
                }
            });
        }
    });
    // The last process may have found it damaged only when it wrote.
    world.store.list_snapshots().unwrap();
    assert_eq!(world.list().len(), 10 + 4 * EACH as usize);
}
