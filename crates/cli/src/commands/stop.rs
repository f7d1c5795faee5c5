//! `sandtree stop`: shuts sandboxes down.

use std::process::ExitCode;
use std::time::Duration;

use super::{Outcome, open};
use crate::args::{Global, duration, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// Time for the guest's processes to exit before they are killed [default: 10s, or 90s with the
    /// image's own init]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub grace: Option<Duration>,
    /// Names or ids of sandboxes
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandboxes: Vec<String>,
}

pub async fn run(global: &Global, args: StopArgs) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        let stopping = host.sandbox(sandbox)?;
        let spinner = progress::spinner(format!("stopping {sandbox}"));
        let stopped = stopping.stop(args.grace).await;
        spinner.finish_and_clear();
        stopped?;
        if global.json {
            show::json(&host.find(sandbox).ok())
        } else {
            show::line(sandbox)
        }
    }
    Ok(ExitCode::SUCCESS)
}
