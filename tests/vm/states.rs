//! States through the command line: checkpoint, revert, undo, redo, log, pause, resume, warm
//! images, kernel states.

mod kernel;
mod places;
mod rest;
mod spares;
mod tree;
mod trouble;
mod warm;

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::support::{Answer, World, dir_of, is_alive, until};

/// A process of a sandbox: `qemu_pid` or `keeper_pid`.
fn pid(world: &World, sandbox: &str, field: &str) -> u32 {
    let info = world.inspect(sandbox);
    u32::try_from(
        info[field]
            .as_u64()
            .unwrap_or_else(|| panic!("no {field}: {info}")),
    )
    .unwrap()
}

/// Waits until an unused keeper has ended.
fn until_gone(pid: u32) {
    until(&format!("process {pid} ends"), || !is_alive(pid));
}

/// The error that a command prints with `--json`.
fn json_error(answer: &Answer) -> Value {
    assert_eq!(answer.code, 125, "{answer:?}");
    let said: Value =
        serde_json::from_slice(&answer.stderr).unwrap_or_else(|e| panic!("{e}: {answer:?}"));
    said["error"].clone()
}

/// The tags of a sandbox's states, oldest first; a dash for a state without a tag.
fn tags(world: &World, sandbox: &str) -> Vec<String> {
    let states = world.json(["log", sandbox]);
    let tag = |state: &Value| state["tag"].as_str().unwrap_or("-").to_owned();
    states.as_array().unwrap().iter().map(tag).collect()
}

/// The layers below a directory with this extension: `.mem` or `.qcow2`.
fn layers(dir: &std::path::Path, end: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.to_string_lossy().ends_with(end))
        .collect()
}

fn remove(world: &World, sandboxes: &[&str]) {
    world.ok([&["rm", "-f"], sandboxes].concat());
    world.assert_empty();
}
