//! `sandtree exec`: a command in a running sandbox.

use std::process::ExitCode;

use sandtree::Lifetime;
use serde_json::json;

use super::{Outcome, open, session};
use crate::args::{Exec, Global};
use crate::show;

pub async fn run(global: &Global, args: Exec) -> Outcome {
    let mut spec = session::spec(args.how, args.command)?;
    let guest = open(global).await?.client(&args.sandbox)?.guest().await?;
    if !args.detach {
        return session::run(&guest, spec, global.json).await;
    }
    spec.lifetime = Lifetime::Detached;
    let exec = guest.exec(spec).await?;
    if global.json {
        show::json(&json!({ "id": exec.id().to_string(), "pid": exec.pid() }));
    } else {
        show::line(&exec.id().to_string());
    }
    Ok(ExitCode::SUCCESS)
}
