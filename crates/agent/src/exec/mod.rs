//! One command in the guest, from its start until its outcome has been sent.
//!
//! ```text
//!   Running --exit------------------------------------------> (output drained) Ended
//!      |--deadline--> Terminating --grace over--> Killed --family gone--> (output drained) Ended
//!      |                   \--family gone--------------------------------> (output drained) Ended
//!      \--SIGKILL from the host-----------------> Killed
//! ```
//!
//! Always: an ordinary end neither waits for background children nor ends them. After a deadline or
//! a SIGKILL, a command has ended only when all its processes are gone.

pub mod spawn;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitStatus};
use sandtree_proto::{Outcome, TermSize};

use crate::cgroup::Family;
use crate::console;
use crate::terminal;

/// The time between SIGTERM and SIGKILL at a deadline.
const GRACE: Duration = Duration::from_secs(1);
/// How often a killed family is checked. Most are gone at the first SIGCHLD.
const RECHECK: Duration = Duration::from_millis(10);
/// How long a terminal may be silent after its command's end before its stream is closed.
const TERMINAL_LINGER: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub struct Exec {
    pid: Pid,
    family: Family,
    terminal: Option<OwnedFd>,
    phase: Phase,
    deadline: Option<Instant>,
    timed_out: bool,
    exit: Option<(Outcome, Instant)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Terminating { kill_at: Instant },
    Killed,
}

impl Exec {
    pub fn new(
        pid: Pid,
        family: Family,
        terminal: Option<OwnedFd>,
        timeout: Option<Duration>,
    ) -> Self {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Self {
            pid,
            family,
            terminal,
            phase: Phase::Running,
            deadline,
            timed_out: false,
            exit: None,
        }
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    pub fn has_exited(&self) -> bool {
        self.exit.is_some()
    }

    pub fn has_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    pub fn exited(&mut self, status: WaitStatus) {
        let outcome = match status.terminating_signal() {
            Some(signal) => Outcome::Signaled { signal },
            None => Outcome::Exited {
                code: status.exit_status().unwrap_or(-1),
            },
        };
        self.exit = Some((outcome, Instant::now()));
    }

    pub fn signal(&mut self, number: i32) {
        if number == libc::SIGKILL {
            self.phase = Phase::Killed;
            self.family.kill();
        } else {
            self.family.signal(number);
        }
    }

    pub fn resize(&self, size: TermSize) {
        if let Some(Err(error)) = self
            .terminal
            .as_ref()
            .map(|master| terminal::resize(master, size))
        {
            console::say(format_args!("cannot resize a terminal: {error}"));
        }
    }

    /// Sends the signals that are due.
    pub fn tick(&mut self, now: Instant) {
        match self.phase {
            Phase::Running
                if self.exit.is_none() && self.deadline.is_some_and(|deadline| deadline <= now) =>
            {
                self.timed_out = true;
                self.phase = Phase::Terminating {
                    kill_at: now + GRACE,
                };
                self.family.signal(libc::SIGTERM);
                self.family.signal(libc::SIGCONT);
            }
            Phase::Terminating { kill_at } if kill_at <= now => {
                self.phase = Phase::Killed;
                self.family.kill();
            }
            _ => {}
        }
    }

    /// The time of the next call of [`tick`](Self::tick) or [`outcome`](Self::outcome). `listening`
    /// says whether the terminal is being read: the silence of a terminal that waits for the host
    /// does not count.
    pub fn next_tick(&self, now: Instant, listening: bool) -> Option<Instant> {
        match (self.phase, &self.exit) {
            (Phase::Running, None) => self.deadline,
            (Phase::Running, Some((_, at))) => {
                (self.terminal.is_some() && listening).then(|| *at + TERMINAL_LINGER)
            }
            (Phase::Terminating { kill_at }, None) => Some(kill_at),
            (Phase::Terminating { kill_at }, Some(_)) => Some(kill_at.min(now + RECHECK)),
            (Phase::Killed, _) => Some(now + RECHECK),
        }
    }

    /// A terminal reports its end as EIO. If background children keep it open, silence counts as
    /// the end.
    pub fn is_terminal_silent(&self, now: Instant) -> bool {
        let exited = self.exit.as_ref().map(|(_, at)| *at);
        self.terminal.is_some() && exited.is_some_and(|at| at + TERMINAL_LINGER <= now)
    }

    /// The outcome, when there is one. The caller checks the streams.
    pub fn outcome(&self) -> Option<Outcome> {
        let (outcome, _) = self.exit.as_ref()?;
        if self.phase != Phase::Running && !self.family.is_gone() {
            return None;
        }
        Some(if self.timed_out {
            Outcome::TimedOut
        } else {
            outcome.clone()
        })
    }

    /// Returns the processes that may outlive the command.
    pub fn into_family(self) -> Family {
        self.family
    }
}
