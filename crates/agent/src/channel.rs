//! A channel: three streams, the work behind them, and its outcome.
//!
//! Always: an ended channel keeps its streams until the host closes it, so that a host can fetch
//! the rest after a break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::process::{Pid, WaitStatus};
use sandtree_proto::{ChannelState, Failure, Outcome, StreamError, StreamId};

use crate::cgroup::Family;
use crate::exec::Exec;
use crate::failure::{cut, failure, tolerate};
use crate::held::Spares;
use crate::input::{AtEnd, Input};
use crate::output::Output;
use crate::tunnel::{Connecting, Progress};
use crate::workers::Ticket;

/// How much text of a failure fits into the hello, which must list every channel in one frame.
const HELLO_MESSAGE_MAX: usize = 64;

#[derive(Debug)]
pub struct Channel {
    tag: String,
    /// False between a break and the host's `Resume`.
    pub flowing: bool,
    pub input: Input,
    pub out: Output,
    pub err: Output,
    work: Work,
    /// The command's process, or 0 for a connection; `None` before it exists.
    pub started: Option<u32>,
    outcome: Option<Outcome>,
    reported: bool,
}

#[derive(Debug)]
pub enum Work {
    Exec(Box<Exec>),
    /// The work of a thread, and its result when it is done.
    File {
        ticket: Ticket,
        cancel: Cancel,
        result: Option<Result<(), Failure>>,
    },
    Connecting(Connecting),
    Connected,
    /// The work has ended, or never started.
    Over,
}

/// Informs a thread that its input ended early, before the host had sent everything.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The descriptors of a channel's streams; some channels lack some.
#[derive(Debug, Default)]
pub struct Ends {
    pub input: Option<(OwnedFd, AtEnd)>,
    pub out: Option<OwnedFd>,
    pub err: Option<OwnedFd>,
}

/// The events for which the loop waits at a channel's descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    Input,
    Out,
    Err,
    Connecting,
}

/// The parts of an ended channel that the loop must still handle.
#[derive(Debug, Default)]
pub struct Remains {
    pub family: Option<Family>,
    pub pipes: Vec<OwnedFd>,
}

impl Channel {
    pub fn new(window: usize, tag: String, work: Work, ends: Ends) -> Self {
        Self {
            tag,
            flowing: true,
            input: Input::new(window, ends.input),
            out: Output::new(window, ends.out),
            err: Output::new(window, ends.err),
            work,
            started: None,
            outcome: None,
            reported: false,
        }
    }

    /// A channel whose work could not start.
    pub fn failed(tag: String, outcome: Outcome) -> Self {
        Self {
            outcome: Some(outcome),
            ..Self::new(1, tag, Work::Over, Ends::default())
        }
    }

    /// A connection that is not yet established; input from the host is buffered.
    pub fn connecting(window: usize) -> Self {
        let channel = Self::new(window, String::new(), Work::Over, Ends::default());
        Self {
            input: Input::awaiting(window),
            out: Output::awaiting(window),
            ..channel
        }
    }

    pub fn is_over(&self) -> bool {
        self.outcome.is_some()
    }

    /// Returns the outcome once. Between a break and the host's `Resume` it returns nothing,
    /// because the host must first learn that the work has started.
    pub fn take_outcome(&mut self) -> Option<Outcome> {
        let outcome = self
            .outcome
            .clone()
            .filter(|_| self.flowing && !self.reported);
        self.reported |= outcome.is_some();
        outcome
    }

    pub fn exec(&mut self) -> Option<&mut Exec> {
        match &mut self.work {
            Work::Exec(exec) => Some(exec),
            _ => None,
        }
    }

    /// Whether `pid` is the command of this channel.
    pub fn runs(&self, pid: Pid) -> bool {
        matches!(&self.work, Work::Exec(exec) if exec.pid() == pid && !exec.has_exited())
    }

    pub fn state(&self, channel: u32) -> ChannelState {
        let outcome = self.outcome.clone().map(shortened);
        let out = self.out.held();
        let err = self.err.held();
        ChannelState {
            channel,
            tag: self.tag.clone(),
            received: self.input.received(),
            out,
            err,
            outcome,
        }
    }

    /// Continues sending from the host's offsets. The outcome may have been lost in the break, so
    /// it is sent again.
    pub fn resume(&mut self, out: u64, err: u64) -> Result<(), StreamError> {
        self.out.stream().rewind(out)?;
        self.err.stream().rewind(err)?;
        self.flowing = true;
        self.reported = false;
        Ok(())
    }

    pub fn output(&mut self, stream: StreamId) -> Option<&mut Output> {
        match stream {
            StreamId::In => None,
            StreamId::Out => Some(&mut self.out),
            StreamId::Err => Some(&mut self.err),
        }
    }

    /// The descriptors to wait for, each with its events.
    pub fn wanted(&self) -> impl Iterator<Item = (Slot, BorrowedFd<'_>, PollFlags)> {
        let input = self
            .input
            .wanted()
            .map(|fd| (Slot::Input, fd, PollFlags::OUT));
        let out = self.out.wanted().map(|fd| (Slot::Out, fd, PollFlags::IN));
        let err = self.err.wanted().map(|fd| (Slot::Err, fd, PollFlags::IN));
        let connecting = match &self.work {
            Work::Connecting(connecting) => {
                Some((Slot::Connecting, connecting.socket(), PollFlags::OUT))
            }
            _ => None,
        };
        [input, out, err, connecting].into_iter().flatten()
    }

    pub fn pull(&mut self, slot: Slot, spares: &mut Spares) {
        let output = if slot == Slot::Err {
            &mut self.err
        } else {
            &mut self.out
        };
        if let Err(error) = output.pull(spares) {
            self.end(Outcome::Failed(failure(
                "the connection in the guest broke",
                &error.into(),
            )));
        }
    }

    /// Advances a connection by one step. Returns true when it has just been established.
    pub fn proceed(&mut self) -> bool {
        match std::mem::replace(&mut self.work, Work::Over) {
            Work::Connecting(connecting) => self.progress(connecting.proceed()),
            other => {
                self.work = other;
                false
            }
        }
    }

    pub fn progress(&mut self, progress: Progress) -> bool {
        match progress {
            Progress::Waiting(connecting) => self.work = Work::Connecting(connecting),
            Progress::Failed(failure) => self.end(Outcome::Failed(failure)),
            Progress::Connected(socket) => match socket.try_clone() {
                Err(error) => self.end(Outcome::Failed(failure(
                    "cannot keep the connection",
                    &error,
                ))),
                Ok(reader) => {
                    self.input.attach(socket, AtEnd::Shutdown);
                    self.out.attach(reader);
                    self.work = Work::Connected;
                    self.started = Some(0);
                    return true;
                }
            },
        }
        false
    }

    /// Records the status of the command's process, which has been reaped.
    pub fn exited(&mut self, status: WaitStatus) {
        let Work::Exec(exec) = &mut self.work else {
            return;
        };
        exec.exited(status);
        // The last bytes of a terminal may still be in the kernel; the terminal reports its own
        // end.
        if !exec.has_terminal() {
            self.out.end_after_present();
            self.err.end_after_present();
        }
    }

    /// Records the result of a thread. The ticket tells it from the thread of an earlier channel
    /// with the same number.
    pub fn finished(&mut self, by: Ticket, done: Result<(), Failure>) {
        match &mut self.work {
            Work::File { ticket, result, .. } if *ticket == by => *result = Some(done),
            _ => {}
        }
    }

    pub fn tick(&mut self, now: Instant, spares: &mut Spares) {
        let Work::Exec(exec) = &mut self.work else {
            return;
        };
        exec.tick(now);
        if exec.is_terminal_silent(now) {
            self.pull(Slot::Out, spares);
            if self.out.wanted().is_some() {
                self.out.stream().end();
            }
        }
    }

    /// The time of the next call of [`tick`](Self::tick). A terminal that waits for the host needs
    /// none.
    pub fn next_tick(&self, now: Instant) -> Option<Instant> {
        let Work::Exec(exec) = &self.work else {
            return None;
        };
        exec.next_tick(now, self.out.wanted().is_some())
    }

    /// Ends the channel if its work and its streams are done. Returns the parts that outlive it.
    pub fn settle(&mut self) -> Option<Remains> {
        if self.outcome.is_some() {
            return None;
        }
        let outcome = self.conclusion()?;
        Some(self.conclude(outcome))
    }

    fn conclusion(&self) -> Option<Outcome> {
        let streams_done = self.out.is_ended() && self.err.is_ended();
        match &self.work {
            Work::File {
                result: Some(Err(failure)),
                ..
            } => Some(Outcome::Failed(failure.clone())),
            _ if !streams_done => None,
            Work::Exec(exec) => exec.outcome(),
            Work::File {
                result: Some(Ok(())),
                ..
            } => Some(Outcome::Done),
            Work::Connected if self.input.is_closed() => Some(Outcome::Done),
            _ => None,
        }
    }

    /// Ends the channel at its present offsets.
    fn end(&mut self, outcome: Outcome) {
        // Dropping the remains closes their pipes, so a process that still writes gets SIGPIPE.
        drop(self.conclude(outcome));
    }

    fn conclude(&mut self, outcome: Outcome) -> Remains {
        self.outcome = Some(outcome);
        self.input.close();
        let pipes = [self.out.take_source(), self.err.take_source()]
            .into_iter()
            .flatten()
            .collect();
        self.out.end();
        self.err.end();
        let family = match std::mem::replace(&mut self.work, Work::Over) {
            Work::Exec(exec) => Some(exec.into_family()),
            _ => None,
        };
        Remains { family, pipes }
    }

    /// The host has broken the rules of this channel: ends its work and reports the failure.
    pub fn violate(&mut self, failure: Failure) -> Remains {
        self.cancel();
        self.conclude(Outcome::Failed(failure))
    }

    /// The host has closed the channel: ends its work, and drops a partly written file.
    pub fn close(mut self) -> Remains {
        self.cancel();
        match self.work {
            Work::Exec(exec) => Remains {
                family: Some(exec.into_family()),
                pipes: Vec::new(),
            },
            _ => Remains::default(),
        }
    }

    fn cancel(&mut self) {
        match &mut self.work {
            Work::Exec(exec) => exec.signal(libc::SIGKILL),
            Work::File { cancel, .. } => cancel.cancel(),
            Work::Connected => self.reset_when_closed(),
            Work::Connecting(_) | Work::Over => {}
        }
    }

    /// An unfinished connection must end with a reset: the guest's program must not see an orderly
    /// end.
    fn reset_when_closed(&self) {
        for socket in [self.input.descriptor(), self.out.descriptor()]
            .into_iter()
            .flatten()
        {
            // A socket that refuses this is already broken, and the program at its other end has
            // seen that.
            tolerate(rustix::net::sockopt::set_socket_linger(
                socket,
                Some(Duration::ZERO),
            ));
        }
    }
}

fn shortened(mut outcome: Outcome) -> Outcome {
    if let Outcome::NotStarted(failure) | Outcome::Failed(failure) = &mut outcome {
        cut(&mut failure.message, HELLO_MESSAGE_MAX);
    }
    outcome
}
