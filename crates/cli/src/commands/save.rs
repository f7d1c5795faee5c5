//! `sandtree save`: publishes a sandbox as a snapshot.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use sandtree::{Error, Result, SaveSpec, SaveTarget, parse_label, parse_target};

use super::{Outcome, absolute_reference, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct SaveArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Name of the snapshot, or a directory to save it to
    #[arg(value_name = "NAME|./DIR")]
    pub target: String,
    /// Include memory and processes: a sandbox from this snapshot continues exactly there
    #[arg(long, conflicts_with = "from")]
    pub memory: bool,
    /// Save this checkpoint, including its memory, instead of the current state
    #[arg(long, value_name = "TAG")]
    pub from: Option<String>,
    /// Compress the snapshot; sandboxes from it start more slowly
    #[arg(long)]
    pub compress: bool,
    /// Replace the snapshot that has this name, once the new one is complete
    #[arg(long)]
    pub force: bool,
    /// Add a label (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Remove the sandbox's checkpoints after the save
    #[arg(long)]
    pub delete_checkpoints: bool,
    /// Save the snapshot as a directory in DIR
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
}

pub async fn run(global: &Global, args: SaveArgs) -> Outcome {
    let spec = SaveSpec {
        target: target(&args.target, args.workspace.as_deref())?,
        replace: args.force.into(),
        memory: args.memory,
        from: args.from,
        labels: labels(&args.label)?,
        compress: args.compress,
        delete_checkpoints: args.delete_checkpoints,
    };
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let (bar, told) = progress::transfer(format!("saving {}", args.sandbox));
    let saved = sandbox.save(spec, told).await;
    bar.finish_and_clear();
    let saved = saved?;
    if global.json {
        show::json(&saved);
        return Ok(ExitCode::SUCCESS);
    }
    show::degradations(&saved.degraded);
    let called = saved
        .name
        .clone()
        .or_else(|| saved.path.as_ref().map(|path| path.display().to_string()));
    show::line(&format!(
        "{}  {}  {}  {}",
        called.unwrap_or_default(),
        saved.digest,
        show::bytes(saved.bytes),
        show::ms(saved.total_ms),
    ));
    Ok(ExitCode::SUCCESS)
}

pub fn labels(labels: &[String]) -> Result<BTreeMap<String, String>> {
    labels.iter().map(|label| parse_label(label)).collect()
}

/// The target of a save: a name, or a directory in a workspace.
pub fn target(name: &str, workspace: Option<&Path>) -> Result<SaveTarget> {
    match workspace {
        None => parse_target(&absolute_reference(name)?),
        Some(dir) => {
            let placed = placed(name, workspace)?;
            std::fs::create_dir_all(dir).map_err(|e| Error::io("make directory", dir, e))?;
            parse_target(&placed)
        }
    }
}

/// A reference to a snapshot; in a workspace, the path of its directory. A name cannot lead out of
/// a workspace.
pub fn placed(name: &str, workspace: Option<&Path>) -> Result<String> {
    let Some(workspace) = workspace else {
        return Ok(name.to_owned());
    };
    match parse_target(&absolute_reference(name)?)? {
        SaveTarget::Name(name) => {
            let path =
                std::path::absolute(workspace).map_err(|e| Error::io("resolve", workspace, e))?;
            let path = path.join(name.as_str());
            path.to_str()
                .map(str::to_owned)
                .ok_or_else(|| Error::invalid("workspace", path.display(), "a text"))
        }
        SaveTarget::Dir(path) => Err(Error::invalid(
            "snapshot name in a workspace",
            path.display(),
            "a name, not a path",
        )),
    }
}
