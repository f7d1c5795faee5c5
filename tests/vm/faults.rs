//! A verb that fails at any of its steps harms nothing and leaves nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use sandtree::{
    Error, ErrorKind, Fault, Faults, ForkSpec, Phase, PublishedPort, Replace, Result, Reverted,
    Sandbox, SandboxSpec, Step,
};

use crate::support::exactness::Exactness;
use crate::support::lab::{Lab, give_worker, sh, spec, start, until_async};
use crate::support::{self, World, kill};

/// A sandbox in which faults are injected, and what its guest must hold.
struct Patient {
    lab: Lab,
    sandbox: Sandbox,
    /// What the guest holds on disk and in memory.
    holds: u32,
    /// The next number to write.
    next: u32,
}

impl Patient {
    /// A sandbox with a checkpoint `base`, in which the guest holds 0.
    async fn new() -> Patient {
        Self::in_lab(Lab::open().await, spec("x")).await
    }

    async fn in_lab(lab: Lab, spec: SandboxSpec) -> Patient {
        let sandbox = lab.host.create(spec).await.expect("it is created");
        start(&sandbox, "echo $$ > /dev/shm/pid; exec sleep 100000").await;
        let mut patient = Patient {
            lab,
            sandbox,
            holds: 0,
            next: 0,
        };
        patient.write().await;
        patient
            .sandbox
            .checkpoint(Some("base"), Replace::No)
            .await
            .expect("it is taken");
        patient
    }

    /// Writes something new to disk and memory.
    async fn write(&mut self) {
        let line = format!("echo {0} > /srv/n; echo {0} > /dev/shm/n", self.next);
        sh(&self.sandbox, &line).await;
        (self.holds, self.next) = (self.next, self.next + 1);
    }

    /// Asserts that the guest runs with its processes and has everything that was written.
    async fn assert_unharmed(&self, after: &str) {
        assert_eq!(
            self.sandbox.state().phase,
            Some(Phase::Running),
            "after {after}"
        );
        let holds = sh(
            &self.sandbox,
            "cat /srv/n /dev/shm/n && kill -0 $(cat /dev/shm/pid)",
        )
        .await;
        assert_eq!(holds, format!("{0}\n{0}", self.holds), "after {after}");
    }

    /// Reverts to the base, whatever the condition of the present.
    async fn recover(&mut self, after: &str) -> Reverted {
        self.lab.no_fault();
        let reverted = self
            .sandbox
            .revert("base")
            .await
            .unwrap_or_else(|e| panic!("after {after}: {e:?}"));
        self.holds = 0;
        self.assert_unharmed(after).await;
        reverted
    }

    /// Asserts that the machine ended by itself and that the sandbox has the reason.
    async fn assert_crashed(&self, after: &str) {
        let rested = tokio::time::timeout(support::DEADLINE, async {
            self.sandbox.watch().await.unwrap().rested().await
        });
        let state = rested
            .await
            .unwrap_or_else(|_| panic!("after {after}: it never rests"));
        assert_eq!(
            state.phase,
            Some(Phase::Crashed),
            "after {after}: {state:?}"
        );
        assert!(
            state
                .reason
                .as_ref()
                .is_some_and(|reason| reason.contains("QEMU ended")),
            "after {after}: {state:?}"
        );
    }

    fn states(&self) -> BTreeSet<String> {
        let (states, broken) = self.lab.host.states("x").expect("they are listed");
        assert!(broken.is_empty(), "{broken:?}");
        states.into_iter().map(|state| state.id).collect()
    }

    /// Asserts that only this sandbox exists, with these states: no other process, name or
    /// directory, and no layer that no state lists.
    async fn assert_clean(&self, states: &BTreeSet<String>, machines: usize, after: &str) {
        assert_eq!(self.states(), *states, "after {after}");
        let home = self.lab.world.home();
        assert_eq!(
            names(&home.join("sandboxes")),
            [self.sandbox.id()],
            "after {after}"
        );
        assert_eq!(names(&home.join("names/sandboxes")), ["x"], "after {after}");
        assert_eq!(
            names(&home.join("staging")),
            Vec::<String>::new(),
            "after {after}"
        );
        let present: BTreeSet<String> = names(&self.dir().join("states")).into_iter().collect();
        assert_eq!(present, self.all_states(), "after {after}");
        assert_eq!(
            self.unlisted("disks", ".qcow2", "disk"),
            Vec::<String>::new(),
            "after {after}"
        );
        until_async(&format!("{machines} machines after {after}"), || {
            self.lab.all_machines().len() == machines
        })
        .await;
    }

    /// Memory layers that no state lists. After a capture that failed late, a machine may be based
    /// on such a layer.
    fn unlisted_memory(&self) -> Vec<String> {
        self.unlisted("memory", ".mem", "memory")
    }

    fn dir(&self) -> PathBuf {
        self.lab.dir(&self.sandbox)
    }

    /// The visible states, and the state that the sandbox is paused in.
    fn all_states(&self) -> BTreeSet<String> {
        let all = names(&self.dir().join("states"));
        let listed = |id: &String| {
            let kind = self.lab.manifest(&self.sandbox, id)["kind"].clone();
            kind != "fork" && kind != "warm"
        };
        all.into_iter()
            .filter(|id| !id.starts_with('.'))
            .filter(listed)
            .collect()
    }

    fn unlisted(&self, dir: &str, suffix: &str, list: &str) -> Vec<String> {
        let mut listed = BTreeSet::new();
        let head = self.lab.head(&self.sandbox);
        let manifests = self
            .all_states()
            .into_iter()
            .map(|id| self.lab.manifest(&self.sandbox, &id));
        for record in manifests.chain([head]) {
            let layers = if list == "memory" {
                &record["memory"]["layers"]
            } else {
                &record[list]
            };
            let ids = layers
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|id| id.as_str());
            listed.extend(ids.map(|id| format!("{id}{suffix}")));
        }
        names(&self.dir().join(dir))
            .into_iter()
            .filter(|name| !listed.contains(name))
            .collect()
    }

    async fn remove(self) {
        self.sandbox.remove().await.expect("it is removed");
        self.lab.world.assert_empty();
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().into_string().expect("names are text"))
        .collect()
}

#[track_caller]
fn assert_injected<T: std::fmt::Debug>(result: Result<T>, step: Step) {
    let error = result.expect_err("it fails");
    assert!(
        matches!(error, Error::Injected { step: at } if at == step),
        "{error:?} instead of failing at {step}"
    );
}

/// Asserts that the error names the end of QEMU or of the guest.
#[track_caller]
fn assert_tells_of_the_end<T: std::fmt::Debug>(result: Result<T>, step: Step) {
    let error = result.expect_err("it fails");
    let kinds = [ErrorKind::Engine, ErrorKind::Guest];
    assert!(kinds.contains(&error.kind()), "at {step}: {error:?}");
    assert!(error.report().message.len() > 10, "at {step}: {error:?}");
}

/// Steps at which the capture is complete, so that the death of the machine does no harm.
const ALL_IS_TAKEN: [Step; 3] = [
    Step::CapturePivoted,
    Step::CaptureWritten,
    Step::CapturePublish,
];

/// Enough data that a part of memory is copied before the stop.
const MUCH: &str = "dd if=/dev/urandom of=/dev/shm/much bs=1M count=24 2> /dev/null";

/// Only a large capture copies memory while the guest runs.
async fn come_to(step: Step, sandbox: &Sandbox) {
    if step == Step::CaptureLive {
        sh(sandbox, MUCH).await;
    }
}

/// The pages that a failed capture has removed from the tracking are in the next one.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_checkpoint_that_failed_the_next_is_exact() {
    let Patient { lab, sandbox, .. } = Patient::new().await;
    let mut exactness = Exactness::of(lab, &spec("x"));
    for step in Step::CAPTURE {
        come_to(step, &sandbox).await;
        sh(
            &sandbox,
            "dd if=/dev/urandom of=/dev/shm/some bs=64k count=16",
        )
        .await;
        exactness.lab.fault(step, Fault::Error);
        assert_injected(sandbox.checkpoint(None, Replace::No).await, step);
        exactness.lab.no_fault();
        let taken = exactness.checkpoint(&sandbox).await;
        assert_eq!(taken.degraded, [], "after a failure at {step}");
    }
    for index in 0..exactness.known.len() {
        exactness.verify(&sandbox, index).await;
    }
    sandbox.remove().await.expect("it is removed");
    exactness.lab.world.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_fails_leaves_nothing() {
    let mut patient = Patient::new().await;
    for step in Step::CAPTURE {
        come_to(step, &patient.sandbox).await;
        let states = patient.states();
        patient.write().await;
        patient.lab.fault(step, Fault::Error);
        assert_injected(patient.sandbox.checkpoint(None, Replace::No).await, step);
        patient.lab.no_fault();
        patient.assert_unharmed(&step.to_string()).await;
        patient.assert_clean(&states, 1, &step.to_string()).await;
        let taken = patient
            .sandbox
            .checkpoint(None, Replace::No)
            .await
            .expect("the next is taken");
        assert_eq!(
            patient.unlisted_memory(),
            Vec::<String>::new(),
            "after {step} and one that did not fail"
        );
        patient
            .sandbox
            .forget(sandtree::Forget::These(vec![taken.id]))
            .await
            .expect("it is removed");
    }
    patient.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_dies_in_a_checkpoint_leaves_the_earlier_states() {
    let mut patient = Patient::new().await;
    for step in Step::CAPTURE {
        come_to(step, &patient.sandbox).await;
        let mut states = patient.states();
        patient.lab.fault(step, Fault::MachineDies);
        let taken = patient.sandbox.checkpoint(None, Replace::No).await;
        match taken {
            // The capture was complete before the machine died.
            Ok(taken) if matches!(step, Step::CaptureWritten | Step::CapturePublish) => {
                states.insert(taken.id);
            }
            failed => assert_tells_of_the_end(failed, step),
        }
        patient.assert_crashed(&step.to_string()).await;
        patient.assert_clean(&states, 0, &step.to_string()).await;
        patient.recover(&step.to_string()).await;
        assert_eq!(
            patient.unlisted_memory(),
            Vec::<String>::new(),
            "after {step}"
        );
    }
    patient.remove().await;
}

/// A present that cannot be kept is dropped, and the answer reports it; the revert succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn a_revert_succeeds_even_if_the_present_is_lost() {
    let mut patient = Patient::new().await;
    for fault in [Fault::Error, Fault::MachineDies] {
        for step in Step::CAPTURE {
            let after = format!("{fault:?} at {step}");
            come_to(step, &patient.sandbox).await;
            patient.write().await;
            let mut states = patient.states();
            patient.lab.fault(step, fault);
            let reverted = patient
                .sandbox
                .revert("base")
                .await
                .unwrap_or_else(|e| panic!("{after}: {e:?}"));
            patient.lab.no_fault();
            match &reverted.left {
                Some(left) => {
                    assert!(
                        fault == Fault::MachineDies && ALL_IS_TAKEN.contains(&step),
                        "{after}"
                    );
                    states.insert(left.clone());
                }
                None => assert!(
                    reverted.dropped.is_some(),
                    "{after}: it is said that the present is gone"
                ),
            }
            patient.holds = 0;
            patient.assert_unharmed(&after).await;
            patient.assert_clean(&states, 1, &after).await;
            assert_eq!(patient.unlisted_memory(), Vec::<String>::new(), "{after}");
        }
    }
    patient.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_revert_keeps_the_present() {
    let mut patient = Patient::new().await;
    for fault in [Fault::Error, Fault::MachineDies] {
        for step in Step::RESTORE {
            if !can_die_at(fault, step) {
                continue;
            }
            let after = format!("{fault:?} at {step}");
            patient.write().await;
            let states = patient.states();
            let machine = patient.lab.machine(&patient.sandbox);
            patient.lab.fault(step, fault);
            let reverted = patient.sandbox.revert("base").await;
            patient.lab.no_fault();
            match fault {
                Fault::Error => assert_injected(reverted, step),
                _ => assert_tells_of_the_end(reverted, step),
            }
            patient.assert_unharmed(&after).await;
            patient.assert_clean(&states, 1, &after).await;
            assert_eq!(
                patient.lab.machine(&patient.sandbox),
                machine,
                "{after}: the old machine continues"
            );
        }
    }
    patient.recover("all").await;
    assert_eq!(patient.unlisted_memory(), Vec::<String>::new());
    patient.remove().await;
}

/// Before the machine exists, it cannot die. After the guest has acknowledged, the restore is over.
fn can_die_at(fault: Fault, step: Step) -> bool {
    fault != Fault::MachineDies
        || ![Step::RestoreChecked, Step::RestoreAcknowledged].contains(&step)
}

/// The listening sockets of this process, in which other tests run as well.
fn listening() -> BTreeSet<String> {
    let table = fs::read_to_string("/proc/self/net/tcp").expect("the table is there");
    let listens = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields.get(3) == Some(&"0A")).then(|| format!("socket:[{}]", fields[9]))
    };
    let sockets: BTreeSet<String> = table.lines().filter_map(listens).collect();
    let fds = fs::read_dir("/proc/self/fd")
        .expect("we have descriptors")
        .flatten();
    fds.filter_map(|fd| fs::read_link(fd.path()).ok())
        .map(|to| to.to_string_lossy().into_owned())
        .filter(|to| sockets.contains(to))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_fork_leaves_no_copy() {
    let publish = vec![PublishedPort { host: 0, guest: 80 }];
    let mut patient = Patient::in_lab(
        Lab::open().await,
        SandboxSpec {
            publish,
            ..spec("x")
        },
    )
    .await;
    let before = listening();
    let mut after = BTreeSet::new();
    let steps = Step::CAPTURE.into_iter().chain(Step::RESTORE);
    for step in steps {
        come_to(step, &patient.sandbox).await;
        patient.write().await;
        let states = patient.states();
        patient.lab.fault(step, Fault::Error);
        assert_injected(patient.sandbox.fork(ForkSpec::new(2)).await, step);
        patient.lab.no_fault();
        patient.assert_unharmed(&step.to_string()).await;
        patient.assert_clean(&states, 1, &step.to_string()).await;
        after.extend(listening());
    }
    for step in &Step::RESTORE[1..4] {
        patient.write().await;
        let states = patient.states();
        patient.lab.fault(*step, Fault::MachineDies);
        assert_tells_of_the_end(patient.sandbox.fork(ForkSpec::new(2)).await, *step);
        patient.lab.no_fault();
        patient.assert_unharmed(&step.to_string()).await;
        patient.assert_clean(&states, 1, &step.to_string()).await;
        after.extend(listening());
    }
    // The ports of other tests close some time. That of a copy which does not exist never would.
    until_async("the ports of copies are closed", || {
        let left: BTreeSet<String> = &listening() & &after;
        left.is_subset(&before)
    })
    .await;
    let (copies, _) = patient
        .sandbox
        .fork(ForkSpec::new(2))
        .await
        .expect("it is forked");
    for copy in copies {
        assert_eq!(sh(&copy, "cat /srv/n").await, patient.holds.to_string());
        copy.remove().await.expect("a copy is removed");
    }
    patient.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_dies_in_a_fork_leaves_no_copy() {
    let mut patient = Patient::new().await;
    for step in Step::CAPTURE {
        come_to(step, &patient.sandbox).await;
        let states = patient.states();
        patient.lab.fault(step, Fault::MachineDies);
        let forked = patient.sandbox.fork(ForkSpec::new(1)).await;
        patient.lab.no_fault();
        match forked {
            // The capture was complete before the machine died.
            Ok((copies, _)) if matches!(step, Step::CaptureWritten | Step::CapturePublish) => {
                copies[0].remove().await.expect("the copy is removed");
            }
            failed => assert_tells_of_the_end(failed, step),
        }
        patient.assert_crashed(&step.to_string()).await;
        patient.assert_clean(&states, 0, &step.to_string()).await;
        patient.recover(&step.to_string()).await;
    }
    patient.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_pause_leaves_the_sandbox_running() {
    let mut patient = Patient::new().await;
    for step in Step::CAPTURE {
        come_to(step, &patient.sandbox).await;
        patient.write().await;
        let states = patient.states();
        patient.lab.fault(step, Fault::Error);
        assert_injected(patient.sandbox.pause().await, step);
        patient.lab.no_fault();
        patient.assert_unharmed(&step.to_string()).await;
        patient.assert_clean(&states, 1, &step.to_string()).await;
    }
    for step in Step::CAPTURE {
        come_to(step, &patient.sandbox).await;
        let states = patient.states();
        patient.lab.fault(step, Fault::MachineDies);
        let paused = patient.sandbox.pause().await;
        patient.lab.no_fault();
        match paused {
            // The capture was complete before the machine died.
            Ok(_) if ALL_IS_TAKEN.contains(&step) => {
                patient.sandbox.resume().await.expect("it is resumed");
                patient.assert_unharmed(&step.to_string()).await;
            }
            failed => {
                assert_tells_of_the_end(failed, step);
                patient.assert_crashed(&step.to_string()).await;
                patient.assert_clean(&states, 0, &step.to_string()).await;
                patient.recover(&step.to_string()).await;
            }
        }
    }
    patient.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_resume_leaves_the_sandbox_paused() {
    let mut patient = Patient::new().await;
    patient.write().await;
    patient.sandbox.pause().await.expect("it is paused");
    let states = patient.states();
    for fault in [Fault::Error, Fault::MachineDies] {
        for step in Step::RESTORE {
            if !can_die_at(fault, step) {
                continue;
            }
            let after = format!("{fault:?} at {step}");
            patient.lab.fault(step, fault);
            let resumed = patient.sandbox.resume().await;
            patient.lab.no_fault();
            match fault {
                Fault::Error => assert_injected(resumed, step),
                _ => assert_tells_of_the_end(resumed, step),
            }
            assert_eq!(
                patient.sandbox.state().phase,
                Some(Phase::Paused),
                "{after}"
            );
            patient.assert_clean(&states, 0, &after).await;
            assert_eq!(patient.unlisted_memory(), Vec::<String>::new(), "{after}");
        }
    }
    patient.sandbox.resume().await.expect("it is resumed");
    patient.assert_unharmed("all").await;
    patient.remove().await;
}

/// A guest that answers within milliseconds is frozen when it has not answered for so long, also
/// on a busy host.
const SILENCE: Duration = Duration::from_secs(15);

/// A sandbox whose guest does not answer can be captured and reverted. A restore from that state
/// fails, because the guest does not acknowledge it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_agent_is_reported_and_its_sandbox_can_be_reverted() {
    let mut patient = Patient::new().await;
    give_worker(&patient.sandbox).await;
    start(&patient.sandbox, "exec /dev/shm/worker freeze").await;
    let hears = async || {
        let asked = async { patient.sandbox.guest().await?.ping().await };
        tokio::time::timeout(SILENCE, asked).await
    };
    let mut heard = 0;
    while let Ok(answer) = hears().await {
        answer.expect("it answers, or it does not");
        heard += 1;
        assert!(heard < 10_000, "it hears on");
    }
    patient.lab.host.set_faults(Faults {
        acknowledge: Some(Duration::from_secs(3)),
        ..Faults::default()
    });
    patient
        .sandbox
        .checkpoint(Some("frozen"), Replace::No)
        .await
        .expect("a checkpoint needs no agent");
    let states = patient.states();
    let unacknowledged =
        |error: Error| assert!(matches!(error, Error::Unacknowledged { .. }), "{error:?}");
    unacknowledged(
        patient
            .sandbox
            .fork(ForkSpec::new(1))
            .await
            .expect_err("no copy answers"),
    );
    patient
        .assert_clean(&states, 1, "a fork of a frozen guest")
        .await;
    unacknowledged(
        patient
            .sandbox
            .revert("frozen")
            .await
            .expect_err("it does not answer"),
    );
    patient
        .assert_clean(&states, 1, "a revert to a frozen guest")
        .await;
    patient
        .sandbox
        .pause()
        .await
        .expect("a pause needs no agent");
    let states = patient.states();
    unacknowledged(
        patient
            .sandbox
            .resume()
            .await
            .expect_err("it does not answer"),
    );
    patient
        .assert_clean(&states, 0, "a resume of a frozen guest")
        .await;
    let reverted = patient.recover("a frozen guest").await;
    assert!(reverted.left.is_some(), "{reverted:?}");
    patient.remove().await;
}

/// A restore does not wait for a hanging machine without a deadline.
#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_hangs_in_a_restore_is_given_up() {
    let mut patient = Patient::new().await;
    patient.write().await;
    let states = patient.states();
    let before = patient.lab.all_machines();
    let hold = patient.lab.hold(Step::RestoreContinued);
    let hang = async {
        while !hold.is_reached() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        kill(patient.lab.new_machine(&before), "STOP");
        let faults = Faults {
            acknowledge: Some(Duration::from_secs(2)),
            ..Faults::default()
        };
        patient.lab.host.set_faults(faults);
        drop(hold);
    };
    let (reverted, ()) = tokio::join!(patient.sandbox.revert("base"), hang);
    let error = reverted.expect_err("it does not answer");
    assert!(matches!(error, Error::Unacknowledged { .. }), "{error:?}");
    patient.assert_unharmed("a hang").await;
    patient.assert_clean(&states, 1, "a hang").await;
    patient.remove().await;
}

/// A file system of a given size, unmounted when it is dropped.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    /// `None` without the privilege to mount.
    fn mount(bytes: u64) -> Option<Small> {
        let dir = tempfile::Builder::new()
            .prefix("st-")
            .tempdir()
            .expect("a temporary directory can be made");
        let options = format!("size={bytes},mode=0755");
        let mut mount = Command::new("mount");
        let mounted = mount
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(dir.path())
            .status();
        mounted
            .is_ok_and(|status| status.success())
            .then_some(Small { dir })
    }

    /// Takes all free space until the result is dropped.
    fn fill(&self) -> Filler {
        self.fill_but(0)
    }

    fn fill_but(&self, bytes: u64) -> Filler {
        use std::io::Write;
        let path = self.dir.path().join("filler");
        let mut file = fs::File::create(&path).expect("a file can be made");
        let block = vec![1; 64 << 10];
        while file.write_all(&block).is_ok() {}
        let filled = file.metadata().expect("it is there").len();
        file.set_len(filled - bytes).expect("it is cut");
        Filler { path }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let unmounted = Command::new("umount")
            .arg("-l")
            .arg(self.dir.path())
            .status();
        assert!(
            unmounted.is_ok_and(|status| status.success()),
            "{} stays mounted",
            self.dir.path().display()
        );
    }
}

struct Filler {
    path: PathBuf,
}

impl Drop for Filler {
    fn drop(&mut self) {
        fs::remove_file(&self.path).expect("the filler is removed");
    }
}

/// The disk is full at any step: the verb fails with a reason or succeeds, and the guest is
/// unharmed.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_harms_nothing_at_any_step() {
    let Some(small) = Small::mount(900 << 20) else {
        eprintln!("skipped: file systems cannot be mounted here");
        return;
    };
    let lab = Lab::of(World::at(small.dir.path().join("home"))).await;
    let mut patient = Patient::in_lab(lab, spec("x")).await;
    for step in Step::CAPTURE
        .into_iter()
        .filter(|step| *step != Step::CaptureLive)
    {
        patient.write().await;
        let mut states = patient.states();
        let taking = patient.sandbox.checkpoint(None, Replace::No);
        let (taken, filler) = patient.lab.held(step, taking, || small.fill()).await;
        match taken {
            Ok(taken) => drop(states.insert(taken.id)),
            Err(error) => assert_tells_of_no_space(&error),
        }
        drop(filler);
        patient.assert_continues(&step.to_string()).await;
        patient.assert_clean(&states, 1, &step.to_string()).await;
    }
    for step in Step::RESTORE {
        patient.write().await;
        let reverting = patient.sandbox.revert("base");
        let (reverted, filler) = patient.lab.held(step, reverting, || small.fill()).await;
        match reverted {
            Ok(_) => patient.holds = 0,
            Err(error) => assert_tells_of_no_space(&error),
        }
        drop(filler);
        patient.assert_continues(&step.to_string()).await;
    }
    // If the disk is full from the beginning, a revert to an older state still works.
    patient.write().await;
    sh(
        &patient.sandbox,
        "dd if=/dev/urandom of=/dev/shm/much bs=1M count=12",
    )
    .await;
    let filler = small.fill_but(2 << 20);
    let reverted = patient
        .sandbox
        .revert("base")
        .await
        .expect("it is gone to on a full disk");
    assert!(reverted.dropped.is_some(), "{reverted:?}");
    drop(filler);
    patient.holds = 0;
    patient.assert_continues("a full disk").await;
    patient.sandbox.remove().await.expect("it is removed");
    patient.lab.world.assert_empty();
}

#[track_caller]
fn assert_tells_of_no_space(error: &Error) {
    let report = error.report();
    let said = std::iter::once(report.message)
        .chain(report.causes)
        .collect::<Vec<_>>()
        .join(": ");
    assert!(
        said.contains("No space left") || said.contains("disk") && said.contains("full"),
        "{said}"
    );
}

impl Patient {
    /// As `assert_unharmed`; a guest that waited for space may take a moment.
    async fn assert_continues(&self, after: &str) {
        let goes_on = async {
            while self.sandbox.guest().await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(support::DEADLINE, goes_on)
            .await
            .unwrap_or_else(|_| panic!("after {after}: it waits"));
        self.assert_unharmed(after).await;
    }
}
