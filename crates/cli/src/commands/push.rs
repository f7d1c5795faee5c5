//! `sandtree push`: an image or a snapshot to a registry.

use std::process::ExitCode;

use super::{Outcome, open, registry};
use crate::args::{Global, Push};
use crate::{progress, show};

pub async fn run(global: &Global, args: Push) -> Outcome {
    let access = registry::access(&args.access).await?;
    let host = open(global).await?;
    let told = progress::stages(format!("pushing {}", args.what));
    let pushed = host.push(&args.what, &args.reference, access, told).await?;
    if global.json {
        show::json(&pushed);
        return Ok(ExitCode::SUCCESS);
    }
    let (sent, total) = (
        show::bytes(pushed.sent_bytes),
        show::bytes(pushed.total_bytes),
    );
    show::line(&format!(
        "{}  {}  {sent} of {total} sent",
        pushed.reference, pushed.manifest
    ));
    Ok(ExitCode::SUCCESS)
}
