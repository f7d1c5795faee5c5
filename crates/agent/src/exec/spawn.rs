//! Starting a command: user, environment, directory, streams, cgroup, and `execve`.
//!
//! When it fails: no process is left, the cgroup is removed, and the failure names the step that
//! was refused.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Resource, Rlimit};
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
    child: [Stdio; 3],
) -> Result<(Pid, Family), Failure> {
    launch(defaults, start, &account(&start.user)?, child)
}

fn launch(
    defaults: &Defaults,
    start: &ExecStart,
    account: &Account,
    child: [Stdio; 3],
) -> Result<(Pid, Family), Failure> {
    let cgroup = defaults
        .cgroups
        .create()
        .or_failure(|| "cannot make a cgroup".into())?;
    let launch = Launch::new(defaults, start, account, cgroup.as_ref())?;
    match launch.run(child) {
        Ok(pid) => Ok((pid, Family::new(pid, cgroup))),
        Err(failure) => {
            // Nothing ran, so only the directory is left; a family without members can have any
            // pid.
            Family::new(rustix::process::getpid(), cgroup).remove();
            Err(failure)
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
    child: Option<[Stdio; 3]>,
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
            let child = [
                slave.try_clone()?.into(),
                slave.try_clone()?.into(),
                slave.into(),
            ];
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
    if !rustix::process::geteuid().is_root() {
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
        (Stdio::from(child), Some((input, AtEnd::Close)))
    } else {
        (Stdio::null(), None)
    };
    rustix::io::ioctl_fionbio(&out, true)?;
    rustix::io::ioctl_fionbio(&err, true)?;
    let child = [child_in, out_child.into(), err_child.into()];
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

/// The step of the child that was refused, sent to the parent as one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    Cgroup = b'g',
    Session = b's',
    Limits = b'l',
    User = b'u',
    Directory = b'd',
    Execute = b'x',
}

/// Everything that the child needs, made before the fork: the child must not allocate.
struct Launch {
    programs: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    dirs: Vec<CString>,
    procs: Option<OwnedFd>,
    terminal: bool,
    open_files: Rlimit,
    user: Option<(Uid, Gid, Vec<Gid>)>,
}

impl Launch {
    fn new(
        defaults: &Defaults,
        start: &ExecStart,
        account: &Account,
        cgroup: Option<&Cgroup>,
    ) -> Result<Self, Failure> {
        let env = environment(start, account);
        let root = rustix::process::geteuid().is_root();
        let groups = account
            .groups
            .iter()
            .map(|&gid| Gid::from_raw(gid))
            .collect();
        let procs = cgroup
            .map(Cgroup::procs)
            .transpose()
            .or_failure(|| "cannot open the cgroup".into())?;
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
            procs,
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

    #[allow(unsafe_code, reason = "pre_exec runs between fork and exec")]
    fn run(self, [stdin, stdout, stderr]: [Stdio; 3]) -> Result<Pid, Failure> {
        let name = String::from_utf8_lossy(self.argv[0].as_bytes()).into_owned();
        let dir = String::from_utf8_lossy(self.dirs[0].as_bytes()).into_owned();
        let (step_reader, step_writer) =
            pipe_with(PipeFlags::CLOEXEC).or_failure(|| "cannot make a pipe".into())?;
        let mut command = Command::new(OsStr::from_bytes(self.programs[0].as_bytes()));
        command.stdin(stdin).stdout(stdout).stderr(stderr);
        let argv = Pointers(pointers(&self.argv));
        let env = Pointers(pointers(&self.env));
        // SAFETY: the closure makes system calls only, on values made before the fork.
        unsafe {
            command.pre_exec(move || {
                let (step, error) = self.become_command(&argv, &env);
                // std passes the error itself to the parent. If this byte is lost, the failure does
                // not name the step.
                tolerate(rustix::io::write(&step_writer, &[step as u8]));
                Err(error)
            });
        }
        let spawned = command.spawn();
        drop(command);
        match spawned {
            Ok(child) => Ok(Pid::from_raw(child.id() as i32).expect("a child's pid is not zero")),
            Err(error) => Err(refused(&step_reader, &error, &name, &dir)),
        }
    }

    /// Runs in the child. Returns only if a step was refused.
    fn become_command(&self, argv: &Pointers, env: &Pointers) -> (Step, io::Error) {
        match self.prepare() {
            Err((step, error)) => (step, error.into()),
            Ok(()) => match sys::clean_signals() {
                Err(error) => (Step::Limits, error),
                Ok(()) => (Step::Execute, self.execute(argv, env)),
            },
        }
    }

    fn prepare(&self) -> Result<(), (Step, Errno)> {
        let at = |step| move |error| (step, error);
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
    fn execute(&self, argv: &Pointers, env: &Pointers) -> io::Error {
        let mut denied = None;
        for program in &self.programs {
            // SAFETY: the arrays end in null and point into strings that `self` owns.
            unsafe { libc::execve(program.as_ptr(), argv.0.as_ptr(), env.0.as_ptr()) };
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => {}
                Some(libc::EACCES) => denied = Some(error),
                _ => return error,
            }
        }
        denied.unwrap_or_else(|| Errno::NOENT.into())
    }
}

/// A null-terminated array for `execve`.
struct Pointers(Vec<*const libc::c_char>);

#[allow(unsafe_code, reason = "raw pointers are not Send by themselves")]
// SAFETY: the strings pointed to are owned by the closure that owns this, and nothing changes them.
unsafe impl Send for Pointers {}
#[allow(unsafe_code, reason = "raw pointers are not Sync by themselves")]
// SAFETY: as above; the array is only read.
unsafe impl Sync for Pointers {}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
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

fn refused(step_reader: &OwnedFd, error: &io::Error, name: &str, dir: &str) -> Failure {
    let mut step = [0];
    let count = rustix::io::ioctl_fionread(step_reader).unwrap_or(0);
    let read = if count > 0 {
        rustix::io::read(step_reader.as_fd(), &mut step).unwrap_or(0)
    } else {
        0
    };
    let why = reason(error);
    let message = match step[0] {
        _ if read == 0 => format!("cannot start {name}: {why}"),
        b if b == Step::Execute as u8 && error.raw_os_error() == Some(libc::ENOENT) => {
            format!("{name}: not found")
        }
        b if b == Step::Execute as u8 => format!("{name}: {why}"),
        b if b == Step::Directory as u8 => format!("cannot change to directory {dir}: {why}"),
        b if b == Step::User as u8 => format!("cannot become the user: {why}"),
        other => format!("cannot prepare {name} ({}): {why}", other as char),
    };
    // ENOENT means a missing command, so any other missing file gets another number.
    let errno = match error.raw_os_error() {
        Some(libc::ENOENT) if step[0] != Step::Execute as u8 => libc::EINVAL,
        errno => errno.unwrap_or(0),
    };
    numbered(errno, message)
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
