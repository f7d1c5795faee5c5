//! `sandtree start`: boots a stopped sandbox again.

use std::process::ExitCode;

use sandtree::keeper::{Order, Task};
use serde_json::json;

use super::{Outcome, config, keeper, open};
use crate::args::{Global, Start};
use crate::show;

pub async fn run(global: &Global, args: Start) -> Outcome {
    open(global).await?.find(&args.sandbox)?;
    let task = Task::Start { reference: args.sandbox.clone(), boot_timeout: args.boot_timeout };
    let order = Order { config: config(global)?, task };
    let (lease, ready) = keeper::start(&order, &format!("starting {}", args.sandbox)).await?;
    lease.release().await?;
    if global.json {
        show::json(&json!({ "id": ready.info.id, "name": ready.info.name }))
    } else {
        show::line(&args.sandbox)
    }
    Ok(ExitCode::SUCCESS)
}
