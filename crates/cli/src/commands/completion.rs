//! `sandtree completion`: completions for a shell.

use std::process::ExitCode;

use clap::CommandFactory;

use super::{Args, Outcome};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct CompletionArgs {
    shell: clap_complete::Shell,
}

pub fn run(args: CompletionArgs) -> Outcome {
    // Into memory first: the generator panics over a reader that leaves.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "sandtree", &mut script);
    show::line(String::from_utf8_lossy(&script).trim_end());
    Ok(ExitCode::SUCCESS)
}
