//! Directories of the host in a guest.

mod cow;
mod programs;
mod states;
mod trouble;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::World;
use crate::support::lab::worker;

/// A directory of the host, and a store.
struct Mounted {
    world: World,
    dir: tempfile::TempDir,
}

impl Mounted {
    fn new() -> Self {
        Self {
            world: World::new(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// With a running sandbox `a` that has the directory at `/work`.
    fn with(how: &str) -> Self {
        let mounted = Self::new();
        mounted.run("a", how);
        mounted
    }

    fn run(&self, name: &str, how: &str) -> Value {
        let mount = self.option("/work", how);
        self.world.start(name, &["--mount", &mount])
    }

    fn option(&self, guest: &str, how: &str) -> String {
        format!("{}:{guest}{how}", self.dir.path().display())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Runs a shell line that must succeed, and returns its output.
    #[track_caller]
    fn say(&self, sandbox: &str, line: &str) -> String {
        let answer = self.world.sh(sandbox, line);
        assert_eq!(answer.code, 0, "{line}: {answer:#?}");
        answer.out().trim().to_owned()
    }

    /// Copies the tests' own program into the guest.
    fn give_worker(&self, sandbox: &str) {
        let to = format!("{sandbox}:/dev/shm/worker");
        self.world.ok(["cp", worker().to_str().unwrap(), &to]);
    }
}

/// The names in a directory of the host, sorted.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn guest_and_host_share_a_directory() {
    let m = Mounted::new();
    m.write("from-host", "hello\n");
    let program = m.path("program");
    fs::copy(worker(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    symlink("from-host", m.path("link")).unwrap();
    let mount = m.option("/deep/er/work", "");
    m.world
        .start("a", &["--network", "none", "--mount", &mount]);
    assert_eq!(m.say("a", "cat /deep/er/work/link"), "hello");
    m.say(
        "a",
        "cd /deep/er/work; echo x > new; chmod 700 new; mkdir d; ln new d/same; ln -s new l",
    );
    assert_eq!(m.read("new"), "x\n");
    let new = fs::metadata(m.path("new")).unwrap();
    assert_eq!((new.mode() & 0o777, new.nlink()), (0o700, 2));
    assert_eq!(fs::read_link(m.path("l")).unwrap(), Path::new("new"));
    // The working directory and the program are both the host's.
    let args = ["exec", "-w", "/deep/er/work", "a", "--"];
    let ran = m.world.run(
        args.into_iter()
            .chain(["./program", "files", "d", "1", "3"]),
    );
    assert_eq!(ran.code, 0, "{ran:#?}");
    // The host runs what the guest has just written.
    m.say("a", "cp /deep/er/work/program /deep/er/work/copy");
    // starts: our own program
    let ran = Command::new(m.path("copy"))
        .args(["files", "/nowhere", "1", "0"])
        .output();
    assert!(!ran.expect("it is a program").status.success());
    m.world.ok(["rm", "-f", "a"]);
    m.world.assert_empty();
}

#[test]
fn mounts_come_and_go_while_the_guest_runs() {
    let m = Mounted::new();
    m.write("f", "1");
    m.world.start("a", &[]);
    m.world.ok([
        "mount",
        "a",
        &m.option("/one", ""),
        &m.option("/two", ":ro"),
    ]);
    assert_eq!(m.say("a", "cat /one/f /two/f"), "11");
    let refused = m.world.sh("a", "echo 2 > /two/f");
    assert!(refused.err().contains("Read-only"), "{refused:#?}");
    let listed = m.world.json(["mount", "ls", "a"]);
    let shown: Vec<_> = listed["mounts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mount| {
            (
                mount["guest"].as_str().unwrap(),
                mount["access"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(shown, [("/one", "read_write"), ("/two", "read_only")]);
    let twice = m.world.run(["mount", "a", &m.option("/one", "")]);
    twice.failed_with(&["/one", "already"]);
    let busy = m.world.json(["run", "-d", "--name", "b", "tiny"]);
    assert!(busy["id"].is_string());
    m.world.ok([
        "exec",
        "a",
        "--",
        "sh",
        "-c",
        "cd /one; sleep 100 > /dev/null 2>&1 &",
    ]);
    m.world
        .run(["unmount", "a", "/one"])
        .failed_with(&["/one", "busy"]);
    m.world.ok(["unmount", "--force", "a", "/one"]);
    m.world.ok(["unmount", "a", "/two"]);
    m.world
        .run(["unmount", "a", "/two"])
        .failed_with(&["no mount at /two"]);
    assert_eq!(m.say("a", "ls /one /two | wc -w"), "2");
    assert_eq!(m.world.inspect("a")["mounts"], Value::Array(Vec::new()));
    for wrong in [
        "/work",
        "relative/:/w:ro:x",
        "/nowhere-at-all:/w",
        "/etc/hostname:/w",
        "/:/",
    ] {
        let refused = m.world.run(["mount", "b", wrong]);
        assert_ne!(refused.code, 0, "{wrong}");
    }
}

#[test]
fn the_next_command_sees_what_the_host_has_changed() {
    let m = Mounted::new();
    m.world.start("a", &[]);
    for (at, how) in [("/shared", ""), ("/cow", ":cow")] {
        m.world.ok(["mount", "a", &m.option(at, how)]);
        for round in 0..12 {
            let text = format!("{how}{round}");
            match round % 4 {
                0 => m.write("f", &text),
                1 => {
                    m.write("new", &text);
                    fs::rename(m.path("new"), m.path("f")).unwrap();
                }
                // The same size and the same time.
                2 => {
                    let before = fs::metadata(m.path("f")).unwrap().modified().unwrap();
                    m.write("f", &text);
                    let file = fs::File::options().write(true).open(m.path("f")).unwrap();
                    file.set_modified(before).unwrap();
                }
                _ => {
                    fs::remove_file(m.path("f")).unwrap();
                    assert_ne!(m.world.sh("a", &format!("cat {at}/f")).code, 0, "{text}");
                    m.write("f", &text);
                }
            }
            assert_eq!(m.say("a", &format!("cat {at}/f")), text, "round {round}");
        }
    }
}

/// The guest's own disk is the oracle, for results and error numbers.
#[test]
fn files_behave_as_on_a_local_disk() {
    let m = Mounted::with("");
    m.give_worker("a");
    let cow = tempfile::tempdir().unwrap();
    let mount = format!("{}:/cow:cow", cow.path().display());
    m.world.ok(["mount", "a", &mount]);
    for seed in ["3", "11", "2026"] {
        let on = |dir: &str| {
            let at = format!("{dir}/{seed}");
            m.say(
                "a",
                &format!("mkdir -p {at} && /dev/shm/worker files {at} {seed} 400"),
            )
        };
        let local = on("/root");
        let shared = on("/work");
        for (local, shared) in local.lines().zip(shared.lines()) {
            assert_eq!(local, shared, "seed {seed}");
        }
        assert_eq!(on("/cow"), local, "copy-on-write, seed {seed}");
        // What the guest shows is what the host has.
        let listed = m.say("a", &format!("ls -A /work/{seed} | wc -l"));
        assert_eq!(listed, names(&m.path(seed)).len().to_string());
    }
    assert!(names(cow.path()).is_empty());
}

#[test]
fn many_entries_and_large_files() {
    let m = Mounted::new();
    let many = m.path("many");
    fs::create_dir(&many).unwrap();
    for number in 0..5000 {
        fs::File::create(many.join(format!("file-{number}"))).unwrap();
    }
    let large = fs::File::create(m.path("large")).unwrap();
    large.set_len(5 << 30).unwrap();
    use std::os::unix::fs::FileExt;
    large.write_all_at(b"far", (4 << 30) + 5).unwrap();
    m.run("a", "");
    assert_eq!(m.say("a", "ls /work/many | wc -l"), "5000");
    assert_eq!(m.say("a", "rm -r /work/many; ls /work"), "large");
    let far = "dd if=/work/large bs=1 skip=4294967301 count=3 2>/dev/null";
    assert_eq!(m.say("a", far), "far");
    m.say(
        "a",
        "dd if=/dev/zero of=/work/written bs=1M count=40 2>/dev/null; sync",
    );
    assert_eq!(fs::metadata(m.path("written")).unwrap().len(), 40 << 20);
    assert!(fs::metadata(m.path("large")).unwrap().blocks() < 1000);
}

/// What the guest's kernel knows, and the host would report, costs no message.
#[test]
fn a_second_look_asks_the_host_nothing() {
    let m = Mounted::new();
    for number in 0..50 {
        m.write(&format!("f{number}"), "content");
    }
    m.run("a", "");
    let look = "cat /work/f* > /dev/null; ls -l /work > /dev/null; test ! -e /work/absent";
    m.say("a", look);
    m.say("a", look);
    let requests = || {
        m.world.inspect("a")["mounts"][0]["requests"]
            .as_u64()
            .unwrap()
    };
    let before = requests();
    assert!(before > 0);
    m.say("a", look);
    // A program that lists a directory from its beginning wants to see new entries.
    let listings = 4;
    assert!(
        requests() <= before + listings,
        "{} after {before}",
        requests()
    );
    let before = requests();
    m.say(
        "a",
        "for i in $(seq 49); do cat /work/f$i > /dev/null; done; stat /work/f1 /work",
    );
    assert_eq!(requests(), before);
}
