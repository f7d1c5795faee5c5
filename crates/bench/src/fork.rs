//! What a fork's QEMU can do by itself, and how much of the host's memory it uses.

use std::time::{Duration, Instant};

use sandtree::bench::BenchFork;
use sandtree::{Error, Result};
use sandtree_engine::qmp::{
    Command, Job as JobInfo, JobDismiss, Nothing, QueryJobs, SnapshotLoad, SnapshotSave,
};
use sandtree_engine::{self as engine, Event, Machine};
use serde::Serialize;

/// For all of memory, written to a slow disk.
const JOB_DEADLINE: Duration = Duration::from_secs(120);
const TAKE_OR_LOAD: &str = "take or load a snapshot of its own";

/// What one of QEMU's own snapshot jobs costs.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// How long the guest did not run.
    pub still: Duration,
    pub total: Duration,
}

/// What a machine uses of the host's memory.
#[derive(Debug, Clone, Copy)]
pub struct MemoryUse {
    /// Of the whole process; the kernel divides shared pages among their users.
    pub pss_bytes: u64,
    /// Pages of the guest that this machine has written, and shares with no other.
    pub guest_bytes: u64,
}

/// Starts a job that frees what [`SnapshotSave`] has saved.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct SnapshotDelete<'a> {
    job_id: &'a str,
    tag: &'a str,
    devices: &'a [&'a str],
}

impl Command for SnapshotDelete<'_> {
    const NAME: &'static str = "snapshot-delete";
    type Reply = Nothing;
}

/// QEMU's own way to save the whole machine.
pub async fn snapshot_save(fork: &BenchFork, tag: &str) -> Result<Job> {
    let node = active_node(fork)?;
    let command = SnapshotSave {
        job_id: "save",
        tag,
        vmstate: &node,
        devices: &[&node],
    };
    stopping(in_time(run_job(fork.machine(), "save", command)).await?)
}

/// QEMU's own way to restore it. The link to the guest is useless afterwards.
pub async fn snapshot_load(fork: &BenchFork, tag: &str) -> Result<Job> {
    let node = active_node(fork)?;
    let command = SnapshotLoad {
        job_id: "load",
        tag,
        vmstate: &node,
        devices: &[&node],
    };
    stopping(in_time(run_job(fork.machine(), "load", command)).await?)
}

/// Frees a snapshot. Each holds all of memory in the overlay, which the jail limits to a little
/// more than one of them.
pub async fn snapshot_delete(fork: &BenchFork, tag: &str) -> Result<()> {
    let node = active_node(fork)?;
    let command = SnapshotDelete {
        job_id: "delete",
        tag,
        devices: &[&node],
    };
    in_time(run_job(fork.machine(), "delete", command))
        .await
        .map(drop)
}

/// Nodes are numbered by their level until the first pivot, and these forks make none.
fn active_node(fork: &BenchFork) -> Result<String> {
    Ok(format!("disk{}", fork.disk_depth()?))
}

/// What the events of a job showed.
struct Concluded {
    /// How long the guest did not run, if it stopped.
    still: Option<Duration>,
    total: Duration,
}

fn stopping(job: Concluded) -> Result<Job> {
    let reason = || "the guest never stopped".to_owned();
    let still = job.still.ok_or_else(|| Error::Engine {
        operation: TAKE_OR_LOAD,
        source: engine::Error::NotSaved { reason: reason() },
    })?;
    Ok(Job {
        still,
        total: job.total,
    })
}

async fn in_time<T>(running: impl Future<Output = Result<T, engine::Error>>) -> Result<T> {
    let late = |_| {
        Err(engine::Error::Timeout {
            command: "a snapshot job",
            after: JOB_DEADLINE,
        })
    };
    tokio::time::timeout(JOB_DEADLINE, running)
        .await
        .unwrap_or_else(late)
        .map_err(|source| Error::Engine {
            operation: TAKE_OR_LOAD,
            source,
        })
}

async fn run_job(
    machine: &Machine,
    id: &str,
    command: impl Command,
) -> Result<Concluded, engine::Error> {
    let qmp = machine.qmp();
    let mut events = machine.events();
    let began = Instant::now();
    qmp.run(command).await?;
    let mut stopped = None;
    let mut still = None;
    loop {
        match events.next().await {
            Some(Event::Stop { at }) => stopped = Some(at),
            Some(Event::Resume { at }) => {
                still = stopped.and_then(|stopped| at.checked_sub(stopped));
            }
            Some(Event::Job { id: job, status }) if job == id && status == "concluded" => break,
            Some(_) => {}
            None => {
                return Err(engine::Error::Protocol {
                    detail: "the connection has ended".into(),
                });
            }
        }
    }
    let total = began.elapsed();
    let jobs = qmp.run(QueryJobs {}).await?;
    qmp.run(JobDismiss { id }).await?;
    match failure(jobs, id) {
        None => Ok(Concluded { still, total }),
        Some(reason) => Err(engine::Error::NotSaved { reason }),
    }
}

fn failure(jobs: Vec<JobInfo>, id: &str) -> Option<String> {
    let job = jobs.into_iter().find(|job| job.id == id)?;
    job.error
}

pub fn memory_use(fork: &BenchFork) -> Result<MemoryUse> {
    let pid = fork.machine().pid();
    let memory = fork.machine().memory();
    let guest = memory.address()..memory.address() + memory.bytes();
    let read = |file: &str| {
        let path = format!("/proc/{pid}/{file}");
        std::fs::read_to_string(&path).map_err(|e| Error::io("read", path, e))
    };
    let pss_bytes = sum(&read("smaps_rollup")?, "Pss:", |_| true);
    // Pages of a layer that only this machine has read belong to the page cache, and are clean.
    let guest_bytes = sum(&read("smaps")?, "Private_Dirty:", |address| {
        guest.contains(&address)
    });
    Ok(MemoryUse {
        pss_bytes,
        guest_bytes,
    })
}

/// Adds a field up over the wanted mappings, which are chosen by their start address.
fn sum(smaps: &str, field: &str, is_wanted: impl Fn(u64) -> bool) -> u64 {
    let mut wanted = false;
    let mut kilobytes = 0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((begin, _)) = first.split_once('-')
            && let Ok(begin) = u64::from_str_radix(begin, 16)
        {
            wanted = is_wanted(begin);
        } else if wanted && first == field {
            kilobytes += words
                .next()
                .and_then(|count| count.parse::<u64>().ok())
                .unwrap_or(0);
        }
    }
    kilobytes * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f00000000-7f00002000 rw-p 00000000 00:00 0 \nPss: 8 kB\nPss_Dirty: 4 kB\nPrivate_Dirty: 8 kB\n\
7f00002000-7f00003000 rw-p 00001000 fe:00 12 /x/a-b.mem\nPss: 2 kB\nPrivate_Dirty: 4 kB\n\
ffff0000-ffff1000 r-xp 00000000 00:00 0 [vsyscall]\nPss: 16 kB\nPrivate_Dirty: 16 kB\n";

    #[test]
    fn only_wanted_mappings_count() {
        let guest = 0x7f_0000_0000u64..0x7f_0000_3000;
        assert_eq!(
            sum(SMAPS, "Private_Dirty:", |address| guest.contains(&address)),
            12 * 1024
        );
        assert_eq!(sum(SMAPS, "Pss:", |_| true), 26 * 1024);
    }
}
