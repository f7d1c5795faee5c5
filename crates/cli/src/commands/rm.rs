//! `sandtree rm`: removes sandboxes.

use std::process::ExitCode;

use sandtree::{Error, Host, Result, Verb};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct RmArgs {
    /// Also remove running sandboxes
    #[arg(short, long)]
    pub force: bool,
    /// Names or ids of sandboxes
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandboxes: Vec<String>,
}

pub async fn run(global: &Global, args: RmArgs) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        remove(&host, sandbox, args.force).await?;
        if global.json {
            show::json(&json!({ "removed": sandbox }))
        } else {
            show::line(sandbox)
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn remove(host: &Host, reference: &str, force: bool) -> Result<()> {
    let sandbox = host.sandbox(reference)?;
    let info = sandbox.info()?;
    if info.is_running() && !force {
        return Err(Error::WrongState {
            name: info.name,
            phase: info.state,
            reason: info.reason,
            verb: Verb::Remove,
        });
    }
    sandbox.remove().await
}
