//! `sandtree completion`: completions for a shell.

use std::process::ExitCode;

use clap::CommandFactory;

use super::Outcome;
use crate::args::Args;
use crate::show;

pub fn run(shell: clap_complete::Shell) -> Outcome {
    // Into memory first: the generator panics over a reader that leaves.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "sandtree", &mut script);
    show::line(String::from_utf8_lossy(&script).trim_end());
    Ok(ExitCode::SUCCESS)
}
