//! Which ways of tracking written pages work on this kernel, found by a real round trip on a child
//! process.
//!
//! ```text
//!   parent: fork --> child: maps pages, protects them, writes some --> says where
//!   parent: scan, ask for one page to be written, scan: exactly that page?
//! ```
//!
//! Always: a kernel that accepts every call and then tells nothing is found out: without its
//! configuration, soft-dirty is like that. The child runs as the user that machines run as, so a
//! caller that may not look into them is found out, too. It only makes system calls on memory of
//! its own, and dies with the probe.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid,
};
use serde::{Deserialize, Serialize};

use super::{Verdict, describe};
use crate::error::Error;
use crate::jail::{Jail, switch_user};
use crate::preload::format::{PAGE_BYTES, Report};
use crate::preload::protect;
use crate::ram::{ByteRun, GuestMemory, Mapped, Place, Protecting, Tracking};

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

pub(crate) async fn probe(jail: Jail) -> TrackingVerdict {
    let probed = tokio::task::spawn_blocking(move || TrackingVerdict {
        write_protect: write_protect(jail).into(),
        soft_dirty: soft_dirty(jail).into(),
        anonymous: anonymous(jail).into(),
    });
    probed.await.unwrap_or_else(|error| {
        let unusable = || Verdict::Unusable {
            reason: format!("the probe ended: {error}"),
        };
        TrackingVerdict {
            write_protect: unusable(),
            soft_dirty: unusable(),
            anonymous: unusable(),
        }
    })
}

fn write_protect(jail: Jail) -> Result<(), String> {
    for protecting in [Protecting::All, Protecting::Found] {
        let mut child = Child::start(jail, Protect::Yes)?;
        child.memory = child.memory.protecting(protecting);
        child.expect(Tracking::WriteProtect, 0, WRITTEN)?;
        child.reports_writes(Tracking::WriteProtect)?;
        child.reads_what_was_written()?;
    }
    Ok(())
}

fn soft_dirty(jail: Jail) -> Result<(), String> {
    let mut child = Child::start(jail, Protect::No)?;
    // Clears what is set, and may find nothing where nothing is tracked.
    child
        .memory
        .written(Tracking::SoftDirty)
        .map_err(|error| child.refused(&error))?;
    child.reports_writes(Tracking::SoftDirty)?;
    child.reads_what_was_written()
}

fn anonymous(jail: Jail) -> Result<(), String> {
    let child = Child::start(jail, Protect::No)?;
    child.expect(Tracking::Anonymous, 0, WRITTEN)?;
    child.reads_what_was_written()
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
    jail: Jail,
    _subject: Subject,
}

impl Child {
    fn start(jail: Jail, protect: Protect) -> Result<Child, String> {
        let failed = |error: io::Error| format!("a child to try it on cannot be started: {error}");
        let (their_commands, commands) = io::pipe().map_err(failed)?;
        let (mut answers, their_answers) = io::pipe().map_err(failed)?;
        let life = Life {
            protect,
            uid: jail.uid,
            commands: their_commands.as_raw_fd(),
            answers: their_answers.as_raw_fd(),
        };
        let pid = fork(&life).map_err(failed)?;
        drop(their_commands);
        drop(their_answers);
        let pidfd =
            Arc::new(pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?);
        let subject = Subject {
            pid,
            pidfd: pidfd.clone(),
        };
        let report =
            Report::decode(&receive(&mut answers)?).ok_or("a child to try it on tells nonsense")?;
        report
            .mapping
            .and(report.tracking)
            .map_err(|failure| failure.to_string())?;
        let place = Place {
            address: report.address,
            bytes: report.bytes,
        };
        let number = pid.as_raw_nonzero().get().cast_unsigned();
        let memory = GuestMemory::new(number, pidfd, place, Mapped::Preload { regions: 0 }, Ok(()));
        Ok(Child {
            memory,
            commands,
            answers,
            jail,
            _subject: subject,
        })
    }

    /// Two rounds: the second shows that the first has reset the tracking.
    fn reports_writes(&mut self, how: Tracking) -> Result<(), String> {
        for page in [WRITTEN + 2, 1] {
            self.write(page as u8)?;
            self.expect(how, page, 1)?;
        }
        Ok(())
    }

    fn write(&mut self, page: u8) -> Result<(), String> {
        self.commands
            .write_all(&[page])
            .map_err(|error| format!("the child is gone: {error}"))?;
        receive::<1>(&mut self.answers).map(drop)
    }

    fn reads_what_was_written(&self) -> Result<(), String> {
        let mut bytes = Vec::new();
        let written = ByteRun {
            offset: 0,
            bytes: WRITTEN * PAGE_BYTES,
        };
        self.memory
            .read(&[written], &mut bytes)
            .map_err(|error| self.refused(&error))?;
        let right = bytes
            .chunks(PAGE_BYTES as usize)
            .zip(0..)
            .all(|(page, number)| page[0] == number + 1);
        if right {
            Ok(())
        } else {
            Err("what is read is not what was written".into())
        }
    }

    /// The reason, and what the caller lacks.
    fn refused(&self, error: &Error) -> String {
        let reason = describe(error);
        let denied = io::ErrorKind::PermissionDenied;
        let is_forbidden = matches!(error, Error::Io { source, .. } if source.kind() == denied);
        match self.jail.uid {
            Some(_) if is_forbidden => {
                format!(
                    "{reason}: machines run as other users, and looking into them needs CAP_SYS_PTRACE"
                )
            }
            _ => reason,
        }
    }

    fn expect(&self, how: Tracking, page: u64, pages: u64) -> Result<(), String> {
        let found = self
            .memory
            .written(how)
            .map_err(|error| self.refused(&error))?;
        if found
            == [ByteRun {
                offset: page * PAGE_BYTES,
                bytes: pages * PAGE_BYTES,
            }]
        {
            return Ok(());
        }
        let found: Vec<_> = found
            .iter()
            .map(|run| (run.offset / PAGE_BYTES, run.bytes / PAGE_BYTES))
            .collect();
        match found.as_slice() {
            [] if how == Tracking::SoftDirty => {
                Err("the kernel is built without CONFIG_MEM_SOFT_DIRTY".into())
            }
            [] => Err("the kernel does not tell written pages".into()),
            found => Err(format!(
                "the kernel tells other pages than were written: {found:?}"
            )),
        }
    }
}

/// Waits for an answer of that length, but not for ever.
fn receive<const BYTES: usize>(answers: &mut PipeReader) -> Result<[u8; BYTES], String> {
    let deadline = rustix::event::Timespec {
        tv_sec: ANSWER_DEADLINE_S,
        tv_nsec: 0,
    };
    match poll(
        &mut [PollFd::new(&*answers, PollFlags::IN)],
        Some(&deadline),
    ) {
        Ok(0) => {
            return Err(format!(
                "a child to try it on does not answer within {ANSWER_DEADLINE_S} s"
            ));
        }
        Ok(_) => {}
        Err(errno) => return Err(format!("a child to try it on cannot be asked: {errno}")),
    }
    let mut bytes = [0; BYTES];
    answers
        .read_exact(&mut bytes)
        .map_err(|error| format!("a child to try it on is gone: {error}"))?;
    Ok(bytes)
}

/// What the child does, made before the fork.
struct Life {
    protect: Protect,
    uid: Option<u32>,
    commands: RawFd,
    answers: RawFd,
}

#[allow(
    unsafe_code,
    reason = "fork: the child makes system calls on memory of its own until it is killed"
)]
fn fork(life: &Life) -> io::Result<Pid> {
    // SAFETY: the child runs `serve`, which allocates nothing, takes no lock and never returns.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => serve(life),
        pid => Ok(Pid::from_raw(pid).expect("fork gives the parent a positive number")),
    }
}

/// The life of the child: maps, says where, writes each page it is asked to write.
#[allow(unsafe_code, reason = "what is safe after fork has no safe form")]
fn serve(life: &Life) -> ! {
    let bytes = (PAGES * PAGE_BYTES) as usize;
    // SAFETY: system calls on numbers and locals. The pages written lie inside the mapping, which
    // is checked to exist. `_exit` runs nothing of the parent's.
    unsafe {
        if life.uid.is_some_and(|uid| switch_user(uid, &[]).is_err()) {
            libc::_exit(1);
        }
        // As after the `exec` of QEMU, which a change of user alone is not.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        // Other descriptors of the parent would stay open with the child.
        libc::dup2(life.commands, 0);
        libc::dup2(life.answers, 1);
        libc::syscall(libc::SYS_close_range, 2, u32::MAX, 0);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let pages = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        if pages == libc::MAP_FAILED {
            libc::_exit(1);
        }
        let write = |page: u8| {
            pages
                .cast::<u8>()
                .add(usize::from(page) * PAGE_BYTES as usize)
                .write_volatile(page + 1)
        };
        let small = protect::no_huge_pages();
        let tracking = small.and_then(|()| match life.protect {
            Protect::Yes => protect::protect(pages as u64, bytes as u64),
            Protect::No => Ok(()),
        });
        (0..WRITTEN as u8).for_each(write);
        let report = Report {
            address: pages as u64,
            bytes: bytes as u64,
            regions: 0,
            mapping: Ok(()),
            tracking,
        };
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
        let verdict = probe(Jail::default()).await;
        assert_eq!(verdict.anonymous, Verdict::Usable);
        assert_eq!(verdict, probe(Jail::default()).await);
    }
}
