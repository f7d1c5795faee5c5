//! `sandtree exec`: a command in a running sandbox.

use std::ffi::OsString;
use std::process::ExitCode;

use sandtree::Lifetime;
use serde_json::json;

use super::session::{self, How};
use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct ExecArgs {
    #[command(flatten)]
    pub how: How,
    /// Run the command in the background and print its id
    #[arg(short, long, conflicts_with = "tty")]
    pub detach: bool,
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

pub async fn run(global: &Global, args: ExecArgs) -> Outcome {
    let mut spec = session::spec(args.how, args.command)?;
    let guest = open(global).await?.sandbox(&args.sandbox)?.guest().await?;
    if !args.detach {
        return session::run(&guest, spec, global.json).await;
    }
    spec.lifetime = Lifetime::Detached;
    let exec = guest.exec(spec).await?;
    if global.json {
        show::json(&json!({ "id": exec.id().to_string(), "pid": exec.pid() }));
    } else {
        show::line(&exec.id().to_string());
    }
    Ok(ExitCode::SUCCESS)
}
