//! `sandtree inspect`: everything that is known about a sandbox.

use std::process::ExitCode;

use sandtree::{Durability, SandboxInfo, StateInfo};
use serde::Serialize;

use super::{Outcome, mount, open};
use crate::args::{Global, sandbox_ref};
use crate::{failure, show};

#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
}

#[derive(Serialize)]
struct Inspected {
    #[serde(flatten)]
    info: SandboxInfo,
    /// States that a power loss of the host would destroy.
    not_durable: Vec<NotDurable>,
}

#[derive(Serialize)]
struct NotDurable {
    id: String,
    tag: Option<String>,
    durability: Durability,
}

impl NotDurable {
    fn new(state: StateInfo) -> Option<Self> {
        let StateInfo {
            id,
            tag,
            durability,
            ..
        } = state;
        (durability != Durability::Durable).then_some(Self {
            id,
            tag,
            durability,
        })
    }

    fn describe(&self) -> String {
        let name = self.tag.as_ref().unwrap_or(&self.id);
        match self.durability {
            Durability::Failed => {
                format!("{name} (its files could not be synced; take another state)")
            }
            Durability::Durable | Durability::NotYet => format!("{name} (not written out yet)"),
        }
    }
}

pub async fn run(global: &Global, args: InspectArgs) -> Outcome {
    let host = open(global).await?;
    let mut info = host.find(&args.sandbox)?;
    if !info.mounts.is_empty() {
        info.mounts = host.sandbox(&info.id)?.mounts().await?;
    }
    let (states, broken) = host.states(&info.id)?;
    broken
        .iter()
        .for_each(|error| failure::show(&error.report(), global.json));
    let not_durable = states.into_iter().filter_map(NotDurable::new).collect();
    let inspected = Inspected { info, not_durable };
    if global.json {
        show::json(&inspected);
        return Ok(ExitCode::SUCCESS);
    }
    show::fields(&fields(inspected));
    Ok(ExitCode::SUCCESS)
}

fn fields(inspected: Inspected) -> Vec<(&'static str, String)> {
    let Inspected { info, not_durable } = inspected;
    let doubts: Vec<String> = not_durable.iter().map(NotDurable::describe).collect();
    let degraded = show::joined(&info.degraded);
    let unless_empty = |text: String| if text.is_empty() { "-".into() } else { text };
    let number = |pid: Option<u32>| pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let ports: Vec<String> = info
        .ports
        .iter()
        .map(|port| format!("{}:{}", port.host, port.guest))
        .collect();
    let mounts: Vec<String> = info.mounts.iter().map(mount::describe).collect();
    vec![
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
        ("mounts", unless_empty(mounts.join("\n"))),
        ("memory mode", text(&info.memory_mode)),
        (
            "memory dir",
            info.memory_dir
                .map_or_else(|| "-".into(), |dir| dir.display().to_string()),
        ),
        (
            "auto checkpoints",
            info.auto_checkpoint
                .map_or_else(|| "-".into(), |count| count.to_string()),
        ),
        ("durable", if info.durable { "yes" } else { "no" }.into()),
        ("cpu model", text(&info.cpu)),
        (
            "display",
            info.display
                .map_or_else(|| "-".into(), |size| size.to_string()),
        ),
        ("saved on stop as", text(&info.save_on_stop)),
        ("not saved", text(&info.save_failed)),
        ("degraded", unless_empty(degraded)),
        ("not durable", unless_empty(doubts.join("; "))),
        ("created", info.created_at),
    ]
}
