//! The guest's load and memory, as its kernel reports them.

use std::fs;

use sandtree_proto::{Failure, Metrics};

use crate::failure::OrFailure;

/// The kernel counts processor time in hundredths of a second for user space, on every
/// architecture.
const TICK_MS: u64 = 10;

pub fn read() -> Result<Metrics, Failure> {
    let stat = text("/proc/stat")?;
    let meminfo = text("/proc/meminfo")?;
    let disk = rustix::fs::statvfs("/").or_failure(|| "cannot stat the root file system".into())?;
    Ok(Metrics {
        uptime_ms: uptime_ms(&text("/proc/uptime")?),
        memory_total_bytes: memory_bytes(&meminfo, "MemTotal:"),
        memory_available_bytes: memory_bytes(&meminfo, "MemAvailable:"),
        disk_total_bytes: disk.f_blocks.saturating_mul(disk.f_frsize),
        disk_available_bytes: disk.f_bavail.saturating_mul(disk.f_frsize),
        cpu_busy_ms: cpu_busy_ms(&stat),
        processes: processes()?,
    })
}

fn text(path: &str) -> Result<String, Failure> {
    fs::read_to_string(path).or_failure(|| format!("cannot read {path}"))
}

fn uptime_ms(uptime: &str) -> u64 {
    let seconds: f64 = uptime
        .split(' ')
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or(0.0);
    (seconds * 1000.0) as u64
}

fn memory_bytes(meminfo: &str, key: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key));
    let kib: u64 = line
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    kib * 1024
}

/// Everything except idle and waiting, the fourth and fifth column.
fn cpu_busy_ms(stat: &str) -> u64 {
    let columns = stat
        .lines()
        .next()
        .unwrap_or("")
        .split_whitespace()
        .skip(1)
        .take(8);
    let ticks: Vec<u64> = columns.map(|word| word.parse().unwrap_or(0)).collect();
    let busy = ticks
        .iter()
        .enumerate()
        .filter(|(column, _)| !matches!(column, 3 | 4))
        .map(|(_, ticks)| ticks);
    busy.sum::<u64>() * TICK_MS
}

fn processes() -> Result<u32, Failure> {
    let entries = fs::read_dir("/proc").or_failure(|| "cannot list /proc".into())?;
    let is_process =
        |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    Ok(entries
        .flatten()
        .filter(|entry| is_process(&entry.file_name()))
        .count() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_parsed_by_their_columns() {
        assert_eq!(cpu_busy_ms("cpu  1 2 3 100 100 4 5 6 7 8\n"), 210);
        assert_eq!(
            memory_bytes("MemTotal:  10 kB\nMemAvailable: 4 kB\n", "MemAvailable:"),
            4096
        );
        assert_eq!(uptime_ms("12.34 5.0\n"), 12340);
    }
}
