//! Debian, from the host's own apt: its sources, keys and proxies, without root.
//!
//! `mmdebstrap` installs the packages, as root or in a user namespace, with the same result; what
//! it writes is an archive, and that becomes the root file system here.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};
use sandtree_rootfs::TarRules;
use sandtree_store::{ExecDefaults, Image, ImageSpec, Init, Store};

use super::bundle::{self, KernelChoice};
use super::making::{Content, Making, Node, put_all, unpacking};
use super::tool::Tool;
use super::{EPOCH, Error, PATH, Progress, Stage, Watch, apt, io_error, write};
use crate::spec::host_arch;

const MMDEBSTRAP: Tool = Tool::new(
    "mmdebstrap",
    "install the package mmdebstrap; for users other than root uidmap, too, and a line for the user in /etc/subuid and \
     /etc/subgid",
);

/// What an agent finds: apt is always there.
const PACKAGES: [&str; 13] = [
    "ca-certificates",
    "curl",
    "git",
    "iproute2",
    "iputils-ping",
    "less",
    "locales",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
    "tzdata",
];

/// Variables of whoever makes an image that its making heeds: where programs are and how the
/// network is reached.
const KEPT: [&str; 6] = [
    "PATH",
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "all_proxy",
    "no_proxy",
];

/// Beside what is in it; a sandbox's disk grows to `DISK_BYTES`.
const ROOM_BYTES: u64 = 128 << 20;
const DISK_BYTES: u64 = 4 << 30;
/// What is kept of what mmdebstrap says, for the error.
const SAID_MAX: usize = 16 << 10;
/// How often someone who gives up is noticed.
const POLL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

const POLL_SLEEP: Duration = Duration::from_millis(20);
/// What it gets to clean up.
const GRACE: Duration = Duration::from_secs(60);
/// Once its archive is whole, it has only its directory to remove.
const FOREVER: Duration = Duration::from_secs(600);

/// The user with a home and every right.
const ADD_USER: &str = r#"chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 --user-group --groups sudo user"#;
/// What the host's apt had to know is nobody's business in the guest.
const FORGET_HOST: &str =
    r#"rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1/etc/hostname" "$1/etc/resolv.conf""#;

pub(super) fn build(
    store: &Store,
    packages: &[String],
    kernel: &KernelChoice,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    let kernel = bundle::find_or_make(store, kernel, watch)?;
    let mut making = Making::begin(store)?;
    bootstrap(store, packages, &mut making, watch)?;
    put_all(&mut making.builder, &nodes())?;
    let (arch, init, kernel) = (host_arch(), Init::Agent, kernel.digest.clone());
    let spec = ImageSpec {
        arch,
        kernel,
        init,
        defaults: defaults(),
        disk_bytes: Some(DISK_BYTES),
    };
    making.publish(ROOM_BYTES, watch, |_| spec)
}

/// Which packages an image has that were asked for, beside its own: sorted, each once.
pub(super) fn wanted(packages: &[String]) -> Vec<String> {
    let all = PACKAGES
        .iter()
        .map(|&package| package.to_owned())
        .chain(packages.iter().cloned());
    all.collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect()
}

fn bootstrap(
    store: &Store,
    packages: &[String],
    making: &mut Making<'_>,
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    watch(Progress::begin(Stage::Resolve))?;
    let sources = apt::debian_sources()?;
    let work = store.stage()?;
    let list = work.path().join("sources.list");
    write(&list, sources.lines.join("\n").as_bytes())?;
    // As an ordinary user it reads the list in a namespace in which our directories are closed.
    let list = fs::File::open(&list).map_err(io_error("open", &list))?;
    let options = apt::proxies()?;
    let mut child = MMDEBSTRAP.spawn(|command| {
        // What it starts is signalled with it, and only by us.
        command.process_group(0);
        command.env_clear().envs(environment());
        command.args([
            "--variant=minbase",
            "--format=tar",
            "--keyring=/usr/share/keyrings",
            "--keyring=/etc/apt/trusted.gpg.d",
        ]);
        command.arg(format!("--include={}", wanted(packages).join(",")));
        command.args(options.iter().map(|option| format!("--aptopt={option}")));
        command.args([
            format!("--customize-hook={ADD_USER}"),
            format!("--customize-hook={FORGET_HOST}"),
        ]);
        command.args([sources.suite.as_str(), "-", "-"]);
        command.stdin(list.try_clone().map_or_else(|_| Stdio::null(), Stdio::from));
    })?;
    let said = listen(child.stderr.take().expect("it is piped"));
    let archive = child.stdout.take().expect("it is piped");
    let added = unpack(archive, making, watch);
    finish(child, said, added)
}

/// What packages are installed with: what they do depends on it, and who makes an image is not part
/// of it.
fn environment() -> Vec<(&'static str, OsString)> {
    let kept = KEPT
        .iter()
        .filter_map(|&name| Some((name, std::env::var_os(name)?)));
    let set = [
        ("LC_ALL", "C".to_owned()),
        ("SOURCE_DATE_EPOCH", EPOCH.to_string()),
        // Packages compile their modules. What happens to be imported meanwhile leaves nothing.
        ("PYTHONDONTWRITEBYTECODE", "1".to_owned()),
    ];
    kept.chain(set.map(|(name, value)| (name, value.into())))
        .collect()
}

fn unpack(
    archive: ChildStdout,
    making: &mut Making<'_>,
    watch: &mut Watch<'_>,
) -> Result<(), Error> {
    let archive = wait_for(archive, watch)?;
    let mut archive = io::BufReader::with_capacity(1 << 20, archive);
    making
        .builder
        .add_tar(&mut archive, TarRules::Plain, &mut unpacking(watch))?;
    Ok(())
}

/// Waits for the archive's first byte, which comes when everything is installed.
fn wait_for(archive: ChildStdout, watch: &mut Watch<'_>) -> Result<ChildStdout, Error> {
    loop {
        watch(Progress::begin(Stage::Install))?;
        let mut ready = [PollFd::from_borrowed_fd(archive.as_fd(), PollFlags::IN)];
        match poll(&mut ready, Some(&POLL)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(archive),
            Err(error) => return Err(MMDEBSTRAP.failed_to("wait for", error.into())),
        }
    }
}

/// Ends the program if its archive was not taken, and tells what went wrong first.
fn finish(
    mut child: Child,
    said: JoinHandle<String>,
    added: Result<(), Error>,
) -> Result<(), Error> {
    let ends_itself = added.as_ref().map_or_else(is_cut_off, |()| true);
    let status = match ended(
        &mut child,
        if added.is_ok() { FOREVER } else { GRACE },
        ends_itself,
    )? {
        Some(status) => status,
        None => stopped(&mut child)?,
    };
    let stderr = said.join().expect("reading does not panic");
    match ends_itself && status.code().is_some_and(|code| code != 0) {
        true => Err(Error::ToolFailed {
            program: MMDEBSTRAP.program,
            status,
            stderr: complaints(&stderr),
        }),
        false => added,
    }
}

/// An archive that is not whole is so because its maker has failed, most likely.
fn is_cut_off(error: &Error) -> bool {
    use sandtree_rootfs::Error as Rootfs;
    matches!(error, Error::Rootfs(error) if matches!(**error, Rootfs::Archive { .. } | Rootfs::Input { .. }))
}

/// Its end, if it comes by itself in time.
fn ended(
    child: &mut Child,
    within: Duration,
    is_expected: bool,
) -> Result<Option<ExitStatus>, Error> {
    let end = Instant::now() + within;
    loop {
        let status = child
            .try_wait()
            .map_err(|source| MMDEBSTRAP.failed_to("wait for", source))?;
        if status.is_some() || !is_expected || Instant::now() > end {
            return Ok(status);
        }
        thread::sleep(POLL_SLEEP);
    }
}

/// Asked to end, with everything it has started, it undoes its mounts and removes its directory.
/// Killed, it could not.
fn stopped(child: &mut Child) -> Result<ExitStatus, Error> {
    let group = Pid::from_child(child);
    let failed = |e: rustix::io::Errno| MMDEBSTRAP.failed_to("end", e.into());
    kill_process_group(group, Signal::TERM).map_err(failed)?;
    if let Some(status) = ended(child, GRACE, true)? {
        return Ok(status);
    }
    kill_process_group(group, Signal::KILL).map_err(failed)?;
    child
        .wait()
        .map_err(|source| MMDEBSTRAP.failed_to("wait for", source))
}

/// Reads what it says, so that it never waits for us.
fn listen(mut stderr: ChildStderr) -> JoinHandle<String> {
    thread::spawn(move || {
        let (mut said, mut chunk) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = stderr.read(&mut chunk) {
            said.extend_from_slice(&chunk[..count]);
            let excess = said.len().saturating_sub(SAID_MAX);
            said.drain(..excess);
        }
        String::from_utf8_lossy(&said).into_owned()
    })
}

/// The lines that say what went wrong.
fn complaints(said: &str) -> String {
    let errors: Vec<_> = said
        .lines()
        .filter(|line| line.starts_with("E:") || line.contains("rror"))
        .collect();
    let lines = if errors.is_empty() {
        said.lines().collect()
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

fn defaults() -> ExecDefaults {
    let env = [("PATH", PATH), ("LANG", "C.UTF-8")];
    ExecDefaults {
        env: env
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        user: Some("root".to_owned()),
        workdir: None,
        entrypoint: Vec::new(),
        cmd: vec!["/bin/bash".to_owned()],
    }
}
