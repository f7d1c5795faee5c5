//! `sandtree revert`, `undo` and `redo`: to another state.

use std::process::ExitCode;

use sandtree::keeper::{Order, Task, Way};
use sandtree::{Error, Goal, Result, Reverted};

use super::{Outcome, config, keeper, open};
use crate::args::Global;
use crate::{progress, show};

pub async fn run(global: &Global, sandbox: &str, goal: Goal) -> Outcome {
    let reverted = go_to(global, sandbox, goal).await?;
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

/// Through the sandbox's keeper; one that rests gets a keeper for it.
async fn go_to(global: &Global, sandbox: &str, goal: Goal) -> Result<Reverted> {
    let host = open(global).await?;
    if let Some(keeper) = host.keeper_of(sandbox).await? {
        let spinner = progress::spinner(format!("reverting {sandbox}"));
        let reverted = keeper.go_to(goal).await;
        spinner.finish_and_clear();
        return reverted;
    }
    let order = Order {
        config: config(global)?,
        task: Task::GoTo {
            reference: sandbox.to_owned(),
            goal,
        },
    };
    let (lease, ready) = keeper::start(&order, &format!("reverting {sandbox}")).await?;
    lease.release().await?;
    match ready.way {
        Way::Reverted(reverted) => Ok(reverted),
        _ => Err(Error::invalid(
            "a keeper's answer",
            "",
            "what came of a revert",
        )),
    }
}
