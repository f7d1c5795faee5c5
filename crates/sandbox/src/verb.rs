//! Which verb is legal in which phase. Pure, so that it can be read and tested as a table.

use std::fmt;

pub use sandtree_store::Phase;

/// An operation on a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Anything that happens inside the guest.
    Use,
    Start,
    Stop,
    Kill,
    Remove,
    Checkpoint,
    /// Going to another state: revert, undo, redo.
    Revert,
    /// Removing states.
    Forget,
    Fork,
    Pause,
    Resume,
    /// Publishing a state as a snapshot.
    Save,
}

impl Verb {
    pub const ALL: [Verb; 12] = [
        Verb::Use,
        Verb::Start,
        Verb::Stop,
        Verb::Kill,
        Verb::Remove,
        Verb::Checkpoint,
        Verb::Revert,
        Verb::Forget,
        Verb::Fork,
        Verb::Pause,
        Verb::Resume,
        Verb::Save,
    ];

    /// The name in the arguments of errors.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Use => "use",
            Verb::Start => "start",
            Verb::Stop => "stop",
            Verb::Kill => "kill",
            Verb::Remove => "remove",
            Verb::Checkpoint => "checkpoint",
            Verb::Revert => "revert",
            Verb::Forget => "forget",
            Verb::Fork => "fork",
            Verb::Pause => "pause",
            Verb::Resume => "resume",
            Verb::Save => "save",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::Use => "be worked in",
            Verb::Start => "be started",
            Verb::Stop => "be stopped",
            Verb::Kill => "be killed",
            Verb::Remove => "be removed",
            Verb::Checkpoint => "be checkpointed",
            Verb::Revert => "be reverted",
            Verb::Forget => "have states removed",
            Verb::Fork => "be forked",
            Verb::Pause => "be paused",
            Verb::Resume => "be resumed",
            Verb::Save => "be saved",
        })
    }
}

/// Whether `verb` may begin while the sandbox is in `phase`.
pub fn permits(phase: Phase, verb: Verb) -> bool {
    match (phase, verb) {
        (_, Verb::Remove | Verb::Revert | Verb::Forget | Verb::Fork | Verb::Save)
            if is_settled(phase) =>
        {
            true
        }
        (Phase::Running, Verb::Use | Verb::Stop | Verb::Kill) => true,
        (Phase::Running, Verb::Checkpoint | Verb::Pause) => true,
        (Phase::Stopped | Phase::Crashed, Verb::Start) => true,
        (Phase::Paused, Verb::Resume) => true,
        // These verbs interrupt the verb that is being carried out.
        (Phase::Starting | Phase::Stopping, Verb::Kill | Verb::Remove) => true,
        // Between two phases no other verb may begin.
        (Phase::Creating | Phase::Starting | Phase::Stopping, _) => false,
        (Phase::Running | Phase::Stopped | Phase::Crashed | Phase::Paused, _) => false,
    }
}

/// Whether a record in this phase says that a machine runs, or is about to start or end.
pub(crate) fn has_machine(phase: Phase) -> bool {
    matches!(phase, Phase::Starting | Phase::Running | Phase::Stopping)
}

/// Whether no operation is changing the phase.
fn is_settled(phase: Phase) -> bool {
    matches!(
        phase,
        Phase::Running | Phase::Stopped | Phase::Crashed | Phase::Paused
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PHASES: [Phase; 7] = [
        Phase::Creating,
        Phase::Starting,
        Phase::Running,
        Phase::Stopping,
        Phase::Stopped,
        Phase::Crashed,
        Phase::Paused,
    ];

    fn is_resting(phase: Phase) -> bool {
        matches!(phase, Phase::Stopped | Phase::Crashed | Phase::Paused)
    }

    /// Where a verb leads when all goes well; `None` when nothing is left.
    fn after(phase: Phase, verb: Verb) -> Option<Phase> {
        match verb {
            Verb::Use | Verb::Checkpoint | Verb::Fork | Verb::Save | Verb::Forget => Some(phase),
            Verb::Start | Verb::Resume | Verb::Revert => Some(Phase::Running),
            Verb::Pause => Some(Phase::Paused),
            Verb::Stop | Verb::Kill => Some(Phase::Stopped),
            Verb::Remove => None,
        }
    }

    #[test]
    fn every_phase_a_sandbox_rests_in_can_be_left_by_removal() {
        for phase in PHASES
            .into_iter()
            .filter(|p| is_resting(*p) || *p == Phase::Running)
        {
            assert!(permits(phase, Verb::Remove), "{phase:?}");
        }
    }

    proptest! {
        #[test]
        fn a_machine_is_never_started_twice_nor_used_when_it_is_not_there(
            verbs in prop::collection::vec(0usize..12, 0..60)
        ) {
            let mut phase = Phase::Running;
            let mut machines = 1i32;
            for verb in verbs.into_iter().map(|v| Verb::ALL[v]) {
                if !permits(phase, verb) {
                    continue;
                }
                match verb {
                    Verb::Use | Verb::Checkpoint => prop_assert_eq!(machines, 1),
                    Verb::Start | Verb::Resume => machines += 1,
                    Verb::Stop | Verb::Kill | Verb::Pause => machines -= 1,
                    Verb::Revert => machines = 1,
                    Verb::Fork | Verb::Save | Verb::Forget => {}
                    Verb::Remove => machines = 0,
                }
                prop_assert!((0..=1).contains(&machines));
                let Some(next) = after(phase, verb) else { break };
                phase = next;
                prop_assert_eq!(is_resting(phase), machines == 0);
            }
        }
    }
}
