//! `sandtree push`: an image or a snapshot to a registry.

use std::process::ExitCode;

use super::{Outcome, open, registry};
use crate::args::Global;
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct PushArgs {
    /// Name or digest of an image or a snapshot
    #[arg(value_name = "IMAGE|SNAPSHOT")]
    pub what: String,
    /// HOST[:PORT]/REPOSITORY[:TAG]
    #[arg(value_name = "REFERENCE")]
    pub reference: String,
    #[command(flatten)]
    pub access: registry::Access,
}

pub async fn run(global: &Global, args: PushArgs) -> Outcome {
    let access = registry::access(&args.access).await?;
    let host = open(global).await?;
    let told = progress::stages(format!("pushing {}", args.what));
    let pushed = host.push(&args.what, &args.reference, access, told).await?;
    if global.json {
        show::json(&pushed);
        return Ok(ExitCode::SUCCESS);
    }
    let sent = show::bytes(pushed.sent_bytes);
    let total = show::bytes(pushed.total_bytes);
    show::line(&format!(
        "{}  {}  {sent} of {total} sent",
        pushed.reference, pushed.manifest
    ));
    Ok(ExitCode::SUCCESS)
}
