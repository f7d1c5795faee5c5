//! The sending end of a driver's queue, which the handles of this process hold.
//!
//! ```text
//!   ask ── Job ──► queue ──► driver carries it out ──► answer
//!     \─ an urgent one ────► interrupts the job that is being carried out
//! ```
//!
//! Always: every job is answered. An interrupted one and one that panicked answer with an error.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use sandtree_store::SandboxId;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::Driver;
use crate::boxed::Boxed;
use crate::error::{Error, Result};
use crate::hub::Gate;
use crate::order::{Ask, Urgency};
use crate::status::{StateWatch, Status};
use crate::verb::Verb;

/// How many orders may wait for a driver.
const QUEUE: usize = 16;

/// A verb that a driver can carry out.
pub(crate) trait Perform: Ask {
    /// The answer, if the requested change has already happened since `_asked`.
    fn is_done(&self, _driver: &Driver, _asked: Instant) -> Option<Self::Answer> {
        None
    }

    fn perform(self, driver: &mut Driver) -> Boxed<'_, Result<Self::Answer>>;

    /// Undoes the verb of a caller that is gone.
    fn unheard(_answer: Self::Answer, _driver: &mut Driver) {}
}

/// What a driver does for a job.
type Run = Box<dyn for<'a> FnOnce(&'a mut Driver) -> Boxed<'a, ()> + Send>;

/// An order on its way to the driver, with the place for its answer.
pub(super) struct Job {
    pub verb: Verb,
    pub urgency: Urgency,
    pub run: Run,
    /// Answers with an error, if `run` ended before its answer.
    pub fail: Box<dyn FnOnce(Error) + Send>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Job({:?})", self.verb)
    }
}

impl Job {
    fn new<A: Perform>(ask: A, reply: oneshot::Sender<Result<A::Answer>>) -> Self {
        let verb = ask.verb();
        let asked = Instant::now();
        let reply = Arc::new(Mutex::new(Some(reply)));
        let fail_reply = reply.clone();
        let take = |reply: &Mutex<Option<oneshot::Sender<_>>>| {
            reply.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        Self {
            verb,
            urgency: A::URGENCY,
            run: Box::new(move |driver| {
                Box::pin(async move {
                    let mut answer = answer(ask, asked, driver).await;
                    if A::URGENCY == Urgency::Queued {
                        answer = driver.explain_interruption(verb, answer);
                    }
                    let sent = take(&reply).map(|reply| reply.send(answer));
                    if let Some(Err(Ok(answer))) = sent {
                        A::unheard(answer, driver);
                    }
                })
            }),
            fail: Box::new(move |error| {
                if let Some(reply) = take(&fail_reply) {
                    // A caller that stopped waiting needs no answer.
                    drop(reply.send(Err(error)));
                }
            }),
        }
    }
}

impl Job {
    /// The checkpoint before a command. It can be interrupted as a verb can, and the sandbox
    /// survives its panic.
    pub fn gate(gate: Gate) -> Self {
        let reply = Arc::new(Mutex::new(Some(gate.reply)));
        let fail_reply = reply.clone();
        let pass = |reply: &Mutex<Option<oneshot::Sender<_>>>, passed: Result<()>| {
            let reply = reply.lock().unwrap_or_else(PoisonError::into_inner).take();
            let failed =
                |error: Error| format!("the checkpoint before it failed: {}", error.one_line());
            if let Some(reply) = reply {
                // A client that left does not start its command.
                drop(reply.send(passed.map_err(failed)));
            }
        };
        Self {
            verb: Verb::Checkpoint,
            urgency: Urgency::Queued,
            run: Box::new(move |driver| {
                Box::pin(async move {
                    let taken = driver.checkpoint_before_command().await;
                    pass(&reply, driver.explain_interruption(Verb::Checkpoint, taken));
                })
            }),
            fail: Box::new(move |error| pass(&fail_reply, Err(error))),
        }
    }
}

impl Job {
    /// The end of a sandbox whose time is over.
    pub fn expiry() -> Self {
        Self {
            verb: Verb::Remove,
            urgency: Urgency::Queued,
            run: Box::new(|driver| Box::pin(driver.expire())),
            fail: Box::new(|error| tracing::error!(%error, "a sandbox did not expire")),
        }
    }
}

async fn answer<A: Perform>(ask: A, asked: Instant, driver: &mut Driver) -> Result<A::Answer> {
    if let Some(answer) = ask.is_done(driver, asked) {
        return Ok(answer);
    }
    driver.permitted(ask.verb())?;
    ask.perform(driver).await
}

/// The receiving ends, which the driver has.
pub(super) struct Queue {
    pub jobs: mpsc::Receiver<Job>,
    pub urgent: mpsc::Receiver<Job>,
}

/// A handle of a sandbox that a driver of this process runs. When the last handle is dropped, the
/// machine ends.
#[derive(Debug, Clone)]
pub(crate) struct Local {
    jobs: mpsc::Sender<Job>,
    urgent: mpsc::Sender<Job>,
    status: watch::Receiver<Status>,
}

/// As [`Local`], without keeping the machine alive.
#[derive(Debug, Clone)]
pub(crate) struct WeakLocal {
    jobs: mpsc::WeakSender<Job>,
    urgent: mpsc::WeakSender<Job>,
    status: watch::Receiver<Status>,
}

impl WeakLocal {
    /// Whether its driver still has the sandbox.
    pub fn is_driven(&self) -> bool {
        self.status.has_changed().is_ok()
    }

    pub fn upgrade(&self) -> Option<Local> {
        Some(Local {
            jobs: self.jobs.upgrade()?,
            urgent: self.urgent.upgrade()?,
            status: self.status.clone(),
        })
    }
}

impl Local {
    pub(super) fn new(status: watch::Receiver<Status>) -> (Self, Queue) {
        let (jobs, job_queue) = mpsc::channel(QUEUE);
        let (urgent, urgent_queue) = mpsc::channel(QUEUE);
        let local = Self {
            jobs,
            urgent,
            status,
        };
        let queue = Queue {
            jobs: job_queue,
            urgent: urgent_queue,
        };
        (local, queue)
    }

    pub fn downgrade(&self) -> WeakLocal {
        WeakLocal {
            jobs: self.jobs.downgrade(),
            urgent: self.urgent.downgrade(),
            status: self.status.clone(),
        }
    }

    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    pub fn watch(&self) -> StateWatch {
        StateWatch::new(self.status.clone())
    }

    /// Whether its driver still has the sandbox.
    pub fn is_driven(&self) -> bool {
        !self.jobs.is_closed()
    }

    pub async fn ask<A: Perform>(&self, ask: A) -> Result<A::Answer> {
        let (reply, answer) = oneshot::channel();
        let queue = match A::URGENCY {
            Urgency::Queued => &self.jobs,
            Urgency::Interrupts => &self.urgent,
        };
        let gone = || Error::NoSandbox {
            name: self.status().info.name,
        };
        let job = Job::new(ask, reply);
        queue.send(job).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

/// The sandboxes that this process runs.
#[derive(Debug, Default)]
pub(crate) struct Drivers(Mutex<HashMap<SandboxId, WeakLocal>>);

impl Drivers {
    pub fn add(&self, id: &SandboxId, local: &Local) {
        let mut drivers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        drivers.retain(|_, driver| driver.upgrade().is_some());
        drivers.insert(id.clone(), local.downgrade());
    }

    pub fn get(&self, id: &SandboxId) -> Option<Local> {
        let drivers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        drivers.get(id)?.upgrade()
    }
}
