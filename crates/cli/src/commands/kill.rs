//! `sandtree kill`: ends machines at once.

use std::process::ExitCode;

use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct KillArgs {
    /// Names or ids of sandboxes
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandboxes: Vec<String>,
}

pub async fn run(global: &Global, args: KillArgs) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        host.sandbox(sandbox)?.kill().await?;
        if global.json {
            show::json(&json!({ "killed": sandbox }))
        } else {
            show::line(sandbox)
        }
    }
    Ok(ExitCode::SUCCESS)
}
