//! States that continue under another QEMU: the installed one, and the one of Debian's backports,
//! unpacked next to it.
//!
//! If the backports cannot be reached, each test says so on standard error and passes.

use crate::support::held;
use crate::support::lab;

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use sandtree::{Host, HostConfig, MachineUser, Sandbox, SandboxSpec};

use crate::support::exactness::Exactness;
use crate::support::lab::{Lab, give_worker, spec, start};
use crate::support::mount::Mount;
use crate::support::{Answer, World};

/// A processor that is equal under both.
const PORTABLE: &str = "Opteron_G3";

/// The exit code of `scripts/qemu-beside` when backports cannot be reached.
const UNREACHABLE: i32 = 3;

/// The newer QEMU, or `None` after printing the reason.
pub fn newer() -> Option<&'static Path> {
    static NEWER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match NEWER.get_or_init(unpacked) {
        Ok(path) => Some(path),
        Err(reason) => {
            // `println` prints nothing in a test that passes.
            writeln!(
                std::io::stderr(),
                "\nSKIPPED, nothing was moved between two QEMUs: {reason}\n"
            )
            .expect("it is open");
            None
        }
    }
}

fn unpacked() -> Result<PathBuf, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/qemu-beside");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("qemu-beside");
    // starts: our own program (scripts/qemu-beside)
    let answer = Command::new(script)
        .arg(dir)
        .stdin(Stdio::null())
        .output()
        .expect("the script runs");
    let said = String::from_utf8_lossy(&answer.stderr).trim().to_owned();
    match answer.status.code() {
        Some(0) => Ok(String::from_utf8(answer.stdout)
            .expect("a path is text")
            .trim()
            .into()),
        Some(UNREACHABLE) => Err(said),
        _ => panic!("no QEMU beside the installed one: {said}"),
    }
}

/// Whether every user can start a program. Users that machines run as cannot read root's home, in
/// which this repository may be.
fn is_reachable_for_all(program: &Path) -> bool {
    let is_open = |dir: &Path| dir.metadata().is_ok_and(|found| found.mode() & 0o001 != 0);
    program.ancestors().all(is_open)
}

/// Runs `sandtree --qemu NEWER ARGS`.
fn under<S: AsRef<OsStr> + ?Sized>(world: &World, newer: &Path, args: &[&S]) -> Answer {
    let mut options = vec![OsStr::new("--qemu"), newer.as_os_str()];
    if !is_reachable_for_all(newer) {
        options.extend(["--machine-user", "caller"].map(OsStr::new));
    }
    world.run(
        options
            .into_iter()
            .chain(args.iter().map(|arg| arg.as_ref())),
    )
}

#[track_caller]
fn ok(answer: Answer) {
    assert_eq!(answer.code, 0, "{answer:#?}");
}

fn version(world: &World) -> String {
    world.inspect("a")["qemu_version"]
        .as_str()
        .expect("it runs")
        .to_owned()
}

/// The processor as the guest's kernel found it at its boot.
fn processor(world: &World) -> String {
    let answer = world.sh("a", "cat /proc/cpuinfo | grep -v MHz");
    assert_eq!(answer.code, 0, "{answer:#?}");
    answer.out().to_owned()
}

fn end(world: &World) {
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[test]
fn a_paused_sandbox_continues_under_a_newer_qemu_and_returns() {
    let Some(newer) = newer() else { return };
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    let older = version(&world);
    let seen = processor(&world);
    world.ok(["pause", "a"]);
    ok(under(&world, newer, &["resume", "a"]));
    assert_ne!(version(&world), older);
    held::assert_holds(&world, "a", "one", 0);
    // The processor is still that of the older QEMU, so the sandbox can return to it.
    assert_eq!(processor(&world), seen);
    world.ok(["pause", "a"]);
    world.ok(["resume", "a"]);
    assert_eq!(version(&world), older);
    held::assert_holds(&world, "a", "one", 1);
    end(&world);
}

#[test]
fn a_state_that_needs_more_processor_features_is_refused_by_their_names() {
    let Some(newer) = newer() else { return };
    let world = World::new();
    ok(under(&world, newer, &["run", "-d", "--name", "a", "tiny"]));
    held::begin(&world, "a", "one");
    world.ok(["pause", "a"]);
    world.run(["resume", "a"]).failed_with(&[
        "its processor has",
        "rdseed",
        "sha-ni",
        "lacks",
        "--cold",
        PORTABLE,
    ]);
    assert_eq!(
        world.inspect("a")["state"],
        "paused",
        "a refused state is as it was"
    );
    ok(under(&world, newer, &["resume", "a"]));
    held::assert_holds(&world, "a", "one", 0);
    end(&world);
}

/// An empty store, on a file system of its own where one can be mounted.
fn elsewhere(mount: Option<&Mount>) -> World {
    match mount {
        Some(mount) => World::empty_at(mount.path().join("home")),
        None => World::empty_at(
            PathBuf::from("/dev/shm").join(format!("sandtree-move-{}", std::process::id())),
        ),
    }
}

/// Saves sandbox `a` with its memory, removes it, and imports the save into another store as
/// `there`.
fn carried(world: &World, other: &World) {
    let file = world.home().join("../carried.tar.zst");
    world.ok(["save", "a", "here", "--memory"]);
    world.ok([
        OsStr::new("snapshot"),
        OsStr::new("export"),
        OsStr::new("here"),
        OsStr::new("-o"),
        file.as_os_str(),
    ]);
    world.ok(["rm", "-f", "a"]);
    world.ok(["snapshot", "rm", "here"]);
    let args = [
        OsStr::new("snapshot"),
        OsStr::new("import"),
        file.as_os_str(),
        OsStr::new("--name"),
        OsStr::new("there"),
    ];
    other.ok(args);
    std::fs::remove_file(file).expect("it was written");
}

#[test]
fn an_exported_save_continues_in_another_store_under_a_newer_qemu() {
    let Some(newer) = newer() else { return };
    let world = World::new();
    let mount = Mount::of_kind("xfs", 1024);
    let other = elsewhere(mount.as_ref());
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    let older = version(&world);
    let seen = processor(&world);
    carried(&world, &other);
    ok(under(&other, newer, &["run", "-d", "--name", "a", "there"]));
    assert_ne!(version(&other), older);
    held::assert_holds(&other, "a", "one", 0);
    assert_eq!(processor(&other), seen);
    other.ok(["rm", "-f", "a"]);
    other.ok(["snapshot", "rm", "there"]);
}

#[test]
fn an_exported_save_of_a_newer_qemu_is_refused_by_name_and_boots_cold() {
    let Some(newer) = newer() else { return };
    let world = World::new();
    let mount = Mount::of_kind("btrfs", 1024);
    let other = elsewhere(mount.as_ref());
    ok(under(&world, newer, &["run", "-d", "--name", "a", "tiny"]));
    held::begin(&world, "a", "one");
    assert_eq!(world.sh("a", "sync").code, 0);
    carried(&world, &other);
    let refused = other.run(["run", "-d", "--name", "a", "there"]);
    refused.failed_with(&[
        "its processor has",
        "rdseed",
        "sha-ni",
        "lacks",
        "--cold",
        PORTABLE,
    ]);
    other.ok(["run", "-d", "--cold", "--name", "a", "there"]);
    held::assert_disk_holds(&other, "a", "one");
    other.ok(["rm", "-f", "a"]);
    other.ok(["snapshot", "rm", "there"]);
}

#[test]
fn a_portable_processor_works_both_ways() {
    let Some(newer) = newer() else { return };
    let world = World::new();
    ok(under(
        &world,
        newer,
        &["run", "-d", "--cpu", PORTABLE, "--name", "a", "tiny"],
    ));
    held::begin(&world, "a", "one");
    let newest = version(&world);
    let seen = processor(&world);
    for times in 0..2 {
        world.ok(["pause", "a"]);
        world.ok(["resume", "a"]);
        assert_ne!(version(&world), newest);
        held::assert_holds(&world, "a", "one", times * 2);
        world.ok(["pause", "a"]);
        ok(under(&world, newer, &["resume", "a"]));
        assert_eq!(version(&world), newest);
        held::assert_holds(&world, "a", "one", times * 2 + 1);
    }
    assert_eq!(processor(&world), seen);
    end(&world);
}

/// A host on the same store, with this QEMU or the installed one.
async fn reopened(lab: &Lab, qemu: Option<&Path>) -> Host {
    let machine_user = match qemu {
        Some(qemu) if !is_reachable_for_all(qemu) => MachineUser::Caller,
        _ => MachineUser::Auto,
    };
    let config = HostConfig {
        qemu: qemu.map(Path::to_owned),
        machine_user,
        ..lab::config(lab.world.home())
    };
    Host::open(config).await.expect("the store opens")
}

/// Every byte of memory is equal under both versions, before the guest continues.
#[tokio::test(flavor = "multi_thread")]
async fn memory_is_exact_under_another_qemu() {
    let Some(newer) = newer() else { return };
    let lab = Lab::open().await;
    let spec = SandboxSpec {
        cpu: Some(PORTABLE.into()),
        ..spec("a")
    };
    let sandbox = lab.host.create(spec.clone()).await.expect("it is created");
    give_worker(&sandbox).await;
    start(&sandbox, "mkdir /churn; exec /dev/shm/worker churn 7").await;
    let mut exactness = Exactness::of(lab, &spec);
    exactness.checkpoint(&sandbox).await;
    let sandbox = moved(&mut exactness, sandbox, Some(newer)).await;
    exactness.verify(&sandbox, 0).await;
    exactness.checkpoint(&sandbox).await;
    let sandbox = moved(&mut exactness, sandbox, None).await;
    exactness.verify(&sandbox, 1).await;
    sandbox.remove().await.expect("it is removed");
    exactness.lab.world.assert_empty();
}

/// The sandbox under another QEMU, at the place where it was stopped.
async fn moved(exactness: &mut Exactness, sandbox: Sandbox, qemu: Option<&Path>) -> Sandbox {
    sandbox.kill().await.expect("it ends");
    drop(sandbox);
    exactness.lab.host = reopened(&exactness.lab, qemu).await;
    exactness.lab.host.sandbox("a").expect("it is there")
}
