//! States that are being made durable, in the background.
//!
//! Always: the end of every seal is reported with its state, also when it panicked. When it fails:
//! the state can be used as before, and is lost if the host goes down.

use std::collections::HashMap;

use sandtree_store::{self as store, StateId};
use tokio::task::{Id, JoinSet};

#[derive(Debug, Default)]
pub(super) struct Seals {
    running: JoinSet<Result<(), store::Error>>,
    states: HashMap<Id, StateId>,
}

/// A state that is not durable, and why.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unsealed {
    pub state: Option<StateId>,
    pub reason: String,
}

impl Unsealed {
    pub fn report(self) {
        let Self { state, reason } = self;
        tracing::warn!(
            ?state,
            reason,
            "a state is not durable; it is lost if the host goes down"
        );
    }
}

impl Seals {
    pub fn begin(
        &mut self,
        state: StateId,
        seal: impl FnOnce() -> Result<(), store::Error> + Send + 'static,
    ) {
        let task = self.running.spawn_blocking(seal);
        self.states.insert(task.id(), state);
    }

    /// Waits until a seal ends; `None` if none is running. A caller that stops waiting may call it
    /// again.
    pub async fn ended(&mut self) -> Option<Result<(), Unsealed>> {
        let (task, sealed) = match self.running.join_next_with_id().await? {
            Ok((task, sealed)) => (task, sealed.map_err(|error| error.to_string())),
            Err(panicked) => (panicked.id(), Err(panicked.to_string())),
        };
        let state = self.states.remove(&task);
        Some(sealed.map_err(|reason| Unsealed { state, reason }))
    }

    /// Waits until all seals have ended, and reports the failed ones.
    pub async fn all_ended(&mut self) {
        while let Some(sealed) = self.ended().await {
            sealed.unwrap_or_else(Unsealed::report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_seal_that_panics_is_reported_with_its_state() {
        let state = StateId::random().expect("there is randomness");
        let mut seals = Seals::default();
        seals.begin(state.clone(), || panic!("out of luck"));
        let unsealed = seals.ended().await.expect("it was begun");
        let unsealed = unsealed.expect_err("it panicked");
        assert_eq!(unsealed.state, Some(state));
        assert!(unsealed.reason.contains("out of luck"), "{unsealed:?}");
        assert_eq!(seals.ended().await, None);
    }

    #[tokio::test]
    async fn a_seal_that_works_has_nothing_to_report() {
        let mut seals = Seals::default();
        let state = StateId::random().expect("there is randomness");
        seals.begin(state, || Ok(()));
        assert_eq!(seals.ended().await, Some(Ok(())));
    }
}
