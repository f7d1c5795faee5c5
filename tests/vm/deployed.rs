//! The program where people deploy it: in containers, with few privileges, and on many file
//! systems. Each case works as usual, or fails at once with an error that names what is missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::mount::{Mount, is_root};
use crate::support::{Answer, DEADLINE, World, eventually, finish, program};

/// A store, and a shell line that prepares the environment of the program. The line runs before
/// each command, in a new mount namespace.
struct Deployed {
    world: World,
    surroundings: String,
    /// The command that starts the program.
    by: &'static [&'static str],
}

impl Deployed {
    fn in_surroundings(world: World, surroundings: impl Into<String>) -> Self {
        Self {
            world,
            surroundings: surroundings.into(),
            by: &[],
        }
    }

    fn plainly(world: World) -> Self {
        Self::in_surroundings(world, "true")
    }

    fn run(&self, args: &[&str]) -> Answer {
        // starts: ln, mkdir, mount, setpriv, sh, touch, unshare
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation=private", "sh", "-c"]);
        command
            .arg(format!("set -e; {}; exec \"$@\"", self.surroundings))
            .arg("sh");
        command.args(self.by).arg(program()).args(args);
        command
            .env("SANDTREE_HOME", self.world.home())
            .env_remove("SANDTREE_QEMU");
        finish(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> Answer {
        let answer = self.run(args);
        assert_eq!(answer.code, 0, "{args:?}: {answer:?}");
        answer
    }

    fn has(&self, sandbox: &str, word: &str) {
        let answer = self.ok(&["exec", sandbox, "--", "cat", "/srv/word", "/run/word"]);
        assert_eq!(answer.out(), format!("{word}\n{word}\n"));
    }

    fn put(&self, sandbox: &str, word: &str) {
        self.ok(&[
            "exec",
            sandbox,
            "--",
            "sh",
            "-c",
            &format!("echo {word} | tee /srv/word > /run/word"),
        ]);
    }

    /// Every verb that makes, moves or removes files of the store, once.
    fn works(&self) {
        self.ok(&["run", "-d", "--name", "a", "--memory", "128M", "tiny"]);
        self.put("a", "one");
        let taken: Value =
            serde_json::from_slice(&self.ok(&["--json", "checkpoint", "a", "base"]).stdout)
                .unwrap();
        assert_eq!(taken["degraded"], Value::Array(Vec::new()), "{taken}");
        self.put("a", "two");
        self.ok(&["fork", "a", "--name", "b"]);
        self.ok(&["revert", "a", "base"]);
        self.has("a", "one");
        self.has("b-1", "two");
        self.ok(&["pause", "a"]);
        self.ok(&["resume", "a"]);
        self.has("a", "one");
        self.ok(&["save", "b-1", "kept", "--memory"]);
        self.ok(&["rm", "-f", "b-1"]);
        let file = self.world.home().with_file_name("kept.tar.zst");
        self.ok(&[
            "snapshot",
            "export",
            "kept",
            "-o",
            file.to_str().unwrap(),
            "--force",
        ]);
        self.ok(&["snapshot", "rm", "kept"]);
        self.ok(&["snapshot", "import", file.to_str().unwrap()]);
        self.ok(&["run", "-d", "--name", "c", "kept"]);
        self.has("c", "two");
        self.ok(&["stop", "a"]);
        self.ok(&["rm", "-f", "a", "c"]);
        self.ok(&["snapshot", "rm", "kept"]);
        self.ok(&["gc"]);
        self.world.assert_empty();
    }
}

/// A directory that is removed with the test.
fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("st-").tempdir().unwrap()
}

#[test]
fn a_read_only_root_is_enough() {
    let Some(mount) = Mount::tmpfs(1024) else {
        return;
    };
    let world = World::at(mount.path().join("home"));
    let deployed = Deployed::in_surroundings(world, "mount -o remount,bind,ro /");
    deployed.works();
    // A store must be in another place, and the error says so.
    let here = scratch();
    let store = here.path().join("home");
    let refused = deployed.run(&[
        "--home",
        store.to_str().unwrap(),
        "run",
        "tiny",
        "--",
        "true",
    ]);
    refused.failed_with(&[store.to_str().unwrap(), "Read-only file system", "--home"]);
}

/// As with `docker run --cap-drop ALL`: root can neither change its user nor trace processes of
/// other users.
#[test]
fn no_capabilities_are_needed() {
    if !is_root() {
        return eprintln!("not checked: every other test of an ordinary user's run is this one");
    }
    let by = &["setpriv", "--bounding-set=-all", "--inh-caps=-all"];
    let deployed = Deployed {
        by,
        ..Deployed::plainly(World::new())
    };
    let doctor: Value = serde_json::from_slice(&deployed.ok(&["--json", "doctor"]).stdout).unwrap();
    assert_eq!(doctor["qemu"]["found"]["own_uid"], false, "{doctor}");
    deployed.works();
}

/// The devices of a container: no `/dev/kvm`, and hardly any shared memory.
const BARE_DEVICES: &str = "mount -t tmpfs none $dev; for name in null zero full random urandom tty; do \
    touch $dev/$name; mount --bind /dev/$name $dev/$name; done; mkdir $dev/shm $dev/pts; mount --move $dev /dev; \
    mount -t tmpfs -o size=64k none /dev/shm; mount -t devpts -o newinstance,ptmxmode=0666 none /dev/pts; \
    ln -s pts/ptmx /dev/ptmx; ln -s /proc/self/fd /dev/fd";

#[test]
fn the_devices_of_a_container_are_enough() {
    if !is_root() {
        return eprintln!("not checked: making devices takes root");
    }
    let dev = scratch();
    let deployed = Deployed::in_surroundings(
        World::new(),
        format!("dev={}; {BARE_DEVICES}", dev.path().display()),
    );
    let doctor: Value = serde_json::from_slice(&deployed.ok(&["--json", "doctor"]).stdout).unwrap();
    assert_eq!(doctor["qemu"]["found"]["accelerator"], "tcg", "{doctor}");
    assert!(
        doctor["qemu"]["found"]["kvm_refused"]
            .as_str()
            .unwrap()
            .contains("/dev/kvm"),
        "{doctor}"
    );
    deployed
        .run(&["run", "--accel", "kvm", "tiny", "--", "true"])
        .failed_with(&["/dev/kvm"]);
    deployed.works();
}

/// A control group with a memory limit, of version 1 or 2. `None` where groups cannot be made.
struct Group(PathBuf);

impl Group {
    fn with_memory(mib: u32) -> Option<Group> {
        let name = format!("sandtree-test-{}", std::process::id());
        for (root, limit) in [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ] {
            let dir = Path::new(root).join(&name);
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Group(dir.clone());
            let limit = dir.join(limit);
            // Without the memory controller, the directory has no such file.
            if limit.exists() && fs::write(limit, format!("{mib}M")).is_ok() {
                return Some(group);
            }
        }
        eprintln!("not checked: no control group with a limit can be made here");
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The processes of the group may take a moment to end. After a failure, the end of the
        // store ends them.
        let gone = eventually(DEADLINE, || fs::remove_dir(&self.0).ok());
        assert!(
            gone.is_some() || std::thread::panicking(),
            "{} stays",
            self.0.display()
        );
    }
}

#[test]
fn the_memory_of_a_control_group_is_the_limit() {
    let Some(group) = Group::with_memory(400) else {
        return;
    };
    let deployed = Deployed::in_surroundings(
        World::new(),
        format!("echo $$ > {}/cgroup.procs", group.0.display()),
    );
    let words = [
        "control group",
        group.0.to_str().unwrap(),
        "512 MiB",
        "--memory",
        "limit",
    ];
    deployed.run(&["run", "-d", "tiny"]).failed_with(&words);
    deployed.world.assert_empty();
    let answer = deployed.ok(&["run", "--memory", "128M", "tiny", "--", "echo", "here"]);
    assert_eq!(answer.out(), "here\n");
    deployed.world.assert_empty();
}

#[test]
fn a_store_may_be_on_overlayfs_and_in_an_image_below_it() {
    let (Some(lower), Some(upper)) = (Mount::tmpfs(600), Mount::tmpfs(1024)) else {
        return;
    };
    drop(World::copied_to(lower.path().join("home")));
    let Some(merged) = Mount::overlay(lower.path(), &upper) else {
        return;
    };
    Deployed::plainly(World::empty_at(merged.path().join("home"))).works();
}

#[test]
fn a_store_may_be_on_fuse() {
    let Some(mount) = Mount::fuse("allow_other,default_permissions", 2048) else {
        return;
    };
    Deployed::plainly(World::at(mount.path().join("home"))).works();
}

/// Machines do not run as root, which mounted the file system.
#[test]
fn a_fuse_file_system_that_is_closed_to_machines_is_refused() {
    let Some(mount) = Mount::fuse("default_permissions", 1024) else {
        return;
    };
    let deployed = Deployed::plainly(World::at(mount.path().join("home")));
    deployed.run(&["run", "-d", "tiny"]).failed_with(&[
        mount.path().to_str().unwrap(),
        "FUSE",
        "allow_other",
        "--home",
    ]);
    deployed.world.assert_empty();
}

#[test]
fn a_file_system_without_modes_and_sockets_is_refused_by_name() {
    let Some(mount) = Mount::exfat(1024) else {
        return;
    };
    let copied = Deployed::plainly(World::at(mount.path().join("copied")));
    // The file system is mounted for its owner alone, and machines run as other users.
    copied.run(&["run", "-d", "tiny"]).failed_with(&[
        "the kernel is not readable",
        "--home",
        "ext4",
        "--machine-user",
    ]);
    let as_caller = ["--machine-user", "caller", "run", "-d", "tiny"];
    copied
        .run(&as_caller)
        .failed_with(&["no sockets", "--home", "ext4"]);
    // An open file that is removed stays in its directory until it is closed, and the directory
    // stays until the store is next opened.
    copied.ok(&["ps"]);
    copied.world.assert_empty();
}
