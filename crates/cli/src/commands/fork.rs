//! `sandtree fork`: makes running copies of a sandbox, all or none.

use std::process::ExitCode;

use sandtree::{ForkMounts, ForkSpec, SandboxInfo};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct ForkArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Number of copies
    #[arg(short, value_name = "N", default_value_t = 1)]
    pub n: usize,
    /// Prefix of the names: NAME-1, NAME-2 and so on [default: the name of the source]
    #[arg(long)]
    pub name: Option<String>,
    /// Number of copies to load at the same time [default: twice the number of processors]
    #[arg(long, value_name = "N")]
    pub concurrency: Option<usize>,
    /// What the copies may do with mounted directories of the host: read them, or also write to
    /// them like the source
    #[arg(long, value_name = "read-only|shared", default_value = "read-only", value_parser = mounts)]
    pub mounts: ForkMounts,
}

fn mounts(text: &str) -> Result<ForkMounts, String> {
    match text {
        "read-only" => Ok(ForkMounts::ReadOnly),
        "shared" => Ok(ForkMounts::Shared),
        _ => Err("use read-only or shared".into()),
    }
}

pub async fn run(global: &Global, args: ForkArgs) -> Outcome {
    let all = ForkSpec::new(args.n);
    let spec = ForkSpec {
        name: args.name,
        concurrency: args.concurrency.unwrap_or(all.concurrency),
        mounts: args.mounts,
        ..all
    };
    spec.check()?;
    let source = open(global).await?.sandbox(&args.sandbox)?;
    let spinner = progress::spinner(format!("forking {}", args.sandbox));
    let forked = source.fork(spec).await;
    spinner.finish_and_clear();
    let (forks, report) = forked?;
    let forks: Vec<SandboxInfo> = forks
        .iter()
        .map(|fork| fork.info())
        .collect::<sandtree::Result<_>>()?;
    if global.json {
        let forks: Vec<_> = forks
            .iter()
            .map(
                |f| json!({ "id": f.id, "name": f.name, "ports": f.ports, "degraded": f.degraded }),
            )
            .collect();
        show::json(&json!({
            "forks": forks,
            "pause_ms": report.pause_ms,
            "total_ms": report.total_ms,
            "degraded": report.degraded,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    show::degradations(&report.degraded);
    for fork in &forks {
        show::degradations(&fork.degraded);
        let ports: Vec<String> = fork
            .ports
            .iter()
            .map(|port| format!("  {}:{}", port.host, port.guest))
            .collect();
        show::line(&format!("{}  {}{}", fork.name, fork.id, ports.concat()));
    }
    Ok(ExitCode::SUCCESS)
}
