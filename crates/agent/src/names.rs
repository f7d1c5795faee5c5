//! The guest's names: its hostname, with a line in `/etc/hosts`, and its machine id.
//!
//! Always: every line of an image's `/etc/hosts` stays. Without `/etc`, or on a read-only root, no
//! file is written, and that is no error.

use std::fs;
use std::io;
use std::path::Path;

use sandtree_proto::Failure;

use crate::failure::{OrFailure, tolerate};
use crate::sys::{self, Target};

const HOSTS: &str = "/etc/hosts";
const MACHINE_ID: &str = "/etc/machine-id";
/// D-Bus's machine id: a copy in older images, a link in newer ones.
const BUS_ID: &str = "/var/lib/dbus/machine-id";
const LOCALHOST: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";
/// Marks a line as the agent's.
const OURS: &str = "# sandtree";
/// In each of these, a machine's journal is a directory with its id as the name.
const JOURNALS: [&str; 2] = ["/run/log/journal", "/var/log/journal"];
const JOURNAL_PROCESSES: &str = "/sys/fs/cgroup/system.slice/systemd-journald.service/cgroup.procs";

pub fn assume(hostname: &str, machine_id: &str) -> Result<(), Failure> {
    rustix::system::sethostname(hostname.as_bytes())
        .or_failure(|| "cannot set the hostname".into())?;
    write_line("/etc/hostname", hostname)?;
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
    let has_place = Path::new(path).parent().is_some_and(Path::is_dir);
    if !has_place || fs::read(path).is_ok_and(|present| present == wanted.as_bytes()) {
        return Ok(());
    }
    match fs::write(path, wanted).or_else(|error| replace_dangling(path, wanted, error)) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        other => other.or_failure(|| format!("cannot write {path}")),
    }
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
