//! `sandtree display` and `sandtree clipboard`: the size of a sandbox's screen, and its clipboard.

use std::io::Write;
use std::process::ExitCode;

use sandtree::{DisplaySize, Error};
use serde_json::json;

use super::input::read_stdin;
use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct DisplayArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Change the size of the screen
    #[arg(long, value_name = "WIDTHxHEIGHT")]
    pub size: Option<DisplaySize>,
}

#[derive(Debug, clap::Args)]
pub struct ClipboardArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    #[command(subcommand)]
    pub action: Action,
}

#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// Print the text of the clipboard
    Get,
    /// Put a text into the clipboard
    Set {
        /// The text; - reads standard input
        #[arg(allow_hyphen_values = true, default_value = "-")]
        text: String,
    },
}

pub async fn run(global: &Global, args: DisplayArgs) -> Outcome {
    let display = open(global).await?.sandbox(&args.sandbox)?.display()?;
    if let Some(size) = args.size {
        display.set_size(size).await?;
    }
    let info = display.info().await?;
    if global.json {
        show::json(&info);
    } else {
        show::fields(&[
            ("size", format!("{}x{}", info.width, info.height)),
            ("pointer", format!("{},{}", info.x, info.y)),
            ("ready", if info.ready { "yes" } else { "no" }.into()),
        ]);
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn clipboard(global: &Global, args: ClipboardArgs) -> Outcome {
    let display = open(global).await?.sandbox(&args.sandbox)?.display()?;
    match args.action {
        Action::Get => {
            let text = display.clipboard().await?;
            if global.json {
                show::json(&json!({ "text": text }));
            } else {
                // As it is, without a line break of ours: it may be piped on.
                let mut stdout = std::io::stdout().lock();
                let written = stdout.write_all(text.unwrap_or_default().as_bytes());
                written
                    .and_then(|()| stdout.flush())
                    .map_err(|e| Error::io("write", "standard output", e))?;
            }
        }
        Action::Set { text } => {
            let text = if text == "-" { read_stdin()? } else { text };
            display.set_clipboard(&text).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
