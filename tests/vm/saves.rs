//! Saves through the command line: of a running guest, with memory, at rest, on stop; and sandboxes
//! that start from them.

mod auto;
mod hot;
mod memory;
mod names;
mod repeat;
mod rest;
mod thaw;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::{Answer, World, dir_of, say};

/// Runs `sandtree save ARGS` and returns its answer.
#[track_caller]
fn save(world: &World, args: &[&str]) -> Value {
    world.json([&["save"], args].concat())
}

/// Starts a sandbox from a snapshot in the background.
fn start_from(world: &World, snapshot: &str, name: &str, options: &[&str]) -> Value {
    world.json([&["run", "-d", "--name", name], options, &[snapshot]].concat())
}

/// Runs a shell line in a temporary sandbox of a snapshot.
#[track_caller]
fn say_in(world: &World, snapshot: &str, line: &str) -> String {
    world
        .ok(["run", snapshot, "--", "sh", "-c", line])
        .out()
        .trim_end()
        .to_owned()
}

/// A file of a snapshot, read without a guest: by a diff against another snapshot, in which the
/// file is empty or missing.
#[track_caller]
fn read(world: &World, snapshot: &str, beyond: &str, path: &str) -> String {
    let compared = world.ok(["snapshot", "diff", beyond, snapshot, "--content", path]);
    let lines = compared
        .out()
        .lines()
        .filter(|line| !line.starts_with("+++"))
        .filter_map(|line| line.strip_prefix('+'));
    lines.collect::<Vec<_>>().join("\n")
}

fn manifest(world: &World, snapshot: &str) -> Value {
    world.json(["snapshot", "inspect", snapshot])["manifest"].clone()
}

/// The digests of all files that a snapshot consists of.
fn layers(world: &World, snapshot: &str) -> Vec<String> {
    let manifest = manifest(world, snapshot);
    let listed = [&manifest["disk"]["layers"], &manifest["memory"]["layers"]];
    let blobs = listed.into_iter().filter_map(Value::as_array).flatten();
    let devices = manifest["memory"].get("devices");
    blobs
        .chain(devices)
        .map(|blob| {
            blob["digest"]
                .as_str()
                .expect("a blob has a digest")
                .to_owned()
        })
        .collect()
}

/// The names of all snapshots.
fn snapshots(world: &World) -> BTreeSet<String> {
    let listed = world.json(["snapshot", "ls"]);
    let names = listed
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|snapshot| snapshot["names"].as_array().unwrap());
    names
        .map(|name| name.as_str().unwrap().to_owned())
        .collect()
}

fn entries(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().into_string().expect("names are text"))
        .collect()
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

/// Asserts that a command failed with these words in its message and in its hint.
#[track_caller]
fn refused(answer: &Answer, words: &[&str], hints: &[&str]) {
    answer.failed_with(words);
    let said = answer.err();
    let (_, hint) = said
        .split_once("hint: ")
        .unwrap_or_else(|| panic!("there is no hint: {said}"));
    for word in hints {
        assert!(hint.contains(word), "{word:?} is not in the hint: {said}");
    }
}

/// Asserts that nothing is left of any snapshot: no name, no manifest, no layer.
#[track_caller]
fn assert_no_snapshots(world: &World) {
    for (dir, known) in [
        ("names/images", vec!["tiny".to_owned()]),
        ("snapshots", vec![]),
        ("layers", vec![]),
    ] {
        assert_eq!(entries(&world.home().join(dir)), known, "in {dir}");
    }
}

/// Removes sandboxes and every snapshot, and asserts that nothing else was left.
#[track_caller]
fn end(world: &World, sandboxes: &[&str]) {
    if !sandboxes.is_empty() {
        world.ok([&["rm", "-f"], sandboxes].concat());
    }
    let names = snapshots(world);
    if !names.is_empty() {
        world.ok(["snapshot", "rm"]
            .into_iter()
            .chain(names.iter().map(String::as_str)));
    }
    assert_no_snapshots(world);
    world.assert_empty();
}
