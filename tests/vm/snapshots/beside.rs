//! Processes that work on one store at the same time: saves, imports, removals and collections.

use std::collections::BTreeSet;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use super::{assert_nothing_staged, digest, in_memory, names, remove, stopped, text};
use crate::support::held;
use crate::support::{Answer, World, finish};

const ROUNDS: usize = 6;

fn spawn(world: &World, args: &[&str]) -> Child {
    let mut command = world.command();
    command
        .arg("--json")
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn at_once(world: &World, all: &[&[&str]]) -> Vec<Answer> {
    let children: Vec<Child> = all.iter().map(|args| spawn(world, args)).collect();
    children.into_iter().map(finish).collect()
}

fn saved_digest(answer: &Answer) -> String {
    let said: Value =
        serde_json::from_slice(&answer.stdout).unwrap_or_else(|e| panic!("{e}: {answer:?}"));
    text(&said["digest"]).to_owned()
}

/// Repeats `again` in another thread while `work` runs.
fn meanwhile<T>(again: impl Fn() + Sync, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let loops = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                again();
            }
        });
        // Also when the work fails: otherwise the scope would never end.
        let end = End(&done);
        let result = work();
        drop(end);
        loops.join().unwrap();
        result
    })
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn of_two_concurrent_saves_of_one_name_one_wins_or_both_in_turn() {
    let world = World::new();
    stopped(&world, "a", "one");
    stopped(&world, "b", "two");
    for round in 0..ROUNDS {
        let name = format!("s-{round}");
        let answers = at_once(&world, &[&["save", "a", &name], &["save", "b", &name]]);
        let (won, lost): (Vec<&Answer>, Vec<&Answer>) =
            answers.iter().partition(|answer| answer.code == 0);
        assert_eq!((won.len(), lost.len()), (1, 1), "{answers:?}");
        lost[0].failed_with(&["taken"]);
        assert_eq!(digest(&world, &name), saved_digest(won[0]));
        let answers = at_once(
            &world,
            &[
                &["save", "a", &name, "--force"],
                &["save", "b", &name, "--force"],
            ],
        );
        assert!(answers.iter().all(|answer| answer.code == 0), "{answers:?}");
        assert!(
            answers
                .iter()
                .map(saved_digest)
                .any(|saved| saved == digest(&world, &name)),
            "it is neither of the two"
        );
    }
    assert_nothing_staged(&world);
    // Of two saves that replace one name, the second replaces the first, which stays without a
    // name.
    world.ok(["gc"]);
    assert_eq!(
        names(&world),
        (0..ROUNDS)
            .map(|round| format!("s-{round}"))
            .collect::<Vec<_>>()
    );
    for name in names(&world) {
        world.ok(["snapshot", "verify", &name]);
    }
    remove(&world, &["a", "b"]);
}

#[test]
fn saves_are_whole_while_garbage_is_collected() {
    let world = World::new();
    stopped(&world, "rests", "one");
    world.start("runs", &[]);
    held::begin(&world, "runs", "two");
    let collect = || {
        let report = world.json(["gc"]);
        assert_eq!(report["held_back"], Value::Null, "{report}");
    };
    meanwhile(collect, || {
        for round in 0..ROUNDS {
            let [rests, runs] = ["rests", "runs"].map(|sandbox| format!("{sandbox}-{round}"));
            let live: &[&str] = &["save", "runs", &runs, "--memory"];
            let answers = at_once(&world, &[&["save", "rests", &rests], live]);
            assert!(answers.iter().all(|answer| answer.code == 0), "{answers:?}");
            // Unused snapshots are removed in between.
            if round % 2 == 1 {
                world.ok(["snapshot", "rm", &rests]);
            }
        }
    });
    let expected: BTreeSet<String> = (0..ROUNDS)
        .flat_map(|round| [format!("runs-{round}"), format!("rests-{round}")])
        .filter(|name| !name.starts_with("rests") || name.ends_with(['0', '2', '4']))
        .collect();
    assert_eq!(names(&world).into_iter().collect::<BTreeSet<_>>(), expected);
    for name in &expected {
        world.ok(["snapshot", "verify", name]);
    }
    held::assert_holds(&world, "runs", "two", 0);
    world.ok([
        "run",
        "-d",
        "--name",
        "again",
        &format!("runs-{}", ROUNDS - 1),
    ]);
    held::assert_holds(&world, "again", "two", 0);
    assert_nothing_staged(&world);
    remove(&world, &["rests", "runs", "again"]);
}

#[test]
fn an_import_is_whole_or_absent_while_its_layers_are_removed() {
    let world = World::new();
    let place = in_memory();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s"]);
    let file = place.path().join("s.tar.zst");
    let path = file.to_str().unwrap();
    world.ok(["snapshot", "export", "s", "-o", path, "--without-image"]);
    let expected = digest(&world, "s");
    for round in 0..ROUNDS {
        // A snapshot that shares every layer is removed during the import.
        let import: &[&str] = &["snapshot", "import", path, "--name", "came"];
        let remove: &[&str] = if round % 2 == 0 {
            &["snapshot", "rm", "s"]
        } else {
            &["gc"]
        };
        let answers = at_once(&world, &[import, remove]);
        assert!(answers.iter().all(|answer| answer.code == 0), "{answers:?}");
        assert_eq!(digest(&world, "came"), expected);
        world.ok(["snapshot", "verify", "came"]);
        // The imported snapshot itself is removed during the import.
        let again: &[&str] = &["snapshot", "import", path, "--name", "came", "--force"];
        let answers = at_once(&world, &[again, &["snapshot", "rm", "came"]]);
        assert_eq!(answers[0].code, 0, "{answers:?}");
        if names(&world).iter().any(|name| name == "came") {
            world.ok(["snapshot", "rm", "came"]);
        } else {
            assert_eq!(answers[1].code, 0, "{answers:?}");
        }
        world.run(["save", "a", "s"]);
        world.ok(["snapshot", "verify", "s"]);
    }
    assert_nothing_staged(&world);
    remove(&world, &["a"]);
}
