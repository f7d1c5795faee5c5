//! Checks that must pass wherever KVM works: in the outer guest of `kvm::`, and on a host by
//! `scripts/try-kvm`.
//!
//! Guests are small, because all of their memory is compared, and everything in the outer guest is
//! emulated.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sandtree::{MemoryMode, SandboxSpec};

use super::keyed;
use crate::exact;
use crate::support::lab::{Lab, spec, worker};
use crate::support::{World, held, say, text};

/// The options of these sandboxes.
const SHAPE: &[&str] = &["--memory", "128M"];
const SHAPE_OF_TWO: &[&str] = &["--memory", "128M", "--cpus", "2"];
const MEMORY_BYTES: u64 = 128 << 20;
/// A warm state exists for each.
pub const SHAPES: [&[&str]; 2] = [SHAPE, SHAPE_OF_TWO];

/// Names a store that already has the warm states.
pub const BASE: &str = "SANDTREE_TEST_KVM_BASE";
/// A test prints this if it cannot run its check.
pub const SKIPPED: &str = "SKIPPED";

fn base() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| match std::env::var_os(BASE) {
        Some(base) => base.into(),
        None => keyed::made_once("kvm-direct", &keyed::key(&[]), |path| {
            let world = World::at(path.to_owned());
            SHAPES
                .iter()
                .for_each(|shape| drop(world.ok(run_once(shape))));
        }),
    })
}

/// The command that boots this shape, keeps the warm state, and restores it.
pub fn run_once<'a>(shape: &[&'a str]) -> Vec<&'a str> {
    [&["run", "--accel", "kvm"], shape, &["tiny", "--", "true"]].concat()
}

/// Messages of a kernel about errors and untrusted clocks.
const COMPLAINTS: &str =
    "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace|unstable|lockup|stall' || true";
/// The digests of all files that the work has left, in memory and on disk.
const SUMS: &str = "md5sum /dev/shm/new* /root/new*";

/// Creates, overwrites and frees files in memory and on disk; returns their digests.
fn work(world: &World, sandbox: &str, number: usize) -> String {
    let line = format!(
        "cd /dev/shm; dd if=/dev/urandom of=new{number} bs=64k count=20 2> /dev/null; \
         dd if=/dev/urandom of=new bs=64k count=8 conv=notrunc 2> /dev/null; rm -f new$(({number} - 1)); \
         cp new{number} /root/; {SUMS}"
    );
    say(world, sandbox, &line)
}

/// A checkpoint in the best available mode.
fn checkpoint(world: &World, sandbox: &str, tag: &str) {
    let best = world.json(["doctor"])["qemu"]["found"]["memory_mode"].clone();
    let taken = world.json(["checkpoint", sandbox, tag]);
    assert_eq!(
        (&taken["mode"], &taken["degraded"]),
        (&best, &serde_json::json!([])),
        "{taken}"
    );
}

/// What a guest must hold: a word in files, in memory and in a process that was asked for it a
/// given number of times; files by their digests; and a kernel with no new complaints since its
/// boot.
#[derive(Clone, Copy)]
struct Expected<'a> {
    word: &'a str,
    times: u32,
    sums: &'a str,
    complaints: &'a str,
}

impl Expected<'_> {
    #[track_caller]
    fn assert_held(self, world: &World, sandbox: &str) {
        held::assert_holds(world, sandbox, self.word, self.times);
        assert_eq!(
            say(world, sandbox, SUMS),
            self.sums,
            "{sandbox}, {}",
            self.word
        );
        assert_eq!(
            say(world, sandbox, COMPLAINTS),
            self.complaints,
            "{sandbox}, {}",
            self.word
        );
    }
}

/// Takes sandbox `a` through every verb, and checks its files, memory and processes after each.
fn goes_through_every_verb(world: &World) {
    // A kernel may complain about an emulated processor when it boots.
    let complaints = &say(world, "a", COMPLAINTS);
    held::begin(world, "a", "one");
    let first = &work(world, "a", 1);
    checkpoint(world, "a", "c1");
    held::write(world, "a", "two");
    let second = &work(world, "a", 2);
    checkpoint(world, "a", "c2");
    held::write(world, "a", "three");

    world.ok(["revert", "a", "c1"]);
    Expected {
        word: "one",
        times: 0,
        sums: first,
        complaints,
    }
    .assert_held(world, "a");
    world.ok(["undo", "a"]);
    let second = Expected {
        word: "three",
        times: 0,
        sums: second,
        complaints,
    };
    second.assert_held(world, "a");
    world.ok(["revert", "a", "c2"]);
    let second = Expected {
        word: "two",
        ..second
    };
    second.assert_held(world, "a");

    world.ok(["fork", "a", "-n", "2"]);
    let identity = |name: &str| {
        say(
            world,
            name,
            "cat /proc/sys/kernel/random/uuid /etc/machine-id; hostname",
        )
    };
    assert_ne!(identity("a-1"), identity("a-2"));
    let asked_once = Expected { times: 1, ..second };
    for copy in ["a-1", "a-2"] {
        asked_once.assert_held(world, copy);
    }
    world.ok(["rm", "-f", "a-1", "a-2"]);

    world.ok(["pause", "a"]);
    world.ok(["resume", "a"]);
    asked_once.assert_held(world, "a");
    goes_to_another_store(world, |other| {
        Expected { times: 2, ..second }.assert_held(other, "b")
    });
}

/// Each verb that stops and loads a machine, once.
fn goes_through_states(world: &World) {
    let complaints = &say(world, "a", COMPLAINTS);
    held::begin(world, "a", "one");
    let sums = &work(world, "a", 1);
    checkpoint(world, "a", "c1");
    held::write(world, "a", "two");
    world.ok(["revert", "a", "c1"]);
    let expected = Expected {
        word: "one",
        times: 0,
        sums,
        complaints,
    };
    expected.assert_held(world, "a");
    world.ok(["fork", "a"]);
    let expected = Expected {
        times: 1,
        ..expected
    };
    expected.assert_held(world, "a-1");
    world.ok(["pause", "a"]);
    world.ok(["resume", "a"]);
    expected.assert_held(world, "a");
    world.ok(["rm", "-f", "a", "a-1"]);
    world.assert_empty();
}

fn assert_runs_under_kvm(world: &World) {
    let info = world.inspect("a");
    assert_eq!(
        (text(&info["accelerator"]), &info["degraded"]),
        ("kvm", &serde_json::json!([])),
        "{info}"
    );
}

/// Saves sandbox `a`, removes it, and starts `b` from an import into an empty store.
fn goes_to_another_store(world: &World, check: impl Fn(&World)) {
    let beside = world
        .home()
        .parent()
        .expect("a store is in a directory")
        .to_owned();
    let file = beside.join("saved.tar.zst");
    let other = World::empty_at(beside.join("other"));
    let file = file.to_str().expect("it is text");
    world.ok(["save", "a", "saved", "--memory"]);
    world.ok(["snapshot", "export", "saved", "-o", file]);
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
    other.ok(["snapshot", "import", file, "--name", "there"]);
    other.ok(["run", "-d", "--name", "b", "there"]);
    assert_eq!(text(&other.inspect("b")["accelerator"]), "kvm");
    check(&other);
    other.ok(["rm", "-f", "b"]);
    other.assert_empty();
}

/// Lets a guest write memory and files in an endless loop.
fn keep_busy(world: &World, sandbox: &str) {
    world.ok([
        "cp".as_ref(),
        worker().as_os_str(),
        format!("{sandbox}:/root/worker").as_ref(),
    ]);
    say(world, sandbox, "chmod 755 /root/worker; mkdir /churn");
    world.ok([
        "exec",
        "--detach",
        sandbox,
        "--",
        "/root/worker",
        "churn",
        "7",
    ]);
    say(
        world,
        sandbox,
        "until [ -s /dev/shm/turn ]; do usleep 20000; done",
    );
}

#[test]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
fn doctor_reports_kvm() {
    let world = World::like(base());
    let found = &world.json(["doctor"])["qemu"]["found"];
    assert_eq!(
        (text(&found["accelerator"]), found["kvm_refused"].is_null()),
        ("kvm", true),
        "{found}"
    );
    let report = world.ok(["doctor"]);
    assert!(report.out().contains("accelerator  kvm"), "{report:?}");
    assert!(
        report
            .out()
            .contains("Intel VMX and physical hardware are untested"),
        "{report:?}"
    );
}

#[test]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
fn every_verb_keeps_files_memory_and_processes() {
    let world = World::like(base());
    world.start("a", SHAPE);
    assert_runs_under_kvm(&world);
    assert_eq!(
        say(
            &world,
            "a",
            "cat /sys/devices/system/clocksource/clocksource0/current_clocksource"
        ),
        "kvm-clock"
    );
    goes_through_every_verb(&world);
}

#[test]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
fn two_processors_and_a_busy_guest() {
    let world = World::like(base());
    world.start("a", SHAPE_OF_TWO);
    assert_eq!(say(&world, "a", "nproc"), "2");
    assert_runs_under_kvm(&world);
    keep_busy(&world, "a");
    goes_through_states(&world);
}

/// A guest that ran guests of its own would reach a part of the host's kernel that no sandbox
/// needs.
#[test]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
fn guests_have_no_nested_virtualisation() {
    let world = World::like(base());
    let flags = "grep -m1 ^flags /proc/cpuinfo | tr ' ' '\\n' | grep -xE 'svm|vmx' || true";
    let answer = world.ok([&["run"], SHAPE, &["tiny", "--", "sh", "-c", flags]].concat());
    assert_eq!(answer.out(), "");
}

/// How many of the verbs that restore a state are checked. `vm::exact` checks every mode with all
/// of them.
#[derive(Clone, Copy)]
enum Ways {
    Every,
    Few,
}

/// A busy guest's memory is equal, byte for byte, after the verbs that restore a state.
async fn is_exact(mode: MemoryMode, name: &str, cpus: u32, ways: Ways) {
    let lab = Lab::of(World::like(base())).await;
    let found = lab.world.json(["doctor"])["qemu"]["found"]["memory_modes_refused"].clone();
    let refused = found
        .as_array()
        .into_iter()
        .flatten()
        .map(text)
        .find(|line| line.starts_with(name));
    if let Some(refused) = refused {
        // `println` prints nothing in a test that passes.
        return writeln!(std::io::stderr(), "\n{SKIPPED}: {refused}").expect("it is open");
    }
    let spec = SandboxSpec {
        memory_mode: Some(mode),
        memory_bytes: Some(MEMORY_BYTES),
        cpus: Some(cpus),
        ..spec("x")
    };
    let all = match ways {
        Ways::Every => exact::of_every_way(lab, spec).await,
        Ways::Few => exact::of_a_few_ways(lab, spec).await,
    };
    for taken in all {
        assert_eq!((taken.mode.as_str(), taken.degraded), (name, Vec::new()));
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
async fn write_protect_is_exact_with_two_processors() {
    is_exact(MemoryMode::WriteProtect, "write-protect", 2, Ways::Every).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
async fn soft_dirty_is_exact() {
    is_exact(MemoryMode::SoftDirty, "soft-dirty", 1, Ways::Few).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
async fn anonymous_is_exact() {
    is_exact(MemoryMode::Anonymous, "anonymous", 1, Ways::Few).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs KVM: kvm:: runs it in an emulated guest, scripts/try-kvm on a host"]
async fn full_is_exact() {
    is_exact(MemoryMode::Full, "full", 1, Ways::Few).await;
}
