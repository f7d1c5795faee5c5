//! Debian, made with the sources, keys and proxies of the host's own apt. No root is needed.
//!
//! `mmdebstrap` installs the packages, as root or in a user namespace, with the same result. It
//! writes a tar archive, which becomes the root file system here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};
use sandtree_rootfs::TarRules;
use sandtree_store::{Arch, ExecDefaults, Image, ImageSpec, Init};

use crate::error::{Error, Result, io_error};
use crate::files::write;
use crate::job::{Job, Stage};
use crate::new_image::{Content, EPOCH, NewImage, Node, PATH, put_all, unpacking};
use crate::spec::KernelChoice;
use crate::tool::Tool;
use crate::{apt, bundle};

const MMDEBSTRAP: Tool = Tool::new("mmdebstrap", Some("mmdebstrap"));

/// The packages that an AI agent expects to find. apt is part of every Debian.
const PACKAGES: [&str; 15] = [
    "attr",
    "ca-certificates",
    "curl",
    "git",
    "iproute2",
    "iputils-ping",
    "less",
    "locales",
    "procps",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
    "tzdata",
];

/// The free space in the image. A sandbox's disk grows to `DISK_BYTES`.
const ROOM_BYTES: u64 = 128 << 20;
const DISK_BYTES: u64 = 4 << 30;
/// How much of mmdebstrap's standard error is kept for an error message.
const STDERR_MAX: usize = 16 << 10;
/// How often the wait for mmdebstrap notices that the work is cancelled.
const POLL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

const POLL_SLEEP: Duration = Duration::from_millis(20);
/// How long mmdebstrap may take to clean up after SIGTERM or a failure.
const GRACE: Duration = Duration::from_secs(60);
/// How long mmdebstrap may take to end after its archive is complete. It only has its directory to
/// remove.
const CLEAN_UP: Duration = Duration::from_secs(600);

/// Adds `user`, with a home directory and sudo.
const ADD_USER: &str = r#"chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 --user-group --groups sudo user"#;
/// The certificates that a Debian host trusts, and where commands of a recipe find them.
const HOST_CA: &str = "/etc/ssl/certs/ca-certificates.crt";
const LENT_CA: &str = "/tmp/host-ca.crt";
/// Removes the files that describe the host and its network.
const FORGET_HOST: &str =
    r#"rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1/etc/hostname" "$1/etc/resolv.conf""#;

/// What an image has in addition to Debian's own.
#[derive(Debug, Default)]
pub(crate) struct Additions {
    pub packages: Vec<String>,
    /// Lines for `sh -c`, in the installed system.
    pub run: Vec<String>,
    pub nodes: Vec<Node>,
    pub disk_bytes: Option<u64>,
    pub kernel: KernelChoice,
}

/// Debian with these packages in addition to its own, without a name.
pub(crate) fn build(job: &mut Job<'_>, packages: &[String]) -> Result<Image> {
    let additions = Additions {
        packages: packages.to_vec(),
        ..Additions::default()
    };
    build_with(job, &additions, defaults())
}

/// Debian with files of our own and other defaults, without a name.
pub(crate) fn build_with(
    job: &mut Job<'_>,
    additions: &Additions,
    defaults: ExecDefaults,
) -> Result<Image> {
    let kernel = bundle::find_or_make(job, &additions.kernel)?;
    let mut image = NewImage::begin(job.store)?;
    bootstrap(job, additions, &mut image)?;
    put_all(&mut image.builder, &nodes())?;
    put_all(&mut image.builder, &additions.nodes)?;
    let spec = ImageSpec {
        arch: Arch::HOST,
        kernel: kernel.digest.clone(),
        init: Init::Agent,
        defaults,
        disk_bytes: Some(additions.disk_bytes.unwrap_or(DISK_BYTES)),
    };
    image.publish(ROOM_BYTES, job, |_| spec)
}

/// All packages of an image: its own and the additional ones, sorted, each once.
pub(crate) fn wanted(packages: &[String]) -> Vec<String> {
    let own = PACKAGES.iter().map(|&package| package.to_owned());
    let all: BTreeSet<_> = own.chain(packages.iter().cloned()).collect();
    all.into_iter().collect()
}

fn bootstrap(job: &mut Job<'_>, additions: &Additions, image: &mut NewImage<'_>) -> Result<()> {
    job.begin(Stage::Resolve)?;
    let sources = apt::debian_sources(job.tools)?;
    let work = job.store.stage()?;
    let list = work.path().join("sources.list");
    write(&list, sources.lines.join("\n").as_bytes())?;
    // An ordinary user's mmdebstrap reads the list in a user namespace that cannot enter our
    // directories, so it gets the open file.
    let list = File::open(&list).map_err(io_error("open", &list))?;
    let options = apt::proxies(job.tools)?;
    let mut child = MMDEBSTRAP.spawn_isolated(job.tools, |command| {
        // One signal ends it together with all it started, and terminal signals do not reach it.
        command.process_group(0);
        command.envs(environment());
        command.args([
            "--variant=minbase",
            "--format=tar",
            "--keyring=/usr/share/keyrings",
            "--keyring=/etc/apt/trusted.gpg.d",
        ]);
        let packages = wanted(&additions.packages).join(",");
        command.arg(format!("--include={packages}"));
        command.args(options.iter().map(|option| format!("--aptopt={option}")));
        let lines = additions.run.iter().map(|line| in_system(line));
        let hooks = std::iter::once(ADD_USER.to_owned())
            .chain(lines)
            .chain([FORGET_HOST.to_owned()]);
        command.args(hooks.map(|hook| format!("--customize-hook={hook}")));
        command.args([sources.suite.as_str(), "-", "-"]);
        command.stdin(Stdio::from(list));
    })?;
    let stderr = collect(child.stderr.take().expect("it is piped"));
    let archive = child.stdout.take().expect("it is piped");
    let added = unpack(job, archive, image);
    finish(child, stderr, added)
}

/// A hook that runs a line in the installed system, which trusts what the host trusts meanwhile.
fn in_system(line: &str) -> String {
    let line = line.replace('\'', r"'\''");
    format!(
        r#"set -e
        if [ -e {HOST_CA} ]; then
            cp {HOST_CA} "$1{LENT_CA}"
            export PIP_CERT={LENT_CA} SSL_CERT_FILE={LENT_CA}
        fi
        chroot "$1" sh -c '{line}'
        rm -f "$1{LENT_CA}""#
    )
}

/// Fixed variables, in addition to `PATH`, `LC_ALL` and the proxies. What packages install depends
/// on their environment, and an image must not depend on who makes it.
fn environment() -> [(&'static str, String); 2] {
    [
        ("SOURCE_DATE_EPOCH", EPOCH.to_string()),
        // Packages compile their own modules; a module that a script merely imports must leave no
        // file.
        ("PYTHONDONTWRITEBYTECODE", "1".to_owned()),
    ]
}

fn unpack(job: &mut Job<'_>, archive: ChildStdout, image: &mut NewImage<'_>) -> Result<()> {
    let archive = wait_for(job, archive)?;
    let mut archive = io::BufReader::with_capacity(1 << 20, archive);
    let mut progress = unpacking(job);
    image
        .builder
        .add_tar(&mut archive, TarRules::Plain, &mut progress)?;
    Ok(())
}

/// Waits for the archive's first byte, which comes after all packages are installed.
fn wait_for(job: &mut Job<'_>, archive: ChildStdout) -> Result<ChildStdout> {
    loop {
        job.begin(Stage::Install)?;
        let mut ready = [PollFd::from_borrowed_fd(archive.as_fd(), PollFlags::IN)];
        match poll(&mut ready, Some(&POLL)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(archive),
            Err(error) => return Err(MMDEBSTRAP.failed_to("wait for", error.into())),
        }
    }
}

/// Waits for the program's end, or ends it if its archive was not used. Returns its own failure
/// before ours.
fn finish(mut child: Child, stderr: JoinHandle<String>, added: Result<()>) -> Result<()> {
    let (status, ended_itself) = match &added {
        Ok(()) => (end_of(&mut child, CLEAN_UP)?, true),
        Err(error) if is_cut_off(error) => (end_of(&mut child, GRACE)?, true),
        Err(_) => (stop(&mut child)?, false),
    };
    let stderr = stderr.join().expect("reading does not panic");
    let failed = status.code().is_some_and(|code| code != 0);
    if ended_itself && failed {
        return Err(Error::ToolFailed {
            program: MMDEBSTRAP.program,
            status,
            stderr: complaints(&stderr),
        });
    }
    added
}

/// Whether the archive broke off, most likely because mmdebstrap failed.
fn is_cut_off(error: &Error) -> bool {
    use sandtree_rootfs::Error as Rootfs;
    let Error::Rootfs(error) = error else {
        return false;
    };
    matches!(**error, Rootfs::Archive { .. } | Rootfs::Input { .. })
}

/// The exit status of a program that should end by itself; it is stopped if it does not in time.
fn end_of(child: &mut Child, within: Duration) -> Result<ExitStatus> {
    match wait_within(child, within)? {
        Some(status) => Ok(status),
        None => stop(child),
    }
}

/// The exit status, if the program ends in time.
fn wait_within(child: &mut Child, within: Duration) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + within;
    loop {
        let status = child.try_wait();
        let status = status.map_err(|source| MMDEBSTRAP.failed_to("wait for", source))?;
        if status.is_some() || Instant::now() > end {
            return Ok(status);
        }
        thread::sleep(POLL_SLEEP);
    }
}

/// Ends the program together with all it started. After SIGTERM it unmounts its file systems and
/// removes its directory, which SIGKILL would prevent.
fn stop(child: &mut Child) -> Result<ExitStatus> {
    let status = child.try_wait();
    if let Some(status) = status.map_err(|source| MMDEBSTRAP.failed_to("wait for", source))? {
        return Ok(status);
    }
    let group = Pid::from_child(child);
    let failed = |e: rustix::io::Errno| MMDEBSTRAP.failed_to("end", e.into());
    kill_process_group(group, Signal::TERM).map_err(failed)?;
    if let Some(status) = wait_within(child, GRACE)? {
        return Ok(status);
    }
    kill_process_group(group, Signal::KILL).map_err(failed)?;
    child
        .wait()
        .map_err(|source| MMDEBSTRAP.failed_to("wait for", source))
}

/// Collects the end of standard error on a thread, so that the program never blocks on it.
fn collect(mut stderr: ChildStderr) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut collected = Vec::new();
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = stderr.read(&mut chunk) {
            collected.extend_from_slice(&chunk[..count]);
            let excess = collected.len().saturating_sub(STDERR_MAX);
            collected.drain(..excess);
        }
        String::from_utf8_lossy(&collected).into_owned()
    })
}

/// The last lines that report an error, or else the last lines.
fn complaints(stderr: &str) -> String {
    let errors: Vec<_> = stderr
        .lines()
        .filter(|line| line.starts_with("E:") || line.contains("rror"))
        .collect();
    let lines = if errors.is_empty() {
        stderr.lines().collect()
    } else {
        errors
    };
    lines[lines.len().saturating_sub(5)..].join("; ")
}

fn nodes() -> Vec<Node> {
    let text = |path: &str, mode, text: &str| Node {
        path: path.to_owned(),
        mode,
        owner: 0,
        content: Content::Text(text.to_owned()),
    };
    vec![
        text("/etc/hostname", 0o644, "debian\n"),
        text(
            "/etc/hosts",
            0o644,
            "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
        ),
        text("/etc/resolv.conf", 0o644, ""),
        text(
            "/etc/sudoers.d/user",
            0o440,
            "user ALL=(ALL:ALL) NOPASSWD: ALL\n",
        ),
        text("/etc/default/locale", 0o644, "LANG=C.UTF-8\n"),
        Node {
            path: "/etc/sandtree/resume.d".to_owned(),
            mode: 0o755,
            owner: 0,
            content: Content::Dir,
        },
    ]
}

pub(crate) fn defaults() -> ExecDefaults {
    let env = [("PATH", PATH), ("LANG", "C.UTF-8")];
    ExecDefaults {
        env: env
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        user: Some("root".to_owned()),
        cmd: vec!["/bin/bash".to_owned()],
        ..ExecDefaults::default()
    }
}
