//! `sandtree gc` and `sandtree df`: remove unused files, and show disk usage.

use std::process::ExitCode;

use super::{Outcome, open};
use crate::args::Global;
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// Only show what would be removed
    #[arg(long)]
    pub dry_run: bool,
}

pub async fn run(global: &Global, args: GcArgs) -> Outcome {
    let host = open(global).await?;
    let spinner = progress::spinner("looking for what nothing uses");
    let report = host.gc(args.dry_run).await;
    spinner.finish_and_clear();
    let report = report?;
    if global.json {
        show::json(&report);
        return Ok(ExitCode::SUCCESS);
    }
    for garbage in &report.removed {
        show::line(&format!(
            "{}  {}  {}",
            garbage.kind,
            garbage.id,
            show::bytes(garbage.bytes)
        ));
    }
    show::notes(&report.held_back.clone().into_iter().collect::<Vec<_>>());
    let done = if args.dry_run {
        "would be freed"
    } else {
        "freed"
    };
    show::line(&format!("{} {done}", show::bytes(report.bytes)));
    Ok(ExitCode::SUCCESS)
}

pub async fn usage(global: &Global) -> Outcome {
    let host = open(global).await?;
    let spinner = progress::spinner("measuring the store");
    let usage = host.usage().await;
    spinner.finish_and_clear();
    let usage = usage?;
    if global.json {
        show::json(&usage);
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = usage
        .kinds
        .iter()
        .map(|kind| {
            vec![
                kind.kind.to_string(),
                kind.count.to_string(),
                show::bytes(kind.bytes),
                show::bytes(kind.reclaimable_bytes),
            ]
        })
        .collect();
    show::table(&["WHAT", "COUNT", "SIZE", "RECLAIMABLE"], &rows);
    Ok(ExitCode::SUCCESS)
}
