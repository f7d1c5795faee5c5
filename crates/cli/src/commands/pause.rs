//! `sandtree pause`: writes sandboxes to disk, with memory and processes.

use std::process::ExitCode;

use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// Names or ids of sandboxes
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandboxes: Vec<String>,
}

pub async fn run(global: &Global, args: PauseArgs) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        let pausing = host.sandbox(sandbox)?;
        let spinner = progress::spinner(format!("pausing {sandbox}"));
        let paused = pausing.pause().await;
        spinner.finish_and_clear();
        let paused = paused?;
        if global.json {
            show::json(&json!({ "sandbox": sandbox, "paused": paused }));
            continue;
        }
        show::degradations(&paused.degraded);
        let memory = show::bytes(paused.memory_bytes);
        let disk = show::bytes(paused.disk_bytes);
        show::line(&format!(
            "{sandbox}  paused in {}  memory {memory}  disk {disk}",
            show::ms(paused.total_ms)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
