//! `sandtree stop`: shuts sandboxes down.

use std::process::ExitCode;
use std::time::Duration;

use sandtree::Verb;

use super::{Outcome, open};
use crate::args::{Global, duration, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// What the guest's processes get to end by themselves [default: 10s, or 90s where the image's
    /// own init ends them]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub grace: Option<Duration>,
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandboxes: Vec<String>,
}

pub async fn run(global: &Global, args: StopArgs) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        let client = host.client_for(sandbox, Verb::Stop)?;
        let spinner = progress::spinner(format!("stopping {sandbox}"));
        client.stop(args.grace).await?;
        spinner.finish_and_clear();
        if global.json {
            show::json(&host.find(sandbox).ok())
        } else {
            show::line(sandbox)
        }
    }
    Ok(ExitCode::SUCCESS)
}
