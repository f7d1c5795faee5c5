//! Threads for work that may wait for a disk. They read from a [`Feed`](crate::feed::Feed), write
//! to pipes, and report to the loop when they are done.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

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
    next_ticket: u64,
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
        let loop_bell = self.to_loop();
        let thread = move || loop_bell.ring(work());
        std::thread::Builder::new()
            .spawn(thread)
            .map(drop)
            .or_failure(|| "cannot start a thread in the guest".into())
    }

    pub fn take_finished(&self) -> impl Iterator<Item = Finished> + '_ {
        // An empty counter only means that there was no report.
        tolerate(rustix::io::read(&*self.bell, &mut [0; 8]));
        self.receiver.try_iter()
    }
}

/// A panic in one operation is its failure, not the end of the guest's init.
fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(refusal(Errno::IO, "the agent failed inside")))
}
