//! Without the feature `faults`: no step ever fails or waits for a test.

use std::time::Duration;

use sandtree_engine::Machine;

use super::Step;

/// A fault that a test injected: there is none.
#[derive(Debug)]
pub(crate) enum Injected {}

/// What a test asked for: nothing.
#[derive(Debug)]
pub(crate) struct Plan;

impl Plan {
    pub fn reach(&self, _step: Step, _machine: Option<&Machine>) -> Result<(), Injected> {
        Ok(())
    }

    pub async fn delay_message(&self) {}

    pub fn acknowledge_within(&self, usual: Duration) -> Duration {
        usual
    }
}
