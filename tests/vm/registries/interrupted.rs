//! Ctrl-C while a registry does not answer.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use super::scripted::Server;
use super::shelf::{MANIFEST, Shelf, break_off, digest, stall};
use super::unchanged;
use crate::support::margin::assert_within;
use crate::support::{World, finish, kill, until};

/// A third of what a server may stay silent before it is given up.
const AT_ONCE: Duration = Duration::from_secs(20);

/// Starts the command, waits until it requests the path that the server does not answer, and
/// interrupts it.
#[track_caller]
fn ends_at_once(world: &World, arguments: &[&str], server: &Server, stalls_at: &str) {
    unchanged(world, || {
        let mut command = world.command();
        let child = command
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        until("the server is asked", || {
            server
                .requests()
                .iter()
                .any(|request| request.path.starts_with(stalls_at))
        });
        let begin = Instant::now();
        kill(child.id(), "INT");
        let answer = finish(child);
        assert_eq!(answer.code, 130, "{answer:?}");
        assert_within(AT_ONCE, begin);
    });
}

fn stalling_at(path: &str) -> Server {
    let path = path.to_owned();
    Shelf::new().start(move |_, request, peer| {
        let ours = request.path.starts_with(&path);
        if ours {
            stall(peer);
        }
        ours
    })
}

#[test]
fn a_pull_that_is_interrupted_ends_at_once_and_leaves_nothing() {
    let world = World::new();
    let layer = Shelf::new().layer;
    for path in [MANIFEST, "/v2/x/blobs/", &layer] {
        let server = stalling_at(path);
        ends_at_once(
            &world,
            &["pull", &format!("{}/x:1", server.host)],
            &server,
            path,
        );
    }
    // In the middle of a layer.
    let half = layer.clone();
    let at = layer.clone();
    let server = Shelf::new().start(move |shelf, request, peer| {
        let ours = request.path == half;
        if ours {
            break_off(peer, shelf.bytes(&half));
            stall(peer);
        }
        ours
    });
    ends_at_once(
        &world,
        &["pull", &format!("{}/x:1", server.host)],
        &server,
        &at,
    );
    world.assert_empty();
}

#[test]
fn a_pull_of_an_artifact_that_is_interrupted_ends_at_once_and_leaves_nothing() {
    let world = World::new();
    let shelf = Shelf::edited(b"packed".to_vec(), |manifest, _| {
        let another = digest(b"another").replace("sha256:", "");
        manifest["artifactType"] = "application/vnd.sandtree.image.v1".into();
        manifest["annotations"] = json!({ "dev.sandtree.digest": another });
        let said =
            json!({ "dev.sandtree.member.digest": another, "dev.sandtree.member.bytes": "7" });
        manifest["layers"][0]["mediaType"] = "application/vnd.sandtree.member.v1+zstd".into();
        manifest["layers"][0]["annotations"] = said;
    });
    let member = shelf.layer.clone();
    let server = shelf.start(|shelf, request, peer| {
        let ours = request.path == shelf.layer;
        if ours {
            stall(peer);
        }
        ours
    });
    ends_at_once(
        &world,
        &["pull", &format!("{}/x:1", server.host)],
        &server,
        &member,
    );
    world.assert_empty();
}

/// The next program that opens the store removes what a killed process left.
#[test]
fn the_remains_of_a_killed_pull_are_removed() {
    let world = World::new();
    let server = stalling_at(&Shelf::new().layer);
    unchanged(&world, || {
        let mut command = world.command();
        let mut child = command
            .args(["pull", &format!("{}/x:1", server.host)])
            .spawn()
            .unwrap();
        until("the layer is asked for", || server.requests().len() == 3);
        kill(child.id(), "KILL");
        child.wait().unwrap();
        world.ok(["image", "ls"]);
    });
    world.assert_empty();
}

#[test]
fn a_push_that_is_interrupted_ends_at_once() {
    let world = World::new();
    let server = stalling_at("/v2/x/blobs/");
    ends_at_once(
        &world,
        &["push", "tiny", &format!("{}/x:1", server.host)],
        &server,
        "/v2/x/blobs/",
    );
    world.assert_empty();
}
