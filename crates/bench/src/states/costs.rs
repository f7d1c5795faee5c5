//! Guests that write a given amount, and what their checkpoints cost.

use std::time::Duration;

use sandtree::{Checkpoint, Error, ExecSpec, Guest, Replace, Result, Sandbox};

use crate::crew::median;
use crate::samples::Samples;

/// How much a guest writes before a checkpoint.
pub const DIRTY_MB: [u64; 4] = [0, 1, 10, 100];
/// The memory that the guest uses when it is compared with QEMU's own snapshots.
const USED_MB: u64 = 300;
/// Background work of the last state ends within this time.
pub const REST: Duration = Duration::from_millis(300);

/// The costs of similar checkpoints.
#[derive(Default)]
pub struct Costs {
    pub pauses: Vec<f64>,
    totals: Vec<f64>,
    memory_bytes: Vec<u64>,
}

impl Costs {
    pub fn push(&mut self, checkpoint: &Checkpoint) {
        self.pauses.push(checkpoint.pause_ms);
        self.totals.push(checkpoint.total_ms);
        self.memory_bytes.push(checkpoint.memory_bytes);
    }

    pub fn pause(&self) -> Samples {
        self.pauses.clone().into()
    }

    pub fn total(&self) -> Samples {
        self.totals.clone().into()
    }

    pub fn captured(&self) -> String {
        format!(
            "{:.1} MB captured",
            median(self.memory_bytes.clone()) as f64 / 1e6
        )
    }
}

pub async fn idle_checkpoint(sandbox: &Sandbox) -> Result<Checkpoint> {
    tokio::time::sleep(REST).await;
    sandbox.checkpoint(None, Replace::No).await
}

/// A guest that writes a given amount before each checkpoint.
pub struct Dirtied {
    pub sandbox: Sandbox,
    guest: Guest,
}

impl Dirtied {
    pub async fn new(sandbox: Sandbox) -> Result<Self> {
        let guest = sandbox.guest().await?;
        let most = DIRTY_MB[DIRTY_MB.len() - 1];
        done(
            &guest,
            &[
                "dd",
                "if=/dev/urandom",
                "of=/dev/shm/seed",
                "bs=64k",
                &format!("count={}", most * 16),
            ],
        )
        .await?;
        let dirtied = Self { sandbox, guest };
        // The first run reads the program from the disk.
        dirtied.checkpoint(most).await?;
        Ok(dirtied)
    }

    /// Copies random bytes in memory with one process, then takes a checkpoint.
    pub async fn checkpoint(&self, dirty_mb: u64) -> Result<Checkpoint> {
        tokio::time::sleep(REST).await;
        if dirty_mb > 0 {
            let count = format!("count={}", dirty_mb * 16);
            done(
                &self.guest,
                &[
                    "dd",
                    "if=/dev/shm/seed",
                    "of=/dev/shm/dirt",
                    "bs=64k",
                    &count,
                    "conv=notrunc",
                ],
            )
            .await?;
        }
        self.sandbox.checkpoint(None, Replace::No).await
    }
}

pub async fn use_memory(guest: &Guest) -> Result<()> {
    let size = format!("mount -o remount,size={}m /dev/shm", USED_MB + 20);
    done(guest, &["sh", "-c", &size]).await?;
    done(
        guest,
        &[
            "dd",
            "if=/dev/urandom",
            "of=/dev/shm/used",
            "bs=64k",
            &format!("count={}", USED_MB * 16),
        ],
    )
    .await
}

async fn done(guest: &Guest, argv: &[&str]) -> Result<()> {
    let output = guest
        .exec(ExecSpec::argv(argv))
        .await?
        .output(1 << 16)
        .await?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(Error::invalid(
        "command of the benchmark",
        argv.join(" "),
        &stderr,
    ))
}
