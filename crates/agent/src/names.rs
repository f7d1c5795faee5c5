//! The names of a guest: its hostname, with a line in `/etc/hosts`, and its machine id.
//!
//! ```text
//!   /run/sandtree/   hostname        hosts        machine-id            in memory, written by the agent
//!                        |             |              |     \           bind mounts
//!                 /etc/hostname   /etc/hosts   /etc/machine-id  /var/lib/dbus/machine-id
//! ```
//!
//! Where the agent is init, the files are in memory, as container runtimes do it: a restored guest
//! gets its new names without a write to its disk, and they are in no comparison of disks. Beside
//! an image's own init the files are on the disk, because systemd replaces a mounted machine id.
//!
//! Always: every line of an image's `/etc/hosts` stays. Without `/etc`, no file is written, and
//! that is no error; on a read-only root, only mounted files have the new names.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use sandtree_proto::Failure;

use crate::console;
use crate::failure::{OrFailure, reason, tolerate};
use crate::role::Role;
use crate::sys::{self, Target};

const HOSTNAME: &str = "/etc/hostname";
const HOSTS: &str = "/etc/hosts";
const MACHINE_ID: &str = "/etc/machine-id";
/// D-Bus's machine id: a copy in older images, a link in newer ones.
const BUS_ID: &str = "/var/lib/dbus/machine-id";
/// Where the files in memory are.
const IN_MEMORY: &str = "/run/sandtree";
const LOCALHOST: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";
/// Marks a line of `/etc/hosts` as the agent's.
const OURS: &str = "# sandtree";
/// In each of these, a machine's journal is a directory with its id as the name.
const JOURNALS: [&str; 2] = ["/run/log/journal", "/var/log/journal"];
const JOURNAL_PROCESSES: &str = "/sys/fs/cgroup/system.slice/systemd-journald.service/cgroup.procs";

/// The files that hold a guest's names.
#[derive(Debug)]
pub struct Names {
    role: Role,
    memory: OnceLock<Mounted>,
}

impl Names {
    pub fn new(role: Role) -> Self {
        Self {
            role,
            memory: OnceLock::new(),
        }
    }

    /// Whether names change without access to a disk.
    pub fn are_in_memory(&self) -> bool {
        self.memory.get().is_some()
    }

    /// Moves the files into memory, where that is possible. Files that stay on the disk do as well.
    pub fn move_into_memory(&self) {
        if self.role != Role::Init || self.are_in_memory() {
            return;
        }
        match Mounted::over_the_images() {
            // Only one request at a time configures a guest.
            Ok(mounted) => tolerate(self.memory.set(mounted)),
            Err(error) => console::say(format_args!(
                "the names of this guest stay on its disk: {}",
                reason(&error)
            )),
        }
    }

    pub fn assume(&self, hostname: &str, machine_id: &str) -> Result<(), Failure> {
        rustix::system::sethostname(hostname.as_bytes())
            .or_failure(|| "cannot set the hostname".into())?;
        match self.memory.get() {
            Some(mounted) => mounted
                .assume(hostname, machine_id)
                .or_failure(|| format!("cannot write the names in {IN_MEMORY}")),
            None => assume_on_disk(hostname, machine_id),
        }
    }
}

/// Files in memory that are mounted over the image's.
#[derive(Debug)]
struct Mounted {
    hostname: File,
    hosts: File,
    machine_id: File,
}

impl Mounted {
    fn over_the_images() -> io::Result<Self> {
        fs::create_dir_all(IN_MEMORY)?;
        let mounted = Self {
            hostname: in_memory(HOSTNAME)?,
            hosts: in_memory(HOSTS)?,
            machine_id: in_memory(MACHINE_ID)?,
        };
        if fs::symlink_metadata(BUS_ID).is_ok_and(|found| found.is_file()) {
            rustix::mount::mount_bind(memory_path(MACHINE_ID), BUS_ID)?;
        }
        Ok(mounted)
    }

    fn assume(&self, hostname: &str, machine_id: &str) -> io::Result<()> {
        let hosts = content(&self.hosts)?;
        let named = with_own_name(&String::from_utf8_lossy(&hosts), hostname);
        if named.as_bytes() != hosts {
            replace(&self.hosts, &named)?;
        }
        replace(&self.hostname, &format!("{hostname}\n"))?;
        replace(&self.machine_id, &format!("{machine_id}\n"))
    }
}

fn memory_path(of: &str) -> String {
    let name = of.rsplit('/').next().unwrap_or(of);
    format!("{IN_MEMORY}/{name}")
}

/// A file in memory with the content of the image's, mounted over that one.
fn in_memory(of: &str) -> io::Result<File> {
    let path = memory_path(of);
    fs::write(&path, fs::read(of).unwrap_or_default())?;
    let file = File::options().read(true).write(true).open(&path)?;
    if has_place(of) {
        make_mount_point(of)?;
        rustix::mount::mount_bind(&path, of)?;
    }
    Ok(file)
}

/// A file can be mounted over a file only.
fn make_mount_point(at: &str) -> io::Result<()> {
    if fs::metadata(at).is_ok() {
        return Ok(());
    }
    fs::write(at, "").or_else(|error| replace_dangling(at, "", error))
}

fn content(file: &File) -> io::Result<Vec<u8>> {
    let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn replace(file: &File, text: &str) -> io::Result<()> {
    file.write_all_at(text.as_bytes(), 0)?;
    let length = text.len() as u64;
    if file.metadata()?.len() > length {
        file.set_len(length)?;
    }
    Ok(())
}

fn assume_on_disk(hostname: &str, machine_id: &str) -> Result<(), Failure> {
    write_line(HOSTNAME, hostname)?;
    let hosts = fs::read(HOSTS).unwrap_or_default();
    write_text(
        HOSTS,
        &with_own_name(&String::from_utf8_lossy(&hosts), hostname),
    )?;
    assume_id(machine_id)
}

fn assume_id(id: &str) -> Result<(), Failure> {
    let before = read_id(MACHINE_ID);
    write_line(MACHINE_ID, id)?;
    if fs::symlink_metadata(BUS_ID).is_ok_and(|found| found.is_file()) {
        write_line(BUS_ID, id)?;
    }
    if let Some(before) =
        before.filter(|before| before != id && read_id(MACHINE_ID).is_some_and(|now| now == id))
    {
        move_journals(&before, id);
    }
    Ok(())
}

fn read_id(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let id = text.trim();
    (id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| id.to_owned())
}

/// systemd finds its journal by the machine id. Its daemon keeps the id that it started with, so it
/// is ended, and init restarts it with its open files.
fn move_journals(before: &str, now: &str) {
    for journals in JOURNALS {
        // Without a journal there is nothing to move, and an existing one is the guest's own.
        tolerate(fs::rename(
            Path::new(journals).join(before),
            Path::new(journals).join(now),
        ));
    }
    let processes = fs::read_to_string(JOURNAL_PROCESSES).unwrap_or_default();
    for pid in processes
        .lines()
        .filter_map(|line| rustix::process::Pid::from_raw(line.parse().ok()?))
    {
        tolerate(sys::signal(Target::Process(pid), libc::SIGTERM));
    }
}

/// The hosts file with a line for the hostname, if it has none, so that a look-up of the own name
/// is answered at once.
fn with_own_name(hosts: &str, hostname: &str) -> String {
    let mut lines: String = hosts
        .split_inclusive('\n')
        .filter(|line| !line.trim_end().ends_with(OURS))
        .collect();
    if lines.is_empty() {
        lines.push_str(LOCALHOST);
    }
    if !lines.lines().any(|line| names(line, hostname)) {
        let separator = if lines.ends_with('\n') { "" } else { "\n" };
        lines.push_str(&format!("{separator}127.0.1.1 {hostname} {OURS}\n"));
    }
    lines
}

fn names(line: &str, hostname: &str) -> bool {
    let entry = line.split('#').next().unwrap_or_default();
    entry
        .split_whitespace()
        .skip(1)
        .any(|name| name == hostname)
}

/// Writes a file of one line, unless the file already has it.
pub fn write_line(path: &str, line: &str) -> Result<(), Failure> {
    write_text(path, &format!("{line}\n"))
}

fn write_text(path: &str, wanted: &str) -> Result<(), Failure> {
    if !has_place(path) || fs::read(path).is_ok_and(|present| present == wanted.as_bytes()) {
        return Ok(());
    }
    match fs::write(path, wanted).or_else(|error| replace_dangling(path, wanted, error)) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        other => other.or_failure(|| format!("cannot write {path}")),
    }
}

fn has_place(path: &str) -> bool {
    Path::new(path).parent().is_some_and(Path::is_dir)
}

/// An image may have a link there, to a directory that only its own init fills; a file replaces
/// such a link.
fn replace_dangling(path: &str, wanted: &str, error: io::Error) -> io::Result<()> {
    if error.kind() != io::ErrorKind::NotFound {
        return Err(error);
    }
    fs::remove_file(path)?;
    fs::write(path, wanted)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_hostname_gets_one_line_and_other_lines_stay() {
        let images = "127.0.0.1 localhost\n10.0.0.7 db # the database";
        let first = with_own_name(images, "a");
        assert_eq!(first, format!("{images}\n127.0.1.1 a # sandtree\n"));
        assert_eq!(with_own_name(&first, "a"), first);
        assert_eq!(
            with_own_name(&first, "b"),
            format!("{images}\n127.0.1.1 b # sandtree\n")
        );
        assert_eq!(
            with_own_name(&first, "db"),
            format!("{images}\n"),
            "the image names it already"
        );
        assert_eq!(
            with_own_name("", "a"),
            format!("{LOCALHOST}127.0.1.1 a # sandtree\n")
        );
    }

    #[test]
    fn names_in_comments_do_not_count() {
        assert!(
            names("10.0.0.7\tx db", "db") && !names("10.0.0.7 x # db", "db") && !names("db", "db")
        );
    }

    #[test]
    fn a_dangling_link_becomes_a_file_and_other_links_stay() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        symlink("nowhere/file", at("dangling")).unwrap();
        symlink("target", at("link")).unwrap();
        fs::write(at("target"), "before\n").unwrap();
        write_line(&at("dangling"), "x").unwrap();
        write_line(&at("link"), "x").unwrap();
        assert!(!Path::new(&at("dangling")).is_symlink() && Path::new(&at("link")).is_symlink());
        assert_eq!(
            [
                fs::read(at("dangling")).unwrap(),
                fs::read(at("target")).unwrap()
            ],
            [b"x\n", b"x\n"]
        );
        write_line(&at("missing/file"), "x").unwrap();
    }
}
