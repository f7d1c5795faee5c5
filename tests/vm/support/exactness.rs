//! Whether what a state is restored to is, byte for byte, what was there when it was taken.

use std::collections::BTreeSet;
use std::ops::Range;

use sandtree::{Checkpoint, ForkSpec, Replace, Sandbox, SandboxSpec, Step};
use serde_json::Value;

use super::lab::{Lab, Look, PAGE, Ram, sh};

/// Where QEMU writes a machine's generation into the page it is kept in.
const GENERATION_AT: usize = 40;
const GENERATION_BYTES: usize = 16;

/// The size of `struct pvclock_wall_clock`: version, seconds and nanoseconds.
const WALL_CLOCK_BYTES: usize = 12;

/// States whose memory is known, and where in memory QEMU and KVM write when they load one: QEMU
/// the machine's generation, KVM the time at which the host has booted.
pub struct Exactness {
    pub lab: Lab,
    bytes: u64,
    pub known: Vec<(String, Ram)>,
    generation: Option<usize>,
    /// Known from the first state on; empty where KVM does not run the guest.
    wall_clock: Option<Range<usize>>,
}

impl Exactness {
    pub fn of(lab: Lab, spec: &SandboxSpec) -> Self {
        Self {
            lab,
            bytes: spec.memory_bytes.unwrap_or(512 << 20),
            known: Vec::new(),
            generation: None,
            wall_clock: None,
        }
    }

    /// Every other look leaves untouched memory untouched: the kernel tracks the two kinds
    /// differently.
    fn look(&self) -> Look {
        if self.known.len().is_multiple_of(2) {
            Look::Untouching
        } else {
            Look::Whole
        }
    }

    fn read(&self, machine: u32, look: Look) -> Ram {
        Ram::read(
            machine,
            self.bytes,
            look,
            self.known.last().map(|(_, ram)| ram),
        )
    }

    /// Finds out, before the first state of a guest, where KVM will write when it loads one.
    async fn find_wall_clock(&mut self, sandbox: &Sandbox) {
        if self.wall_clock.is_none() {
            let info = self.lab.host.find(sandbox.name()).expect("it is there");
            let is_kvm = info.accelerator.as_deref() == Some("kvm");
            self.wall_clock = Some(if is_kvm {
                wall_clock(sandbox).await
            } else {
                0..0
            });
        }
    }

    pub async fn checkpoint(&mut self, sandbox: &Sandbox) -> Checkpoint {
        self.find_wall_clock(sandbox).await;
        let (machine, look) = (self.lab.machine(sandbox), self.look());
        let taking = sandbox.checkpoint(None, Replace::No);
        let (taken, ram) = self
            .lab
            .held(Step::CapturePivoted, taking, || self.read(machine, look))
            .await;
        let taken = taken.expect("it is taken");
        self.known.push((taken.id.clone(), ram));
        taken
    }

    /// Goes to a known state and compares all of memory before the guest goes on.
    pub async fn verify(&mut self, sandbox: &Sandbox, index: usize) {
        let before = self.lab.all_machines();
        let state = self.known[index].0.clone();
        let reverting = sandbox.revert(&state);
        let (reverted, ram) = self
            .lab
            .held(Step::RestoreLoaded, reverting, || self.read_new(&before))
            .await;
        let reverted = reverted.expect("it is gone to");
        assert_eq!(
            (reverted.restore.degraded, reverted.dropped),
            (Vec::new(), None)
        );
        self.assert_same(index, &ram);
    }

    /// Leaves the present for a known state; what is left becomes one.
    pub async fn leave(&mut self, sandbox: &Sandbox, index: usize) {
        let (machine, look) = (self.lab.machine(sandbox), self.look());
        let state = self.known[index].0.clone();
        let reverting = sandbox.revert(&state);
        let (reverted, ram) = self
            .lab
            .held(Step::CapturePivoted, reverting, || self.read(machine, look))
            .await;
        let left = reverted
            .expect("it is gone to")
            .left
            .expect("what is left is kept");
        self.known.push((left, ram));
    }

    /// A pause, a copy made while it lasts, and the resume all hold the same.
    pub async fn pause_and_resume(&mut self, sandbox: &Sandbox) {
        self.find_wall_clock(sandbox).await;
        let (machine, look) = (self.lab.machine(sandbox), self.look());
        let (paused, ram) = self
            .lab
            .held(Step::CapturePivoted, sandbox.pause(), || {
                self.read(machine, look)
            })
            .await;
        paused.expect("it is paused");
        self.known.push(("a pause".into(), ram));
        let index = self.known.len() - 1;

        let before = self.lab.all_machines();
        assert!(before.is_empty(), "nothing runs while it is paused");
        let forking = sandbox.fork(ForkSpec::new(1));
        let (forked, ram) = self
            .lab
            .held(Step::RestoreLoaded, forking, || self.read_new(&before))
            .await;
        let (copies, _) = forked.expect("it is forked");
        self.assert_same(index, &ram);
        copies[0].remove().await.expect("the copy is removed");

        let before = self.lab.all_machines();
        let (resumed, ram) = self
            .lab
            .held(Step::RestoreLoaded, sandbox.resume(), || {
                self.read_new(&before)
            })
            .await;
        assert_eq!(
            resumed.expect("it is resumed").degraded,
            Vec::<sandtree::Degradation>::new()
        );
        self.assert_same(index, &ram);
    }

    /// A copy holds what its source held when it was made; so do the copy's own states, and copies
    /// of it.
    pub async fn fork(&mut self, sandbox: &Sandbox) {
        let copy = self.forked(sandbox).await;
        self.checkpoint(&copy).await;
        self.verify(&copy, self.known.len() - 1).await;
        let second = self.forked(&copy).await;
        second.remove().await.expect("the copy's copy is removed");
        copy.remove().await.expect("the copy is removed");
    }

    async fn forked(&mut self, sandbox: &Sandbox) -> Sandbox {
        self.find_wall_clock(sandbox).await;
        let (machine, look, before) = (
            self.lab.machine(sandbox),
            self.look(),
            self.lab.all_machines(),
        );
        let forking = sandbox.fork(ForkSpec::new(1));
        let steps = [Step::CapturePivoted, Step::RestoreLoaded];
        let look = |step| match step {
            Step::CapturePivoted => self.read(machine, look),
            _ => self.read_new(&before),
        };
        let (forked, [taken, restored]) = self.lab.held_twice(steps, forking, look).await;
        self.known
            .push((format!("a fork of {}", sandbox.name()), taken));
        self.assert_same(self.known.len() - 1, &restored);
        forked.expect("it is forked").0.remove(0)
    }

    fn read_new(&self, before: &BTreeSet<u32>) -> Ram {
        self.read(self.lab.new_machine(before), self.look())
    }

    /// How many memory layers and overlays a state has.
    pub fn depth(&self, sandbox: &Sandbox, state: &str) -> [usize; 2] {
        let manifest = self.lab.manifest(sandbox, state);
        let count = |list: &Value| list.as_array().map_or(0, Vec::len);
        [
            count(&manifest["memory"]["layers"]),
            count(&manifest["disk"]),
        ]
    }

    /// All but the generation and KVM's wall clock is the same, and each of the two is at one place
    /// in every state.
    #[track_caller]
    fn assert_same(&mut self, index: usize, restored: &Ram) {
        let (state, taken) = &self.known[index];
        let wall_clock = self
            .wall_clock
            .clone()
            .expect("it is found out before a state is taken");
        let mut differing = taken.differences(restored);
        differing.retain(|at| !wall_clock.contains(at));
        let (Some(first), Some(last)) = (differing.first(), differing.last()) else {
            panic!("state {index}: a restored machine has another generation");
        };
        let generation = *self
            .generation
            .get_or_insert(first / PAGE * PAGE + GENERATION_AT);
        let within = generation..generation + GENERATION_BYTES;
        let pages = taken.changed_pages(restored);
        assert!(
            within.contains(first) && within.contains(last),
            "state {index}, {state}: {} bytes in {pages} pages differ, from {first:#x} to {last:#x}",
            differing.len()
        );
    }
}

/// Where a Linux guest has told KVM to keep the wall clock (MSR_KVM_WALL_CLOCK_NEW): KVM writes it
/// when the guest boots, and again whenever the register is loaded. The kernel's own tables tell
/// the place: its image is one piece of memory.
async fn wall_clock(sandbox: &Sandbox) -> Range<usize> {
    let symbol = async |name: &str| {
        number(
            &sh(
                sandbox,
                &format!("awk '$3 == \"{name}\" {{ print $1 }}' /proc/kallsyms"),
            )
            .await,
        )
    };
    let (clock, text) = (symbol("wall_clock").await, symbol("_text").await);
    let image = number(&sh(sandbox, "sed -n 's/-.* : Kernel code$//p' /proc/iomem").await);
    let start = clock - text + image;
    start..start + WALL_CLOCK_BYTES
}

fn number(text: &str) -> usize {
    usize::from_str_radix(text.trim(), 16).unwrap_or_else(|e| panic!("{text:?} is no address: {e}"))
}
