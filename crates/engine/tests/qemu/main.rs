//! Machines of the QEMU that is installed, with a guest of ninety bytes.

mod devices;
mod disk;
mod memory;
mod screen;
mod spare;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sandtree_engine::qmp::{Cont, QueryStatus, Stop};
use sandtree_engine::{Ending, Error, Event, Jail, Limits, Machine, MachineSpec, Shutdown, Step};
use support::{engine, spec};
use tokio::io::AsyncReadExt;

const DEADLINE: Duration = Duration::from_secs(30);

async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(DEADLINE, future)
        .await
        .expect("this takes too long")
}

async fn start(dir: &Path, cmdline: &str) -> Machine {
    within(engine().await.start(spec(dir, cmdline)))
        .await
        .expect("the machine starts")
}

fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn ended_by_guest(reason: &str) -> Option<Shutdown> {
    Some(Shutdown {
        guest: true,
        reason: reason.into(),
    })
}

#[tokio::test]
async fn the_guest_runs_talks_stops_and_continues() {
    let dir = tempfile::tempdir().unwrap();
    let mut machine = start(dir.path(), "wait for it").await;
    assert!(machine.take_link().is_some());
    assert!(machine.take_link().is_none());

    let mut said = [0; 11];
    within(machine.take_console().unwrap().read_exact(&mut said))
        .await
        .unwrap();
    assert_eq!(&said, b"wait for it");

    let mut events = machine.events();
    machine.qmp().run(Stop {}).await.unwrap();
    assert!(matches!(events.next().await, Some(Event::Stop { .. })));
    assert_eq!(
        machine.qmp().run(QueryStatus {}).await.unwrap().status,
        "paused"
    );
    machine.qmp().run(Cont {}).await.unwrap();
    assert!(matches!(events.next().await, Some(Event::Resume { .. })));

    let exit = machine.quit(DEADLINE).await.unwrap();
    assert!(exit.status.success(), "{exit}");
    assert!(!exists(machine.pid()));
    assert_eq!(machine.ending().shutdown.unwrap().reason, "host-qmp-quit");
    assert_eq!(machine.exited().await, exit);
}

#[tokio::test]
async fn power_off_reset_and_panic_end_the_machine_and_are_distinguished() {
    for (cmdline, panicked, reason) in [
        ("off", false, "guest-shutdown"),
        ("reset", false, "guest-reset"),
        ("panic", true, "guest-panic"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let machine = start(dir.path(), cmdline).await;
        let exit = within(machine.exited()).await;
        assert!(exit.status.success(), "{cmdline}: {exit}");
        assert_eq!(
            machine.ending(),
            Ending {
                panicked,
                shutdown: ended_by_guest(reason)
            },
            "{cmdline}"
        );
    }
}

#[tokio::test]
async fn a_killed_machine_is_reaped_and_later_commands_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "wait").await;
    within(machine.kill()).await;
    assert!(!exists(machine.pid()));
    assert!(matches!(
        machine.qmp().run(Stop {}).await,
        Err(Error::Died { .. })
    ));
}

#[tokio::test]
async fn a_dropped_machine_is_killed_and_reaped() {
    let dir = tempfile::tempdir().unwrap();
    let machine = start(dir.path(), "wait").await;
    let pid = machine.pid();
    let exit = machine.exit();
    drop(machine);
    within(exit.wait()).await;
    assert!(!exists(pid));
}

#[tokio::test]
async fn qemu_that_ends_at_start_is_quoted() {
    let dir = tempfile::tempdir().unwrap();
    let extra_args = vec!["-device".into(), "no-such-device".into()];
    let spec = MachineSpec {
        extra_args,
        ..spec(dir.path(), "wait")
    };
    let error = within(engine().await.start(spec)).await.unwrap_err();
    assert!(
        matches!(&error, Error::Start { exit } if exit.status.code() == Some(1)),
        "{error}"
    );
    assert!(error.to_string().contains("no-such-device"), "{error}");
}

/// Drops the start at many moments; each QEMU that came to life has its files open and must go.
#[tokio::test]
async fn a_start_that_is_given_up_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let engine = engine().await;
    for delay_ms in [0, 1, 2, 5, 10, 20, 40, 80] {
        let start = engine.start(spec(dir.path(), "wait"));
        // It may have succeeded by then; dropping the machine is the same promise.
        drop(tokio::time::timeout(Duration::from_millis(delay_ms), start).await);
    }
    let kernel = dir.path().join("kernel");
    wait_until(|| !children().iter().any(|pid| holds(*pid, &kernel)));
}

#[tokio::test]
async fn the_process_is_confined() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        file_bytes: Some(1 << 30),
        ..Limits::default()
    };
    let machine = engine()
        .await
        .start(MachineSpec {
            limits,
            ..spec(dir.path(), "wait")
        })
        .await
        .unwrap();
    let proc = PathBuf::from(format!("/proc/{}", machine.pid()));
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let field = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(field("NoNewPrivs:"), "1");
    assert_eq!(field("Seccomp:"), "2");
    assert_eq!(field("CapEff:"), "0000000000000000");
    if let Jail { uid: Some(uid) } = support::jail() {
        assert_eq!(field("Uid:"), format!("{uid} {uid} {uid} {uid}"));
        assert_eq!(field("Gid:"), format!("{uid} {uid} {uid} {uid}"));
        assert_eq!(field("Groups:"), "");
    }
    let limits = fs::read_to_string(proc.join("limits")).unwrap();
    let limit = |name: &str| {
        limits
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap()
            .to_owned()
    };
    assert!(limit("Max core file size").contains(" 0 "));
    assert!(limit("Max file size").contains(" 1073741824 "));
    assert_eq!(
        fs::read(proc.join("environ")).unwrap(),
        b"LD_PRELOAD=/proc/self/fd/11\0"
    );
    assert_eq!(fs::read_link(proc.join("cwd")).unwrap(), Path::new("/"));
}

#[tokio::test]
async fn a_user_id_that_cannot_be_taken_is_a_clear_error() {
    if rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let spec = MachineSpec {
        jail: Jail { uid: Some(64_323) },
        ..spec(dir.path(), "wait")
    };
    let error = engine().await.start(spec).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Jail {
                step: Step::Groups,
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn files_the_machines_user_cannot_read_are_named() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let spec = MachineSpec {
        jail: Jail { uid: Some(64_323) },
        ..spec(dir.path(), "wait")
    };
    fs::set_permissions(
        dir.path().join("initramfs"),
        fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    let error = engine().await.start(spec).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Unreadable {
                file: "initramfs",
                uid: 64_323
            }
        ),
        "{error}"
    );
}

/// Whatever way the parent dies: here the one it cannot react to.
#[test]
fn a_killed_parent_leaves_no_qemu() {
    let dir = tempfile::tempdir().unwrap();
    let mut parent = Command::new(example("hold"))
        .arg(dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let qemu: u32 = line.trim().parse().unwrap();
    assert!(exists(qemu));
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_until(|| is_gone(qemu));
}

/// Cargo builds examples beside the tests.
fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .join("examples")
        .join(name)
}

/// Gone, or dead and not yet reaped by the process that inherited it.
fn is_gone(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat
            .rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('Z')),
        Err(_) => true,
    }
}

fn children() -> Vec<u32> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let read =
        |task: fs::DirEntry| fs::read_to_string(task.path().join("children")).unwrap_or_default();
    let text: Vec<String> = tasks.flatten().map(read).collect();
    text.iter()
        .flat_map(|text| text.split_whitespace())
        .flat_map(str::parse)
        .collect()
}

fn holds(pid: u32, file: &Path) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
    descriptors.is_ok_and(|mut all| {
        all.any(|fd| fd.is_ok_and(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == file)))
    })
}

#[track_caller]
fn wait_until(condition: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "this takes too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}
