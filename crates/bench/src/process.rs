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

/// What the memory of a process consists of, in bytes; the kernel divides shared pages among their
/// users.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Pages that its guest has written, and that no other process has.
    pub guest_own: u64,
    /// Pages of memory layers.
    pub guest_shared: u64,
    /// What an emulator has translated.
    pub code: u64,
    /// Pages of files: programs and libraries, with what a start writes to them.
    pub files: u64,
    /// Heap, stacks and others.
    pub rest: u64,
}

impl Memory {
    pub fn total(&self) -> u64 {
        self.guest_own + self.guest_shared + self.code + self.files + self.rest
    }

    fn of(smaps: &str) -> Self {
        let mut memory = Self::default();
        let mut mapping = Mapping::default();
        for line in smaps.lines() {
            match line.split_once(':') {
                // The last line of a mapping.
                Some(("VmFlags", flags)) => {
                    mapping.is_guest = flags.split_whitespace().any(|flag| flag == "uw");
                    memory.add(&mapping);
                }
                Some(("Pss", size)) => mapping.pss = kilobytes(size),
                Some(("Private_Dirty", size)) => mapping.own = kilobytes(size),
                Some((_, _))
                    if line
                        .split(' ')
                        .next()
                        .is_some_and(|word| word.ends_with(':')) => {}
                _ => mapping = Mapping::begun(line),
            }
        }
        memory
    }

    fn add(&mut self, mapping: &Mapping) {
        let Mapping { pss, own, .. } = *mapping;
        if mapping.is_guest {
            self.guest_own += own;
            self.guest_shared += pss.saturating_sub(own);
        } else if mapping.is_file {
            self.files += pss;
        } else if mapping.is_executable {
            self.code += pss;
        } else {
            self.rest += pss;
        }
    }
}

/// A part of a process's memory.
#[derive(Debug, Default)]
struct Mapping {
    /// Guest memory is the only one whose writes are tracked.
    is_guest: bool,
    is_file: bool,
    is_executable: bool,
    pss: u64,
    own: u64,
}

impl Mapping {
    /// From its first line: addresses, permissions, offset, device, inode and path.
    fn begun(line: &str) -> Self {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let field = |number: usize| fields.get(number).copied().unwrap_or_default();
        Self {
            is_file: field(5).starts_with('/'),
            is_executable: field(1).contains('x'),
            ..Self::default()
        }
    }
}

fn kilobytes(text: &str) -> u64 {
    first_number(text).unwrap_or(0) * 1024
}

/// What the memory of a process consists of.
pub fn memory(pid: u32) -> Result<Memory> {
    Ok(Memory::of(&read(pid, "smaps")?))
}

/// Memory of the host that programs can still get.
pub fn available_bytes() -> Result<u64> {
    let path = "/proc/meminfo";
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let available = field(&text, "MemAvailable:");
    let missing = || Error::invalid("memory of the host", "", "/proc/meminfo has MemAvailable");
    Ok(available.ok_or_else(missing)? * 1024)
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
        assert!(memory(pid).unwrap().files > 100_000);
        assert!(available_bytes().unwrap() > 1 << 20);
    }

    #[test]
    fn memory_is_divided_by_what_it_is_for() {
        let mapping = |first: &str, pss: u64, own: u64, flags: &str| {
            format!("{first}\nPss: {pss} kB\nPrivate_Dirty: {own} kB\nVmFlags: {flags}\n")
        };
        let smaps = [
            mapping("1000-2000 rw-p 0 00:00 0", 5, 5, "rd wr uw"),
            mapping("2000-3000 rw-p 0 fe:00 7 /x/a.mem", 6, 2, "rd wr uw"),
            mapping(
                "3000-4000 r-xp 0 fe:00 8 /usr/bin/q: (deleted)",
                3,
                0,
                "rd ex",
            ),
            mapping("4000-5000 rwxp 0 00:00 0", 20, 20, "rd wr ex"),
            mapping("5000-6000 rw-p 0 00:00 0 [heap]", 1, 1, "rd wr"),
        ];
        let kib = |count: u64| count * 1024;
        let memory = Memory {
            guest_own: kib(7),
            guest_shared: kib(4),
            code: kib(20),
            files: kib(3),
            rest: kib(1),
        };
        assert_eq!(Memory::of(&smaps.concat()), memory);
        assert_eq!(memory.total(), kib(35));
    }
}
