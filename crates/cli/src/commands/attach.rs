//! `sandtree attach`: attaches to a detached command, or lists them.

use std::process::ExitCode;

use sandtree::Sandbox;

use super::session::{self, OnSignal};
use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct AttachArgs {
    /// Connect standard input to the command
    #[arg(short, long)]
    pub interactive: bool,
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Id of the command, as `exec --detach` prints it; without it, list the detached commands
    pub id: Option<String>,
}

pub async fn run(global: &Global, args: AttachArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    match args.id {
        None => list(global, &sandbox).await,
        Some(id) => {
            let exec = sandbox.attach(id.parse()?).await?;
            // With --interactive, Ctrl-C is for the command. Otherwise it ends the attachment.
            let on_signal = if args.interactive {
                OnSignal::Pass
            } else {
                OnSignal::Leave
            };
            if global.json {
                session::collect(exec, args.interactive).await
            } else {
                session::relay(exec, args.interactive, false, on_signal).await
            }
        }
    }
}

async fn list(global: &Global, sandbox: &Sandbox) -> Outcome {
    let execs = sandbox.execs().await?;
    if global.json {
        show::json(&execs);
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = execs
        .into_iter()
        .map(|exec| {
            let state = exec.ended.unwrap_or_else(|| "running".into());
            vec![
                exec.id,
                state,
                show::bytes(exec.stdout_bytes + exec.stderr_bytes),
                exec.command,
            ]
        })
        .collect();
    show::table(&["ID", "STATE", "OUTPUT", "COMMAND"], &rows);
    Ok(ExitCode::SUCCESS)
}
