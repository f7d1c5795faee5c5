//! Random trees of states, checked against a model that knows the content of each state.
//!
//! `SEED` repeats a run; `MODEL_SECONDS` makes it longer.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sandtree::{Forget, ForkSpec, Phase, Replace, Sandbox};

use crate::support::lab::{Lab, sh, spec};
use crate::support::{World, is_alive, kill, until};

/// The most sandboxes at a time.
const SANDBOXES_MAX: usize = 3;
const STATES_MAX: usize = 12;

/// xorshift: the same numbers for the same seed.
struct Random(u64);

impl Random {
    fn seeded() -> Random {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("it is after 1970")
            .as_nanos() as u64;
        let seed = std::env::var("SEED")
            .ok()
            .map_or(now, |seed| seed.parse().expect("SEED is a number"));
        println!("SEED={seed}");
        Random(seed | 1)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() {
            None
        } else {
            Some(from[self.below(from.len())].clone())
        }
    }
}

fn budget() -> Duration {
    let seconds = std::env::var("MODEL_SECONDS")
        .ok()
        .map_or(40, |text| text.parse().expect("a number of seconds"));
    Duration::from_secs(seconds)
}

/// What a guest holds: files, each with its own name as its content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Content {
    disk: BTreeSet<u32>,
    memory: BTreeSet<u32>,
}

impl Content {
    /// What is left of it after a boot of the guest.
    fn booted(&self) -> Content {
        Content {
            disk: self.disk.clone(),
            memory: BTreeSet::new(),
        }
    }

    fn text(&self) -> String {
        let numbers = |set: &BTreeSet<u32>| {
            set.iter()
                .map(|n| format!("{n:06}={n:06}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        format!(
            "disk {}\nmemory {}",
            numbers(&self.disk),
            numbers(&self.memory)
        )
        .replace(" \n", "\n")
        .trim()
        .to_owned()
    }
}

/// Prints every file with its content. The disk is read without a cache.
const SHOW: &str = "echo 3 > /proc/sys/vm/drop_caches; show() { cd $1; for f in [0-9]*; do [ -e $f ] && printf ' %s=%s' \
                    $f $(cat $f); done; echo; }; printf disk; show /srv; printf memory; show /dev/shm";

#[derive(Debug, Clone)]
struct State {
    id: String,
    content: Content,
}

/// A sandbox, and what the model knows about it.
struct Box {
    sandbox: Sandbox,
    phase: Phase,
    present: Content,
    states: Vec<State>,
    /// The state that the sandbox is paused in must not be removed.
    paused_in: Option<String>,
}

impl Box {
    fn new(sandbox: Sandbox, present: Content) -> Box {
        Box {
            sandbox,
            phase: Phase::Running,
            present,
            states: Vec::new(),
            paused_in: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Write,
    Delete,
    Checkpoint,
    Revert,
    Fork,
    Pause,
    Resume,
    Stop,
    Start,
    Forget,
    KillMachine,
    Remove,
}

/// Repeated entries are drawn more often. Actions with a boot take long and are rare.
const RUNNING: [Action; 20] = [
    Action::Write,
    Action::Write,
    Action::Write,
    Action::Write,
    Action::Delete,
    Action::Delete,
    Action::Checkpoint,
    Action::Checkpoint,
    Action::Checkpoint,
    Action::Checkpoint,
    Action::Revert,
    Action::Revert,
    Action::Revert,
    Action::Fork,
    Action::Fork,
    Action::Pause,
    Action::KillMachine,
    Action::Forget,
    Action::Remove,
    Action::Stop,
];
const PAUSED: [Action; 6] = [
    Action::Resume,
    Action::Resume,
    Action::Resume,
    Action::Revert,
    Action::Fork,
    Action::Forget,
];
const DOWN: [Action; 6] = [
    Action::Start,
    Action::Revert,
    Action::Revert,
    Action::Revert,
    Action::Revert,
    Action::Forget,
];

struct Model {
    lab: Lab,
    random: Random,
    boxes: Vec<Box>,
    next: u32,
    done: Vec<String>,
}

impl Model {
    async fn new() -> Model {
        let random = Random::seeded();
        let lab = Lab::open().await;
        let sandbox = lab.host.create(spec("m")).await.expect("it is created");
        Model {
            lab,
            random,
            boxes: vec![Box::new(sandbox, Content::default())],
            next: 1,
            done: Vec::new(),
        }
    }

    async fn step(&mut self) {
        let index = self.random.below(self.boxes.len());
        let action = match self.boxes[index].phase {
            Phase::Running => self.random.pick(&RUNNING),
            Phase::Paused => self.random.pick(&PAUSED),
            _ => self.random.pick(&DOWN),
        };
        let action = action.expect("there is always something to do");
        self.done
            .push(format!("{action:?} {}", self.boxes[index].sandbox.name()));
        self.act(index, action).await;
    }

    async fn act(&mut self, index: usize, action: Action) {
        match action {
            Action::Write => self.write(index).await,
            Action::Delete => self.delete(index).await,
            Action::Checkpoint => self.checkpoint(index).await,
            Action::Revert => {
                if let Some(state) = self.random.pick(&self.boxes[index].states) {
                    self.revert(index, &state).await;
                }
            }
            Action::Fork => self.fork(index).await,
            Action::Pause => self.pause(index).await,
            Action::Resume => self.resume(index).await,
            Action::Stop => self.stop(index).await,
            Action::Start => self.start(index).await,
            Action::Forget => self.forget(index).await,
            Action::KillMachine => self.kill_machine(index).await,
            Action::Remove => self.remove(index).await,
        }
    }

    async fn write(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        let number = self.next;
        self.next += 1;
        sh(
            &on.sandbox,
            &format!("for d in /srv /dev/shm; do echo {number:06} > $d/{number:06}; done; sync"),
        )
        .await;
        on.present.disk.insert(number);
        on.present.memory.insert(number);
    }

    async fn delete(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        let files: Vec<u32> = on.present.disk.iter().copied().collect();
        let Some(number) = self.random.pick(&files) else {
            return;
        };
        sh(
            &on.sandbox,
            &format!("rm -f /srv/{number:06} /dev/shm/{number:06}; sync"),
        )
        .await;
        on.present.disk.remove(&number);
        on.present.memory.remove(&number);
    }

    async fn checkpoint(&mut self, index: usize) {
        if self.boxes[index].states.len() >= STATES_MAX {
            return self.forget(index).await;
        }
        let on = &mut self.boxes[index];
        let id = on
            .sandbox
            .checkpoint(None, Replace::No)
            .await
            .unwrap_or_else(|e| panic!("{e:?}"))
            .id;
        on.states.push(State {
            id,
            content: on.present.clone(),
        });
        self.verify(index).await;
    }

    async fn revert(&mut self, index: usize, to: &State) {
        let on = &mut self.boxes[index];
        let reverted = on
            .sandbox
            .revert(&to.id)
            .await
            .unwrap_or_else(|e| panic!("to {}: {e:?}", to.id));
        assert_eq!(
            (reverted.dropped, &reverted.restore.degraded[..]),
            (None, &[][..])
        );
        let left = reverted.left.expect("what is left is kept");
        let content = match on.phase {
            Phase::Running | Phase::Paused => on.present.clone(),
            _ => on.present.booted(),
        };
        if !on.states.iter().any(|state| state.id == left) {
            on.states.push(State { id: left, content });
        }
        (on.phase, on.present, on.paused_in) = (Phase::Running, to.content.clone(), None);
        self.verify(index).await;
    }

    async fn fork(&mut self, index: usize) {
        let room = SANDBOXES_MAX.saturating_sub(self.boxes.len());
        if room == 0 {
            return;
        }
        let count = 1 + self.random.below(room);
        let on = &self.boxes[index];
        let (copies, _) = on
            .sandbox
            .fork(ForkSpec::new(count))
            .await
            .unwrap_or_else(|e| panic!("{e:?}"));
        let present = on.present.clone();
        for copy in copies {
            self.boxes.push(Box::new(copy, present.clone()));
            self.verify(self.boxes.len() - 1).await;
        }
        self.verify(index).await;
    }

    async fn pause(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        let before = states_of(&self.lab, &on.sandbox);
        on.sandbox.pause().await.unwrap_or_else(|e| panic!("{e:?}"));
        let after = states_of(&self.lab, &on.sandbox);
        on.paused_in = after.difference(&before).next().cloned();
        on.phase = Phase::Paused;
        assert_eq!(
            self.lab.machines(&self.boxes[index].sandbox),
            BTreeSet::new()
        );
    }

    async fn resume(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        on.sandbox
            .resume()
            .await
            .unwrap_or_else(|e| panic!("{e:?}"));
        (on.phase, on.paused_in) = (Phase::Running, None);
        self.verify(index).await;
    }

    async fn stop(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        on.sandbox
            .stop(None)
            .await
            .unwrap_or_else(|e| panic!("{e:?}"));
        (on.phase, on.present) = (Phase::Stopped, on.present.booted());
    }

    async fn start(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        on.sandbox
            .start(None)
            .await
            .unwrap_or_else(|e| panic!("{e:?}"));
        (on.phase, on.present) = (Phase::Running, on.present.booted());
        self.verify(index).await;
    }

    async fn forget(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        on.states
            .retain(|state| Some(&state.id) != on.paused_in.as_ref());
        let Some(state) = self.random.pick(&on.states) else {
            return;
        };
        on.sandbox
            .forget(Forget::These(vec![state.id.clone()]))
            .await
            .unwrap_or_else(|e| panic!("{e:?}"));
        on.states.retain(|other| other.id != state.id);
        self.verify(index).await;
    }

    /// As `kill -9` does; synced files are on the disk.
    async fn kill_machine(&mut self, index: usize) {
        let on = &mut self.boxes[index];
        kill(self.lab.machine(&on.sandbox), "KILL");
        let state = on.sandbox.watch().await.unwrap().rested().await;
        assert_eq!(state.phase, Some(Phase::Crashed), "{state:?}");
        (on.phase, on.present) = (Phase::Crashed, on.present.booted());
    }

    async fn remove(&mut self, index: usize) {
        if self.boxes.len() > 1 {
            self.boxes
                .remove(index)
                .sandbox
                .remove()
                .await
                .unwrap_or_else(|e| panic!("{e:?}"));
        }
    }

    /// Asserts that the guest has the files, and the sandbox the states, of the model.
    async fn verify(&self, index: usize) {
        let on = &self.boxes[index];
        assert_eq!(on.sandbox.state().phase, Some(on.phase));
        let known: BTreeSet<String> = on
            .states
            .iter()
            .map(|state| state.id.clone())
            .chain(on.paused_in.clone())
            .collect();
        assert_eq!(
            states_of(&self.lab, &on.sandbox),
            known,
            "of {}",
            on.sandbox.name()
        );
        if on.phase == Phase::Running {
            assert_eq!(
                sh(&on.sandbox, SHOW).await,
                on.present.text(),
                "in {}",
                on.sandbox.name()
            );
        }
    }

    /// Reverts once more to every state.
    async fn finish(mut self) {
        for index in 0..self.boxes.len() {
            for state in self.boxes[index].states.clone() {
                self.done.push(format!(
                    "finally {} to {}",
                    self.boxes[index].sandbox.name(),
                    state.id
                ));
                self.revert(index, &state).await;
            }
        }
        for on in self.boxes.drain(..) {
            on.sandbox
                .remove()
                .await
                .unwrap_or_else(|e| panic!("{e:?}"));
        }
        self.lab.world.assert_empty();
        println!("{} steps", self.done.len());
        self.done.clear();
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("what was done: {:#?}", self.done);
        }
    }
}

fn states_of(lab: &Lab, sandbox: &Sandbox) -> BTreeSet<String> {
    let (states, broken) = lab.host.states(sandbox.id()).expect("they are listed");
    assert!(broken.is_empty(), "{broken:?}");
    states.into_iter().map(|state| state.id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn random_trees_hold_what_the_model_says() {
    let mut model = Model::new().await;
    let end = Instant::now() + budget();
    while Instant::now() < end {
        model.step().await;
    }
    model.finish().await;
}

/// The same through the command line, where a keeper can be killed as well.
#[test]
fn killed_keepers_lose_no_state() {
    let mut random = Random::seeded();
    let world = World::new();
    world.start("k", &[]);
    let mut taken: Vec<(String, u32)> = Vec::new();
    let holds = |number: u32, memory: bool| {
        let files = if memory {
            "/srv/n /dev/shm/n"
        } else {
            "/srv/n"
        };
        let expected = if memory {
            format!("{number}\n{number}\n")
        } else {
            format!("{number}\n")
        };
        assert_eq!(world.sh("k", &format!("cat {files}")).out(), expected);
    };
    for number in 0..5 {
        world.sh(
            "k",
            &format!("echo {number} > /srv/n; echo {number} > /dev/shm/n; sync"),
        );
        let state = world.json(["checkpoint", "k"])["id"]
            .as_str()
            .expect("it has an id")
            .to_owned();
        taken.push((state, number));
        if random.below(3) == 0 {
            world.ok(["pause", "k"]);
            world.ok(["resume", "k"]);
            holds(number, true);
        }
        let info = world.inspect("k");
        let killed = ["keeper_pid", "qemu_pid"][random.below(2)];
        kill(
            u32::try_from(info[killed].as_u64().expect("it runs")).expect("a pid"),
            "KILL",
        );
        until("it is shown as crashed", || {
            world.inspect("k")["state"] == "crashed"
        });
        for process in ["keeper_pid", "qemu_pid"] {
            let pid = u32::try_from(info[process].as_u64().expect("it ran")).expect("a pid");
            until(
                &format!("{process} is gone after the kill of {killed}"),
                || !is_alive(pid),
            );
        }
        match random.below(4) {
            0 => {
                world.ok(["start", "k"]);
                holds(number, false);
            }
            _ => {
                let (state, number) = random.pick(&taken).expect("one was taken");
                world.ok(["revert", "k", &state]);
                holds(number, true);
            }
        }
    }
    for (state, number) in taken {
        world.ok(["revert", "k", &state]);
        holds(number, true);
    }
    world.ok(["rm", "-f", "k"]);
    world.assert_empty();
}
