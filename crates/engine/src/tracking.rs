//! Which ways of telling written pages work on this kernel, found by a real round trip on a child process.
//!
//! ```text
//!   parent: fork --> child: maps pages, protects them, writes some --> says where
//!   parent: scan, ask for one page to be written, scan: exactly that page?
//! ```
//!
//! Always: a kernel that accepts every call and then tells nothing is found out: without its configuration, soft-dirty
//! is like that. The child only makes system calls on memory of its own, and dies with the probe.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};
use serde::{Deserialize, Serialize};

use crate::preload::format::{PAGE_BYTES, Report};
use crate::preload::protect;
use crate::probe::{Verdict, describe};
use crate::ram::{ByteRun, GuestMemory, Mapped, Place, Tracking};

/// Pages the child maps, and how many of them it writes before anything is asked.
const PAGES: u64 = 16;
const WRITTEN: u64 = 4;

const ANSWER_DEADLINE_S: i64 = 5;

/// Which ways of telling written pages work here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrackingVerdict {
    pub write_protect: Verdict,
    pub soft_dirty: Verdict,
    pub anonymous: Verdict,
}

pub(crate) async fn probe() -> TrackingVerdict {
    let probed = tokio::task::spawn_blocking(|| TrackingVerdict {
        write_protect: write_protect().into(),
        soft_dirty: soft_dirty().into(),
        anonymous: anonymous().into(),
    });
    probed.await.unwrap_or_else(|error| {
        let unusable = || Verdict::Unusable { reason: format!("the probe ended: {error}") };
        TrackingVerdict { write_protect: unusable(), soft_dirty: unusable(), anonymous: unusable() }
    })
}

fn write_protect() -> Result<(), String> {
    let mut child = Child::start(Protect::Yes)?;
    child.expect(Tracking::WriteProtect, 0, WRITTEN)?;
    child.writes_are_told(Tracking::WriteProtect)
}

fn soft_dirty() -> Result<(), String> {
    let mut child = Child::start(Protect::No)?;
    // Clears what is set, and may find nothing where nothing is tracked.
    child.memory.written(Tracking::SoftDirty).map_err(|error| describe(&error))?;
    child.writes_are_told(Tracking::SoftDirty)
}

fn anonymous() -> Result<(), String> {
    let child = Child::start(Protect::No)?;
    child.expect(Tracking::Anonymous, 0, WRITTEN)?;
    let mut bytes = Vec::new();
    let written = ByteRun { offset: 0, bytes: WRITTEN * PAGE_BYTES };
    child.memory.read(&[written], &mut bytes).map_err(|error| describe(&error))?;
    let right = bytes.chunks(PAGE_BYTES as usize).zip(0..).all(|(page, number)| page[0] == number + 1);
    if right { Ok(()) } else { Err("what is read is not what was written".into()) }
}

#[derive(Clone, Copy)]
enum Protect {
    Yes,
    No,
}

/// Ends with the probe, however that ends.
struct Subject {
    pid: Pid,
    pidfd: Arc<OwnedFd>,
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Err(errno) = pidfd_send_signal(&self.pidfd, Signal::KILL) {
            tracing::trace!(%errno, "nothing left to kill");
        }
        if let Err(errno) = waitpid(Some(self.pid), WaitOptions::empty()) {
            tracing::warn!(%errno, "a probe was reaped by somebody else");
        }
    }
}

struct Child {
    memory: GuestMemory,
    commands: PipeWriter,
    answers: PipeReader,
    _subject: Subject,
}

impl Child {
    fn start(protect: Protect) -> Result<Child, String> {
        let failed = |error: io::Error| format!("a child to try it on cannot be started: {error}");
        let (their_commands, commands) = io::pipe().map_err(failed)?;
        let (mut answers, their_answers) = io::pipe().map_err(failed)?;
        let pid = fork(protect, their_commands.as_raw_fd(), their_answers.as_raw_fd()).map_err(failed)?;
        let pidfd = Arc::new(pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?);
        let subject = Subject { pid, pidfd: pidfd.clone() };
        let report = Report::decode(&receive(&mut answers)?).ok_or("a child to try it on tells nonsense")?;
        report.mapping.and(report.tracking).map_err(|failure| failure.to_string())?;
        let place = Place { address: report.address, bytes: report.bytes };
        let number = pid.as_raw_nonzero().get().cast_unsigned();
        let memory = GuestMemory::new(number, pidfd, place, Mapped::Preload { regions: 0 }, Ok(()));
        Ok(Child { memory, commands, answers, _subject: subject })
    }

    /// Two rounds: the second tells that the first has started anew.
    fn writes_are_told(&mut self, how: Tracking) -> Result<(), String> {
        for page in [WRITTEN + 2, 1] {
            self.write(page as u8)?;
            self.expect(how, page, 1)?;
        }
        Ok(())
    }

    fn write(&mut self, page: u8) -> Result<(), String> {
        self.commands.write_all(&[page]).map_err(|error| format!("the child is gone: {error}"))?;
        receive::<1>(&mut self.answers).map(drop)
    }

    fn expect(&self, how: Tracking, page: u64, pages: u64) -> Result<(), String> {
        let found = self.memory.written(how).map_err(|error| describe(&error))?;
        if found == [ByteRun { offset: page * PAGE_BYTES, bytes: pages * PAGE_BYTES }] {
            return Ok(());
        }
        let found: Vec<_> = found.iter().map(|run| (run.offset / PAGE_BYTES, run.bytes / PAGE_BYTES)).collect();
        match found.as_slice() {
            [] if how == Tracking::SoftDirty => Err("the kernel is built without CONFIG_MEM_SOFT_DIRTY".into()),
            [] => Err("the kernel does not tell written pages".into()),
            found => Err(format!("the kernel tells other pages than were written: {found:?}")),
        }
    }
}

/// Waits for an answer of that length, but not for ever.
fn receive<const BYTES: usize>(answers: &mut PipeReader) -> Result<[u8; BYTES], String> {
    let deadline = rustix::event::Timespec { tv_sec: ANSWER_DEADLINE_S, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&*answers, PollFlags::IN)], Some(&deadline)) {
        Ok(0) => return Err(format!("a child to try it on does not answer within {ANSWER_DEADLINE_S} s")),
        Ok(_) => {}
        Err(errno) => return Err(format!("a child to try it on cannot be asked: {errno}")),
    }
    let mut bytes = [0; BYTES];
    answers.read_exact(&mut bytes).map_err(|error| format!("a child to try it on is gone: {error}"))?;
    Ok(bytes)
}

#[allow(unsafe_code, reason = "fork: the child makes system calls on memory of its own until it is killed")]
fn fork(protect: Protect, commands: RawFd, answers: RawFd) -> io::Result<Pid> {
    // SAFETY: the child runs `serve`, which allocates nothing, takes no lock and never returns.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => serve(protect, commands, answers),
        pid => Ok(Pid::from_raw(pid).expect("fork gives the parent a positive number")),
    }
}

/// The life of the child: maps, says where, writes each page it is asked to write.
#[allow(unsafe_code, reason = "what is safe after fork has no safe form")]
fn serve(protect: Protect, commands: RawFd, answers: RawFd) -> ! {
    let bytes = (PAGES * PAGE_BYTES) as usize;
    // SAFETY: system calls on numbers and locals. The pages written lie inside the mapping, which is checked to be
    // there. `_exit` runs nothing of the parent's.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        // Other descriptors of the parent would stay open with the child.
        libc::dup2(commands, 0);
        libc::dup2(answers, 1);
        libc::syscall(libc::SYS_close_range, 2, u32::MAX, 0);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let pages = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if pages == libc::MAP_FAILED {
            libc::_exit(1);
        }
        let write = |page: u8| pages.cast::<u8>().add(usize::from(page) * PAGE_BYTES as usize).write_volatile(page + 1);
        let small = protect::no_huge_pages();
        let tracking = small.and_then(|()| match protect {
            Protect::Yes => protect::protect(pages as u64, bytes as u64),
            Protect::No => Ok(()),
        });
        (0..WRITTEN as u8).for_each(write);
        let report = Report { address: pages as u64, bytes: bytes as u64, regions: 0, mapping: Ok(()), tracking };
        let report = report.encode();
        libc::write(1, report.as_ptr().cast(), report.len());
        let mut page = 0_u8;
        while libc::read(0, (&raw mut page).cast(), 1) == 1 && u64::from(page) < PAGES {
            write(page);
            libc::write(1, (&raw const page).cast(), 1);
        }
        libc::_exit(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_works_is_found_by_trying() {
        let verdict = probe().await;
        assert_eq!(verdict.anonymous, Verdict::Usable);
        assert_eq!(verdict, probe().await);
    }
}
