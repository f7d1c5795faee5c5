//! `sandtree rm`: removes sandboxes.

use std::process::ExitCode;

use sandtree::{Error, Host, Result, Verb};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct RmArgs {
    /// Also if it runs
    #[arg(short, long)]
    pub force: bool,
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

async fn remove(host: &Host, sandbox: &str, force: bool) -> Result<()> {
    let info = host.find(sandbox)?;
    match (info.is_running(), force) {
        (true, true) => host.client(sandbox)?.remove().await,
        (true, false) => {
            let (name, phase, reason) = (info.name, info.state, info.reason);
            Err(Error::WrongState {
                name,
                phase,
                reason,
                verb: Verb::Remove,
            })
        }
        // One that is paused may have a keeper still.
        (false, _) => match host.keeper_of(sandbox).await? {
            Some(keeper) => keeper.remove().await,
            None => host.remove(sandbox).await,
        },
    }
}
