//! Registries through the command line: `pull` and `push` against a real registry, and against
//! servers that misbehave.
//!
//! Always: a failed command leaves the store as it was.

#[path = "../../crates/registry/tests/registry/scripted.rs"]
#[allow(dead_code, reason = "the client's own tests use more of it")]
mod scripted;
#[path = "../../crates/registry/tests/registry/server.rs"]
#[allow(dead_code, reason = "the client's own tests use more of it")]
mod server;

mod artifacts;
mod credentials;
mod damaged;
mod images;
mod interrupted;
mod made;
mod names;
mod shelf;
mod trouble;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use sandtree_registry::{Access, Client, Reference};
use serde_json::Value;
use server::{Registry, run};

use crate::support::{Answer, World, processes_of, text, until};

/// Runs `skopeo copy` between two places.
fn skopeo(arguments: &[&str]) {
    let copy = [
        "--insecure-policy",
        "copy",
        "--quiet",
        "--src-tls-verify=false",
        "--dest-tls-verify=false",
    ];
    run("skopeo", &[&copy, arguments].concat());
}

/// An empty store without images, below a temporary directory.
fn elsewhere() -> (tempfile::TempDir, World) {
    let dir = tempfile::Builder::new()
        .prefix("st-")
        .tempdir()
        .expect("a temporary directory can be made");
    let world = World::empty_at(dir.path().join("home"));
    (dir, world)
}

/// A document of a registry, as JSON.
fn document(registry: &Registry, rest: &str) -> (String, Value) {
    let reference = reference(registry, rest);
    let fetched = client(registry).manifest(&reference).expect("it is there");
    (
        fetched.media_type,
        serde_json::from_slice(&fetched.bytes).expect("it is JSON"),
    )
}

/// Puts a document into a registry.
fn put_document(registry: &Registry, rest: &str, media_type: &str, document: &Value) {
    let bytes = serde_json::to_vec(document).expect("plain data");
    client(registry)
        .push_manifest(&reference(registry, rest), media_type, &bytes)
        .expect("the registry takes it");
}

fn client(registry: &Registry) -> Client {
    Client::new(&registry.host, Access::default()).expect("the registry has a host")
}

fn reference(registry: &Registry, rest: &str) -> Reference {
    format!("{}/{rest}", registry.host)
        .parse()
        .expect("a reference")
}

/// Everything that a store has published or started, by name.
fn content(world: &World) -> BTreeSet<PathBuf> {
    let dirs = [
        "names/images",
        "snapshots",
        "layers",
        "images",
        "kernels",
        "staging",
        "sandboxes",
        "quarantine",
    ];
    let entries = |dir: &str| {
        fs::read_dir(world.home().join(dir))
            .into_iter()
            .flatten()
            .flatten()
    };
    dirs.iter()
        .flat_map(|dir| entries(dir).map(|entry| entry.path()))
        .collect()
}

/// Asserts that a command fails with these words, that the store is unchanged, and that no process
/// uses it.
#[track_caller]
fn refused(world: &World, arguments: &[&str], words: &[&str]) -> Answer {
    unchanged(world, || {
        let answer = world.run(arguments);
        answer.failed_with(words);
        assert!(!answer.err().contains("panicked"), "{answer:?}");
        answer
    })
}

/// Asserts that `work` leaves a store unchanged.
#[track_caller]
fn unchanged<T>(world: &World, work: impl FnOnce() -> T) -> T {
    let before = content(world);
    let done = work();
    assert_eq!(content(world), before);
    until("no process uses the store", || {
        processes_of(world.home()).is_empty()
    });
    done
}

/// Removes sandboxes, and asserts that nothing of them is left.
#[track_caller]
fn end(world: &World, sandboxes: &[&str]) {
    if !sandboxes.is_empty() {
        world.ok([&["rm", "-f"], sandboxes].concat());
    }
    world.assert_empty();
}
