//! A copy of a sandbox with its QEMU in hand: what benchmarks compare states with, and look into.
//!
//! Always: it is a fork like others, of the same guest, memory layers and disk, but nobody drives
//! it. Dropped, nothing of it is left.

use std::time::{Duration, Instant};

use sandtree_engine::qmp::{Command, JobDismiss, QueryJobs, SnapshotLoad, SnapshotSave};
use sandtree_engine::{self as engine, Event};

use crate::boot::Running;
use crate::capture::engine_error;
use crate::create::{self, Newborn};
use crate::error::{Error, Result};
use crate::fork::ForkSpec;
use crate::guest::Guest;
use crate::host::{Host, store_error};
use crate::sandbox::Sandbox;

/// For all of memory, written to a slow disk.
const JOB_DEADLINE: Duration = Duration::from_secs(120);

/// A running copy.
#[derive(Debug)]
pub struct Twin {
    // Dropped in this order: the machine ends before its files go.
    running: Running,
    newborn: Newborn,
}

/// What one of QEMU's own snapshot jobs costs.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// How long the guest stood still.
    pub still: Duration,
    pub total: Duration,
}

/// What a machine has of the host's memory.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// Of the whole process; what several share is divided among them.
    pub pss_bytes: u64,
    /// Pages of the guest that this machine has written, and so has to itself.
    pub guest_bytes: u64,
}

impl Twin {
    pub async fn of(host: &Host, sandbox: &Sandbox) -> Result<Twin> {
        let point = sandbox.lend(crate::lend::Wanted::Copies).await?;
        let made = Self::from_state(host, sandbox.id(), &point.state).await;
        sandbox.take_back(&point.state).await?;
        made
    }

    async fn from_state(host: &Host, id: &str, state: &str) -> Result<Twin> {
        let (source, record) = host.inner.fork_source(id, state)?;
        let name = host
            .fork_names(record.name.as_str(), &ForkSpec::new(1))?
            .remove(0);
        let copy = create::copy(host.inner.clone(), source, &record, name).await?;
        let (newborn, running) = copy.wake().await?;
        Ok(Twin { running, newborn })
    }

    pub fn guest(&self) -> &Guest {
        &self.running.guest
    }

    /// QEMU's own way to keep the whole machine.
    pub async fn snapshot_save(&self, tag: &str) -> Result<Job> {
        let node = self.active_node()?;
        self.job(
            "save",
            SnapshotSave {
                job_id: "save",
                tag,
                vmstate: &node,
                devices: &[&node],
            },
        )
        .await
    }

    /// QEMU's own way back. The link to the guest is of no use afterwards.
    pub async fn snapshot_load(&self, tag: &str) -> Result<Job> {
        let node = self.active_node()?;
        self.job(
            "load",
            SnapshotLoad {
                job_id: "load",
                tag,
                vmstate: &node,
                devices: &[&node],
            },
        )
        .await
    }

    /// Nodes are numbered by their level until the first pivot, and a twin makes none.
    fn active_node(&self) -> Result<String> {
        let disk = self
            .newborn
            .dir()
            .head()
            .map_err(store_error("read where a sandbox stands"))?
            .disk;
        Ok(format!("disk{}", disk.len()))
    }

    async fn job(&self, id: &str, command: impl Command) -> Result<Job> {
        let running = tokio::time::timeout(JOB_DEADLINE, self.run_job(id, command)).await;
        let late = |_| {
            Err(engine::Error::Timeout {
                command: "a snapshot job",
                after: JOB_DEADLINE,
            })
        };
        running
            .unwrap_or_else(late)
            .map_err(engine_error("take or load a snapshot of its own"))
    }

    async fn run_job(&self, id: &str, command: impl Command) -> Result<Job, engine::Error> {
        let qmp = self.running.machine.qmp();
        let mut events = self.running.machine.events();
        let began = Instant::now();
        qmp.run(command).await?;
        let (mut stopped, mut still) = (None, None);
        loop {
            match events.next().await {
                Some(Event::Stop { at }) => stopped = Some(at),
                Some(Event::Resume { at }) => {
                    still = stopped.and_then(|stopped| at.checked_sub(stopped))
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
        let failed = qmp
            .run(QueryJobs {})
            .await?
            .into_iter()
            .find(|job| job.id == id)
            .and_then(|job| job.error);
        qmp.run(JobDismiss { id }).await?;
        match (failed, still) {
            (None, Some(still)) => Ok(Job { still, total }),
            (failed, _) => Err(engine::Error::NotSaved {
                reason: failed.unwrap_or_else(|| "the guest never stood still".into()),
            }),
        }
    }

    pub fn held(&self) -> Result<Held> {
        let (pid, memory) = (self.running.machine.pid(), self.running.machine.memory());
        let guest = memory.address()..memory.address() + memory.bytes();
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            std::fs::read_to_string(&path).map_err(|e| Error::io("read", path, e))
        };
        let pss_bytes = sum(&read("smaps_rollup")?, "Pss:", |_| true);
        // Pages of a layer that only this machine has read are the page cache's, and clean.
        let guest_bytes = sum(&read("smaps")?, "Private_Dirty:", |address| {
            guest.contains(&address)
        });
        Ok(Held {
            pss_bytes,
            guest_bytes,
        })
    }

    /// Ends the machine and removes everything of it.
    pub async fn end(self) {
        self.running.machine.kill().await;
        self.running
            .hub
            .close("the measurement is over".into())
            .await;
        tokio::task::block_in_place(|| drop(self.newborn));
    }
}

/// Adds a field up over the mappings that are wanted, told by where they begin.
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
