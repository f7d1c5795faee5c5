//! What a sandbox uses, of its guest and of the host.

use std::path::Path;

use sandtree_proto::Metrics;
use serde::{Deserialize, Serialize};

use crate::driver::Local;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::host::Host;

/// What a sandbox uses.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Stats {
    pub guest: Metrics,
    /// Memory of the QEMU process that is in the host's RAM.
    pub host_memory_bytes: u64,
    /// Processor time of the QEMU process.
    pub host_cpu_ms: u64,
    /// Bytes on the host's disk.
    pub host_disk_bytes: u64,
}

/// What the sandbox uses.
pub(crate) async fn stats(host: &Host, sandbox: &Local) -> Result<Stats> {
    let status = sandbox.status();
    let guest = Guest::new(status.link().await?).metrics().await?;
    let dir = host.inner.find(&status.info.id)?;
    let (host_memory_bytes, host_cpu_ms) = process_usage(status.info.qemu_pid.unwrap_or_default())?;
    Ok(Stats {
        guest,
        host_memory_bytes,
        host_cpu_ms,
        host_disk_bytes: disk_usage(dir.path())?,
    })
}

/// Resident bytes and milliseconds of processor time, from `/proc/PID/stat`.
fn process_usage(pid: u32) -> Result<(u64, u64)> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io("read", &path, e))?;
    // The second field is the program's name in parentheses and may hold anything, also
    // parentheses.
    let fields: Vec<u64> = text
        .rsplit_once(')')
        .map(|(_, rest)| {
            rest.split_whitespace()
                .map(|field| field.parse().unwrap_or(0))
                .collect()
        })
        .unwrap_or_default();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
    let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
    let cpu_ms = (field(14) + field(15)) * 1000 / ticks_per_second;
    Ok((field(24) * rustix::param::page_size() as u64, cpu_ms))
}

fn disk_usage(dir: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let failed = |e| Error::io("measure", dir, e);
    let mut bytes = 0;
    for entry in dir.read_dir().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // What is replaced or removed while we look has no size any more.
        let Ok(found) = entry.metadata() else {
            continue;
        };
        bytes += if found.is_dir() {
            disk_usage(&entry.path())?
        } else {
            found.blocks() * 512
        };
    }
    Ok(bytes)
}
