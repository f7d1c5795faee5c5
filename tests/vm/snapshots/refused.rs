//! Damaged artifacts are refused with the reason, and the store stays as it was.

use std::fs;
use std::process::Stdio;

use super::{
    assert_nothing_staged, in_memory, names, published, remove, saved_with_memory, stopped,
};
use crate::support::mount::Mount;
use crate::support::{DEADLINE, World, eventually, kill, wait};

/// How many places of a file are changed, evenly distributed.
const PLACES: usize = 40;

/// Damaged versions of an artifact.
fn spoiled(whole: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut add = |what: String, bytes: Vec<u8>| found.push((what, bytes));
    for cut in [
        0,
        1,
        100,
        511,
        512,
        513,
        1024,
        whole.len() / 2,
        whole.len() - 1024,
        whole.len() - 1,
    ] {
        add(format!("cut at {cut}"), whole[..cut].to_vec());
    }
    for place in 0..PLACES {
        let at = (whole.len() - 1) * place / (PLACES - 1);
        let mut bytes = whole.to_vec();
        bytes[at] ^= 0x41;
        add(format!("byte {at} changed"), bytes);
    }
    for (what, tail) in [
        ("a byte", vec![1]),
        ("zeros", vec![0; 512]),
        ("itself", whole.to_vec()),
    ] {
        add(
            format!("with {what} behind it"),
            [whole.to_vec(), tail].concat(),
        );
    }
    found
}

#[test]
fn damaged_artifacts_are_refused_and_leave_nothing() {
    let world = World::new();
    let place = in_memory();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "kept"]);
    world.ok(["save", "a", "s", "--label", "travels=yes"]);
    let [plain, packed] = ["s.tar", "s.tar.zst"].map(|file| place.path().join(file));
    world.ok([
        "snapshot",
        "export",
        "s",
        "-o",
        plain.to_str().unwrap(),
        "--plain-tar",
        "--without-image",
    ]);
    world.ok([
        "snapshot",
        "export",
        "s",
        "-o",
        packed.to_str().unwrap(),
        "--without-image",
    ]);
    world.ok(["snapshot", "rm", "s"]);
    let [plain, packed] = [plain, packed].map(|file| fs::read(file).unwrap());
    let before = published(&world);
    let used = world.json(["df"]);
    let mut cases = spoiled(&plain);
    cases.extend(
        spoiled(&packed)
            .into_iter()
            .map(|(what, bytes)| (format!("packed, {what}"), bytes)),
    );
    cases.push(("text".into(), b"this is no snapshot\n".repeat(1000)));
    cases.push(("zeros".into(), vec![0; 1 << 20]));
    cases.push(("a program".into(), fs::read("/bin/true").unwrap()));
    for (what, bytes) in &cases {
        let answer = world.run_with_input(["snapshot", "import", "-", "--name", "s"], bytes);
        assert_eq!(answer.code, 125, "{what}: {answer:?}");
        let said = answer.err();
        assert!(
            said.contains("cannot import a snapshot: ") && !said.contains("panicked"),
            "{what}: {said}"
        );
        assert!(published(&world) == before, "{what}: the store is another");
        assert_nothing_staged(&world);
    }
    assert_eq!(
        (world.json(["df"]), names(&world)),
        (used, vec!["kept".to_owned()])
    );
    // The undamaged artifact is accepted.
    for bytes in [&plain, &packed] {
        let answer =
            world.run_with_input(["snapshot", "import", "-", "--name", "s", "--force"], bytes);
        assert_eq!(answer.code, 0, "{answer:?}");
    }
    remove(&world, &["a"]);
}

#[test]
fn invalid_names_are_refused_before_anything_is_read() {
    let world = World::new();
    let place = in_memory();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s"]);
    let file = place.path().join("s.tar.zst");
    let path = file.to_str().unwrap();
    world.ok(["snapshot", "export", "s", "-o", path]);
    let before = published(&world);
    for (args, words) in [
        (["snapshot", "import", path, "--name", "../x"], ["../x", ""]),
        (
            ["snapshot", "import", path, "--name", "Not A Name"],
            ["Not A Name", ""],
        ),
        (
            ["snapshot", "import", path, "--name", "tiny"],
            ["tiny", "image"],
        ),
        (
            ["snapshot", "import", path, "--name", "s"],
            ["the name s is taken", "--force"],
        ),
        (
            ["snapshot", "import", "/nonexistent.tar", "--name", "x"],
            ["/nonexistent.tar", "No such file"],
        ),
        (
            ["snapshot", "import", "/tmp", "--name", "x"],
            ["directory", ""],
        ),
    ] {
        world.run(args).failed_with(&words);
    }
    // An image is never replaced, not even with `--force`.
    world
        .run(["snapshot", "import", path, "--name", "tiny", "--force"])
        .failed_with(&["tiny", "image"]);
    world
        .run(["snapshot", "tag", "s", "tiny", "--force"])
        .failed_with(&["tiny", "image"]);
    world
        .run(["snapshot", "rm", "tiny"])
        .failed_with(&["tiny", "image"]);
    assert_eq!(published(&world), before);
    assert_nothing_staged(&world);
    remove(&world, &["a"]);
}

/// A full disk and an interrupted import leave nothing either.
#[test]
fn an_unfinished_import_leaves_nothing() {
    let world = World::new();
    let place = in_memory();
    saved_with_memory(&world, "a", "one", "live");
    let file = place.path().join("live.tar.zst");
    let path = file.to_str().unwrap();
    world.ok(["snapshot", "export", "live", "-o", path]);
    remove(&world, &["a"]);
    let other = World::empty_at(place.path().join("home"));
    assert!(interrupted(&other, path), "no import could be interrupted");
    assert_eq!((published(&other).len(), names(&other)), (0, Vec::new()));
    if let Some(small) = Mount::tmpfs(60) {
        let full = World::empty_at(small.path().join("home"));
        full.run(["snapshot", "import", path])
            .failed_with(&["not enough space"]);
        assert_eq!(published(&full).len(), 0);
        full.assert_empty();
    }
    other.ok(["snapshot", "import", path]);
    remove(&other, &[]);
}

/// Interrupts an import with Ctrl-C. On a busy host the signal may come too late; then again.
fn interrupted(world: &World, path: &str) -> bool {
    let staging = world.home().join("staging");
    let is_under_way = || fs::read_dir(&staging).is_ok_and(|mut entries| entries.next().is_some());
    for _ in 0..10 {
        let mut command = world.command();
        command
            .args(["snapshot", "import", path])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        eventually(DEADLINE, || is_under_way().then_some(())).expect("it begins");
        kill(child.id(), "INT");
        match wait(&mut child, DEADLINE) {
            Some(130) => return !is_under_way(),
            code => assert_eq!(code, Some(0)),
        }
        remove(world, &[]);
    }
    false
}
