//! `sandtree checkpoint`: takes a state, or removes states.

use std::process::ExitCode;

use sandtree::{Forget, Replace};

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct CheckpointArgs {
    #[command(subcommand)]
    pub what: Option<CheckpointCommand>,
    /// Name or id of the sandbox
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandbox: Option<String>,
    /// Tag of the checkpoint [default: c1, c2 and so on]
    pub tag: Option<String>,
    /// Replace the checkpoint that has this tag, once the new one is complete
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Subcommand)]
pub enum CheckpointCommand {
    /// Remove states; other states stay unchanged
    #[command(group = clap::ArgGroup::new("which").required(true))]
    Rm {
        /// Name or id of the sandbox
        #[arg(value_parser = sandbox_ref)]
        sandbox: String,
        /// Tags or ids of states
        #[arg(group = "which", value_name = "TAG")]
        tags: Vec<String>,
        /// Remove all states
        #[arg(long, group = "which")]
        all: bool,
        /// Remove all checkpoints except the newest N
        #[arg(long, group = "which", value_name = "N")]
        keep: Option<usize>,
    },
}

pub async fn run(global: &Global, args: CheckpointArgs) -> Outcome {
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
    let source = open(global).await?.sandbox(sandbox)?;
    let spinner = progress::spinner(format!("checkpointing {sandbox}"));
    let taken = source
        .checkpoint(tag.as_deref(), Replace::from(force))
        .await;
    spinner.finish_and_clear();
    let taken = taken?;
    if global.json {
        show::json(&taken);
        return Ok(ExitCode::SUCCESS);
    }
    show::degradations(&taken.degraded);
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
    let sandbox = open(global).await?.sandbox(sandbox)?;
    let forgotten = sandbox.forget(which).await?;
    if global.json {
        show::json(&forgotten);
    } else {
        let count = forgotten.states.len();
        let freed = show::bytes(forgotten.freed_bytes);
        show::line(&format!(
            "removed {count} {}, {freed} freed",
            if count == 1 { "state" } else { "states" }
        ));
    }
    Ok(ExitCode::SUCCESS)
}
