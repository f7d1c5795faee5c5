//! Guests that write to all of their memory, or much to their disk.

use std::path::Path;
use std::time::Instant;

use rustix::fs::statvfs;
use sandtree::{Error, Replace, Result, Sandbox, SandboxSpec};

use crate::crew::{Crew, IMAGE, ms, shell};
use crate::failure::Measured;
use crate::figure::Figure;

const ROUNDS: usize = 3;
/// What the guest writes in each round, to pages that exist.
const WRITTEN_MIB: u64 = 64;
const PAGE_BYTES: usize = 4096;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What must be free beside what the guest writes.
const SPARE_BYTES: u64 = 8 << 30;

/// After a checkpoint, the first write to each page is a fault: its cost is that of the tracking.
/// The same writes without a checkpoint before them have none.
pub async fn tracking(crew: &Crew) -> Result<Vec<Figure>> {
    let sandbox = crew.create(SandboxSpec::new(IMAGE)).await?;
    let write = format!(
        "dd if=/dev/zero of=/dev/shm/written bs=64k count={} conv=notrunc 2>/dev/null",
        WRITTEN_MIB * 16
    );
    // The pages exist from here on, and the guest's code is translated.
    for _ in 0..2 {
        shell(&sandbox, &write).await?;
    }
    let mut tracked = Vec::new();
    let mut untracked = Vec::new();
    for _ in 0..ROUNDS {
        sandbox.checkpoint(Some("t"), Replace::Yes).await?;
        tracked.push(timed(&sandbox, &write).await?);
        untracked.push(timed(&sandbox, &write).await?);
    }
    let pages = (WRITTEN_MIB * MIB) as f64 / PAGE_BYTES as f64;
    let what = format!("a guest writes {WRITTEN_MIB} MiB after a checkpoint");
    let bytes = (WRITTEN_MIB * MIB) as usize;
    let figure = Figure::ms(what, tracked)
        .times("again, without a checkpoint", untracked)
        .times("faults of as many pages, on the host", faults(bytes))
        .times("memcpy of as much, on the host", copies(bytes));
    Ok(vec![
        figure.note(format!("{pages} pages, each written once")),
    ])
}

async fn timed(sandbox: &Sandbox, script: &str) -> Result<f64> {
    let began = Instant::now();
    shell(sandbox, script).await?;
    Ok(ms(began.elapsed()))
}

/// Milliseconds to touch new pages.
fn faults(bytes: usize) -> Vec<f64> {
    let fault = |_| {
        let began = Instant::now();
        // Zeros come from fresh mappings, whose pages do not exist yet.
        let mut fresh = vec![0u8; bytes];
        fresh
            .iter_mut()
            .step_by(PAGE_BYTES)
            .for_each(|byte| *byte = 1);
        std::hint::black_box(&fresh);
        ms(began.elapsed())
    };
    (0..ROUNDS).map(fault).collect()
}

fn copies(bytes: usize) -> Vec<f64> {
    let from = vec![1u8; bytes];
    let mut to = vec![2u8; bytes];
    let copy = |_| {
        let began = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&to);
        ms(began.elapsed())
    };
    (0..ROUNDS).map(copy).collect()
}

/// Checkpoints and reverts of a sandbox whose overlay holds many gibibytes.
pub async fn large_disk(crew: &Crew, gib: u64) -> Result<Measured> {
    let free = free_bytes(&crew.home)?;
    let needed = gib * GIB + SPARE_BYTES;
    if free < needed {
        let free = free / GIB;
        let needed = needed / GIB;
        let why = format!("a disk of {gib} GiB was left out: {free} of {needed} GiB are free");
        return Ok(Measured {
            left_out: vec![why],
            ..Measured::default()
        });
    }
    let what = |what: &str| format!("{what}, {gib} GiB written to the disk");
    let sandbox = crew
        .create(SandboxSpec {
            disk_bytes: Some((gib + 4) * GIB),
            ..SandboxSpec::new(IMAGE)
        })
        .await?;
    // Not zeros, which would be holes. The guest's memory holds the source.
    let write = format!(
        "dd if=/dev/urandom of=/dev/shm/seed bs=1M count=64 2>/dev/null; \
         for n in $(seq {}); do cat /dev/shm/seed; done > /srv/large && sync",
        gib * GIB / (64 * MIB)
    );
    shell(&sandbox, &write).await?;
    let first = sandbox.checkpoint(None, Replace::No).await?;
    let mut stops = Vec::new();
    let mut totals = Vec::new();
    let mut runs = Vec::new();
    for _ in 0..ROUNDS {
        shell(&sandbox, "echo more >> /srv/more").await?;
        let checkpoint = sandbox.checkpoint(None, Replace::No).await?;
        stops.push(checkpoint.pause_ms);
        totals.push(checkpoint.total_ms);
        runs.push(sandbox.revert(&checkpoint.id).await?.restore.running_ms);
    }
    Ok(vec![
        Figure::ms(what("stop of the first checkpoint"), first.pause_ms),
        Figure::ms(what("stop of a checkpoint"), stops),
        Figure::ms(what("whole checkpoint"), totals),
        Figure::ms(what("revert, until the guest runs"), runs),
    ]
    .into())
}

fn free_bytes(dir: &Path) -> Result<u64> {
    let status = statvfs(dir).map_err(|errno| Error::io("look at", dir, errno.into()))?;
    Ok(status.f_bavail * status.f_frsize)
}
