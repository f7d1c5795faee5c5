//! Chooses how a capture finds the pages that it takes. Pure, so that it can be read and tested as
//! a ladder.

use sandtree_engine::TrackingVerdict;

use crate::degradation::Degradation;
use crate::mode::MemoryMode;

/// What works on this host, for this machine. An error says why something does not.
#[derive(Debug, Clone)]
pub(crate) struct Abilities {
    pub write_protect: Result<(), String>,
    pub soft_dirty: Result<(), String>,
    pub anonymous: Result<(), String>,
}

impl From<&TrackingVerdict> for Abilities {
    fn from(found: &TrackingVerdict) -> Self {
        Self {
            write_protect: found.write_protect.usable(),
            soft_dirty: found.soft_dirty.usable(),
            anonymous: found.anonymous.usable(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModePlan {
    pub mode: MemoryMode,
    /// One for each step down from what was asked for.
    pub degraded: Vec<Degradation>,
}

/// The best mode that works, from `wanted` down. `full` needs nothing, so there always is one.
pub(crate) fn choose(wanted: MemoryMode, abilities: &Abilities) -> ModePlan {
    let mut degraded = Vec::new();
    for mode in MemoryMode::ALL.into_iter().filter(|mode| *mode >= wanted) {
        let usable = match mode {
            MemoryMode::WriteProtect => &abilities.write_protect,
            MemoryMode::SoftDirty => &abilities.soft_dirty,
            MemoryMode::Anonymous => &abilities.anonymous,
            MemoryMode::Full => &Ok(()),
        };
        match usable {
            Ok(()) => return ModePlan { mode, degraded },
            Err(reason) => degraded.push(Degradation::MemoryModeUnusable {
                mode,
                reason: reason.clone(),
            }),
        }
    }
    unreachable!("full needs nothing")
}

/// The best mode that the probes found to work.
pub(crate) fn best_mode(found: &TrackingVerdict) -> ModePlan {
    choose(MemoryMode::WriteProtect, &Abilities::from(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn abilities(usable: [bool; 3]) -> Abilities {
        let [write_protect, soft_dirty, anonymous] =
            usable.map(|ok| if ok { Ok(()) } else { Err("no".to_owned()) });
        Abilities {
            write_protect,
            soft_dirty,
            anonymous,
        }
    }

    #[test]
    fn the_best_mode_that_works_is_taken_and_every_step_down_is_reported() {
        for wanted in MemoryMode::ALL {
            for bits in 0..8 {
                let usable = [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0];
                let plan = choose(wanted, &abilities(usable));
                let works = |mode: MemoryMode| usable.get(mode as usize).copied().unwrap_or(true);
                assert!(works(plan.mode) && plan.mode >= wanted);
                let passed: Vec<_> = MemoryMode::ALL
                    .into_iter()
                    .filter(|m| *m >= wanted && *m < plan.mode)
                    .collect();
                assert!(passed.iter().all(|mode| !works(*mode)));
                assert_eq!(plan.degraded.len(), passed.len());
            }
        }
    }
}
