//! `sandtree changes` and `apply`: what a sandbox changed on top of a directory of the host.

use std::process::ExitCode;

use sandtree::{ApplyOptions, ChangeKind, MountChange, MountChanges};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct ChangesArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Path of a copy-on-write mount in the guest
    #[arg(value_name = "GUEST")]
    pub path: String,
    /// Show the changed lines, as `diff -u` does
    #[arg(long)]
    pub patch: bool,
}

#[derive(Debug, clap::Args)]
pub struct ApplyArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Path of a copy-on-write mount in the guest
    #[arg(value_name = "GUEST")]
    pub path: String,
    /// Show what would be written, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Overwrite files that changed on the host since
    #[arg(long)]
    pub force: bool,
}

pub async fn run(global: &Global, args: ChangesArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let spinner = progress::spinner(format!("reading the changes of {}", args.sandbox));
    if args.patch {
        let patch = sandbox.patch(&args.path).await;
        spinner.finish_and_clear();
        let patch = patch?;
        if global.json {
            show::json(&json!({ "patch": patch }));
        } else {
            patch.lines().for_each(show::line);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let changes = sandbox.changes(&args.path).await;
    spinner.finish_and_clear();
    print(global, &changes?);
    Ok(ExitCode::SUCCESS)
}

pub async fn apply(global: &Global, args: ApplyArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let options = ApplyOptions {
        dry_run: args.dry_run,
        force: args.force,
    };
    let spinner = progress::spinner(format!("applying the changes of {}", args.sandbox));
    let applied = sandbox.apply(&args.path, options).await;
    spinner.finish_and_clear();
    print(global, &applied?);
    Ok(ExitCode::SUCCESS)
}

fn print(global: &Global, changes: &MountChanges) {
    if global.json {
        return show::json(changes);
    }
    for change in &changes.changes {
        show::line(&line(change));
    }
    let left_out = changes.left_out.iter();
    let left_out = left_out.map(|path| format!("left out: {path} is not a file or a directory"));
    show::notes(&left_out.collect::<Vec<_>>());
}

/// `A`, `D` or `M`, and the path.
fn line(change: &MountChange) -> String {
    let letter = match change.change {
        ChangeKind::Added => "A",
        ChangeKind::Removed => "D",
        ChangeKind::Changed => "M",
    };
    match &change.conflict {
        None => format!("{letter}  {}", change.path),
        Some(reason) => format!("{letter}  {}  conflict: {reason}", change.path),
    }
}
