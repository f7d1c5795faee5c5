//! `sandtree pull`: an image or a snapshot from a registry.

use std::process::ExitCode;

use sandtree::{PullSpec, PulledKind};

use super::{Outcome, open, registry};
use crate::args::{Global, Pull};
use crate::{progress, show};

pub async fn run(global: &Global, args: Pull) -> Outcome {
    let spec = PullSpec {
        name: args.name,
        replace: args.force,
        import: args.made.spec()?,
        access: registry::access(&args.access).await?,
    };
    let host = open(global).await?;
    let pulled = host
        .pull(
            &args.reference,
            &spec,
            progress::stages(format!("pulling {}", args.reference)),
        )
        .await?;
    if global.json {
        show::json(&pulled);
        return Ok(ExitCode::SUCCESS);
    }
    let kind = match pulled.kind {
        PulledKind::Image => "image",
        PulledKind::Snapshot => "snapshot",
    };
    let fetched = show::bytes(pulled.fetched_bytes);
    show::line(&format!(
        "{}  {kind}  {}  {fetched} fetched",
        pulled.name, pulled.digest
    ));
    Ok(ExitCode::SUCCESS)
}
