//! `sandtree resume`: a paused sandbox goes on.

use std::process::ExitCode;

use sandtree::keeper::{Order, Task, Way};
use sandtree::{Error, Host, RestoreReport, Result};
use serde_json::json;

use super::{Outcome, config, keeper, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandboxes: Vec<String>,
}

pub async fn run(global: &Global, args: ResumeArgs) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        let resumed = resume(global, &host, sandbox).await?;
        if global.json {
            show::json(&json!({ "sandbox": sandbox, "resumed": resumed }));
            continue;
        }
        show::restore_notes(&resumed);
        let (running, ready) = (
            show::ms(resumed.running_ms),
            show::ms(resumed.acknowledged_ms),
        );
        show::line(&format!(
            "{sandbox}  running after {running}, ready after {ready}"
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// The keeper may have stayed, for clients that wait.
async fn resume(global: &Global, host: &Host, sandbox: &str) -> Result<RestoreReport> {
    if let Some(keeper) = host.keeper_of(sandbox).await? {
        let spinner = progress::spinner(format!("resuming {sandbox}"));
        let resumed = keeper.resume().await;
        spinner.finish_and_clear();
        return resumed;
    }
    let order = Order {
        config: config(global)?,
        task: Task::Resume {
            reference: sandbox.to_owned(),
        },
    };
    let (lease, ready) = keeper::start(&order, &format!("resuming {sandbox}")).await?;
    lease.release().await?;
    match ready.way {
        Way::Resumed(resumed) => Ok(resumed),
        _ => Err(Error::invalid(
            "a keeper's answer",
            "",
            "what came of a resume",
        )),
    }
}
