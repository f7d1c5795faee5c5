//! Starting a command: user, environment, directory, streams, cgroup, and `execve`.
//!
//! When it fails: no process is left, the cgroup is removed, and the failure names the step that
//! was refused.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Resource, Rlimit, WaitOptions};
use sandtree_proto::{ExecStart, Failure};

use super::Exec;
use crate::cgroup::{Cgroup, Cgroups, Family};
use crate::failure::{OrFailure, numbered, reason, refusal, tolerate};
use crate::input::AtEnd;
use crate::sys;
use crate::terminal;
use crate::user::{Account, Database};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const PIPE_SIZE: usize = 1024 * 1024;

/// The settings that every command starts with, independent of the agent's own.
#[derive(Debug)]
pub struct Defaults {
    pub cgroups: Cgroups,
    pub open_files: Rlimit,
}

/// A started command, with the agent's ends of its streams.
#[derive(Debug)]
pub struct Spawned {
    pub exec: Exec,
    pub input: Option<(OwnedFd, AtEnd)>,
    pub out: OwnedFd,
    pub err: Option<OwnedFd>,
}

pub fn spawn(defaults: &Defaults, start: &ExecStart) -> Result<Spawned, Failure> {
    let account = account(&start.user)?;
    let mut streams =
        streams(start, &account).or_failure(|| "cannot make the command's streams".into())?;
    let child = streams.child.take().expect("the streams were just made");
    let (pid, family) = launch(defaults, start, &account, child)?;
    let timeout = start.timeout_ms.map(Duration::from_millis);
    let exec = Exec::new(pid, family, streams.master, timeout);
    Ok(Spawned {
        exec,
        input: streams.input,
        out: streams.out,
        err: streams.err,
    })
}

/// Starts a command on streams that the caller owns.
pub fn spawn_on(
    defaults: &Defaults,
    start: &ExecStart,
    child: [OwnedFd; 3],
) -> Result<(Pid, Family), Failure> {
    launch(defaults, start, &account(&start.user)?, child)
}

fn launch(
    defaults: &Defaults,
    start: &ExecStart,
    account: &Account,
    child: [OwnedFd; 3],
) -> Result<(Pid, Family), Failure> {
    let above = |stream| above_standard(stream).or_failure(|| "cannot copy a stream".into());
    let [stdin, stdout, stderr] = child;
    let streams = [above(stdin)?, above(stdout)?, above(stderr)?];
    let launched = |cgroup: rustix::io::Result<Option<Cgroup>>| {
        let cgroup = cgroup.or_failure(|| "cannot make a cgroup".into())?;
        let launch = Launch::new(defaults, start, account, cgroup.as_ref());
        let ran = launch.map_err(NotRun::from);
        match ran.and_then(|launch| launch.run(&streams)) {
            Ok(pid) => Ok((pid, Family::new(pid, cgroup))),
            Err(not_run) => {
                // Nothing ran, so only the directory is left; a family without members can have
                // any pid.
                if !not_run.lacks_cgroup {
                    Family::new(rustix::process::getpid(), cgroup).remove();
                }
                Err(not_run)
            }
        }
    };
    let launched = match launched(defaults.cgroups.create()) {
        // Root of the guest has removed the cgroup that waited for this command.
        Err(NotRun { lacks_cgroup, .. }) if lacks_cgroup => launched(defaults.cgroups.make()),
        launched => launched,
    };
    launched.map_err(|not_run| not_run.failure)
}

/// Why a command does not run.
struct NotRun {
    failure: Failure,
    /// Whether its cgroup was removed before it entered.
    lacks_cgroup: bool,
}

impl From<Failure> for NotRun {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            lacks_cgroup: false,
        }
    }
}

/// An agent that is not root, as in tests, can run commands only as itself.
fn account(user: &str) -> Result<Account, Failure> {
    let own = rustix::process::geteuid();
    let database = Database::read();
    if user.is_empty() && !own.is_root() {
        database.find(&own.as_raw().to_string())
    } else {
        database.find(user)
    }
}

struct Streams {
    child: Option<[OwnedFd; 3]>,
    input: Option<(OwnedFd, AtEnd)>,
    out: OwnedFd,
    err: Option<OwnedFd>,
    master: Option<OwnedFd>,
}

fn streams(start: &ExecStart, account: &Account) -> io::Result<Streams> {
    match start.terminal {
        Some(size) => {
            let (master, slave) = terminal::open(size)?;
            hand_over(&slave, account)?;
            let child = [slave.try_clone()?, slave.try_clone()?, slave];
            let input = (master.try_clone()?, AtEnd::TypeEof);
            Ok(Streams {
                child: Some(child),
                input: Some(input),
                out: master.try_clone()?,
                err: None,
                master: Some(master),
            })
        }
        None => pipes(start.stdin, account),
    }
}

/// The owner of a stream can open it again by a name such as `/dev/stderr`.
fn hand_over(stream: &OwnedFd, account: &Account) -> rustix::io::Result<()> {
    let is_ours = account.uid == 0;
    if is_ours || !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    rustix::fs::fchown(stream, Some(Uid::from_raw(account.uid)), None)
}

fn pipes(stdin: bool, account: &Account) -> io::Result<Streams> {
    let (out, out_child) = pipe()?;
    let (err, err_child) = pipe()?;
    [&out_child, &err_child]
        .into_iter()
        .try_for_each(|stream| hand_over(stream, account))?;
    let (child_in, input) = if stdin {
        let (child, input) = pipe()?;
        hand_over(&child, account)?;
        rustix::io::ioctl_fionbio(&input, true)?;
        (child, Some((input, AtEnd::Close)))
    } else {
        (null()?, None)
    };
    rustix::io::ioctl_fionbio(&out, true)?;
    rustix::io::ioctl_fionbio(&err, true)?;
    let child = [child_in, out_child, err_child];
    Ok(Streams {
        child: Some(child),
        input,
        out,
        err: Some(err),
        master: None,
    })
}

/// A pipe, large if the kernel allows it, so that the loop needs fewer turns for the same bytes.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    match rustix::pipe::fcntl_setpipe_size(&writer, PIPE_SIZE) {
        Ok(_) | Err(Errno::PERM | Errno::BUSY) => Ok((reader, writer)),
        Err(error) => Err(error.into()),
    }
}

/// The file that is always empty and takes everything.
pub fn null() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(c"/dev/null", flags, Mode::empty())?)
}

/// A step of the child that can be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Streams,
    Cgroup,
    Session,
    Limits,
    User,
    Directory,
    Execute,
}

/// What a child could not do.
#[derive(Debug)]
struct Refused {
    step: Step,
    errno: Errno,
}

/// Everything that the child needs, made before it starts: the child must not allocate.
struct Launch<'a> {
    programs: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    dirs: Vec<CString>,
    procs: Option<BorrowedFd<'a>>,
    terminal: bool,
    open_files: Rlimit,
    user: Option<(Uid, Gid, Vec<Gid>)>,
}

impl<'a> Launch<'a> {
    fn new(
        defaults: &Defaults,
        start: &ExecStart,
        account: &Account,
        cgroup: Option<&'a Cgroup>,
    ) -> Result<Self, Failure> {
        let env = environment(start, account);
        let root = rustix::process::geteuid().is_root();
        let groups = account
            .groups
            .iter()
            .map(|&gid| Gid::from_raw(gid))
            .collect();
        Ok(Self {
            programs: programs(start, &env)?,
            argv: start
                .argv
                .iter()
                .map(|argument| c_string(argument))
                .collect::<Result<_, _>>()?,
            env: env
                .iter()
                .map(|(key, value)| c_string(&[key, b"=".as_slice(), value].concat()))
                .collect::<Result<_, _>>()?,
            dirs: directories(start, account)?,
            procs: cgroup.map(Cgroup::procs),
            terminal: start.terminal.is_some(),
            open_files: defaults.open_files,
            user: root.then(|| {
                (
                    Uid::from_raw(account.uid),
                    Gid::from_raw(account.gid),
                    groups,
                )
            }),
        })
    }

    fn run(&self, streams: &[OwnedFd; 3]) -> Result<Pid, NotRun> {
        let argv = pointers(&self.argv);
        let env = pointers(&self.env);
        let mut refused = None;
        let spawned = sys::spawn_sharing(&mut || {
            refused = Some(self.become_command(streams, &argv, &env));
        });
        let pid = spawned.or_failure(|| "cannot make a process".into())?;
        let Some(refused) = refused else {
            return Ok(pid);
        };
        // It has ended, and only this loop reaps.
        tolerate(rustix::process::waitpid(Some(pid), WaitOptions::empty()));
        Err(NotRun {
            failure: self.failure(&refused),
            lacks_cgroup: refused.step == Step::Cgroup && refused.errno == Errno::NODEV,
        })
    }

    /// Runs in the child. Returns only if a step was refused.
    fn become_command(&self, streams: &[OwnedFd; 3], argv: &Pointers, env: &Pointers) -> Refused {
        let prepared = self.prepare(streams).and_then(|()| {
            let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
            sys::clean_signals().map_err(|error| Refused {
                step: Step::Limits,
                errno: errno(error),
            })
        });
        match prepared {
            Err(refused) => refused,
            Ok(()) => Refused {
                step: Step::Execute,
                errno: self.execute(argv, env),
            },
        }
    }

    fn prepare(&self, [stdin, stdout, stderr]: &[OwnedFd; 3]) -> Result<(), Refused> {
        let at = |step| move |errno| Refused { step, errno };
        rustix::stdio::dup2_stdin(stdin).map_err(at(Step::Streams))?;
        rustix::stdio::dup2_stdout(stdout).map_err(at(Step::Streams))?;
        rustix::stdio::dup2_stderr(stderr).map_err(at(Step::Streams))?;
        if let Some(procs) = &self.procs {
            rustix::io::write(procs, b"0").map_err(at(Step::Cgroup))?;
        }
        rustix::process::setsid().map_err(at(Step::Session))?;
        if self.terminal {
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin()).map_err(at(Step::Session))?;
        }
        rustix::process::umask(Mode::from_raw_mode(0o022));
        unprotect_from_oom().map_err(at(Step::Limits))?;
        rustix::process::setrlimit(Resource::Nofile, self.open_files).map_err(at(Step::Limits))?;
        if let Some((uid, gid, groups)) = &self.user {
            rustix::thread::set_thread_groups(groups).map_err(at(Step::User))?;
            rustix::thread::set_thread_gid(*gid).map_err(at(Step::User))?;
            rustix::thread::set_thread_uid(*uid).map_err(at(Step::User))?;
        }
        self.enter_directory().map_err(at(Step::Directory))
    }

    fn enter_directory(&self) -> Result<(), Errno> {
        let mut refused = Errno::NOENT;
        for dir in &self.dirs {
            match rustix::process::chdir(dir.as_c_str()) {
                Ok(()) => return Ok(()),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// Tries each directory of PATH as `execvp` does, but never runs a file that is no program in a
    /// shell.
    #[allow(unsafe_code, reason = "execve takes raw pointer arrays")]
    fn execute(&self, argv: &Pointers, env: &Pointers) -> Errno {
        let mut denied = None;
        for program in &self.programs {
            // SAFETY: the arrays end in null and point into strings that `self` owns.
            unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
            let error = io::Error::last_os_error();
            match Errno::from_io_error(&error).unwrap_or(Errno::INVAL) {
                Errno::NOENT | Errno::NOTDIR => {}
                Errno::ACCESS => denied = Some(Errno::ACCESS),
                errno => return errno,
            }
        }
        denied.unwrap_or(Errno::NOENT)
    }

    fn failure(&self, refused: &Refused) -> Failure {
        let text = |bytes: &CString| String::from_utf8_lossy(bytes.as_bytes()).into_owned();
        let name = text(&self.argv[0]);
        let Refused { step, errno } = *refused;
        let why = reason(&errno.into());
        let message = match step {
            Step::Execute if errno == Errno::NOENT => format!("{name}: not found"),
            Step::Execute => format!("{name}: {why}"),
            Step::Directory => {
                let dir = text(&self.dirs[0]);
                format!("cannot change to directory {dir}: {why}")
            }
            Step::User => format!("cannot become the user: {why}"),
            Step::Streams => format!("cannot connect the streams of {name}: {why}"),
            Step::Cgroup => format!("cannot enter the cgroup of {name}: {why}"),
            Step::Session => format!("cannot make a session for {name}: {why}"),
            Step::Limits => format!("cannot set the limits of {name}: {why}"),
        };
        // ENOENT means a missing command, so any other missing file gets another number.
        let errno = match (errno, step) {
            (Errno::NOENT, Step::Execute) => errno,
            (Errno::NOENT, _) => Errno::INVAL,
            _ => errno,
        };
        numbered(errno.raw_os_error(), message)
    }
}

/// The same stream, under a number that the child does not replace.
fn above_standard(stream: OwnedFd) -> io::Result<OwnedFd> {
    if stream.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(stream);
    }
    let least = libc::STDERR_FILENO + 1;
    Ok(rustix::io::fcntl_dupfd_cloexec(&stream, least)?)
}

/// A null-terminated array for `execve`.
type Pointers = Vec<*const libc::c_char>;

fn pointers(strings: &[CString]) -> Pointers {
    strings
        .iter()
        .map(|string| string.as_ptr())
        .chain(std::iter::once(std::ptr::null()))
        .collect()
}

/// The agent is protected from the OOM killer; its commands must not be.
fn unprotect_from_oom() -> Result<(), Errno> {
    match rustix::fs::open(
        c"/proc/self/oom_score_adj",
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(file) => rustix::io::write(&file, b"0").map(drop),
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

type Variables = Vec<(Vec<u8>, Vec<u8>)>;

fn environment(start: &ExecStart, account: &Account) -> Variables {
    let base = [
        ("PATH", DEFAULT_PATH),
        ("HOME", &account.home),
        ("USER", &account.name),
        ("LOGNAME", &account.name),
        ("SHELL", &account.shell),
    ];
    let mut env: Variables = base
        .iter()
        .map(|(key, value)| (key.as_bytes().to_vec(), value.as_bytes().to_vec()))
        .collect();
    if start.terminal.is_some() {
        env.push((b"TERM".to_vec(), b"xterm".to_vec()));
    }
    for (key, value) in &start.env {
        env.retain(|(known, _)| known != key);
        env.push((key.clone(), value.clone()));
    }
    env
}

/// The paths to try: the name itself if it has a slash, otherwise every directory of the command's
/// own PATH.
fn programs(start: &ExecStart, env: &Variables) -> Result<Vec<CString>, Failure> {
    let Some(name) = start.argv.first().filter(|name| !name.is_empty()) else {
        return Err(refusal(Errno::INVAL, "the command is empty"));
    };
    if name.contains(&b'/') {
        return Ok(vec![c_string(name)?]);
    }
    let path = env
        .iter()
        .find(|(key, _)| key == b"PATH")
        .map_or(&b""[..], |(_, value)| value);
    let place = |dir: &[u8]| {
        if dir.is_empty() {
            b".".to_vec()
        } else {
            dir.to_vec()
        }
    };
    path.split(|&b| b == b':')
        .map(|dir| c_string(&[&place(dir), b"/".as_slice(), name].concat()))
        .collect()
}

/// A requested directory must exist; a missing home is replaced by the root.
fn directories(start: &ExecStart, account: &Account) -> Result<Vec<CString>, Failure> {
    if start.cwd.is_empty() {
        Ok(vec![c_string(account.home.as_bytes())?, c"/".to_owned()])
    } else {
        Ok(vec![c_string(&start.cwd)?])
    }
}

fn c_string(bytes: &[u8]) -> Result<CString, Failure> {
    let named = || format!("{:?} holds a zero byte", String::from_utf8_lossy(bytes));
    CString::new(bytes).map_err(|_| refusal(Errno::INVAL, named()))
}

#[cfg(test)]
mod tests {
    use sandtree_proto::TermSize;

    use super::*;

    fn start(env: &[(&str, &str)], terminal: Option<TermSize>) -> ExecStart {
        ExecStart {
            tag: String::new(),
            argv: vec![b"true".to_vec()],
            env: env
                .iter()
                .map(|(key, value)| (key.as_bytes().to_vec(), value.as_bytes().to_vec()))
                .collect(),
            cwd: Vec::new(),
            user: String::new(),
            terminal,
            stdin: false,
            timeout_ms: None,
        }
    }

    fn shown(start: &ExecStart) -> Vec<String> {
        let account = Account {
            uid: 1000,
            gid: 1000,
            groups: Vec::new(),
            name: "user".into(),
            home: "/home/user".into(),
            shell: "/bin/bash".into(),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        environment(start, &account)
            .iter()
            .map(|(key, value)| format!("{}={}", text(key), text(value)))
            .collect()
    }

    #[test]
    fn a_command_has_the_environment_of_a_login() {
        let path = format!("PATH={DEFAULT_PATH}");
        let login = [
            &path,
            "HOME=/home/user",
            "USER=user",
            "LOGNAME=user",
            "SHELL=/bin/bash",
        ];
        assert_eq!(shown(&start(&[], None)), login);
        let terminal = start(&[], Some(TermSize { rows: 24, cols: 80 }));
        assert_eq!(shown(&terminal).last().unwrap(), "TERM=xterm");
    }

    #[test]
    fn given_variables_replace_the_defaults_unchanged() {
        let given = shown(&start(
            &[
                ("PATH", "/opt/bin"),
                ("LC_ALL", "de_DE.UTF-8"),
                ("HOME", ""),
            ],
            None,
        ));
        assert_eq!(
            given,
            [
                "USER=user",
                "LOGNAME=user",
                "SHELL=/bin/bash",
                "PATH=/opt/bin",
                "LC_ALL=de_DE.UTF-8",
                "HOME="
            ]
        );
    }
}
