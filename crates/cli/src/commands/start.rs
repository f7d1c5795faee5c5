//! `sandtree start`: boots a stopped sandbox again.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, duration, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct StartArgs {
    /// Time limit for the boot [default: 180s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub boot_timeout: Option<Duration>,
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
}

pub async fn run(global: &Global, args: StartArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let before = sandbox.info()?;
    let spinner = progress::spinner(format!("starting {}", args.sandbox));
    let started = sandbox.start(args.boot_timeout).await;
    spinner.finish_and_clear();
    started?;
    show::degradations(&sandbox.info()?.degraded);
    let notes: Vec<String> = before
        .may_be_torn()
        .then(|| torn(&args.sandbox))
        .into_iter()
        .collect();
    if global.json {
        show::json(&json!({ "id": before.id, "name": before.name, "notes": notes }))
    } else {
        show::notes(&notes);
        show::line(&args.sandbox)
    }
    Ok(ExitCode::SUCCESS)
}

/// A note for the user who starts a sandbox after its host went down.
fn torn(sandbox: &str) -> String {
    format!(
        "the host went down while {sandbox} ran, and what its guest had written may be damaged without a sign of it; \
         `sandtree log {sandbox}` shows states that were written out, and `sandtree revert {sandbox} STATE` goes to one"
    )
}
