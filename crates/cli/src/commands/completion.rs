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
    // The generator panics if the reader of a pipe exits, so it writes to memory first.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "sandtree", &mut script);
    show::line(String::from_utf8_lossy(&script).trim_end());
    Ok(ExitCode::SUCCESS)
}
