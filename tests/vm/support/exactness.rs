//! Compares a restored machine, byte for byte, with the machine at the moment of capture.

use std::collections::BTreeSet;
use std::ops::Range;

use sandtree::{Checkpoint, ForkSpec, Replace, Sandbox, SandboxSpec, Step};
use serde_json::Value;

use super::lab::{Lab, Look, PAGE, Ram, sh};

/// The offset of the machine's generation in the page that QEMU keeps it in.
const GENERATION_AT: usize = 40;
const GENERATION_BYTES: usize = 16;

/// The size of `struct pvclock_wall_clock`: version, seconds and nanoseconds.
const WALL_CLOCK_BYTES: usize = 12;

/// States with known memory, and the places that QEMU and KVM write when they load a state: QEMU
/// writes the machine's generation, KVM the boot time of the host.
pub struct Exactness {
    pub lab: Lab,
    bytes: u64,
    pub known: Vec<(String, Ram)>,
    generation: Option<usize>,
    /// Known from the first state on; empty if KVM does not run the guest.
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

    /// Every second look leaves untouched pages untouched, because the kernel tracks the two kinds
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

    /// Finds, before the first state of a guest, the place that KVM writes when it loads a state.
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
        let machine = self.lab.machine(sandbox);
        let look = self.look();
        let taking = sandbox.checkpoint(None, Replace::No);
        let (taken, ram) = self
            .lab
            .held(Step::CapturePivoted, taking, || self.read(machine, look))
            .await;
        let taken = taken.expect("it is taken");
        self.known.push((taken.id.clone(), ram));
        taken
    }

    /// Restores a known state and compares all of memory before the guest continues.
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

    /// Reverts to a known state; the left state becomes a known one.
    pub async fn leave(&mut self, sandbox: &Sandbox, index: usize) {
        let machine = self.lab.machine(sandbox);
        let look = self.look();
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

    /// A pause, a copy made during it, and the resume all have the same memory.
    pub async fn pause_and_resume(&mut self, sandbox: &Sandbox) {
        self.find_wall_clock(sandbox).await;
        let machine = self.lab.machine(sandbox);
        let look = self.look();
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

    /// A copy has the memory of its source; so have the copy's own states, and its copies.
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
        let machine = self.lab.machine(sandbox);
        let look = self.look();
        let before = self.lab.all_machines();
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

    /// Asserts that everything is equal except the generation and KVM's wall clock, and that each
    /// of the two has one place in every state.
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

/// The place that a Linux guest has given KVM for the wall clock (MSR_KVM_WALL_CLOCK_NEW). KVM
/// writes it when the guest boots, and again whenever the register is loaded. The kernel's symbols
/// give the place, because its image is contiguous in memory.
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
    let clock = symbol("wall_clock").await;
    let text = symbol("_text").await;
    let image = number(&sh(sandbox, "sed -n 's/-.* : Kernel code$//p' /proc/iomem").await);
    let start = clock - text + image;
    start..start + WALL_CLOCK_BYTES
}

fn number(text: &str) -> usize {
    usize::from_str_radix(text.trim(), 16).unwrap_or_else(|e| panic!("{text:?} is no address: {e}"))
}
