//! `sandtree ps`: the sandboxes of this store.

use std::process::ExitCode;

use sandtree::SandboxInfo;

use super::{Outcome, open};
use crate::args::Global;
use crate::{failure, show};

#[derive(Debug, clap::Args)]
pub struct PsArgs {
    /// Include sandboxes that are not running
    #[arg(short, long)]
    pub all: bool,
}

pub async fn run(global: &Global, args: PsArgs) -> Outcome {
    let (found, broken) = open(global).await?.list()?;
    let shown: Vec<SandboxInfo> = found
        .into_iter()
        .filter(|info| args.all || info.is_running())
        .collect();
    broken
        .iter()
        .for_each(|error| failure::show(&error.report(), global.json));
    if global.json {
        show::json(&shown);
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = shown.into_iter().map(row).collect();
    show::table(
        &[
            "NAME", "ID", "IMAGE", "STATE", "MEMORY", "CPUS", "CREATED", "PORTS",
        ],
        &rows,
    );
    Ok(ExitCode::SUCCESS)
}

fn row(info: SandboxInfo) -> Vec<String> {
    let state = match info.further_reason() {
        Some(reason) if !info.is_running() => {
            format!(
                "{} ({})",
                info.state,
                reason.lines().next().unwrap_or_default()
            )
        }
        _ => info.state.to_string(),
    };
    let ports: Vec<String> = info
        .ports
        .iter()
        .map(|port| format!("{}:{}", port.host, port.guest))
        .collect();
    let memory = show::bytes(info.memory_bytes);
    vec![
        info.name,
        info.id,
        info.image,
        state,
        memory,
        info.cpus.to_string(),
        info.created_at,
        ports.join(" "),
    ]
}
