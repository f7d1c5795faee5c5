//! `sandtree checkpoint`: takes a state, or removes states.

use std::process::ExitCode;

use sandtree::{Forget, Replace, Verb};

use super::{Outcome, open};
use crate::args::{Checkpoint, CheckpointCommand, Global};
use crate::{progress, show};

pub async fn run(global: &Global, args: Checkpoint) -> Outcome {
    match (args.what, args.sandbox) {
        (
            Some(CheckpointCommand::Rm {
                sandbox,
                tags,
                all,
                keep,
            }),
            _,
        ) => {
            let which = match (all, keep) {
                (true, _) => Forget::All,
                (_, Some(keep)) => Forget::AllBut(keep),
                _ => Forget::These(tags),
            };
            remove(global, &sandbox, which).await
        }
        (None, Some(sandbox)) => take(global, &sandbox, args.tag, args.force).await,
        (None, None) => unreachable!("the command line asks for one of them"),
    }
}

async fn take(global: &Global, sandbox: &str, tag: Option<String>, force: bool) -> Outcome {
    let client = open(global).await?.client_for(sandbox, Verb::Checkpoint)?;
    let spinner = progress::spinner(format!("checkpointing {sandbox}"));
    let taken = client.checkpoint(tag, Replace::from(force)).await;
    spinner.finish_and_clear();
    let taken = taken?;
    if global.json {
        show::json(&taken);
        return Ok(ExitCode::SUCCESS);
    }
    show::notes(&taken.degraded);
    show::line(&format!(
        "{}  {}  pause {}  total {}  memory {}  disk {}",
        taken.tag.as_deref().unwrap_or("-"),
        taken.id,
        show::ms(taken.pause_ms),
        show::ms(taken.total_ms),
        show::bytes(taken.memory_bytes),
        show::bytes(taken.disk_bytes),
    ));
    Ok(ExitCode::SUCCESS)
}

async fn remove(global: &Global, sandbox: &str, which: Forget) -> Outcome {
    let host = open(global).await?;
    let forgotten = match host.keeper_of(sandbox).await? {
        Some(keeper) => keeper.forget(which).await?,
        None => host.forget(sandbox, which).await?,
    };
    if global.json {
        show::json(&forgotten);
    } else {
        let (count, freed) = (forgotten.states.len(), show::bytes(forgotten.freed_bytes));
        show::line(&format!(
            "removed {count} {}, {freed} freed",
            if count == 1 { "state" } else { "states" }
        ));
    }
    Ok(ExitCode::SUCCESS)
}
