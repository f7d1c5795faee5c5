//! What a process of the host uses, from `/proc`.

use std::time::Duration;

use sandtree::{Error, Result};

fn read(pid: u32, file: &str) -> Result<String> {
    let path = format!("/proc/{pid}/{file}");
    std::fs::read_to_string(&path).map_err(|e| Error::io("read", path, e))
}

/// The entries of a directory of a process.
fn entries(pid: u32, dir: &str) -> Result<Vec<String>> {
    let path = format!("/proc/{pid}/{dir}");
    let listed = std::fs::read_dir(&path).map_err(|e| Error::io("list", &path, e))?;
    let names = listed.map(|entry| entry.map(|entry| entry.file_name()));
    let names = names.collect::<std::io::Result<Vec<_>>>();
    let names = names.map_err(|e| Error::io("list", &path, e))?;
    Ok(names
        .into_iter()
        .map(|name| name.to_string_lossy().into_owned())
        .collect())
}

/// Its memory; the kernel divides shared pages among their users.
pub fn pss_bytes(pid: u32) -> Result<u64> {
    let rollup = read(pid, "smaps_rollup")?;
    let kilobytes = field(&rollup, "Pss:").ok_or_else(|| {
        Error::invalid("memory of a process", pid, "/proc/PID/smaps_rollup has Pss")
    })?;
    Ok(kilobytes * 1024)
}

/// Processor time of all its threads.
pub fn processor_time(pid: u32) -> Result<Duration> {
    let mut nanoseconds = 0;
    for thread in entries(pid, "task")? {
        // A thread may end between the two.
        if let Ok(text) = read(pid, &format!("task/{thread}/schedstat")) {
            nanoseconds += first_number(&text).unwrap_or(0);
        }
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// How often its threads have waited for something, and so how often they were woken.
pub fn wakeups(pid: u32) -> Result<u64> {
    let mut count = 0;
    for thread in entries(pid, "task")? {
        // A thread may end between the two.
        if let Ok(text) = read(pid, &format!("task/{thread}/status")) {
            count += field(&text, "voluntary_ctxt_switches:").unwrap_or(0);
        }
    }
    Ok(count)
}

pub fn descriptors(pid: u32) -> Result<usize> {
    Ok(entries(pid, "fd")?.len())
}

pub fn mappings(pid: u32) -> Result<usize> {
    Ok(read(pid, "maps")?.lines().count())
}

fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    first_number(rest)
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_memory_time_and_descriptors() {
        let pid = std::process::id();
        assert!(pss_bytes(pid).unwrap() > 100_000);
        assert!(processor_time(pid).unwrap() > Duration::ZERO);
        assert!(descriptors(pid).unwrap() >= 3);
        assert!(mappings(pid).unwrap() > 5);
        assert_eq!(field("a: 1 kB\nPss:   12 kB\n", "Pss:"), Some(12));
    }
}
