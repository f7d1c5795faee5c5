//! Waiting for the next event. Each wait computes its descriptors from the channels, so there is no
//! second record of them that could be wrong.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sandtree_proto::AgentMessage;

use super::Agent;
use crate::channel::Slot;

/// While the host is away, the port is also checked without an edge: a guest restored from memory
/// may have missed one.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The owner of a descriptor that woke the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Link,
    Bell,
    Signal,
    Discarded(usize),
    Channel(u32, Slot),
}

impl Agent {
    /// Waits, then moves the bytes of the streams that are ready.
    pub(super) fn wait(&mut self, busy: bool) -> rustix::io::Result<()> {
        let timeout = if busy {
            Some(Duration::ZERO)
        } else {
            self.patience()
        };
        let mut over = Vec::new();
        for source in self.poll(timeout)? {
            match source {
                Source::Link => self.link.absorb_edges()?,
                // The loop collects the results in every turn.
                Source::Bell => {}
                Source::Signal => self.handle_signals(),
                Source::Discarded(index) => over.extend((!self.discard(index)).then_some(index)),
                Source::Channel(number, slot) => self.advance(number, slot),
            }
        }
        for index in over.into_iter().rev() {
            self.discarded.swap_remove(index);
        }
        if self.link.is_away() {
            self.link.look_again();
        }
        Ok(())
    }

    fn patience(&self) -> Option<Duration> {
        if self.link.is_busy() {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let ticks = self.channels.values().filter(|channel| !channel.is_over());
        let next = ticks.filter_map(|channel| channel.next_tick(now)).min();
        let tick = next.map(|at| at.saturating_duration_since(now));
        let look = self.link.is_away().then_some(LOOK_AGAIN);
        let leave = self
            .leaving
            .map(|leaving| leaving.at_latest.saturating_duration_since(now));
        [tick, look, leave].into_iter().flatten().min()
    }

    fn poll(&self, timeout: Option<Duration>) -> rustix::io::Result<Vec<Source>> {
        let mut sources = vec![Source::Link, Source::Bell, Source::Signal];
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.link.edges(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.workers.bell(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
        ];
        for (index, fd) in self.discarded.iter().enumerate() {
            sources.push(Source::Discarded(index));
            fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
        }
        for (&number, channel) in &self.channels {
            for (slot, fd, events) in channel.wanted() {
                sources.push(Source::Channel(number, slot));
                fds.push(PollFd::from_borrowed_fd(fd, events));
            }
        }
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs() as i64,
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        let ready = fds
            .iter()
            .zip(sources)
            .filter(|(fd, _)| !fd.revents().is_empty());
        Ok(ready.map(|(_, source)| source).collect())
    }

    fn advance(&mut self, number: u32, slot: Slot) {
        let Some(channel) = self.channels.get_mut(&number) else {
            return;
        };
        match slot {
            Slot::Input => channel.input.flush(),
            Slot::Out | Slot::Err => channel.pull(slot, &mut self.spares),
            Slot::Connecting => {
                if channel.proceed() {
                    self.link.send(&AgentMessage::Started {
                        channel: number,
                        pid: 0,
                    });
                }
            }
        }
    }

    /// Reads and drops bytes without an owner. Returns false when no more can come.
    fn discard(&mut self, index: usize) -> bool {
        let mut scratch = self.spares.take();
        let read = rustix::io::read(&self.discarded[index], scratch.room());
        self.spares.put(scratch);
        match read {
            Ok(count) => count > 0,
            Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
        }
    }
}
