//! `sandtree watch`: prints each change of a sandbox's state.

use std::process::ExitCode;

use sandtree::State;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct WatchArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
}

pub async fn run(global: &Global, args: WatchArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let mut watch = sandbox.watch().await?;
    show_state(global, watch.now());
    while watch.now().phase.is_some() {
        match watch.changed().await {
            Some(state) => show_state(global, &state),
            None => break,
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn show_state(global: &Global, state: &State) {
    if global.json {
        return show::json(state);
    }
    let phase = state
        .phase
        .map_or_else(|| "removed".into(), |phase| phase.to_string());
    match &state.reason {
        Some(reason) if state.phase.is_some() => show::line(&format!("{phase}: {reason}")),
        _ => show::line(&phase),
    }
}
