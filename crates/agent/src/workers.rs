//! Threads for what may wait for a disk. They talk to the loop through pipes, and say when they are done.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use sandtree_proto::{Failure, Reply};

use crate::failure::{OrFailure, refusal, tolerate};

/// What a thread has done.
#[derive(Debug)]
pub enum Finished {
    Channel { channel: u32, result: Result<(), Failure> },
    Request { id: u32, generation: u64, reply: Result<Reply, Failure> },
}

#[derive(Debug)]
pub struct Workers {
    sender: Sender<Finished>,
    receiver: Receiver<Finished>,
    bell: Arc<OwnedFd>,
}

impl Workers {
    pub fn new() -> rustix::io::Result<Self> {
        let (sender, receiver) = channel();
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { sender, receiver, bell: Arc::new(bell) })
    }

    /// Readable when something has finished.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub fn run_channel(
        &self,
        channel: u32,
        work: impl FnOnce() -> Result<(), Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        self.spawn(move || Finished::Channel { channel, result: guarded(work) })
    }

    pub fn run_request(
        &self,
        id: u32,
        generation: u64,
        work: impl FnOnce() -> Result<Reply, Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        self.spawn(move || Finished::Request { id, generation, reply: guarded(work) })
    }

    fn spawn(&self, work: impl FnOnce() -> Finished + Send + 'static) -> Result<(), Failure> {
        let (sender, bell) = (self.sender.clone(), Arc::clone(&self.bell));
        let thread = move || {
            // Both fail only when the loop is gone, and the process with it.
            tolerate(sender.send(work()));
            tolerate(rustix::io::write(&*bell, &1u64.to_ne_bytes()));
        };
        std::thread::Builder::new().spawn(thread).map(drop).or_failure(|| "cannot start a thread in the guest".into())
    }

    pub fn take_finished(&self) -> impl Iterator<Item = Finished> + '_ {
        // An empty counter means only that the bell was not rung since.
        tolerate(rustix::io::read(&*self.bell, &mut [0; 8]));
        self.receiver.try_iter()
    }
}

/// A panic in one operation is its failure, not the end of the guest's init.
fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(refusal(Errno::IO, "the agent failed inside")))
}
