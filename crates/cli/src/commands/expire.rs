//! `sandtree expire`: sets when a running sandbox expires.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, duration, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct ExpireArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Time from now, or `never`
    #[arg(value_name = "TIME|never", value_parser = after)]
    pub after: After,
}

/// When a sandbox expires.
#[derive(Debug, Clone, Copy)]
pub enum After {
    Never,
    Time(Duration),
}

fn after(text: &str) -> Result<After, String> {
    match text {
        "never" => Ok(After::Never),
        text => duration(text).map(After::Time),
    }
}

pub async fn run(global: &Global, args: ExpireArgs) -> Outcome {
    let host = open(global).await?;
    let sandbox = host.sandbox(&args.sandbox)?;
    let after = match args.after {
        After::Never => None,
        After::Time(after) => Some(after),
    };
    sandbox.expire(after).await?;
    let expires_at = sandbox.info()?.expires_at;
    if global.json {
        show::json(&json!({ "sandbox": args.sandbox, "expires_at": expires_at }));
        return Ok(ExitCode::SUCCESS);
    }
    let when = expires_at.map_or_else(|| "never".to_owned(), |at| format!("at {at}"));
    show::line(&format!("{}  expires {when}", args.sandbox));
    Ok(ExitCode::SUCCESS)
}
