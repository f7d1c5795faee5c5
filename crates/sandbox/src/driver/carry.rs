//! Carries a driver's job out: to its end, until an urgent job interrupts it, or until it panics.
//!
//! Always: the caller gets an answer. The sandbox survives a panic: the driver drops the job, and
//! if the machine ended with the job, records that.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sandtree_store::Ended;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Driver;
use super::local::Job;
use crate::error::{Error, Result};
use crate::machine::ending::Ending;
use crate::order::Urgency;
use crate::start;
use crate::verb::{Verb, has_machine};

/// How long an interrupted verb may take to notice that its machine is gone, and to clean up.
const INTERRUPTION: Duration = Duration::from_secs(3);

impl Driver {
    /// Carries a job out. An urgent job that arrives meanwhile interrupts it, and is carried out
    /// next.
    pub(super) async fn carry_out(&mut self, job: Job, urgent: &mut mpsc::Receiver<Job>) {
        if job.urgency == Urgency::Interrupts {
            return self.carry_out_whole(job).await;
        }
        if let Some(urgent) = self.carry_out_until(job, urgent).await {
            self.carry_out_whole(urgent).await;
        }
    }

    async fn carry_out_whole(&mut self, job: Job) {
        let Job {
            verb, run, fail, ..
        } = job;
        if let Err(panic) = caught(run(self)).await {
            fail(self.panicked(verb, &panic).await);
        }
    }

    /// Returns the urgent job that interrupted this one.
    async fn carry_out_until(&mut self, job: Job, urgent: &mut mpsc::Receiver<Job>) -> Option<Job> {
        let Job {
            verb, run, fail, ..
        } = job;
        let name = self.name();
        let qemu = self.qemu();
        let interrupted = self.interrupted.clone();
        let (ended, urgent) = {
            let mut work = pin!(caught(run(self)));
            tokio::select! {
                ended = &mut work => (Some(ended), None),
                Some(urgent) = urgent.recv() => {
                    interrupted.set(Some(urgent.verb));
                    let notices_within = qemu.map_or(Duration::ZERO, kill);
                    let ended = tokio::time::timeout(notices_within, work).await;
                    (ended.ok(), Some(urgent))
                }
            }
        };
        interrupted.set(None);
        let by = urgent.as_ref().map_or(Verb::Kill, |job| job.verb);
        match ended {
            Some(Ok(())) => {}
            Some(Err(panic)) => fail(self.panicked(verb, &panic).await),
            None => {
                self.was_dropped();
                fail(Error::Interrupted { name, verb, by });
            }
        }
        urgent
    }

    /// Cleans up after a job that was dropped before its end. A machine that the job was starting
    /// is gone, so the state that the job recorded is wrong.
    fn was_dropped(&mut self) {
        self.restore_head();
        if self.running.is_some() {
            return;
        }
        self.rested = Some(Instant::now());
        let state = start::unsynced(&self.state);
        if let Err(error) = self.record(state) {
            tracing::error!(%error, "the state of a sandbox cannot be recorded");
        }
    }

    /// Replaces the error of an interrupted verb by the interruption.
    pub(super) fn explain_interruption<T>(&self, verb: Verb, answer: Result<T>) -> Result<T> {
        let by = self.interrupted.get();
        match (answer, by) {
            (Err(_), Some(by)) => Err(Error::Interrupted {
                name: self.name(),
                verb,
                by,
            }),
            (answer, _) => answer,
        }
    }

    /// A descriptor to kill the machine's process with while a job borrows the driver.
    fn qemu(&self) -> Option<OwnedFd> {
        let pid = self.running.as_ref()?.machine.pid();
        let pid = Pid::from_raw(pid.try_into().ok()?)?;
        pidfd_open(pid, PidfdFlags::empty()).ok()
    }

    /// Cleans up after a job that panicked, and returns its error. The sandbox stays. A machine
    /// that the job had taken out of the driver is gone.
    async fn panicked(&mut self, verb: Verb, panic: &str) -> Error {
        tracing::error!(?verb, panic, "a verb panicked");
        let lost = has_machine(self.state.phase) && self.running.is_none();
        if lost && self.owned.is_some() {
            let ending = Ending::crashed(Ended::Defect, format!("an internal error: {panic}"));
            if let Err(error) = self.rest(ending).await {
                tracing::error!(%error, "the end of a machine cannot be recorded");
            }
        }
        if self.owned.is_some() {
            self.restore_head();
        }
        // A capture may have stopped the guest.
        self.continue_machine().await;
        Error::Panicked {
            name: self.name(),
            verb,
            message: panic.to_owned(),
        }
    }
}

/// Kills QEMU. Returns how long a verb that uses the machine may take to notice that.
fn kill(qemu: OwnedFd) -> Duration {
    if let Err(error) = pidfd_send_signal(&qemu, Signal::KILL) {
        tracing::debug!(%error, "a machine that is to be killed is gone already");
    }
    INTERRUPTION
}

/// A future's result, or what it panicked with.
fn caught(
    work: impl Future<Output = ()> + Send,
) -> impl Future<Output = Result<(), String>> + Send {
    struct Caught<W>(W);

    impl<W: Future<Output = ()>> Future for Caught<Pin<Box<W>>> {
        type Output = Result<(), String>;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
            let polled = catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(context)));
            match polled {
                Ok(poll) => poll.map(Ok),
                Err(panic) => Poll::Ready(Err(text_of(panic.as_ref()))),
            }
        }
    }

    Caught(Box::pin(work))
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}
