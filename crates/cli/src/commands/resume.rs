//! `sandtree resume`: continues paused sandboxes.

use std::process::ExitCode;

use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    /// Names or ids of sandboxes
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandboxes: Vec<String>,
}

pub async fn run(global: &Global, args: ResumeArgs) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        let paused = host.sandbox(sandbox)?;
        let spinner = progress::spinner(format!("resuming {sandbox}"));
        let resumed = paused.resume().await;
        spinner.finish_and_clear();
        let resumed = resumed?;
        if global.json {
            show::json(&json!({ "sandbox": sandbox, "resumed": resumed }));
            continue;
        }
        show::restore_notes(&resumed);
        let running = show::ms(resumed.running_ms);
        let ready = show::ms(resumed.acknowledged_ms);
        show::line(&format!(
            "{sandbox}  running after {running}, ready after {ready}"
        ));
    }
    Ok(ExitCode::SUCCESS)
}
