//! Threads for work that may wait for a disk. They read from a [`Feed`](crate::feed::Feed), write
//! to pipes, and report to the loop when they are done. Then one of them waits for the next work,
//! because a new thread costs more than most requests; others end.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::process::Pid;
use sandtree_proto::{ExecStart, Failure, Reply};

use crate::cgroup::Family;
use crate::failure::{OrFailure, refusal, tolerate};

/// A thread's result, or its request.
#[derive(Debug)]
pub enum Finished {
    Channel {
        channel: u32,
        ticket: Ticket,
        result: Result<(), Failure>,
    },
    Request {
        id: u32,
        generation: u64,
        reply: Result<Reply, Failure>,
    },
    /// A command to start. Only the loop starts commands, because it reaps every child, also one
    /// that fails to start.
    Start(Start),
    /// Processes that a thread has started and that may outlive it.
    Left(Family),
}

#[derive(Debug)]
pub struct Start {
    pub start: ExecStart,
    pub streams: [OwnedFd; 3],
    pub started: Sender<Result<(Pid, Family), Failure>>,
}

/// Identifies the work of one thread. A channel's number does not: after a restore another hub
/// assigns the numbers, while threads of closed channels may still work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket(u64);

#[derive(Debug)]
pub struct Workers {
    sender: Sender<Finished>,
    receiver: Receiver<Finished>,
    bell: Arc<OwnedFd>,
    idle: Idle,
    next_ticket: u64,
}

type Work = Box<dyn FnOnce() -> Finished + Send>;

/// The thread that waits for work, if one does.
#[derive(Clone, Default)]
struct Idle(Arc<Mutex<Option<Sender<Work>>>>);

impl Idle {
    /// Lets a thread wait. Returns whether it is the only one.
    fn offer(&self, thread: &Sender<Work>) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = waiting.is_none();
        if is_free {
            *waiting = Some(thread.clone());
        }
        is_free
    }

    /// Gives work to the thread that waits, or back.
    fn give(&self, work: Work) -> Option<Work> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting.take() {
            Some(thread) => thread.send(work).err().map(|SendError(work)| work),
            None => Some(work),
        }
    }
}

impl fmt::Debug for Idle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Idle")
    }
}

/// The way from a thread to the loop, for messages before the thread is done.
#[derive(Debug, Clone)]
pub struct Bell {
    sender: Sender<Finished>,
    bell: Arc<OwnedFd>,
}

impl Bell {
    pub fn ring(&self, finished: Finished) {
        // It fails only when the loop is gone, and the process with it.
        tolerate(self.sender.send(finished));
        self.wake();
    }

    /// Wakes the loop without a message.
    pub fn wake(&self) {
        // It fails only if the counter is full, and then the loop is awake.
        tolerate(rustix::io::write(&*self.bell, &1u64.to_ne_bytes()));
    }
}

impl Workers {
    pub fn new() -> rustix::io::Result<Self> {
        let (sender, receiver) = channel();
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            sender,
            receiver,
            bell: Arc::new(bell),
            idle: Idle::default(),
            next_ticket: 0,
        })
    }

    pub fn to_loop(&self) -> Bell {
        Bell {
            sender: self.sender.clone(),
            bell: Arc::clone(&self.bell),
        }
    }

    /// Readable when a thread has reported something.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub fn run_channel(
        &mut self,
        channel: u32,
        work: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> Result<Ticket, Failure> {
        self.next_ticket += 1;
        let ticket = Ticket(self.next_ticket);
        self.spawn(move || Finished::Channel {
            channel,
            ticket,
            result: guarded(work),
        })?;
        Ok(ticket)
    }

    pub fn run_request(
        &self,
        id: u32,
        generation: u64,
        work: impl FnOnce() -> Result<Reply, Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        self.spawn(move || Finished::Request {
            id,
            generation,
            reply: guarded(work),
        })
    }

    fn spawn(&self, work: impl FnOnce() -> Finished + Send + 'static) -> Result<(), Failure> {
        let Some(work) = self.idle.give(Box::new(work)) else {
            return Ok(());
        };
        let bell = self.to_loop();
        let idle = self.idle.clone();
        std::thread::Builder::new()
            .spawn(move || run(work, &bell, &idle))
            .map(drop)
            .or_failure(|| "cannot start a thread in the guest".into())
    }

    pub fn take_finished(&self) -> impl Iterator<Item = Finished> + '_ {
        // An empty counter only means that there was no report.
        tolerate(rustix::io::read(&*self.bell, &mut [0; 8]));
        self.receiver.try_iter()
    }
}

/// The work of a thread, and more of it while no other thread waits.
fn run(first: Work, bell: &Bell, idle: &Idle) {
    let (sender, more) = channel();
    let mut next = Some(first);
    while let Some(work) = next {
        let finished = work();
        // Before the report, because the loop may answer it with the next work.
        let waits = idle.offer(&sender);
        bell.ring(finished);
        next = waits.then(|| more.recv().ok()).flatten();
    }
}

/// A panic in one operation is its failure, not the end of the guest's init.
pub fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(refusal(Errno::IO, "the agent failed inside")))
}

#[cfg(test)]
mod tests {
    use std::thread::{self, ThreadId};

    use super::*;

    fn thread_of(workers: &Workers, wait: impl FnOnce() + Send + 'static) {
        let work = move || {
            wait();
            let message = format!("{:?}", thread::current().id());
            Err(refusal(Errno::IO, message))
        };
        workers.run_request(1, 1, work).unwrap();
    }

    fn finished(workers: &Workers) -> String {
        match workers.receiver.recv().unwrap() {
            Finished::Request { reply, .. } => reply.unwrap_err().message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_thread_waits_for_the_next_work() {
        let workers = Workers::new().unwrap();
        thread_of(&workers, || ());
        let first = finished(&workers);
        for _ in 0..10 {
            thread_of(&workers, || ());
            assert_eq!(finished(&workers), first);
        }
        let own: ThreadId = thread::current().id();
        assert_ne!(first, format!("{own:?}"));
    }

    #[test]
    fn work_does_not_wait_for_other_work() {
        let workers = Workers::new().unwrap();
        let (go, waits) = channel::<()>();
        thread_of(&workers, move || tolerate(waits.recv()));
        thread_of(&workers, || ());
        let quick = finished(&workers);
        drop(go);
        let slow = finished(&workers);
        assert_ne!(quick, slow);
        // Whichever waits now: no work is lost.
        thread_of(&workers, || ());
        finished(&workers);
    }
}
