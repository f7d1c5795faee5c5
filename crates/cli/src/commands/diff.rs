//! `sandtree snapshot diff`: which files differ.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use sandtree::{Aspect, Change, ChangeKind, ContentDiff, DiffOptions, Node};
use serde_json::json;

use super::{Outcome, absolute_reference, open};
use crate::args::Global;
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    /// A snapshot, or a sandbox: `a` or `a@` for its current state, `a@TAG` for a checkpoint
    #[arg(value_name = "BEFORE")]
    pub before: String,
    #[arg(value_name = "AFTER")]
    pub after: String,
    /// Show the differences in the text of this file
    #[arg(long, value_name = "PATH")]
    pub content: Option<OsString>,
    /// Include files that differ only in their time
    #[arg(long)]
    pub times: bool,
}

pub async fn run(global: &Global, args: DiffArgs) -> Outcome {
    let host = open(global).await?;
    let before = absolute_reference(&args.before)?;
    let after = absolute_reference(&args.after)?;
    let spinner = progress::spinner(format!("comparing {} with {}", args.before, args.after));
    if let Some(path) = &args.content {
        let content = host.content_diff(&before, &after, path.as_bytes()).await;
        spinner.finish_and_clear();
        show_content(global, &content?);
        return Ok(ExitCode::SUCCESS);
    }
    let options = DiffOptions {
        times: args.times,
        ..DiffOptions::default()
    };
    let found = host.diff(&before, &after, options).await;
    spinner.finish_and_clear();
    let found = found?;
    if global.json {
        show::json(&found);
        return Ok(ExitCode::SUCCESS);
    }
    found
        .changes
        .iter()
        .for_each(|change| show::line(&line(change)));
    show::notes(
        &found
            .incomplete
            .iter()
            .map(|what| format!("incomplete: {what}"))
            .collect::<Vec<_>>(),
    );
    Ok(ExitCode::SUCCESS)
}

/// `A`, `D` or `M`, the path, and the differences.
fn line(change: &Change) -> String {
    let path = &change.path;
    match (change.change, &change.before, &change.after) {
        (ChangeKind::Added, _, Some(node)) => format!("A  {path}  {}", describe(node)),
        (ChangeKind::Removed, Some(node), _) => format!("D  {path}  {}", describe(node)),
        (_, Some(before), Some(after)) => {
            let what: Vec<String> = change
                .what
                .iter()
                .map(|aspect| differs(*aspect, before, after))
                .collect();
            format!("M  {path}  {}", what.join(", "))
        }
        _ => format!("?  {path}"),
    }
}

fn describe(node: &Node) -> String {
    format!("{} {:04o} {}", node.kind, node.mode, show::bytes(node.size))
}

fn differs(aspect: Aspect, before: &Node, after: &Node) -> String {
    match aspect {
        Aspect::Kind => format!("{} to {}", before.kind, after.kind),
        Aspect::Size => format!(
            "{} to {}",
            show::bytes(before.size),
            show::bytes(after.size)
        ),
        Aspect::Mode => format!("mode {:04o} to {:04o}", before.mode, after.mode),
        Aspect::Owner => format!(
            "owner {}:{} to {}:{}",
            before.uid, before.gid, after.uid, after.gid
        ),
        Aspect::Content => "content".into(),
        Aspect::Target => "target".into(),
        Aspect::Device => "device".into(),
        Aspect::Xattrs => "attributes".into(),
        Aspect::Modified => "time".into(),
    }
}

fn show_content(global: &Global, content: &ContentDiff) {
    let (kind, text) = match content {
        ContentDiff::Same => ("same", String::new()),
        ContentDiff::Binary => ("binary", "binary files differ\n".to_owned()),
        ContentDiff::TooLarge { limit_bytes } => (
            "too_large",
            format!(
                "a file is larger than {}: not compared\n",
                show::bytes(*limit_bytes)
            ),
        ),
        ContentDiff::Text(text) => ("text", text.clone()),
    };
    if global.json {
        show::json(&json!({ "kind": kind, "diff": text }));
    } else {
        text.lines().for_each(show::line);
    }
}
