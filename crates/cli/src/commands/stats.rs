//! `sandtree stats`: the memory, processor and disk usage of a sandbox.

use std::process::ExitCode;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct StatsArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
}

pub async fn run(global: &Global, args: StatsArgs) -> Outcome {
    let stats = open(global).await?.sandbox(&args.sandbox)?.stats().await?;
    if global.json {
        show::json(&stats);
        return Ok(ExitCode::SUCCESS);
    }
    let guest = &stats.guest;
    let used = |total: u64, available: u64| {
        format!(
            "{} of {}",
            show::bytes(total.saturating_sub(available)),
            show::bytes(total)
        )
    };
    let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1000.0);
    show::fields(&[
        (
            "guest memory",
            used(guest.memory_total_bytes, guest.memory_available_bytes),
        ),
        (
            "guest disk",
            used(guest.disk_total_bytes, guest.disk_available_bytes),
        ),
        ("guest cpu", seconds(guest.cpu_busy_ms)),
        ("guest processes", guest.processes.to_string()),
        ("up for", seconds(guest.uptime_ms)),
        ("host memory", show::bytes(stats.host_memory_bytes)),
        ("host cpu", seconds(stats.host_cpu_ms)),
        ("host disk", show::bytes(stats.host_disk_bytes)),
    ]);
    Ok(ExitCode::SUCCESS)
}
