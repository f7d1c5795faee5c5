//! One QEMU process: started in its jail, watched by a thread of its own, reaped by it.
//!
//! ```text
//!   Process::spawn --> thread: fork --exec failed--> reaped --> Error::Jail
//!                          \--exec--> Process to the caller; poll(stderr, pidfd) --> reaped --> Exit to all watchers
//! ```
//!
//! Always: the thread that forks stays until the process is reaped, because the parent-death signal
//! follows the *thread*. Signals go through a pidfd, so they never reach a process that took over
//! the number. Dropping `Process` kills and waits for the end; the thread reaps. When it fails: a
//! caller that stops waiting in the middle of `spawn` drops the receiver, the thread drops the
//! `Process` it cannot deliver, and that kills; the caller waits for that.

use std::ffi::{CString, OsString};
use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid,
};
use tokio::sync::{oneshot, watch};

use crate::blocking::in_place;
use crate::error::Error;
use crate::exit::Exit;
use crate::jail::{CHILD_FD_END, Confinement, Step};

/// How much of QEMU's last standard error is kept.
const STDERR_TAIL_BYTES: usize = 16 << 10;

/// How long a process that is dropped may take to end. One that waits in the kernel for longer is
/// left to its thread.
const DROPPED_ENDS_WITHIN: Timespec = Timespec {
    tv_sec: 5,
    tv_nsec: 0,
};

/// How often the end of a thread is looked for, which nothing reports in time.
const THREAD_POLL: Duration = Duration::from_millis(1);

/// Waits for the end of a process; it may be cloned and asked any number of times.
#[derive(Clone, Debug)]
pub struct ExitWatch(watch::Receiver<Option<Exit>>);

impl ExitWatch {
    pub(crate) fn new() -> (watch::Sender<Option<Exit>>, ExitWatch) {
        let (sender, receiver) = watch::channel(None);
        (sender, ExitWatch(receiver))
    }

    /// The exit, if it has happened.
    pub fn now(&self) -> Option<Exit> {
        self.0.borrow().clone()
    }

    pub async fn wait(&self) -> Exit {
        let mut receiver = self.0.clone();
        match receiver.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(exit)) => exit.clone(),
            _ => unwatched(),
        }
    }
}

/// The end of the watching thread is the end of QEMU: the parent-death signal follows the thread.
fn unwatched() -> Exit {
    let status = ExitStatus::from_raw(Signal::KILL.as_raw());
    Exit {
        status,
        stderr: "the thread that watched QEMU ended".into(),
    }
}

/// What to run: pure values and the descriptors to hand over.
#[derive(Debug)]
pub(crate) struct Launch {
    pub name: String,
    pub binary: PathBuf,
    pub args: Vec<OsString>,
    /// Each `NAME=value`; there is nothing else in it.
    pub environment: Vec<OsString>,
    /// Each descriptor with its number in the child.
    pub descriptors: Vec<(RawFd, OwnedFd)>,
    pub confinement: Confinement,
}

#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    pidfd: Arc<OwnedFd>,
    exit: ExitWatch,
}

impl Process {
    pub(crate) async fn spawn(launch: Launch) -> Result<Process, Error> {
        let (deliver, delivered) = oneshot::channel();
        let name = format!("qemu-{}", launch.name);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || live(launch, deliver))
            .map_err(|source| Error::Jail {
                step: Step::Fork,
                source,
            })?;
        let mut starting = Starting {
            delivered,
            thread: Some(thread),
        };
        let started = (&mut starting.delivered).await;
        starting.thread = None;
        started.unwrap_or_else(|_| Err(Error::Start { exit: unwatched() }))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    pub(crate) fn pidfd(&self) -> Arc<OwnedFd> {
        self.pidfd.clone()
    }

    pub(crate) fn exit(&self) -> &ExitWatch {
        &self.exit
    }

    /// Sends SIGKILL. A process that is gone already needs none.
    pub(crate) fn kill(&self) {
        if let Err(errno) = pidfd_send_signal(&self.pidfd, Signal::KILL) {
            tracing::trace!(pid = self.pid(), %errno, "nothing left to kill");
        }
    }
}

impl Drop for Process {
    /// Nothing writes to its files any more when this returns: the caller may remove them, or start
    /// another process on them.
    fn drop(&mut self) {
        if self.exit.now().is_some() {
            return;
        }
        self.kill();
        in_place(|| {
            let mut ends = [PollFd::new(&*self.pidfd, PollFlags::IN)];
            if !poll(&mut ends, Some(&DROPPED_ENDS_WITHIN)).is_ok_and(|count| count > 0) {
                tracing::warn!(pid = self.pid(), "a process that was killed does not end");
            }
        });
    }
}

/// A process that is being started. Dropped, it has ended.
struct Starting {
    delivered: oneshot::Receiver<Result<Process, Error>>,
    /// Nothing once the process is delivered.
    thread: Option<JoinHandle<()>>,
}

impl Drop for Starting {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        // From here on the thread keeps what it cannot deliver, and ends with it.
        self.delivered.close();
        // What it had delivered before is killed by this.
        drop(self.delivered.try_recv());
        in_place(|| {
            let end = Instant::now() + Duration::from_secs(DROPPED_ENDS_WITHIN.tv_sec as u64);
            while !thread.is_finished() && Instant::now() < end {
                std::thread::sleep(THREAD_POLL);
            }
        });
    }
}

/// The life of the watching thread.
fn live(launch: Launch, deliver: oneshot::Sender<Result<Process, Error>>) {
    match start(launch) {
        Err(error) => {
            // The caller may have stopped waiting; there is nothing to clean up then.
            drop(deliver.send(Err(error)));
        }
        Ok(started) => {
            let (publish, exit) = ExitWatch::new();
            let Started { pid, pidfd, stderr } = started;
            // An undelivered `Process` comes back, is dropped and thereby killed.
            drop(deliver.send(Ok(Process {
                pid,
                pidfd: pidfd.clone(),
                exit,
            })));
            let stderr = follow(&pidfd, stderr);
            publish.send_replace(Some(Exit {
                status: reap(pid),
                stderr,
            }));
        }
    }
}

struct Started {
    pid: Pid,
    pidfd: Arc<OwnedFd>,
    stderr: PipeReader,
}

/// What a child needs, made before the fork.
struct Prepared {
    program: CString,
    args: Vec<CString>,
    environment: Vec<CString>,
    /// `(source, target)`; sources lie at or above `CHILD_FD_END`, targets below.
    descriptors: Vec<(RawFd, RawFd)>,
    confinement: Confinement,
    report: OwnedFd,
}

fn start(launch: Launch) -> Result<Started, Error> {
    let fork_error = |source| Error::Jail {
        step: Step::Fork,
        source,
    };
    let (stderr, stderr_writer) = io::pipe().map_err(fork_error)?;
    let (report, report_writer) = io::pipe().map_err(fork_error)?;
    let held = hold(launch.descriptors, stderr_writer).map_err(fork_error)?;
    let prepared = Prepared {
        program: c_string(launch.binary.into_os_string())?,
        args: launch
            .args
            .into_iter()
            .map(c_string)
            .collect::<Result<_, _>>()?,
        environment: launch
            .environment
            .into_iter()
            .map(c_string)
            .collect::<Result<_, _>>()?,
        descriptors: held
            .iter()
            .map(|(target, fd)| (fd.as_raw_fd(), *target))
            .collect(),
        confinement: launch.confinement,
        report: raise(report_writer.into()).map_err(fork_error)?,
    };
    let pid = fork(&prepared).map_err(fork_error)?;
    drop(prepared);
    drop(held);
    match read_report(report) {
        Some(error) => {
            reap(pid);
            Err(error)
        }
        None => watchable(pid, stderr),
    }
}

fn watchable(pid: Pid, stderr: PipeReader) -> Result<Started, Error> {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Started {
            pid,
            pidfd: Arc::new(pidfd),
            stderr,
        }),
        Err(errno) => {
            // Not reaped yet, so the number is still its own.
            if rustix::process::kill_process(pid, Signal::KILL).is_ok() {
                reap(pid);
            }
            Err(Error::Jail {
                step: Step::Fork,
                source: errno.into(),
            })
        }
    }
}

/// All descriptors of the child with its standard ones, at numbers that collide with no target.
fn hold(
    descriptors: Vec<(RawFd, OwnedFd)>,
    stderr: PipeWriter,
) -> io::Result<Vec<(RawFd, OwnedFd)>> {
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    let standard = [
        (0, null.try_clone()?.into()),
        (1, null.into()),
        (2, stderr.into()),
    ];
    standard
        .into_iter()
        .chain(descriptors)
        .map(|(target, fd)| Ok((target, raise(fd)?)))
        .collect()
}

fn raise(fd: OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, CHILD_FD_END)?)
}

fn c_string(text: OsString) -> Result<CString, Error> {
    CString::new(text.into_vec()).map_err(|error| Error::Spec {
        detail: format!("an argument holds a zero byte at {}", error.nul_position()),
    })
}

#[allow(
    unsafe_code,
    reason = "fork: the child makes async-signal-safe calls on memory made before, then execs or ends"
)]
fn fork(prepared: &Prepared) -> io::Result<Pid> {
    let argv = pointers(std::iter::once(&prepared.program).chain(&prepared.args));
    let environment = pointers(&prepared.environment);
    // SAFETY: between fork and exec the child allocates nothing and takes no lock. `argv` and
    // `environment` end with a null pointer and point into strings that `prepared` keeps alive.
    // `_exit` runs no destructor twice.
    unsafe {
        match libc::fork() {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let failure = prepared
                    .confinement
                    .enter(&prepared.descriptors)
                    .err()
                    .unwrap_or_else(|| {
                        libc::execve(
                            prepared.program.as_ptr(),
                            argv.as_ptr(),
                            environment.as_ptr(),
                        );
                        (Step::Exec, *libc::__errno_location())
                    });
                let [a, b, c, d] = failure.1.to_le_bytes();
                let report = [failure.0 as u8, a, b, c, d];
                libc::write(
                    prepared.report.as_raw_fd(),
                    report.as_ptr().cast(),
                    report.len(),
                );
                libc::_exit(127)
            }
            pid => Ok(Pid::from_raw(pid).expect("fork gives the parent a positive number")),
        }
    }
}

/// With the null pointer that ends the list.
fn pointers<'a>(strings: impl IntoIterator<Item = &'a CString>) -> Vec<*const libc::c_char> {
    strings
        .into_iter()
        .map(|string| string.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

/// The pipe closes without a byte when `exec` succeeds.
fn read_report(mut report: PipeReader) -> Option<Error> {
    let mut bytes = Vec::new();
    let read = report.read_to_end(&mut bytes);
    match (read, bytes.as_slice()) {
        (Ok(0), _) => None,
        (Ok(_), &[step, a, b, c, d]) => Some(Error::Jail {
            step: Step::from_byte(step).unwrap_or(Step::Fork),
            source: io::Error::from_raw_os_error(i32::from_le_bytes([a, b, c, d])),
        }),
        (Ok(_), _) => Some(Error::Protocol {
            detail: "a torn report from the jail".into(),
        }),
        (Err(source), _) => Some(Error::Jail {
            step: Step::Fork,
            source,
        }),
    }
}

/// Collects standard error until the process ends. A closed standard error is not an end, nor does
/// a stray holder of it delay one.
fn follow(pidfd: &OwnedFd, mut stderr: PipeReader) -> String {
    let mut tail = Vec::new();
    let mut open = true;
    loop {
        let mut watched = vec![PollFd::new(pidfd, PollFlags::IN)];
        if open {
            watched.push(PollFd::new(&stderr, PollFlags::IN));
        }
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => {
                tracing::warn!(%errno, "cannot watch QEMU's standard error");
                break;
            }
            Ok(_) => {}
        }
        let ended = !watched[0].revents().is_empty();
        let readable = watched.get(1).is_some_and(|fd| !fd.revents().is_empty());
        if readable {
            open = take(&mut stderr, &mut tail);
        } else if ended {
            break;
        }
    }
    String::from_utf8_lossy(&tail).into_owned()
}

/// Reads the available bytes; false at the end of the stream.
fn take(stderr: &mut PipeReader, tail: &mut Vec<u8>) -> bool {
    let mut chunk = [0; 4096];
    match stderr.read(&mut chunk) {
        Ok(0) | Err(_) => false,
        Ok(count) => {
            tail.extend_from_slice(&chunk[..count]);
            let excess = tail.len().saturating_sub(STDERR_TAIL_BYTES);
            tail.drain(..excess);
            true
        }
    }
}

fn reap(pid: Pid) -> ExitStatus {
    loop {
        match waitpid(Some(pid), WaitOptions::empty()) {
            Ok(Some((_, status))) => return ExitStatus::from_raw(status.as_raw()),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                // Only a program that reaps foreign children gets here; the process is gone all the
                // same.
                tracing::warn!(%errno, "QEMU was reaped by somebody else");
                return ExitStatus::from_raw(Signal::KILL.as_raw());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::accel::Accel;
    use crate::jail::{Jail, Limits};
    use crate::landlock::{self, Access, View};
    use crate::network::NetworkMode;

    fn shell(script: &str) -> Launch {
        Launch {
            name: "test".into(),
            binary: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            environment: Vec::new(),
            descriptors: Vec::new(),
            confinement: Confinement::new(Jail::default(), Limits::default(), 0, Accel::Tcg),
        }
    }

    #[tokio::test]
    async fn the_exit_has_status_and_the_end_of_stderr() {
        let process = Process::spawn(shell(
            "i=0; while [ $i -lt 3000 ]; do echo line $i >&2; i=$((i+1)); done; exit 3",
        ));
        let exit = process.await.unwrap().exit().wait().await;
        assert_eq!(exit.status.code(), Some(3));
        assert!(exit.stderr.len() <= STDERR_TAIL_BYTES);
        assert!(exit.stderr.ends_with("line 2999\n"));
    }

    #[tokio::test]
    async fn dropping_kills_and_reaps() {
        let process = Process::spawn(shell("exec sleep 600")).await.unwrap();
        let exit = process.exit().clone();
        drop(process);
        assert_eq!(exit.wait().await.status.signal(), Some(libc::SIGKILL));
    }

    /// What is started next on the same files must not meet it.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_dropped_process_has_ended() {
        for _ in 0..50 {
            let process = Process::spawn(shell("exec sleep 600")).await.unwrap();
            let pidfd = process.pidfd();
            drop(process);
            let mut ends = [PollFd::new(&*pidfd, PollFlags::IN)];
            let at_once = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            assert_eq!(poll(&mut ends, Some(&at_once)), Ok(1));
        }
    }

    /// Whatever the moment: the child held the other end of a pipe, and nothing does any more.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_start_that_is_dropped_has_left_no_process() {
        for micros in (0..4000).step_by(100) {
            let (reader, writer) = io::pipe().unwrap();
            let launch = Launch {
                descriptors: vec![(3, writer.into())],
                ..shell("exec sleep 600")
            };
            let started =
                tokio::time::timeout(Duration::from_micros(micros), Process::spawn(launch));
            drop(started.await);
            let mut ends = [PollFd::new(&reader, PollFlags::IN)];
            // A child of another test has all descriptors of this process until it executes.
            let soon = Timespec {
                tv_sec: 10,
                tv_nsec: 0,
            };
            assert_eq!(poll(&mut ends, Some(&soon)), Ok(1), "after {micros} µs");
        }
    }

    #[tokio::test]
    async fn the_child_has_its_descriptors_and_no_others_and_no_environment() {
        let stray = std::fs::File::open("/dev/zero").unwrap();
        rustix::io::fcntl_setfd(&stray, rustix::io::FdFlags::empty()).unwrap();
        let (_keep, given) = io::pipe().unwrap();
        // ls itself holds 3 open on the directory it lists, or the next free number.
        let mut launch =
            shell("ls /proc/self/fd >&2; cat /proc/self/environ | tr '\\0' '\\n' >&2; pwd >&2");
        launch.descriptors.push((9, given.into()));
        let exit = Process::spawn(launch).await.unwrap().exit().wait().await;
        // The shell itself adds PWD to what it runs.
        assert_eq!(exit.stderr, "0\n1\n2\n3\n9\nPWD=/\n/\n");
    }

    #[tokio::test]
    async fn a_restricted_child_opens_the_system_and_what_it_is_given_and_nothing_else() {
        if let Err(error) = landlock::version() {
            eprintln!("not checked: the kernel has no Landlock: {error}");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for name in ["secret", "given"] {
            std::fs::write(path(name), format!("{name}\n")).unwrap();
        }
        let given = std::fs::File::open(path("given")).unwrap();
        let script = format!(
            "cat {} 2> /dev/null || echo no secret; cat {}; head -c 5 /proc/version; echo; \
             (echo x > {}) 2> /dev/null || echo no write; ls {} 2> /dev/null || echo no list",
            path("secret"),
            path("given"),
            path("given"),
            dir.path().display(),
        );
        let view = View {
            installed: &[],
            files: vec![(given.as_fd(), Access::Read)],
            accel: Accel::Tcg,
            network: NetworkMode::Isolated,
        };
        let mut launch = shell(&format!("({script}) >&2"));
        launch.confinement = launch.confinement.seeing(&view).unwrap();
        let exit = Process::spawn(launch).await.unwrap().exit().wait().await;
        assert_eq!(exit.stderr, "no secret\ngiven\nLinux\nno write\nno list\n");
        assert_eq!(std::fs::read_to_string(path("given")).unwrap(), "given\n");
    }

    /// Also where the caller has some and the machine keeps its user id.
    #[tokio::test]
    async fn a_child_has_no_capabilities_for_any_user() {
        let launch =
            shell("grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status | cut -f2 | sort -u >&2");
        let exit = Process::spawn(launch).await.unwrap().exit().wait().await;
        assert_eq!(exit.stderr, "0000000000000000\n");
    }

    #[tokio::test]
    async fn a_program_that_cannot_run_is_named_by_the_failed_step() {
        let launch = Launch {
            binary: "/nowhere/qemu".into(),
            ..shell("")
        };
        let error = Process::spawn(launch).await.unwrap_err();
        let Error::Jail { step, source } = error else {
            panic!("{error}")
        };
        assert_eq!(step, Step::Exec);
        assert_eq!(source.kind(), io::ErrorKind::NotFound);
    }
}
