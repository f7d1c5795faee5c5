//! `sandtree pull`: an image or a snapshot from a registry.

use std::process::ExitCode;

use sandtree::{PullSpec, PulledKind};

use super::{Outcome, open, registry};
use crate::args::{Global, Made};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct PullArgs {
    /// HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]
    #[arg(value_name = "REFERENCE")]
    pub reference: String,
    /// Local name [default: the last part of the repository, with the tag unless it is latest]
    #[arg(long)]
    pub name: Option<String>,
    /// Move the name from the snapshot that has it
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub access: registry::Access,
    #[command(flatten)]
    pub made: Made,
}

pub async fn run(global: &Global, args: PullArgs) -> Outcome {
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
