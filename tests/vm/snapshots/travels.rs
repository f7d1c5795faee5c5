//! From one store to another: by file, by stream, with and without the layers that the other store
//! has.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use sandtree_store::Digest;

use super::{
    assert_nothing_staged, content_digest, digest, entries, image_digest, in_memory, names,
    published, rebuild_image, remove, saved_with_memory, stopped, text,
};
use crate::support::held;
use crate::support::mount::Mount;
use crate::support::{DEADLINE, World, eventually, finish, kill, wait};

/// Imports the file into a new store below `dir`, continues it there, and exports it again.
fn continues_at(dir: &Path, file: &Path) {
    let world = World::empty_at(dir.join("home"));
    let imported = world.json([
        "snapshot",
        "import",
        file.to_str().unwrap(),
        "--name",
        "live",
    ]);
    assert_eq!(imported["memory"], true, "{imported}");
    world.ok(["run", "-d", "--name", "b", "live"]);
    held::assert_holds(&world, "b", "one", 0);
    // From its own disk, read without a cache.
    assert_eq!(
        world
            .sh(
                "b",
                "echo 3 > /proc/sys/vm/drop_caches; sha256sum /bin/busybox; cat /srv/word"
            )
            .code,
        0
    );
    let again = dir.join("again.tar.zst");
    world.ok(["snapshot", "export", "live", "-o", again.to_str().unwrap()]);
    assert!(
        fs::read(&again).unwrap() == fs::read(file).unwrap(),
        "what went through a store is another file"
    );
    fs::remove_file(again).unwrap();
    remove(&world, &["b"]);
}

#[test]
fn a_snapshot_with_memory_continues_exactly_on_another_file_system() {
    let world = World::new();
    saved_with_memory(&world, "a", "one", "live");
    let place = in_memory();
    let file = place.path().join("live.tar.zst");
    world.ok(["snapshot", "export", "live", "-o", file.to_str().unwrap()]);
    remove(&world, &["a"]);
    continues_at(place.path(), &file);
    for kind in ["xfs", "btrfs"] {
        let Some(mount) = Mount::of_kind(kind, 1024) else {
            continue;
        };
        continues_at(mount.path(), &file);
    }
}

#[test]
fn an_exported_file_is_reproducible_and_reveals_nothing_of_this_host() {
    let world = World::new();
    let place = in_memory();
    saved_with_memory(&world, "a", "one", "live");
    world.ok(["save", "a", "disk"]);
    let [first, second, plain, disk] =
        ["1.tar.zst", "2.tar.zst", "live.tar", "disk.tar"].map(|f| place.path().join(f));
    for (name, file, options) in [
        ("live", &first, [].as_slice()),
        ("live", &second, &[]),
        ("live", &plain, &["--plain-tar"]),
        ("disk", &disk, &["--plain-tar"]),
    ] {
        world.ok([
            &["snapshot", "export", name, "-o", file.to_str().unwrap()],
            options,
        ]
        .concat());
    }
    assert!(
        fs::read(&first).unwrap() == fs::read(&second).unwrap(),
        "two exports differ"
    );
    let bytes = fs::read(&plain).unwrap();
    let home = world.home().to_str().unwrap();
    for needle in [
        home,
        env!("CARGO_BIN_EXE_sandtree"),
        place.path().to_str().unwrap(),
    ] {
        assert!(
            !contains(&bytes, needle.as_bytes()),
            "{needle} is in the file"
        );
    }
    let listed = tar(
        &[
            "-tvf",
            disk.to_str().unwrap(),
            "--numeric-owner",
            "--full-time",
        ],
        place.path(),
    );
    let listed = String::from_utf8(listed).unwrap();
    for line in listed.lines() {
        assert!(
            line.starts_with("-rw-r--r-- 0/0") && line.contains(" 1970-01-01 "),
            "{line}"
        );
    }
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
    for member in ["artifact.json", "manifest.json"] {
        let content = tar(&["-xOf", disk.to_str().unwrap(), member], place.path());
        for word in [host.trim(), user.trim(), "/home", "/tmp"] {
            assert!(
                !contains(&content, word.as_bytes()),
                "{word} is in {member}: {}",
                String::from_utf8_lossy(&content)
            );
        }
    }
    unpacks(&disk, &digest(&world, "disk"));
    remove(&world, &["a"]);
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    let first = needle[0];
    let starts = bytes.iter().enumerate().filter(|(_, byte)| **byte == first);
    starts
        .into_iter()
        .any(|(at, _)| bytes[at..].starts_with(needle))
}

fn tar(args: &[&str], dir: &Path) -> Vec<u8> {
    let answer = Command::new("tar")
        .env("TZ", "UTC")
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(
        answer.status.success(),
        "tar {args:?}: {}",
        String::from_utf8_lossy(&answer.stderr)
    );
    answer.stdout
}

/// Uses nothing of ours: every file has the digest of its name, and the manifest has the digest of
/// the snapshot.
fn unpacks(file: &Path, digest: &str) {
    let dir = file.with_extension("unpacked");
    fs::create_dir(&dir).unwrap();
    tar(&["-xf", file.to_str().unwrap()], &dir);
    assert_eq!(content_digest(&dir.join("manifest.json")), digest);
    for blob in entries(&dir.join("blobs")) {
        assert_eq!(
            content_digest(&blob),
            blob.file_name().unwrap().to_str().unwrap()
        );
    }
}

#[test]
fn a_snapshot_travels_through_a_pipe() {
    let world = World::new();
    let place = in_memory();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s", "--label", "env=dev"]);
    let stream = world.ok(["snapshot", "export", "s", "-o", "-"]).stdout;
    let with_json = world
        .ok(["--json", "snapshot", "export", "s", "-o", "-"])
        .stdout;
    assert!(stream == with_json, "something else is in the stream");
    let file = place.path().join("s.tar.zst");
    world.ok(["snapshot", "export", "s", "-o", file.to_str().unwrap()]);
    assert!(
        fs::read(&file).unwrap() == stream,
        "a stream is another file"
    );
    let other = World::empty_at(place.path().join("home"));
    other
        .run_with_input(["snapshot", "import", "-"], &stream)
        .failed_with(&["needs --name"]);
    let imported = other.run_with_input(["snapshot", "import", "-", "--name", "piped"], &stream);
    assert_eq!(imported.code, 0, "{imported:?}");
    // Without an option, the snapshot gets the name of the file.
    let named = other.json(["snapshot", "import", file.to_str().unwrap()]);
    assert_eq!(
        (&named["name"], text(&named["digest"])),
        (&"s".into(), digest(&world, "s").as_str())
    );
    assert_eq!(
        other.json(["snapshot", "ls"]).as_array().unwrap().len(),
        1,
        "one with two names is listed once"
    );
    assert_eq!(
        other.json(["snapshot", "inspect", "s"])["names"],
        serde_json::json!(["piped", "s"])
    );
    other
        .run(["snapshot", "import", file.to_str().unwrap()])
        .failed_with(&["the name s is taken", "--force"]);
    other.ok(["snapshot", "import", file.to_str().unwrap(), "--force"]);
    for label in ["env", "env=dev"] {
        assert_eq!(
            other
                .json(["snapshot", "ls", "--label", label])
                .as_array()
                .unwrap()
                .len(),
            1
        );
    }
    assert_eq!(
        other
            .json(["snapshot", "ls", "--label", "env=prod"])
            .as_array()
            .unwrap()
            .len(),
        0
    );
    other.ok(["snapshot", "verify", "piped"]);
    other.ok(["snapshot", "rm", "piped"]);
    other.ok(["snapshot", "verify", "s"]);
    remove(&other, &[]);
    remove(&world, &["a"]);
}

/// A reader that leaves ends the export, which reports it.
#[test]
fn a_broken_pipe_ends_an_export() {
    let world = World::new();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s"]);
    let mut command = world.command();
    command
        .args(["snapshot", "export", "s", "-o", "-"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let answer = finish(child);
    assert!(answer.code == 125 || answer.code == 128 + 13, "{answer:?}");
    assert!(!answer.err().contains("panicked"), "{answer:?}");
    world.ok(["snapshot", "verify", "s"]);
    assert_nothing_staged(&world);
    remove(&world, &["a"]);
}

#[test]
fn a_snapshot_without_its_image_needs_exactly_that_image() {
    let world = World::new();
    let place = in_memory();
    saved_with_memory(&world, "a", "one", "live");
    let file = place.path().join("live.tar.zst");
    let whole = place.path().join("whole.tar.zst");
    let path = file.to_str().unwrap();
    world.ok(["snapshot", "export", "live", "-o", path, "--without-image"]);
    world.ok(["snapshot", "export", "live", "-o", whole.to_str().unwrap()]);
    let bytes = |path: &Path| fs::metadata(path).unwrap().len();
    assert!(
        bytes(&file) + (10 << 20) < bytes(&whole),
        "{} of {}",
        bytes(&file),
        bytes(&whole)
    );
    let image = image_digest(&world, "live");

    // First a store without an image of that name, then one with another image of that name.
    let lacks = World::empty_at(place.path().join("lacks"));
    lacks.ok(["snapshot", "ls"]);
    let before = published(&lacks);
    lacks.run(["snapshot", "import", path]).failed_with(&[
        "image tiny",
        &image,
        "not in the store",
    ]);
    assert_eq!((published(&lacks), names(&lacks)), (before, Vec::new()));
    assert_nothing_staged(&lacks);
    let other = World::new();
    let rebuilt = rebuild_image(&other);
    other.ok(["gc"]);
    let refused = other.run(["snapshot", "import", path]);
    refused.failed_with(&["image tiny", &image, &format!("tiny is {rebuilt} here")]);
    assert_nothing_staged(&other);

    // The same image works, whatever its origin.
    lacks.ok([
        "snapshot",
        "import",
        whole.to_str().unwrap(),
        "--name",
        "first",
    ]);
    lacks.ok(["snapshot", "import", path]);
    assert_eq!(digest(&lacks, "live"), digest(&world, "live"));
    lacks.ok(["run", "-d", "--name", "b", "live"]);
    held::assert_holds(&lacks, "b", "one", 0);
    remove(&lacks, &["b"]);
    remove(&world, &["a"]);
    other.assert_empty();
}

/// A snapshot uses the image that it was saved with, even if another image has the name by now.
#[test]
fn a_replaced_image_stays_for_the_snapshots_that_use_it() {
    let world = World::new();
    saved_with_memory(&world, "a", "one", "live");
    world.ok(["rm", "-f", "a"]);
    let old = image_digest(&world, "live");
    let new = rebuild_image(&world);
    let images = || entries(&world.home().join("images")).len();
    assert_eq!(
        (
            world.json(["gc"])["removed"].as_array().unwrap().len(),
            images()
        ),
        (0, 2)
    );
    world.ok(["snapshot", "verify", "live"]);
    world.ok(["run", "-d", "--name", "b", "live"]);
    held::assert_holds(&world, "b", "one", 0);
    // A sandbox keeps the image, too.
    world.ok(["snapshot", "rm", "live"]);
    world.ok(["gc"]);
    assert_eq!(images(), 2);
    assert_eq!(
        world
            .sh(
                "b",
                "echo 3 > /proc/sys/vm/drop_caches; sha256sum /bin/busybox"
            )
            .code,
        0
    );
    world.ok(["save", "b", "again"]);
    assert_eq!(image_digest(&world, "again"), old);
    remove(&world, &["b"]);
    assert_eq!(images(), 1, "nothing uses the old image");
    assert!(world.home().join("images").join(new).exists());
}

#[test]
fn with_a_base_only_new_layers_travel() {
    let world = World::new();
    let place = in_memory();
    saved_with_memory(&world, "a", "one", "base");
    held::write(&world, "a", "two");
    world.ok(["save", "a", "next", "--memory"]);
    let [base, next, since] =
        ["base.tar.zst", "next.tar.zst", "since.tar.zst"].map(|file| place.path().join(file));
    let [base, next, since] = [&base, &next, &since].map(|path| path.to_str().unwrap());
    world.ok(["snapshot", "export", "base", "-o", base]);
    world.ok(["snapshot", "export", "next", "-o", next]);
    world.ok(["snapshot", "export", "next", "-o", since, "--since", "base"]);
    let bytes = |path: &str| fs::metadata(path).unwrap().len();
    assert!(
        bytes(since) * 5 < bytes(next),
        "{} of {}",
        bytes(since),
        bytes(next)
    );
    world
        .run([
            "snapshot",
            "export",
            "next",
            "-o",
            "/dev/shm/never",
            "--since",
            "missing",
        ])
        .failed_with(&["missing"]);
    assert!(!Path::new("/dev/shm/never").exists());

    let other = World::empty_at(place.path().join("home"));
    other
        .run(["snapshot", "import", since])
        .failed_with(&[&digest(&world, "base"), "not in the store"]);
    assert_eq!(names(&other), Vec::<String>::new());
    assert_nothing_staged(&other);
    other.ok(["snapshot", "import", base]);
    other.ok(["snapshot", "import", since, "--name", "next"]);
    assert_eq!(digest(&other, "next"), digest(&world, "next"));
    other.ok(["snapshot", "verify", "next"]);
    // After the import, it does not need its base, and is complete.
    other.ok(["snapshot", "rm", "base"]);
    other.ok(["gc"]);
    let again = place.path().join("again.tar.zst");
    other.ok(["snapshot", "export", "next", "-o", again.to_str().unwrap()]);
    assert!(
        fs::read(&again).unwrap() == fs::read(next).unwrap(),
        "it is another file"
    );
    other.ok(["run", "-d", "--name", "b", "next"]);
    held::assert_holds(&other, "b", "two", 0);
    remove(&other, &["b"]);
    remove(&world, &["a"]);
}

#[test]
fn a_sandbox_is_exported_in_its_present_and_in_its_states() {
    let world = World::new();
    let place = in_memory();
    let other = World::empty_at(place.path().join("home"));
    let export = |what: &str, name: &str, options: &[&str]| {
        let file = place.path().join(format!("{name}.tar.zst"));
        world.ok([
            &["snapshot", "export", what, "-o", file.to_str().unwrap()],
            options,
        ]
        .concat());
        let imported = other.json(["snapshot", "import", file.to_str().unwrap()]);
        fs::remove_file(file).unwrap();
        (
            imported["memory"] == true,
            text(&imported["digest"]).to_owned(),
        )
    };
    let holds = |name: &str, word: &str, times| {
        other.ok(["run", "-d", "--name", name, name]);
        held::assert_holds(&other, name, word, times);
        other.ok(["rm", "-f", name]);
    };
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    world.ok(["checkpoint", "a", "was"]);
    held::write(&world, "a", "two");
    assert!(!export("a", "running", &[]).0);
    assert!(export("a", "live", &["--memory"]).0);
    assert!(export("a@", "now", &["--memory"]).0);
    held::assert_holds(&world, "a", "two", 0);
    assert!(export("a@was", "was", &[]).0);
    holds("live", "two", 0);
    holds("was", "one", 0);
    world
        .run(["snapshot", "export", "a@never", "-o", "-"])
        .failed_with(&["no state never"]);
    world.ok(["pause", "a"]);
    assert!(!export("a", "paused", &[]).0);
    assert!(export("a", "paused-live", &["--memory"]).0);
    holds("paused-live", "two", 1);
    assert_eq!(world.inspect("a")["state"], "paused");
    world.ok(["resume", "a"]);
    held::assert_holds(&world, "a", "two", 1);
    world.ok(["stop", "a"]);
    assert!(!export("a", "stopped", &[]).0);
    assert!(export("a@was", "was-still", &[]).0);
    world
        .run(["snapshot", "export", "a", "-o", "-", "--memory"])
        .failed_with(&["no memory to save"]);
    // All of them have the word on their disks; only the earlier state has another one.
    for name in ["paused", "stopped"] {
        assert_eq!(
            other.json(["snapshot", "diff", "running", name])["changes"],
            serde_json::json!([]),
            "{name}"
        );
    }
    let differs = other.json(["snapshot", "diff", "was", "running"]);
    let paths: Vec<&str> = differs["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| text(&change["path"]))
        .collect();
    assert!(paths.contains(&"/srv/word"), "{differs}");
    assert_eq!(
        names(&world),
        Vec::<String>::new(),
        "what was exported is in the store"
    );
    remove(&world, &["a"]);
    remove(&other, &[]);
}

#[test]
fn an_exported_file_is_whole_or_absent() {
    let world = World::new();
    let place = in_memory();
    saved_with_memory(&world, "a", "one", "live");
    let file = place.path().join("live.tar.zst");
    let path = file.to_str().unwrap();
    fs::write(&file, "mine").unwrap();
    world
        .run(["snapshot", "export", "live", "-o", path])
        .failed_with(&[path, "--force"]);
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    world
        .run(["snapshot", "export", "missing", "-o", path, "--force"])
        .failed_with(&["missing"]);
    assert_eq!(
        fs::read(&file).unwrap(),
        b"mine",
        "an export that fails replaces nothing"
    );
    assert_eq!(entries(place.path()).len(), 1);
    world.ok(["snapshot", "export", "live", "-o", path, "--force"]);
    let whole = Digest::of(&fs::read(&file).unwrap());
    fs::remove_file(&file).unwrap();
    world
        .run(["snapshot", "export", "live", "-o", "/nonexistent/x.tar"])
        .failed_with(&["/nonexistent"]);
    assert!(
        interrupted(&world, place.path(), &file),
        "no export could be interrupted"
    );
    assert_eq!(entries(place.path()).len(), 0);
    world.ok(["snapshot", "export", "live", "-o", path]);
    assert_eq!(Digest::of(&fs::read(&file).unwrap()), whole);
    if let Some(small) = Mount::tmpfs(8) {
        let file = small.path().join("live.tar.zst");
        world
            .run(["snapshot", "export", "live", "-o", file.to_str().unwrap()])
            .failed_with(&["No space left"]);
        assert_eq!(entries(small.path()).len(), 0);
    }
    remove(&world, &["a"]);
}

/// Presses Ctrl-C while the file is written. On a busy host the signal may come too late; then
/// again.
fn interrupted(world: &World, dir: &Path, file: &Path) -> bool {
    for _ in 0..10 {
        let mut command = world.command();
        command.args(["snapshot", "export", "live", "-o", file.to_str().unwrap()]);
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually(DEADLINE, || (!entries(dir).is_empty()).then_some(()))
            .expect("it begins to write");
        kill(child.id(), "INT");
        match wait(&mut child, Duration::from_secs(60)) {
            Some(130) => return true,
            code => assert_eq!(code, Some(0)),
        }
        fs::remove_file(file).unwrap();
    }
    false
}
