//! After every kind of save, the guest can write again; and a failed save leaves nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use sandtree::{
    Consistency, Degradation, Error, ErrorKind, Fault, Faults, Host, HostConfig, Phase, Progress,
    Result, Sandbox, SaveSpec, Saved, Step,
};

use super::{dir_of, end, entries, save, say, say_in};
use crate::support::lab::{self, Lab, config, sh, spec};
use crate::support::{DEADLINE, World, finish, kill, until};

/// A save waits longer than this for a live guest, but not for one that is gone.
const AGENT_IS_WAITED_FOR: Duration = Duration::from_secs(25);

async fn save_as_kept(sandbox: &Sandbox) -> Result<Saved> {
    sandbox
        .save(
            SaveSpec::new("kept").expect("it is a name"),
            Progress::silent(),
        )
        .await
}

/// Asserts that nothing of a save is left: no state, no unfinished work, no name, no layer that no
/// state lists.
#[track_caller]
fn assert_clean(lab: &Lab, sandbox: &Sandbox, after: &str) {
    let home = lab.world.home();
    let dir = lab.dir(sandbox);
    assert_eq!(
        entries(&dir.join("states")),
        Vec::<String>::new(),
        "after {after}"
    );
    assert_eq!(
        entries(&home.join("staging")),
        Vec::<String>::new(),
        "after {after}"
    );
    let head = lab.head(sandbox);
    let listed: BTreeSet<String> = head["disk"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| format!("{}.qcow2", id.as_str().unwrap()))
        .collect();
    assert_eq!(
        entries(&dir.join("disks"))
            .into_iter()
            .collect::<BTreeSet<_>>(),
        listed,
        "after {after}"
    );
    for (dir, known) in [
        ("names/images", vec!["tiny"]),
        ("snapshots", vec![]),
        ("layers", vec![]),
    ] {
        assert_eq!(entries(&home.join(dir)), known, "in {dir} after {after}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_that_fails_at_any_step_leaves_a_writable_guest_and_nothing_else() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("x")).await.expect("it is created");
    for step in Step::SAVE {
        // Without a change, the save would skip most of the steps.
        sh(&sandbox, &format!("echo {step} > /srv/n")).await;
        lab.fault(step, Fault::Error);
        let error = save_as_kept(&sandbox).await.expect_err("it fails");
        lab.no_fault();
        assert!(
            matches!(error, Error::Injected { step: at } if at == step),
            "{error:?} instead of failing at {step}"
        );
        sh(&sandbox, "echo more >> /srv/n && sync").await;
        assert_clean(&lab, &sandbox, &format!("an error at {step}"));
    }
    for step in Step::SAVE
        .into_iter()
        .filter(|step| *step != Step::SavePublish)
    {
        let after = format!("a death at {step}");
        sh(&sandbox, &format!("echo {step} > /srv/n && sync")).await;
        lab.fault(step, Fault::MachineDies);
        let saving = tokio::time::timeout(AGENT_IS_WAITED_FOR, save_as_kept(&sandbox));
        let saved = saving
            .await
            .unwrap_or_else(|_| panic!("after {after}: a guest that is gone is waited for"));
        lab.no_fault();
        match saved {
            // The capture was complete before the machine died.
            Ok(_) if matches!(step, Step::CapturePivoted | Step::CapturePublish) => {
                lab.host
                    .remove_snapshot("kept")
                    .await
                    .expect("it is removed");
            }
            failed => assert_tells_of_the_end(failed, &after),
        }
        let rested = tokio::time::timeout(DEADLINE, async {
            sandbox.watch().await.unwrap().rested().await
        });
        let state = rested
            .await
            .unwrap_or_else(|_| panic!("after {after}: it never rests"));
        assert_eq!(state.phase, Some(Phase::Crashed), "after {after}");
        assert_clean(&lab, &sandbox, &after);
        sandbox
            .start(None)
            .await
            .unwrap_or_else(|e| panic!("after {after}: {e:?}"));
        assert_eq!(
            sh(&sandbox, "cat /srv/n").await,
            step.to_string(),
            "after {after}"
        );
    }
    let saved = save_as_kept(&sandbox).await.expect("it is saved");
    assert_eq!(saved.consistency, Consistency::Frozen);
    lab.host
        .remove_snapshot("kept")
        .await
        .expect("it is removed");
    assert_clean(&lab, &sandbox, "a save that was removed");
    sandbox.remove().await.expect("it is removed");
    lab.world.assert_empty();
}

#[track_caller]
fn assert_tells_of_the_end(saved: Result<Saved>, after: &str) {
    let error = saved.expect_err(after);
    assert!(
        [ErrorKind::Engine, ErrorKind::Guest].contains(&error.kind()),
        "after {after}: {error:?}"
    );
}

/// A save that freezes the guest's disks and then hangs does not block the guest.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_frozen_too_long_thaws_itself_and_the_save_reports_it() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("x")).await.expect("it is created");
    sh(&sandbox, "echo before > /srv/n").await;
    let write = || {
        let writing = sh(&sandbox, "echo during > /srv/n && sync && echo written");
        tokio::runtime::Handle::current().block_on(writing)
    };
    let (saved, written) = lab
        .held(Step::SaveFrozen, save_as_kept(&sandbox), write)
        .await;
    assert_eq!(written, "written", "it never thawed");
    let saved = saved.expect("it is saved");
    assert_eq!(saved.consistency, Consistency::Crash);
    assert!(
        saved
            .degraded
            .iter()
            .any(|note| matches!(note, Degradation::DiskNotFrozen { reason } if reason.contains("thawed"))),
        "{saved:?}"
    );
    let next = sandbox
        .save(
            SaveSpec::new("next").expect("it is a name"),
            Progress::silent(),
        )
        .await;
    assert_eq!(
        next.expect("the next is saved").consistency,
        Consistency::Frozen
    );
    for name in ["kept", "next"] {
        lab.host.remove_snapshot(name).await.expect("it is removed");
    }
    assert_clean(&lab, &sandbox, "all of it");
    sandbox.remove().await.expect("it is removed");
    lab.world.assert_empty();
}

#[test]
fn a_guest_whose_agent_hangs_is_saved_as_after_a_power_cut() {
    let world = World::new();
    world.start("a", &[]);
    say(&world, "a", "echo written > /srv/word; sync");
    // The agent is process 1, which signals from inside the guest cannot stop. A frozen control
    // group stops it.
    let freeze = "mkdir /sys/fs/cgroup/ice; echo 1 > /sys/fs/cgroup/ice/cgroup.procs; \
        echo 1 > /sys/fs/cgroup/ice/cgroup.freeze; \
        until grep -q 'frozen 1' /sys/fs/cgroup/ice/cgroup.events; do :; done; echo all ice > /dev/console; sleep 1000";
    let mut command = world.command();
    let waiting = command
        .args(["exec", "a", "--", "sh", "-c", freeze])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let waiting = waiting.spawn().unwrap();
    until("the agent is deaf", || {
        world.ok(["logs", "a"]).out().contains("all ice")
    });
    let saved = save(&world, &["a", "deaf"]);
    assert_eq!(saved["consistency"], "crash", "{saved}");
    assert!(
        saved["degraded"].to_string().contains("power cut"),
        "{saved}"
    );
    assert_eq!(saved["degraded"][0]["code"], "disk_not_frozen", "{saved}");
    assert_eq!(say_in(&world, "deaf", "cat /srv/word"), "written");
    end(&world, &["a"]);
    finish(waiting);
}

/// A keeper whose saves wait while the guest is frozen, until the test releases them.
async fn keeper_that_holds(world: &World, name: &str, hold: &Path) {
    let config = HostConfig {
        faults: Faults {
            fault: Some((Step::SaveFrozen, Fault::Hold)),
            hold: Some(hold.to_owned()),
            ..Faults::default()
        },
        run_in: lab::in_keepers(),
        ..config(world.home())
    };
    let host = Host::open(config).await.expect("the store opens");
    host.create(lab::spec(name))
        .await
        .expect("its sandbox runs");
}

fn begin_save(world: &World, args: &[&str]) -> Child {
    let mut command = world.command();
    command
        .arg("save")
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The next command finds nothing of a killed saver; the guest writes, and can be saved.
#[track_caller]
fn assert_recovers(world: &World, sandbox: &str, killed: Child) {
    kill(killed.id(), "KILL");
    assert_eq!(
        finish(killed).code,
        128 + 9,
        "it was done before it was killed"
    );
    say(world, sandbox, "echo after > /srv/n; sync");
    assert_eq!(world.json(["snapshot", "ls"]), serde_json::json!([]));
    let states = dir_of(world, sandbox).join("states");
    until("what was lent is given back", || {
        entries(&states).is_empty()
    });
    assert_eq!(entries(&world.home().join("staging")), Vec::<String>::new());
    for dir in ["snapshots", "layers"] {
        assert_eq!(
            entries(&world.home().join(dir)),
            Vec::<String>::new(),
            "in {dir}"
        );
    }
    save(world, &[sandbox, "kept"]);
    world.ok(["snapshot", "rm", "kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_saver_leaves_a_writable_guest_and_nothing_else() {
    let world = World::new();
    let hold = tempfile::tempdir().expect("a directory can be made");
    keeper_that_holds(&world, "a", hold.path()).await;
    tokio::task::block_in_place(|| {
        // While the guest is frozen.
        let saving = begin_save(&world, &["a", "kept"]);
        until("the guest is frozen", || {
            hold.path().join("reached").exists()
        });
        kill(saving.id(), "KILL");
        fs::write(hold.path().join("go"), "").unwrap();
        assert_recovers(&world, "a", saving);
        // While the snapshot is made.
        say(
            &world,
            "a",
            "dd if=/dev/urandom of=/srv/big bs=1M count=40 2> /dev/null",
        );
        let saving = begin_save(&world, &["--compress", "a", "kept"]);
        until("it is made", || !unfinished(&world).is_empty());
        assert_recovers(&world, "a", saving);
        end(&world, &["a"]);
    });
}

fn unfinished(world: &World) -> Vec<PathBuf> {
    entries(&world.home().join("staging"))
        .into_iter()
        .map(PathBuf::from)
        .collect()
}
