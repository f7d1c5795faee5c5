//! Snapshots from one store to another, through a registry and through common tools.

use serde_json::Value;

use super::server::{Kind, Registry};
use super::{document, elsewhere, end, skopeo, text};
use crate::support::World;
use crate::support::held;

fn bytes(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

#[test]
fn a_pushed_snapshot_continues_exactly_and_a_small_change_travels_alone() {
    let world = World::new();
    let registry = Registry::start(Kind::Open);
    let at = |rest: &str| format!("{}/{rest}", registry.host);
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    let saved = world.json(["save", "a", "live", "--memory"]);
    let first = world.json(["push", "live", &at("team/live:1")]);
    assert_eq!(first["digest"], saved["digest"]);
    assert_eq!(first["sent_bytes"], first["total_bytes"]);
    assert_eq!(
        document(&registry, "team/live:1").1["artifactType"],
        "application/vnd.sandtree.snapshot.v1"
    );
    assert_eq!(
        world.json(["push", "live", &at("team/live:1")])["sent_bytes"],
        0
    );

    let (_dir, other) = elsewhere();
    let pulled = other.json(["pull", &at("team/live:1")]);
    assert_eq!(
        (&pulled["kind"], text(&pulled["name"])),
        (&"snapshot".into(), "live-1")
    );
    assert_eq!(
        (&pulled["digest"], &pulled["manifest"]),
        (&saved["digest"], &first["manifest"])
    );
    assert_eq!(pulled["fetched_bytes"], first["total_bytes"]);
    other.ok(["snapshot", "verify", "live-1"]);
    other.ok(["run", "-d", "--name", "b", "live-1"]);
    held::assert_holds(&other, "b", "one", 0);

    held::write(&world, "a", "two");
    world.ok(["save", "a", "next", "--memory"]);
    let next = world.json(["push", "next", &at("team/live:2")]);
    let sent = bytes(&next["sent_bytes"]);
    let total = bytes(&next["total_bytes"]);
    assert!(sent > 0 && sent * 5 < total, "{sent} of {total}");
    let pulled = other.json(["pull", &at("team/live:2")]);
    assert!(
        bytes(&pulled["fetched_bytes"]) <= sent,
        "{pulled} after {next}"
    );
    other.ok(["run", "-d", "--name", "c", "live-2"]);
    held::assert_holds(&other, "c", "two", 0);
    held::assert_holds(&other, "b", "one", 1);
    end(&other, &["b", "c"]);
    end(&world, &["a"]);
}

#[test]
fn a_disk_boots_in_another_store_however_it_was_copied() {
    let world = World::new();
    let registry = Registry::start(Kind::Open);
    let at = |rest: &str| format!("{}/{rest}", registry.host);
    world.start("a", &[]);
    assert_eq!(world.sh("a", "echo one > /srv/word; sync").code, 0);
    world.ok(["stop", "a"]);
    let saved = world.json(["save", "a", "disk"]);
    let pushed = world.json(["push", "disk", &at("disk")]);

    let dir = tempfile::tempdir().unwrap();
    let copied = format!("dir:{}", dir.path().display());
    let remote = |rest: &str| format!("docker://{}", at(rest));
    skopeo(&[&remote("disk"), &remote("copies/disk:1")]);
    skopeo(&[&remote("copies/disk:1"), &copied]);
    skopeo(&[&copied, &remote("copies/again:2")]);
    let (_place, other) = elsewhere();
    for (rest, name) in [
        ("disk", "disk"),
        ("copies/disk:1", "disk-1"),
        ("copies/again:2", "again-2"),
    ] {
        let pulled = other.json(["pull", &at(rest)]);
        assert_eq!(
            (text(&pulled["name"]), &pulled["digest"]),
            (name, &saved["digest"]),
            "{rest}"
        );
        assert_eq!(pulled["manifest"], pushed["manifest"], "{rest}");
        assert_eq!(pulled["fetched_bytes"] == 0, rest != "disk", "{rest}");
    }
    // From the last copy alone.
    other.ok(["snapshot", "rm", "disk", "disk-1", "again-2"]);
    other.ok(["gc"]);
    other.ok(["pull", &at("copies/again:2")]);
    other.ok(["run", "-d", "--name", "b", "again-2"]);
    held::assert_disk_holds(&other, "b", "one");
    end(&other, &["b"]);
    end(&world, &["a"]);
}
