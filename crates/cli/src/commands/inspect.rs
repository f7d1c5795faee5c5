//! `sandtree inspect`: everything known of a sandbox.

use std::process::ExitCode;

use super::{Outcome, open};
use crate::args::{Global, Named};
use crate::show;

pub async fn run(global: &Global, args: Named) -> Outcome {
    let info = open(global).await?.find(&args.sandbox)?;
    if global.json {
        show::json(&info);
        return Ok(ExitCode::SUCCESS);
    }
    let number = |pid: Option<u32>| pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let ports: Vec<String> = info.ports.iter().map(|port| format!("{}:{}", port.host, port.guest)).collect();
    show::fields(&[
        ("id", info.id),
        ("name", info.name),
        ("state", info.state.to_string()),
        ("reason", text(&info.reason)),
        ("image", format!("{} ({})", info.image, info.image_digest)),
        ("snapshot", text(&info.snapshot)),
        ("arch", info.arch),
        ("accelerator", text(&info.accelerator)),
        ("qemu version", text(&info.qemu_version)),
        ("qemu pid", number(info.qemu_pid)),
        ("keeper pid", number(info.keeper_pid)),
        ("memory", show::bytes(info.memory_bytes)),
        ("cpus", info.cpus.to_string()),
        ("disk", show::bytes(info.disk_bytes)),
        ("network", format!("{:?}", info.network).to_lowercase()),
        ("ports", ports.join(" ")),
        ("memory mode", text(&info.memory_mode)),
        ("memory dir", info.memory_dir.map_or_else(|| "-".into(), |dir| dir.display().to_string())),
        ("auto checkpoints", info.auto_checkpoint.map_or_else(|| "-".into(), |count| count.to_string())),
        ("cpu model", text(&info.cpu)),
        ("saved on stop as", text(&info.save_on_stop)),
        ("not saved", text(&info.save_failed)),
        ("degraded", if info.degraded.is_empty() { "-".into() } else { info.degraded.join("; ") }),
        ("created", info.created_at),
    ]);
    Ok(ExitCode::SUCCESS)
}
