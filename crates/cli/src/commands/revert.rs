//! `sandtree revert`, `undo` and `redo`: return to another state.

use std::process::ExitCode;

use sandtree::Goal;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct RevertArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Tag of a checkpoint, or the id of a state from `sandtree log`
    pub tag: String,
}

#[derive(Debug, clap::Args)]
pub struct UndoArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Number of states to go back
    #[arg(short, value_name = "N", default_value_t = 1)]
    pub n: usize,
}

#[derive(Debug, clap::Args)]
pub struct RedoArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
}

pub async fn run(global: &Global, args: RevertArgs) -> Outcome {
    revert(global, &args.sandbox, Goal::State(args.tag)).await
}

pub async fn undo(global: &Global, args: UndoArgs) -> Outcome {
    revert(global, &args.sandbox, Goal::Undo { steps: args.n }).await
}

pub async fn redo(global: &Global, args: RedoArgs) -> Outcome {
    revert(global, &args.sandbox, Goal::Redo).await
}

async fn revert(global: &Global, sandbox: &str, goal: Goal) -> Outcome {
    let reverting = open(global).await?.sandbox(sandbox)?;
    let spinner = progress::spinner(format!("reverting {sandbox}"));
    let reverted = reverting.go_to(goal).await;
    spinner.finish_and_clear();
    let reverted = reverted?;
    if global.json {
        show::json(&reverted);
        return Ok(ExitCode::SUCCESS);
    }
    show::restore_notes(&reverted.restore);
    if let Some(reason) = &reverted.dropped {
        show::notes(&[format!("what was left could not be kept: {reason}")]);
    }
    let left = reverted
        .left
        .map_or_else(String::new, |left| format!("  left {left}"));
    let to = reverted.tag.unwrap_or(reverted.id);
    show::line(&format!(
        "{to}  running after {}, ready after {}  total {}{left}",
        show::ms(reverted.restore.running_ms),
        show::ms(reverted.restore.acknowledged_ms),
        show::ms(reverted.restore.total_ms)
    ));
    Ok(ExitCode::SUCCESS)
}
