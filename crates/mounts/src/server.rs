//! The handle of a server: what its owner can ask of the thread.
//!
//! Always: each completion is called exactly once, on the server's thread or, when that has ended,
//! on the thread that asked. A completion only passes its value on: the server waits for it, and
//! the server's thread is confined.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};
use sandtree_proto::Nonce;
use sandtree_proto::mount::MountId;

use crate::confine;
use crate::directory::Directory;
use crate::error::{Completion, Error, Outcome};
use crate::serve::{self, Command, Commands, Edit, Service};
use crate::status::Status;

/// Serves the mounts of one guest, in a thread of its own, until it is dropped.
#[derive(Debug)]
pub struct Server {
    line: Line,
    /// Each hands over to the next one; the last one serves.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The way to the thread that serves, whichever that is.
#[derive(Debug, Clone)]
struct Line {
    sender: Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Line {
    fn send(&self, command: Command) {
        // Without a receiver the command is dropped here, and so its completion is called.
        drop(self.sender.send(command));
        // The counter is at its limit only if the thread has commands anyway.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
    }
}

impl Server {
    /// Serves `directories` to the guest at the other end of `port`, and greets it with `nonce`.
    pub fn start(
        port: UnixStream,
        nonce: Nonce,
        directories: Vec<Directory>,
    ) -> Result<Server, Error> {
        port.set_nonblocking(true).map_err(Error::Thread)?;
        let ids = directories.iter().map(|directory| directory.mount);
        let mut seen = BTreeSet::new();
        if let Some(mount) = ids.into_iter().find(|id| !seen.insert(*id)) {
            return Err(Error::Exists { mount });
        }
        let mounts = directories.into_iter().map(serve::open);
        let mounts = mounts.collect::<Result<Vec<_>, _>>()?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(|errno| Error::Thread(errno.into()))?);
        let (sender, receiver) = channel();
        let commands = Commands {
            receiver,
            wake: wake.clone(),
        };
        let service = Box::new(Service::new(port, nonce, mounts, commands));
        let thread = start(service)?;
        Ok(Server {
            line: Line { sender, wake },
            threads: Mutex::new(vec![thread]),
        })
    }

    /// Waits until the guest has said that everything it shows is up to date.
    pub fn on_ready(&self, done: impl FnOnce(Outcome) + Send + 'static) {
        self.line.send(Command::OnReady(Completion::new(done)));
    }

    /// Asks the guest to ask nothing more. When it holds, nothing is unanswered, and the server
    /// leaves the port alone until [`go`](Self::go).
    pub fn hold(&self, done: impl FnOnce(Outcome) + Send + 'static) {
        self.line.send(Command::Hold(Completion::new(done)));
    }

    /// Leaves the port alone from now until [`go`](Self::go), whatever the guest does.
    pub fn park(&self, done: impl FnOnce(Outcome) + Send + 'static) {
        self.line.send(Command::Park(Completion::new(done)));
    }

    /// Ends [`hold`](Self::hold) and [`park`](Self::park). A hold that the guest has not answered
    /// fails with [`Error::Released`].
    pub fn go(&self) {
        self.line.send(Command::Go);
    }

    /// Waits until the guest has applied every change that the host knows of now. Before the guest
    /// is ready, and while the port is left alone, it waits for that first.
    pub fn barrier(&self, done: impl FnOnce(Outcome) + Send + 'static) {
        self.line.send(Command::Barrier(Completion::new(done)));
    }

    /// Serves another directory. Must not be called by a completion: see
    /// [`confine`](crate::confine).
    pub fn add(&self, directory: Directory, done: impl FnOnce(Outcome) + Send + 'static) {
        self.replace(Edit::Add(directory, Completion::new(done)));
    }

    /// Serves a directory no longer. Must not be called by a completion.
    pub fn remove(&self, mount: MountId, done: impl FnOnce(Outcome) + Send + 'static) {
        self.replace(Edit::Remove(mount, Completion::new(done)));
    }

    /// The mounts as they are now. Empty if the thread has failed.
    pub fn status(&self, done: impl FnOnce(Vec<Status>) + Send + 'static) {
        let answered = Answered(Some(Box::new(done)));
        let done = Box::new(move |status| answered.give(status));
        self.line.send(Command::Status(done));
    }

    /// Starts a thread that takes over with other mounts.
    fn replace(&self, edit: Edit) {
        let line = self.line.clone();
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        // A thread that cannot be started drops the edit, and so its completion is called.
        let started = named().spawn(move || take_over(&line, edit));
        threads.extend(started.ok());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.line.send(Command::End);
        let threads = self.threads.get_mut();
        let threads = std::mem::take(threads.unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A thread that panicked has dropped its part already.
            drop(thread.join());
        }
    }
}

/// A caller of [`Server::status`], which gets an answer in any case.
struct Answered(Option<Box<dyn FnOnce(Vec<Status>) + Send>>);

impl Answered {
    fn give(mut self, status: Vec<Status>) {
        if let Some(done) = self.0.take() {
            done(status);
        }
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Vec::new());
        }
    }
}

/// Starts the first thread, and waits until it has a umask of its own.
fn start(service: Box<Service>) -> Result<JoinHandle<()>, Error> {
    let (detached, is_detached) = sync_channel::<io::Result<()>>(1);
    let serve = move || {
        let result = confine::detach();
        let is_fine = result.is_ok();
        // The other end waits for exactly this.
        drop(detached.send(result));
        if is_fine {
            service.run();
        }
    };
    let thread = named().spawn(serve).map_err(Error::Thread)?;
    match is_detached.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(error)) => Err(Error::Thread(error)),
        Err(_) => Err(Error::Ended),
    }
}

fn take_over(line: &Line, edit: Edit) {
    if let Err(error) = confine::detach() {
        let (Edit::Add(_, done) | Edit::Remove(_, done)) = edit;
        return done.complete(Err(Error::Thread(error)));
    }
    let (sender, receiver) = sync_channel(1);
    line.send(Command::Move(sender));
    // Without a service the server has ended, which the dropped edit says.
    if let Ok(mut service) = receiver.recv() {
        service.edit(edit);
        service.run();
    }
}

fn named() -> Builder {
    Builder::new().name("mounts".to_owned())
}
