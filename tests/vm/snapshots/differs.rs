//! The differences between two states of a disk: found without a machine, and equal for every kind
//! of source.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{assert_nothing_staged, in_memory, names, remove, text};
use crate::support::World;

const BEFORE: &str = r#"set -e; mkdir -p /srv/d/dir /srv/d/gone/deep /srv/d/becomes; cd /srv/d
echo same > same; echo old > changed; echo gone > removed; echo deep > gone/deep/file
echo mode > mode; echo owner > owner; ln -s same link; echo moved > old-name; echo kind > becomes-dir
printf 'one\ntwo\nthree\n' > text; printf 'a\000b' > binary; echo twice > name-1
dd if=/dev/zero bs=1M count=12 2> /dev/null | tr '\000' x > big
dd if=/dev/zero of=sparse bs=1 count=1 seek=3000000000 2> /dev/null
touch -d '2020-01-01 00:00:00' timed; sync"#;

const AFTER: &str = r#"set -e; cd /srv/d
echo added > added; echo new-content > changed; rm removed; rm -r gone; mkdir dir/new; echo below > dir/new/file
chmod 4755 mode; chown 7:8 owner; ln -snf changed link; mv old-name new-name
rm becomes-dir; mkdir becomes-dir; rmdir becomes; echo file > becomes
printf 'one\n2\nthree\n' > text; printf 'a\000c' > binary; ln name-1 name-2
printf y | dd of=big bs=1 seek=6000000 conv=notrunc 2> /dev/null
printf y | dd of=sparse bs=1 seek=2000000000 conv=notrunc 2> /dev/null
echo odd > 'new
line'; mknod pipe p; touch -d '2021-01-01 00:00:00' timed; sync"#;

/// The expected change for every path below the directory.
fn expected() -> BTreeMap<&'static str, (&'static str, Vec<&'static str>)> {
    let added = [
        "added",
        "dir/new",
        "dir/new/file",
        "new-name",
        r"new\x0aline",
        "name-2",
        "pipe",
    ];
    let removed = ["removed", "gone", "gone/deep", "gone/deep/file", "old-name"];
    let changed = [
        ("changed", vec!["size", "content"]),
        ("mode", vec!["mode"]),
        ("owner", vec!["owner"]),
        ("link", vec!["target"]),
        ("becomes-dir", vec!["kind"]),
        ("becomes", vec!["kind"]),
        ("text", vec!["size", "content"]),
        ("binary", vec!["content"]),
        ("big", vec!["content"]),
        ("sparse", vec!["content"]),
    ];
    let added = added.map(|path| (path, ("added", Vec::new())));
    let removed = removed.map(|path| (path, ("removed", Vec::new())));
    let changed = changed.map(|(path, what)| (path, ("changed", what)));
    added.into_iter().chain(removed).chain(changed).collect()
}

/// The changes that were found. If a file became a directory, its mode and other fields are
/// ignored.
fn found(diff: &Value) -> BTreeMap<&str, (&str, Vec<&str>)> {
    let changes = diff["changes"]
        .as_array()
        .unwrap_or_else(|| panic!("{diff}"));
    let mut map = BTreeMap::new();
    for one in changes {
        let path = text(&one["path"])
            .strip_prefix("/srv/d/")
            .unwrap_or_else(|| panic!("no step changed {one}"));
        let mut what: Vec<&str> = one["what"].as_array().unwrap().iter().map(text).collect();
        if what.contains(&"kind") {
            what = vec!["kind"];
        }
        map.insert(path, (text(&one["change"]), what));
    }
    map
}

#[track_caller]
fn assert_found(world: &World, before: &str, after: &str) {
    let diff = world.json(["snapshot", "diff", before, after]);
    assert_eq!(diff["incomplete"], Value::Null, "{before} {after}");
    assert_eq!(found(&diff), expected(), "{before} {after}");
}

#[track_caller]
fn assert_same(world: &World, before: &str, after: &str) {
    let same = world.json(["snapshot", "diff", before, after]);
    assert_eq!(
        same,
        json!({ "changes": [], "incomplete": null }),
        "{before} {after}"
    );
    assert_eq!(world.ok(["snapshot", "diff", before, after]).out(), "");
}

#[test]
fn diff_reports_the_same_changes_for_every_kind_of_source() {
    let world = World::new();
    let place = in_memory();
    let run = |script: &str| {
        let answer = world.sh("a", script);
        assert_eq!(answer.code, 0, "{answer:?}");
    };
    let [dir_before, dir_after] =
        ["before", "after"].map(|name| place.path().join(name).to_str().unwrap().to_owned());
    world.start("a", &[]);
    run(BEFORE);
    // The first save of these layers: the store has them only in compressed form.
    world.ok(["save", "a", "packed", "--compress"]);
    world.ok(["checkpoint", "a", "base"]);
    world.ok(["save", "a", &dir_before]);
    for same in ["packed", "a@base", "a@", "a", &dir_before] {
        assert_same(&world, "packed", same);
    }
    run(AFTER);
    world.ok(["checkpoint", "a", "later"]);
    for before in ["packed", "a@base", &dir_before] {
        assert_found(&world, before, "a");
    }
    world.ok(["save", "a", "after"]);
    world.ok(["save", "a", &dir_after]);
    world.ok(["save", "a", "live", "--memory"]);
    for (before, after) in [
        ("packed", "after"),
        ("packed", "live"),
        ("a@base", "a@later"),
        ("a@base", &dir_after),
        (&dir_before, &dir_after),
        ("packed", "a@"),
    ] {
        assert_found(&world, before, after);
    }
    world.ok(["pause", "a"]);
    assert_found(&world, "packed", "a");
    assert_same(&world, "after", "a");
    assert_eq!(world.inspect("a")["state"], "paused");
    world.ok(["resume", "a"]);
    world.ok(["stop", "a"]);
    assert_found(&world, "a@base", "a");
    assert_same(&world, "a", "after");
    is_shown_as_text(&world);
    assert_eq!(
        names(&world),
        ["after", "live", "packed"],
        "comparing leaves nothing"
    );
    assert_nothing_staged(&world);
    remove(&world, &["a"]);
}

/// As lines, as text, and with times on request.
fn is_shown_as_text(world: &World) {
    let lines = world.ok(["snapshot", "diff", "packed", "after"]);
    for line in [
        "A  /srv/d/added  file 0644 6 B",
        "D  /srv/d/removed  file 0644 5 B",
        "M  /srv/d/mode  mode 0644 to 4755",
        "M  /srv/d/owner  owner 0:0 to 7:8",
        r"A  /srv/d/new\x0aline  file 0644 4 B",
    ] {
        assert!(
            lines.out().lines().any(|found| found == line),
            "no {line:?} in {}",
            lines.out()
        );
    }
    let content = |path: &str| {
        world
            .ok(["snapshot", "diff", "packed", "after", "--content", path])
            .out()
            .to_owned()
    };
    let shown = content("/srv/d/text");
    assert!(
        shown.contains("\n-two\n+2\n") && !shown.contains("-three"),
        "{shown}"
    );
    assert_eq!(content("/srv/d/same"), "");
    assert_eq!(content("/srv/d/binary"), "binary files differ\n");
    assert!(content("/srv/d/added").contains("+added"));
    assert!(content("/srv/d/removed").contains("-gone"));
    let newline = content("/srv/d/new\nline");
    assert!(newline.contains("+odd"), "{newline}");
    let as_json = world.json([
        "snapshot",
        "diff",
        "packed",
        "after",
        "--content",
        "/srv/d/text",
    ]);
    assert_eq!(
        (&as_json["kind"], text(&as_json["diff"])),
        (&"text".into(), shown.as_str())
    );
    world
        .run([
            "snapshot",
            "diff",
            "packed",
            "after",
            "--content",
            "/srv/d/never",
        ])
        .failed_with(&["/srv/d/never"]);
    let with_times = world.json(["snapshot", "diff", "packed", "after", "--times"]);
    let timed = with_times["changes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|change| change["path"] == "/srv/d/timed");
    assert_eq!(timed.expect("it is listed")["what"], json!(["modified"]));
    let big = world.json(["snapshot", "diff", "packed", "after"]);
    let sizes: Vec<_> = big["changes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|c| c["path"] == "/srv/d/sparse")
        .collect();
    assert_eq!(sizes[0]["after"]["size"], 3_000_000_001_u64);
    for (before, after, word) in [
        ("packed", "missing", "missing"),
        ("a@never", "after", "never"),
        ("packed", "./no", "no"),
    ] {
        world
            .run(["snapshot", "diff", before, after])
            .failed_with(&[word]);
    }
}
