//! What the commands report about a sandbox and about the host, and where a keeper works: any home,
//! any user, any jail.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::support::mount::is_root;
use crate::support::ordinary::{ORDINARY, Ordinary};
use crate::support::{self, World, finish, program, until};

#[test]
fn a_running_sandbox_is_described_in_full() {
    let world = World::new();
    let made = world.start("a", &["--memory", "256M", "--cpus", "2"]);
    assert_eq!(made["name"], "a");
    let mut info = world.inspect("a");
    assert_eq!(
        world.inspect(made["id"].as_str().unwrap()),
        info,
        "an id is as good as a name"
    );
    // A list does not read each sandbox's states.
    assert_eq!(
        info.as_object_mut().unwrap().remove("not_durable"),
        Some(serde_json::json!([]))
    );
    assert_eq!(world.json(["ps"])[0], info);
    assert_eq!(
        (&info["id"], &info["name"], &info["state"]),
        (&made["id"], &"a".into(), &"running".into())
    );
    assert_eq!(
        (&info["image"], &info["memory_bytes"], &info["cpus"]),
        (&"tiny".into(), &(256u64 << 20).into(), &2.into())
    );
    let program = |field: &str| fs::read_link(format!("/proc/{}/exe", info[field])).unwrap();
    assert!(
        program("qemu_pid")
            .to_string_lossy()
            .contains("qemu-system-")
    );
    assert_eq!(
        program("keeper_pid"),
        support::program().canonicalize().unwrap()
    );
    let doctor = world.json(["doctor"])["qemu"]["found"].clone();
    assert_eq!(
        (&info["accelerator"], &info["qemu_version"]),
        (&doctor["accelerator"], &doctor["version"])
    );
    let created = info["created_at"].as_str().unwrap();
    let age = humantime::parse_rfc3339(created)
        .unwrap()
        .elapsed()
        .unwrap();
    assert!(age < Duration::from_secs(120), "{created}");
    let shown = world.ok(["inspect", "a"]);
    for word in ["running", "tiny", "256 MiB", created] {
        assert!(
            shown.out().contains(word),
            "{word} is not in {}",
            shown.out()
        );
    }

    let stats = world.json(["stats", "a"]);
    let number = |pointer: &str| number_at(&stats, pointer);
    assert!(
        (200 << 20..256 << 20).contains(&number("/guest/memory_total_bytes")),
        "{stats}"
    );
    assert!(number("/guest/memory_available_bytes") < number("/guest/memory_total_bytes"));
    assert!((1..500).contains(&number("/guest/processes")) && number("/guest/uptime_ms") > 0);
    assert!(number("/host_memory_bytes") > 32 << 20, "{stats}");
    assert!(number("/host_disk_bytes") > 64 << 10, "{stats}");
    // So much work takes processor time on every host.
    let work = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done";
    assert_eq!(world.sh("a", work).code, 0);
    let worked = number_at(&world.json(["stats", "a"]), "/host_cpu_ms");
    assert!(worked > number("/host_cpu_ms") + 50, "{worked}: {stats}");
    assert!(world.ok(["stats", "a"]).out().contains("guest memory"));
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[track_caller]
fn number_at(stats: &Value, pointer: &str) -> u64 {
    let number = stats.pointer(pointer).and_then(Value::as_u64);
    number.unwrap_or_else(|| panic!("{pointer}: {stats}"))
}

#[test]
fn logs_show_the_console_and_follow_it_to_its_end() {
    let world = World::new();
    world.start("a", &[]);
    let mut command = world.command();
    let following = command
        .args(["logs", "-f", "a"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(
        world
            .sh("a", "echo said on the console > /dev/console")
            .code,
        0
    );
    until("logs show it", || {
        world
            .ok(["logs", "a"])
            .out()
            .contains("said on the console")
    });
    let json = world.json(["logs", "a"]);
    assert!(
        json["console"]
            .as_str()
            .unwrap()
            .contains("said on the console"),
        "{json}"
    );
    world.ok(["stop", "a"]);
    let followed = finish(following);
    assert_eq!(followed.code, 0, "{followed:?}");
    assert!(
        followed.out().contains("said on the console") && followed.out().contains("Power down"),
        "{followed:?}"
    );
    world.ok(["rm", "a"]);
}

#[test]
fn doctor_reports_what_the_host_can_do_and_why_not_more() {
    let world = World::new();
    let found = world.json(["doctor"]);
    assert_eq!(found["home"], world.home().to_str().unwrap());
    let qemu = &found["qemu"]["found"];
    assert!(
        qemu["version"].as_str().unwrap().split('.').count() == 3,
        "{found}"
    );
    assert!(
        qemu["screens_refused"].is_null(),
        "{found}: its devices are in the package qemu-system-common"
    );
    assert!(
        found["disk_free_bytes"].as_u64().unwrap() > 0
            && found["memory_available_bytes"].as_u64().unwrap() > 0
    );
    let shown = world.ok(["doctor"]);
    let line = shown
        .out()
        .lines()
        .find(|line| line.starts_with("accelerator"))
        .unwrap()
        .to_owned();
    match qemu["kvm_refused"].as_str() {
        Some(reason) => {
            assert_eq!(qemu["accelerator"], "tcg");
            assert!(
                !reason.is_empty() && line.contains("tcg") && line.contains(reason),
                "{line}"
            );
        }
        None => assert!(
            qemu["accelerator"] == "kvm" && line.contains("kvm"),
            "{line}"
        ),
    }
    // A cached verdict is reused: the test writes a value that no probe would write, and it stays.
    let cache = world.home().join("cache/engine-2");
    let mut kept: Value = serde_json::from_slice(&fs::read(&cache).unwrap()).unwrap();
    (kept["aio"], kept["aio_reason"]) = ("threads".into(), "a mark".into());
    // The file is shared with the stores of other tests.
    fs::remove_file(&cache).unwrap();
    fs::write(&cache, kept.to_string()).unwrap();
    assert_eq!(
        world.json(["doctor"])["qemu"]["found"]["io_uring_refused"],
        "a mark",
        "the verdicts are not cached"
    );
}

#[test]
fn completions_name_our_verbs() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = world.ok(["completion", shell]);
        for verb in [
            "run", "exec", "attach", "shell", "cp", "logs", "inspect", "forward", "stop", "start",
            "doctor",
        ] {
            assert!(script.out().contains(verb), "{shell} lacks {verb}");
        }
        assert!(
            script.out().contains("boot-timeout"),
            "{shell} lacks the options"
        );
    }
}

#[test]
fn a_sandbox_with_rm_is_removed_when_it_stops() {
    let world = World::new();
    world.start("a", &["--rm"]);
    world.ok(["stop", "a"]);
    until("it is removed", || world.residue().is_empty());
    world.run(["inspect", "a"]).failed_with(&["no sandbox a"]);
    world.start("a", &["--rm"]);
    world.sh("a", "poweroff -f");
    until("it is removed", || world.residue().is_empty());
    // If the keeper is killed, the next command removes the sandbox.
    world.start("a", &["--rm"]);
    support::kill(
        u32::try_from(world.inspect("a")["keeper_pid"].as_u64().unwrap()).unwrap(),
        "KILL",
    );
    until("it is removed", || {
        world.json(["ps", "-a"]) == Value::Array(Vec::new())
    });
    until("nothing is left", || {
        world.residue().is_empty() && support::processes_of(world.home()).is_empty()
    });
}

#[test]
fn sigterm_to_a_keeper_stops_its_sandbox_cleanly() {
    let world = World::new();
    world.start("a", &[]);
    assert_eq!(world.sh("a", "echo kept > /srv/note").code, 0);
    let keeper = u32::try_from(world.inspect("a")["keeper_pid"].as_u64().unwrap()).unwrap();
    support::kill(keeper, "TERM");
    until("it stops", || world.inspect("a")["state"] == "stopped");
    world.ok(["start", "a"]);
    assert_eq!(world.sh("a", "cat /srv/note").out(), "kept\n");
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

/// As in a shutdown of the host: all processes are asked to end at the same moment.
#[test]
fn a_sandbox_remains_when_its_keeper_and_machine_end_together() {
    let world = World::new();
    world.start("a", &[]);
    assert_eq!(world.sh("a", "echo kept > /srv/note; sync").code, 0);
    let info = world.inspect("a");
    for field in ["qemu_pid", "keeper_pid"] {
        support::kill(
            u32::try_from(info[field].as_u64().unwrap()).unwrap(),
            "TERM",
        );
    }
    until("it rests", || {
        world.inspect("a")["state"] != "running" && world.inspect("a")["state"] != "stopping"
    });
    world.ok(["start", "a"]);
    assert_eq!(world.sh("a", "cat /srv/note").out(), "kept\n");
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[test]
fn finished_clients_leave_no_open_files_in_a_keeper() {
    let world = World::new();
    world.start("a", &[]);
    let keeper = world.inspect("a")["keeper_pid"].as_u64().unwrap();
    let descriptors = || fs::read_dir(format!("/proc/{keeper}/fd")).unwrap().count();
    let ask = || {
        (
            world.ok(["stats", "a"]),
            world.ok(["exec", "a", "--", "true"]),
        )
    };
    ask();
    let before = descriptors();
    (0..10).for_each(|_| drop(ask()));
    until("every connection is closed", || descriptors() <= before);
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[test]
fn any_path_can_be_a_home_and_stores_are_independent() {
    let dir = tempfile::Builder::new().prefix("st-").tempdir().unwrap();
    let long = World::at(
        (0..8)
            .fold(dir.path().to_owned(), |path, _| {
                path.join("a-rather-long-name")
            })
            .join("home"),
    );
    assert!(long.home().as_os_str().len() > 150);
    long.start("a", &[]);
    assert_eq!(long.sh("a", "echo here").out(), "here\n");

    // The same name in another store, which is named by a relative path.
    let near = World::at(dir.path().join("near"));
    let relative = |args: &[&str]| {
        let mut command = Command::new(program());
        command
            .args(["--home", "near"])
            .args(args)
            .env_remove("SANDTREE_HOME")
            .current_dir(dir.path());
        finish(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    };
    let made = relative(&["run", "-d", "--name", "a", "tiny"]);
    assert_eq!(made.code, 0, "{made:?}");
    assert_eq!(
        relative(&["exec", "a", "--", "echo", "near"]).out(),
        "near\n"
    );
    assert_eq!(near.inspect("a")["id"], made.out().trim());
    assert_ne!(near.inspect("a")["id"], long.inspect("a")["id"]);
    long.ok(["rm", "-f", "a"]);
    long.assert_empty();
    assert_eq!(
        relative(&["exec", "a", "--", "echo", "still"]).out(),
        "still\n"
    );
    assert_eq!(relative(&["stop", "a"]).code, 0);
    assert_eq!(relative(&["rm", "a"]).code, 0);
    near.assert_empty();
}

fn status_field(pid: &Value, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':').map(str::trim));
    line.unwrap_or_else(|| panic!("no {field} in {status}"))
        .to_owned()
}

#[test]
fn machines_are_confined_and_each_runs_as_another_user() {
    let world = World::new();
    let ids = ["a", "b"].map(|name| {
        world.start(name, &[]);
        let pid = world.inspect(name)["qemu_pid"].clone();
        assert_eq!(status_field(&pid, "NoNewPrivs"), "1");
        assert_eq!(status_field(&pid, "Seccomp"), "2");
        assert_eq!(status_field(&pid, "CapEff"), "0000000000000000");
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&environment),
            "LD_PRELOAD=/proc/self/fd/11\0",
            "and nothing of ours"
        );
        let uids = status_field(&pid, "Uid");
        let groups = status_field(&pid, "Groups");
        assert!(!is_root() || groups.is_empty(), "{groups}");
        uids.split_whitespace()
            .map(|uid| uid.parse::<u32>().unwrap())
            .collect::<Vec<_>>()
    });
    if is_root() {
        for uids in &ids {
            assert!(
                uids.iter()
                    .all(|uid| *uid >= 0x7000_0000 && *uid == uids[0]),
                "{uids:?}"
            );
        }
        assert_ne!(ids[0], ids[1]);
    }
    world.ok(["rm", "-f", "a", "b"]);
    world.assert_empty();
}

#[test]
fn an_ordinary_user_can_do_everything() {
    if !is_root() {
        return eprintln!("not checked: every other test of an ordinary user's run is this one");
    }
    let user = Ordinary::new();
    let once = user.run(&["run", "tiny", "--", "sh", "-c", "id -u; exit 4"]);
    assert_eq!((once.code, once.out()), (4, "0\n"), "{once:?}");
    user.ok(&["run", "-d", "--name", "a", "--disk", "1G", "tiny"]);
    assert_eq!(
        user.ok(&["exec", "a", "--", "echo", "here"]).out(),
        "here\n"
    );
    let info: Value = serde_json::from_slice(&user.ok(&["--json", "inspect", "a"]).stdout).unwrap();
    assert!(status_field(&info["qemu_pid"], "Uid").starts_with(ORDINARY));
    assert_eq!(status_field(&info["qemu_pid"], "Seccomp"), "2");
    assert_eq!(status_field(&info["qemu_pid"], "NoNewPrivs"), "1");
    fs::write(user.files().join("note"), "carried").unwrap();
    user.ok(&["cp", "note", "a:/srv/note"]);
    user.ok(&["cp", "a:/srv/note", "back"]);
    assert_eq!(
        fs::read_to_string(user.files().join("back")).unwrap(),
        "carried"
    );
    user.ok(&["stop", "a"]);
    user.ok(&["start", "a"]);
    assert_eq!(
        user.ok(&["exec", "a", "--", "cat", "/srv/note"]).out(),
        "carried"
    );
    assert!(user.ok(&["ps"]).out().contains("running"));
    user.ok(&["doctor"]);
    user.ok(&["rm", "-f", "a"]);
    user.world.assert_empty();
}
