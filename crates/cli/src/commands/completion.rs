//! `sandtree completion`: completions for a shell.

use std::process::ExitCode;

use clap::CommandFactory;

use super::Outcome;
use crate::args::Args;

pub fn run(shell: clap_complete::Shell) -> Outcome {
    clap_complete::generate(shell, &mut Args::command(), "sandtree", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}
