//! `sandtree stop`: shuts sandboxes down.

use std::process::ExitCode;

use sandtree::Verb;

use super::{Outcome, open};
use crate::args::{Global, Stop};
use crate::{progress, show};

pub async fn run(global: &Global, args: Stop) -> Outcome {
    let host = open(global).await?;
    for sandbox in &args.sandboxes {
        let client = host.client_for(sandbox, Verb::Stop)?;
        let spinner = progress::spinner(format!("stopping {sandbox}"));
        client.stop(args.grace).await?;
        spinner.finish_and_clear();
        if global.json {
            show::json(&host.find(sandbox).ok())
        } else {
            show::line(sandbox)
        }
    }
    Ok(ExitCode::SUCCESS)
}
