//! `sandtree view`: a sandbox's screen for VNC clients.

use std::process::ExitCode;

use sandtree::{Error, Viewers};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct ViewArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Port on 127.0.0.1 [default: a free one]
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub port: u16,
}

pub async fn run(global: &Global, args: ViewArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let listener = sandbox
        .display()?
        .listen(args.port, Viewers::WithPassword)
        .await?;
    let address = listener.address();
    let password = listener.password().unwrap_or_default();
    if global.json {
        show::json(&json!({ "address": address, "password": password }));
    } else {
        show::line(&format!("vnc://{address}  password {password}"));
        show::notes(&["any VNC client can connect until Ctrl-C or the sandbox's end".into()]);
    }
    let mut watch = sandbox.watch().await?;
    let over = async { while watch.changed().await.is_some_and(|state| !state.is_over()) {} };
    let refused = |error: &Error| {
        let reason = error.report().one_line();
        show::notes(&[format!("a viewer was refused: {reason}")]);
    };
    listener.serve_until(over, refused).await;
    Ok(ExitCode::SUCCESS)
}
