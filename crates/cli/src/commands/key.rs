//! `sandtree key`: presses keys of a sandbox's keyboard, and manages the keys of the HTTP server.

use std::process::ExitCode;
use std::time::Duration;

use sandtree::{Display, Host, KeyLimits, Scope};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, duration, sandbox_ref, size};
use crate::show;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct KeyArgs {
    #[command(subcommand)]
    pub manage: Option<KeyCommand>,
    /// Name or id of the sandbox
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandbox: Option<String>,
    /// Keys that are pressed together, such as ctrl+l, alt+F4 or enter; several follow each other
    #[arg(required = true, value_name = "KEYS")]
    pub chords: Vec<String>,
    /// Time between press and release, at most 10s
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub hold: Option<Duration>,
}

/// The keys of the HTTP server.
#[derive(Debug, clap::Subcommand)]
pub enum KeyCommand {
    /// Create a key of the HTTP server and print it; it is not shown again
    Create(CreateArgs),
    /// List the keys of the HTTP server
    Ls,
    /// Remove keys of the HTTP server; they are refused from then on
    Rm(RmArgs),
}

#[derive(Debug, clap::Args)]
pub struct CreateArgs {
    /// Name for people
    #[arg(long, default_value = "")]
    pub name: String,
    /// What its holder may do. sandboxes: create and use sandboxes and snapshots; host-files: name
    /// files of the host, as for mounts; registries: push and pull with the host's credentials
    #[arg(
        long,
        value_name = "SCOPES",
        value_delimiter = ',',
        default_value = "sandboxes",
        value_parser = scope
    )]
    pub scope: Vec<Scope>,
    /// Most sandboxes that run at a time
    #[arg(long, value_name = "N")]
    pub max_sandboxes: Option<u32>,
    /// Most memory of all running sandboxes together
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_memory: Option<u64>,
    /// Most sandboxes that are created in a minute
    #[arg(long, value_name = "N")]
    pub max_creates_per_minute: Option<u32>,
}

#[derive(Debug, clap::Args)]
pub struct RmArgs {
    /// Ids of keys
    #[arg(required = true)]
    pub keys: Vec<String>,
}

fn scope(text: &str) -> Result<Scope, String> {
    let found = Scope::ALL.into_iter().find(|scope| scope.as_str() == text);
    found.ok_or_else(|| "use sandboxes, host-files or registries".into())
}

pub async fn run(global: &Global, args: KeyArgs) -> Outcome {
    let host = open(global).await?;
    match args.manage {
        Some(what) => manage(global, &host, what),
        None => {
            let sandbox = args.sandbox.expect("it is required without a subcommand");
            let display = host.sandbox(&sandbox)?.display()?;
            args.chords
                .iter()
                .try_for_each(|chord| Display::check_keys(chord))?;
            for chord in &args.chords {
                display.press(chord, args.hold).await?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn manage(global: &Global, host: &Host, what: KeyCommand) -> Outcome {
    match what {
        KeyCommand::Create(args) => {
            let limits = KeyLimits {
                sandboxes: args.max_sandboxes,
                memory_bytes: args.max_memory,
                creates_per_minute: args.max_creates_per_minute,
            };
            let new = host.create_key(&args.name, &args.scope, limits)?;
            if global.json {
                show::json(&new);
            } else {
                show::line(&new.key);
            }
        }
        KeyCommand::Ls => {
            let keys = host.keys()?;
            if global.json {
                show::json(&keys);
                return Ok(ExitCode::SUCCESS);
            }
            let row = |key: &sandtree::KeyInfo| {
                let scopes = key.scopes.join(",");
                vec![
                    key.id.clone(),
                    key.name.clone(),
                    key.created_at.clone(),
                    scopes,
                ]
            };
            let rows: Vec<_> = keys.iter().map(row).collect();
            show::table(&["ID", "NAME", "CREATED", "SCOPES"], &rows);
        }
        KeyCommand::Rm(args) => {
            for key in &args.keys {
                host.remove_key(key)?;
                if global.json {
                    show::json(&json!({ "removed": key }));
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
