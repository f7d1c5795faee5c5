//! Registries that fail, send false content or redirect: each is reported with the failure and its
//! address, and leaves the store as it was.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;

use super::refused;
use super::scripted::{Peer, Request, Server, head, reply};
use super::shelf::{MANIFEST, Shelf, boast, bomb, break_off, digest};
use crate::support::World;
use crate::support::margin::assert_within;
use crate::support::mount::Mount;

fn reference(server: &Server) -> String {
    format!("{}/x:1", server.host)
}

/// Asserts that pulling from such a registry fails with these words, and with its own name.
#[track_caller]
fn fails(world: &World, server: &Server, words: &[&str]) -> String {
    let reference = reference(server);
    refused(
        world,
        &["pull", &reference],
        &[words, &[&format!("cannot pull {reference}")]].concat(),
    )
    .err()
}

/// A shelf whose answers for one path come from the test.
fn instead(
    shelf: Shelf,
    path: &str,
    answer: impl Fn(&Shelf, &Request, &mut Peer) + Send + Sync + 'static,
) -> Server {
    let path = path.to_owned();
    shelf.start(move |shelf, request, peer| {
        let ours = request.path == path;
        if ours {
            answer(shelf, request, peer);
        }
        ours
    })
}

fn layer_instead(answer: impl Fn(&Shelf, &Request, &mut Peer) + Send + Sync + 'static) -> Server {
    let shelf = Shelf::new();
    let layer = shelf.layer.clone();
    instead(shelf, &layer, answer)
}

#[test]
fn content_that_does_not_match_the_request_is_refused() {
    let world = World::new();
    let shelf = Shelf::new();
    let wanted = shelf.layer.rsplit('/').next().unwrap().to_owned();
    let size = shelf.bytes(&shelf.layer).len();
    let damaged = layer_instead(|shelf, request, peer| {
        let mut bytes = shelf.bytes(&shelf.layer).to_vec();
        bytes[1000] ^= 1;
        reply(peer, request, 200, &[], &bytes);
    });
    let said = fails(&world, &damaged, &[&wanted, "has digest", "instead of"]);
    assert!(
        said.contains("hint: the registry, or something on the way, is damaged"),
        "{said}"
    );
    let short = layer_instead(|shelf, request, peer| {
        let bytes = shelf.bytes(&shelf.layer);
        reply(peer, request, 200, &[], &bytes[..bytes.len() - 1]);
    });
    fails(
        &world,
        &short,
        &[
            &wanted,
            &format!("only {} bytes instead of {size}", size - 1),
        ],
    );
    let endless = layer_instead(|_, _, peer| {
        head(peer, 200, &[]);
        while peer.get_mut().write_all(&[7; 10_000]).is_ok() {}
    });
    fails(
        &world,
        &endless,
        &[&wanted, "at least", &format!("instead of {size}")],
    );
    // The manifest gives a smaller size than the layer has.
    let lies = Shelf::edited(b"not so many".to_vec(), |manifest, _| {
        manifest["layers"][0]["size"] = 3.into()
    });
    fails(
        &world,
        &lies.start(|_, _, _| false),
        &["blob sha256:", "instead of 3"],
    );
    // The configuration names another content than the layer has.
    let other = |_: &mut serde_json::Value, config: &mut serde_json::Value| {
        config["rootfs"]["diff_ids"][0] = digest(b"another").into();
    };
    let shelf = Shelf::edited(Shelf::new().bytes(&wanted_path(&wanted)).to_vec(), other);
    fails(
        &world,
        &shelf.start(|_, _, _| false),
        &[&wanted, "is not what the image's configuration says"],
    );
    // A manifest under a wrong digest.
    let tag = Shelf::new().start(|_, _, _| false);
    let by_digest = format!("{}/x@{}", tag.host, digest(b"another"));
    refused(
        &world,
        &["pull", &by_digest],
        &["there is no manifest", &digest(b"another")],
    );
    world.assert_empty();
}

fn wanted_path(digest: &str) -> String {
    format!("/v2/x/blobs/{digest}")
}

#[test]
fn a_lost_connection_is_resumed_or_reported() {
    let world = World::new();
    let once = layer_instead(|shelf, request, peer| match request.header("range") {
        None => break_off(peer, shelf.bytes(&shelf.layer)),
        Some(_) => {
            let bytes = shelf.bytes(&shelf.layer);
            let half = bytes.len() / 2;
            let range = format!("bytes {half}-{}/{}", bytes.len() - 1, bytes.len());
            reply(
                peer,
                request,
                206,
                &[("Content-Range", &range)],
                &bytes[half..],
            );
        }
    });
    let pulled = world.json(["pull", &reference(&once), "--name", "once"]);
    assert_eq!(
        pulled["fetched_bytes"],
        Shelf::new().bytes(&Shelf::new().layer).len(),
        "no byte comes twice"
    );
    world.ok(["image", "rm", "once"]);
    world.ok(["gc"]);
    let always = layer_instead(|_, _, _| {});
    fails(
        &world,
        &always,
        &[
            "the connection to",
            "/v2/x/blobs/sha256:",
            "was lost 5 times",
        ],
    );
    let gone = Shelf::new().start(|_, _, _| false);
    let reference = reference(&gone);
    drop(gone);
    refused(
        &world,
        &["pull", &reference],
        &["cannot pull", &reference, "was lost"],
    );
    world.assert_empty();
}

#[test]
fn a_refusal_by_a_registry_is_quoted() {
    let world = World::new();
    let words = br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"no\u001b[31m such"}]}"#;
    let unknown = instead(Shelf::new(), MANIFEST, |_, request, peer| {
        reply(peer, request, 404, &[], words)
    });
    let said = fails(
        &world,
        &unknown,
        &["there is no manifest", "MANIFEST_UNKNOWN"],
    );
    assert!(!said.contains('\u{1b}'), "{said:?}");
    let missing = layer_instead(|_, request, peer| reply(peer, request, 404, &[], b""));
    fails(&world, &missing, &["there is no blob sha256:"]);
    let begin = Instant::now();
    let busy = instead(Shelf::new(), MANIFEST, |_, request, peer| {
        reply(peer, request, 429, &[("Retry-After", "3600")], b"");
    });
    fails(
        &world,
        &busy,
        &["asks for fewer requests", "hint: try again later"],
    );
    assert_within(Duration::from_secs(20), begin);
    let page = instead(Shelf::new(), MANIFEST, |_, request, peer| {
        reply(
            peer,
            request,
            200,
            &[("Content-Type", "text/html")],
            b"<html>",
        );
    });
    fails(&world, &page, &["text/html"]);
    let round = instead(Shelf::new(), MANIFEST, |_, request, peer| {
        reply(peer, request, 307, &[("Location", MANIFEST)], b"");
    });
    fails(
        &world,
        &round,
        &["a redirect from", "more than 10 times", MANIFEST],
    );
    world.assert_empty();
}

#[test]
fn a_registry_that_asks_to_wait_is_obeyed() {
    let world = World::new();
    let server = Shelf::new().start(|_, request, peer| {
        let first = request.number == 0;
        if first {
            reply(peer, request, 429, &[("Retry-After", "1")], b"");
        }
        first
    });
    let begin = Instant::now();
    world.ok(["pull", &reference(&server)]);
    assert!(begin.elapsed() >= Duration::from_secs(1));
    world.assert_empty();
}

#[test]
fn unsupported_content_is_refused_by_its_kind() {
    let world = World::new();
    let arm = Shelf::edited(Vec::new(), |_, config| {
        config["architecture"] = "arm64".into()
    });
    fails(
        &world,
        &arm.start(|_, _, _| false),
        &["it is for linux/arm64", "linux/amd64"],
    );
    let index = Shelf::edited(Vec::new(), |manifest, _| {
        let of = |architecture: &str| {
            json!({ "mediaType": manifest["mediaType"], "digest": digest(b"{}"), "size": 2,
                "platform": { "os": "linux", "architecture": architecture } })
        };
        let listed = [of("arm64"), of("s390x")];
        *manifest = json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": listed });
    });
    fails(
        &world,
        &index.start(|_, _, _| false),
        &["linux/arm64", "linux/s390x", "not for linux/amd64"],
    );
    let thing = "application/vnd.example.thing.v1";
    let artifact = Shelf::edited(Vec::new(), |manifest, _| {
        manifest["artifactType"] = thing.into()
    });
    fails(
        &world,
        &artifact.start(|_, _, _| false),
        &["artifact of type", thing],
    );
    // An older artifact is recognised by the media type of its configuration.
    let chart = "application/vnd.example.chart.config.v1+json";
    let older = Shelf::edited(Vec::new(), |manifest, _| {
        manifest["config"] = json!({ "mediaType": chart, "digest": digest(b"{}"), "size": 2 });
    });
    fails(&world, &older.start(|_, _, _| false), &[chart]);
    let kind = "application/vnd.example.layer.v1+lzma";
    let layer = Shelf::edited(Vec::new(), |manifest, _| {
        manifest["layers"][0]["mediaType"] = kind.into()
    });
    fails(&world, &layer.start(|_, _, _| false), &[kind]);
    let more = Shelf::edited(Vec::new(), |_, config| {
        config["rootfs"]["diff_ids"] = json!([])
    });
    fails(
        &world,
        &more.start(|_, _, _| false),
        &["1 layers", "lists 0"],
    );
    let boast = Shelf::edited(boast(), |_, _| ());
    fails(
        &world,
        &boast.start(|_, _, _| false),
        &["cannot become a root file system", "inside a member"],
    );
    let garbage = Shelf::edited(
        b"no archive at all, but more than nothing".repeat(100),
        |_, _| (),
    );
    fails(
        &world,
        &garbage.start(|_, _, _| false),
        &["cannot become a root file system"],
    );
    world.assert_empty();
}

/// A layer of a few kilobytes that unpacks to more than there is room for, of zeros and of other
/// bytes.
#[test]
fn a_decompression_bomb_in_a_layer_is_stopped() {
    let Some(disk) = Mount::tmpfs(600) else {
        return;
    };
    let world = World::at(disk.path().join("home"));
    disk.fill(48 << 10);
    for (byte, words) in [("\\000", "limit"), ("x", "bytes written to it")] {
        let bomb = bomb(byte, 300 << 20);
        assert!(bomb.len() < 1 << 20);
        let shelf = Shelf::edited(bomb, |manifest, _| {
            manifest["layers"][0]["mediaType"] =
                "application/vnd.oci.image.layer.v1.tar+zstd".into();
        });
        fails(
            &world,
            &shelf.start(|_, _, _| false),
            &["cannot become a root file system", words],
        );
    }
    world.assert_empty();
}

#[test]
fn two_concurrent_pulls_of_one_image_both_succeed() {
    let world = World::new();
    let server = Shelf::new().start(|_, _, _| false);
    let reference = reference(&server);
    let pull = || world.json(["pull", &reference]);
    let (first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(pull);
        (pull(), other.join().unwrap())
    });
    assert_eq!(
        (&first["name"], &first["digest"]),
        (&second["name"], &second["digest"])
    );
    world.assert_empty();
}
