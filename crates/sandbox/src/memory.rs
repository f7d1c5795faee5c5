//! How much memory machines may still take: the host's available memory, or less if a control group
//! limits us.
//!
//! Always: of a control group and its parents, the one with the least free memory counts. Its
//! cached files can be reclaimed, and count as free.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The mount point of control groups in distributions, Docker and Kubernetes.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Memory that can still be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Available {
    pub bytes: u64,
    /// The control group with that limit; `None` if it is the host's memory.
    pub cgroup: Option<PathBuf>,
}

pub(crate) fn available() -> Result<Available> {
    let host = Available {
        bytes: of_host()?,
        cgroup: None,
    };
    let belongs = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups = groups(&belongs, Path::new(CGROUPS));
    let limited = groups
        .into_iter()
        .filter_map(|group| left(&group).map(|bytes| (bytes, group)));
    let limited = limited.map(|(bytes, group)| Available {
        bytes,
        cgroup: Some(group),
    });
    Ok(limited
        .chain([host])
        .min_by_key(|available| available.bytes)
        .expect("the host is one of them"))
}

fn of_host() -> Result<u64> {
    let path = "/proc/meminfo";
    let text = fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| {
        Error::io(
            "find MemAvailable in",
            path,
            std::io::ErrorKind::InvalidData.into(),
        )
    })
}

/// The control groups of a process from `/proc/self/cgroup`, innermost first. In a container their
/// paths may be the host's; then only the mounts exist.
fn groups(belongs: &str, mounts: &Path) -> Vec<PathBuf> {
    let of_line = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next()?;
        let path = fields.next()?;
        let mount = match controllers {
            "" => mounts.to_owned(),
            listed if listed.split(',').any(|controller| controller == "memory") => {
                mounts.join("memory")
            }
            _ => return None,
        };
        let group = mount.join(path.trim_start_matches('/'));
        Some(
            group
                .ancestors()
                .take_while(|dir| dir.starts_with(&mount))
                .map(Path::to_owned)
                .collect::<Vec<_>>(),
        )
    };
    belongs.lines().filter_map(of_line).flatten().collect()
}

/// The free memory of a group; `None` without a limit.
fn left(group: &Path) -> Option<u64> {
    let number = |file: &str| {
        fs::read_to_string(group.join(file))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    // Without a limit, version 2 has `max`, and version 1 a number that no machine has.
    let limit = number("memory.max")
        .or_else(|| number("memory.limit_in_bytes").filter(|limit| *limit < 1 << 60))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let of_files = |name: &str| {
        let value = stat
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse::<u64>().ok())
    };
    let files = ["active_file", "inactive_file"]
        .map(|name| of_files(&format!("total_{name}")).or_else(|| of_files(name)));
    let reclaimable: u64 = files.into_iter().flatten().sum();
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(dir: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(dir).expect("a directory can be made");
        files.iter().for_each(|(name, text)| {
            fs::write(dir.join(name), text).expect("a file can be written")
        });
    }

    #[test]
    fn a_group_and_all_around_it_count() {
        let mounts = Path::new("/m");
        let found = groups("0::/a/b\n", mounts);
        assert_eq!(found, ["/m/a/b", "/m/a", "/m"].map(PathBuf::from));
        let found = groups("4:cpu,memory:/a\n2:pids:/x\n0::/\n", mounts);
        assert_eq!(found, ["/m/memory/a", "/m/memory", "/m"].map(PathBuf::from));
        assert_eq!(groups("", mounts), Vec::<PathBuf>::new());
    }

    #[test]
    fn what_is_left_is_the_limit_without_what_cannot_be_reclaimed() {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let second = dir.path().join("2");
        let first = dir.path().join("1");
        let free = dir.path().join("0");
        let stat = "anon 5\nactive_file 100\ninactive_file 200\n";
        group(
            &second,
            &[
                ("memory.max", "1000\n"),
                ("memory.current", "600\n"),
                ("memory.stat", stat),
            ],
        );
        assert_eq!(left(&second), Some(700));
        let stat = "active_file 1\ntotal_active_file 50\ntotal_inactive_file 0\n";
        let files = [
            ("memory.limit_in_bytes", "1000\n"),
            ("memory.usage_in_bytes", "2000\n"),
            ("memory.stat", stat),
        ];
        group(&first, &files);
        assert_eq!(left(&first), Some(0));
        group(
            &free,
            &[("memory.max", "max\n"), ("memory.current", "600\n")],
        );
        assert_eq!(left(&free), None);
        group(
            &free,
            &[
                ("memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory.usage_in_bytes", "1\n"),
            ],
        );
        assert_eq!(left(&free), None);
    }
}
