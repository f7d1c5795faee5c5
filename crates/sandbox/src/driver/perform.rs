//! Maps each verb to the method of the driver that carries it out.

use std::time::Duration;

use sandtree_engine::{Machine, Picture};
use sandtree_store::Phase;
use tokio::net::UnixStream;
use tokio::time::Instant;

use super::{Driver, Existence, Perform};
use crate::boxed::Boxed;
use crate::error::{Error, Result, engine_error};
use crate::machine::mounts;
use crate::mounts::MountSpec;
use crate::order::{
    Applied, Ask, Expire, GiveBack, Kill, LentState, OpenView, Pause, Remove, Resume, Start, Stop,
    TakeCheckpoint, TakePicture, Unmount, Wanted,
};
use crate::states::{Checkpoint, Forget, Forgotten, Goal, Paused, RestoreReport, Reverted};
use crate::verb::Verb;

impl Perform for Stop {
    /// A second stop waits for the first.
    fn is_done(&self, driver: &Driver, asked: Instant) -> Option<()> {
        driver.rested_since(asked)
    }

    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { driver.stop(self.grace_ms.map(Duration::from_millis)).await })
    }
}

impl Perform for Kill {
    /// The machine may have ended when the verb that was being carried out was interrupted.
    fn is_done(&self, driver: &Driver, asked: Instant) -> Option<()> {
        driver.rested_since(asked)
    }

    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { driver.kill("killed").await })
    }
}

impl Perform for Start {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move {
            let timeout = self.boot_timeout_ms.map(Duration::from_millis);
            driver.start_again(timeout).await
        })
    }
}

impl Perform for Remove {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { driver.remove().await })
    }
}

impl Perform for TakeCheckpoint {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<Checkpoint>> {
        Box::pin(async move { driver.checkpoint(self.tag, self.replace).await })
    }
}

impl Perform for Goal {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<Reverted>> {
        Box::pin(async move { driver.go_to(self).await })
    }
}

impl Perform for Forget {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<Forgotten>> {
        Box::pin(async move { driver.forget(&self) })
    }
}

impl Perform for Wanted {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<LentState>> {
        Box::pin(async move { driver.lend(self).await })
    }

    fn unheard(lent: LentState, driver: &mut Driver) {
        if let Err(error) = driver.take_back(&lent.state) {
            tracing::warn!(%error, "a lent state stays until its sandbox is next opened");
        }
    }
}

impl Perform for GiveBack {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { driver.take_back(&self.state) })
    }
}

impl Perform for Pause {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<Paused>> {
        Box::pin(async move { driver.pause().await })
    }
}

impl Perform for Resume {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<RestoreReport>> {
        Box::pin(async move { driver.resume().await })
    }
}

impl Perform for MountSpec {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { driver.mount(&self).await })
    }
}

impl Perform for Unmount {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { driver.unmount(&self).await })
    }
}

impl Perform for Applied {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { mounts::applied(driver.owned(), self) })
    }
}

impl Perform for Expire {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move { driver.set_expiry(self.after_ms) })
    }
}

impl Perform for TakePicture {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<Picture>> {
        Box::pin(async move {
            let taken = driver.machine_with_screen()?.picture().await;
            taken.map_err(engine_error("take a picture of the screen"))
        })
    }
}

impl Perform for OpenView {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<UnixStream>> {
        Box::pin(async move {
            let opened = driver.machine_with_screen()?.view().await;
            opened.map_err(engine_error("connect a viewer"))
        })
    }
}

/// Makes a new sandbox exist for others. Only the process that creates it sends this.
#[derive(Debug)]
pub(crate) struct Commit {}

impl Ask for Commit {
    type Answer = ();

    /// Legal in every phase in which nothing else is under way: a machine that ended right after
    /// its creation was still created.
    fn verb(&self) -> Verb {
        Verb::Save
    }
}

impl Perform for Commit {
    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<()>> {
        Box::pin(async move {
            driver.existence = Existence::Committed;
            let state = driver.state.clone();
            driver.record(state)
        })
    }
}

impl Driver {
    fn machine_with_screen(&self) -> Result<&Machine> {
        let running = self.running.as_ref().expect("only what runs is used");
        match running.record.display {
            Some(_) => Ok(&running.machine),
            None => Err(Error::NoDisplay { name: self.name() }),
        }
    }

    async fn mount(&mut self, spec: &MountSpec) -> Result<()> {
        let running = self.running.as_ref().expect("only what runs is used");
        mounts::mount(self.owned(), running, spec).await?;
        self.report();
        Ok(())
    }

    async fn unmount(&mut self, which: &Unmount) -> Result<()> {
        let running = self.running.as_ref().expect("only what runs is used");
        mounts::unmount(self.owned(), running, which).await?;
        self.report();
        Ok(())
    }

    /// Returns `Some` if the machine has ended since `asked`, so that there is nothing to stop.
    fn rested_since(&self, asked: Instant) -> Option<()> {
        let is_at_rest = matches!(self.state.phase, Phase::Stopped | Phase::Crashed);
        let since = self.rested.filter(|rested| *rested >= asked);
        since.filter(|_| is_at_rest).map(drop)
    }
}
