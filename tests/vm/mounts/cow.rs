//! Copy-on-write mounts: changes stay in the sandbox, branch with it, and can be applied.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::{Mounted, names};

/// The letters and paths that `changes` shows.
fn changes(m: &Mounted, sandbox: &str) -> Vec<String> {
    let shown = m.world.ok(["changes", sandbox, "/work"]);
    shown.out().lines().map(str::to_owned).collect()
}

/// Files of the host are older than any change of the guest from now on.
fn settle() {
    std::thread::sleep(Duration::from_millis(1100));
}

#[test]
fn changes_branch_with_the_sandbox() {
    let m = Mounted::new();
    m.write("f", "host");
    settle();
    m.run("a", ":cow");
    m.say("a", "echo guest > /work/f; echo new > /work/n");
    assert_eq!(
        (m.read("f").as_str(), names(m.dir.path()).len()),
        ("host", 1)
    );
    m.world.ok(["checkpoint", "a", "c"]);
    m.say("a", "rm -r /work/*");
    assert_eq!(changes(&m, "a"), ["D  /f"]);
    m.world.ok(["revert", "a", "c"]);
    assert_eq!(m.say("a", "cat /work/f /work/n"), "guest\nnew");
    m.world.ok(["fork", "a", "-n", "2", "--name", "try"]);
    m.say("try-1", "echo one > /work/f");
    m.say("try-2", "echo two > /work/f; echo more > /work/m");
    assert_eq!(m.say("a", "cat /work/f"), "guest");
    assert_eq!(m.say("try-1", "cat /work/f"), "one");
    m.world.ok(["pause", "try-2"]);
    assert_eq!(changes(&m, "try-2"), ["M  /f", "A  /m", "A  /n"]);
    m.world.ok(["apply", "try-2", "/work"]);
    assert_eq!(m.read("f"), "two\n");
    assert_eq!(names(m.dir.path()), ["f", "m", "n"]);
    m.world.ok(["stop", "a"]);
    assert_eq!(
        changes(&m, "a")[0],
        "M  /f  conflict: it changed on the host since"
    );
    m.world.ok(["start", "a"]);
    assert_eq!(m.say("a", "cat /work/f /work/m"), "guest\nmore");
}

#[test]
fn apply_makes_the_host_equal_to_the_guest() {
    let m = Mounted::new();
    for dir in ["d", "deep/sub", "gone/x", "kind"] {
        fs::create_dir_all(m.path(dir)).unwrap();
    }
    for file in [
        "f",
        "h",
        "d/g",
        "deep/sub/x",
        "gone/x/y",
        "kind/file",
        "same",
    ] {
        m.write(file, file);
    }
    std::os::unix::fs::symlink("f", m.path("l")).unwrap();
    std::os::unix::fs::symlink("d", m.path("ld")).unwrap();
    settle();
    m.run("a", ":cow");
    m.say(
        "a",
        "cd /work; echo changed > f; rm h; chmod 755 d/g; mkdir -p n/m; echo q > n/m/q; rm -r gone
         mkdir gone; echo b > gone/b; ln -sf d/g l; rm -r kind; echo file > kind; touch same
         printf 'a\\0b' > binary; mkfifo pipe; rm -r deep; mkdir -p deep/sub; echo y > deep/sub/y
         rm ld; mkdir ld; echo z > ld/z",
    );
    let expected = [
        "A  /binary",
        "M  /d/g",
        "D  /deep/sub/x",
        "A  /deep/sub/y",
        "M  /f",
        "A  /gone/b",
        "D  /gone/x",
        "D  /h",
        "M  /kind",
        "M  /l",
        "M  /ld",
        "A  /ld/z",
        "A  /n",
        "A  /n/m",
        "A  /n/m/q",
    ];
    assert_eq!(changes(&m, "a"), expected);
    let dry = m.world.json(["apply", "--dry-run", "a", "/work"]);
    assert_eq!(dry["left_out"], serde_json::json!(["/pipe"]));
    assert!(m.path("h").exists());
    let patch = m.world.ok(["changes", "a", "/work", "--patch"]);
    for line in [
        "--- a/f",
        "-f",
        "+changed",
        "+++ /dev/null",
        "Binary files /binary differ",
    ] {
        assert!(
            patch.out().lines().any(|shown| shown == line),
            "{line}: {}",
            patch.out()
        );
    }
    m.world.ok(["apply", "a", "/work"]);
    assert!(changes(&m, "a").is_empty());
    assert_eq!(
        (m.read("f").as_str(), m.read("kind").as_str()),
        ("changed\n", "file\n")
    );
    let mode = fs::metadata(m.path("d/g")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    assert_eq!(
        names(m.dir.path()),
        [
            "binary", "d", "deep", "f", "gone", "kind", "l", "ld", "n", "same"
        ]
    );
    assert_eq!(names(&m.path("deep/sub")), ["y"]);
    assert_eq!(
        (m.read("ld/z").as_str(), names(&m.path("d"))),
        ("z\n", vec!["g".to_owned()])
    );
    assert_eq!(names(&m.path("gone")), ["b"]);
    // The guest continues to work, and the next changes are no conflict.
    m.say(
        "a",
        "cd /work; echo twice > f; echo twice > n/m/q; rm binary gone/b",
    );
    m.world.ok(["apply", "a", "/work"]);
    assert_eq!(
        (m.read("f").as_str(), m.read("n/m/q").as_str()),
        ("twice\n", "twice\n")
    );
    assert!(!m.path("binary").exists() && names(&m.path("gone")).is_empty());
}

/// A removed directory loses nothing that the guest has never seen.
#[test]
fn apply_refuses_to_remove_what_is_new_in_a_directory() {
    let m = Mounted::new();
    for dir in ["removed", "replaced", "old"] {
        fs::create_dir(m.path(dir)).unwrap();
        m.write(&format!("{dir}/f"), "old");
    }
    settle();
    m.run("a", ":cow");
    m.say(
        "a",
        "cd /work; rm -r removed replaced old; echo file > replaced",
    );
    m.write("removed/f", "new");
    m.write("replaced/new", "new");
    let seen = changes(&m, "a");
    let reason = "conflict: the host has a file that is as new";
    let expected = [
        "D  /old".to_owned(),
        format!("D  /removed  {reason}"),
        format!("M  /replaced  {reason}"),
    ];
    assert_eq!(seen, expected);
    m.world
        .run(["apply", "a", "/work"])
        .failed_with(&["/removed", "/replaced"]);
    assert_eq!(
        (m.read("removed/f").as_str(), m.read("old/f").as_str()),
        ("new", "old")
    );
}

#[test]
fn apply_refuses_what_changed_on_both_sides() {
    let m = Mounted::with(":cow");
    for file in ["both", "mine", "removed"] {
        m.write(file, "old");
    }
    m.say(
        "a",
        "cd /work; for f in both mine removed; do echo guest > $f; done; echo x > made",
    );
    m.write("both", "host");
    fs::remove_file(m.path("removed")).unwrap();
    m.write("made", "host");
    let found = m.world.json(["changes", "a", "/work"]);
    let conflicts: Vec<&str> = found["changes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|change| change["conflict"] != Value::Null)
        .map(|change| change["path"].as_str().unwrap())
        .collect();
    assert_eq!(conflicts, ["/both", "/made", "/removed"]);
    let refused = m.world.run(["apply", "a", "/work"]);
    refused.failed_with(&["/both", "/made", "/removed", "--force"]);
    assert_eq!(
        (m.read("both").as_str(), m.read("mine").as_str()),
        ("host", "old")
    );
    m.world.ok(["apply", "--force", "a", "/work"]);
    assert_eq!(
        (m.read("both").as_str(), m.read("made").as_str()),
        ("guest\n", "x\n")
    );
    m.world.ok(["mount", "a", &m.option("/other", "")]);
    m.world
        .run(["changes", "a", "/other"])
        .failed_with(&[":cow"]);
    m.world
        .run(["changes", "a", "/none"])
        .failed_with(&["no mount"]);
}

/// A path of the host that leads out is never followed.
#[test]
fn apply_stays_in_its_directory() {
    let m = Mounted::new();
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir(m.path("d")).unwrap();
    m.write("d/f", "inside");
    m.run("a", ":cow");
    m.say("a", "echo guest > /work/d/f; echo new > /work/d/n");
    fs::remove_dir_all(m.path("d")).unwrap();
    std::os::unix::fs::symlink(outside.path(), m.path("d")).unwrap();
    let applied = m.world.run(["apply", "--force", "a", "/work"]);
    assert_eq!(names(outside.path()), Vec::<String>::new(), "{applied:#?}");
}

/// A program that runs on sees the host's changes without a new command.
#[test]
fn a_long_program_sees_what_the_host_changes() {
    let m = Mounted::new();
    m.write("old", "x");
    m.run("a", ":cow");
    // It gives up after a while.
    let line = "cat /work/old; echo; for i in $(seq 300); do
        cat /work/new 2> /dev/null && test ! -e /work/old && exit; echo; sleep 0.1; done; exit 1";
    let mut program = m.world.command();
    let program = program.args(["exec", "a", "--", "sh", "-c", line]);
    let mut program = program.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    // It has looked for the new name, and remembers that there is none.
    assert_eq!(lines.next().unwrap().unwrap(), "x");
    assert_eq!(lines.next().unwrap().unwrap(), "");
    fs::remove_file(m.path("old")).unwrap();
    m.write("new", "seen");
    // All of it is read: the program may see the old name once more after it has seen the new one.
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line == "seen"), "{rest:?}");
    assert!(program.wait().unwrap().success());
}

/// As on other overlays. `mv` copies instead.
#[test]
fn a_directory_of_the_host_is_copied_by_mv() {
    let m = Mounted::new();
    fs::create_dir(m.path("d")).unwrap();
    m.write("d/f", "content");
    m.run("a", ":cow");
    m.say("a", "mv /work/d /work/e; test ! -e /work/d");
    assert_eq!(m.say("a", "cat /work/e/f"), "content");
    assert_eq!(names(m.dir.path()), ["d"]);
}
