//! Random lives of sandboxes that share layers, against a model that knows only what each layer
//! holds.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};

use super::{capture, listed, present, record, small_disk};
use crate::fs::simulated::Simulated;
use crate::{
    Digest, LayerId, Origin, Owned, Phase, SandboxDir, SandboxRecord, StateId, StateKind,
    StateRecord, Store,
};

/// What is done to the sandbox, and the state of it, that the numbers choose.
#[derive(Debug, Clone)]
enum Step {
    Capture {
        sandbox: usize,
        seal: bool,
    },
    RemoveState {
        sandbox: usize,
        state: usize,
    },
    Collect {
        sandbox: usize,
    },
    Fork {
        sandbox: usize,
        state: usize,
        elsewhere: bool,
    },
    Warm {
        sandbox: usize,
        state: usize,
    },
    CreateFromWarm,
    RemoveWarm,
    RemoveSandbox {
        sandbox: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let pair = || (any::<usize>(), any::<usize>());
    prop_oneof![
        4 => (any::<usize>(), any::<bool>())
            .prop_map(|(sandbox, seal)| Step::Capture { sandbox, seal }),
        3 => pair().prop_map(|(sandbox, state)| Step::RemoveState { sandbox, state }),
        3 => any::<usize>().prop_map(|sandbox| Step::Collect { sandbox }),
        4 => (pair(), any::<bool>())
            .prop_map(|((sandbox, state), elsewhere)| Step::Fork { sandbox, state, elsewhere }),
        1 => pair().prop_map(|(sandbox, state)| Step::Warm { sandbox, state }),
        1 => Just(Step::CreateFromWarm),
        1 => Just(Step::RemoveWarm),
        1 => any::<usize>().prop_map(|sandbox| Step::RemoveSandbox { sandbox }),
    ]
}

/// What must be there.
#[derive(Default)]
struct Model {
    content: BTreeMap<LayerId, Vec<u8>>,
    states: BTreeMap<String, Vec<StateId>>,
    warm: bool,
    made: usize,
}

struct World {
    fs: Simulated,
    model: Model,
}

impl World {
    fn new() -> Self {
        let fs = Simulated::new();
        let mut world = Self {
            fs,
            model: Model::default(),
        };
        world
            .store()
            .files
            .create_dir(Path::new("/memory"))
            .unwrap();
        world.create(record("n0"), Origin::Image);
        world
    }

    /// Opened anew for each step: nothing is remembered but what is in the files.
    fn store(&self) -> Store {
        Store::open_on(Arc::new(self.fs.clone()), Path::new("/store")).unwrap()
    }

    fn create(&mut self, record: SandboxRecord, origin: Origin<'_>) {
        let name = record.name.to_string();
        let mut owned = self.store().create_sandbox(record, origin).unwrap();
        owned
            .set_state(&StateRecord::new(Phase::Running, 1))
            .unwrap();
        self.model.made += 1;
        self.model.states.insert(name, Vec::new());
        self.learn(&owned);
    }

    fn next_record(&self, elsewhere: bool) -> SandboxRecord {
        let memory_dir = elsewhere.then(|| "/memory".into());
        SandboxRecord {
            memory_dir,
            ..record(&format!("n{}", self.model.made))
        }
    }

    /// Remembers the content of layers that are new. One that is known never changes.
    fn learn(&mut self, sandbox: &SandboxDir) {
        for layer in present(sandbox) {
            self.model
                .content
                .entry(layer.clone())
                .or_insert_with(|| content(sandbox, &layer));
        }
    }

    fn choose(&self, sandbox: usize) -> Option<(String, Owned)> {
        let name = self
            .model
            .states
            .keys()
            .nth(sandbox % self.model.states.len().max(1))?
            .clone();
        let store = self.store();
        let found = store.sandbox(&name.parse().unwrap()).unwrap();
        Some((name, store.try_own(&found).unwrap().unwrap()))
    }

    fn choose_state(&self, sandbox: usize, state: usize) -> Option<(String, Owned, StateId)> {
        let (name, owned) = self.choose(sandbox)?;
        let states = &self.model.states[&name];
        let id = states.get(state % states.len().max(1))?.clone();
        Some((name, owned, id))
    }

    fn apply(&mut self, step: Step) -> Option<()> {
        match step {
            Step::Capture { sandbox, seal } => self.capture(sandbox, seal),
            Step::RemoveState { sandbox, state } => self.remove_state(sandbox, state),
            Step::Collect { sandbox } => self.collect(sandbox),
            Step::Fork {
                sandbox,
                state,
                elsewhere,
            } => self.fork(sandbox, state, elsewhere),
            Step::Warm { sandbox, state } => self.warm(sandbox, state),
            Step::CreateFromWarm => self.create_from_warm(),
            Step::RemoveWarm => self.remove_warm(),
            Step::RemoveSandbox { sandbox } => self.remove_sandbox(sandbox),
        }
    }

    fn capture(&mut self, sandbox: usize, seal: bool) -> Option<()> {
        let (name, owned) = self.choose(sandbox)?;
        let state = capture(&owned, small_disk(&owned).unwrap(), StateKind::Checkpoint).unwrap();
        if seal {
            Owned::seal_state(&owned, &state.id).unwrap();
        }
        self.learn(&owned);
        self.model.states.get_mut(&name)?.push(state.id);
        Some(())
    }

    fn remove_state(&mut self, sandbox: usize, state: usize) -> Option<()> {
        let (name, owned, id) = self.choose_state(sandbox, state)?;
        owned.remove_state(&id).unwrap();
        self.model
            .states
            .get_mut(&name)?
            .retain(|found| *found != id);
        Some(())
    }

    fn collect(&mut self, sandbox: usize) -> Option<()> {
        let (_, owned) = self.choose(sandbox)?;
        owned.collect(&[]).unwrap();
        assert_eq!(present(&owned), listed(&owned));
        Some(())
    }

    fn fork(&mut self, sandbox: usize, state: usize, elsewhere: bool) -> Option<()> {
        let (_, owned, id) = self.choose_state(sandbox, state)?;
        let source = owned.state_source(&id).unwrap();
        self.create(self.next_record(elsewhere), Origin::State(&source));
        Some(())
    }

    fn warm(&mut self, sandbox: usize, state: usize) -> Option<()> {
        let (_, owned, id) = self.choose_state(sandbox, state)?;
        self.store()
            .publish_warm(
                &Digest::of(b"key"),
                &super::warm_record(&owned),
                &owned,
                &id,
            )
            .unwrap();
        self.model.warm = true;
        Some(())
    }

    fn create_from_warm(&mut self) -> Option<()> {
        let warm = self.store().warm(&Digest::of(b"key")).unwrap();
        assert_eq!(warm.is_some(), self.model.warm);
        self.create(self.next_record(false), Origin::State(&warm?));
        Some(())
    }

    fn remove_warm(&mut self) -> Option<()> {
        self.store().remove_warm(&Digest::of(b"key")).unwrap();
        self.model.warm = false;
        Some(())
    }

    fn remove_sandbox(&mut self, sandbox: usize) -> Option<()> {
        let (name, owned) = self.choose(sandbox)?;
        self.store().remove_sandbox(owned).unwrap();
        self.model.states.remove(&name);
        Some(())
    }

    fn check(&self) {
        let store = self.store();
        assert_eq!(store.recovered(), []);
        assert_eq!(store.sandboxes().unwrap().len(), self.model.states.len());
        for (name, states) in &self.model.states {
            let sandbox = store.sandbox(&name.parse().unwrap()).unwrap();
            let found = sandbox.states().unwrap();
            assert_eq!(
                (found.readable.len(), found.unreadable.len()),
                (states.len(), 0)
            );
            for layer in listed(&sandbox) {
                assert!(
                    content(&sandbox, &layer) == self.model.content[&layer],
                    "{layer} changed"
                );
            }
        }
    }
}

fn content(sandbox: &SandboxDir, layer: &LayerId) -> Vec<u8> {
    let disk = sandbox
        .files()
        .read_if_exists(&sandbox.disk_layer(layer))
        .unwrap();
    disk.unwrap_or_else(|| sandbox.files().read(&sandbox.memory_layer(layer)).unwrap())
}

proptest! {
    #![proptest_config(proptest::test_runner::Config { cases: 48, ..Default::default() })]

    #[test]
    fn whatever_goes_the_layers_of_what_stays_are_what_they_were(steps in vec(step(), 1..40)) {
        let mut world = World::new();
        for step in steps {
            world.apply(step);
            world.check();
        }
    }
}
