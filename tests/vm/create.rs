//! A creation that fails or is cancelled, at any step or moment, leaves nothing.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use sandtree::{Error, Fault, Faults, Host, HostConfig, PublishedPort, SandboxSpec, Step};

use crate::support::{DEADLINE, World, eventually, finish, kill, processes_of, until};

/// Moments of a creation that are visible from outside, in their order.
const MOMENTS: [Moment; 6] = [
    Moment::Beginning,
    Moment::Staged,
    Moment::Recorded,
    Moment::MachineStarted,
    Moment::KernelRuns,
    Moment::Running,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Beginning,
    Staged,
    Recorded,
    MachineStarted,
    KernelRuns,
    Running,
}

impl Moment {
    fn has_come(self, home: &Path) -> bool {
        match self {
            Moment::Beginning => true,
            Moment::Staged => {
                !entries(&home.join("staging")).is_empty() || Moment::Recorded.has_come(home)
            }
            Moment::Recorded => !entries(&home.join("names/sandboxes")).is_empty(),
            Moment::MachineStarted => processes_of(home).into_iter().any(is_qemu),
            Moment::KernelRuns => processes_of(home)
                .into_iter()
                .any(|pid| is_qemu(pid) && cpu_ticks(pid) >= 100),
            Moment::Running => sandboxes(home).any(|dir| {
                fs::read_to_string(dir.join("state.json"))
                    .is_ok_and(|state| state.contains("\"running\""))
            }),
        }
    }
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}

fn sandboxes(home: &Path) -> impl Iterator<Item = PathBuf> {
    entries(&home.join("sandboxes")).into_iter()
}

fn is_qemu(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm"))
        .is_ok_and(|name| name.starts_with("qemu-system"))
}

/// The processor time of a process, in hundredths of a second.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace();
    fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}

fn config(world: &World) -> HostConfig {
    let path = std::env::var_os("PATH").unwrap();
    HostConfig::new(world.home(), std::env::split_paths(&path).collect())
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn spec(port: u16) -> SandboxSpec {
    let publish = vec![PublishedPort {
        host: port,
        guest: 80,
    }];
    SandboxSpec {
        name: Some("x".into()),
        publish,
        ..SandboxSpec::new("tiny")
    }
}

fn cold(port: u16) -> SandboxSpec {
    SandboxSpec {
        cold: true,
        ..spec(port)
    }
}

/// Asserts that no directory, name, process or port is left.
fn assert_nothing(world: &World, port: u16, after: &str) {
    // A cancelled creation undoes itself in a thread of its own, which may not have started yet.
    until(
        &format!("nothing is left after {after}: {:?}", world.residue()),
        || world.residue().is_empty(),
    );
    until(&format!("no process is left after {after}"), || {
        processes_of(world.home()).is_empty()
    });
    // The accepting task closes the port when the runtime next polls the task.
    until(&format!("the port is free after {after}"), || {
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_at_any_step_leaves_nothing() {
    let world = World::new();
    let port = free_port();
    // A boot passes all steps of a creation except those of a restore.
    let booted = Step::CREATE.map(|step| (step, cold(port)));
    let restored = Step::CREATE
        .into_iter()
        .filter(|step| ![Step::Machine, Step::Hello, Step::Configure].contains(step));
    let restored = restored.chain(Step::RESTORE).map(|step| (step, spec(port)));
    for (step, spec) in booted.into_iter().chain(restored) {
        let host = Host::open(HostConfig {
            faults: Faults {
                fault: Some((step, Fault::Error)),
                ..Faults::default()
            },
            ..config(&world)
        })
        .await
        .unwrap();
        // The name of the failed creation is free again; otherwise this error would be another one.
        let error = host.create(spec).await.unwrap_err();
        assert!(
            matches!(error, Error::Injected { step: at } if at == step),
            "{error:?} instead of failing at {step}"
        );
        assert_nothing(&world, port, &step.to_string());
    }
    let host = Host::open(config(&world)).await.unwrap();
    let sandbox = host.create(spec(port)).await.unwrap();
    assert_eq!(sandbox.name(), "x");
    sandbox.remove().await.unwrap();
    assert_nothing(&world, port, "removal");
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_future_at_any_moment_leaves_nothing() {
    let world = World::new();
    let port = free_port();
    let host = Host::open(config(&world)).await.unwrap();
    for moment in MOMENTS {
        tokio::select! {
            biased;
            () = comes(moment, world.home()) => {}
            created = host.create(cold(port)) => {
                assert_eq!(moment, Moment::Running, "only that one may be missed");
                created.unwrap().remove().await.unwrap();
            }
        }
        until(&format!("nothing is left after {moment:?}"), || {
            world.residue().is_empty()
        });
        assert_nothing(&world, port, &format!("{moment:?}"));
    }
}

/// At arbitrary times between those moments.
#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_future_at_any_time_leaves_nothing() {
    let world = World::new();
    let port = free_port();
    let host = Host::open(config(&world)).await.unwrap();
    for millis in [0, 1, 3, 6, 10, 15, 25, 40, 70, 150, 400, 900] {
        let created =
            tokio::time::timeout(Duration::from_millis(millis), host.create(cold(port))).await;
        assert!(created.is_err(), "no guest is up in {millis} ms");
        until(&format!("nothing is left after {millis} ms"), || {
            world.residue().is_empty()
        });
        assert_nothing(&world, port, &format!("{millis} ms"));
    }
    host.create(spec(port))
        .await
        .unwrap()
        .remove()
        .await
        .unwrap();
}

/// A restore is so short that each millisecond of its first part is another step.
#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_restore_at_any_time_leaves_nothing() {
    let world = World::new();
    let port = free_port();
    let host = Host::open(config(&world)).await.unwrap();
    let mut given_up = 0;
    for millis in (0..30).chain((30..300).step_by(9)) {
        match tokio::time::timeout(Duration::from_millis(millis), host.create(spec(port))).await {
            Ok(created) => created.unwrap().remove().await.unwrap(),
            Err(_) => given_up += 1,
        }
        until(&format!("nothing is left after {millis} ms"), || {
            world.residue().is_empty()
        });
        assert_nothing(&world, port, &format!("{millis} ms"));
    }
    assert!(given_up > 20, "only {given_up} were given up");
}

async fn comes(moment: Moment, home: &Path) {
    let mut looks = tokio::time::interval(Duration::from_millis(2));
    loop {
        looks.tick().await;
        if tokio::task::block_in_place(|| moment.has_come(home)) {
            return;
        }
    }
}

/// Starts a command, interrupts it at the moment, and returns its exit code.
fn interrupt(world: &World, args: &[&str], moment: impl Fn() -> bool) -> i32 {
    let mut command = world.command();
    let mut child = command
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let came = eventually(DEADLINE, || {
        let over = child.try_wait().unwrap().is_some();
        (over || moment()).then_some(!over)
    });
    if came.expect("the moment comes") {
        kill(child.id(), "INT");
    }
    finish(child).code
}

/// Processes that have this store in their environment.
fn processes_with_home(home: &Path) -> Vec<u32> {
    let wanted = format!("SANDTREE_HOME={}", home.display()).into_bytes();
    let has_home = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|variable| variable == wanted)
    };
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(has_home).collect()
}

#[test]
fn an_interrupted_run_in_the_background_leaves_nothing() {
    let world = World::new();
    for moment in &MOMENTS[1..] {
        let code = interrupt(
            &world,
            &["run", "-d", "--cold", "--name", "x", "tiny"],
            || moment.has_come(world.home()),
        );
        if *moment == Moment::Running && code == 0 {
            world.ok(["rm", "-f", "x"]);
            continue;
        }
        assert_eq!(code, 130, "{moment:?}");
        // The command has waited until everything was undone.
        world.assert_empty();
    }
}

#[test]
fn an_interrupted_run_in_the_foreground_leaves_nothing() {
    let world = World::new();
    for moment in &MOMENTS[1..] {
        let args = [
            "run", "--cold", "--name", "x", "tiny", "--", "sleep", "1000",
        ];
        assert_eq!(
            interrupt(&world, &args, || moment.has_come(world.home())),
            130,
            "{moment:?}"
        );
        world.assert_empty();
    }
    let running = || Moment::Running.has_come(world.home());
    assert_eq!(
        interrupt(
            &world,
            &["--json", "run", "tiny", "--", "sleep", "1000"],
            running
        ),
        130
    );
    world.assert_empty();
}

/// If the command cannot start in the background, its sandbox is removed.
#[test]
fn a_background_run_whose_command_cannot_start_leaves_nothing() {
    let world = World::new();
    let answer = world.run(["run", "-d", "--name", "x", "tiny", "--", "/no/such/program"]);
    assert_eq!(answer.code, 127, "{answer:?}");
    world.assert_empty();
}

/// This test downloads packages; both moments of the build are tested in it for that reason.
#[test]
fn an_interrupted_build_of_an_image_leaves_nothing() {
    let dir = tempfile::Builder::new().prefix("st-").tempdir().unwrap();
    let world = World::empty_at(dir.path().join("home"));
    let staged = |part: &str| {
        let trees = entries(&world.home().join("staging"))
            .into_iter()
            .map(|dir| dir.join("tree").join(part));
        trees.flat_map(|dir| entries(&dir)).next().is_some()
    };
    for part in ["debs", "kernel"] {
        assert_eq!(
            interrupt(&world, &["run", "tiny", "--", "true"], || staged(part)),
            130,
            "{part}"
        );
        world.assert_empty();
        // Processes that apt started end when they notice that apt is gone.
        until(&format!("{part}: no tool of the build is left"), || {
            processes_with_home(world.home()).is_empty()
        });
        assert_eq!(
            entries(&world.home().join("names/images")),
            Vec::<PathBuf>::new()
        );
    }
}
