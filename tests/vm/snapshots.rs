//! Snapshots through the command line: export and import, damage, garbage collection, differences.
//!
//! Always: a test changes a file of a store by putting another file in its place, because stores of
//! tests share files by hard links, also with the store that all of them are made from.

use crate::support::{entries, held, text};

mod beside;
mod collected;
mod damaged;
mod differs;
mod indexed;
mod refused;
mod travels;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sandtree_store::{Digest, ImageSpec, Store};
use serde_json::Value;

use crate::support::World;

fn digest(world: &World, reference: &str) -> String {
    text(&world.json(["snapshot", "inspect", reference])["digest"]).to_owned()
}

fn image_digest(world: &World, snapshot: &str) -> String {
    text(&world.json(["snapshot", "inspect", snapshot])["manifest"]["image"]["digest"]).to_owned()
}

/// The names of all snapshots, sorted; a dash for one without a name.
fn names(world: &World) -> Vec<String> {
    let listed = world.json(["snapshot", "ls"]);
    let of = |snapshot: &Value| match snapshot["names"].as_array().unwrap().as_slice() {
        [] => vec!["-".to_owned()],
        names => names.iter().map(|name| text(name).to_owned()).collect(),
    };
    let mut names: Vec<String> = listed.as_array().unwrap().iter().flat_map(of).collect();
    names.sort();
    names
}

/// Every file below a directory, with its inode and length.
fn files(dir: &Path) -> BTreeMap<PathBuf, (u64, u64)> {
    let mut found = BTreeMap::new();
    for path in entries(dir) {
        let stat = fs::symlink_metadata(&path).unwrap();
        if stat.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path, (stat.ino(), stat.len()));
        }
    }
    found
}

/// What a store has published, file by file.
fn published(world: &World) -> BTreeMap<PathBuf, (u64, u64)> {
    let dirs = [
        "names/images",
        "snapshots",
        "layers",
        "images",
        "kernels",
        "quarantine",
    ];
    dirs.iter()
        .flat_map(|dir| files(&world.home().join(dir)))
        .collect()
}

fn assert_nothing_staged(world: &World) {
    assert_eq!(entries(&world.home().join("staging")), BTreeSet::new());
}

/// Replaces a file by one with other content; other links to the old file are not affected.
fn put(path: &Path, content: &[u8]) {
    let beside = path.with_extension("put");
    fs::write(&beside, content).unwrap();
    fs::rename(&beside, path).unwrap();
}

/// A directory for stores and files of a test, on a file system in memory that everyone may use.
fn in_memory() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("st-")
        .tempdir_in("/dev/shm")
        .expect("there is a file system in memory")
}

/// A running sandbox that holds `word`, saved with its memory.
fn saved_with_memory(world: &World, sandbox: &str, word: &str, name: &str) {
    world.start(sandbox, &[]);
    held::begin(world, sandbox, word);
    let saved = world.json(["save", sandbox, name, "--memory"]);
    assert_eq!(
        (&saved["memory"], &saved["consistency"]),
        (&true.into(), &"exact".into()),
        "{saved}"
    );
}

/// A stopped sandbox whose disk holds `word`.
fn stopped(world: &World, sandbox: &str, word: &str) {
    world.start(sandbox, &[]);
    assert_eq!(
        world
            .sh(sandbox, &format!("echo {word} > /srv/word; sync"))
            .code,
        0
    );
    world.ok(["stop", sandbox]);
}

/// Removes sandboxes and snapshots, and asserts that nothing of them is left.
fn remove(world: &World, sandboxes: &[&str]) {
    if !sandboxes.is_empty() {
        world.ok([&["rm", "-f"], sandboxes].concat());
    }
    for name in names(world).iter().filter(|name| *name != "-") {
        world.ok(["snapshot", "rm", name]);
    }
    world.ok(["gc"]);
    assert_eq!(entries(&world.home().join("snapshots")), BTreeSet::new());
    assert_eq!(entries(&world.home().join("layers")), BTreeSet::new());
    world.assert_empty();
}

/// Replaces an image under its name, as another version of the program does. Returns the new
/// digest.
fn rebuild_image(world: &World) -> String {
    let store = Store::open(world.home()).unwrap();
    let name = "tiny".parse().unwrap();
    let old = store.image(&name).unwrap();
    let staged = store.stage().unwrap();
    fs::copy(old.rootfs(), staged.path().join("rootfs.raw")).unwrap();
    let mut defaults = old.record.defaults.clone();
    defaults.env.insert("REBUILT".into(), "yes".into());
    let arch = old.record.arch;
    let kernel = old.record.kernel.clone();
    let init = old.record.init;
    let spec = ImageSpec {
        arch,
        kernel,
        init,
        defaults,
        disk_bytes: old.record.disk_bytes,
    };
    let new = store.publish_image(staged, spec).unwrap();
    store.set_image_name(&name, &new.digest).unwrap();
    assert_ne!(new.digest, old.digest);
    new.digest.to_string()
}

fn content_digest(path: &Path) -> String {
    Digest::of(&fs::read(path).unwrap()).to_string()
}
