//! `sandtree snapshot`: list, verify, remove, export and import snapshots.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use sandtree::{Error, ExportOptions, FileExport, Host, SnapshotDetails, SnapshotInfo};
use serde_json::json;

use super::save::{self, placed};
use super::{Outcome, absolute_reference, diff, open};
use crate::args::Global;
use crate::failure::Failure;
use crate::{progress, show};

#[derive(Debug, clap::Subcommand)]
pub enum SnapshotCommand {
    /// Save a sandbox as a snapshot; the same as `sandtree save`
    Create(save::SaveArgs),
    /// List snapshots
    Ls {
        /// Only list snapshots with this label (repeatable)
        #[arg(long, value_name = "KEY[=VALUE]")]
        label: Vec<String>,
        /// List the snapshots that are directories in DIR
        #[arg(long, value_name = "DIR")]
        workspace: Option<PathBuf>,
    },
    /// Show the details of a snapshot
    Inspect(Which),
    /// Check every byte of a snapshot and of its image; move damaged files to quarantine
    Verify(Which),
    /// Remove snapshots; files that other snapshots share stay
    Rm {
        #[arg(required = true, value_name = "SNAPSHOT")]
        snapshots: Vec<String>,
        /// Find the snapshots as directories in DIR
        #[arg(long, value_name = "DIR")]
        workspace: Option<PathBuf>,
    },
    /// Add a name to a snapshot
    Tag {
        #[arg(value_name = "SNAPSHOT")]
        snapshot: String,
        name: String,
        /// Move the name from the snapshot that has it
        #[arg(long)]
        force: bool,
    },
    /// Rebuild the index from the content of the store
    Reindex,
    /// Export a snapshot or a sandbox to one file
    Export(ExportArgs),
    /// Import a snapshot from a file, and check every byte
    Import(ImportArgs),
    /// Show which files differ between two snapshots or states
    Diff(diff::DiffArgs),
}

/// A reference to a snapshot.
#[derive(Debug, clap::Args)]
pub struct Which {
    /// Name, digest or directory of the snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub snapshot: String,
    /// Find the snapshot as a directory in DIR
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// A snapshot, or a sandbox: `a` or `a@` for its current state, `a@TAG` for a checkpoint
    #[arg(value_name = "SNAPSHOT|SANDBOX")]
    pub what: String,
    /// File to write; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Do not compress
    #[arg(long)]
    pub plain_tar: bool,
    /// Leave out the image; the importing store must have it
    #[arg(long)]
    pub without_image: bool,
    /// Leave out the content of this snapshot; the importing store must have it
    #[arg(long, value_name = "SNAPSHOT")]
    pub since: Option<String>,
    /// Include the memory and processes of a sandbox
    #[arg(long)]
    pub memory: bool,
    /// Overwrite the file
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// File to read; `-` is standard input
    pub file: PathBuf,
    /// Name of the snapshot [default: the file name without extensions]
    #[arg(long)]
    pub name: Option<String>,
    /// Move the name from the snapshot that has it
    #[arg(long)]
    pub force: bool,
}

pub async fn run(global: &Global, what: SnapshotCommand) -> Outcome {
    match what {
        SnapshotCommand::Create(args) => save::run(global, args).await,
        SnapshotCommand::Ls { label, workspace } => {
            list(global, &label, workspace.as_deref()).await
        }
        SnapshotCommand::Inspect(which) => inspect(global, &which).await,
        SnapshotCommand::Verify(which) => verify(global, &which).await,
        SnapshotCommand::Rm {
            snapshots,
            workspace,
        } => remove(global, &snapshots, workspace.as_deref()).await,
        SnapshotCommand::Tag {
            snapshot,
            name,
            force,
        } => {
            open(global)
                .await?
                .tag_snapshot(&absolute_reference(&snapshot)?, &name, force.into())
                .await?;
            Ok(shown(global, &json!({ "name": name }), &name))
        }
        SnapshotCommand::Reindex => {
            let count = open(global).await?.reindex().await?;
            Ok(shown(
                global,
                &json!({ "snapshots": count }),
                &format!("{count} snapshots are in the index"),
            ))
        }
        SnapshotCommand::Export(args) => export(global, args).await,
        SnapshotCommand::Import(args) => import(global, args).await,
        SnapshotCommand::Diff(args) => diff::run(global, args).await,
    }
}

fn shown(global: &Global, value: &serde_json::Value, line: &str) -> ExitCode {
    if global.json {
        show::json(value);
    } else {
        show::line(line);
    }
    ExitCode::SUCCESS
}

async fn list(global: &Global, labels: &[String], workspace: Option<&Path>) -> Outcome {
    let found = match workspace {
        Some(dir) => Host::snapshots_in(dir)?,
        None => open(global).await?.snapshots().await?,
    };
    show::notes(
        &found
            .trouble
            .iter()
            .map(|what| format!("the index cannot be used: {what}"))
            .collect::<Vec<_>>(),
    );
    let is_meant = |snapshot: &SnapshotInfo| labels.iter().all(|label| has(snapshot, label));
    let snapshots: Vec<SnapshotInfo> = found.snapshots.into_iter().filter(is_meant).collect();
    if global.json {
        show::json(&snapshots);
        return Ok(ExitCode::SUCCESS);
    }
    show::table(
        &["NAME", "DIGEST", "IMAGE", "SIZE", "KIND", "CREATED"],
        &snapshots.iter().map(row).collect::<Vec<_>>(),
    );
    Ok(ExitCode::SUCCESS)
}

fn has(snapshot: &SnapshotInfo, label: &str) -> bool {
    match label.split_once('=') {
        Some((key, value)) => snapshot.labels.get(key).is_some_and(|found| found == value),
        None => snapshot.labels.contains_key(label),
    }
}

fn row(snapshot: &SnapshotInfo) -> Vec<String> {
    let names = if snapshot.names.is_empty() {
        "-".into()
    } else {
        snapshot.names.join(",")
    };
    let short: String = snapshot.digest.chars().take(12).collect();
    if let Some(why) = &snapshot.unreadable {
        return vec![
            names,
            short,
            format!("cannot be used: {why}"),
            String::new(),
            String::new(),
            String::new(),
        ];
    }
    let kind = if snapshot.memory { "memory" } else { "disk" };
    let image = snapshot.image.clone();
    let size = show::bytes(snapshot.bytes);
    vec![
        names,
        short,
        image,
        size,
        kind.into(),
        snapshot.created_at.clone(),
    ]
}

async fn inspect(global: &Global, which: &Which) -> Outcome {
    let reference = absolute_reference(&placed(&which.snapshot, which.workspace.as_deref())?)?;
    let details = open(global).await?.inspect_snapshot(&reference).await?;
    if global.json {
        show::json(&details);
        return Ok(ExitCode::SUCCESS);
    }
    show::fields(&[
        ("names", or_dash(details.names.join(", "))),
        ("digest", details.digest.clone()),
        ("path", path_text(&details)),
        ("created", details.created_at.clone()),
        ("parent", parent_text(&details)),
        ("labels", labels_text(&details)),
        ("image", image_text(&details)),
        ("arch", details.manifest.arch.to_string()),
        ("disk", disk_text(&details)),
        ("memory", memory_text(&details)),
        (
            "consistency",
            details.manifest.capture.consistency.to_string(),
        ),
        ("cpus", details.manifest.settings.cpus.to_string()),
    ]);
    show::notes(&details.manifest.capture.degraded);
    Ok(ExitCode::SUCCESS)
}

fn or_dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}

fn path_text(details: &SnapshotDetails) -> String {
    let path = details.path.as_ref();
    path.map_or("-".into(), |path| path.display().to_string())
}

fn parent_text(details: &SnapshotDetails) -> String {
    let parent = details.manifest.parent.as_ref();
    parent.map_or("-".into(), ToString::to_string)
}

fn labels_text(details: &SnapshotDetails) -> String {
    let labels: Vec<String> = details
        .manifest
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    or_dash(labels.join(", "))
}

fn image_text(details: &SnapshotDetails) -> String {
    let image = &details.manifest.image;
    format!("{} {}", image.name, image.digest)
}

fn disk_text(details: &SnapshotDetails) -> String {
    let disk = &details.manifest.disk;
    let size = show::bytes(disk.bytes);
    format!("{size} {}, {} layers", disk.file_system, disk.layers.len())
}

fn memory_text(details: &SnapshotDetails) -> String {
    let Some(memory) = &details.manifest.memory else {
        return "none: it boots".into();
    };
    let machine = &memory.machine;
    let size = show::bytes(memory.bytes);
    let mode = details.manifest.capture.mode.as_deref().unwrap_or("-");
    format!(
        "{size}, {} layers ({mode}); {}, QEMU {}",
        memory.layers.len(),
        machine.accelerator,
        machine.qemu_version
    )
}

async fn verify(global: &Global, which: &Which) -> Outcome {
    let reference = absolute_reference(&placed(&which.snapshot, which.workspace.as_deref())?)?;
    let host = open(global).await?;
    let (bar, telling) = progress::transfer(format!("verifying {}", which.snapshot));
    let verified = host.verify(&reference, telling).await;
    bar.finish_and_clear();
    let verified = verified?;
    if global.json {
        show::json(
            &json!({ "bytes": verified.bytes, "whole": verified.damaged.is_empty(), "damaged": verified.damaged }),
        );
    } else if verified.damaged.is_empty() {
        show::line(&format!(
            "{} is whole: {} read",
            which.snapshot,
            show::bytes(verified.bytes)
        ));
    }
    match verified.damaged.first() {
        None => Ok(ExitCode::SUCCESS),
        Some(_) => Err(Failure::from(Error::Damaged {
            reference: which.snapshot.clone(),
            damaged: verified.damaged,
        })),
    }
}

async fn remove(global: &Global, snapshots: &[String], workspace: Option<&Path>) -> Outcome {
    let host = open(global).await?;
    for snapshot in snapshots {
        host.remove_snapshot(&absolute_reference(&placed(snapshot, workspace)?)?)
            .await?;
        if !global.json {
            show::line(snapshot);
        }
    }
    if global.json {
        show::json(&json!({ "removed": snapshots }));
    }
    Ok(ExitCode::SUCCESS)
}

async fn export(global: &Global, args: ExportArgs) -> Outcome {
    let host = open(global).await?;
    let options = ExportOptions {
        plain: args.plain_tar,
        without_image: args.without_image,
        since: args.since.as_deref().map(absolute_reference).transpose()?,
    };
    let (bar, telling) = progress::transfer(format!("exporting {}", args.what));
    let what = absolute_reference(&args.what)?;
    let exported = if args.output.as_os_str() == "-" {
        host.export(&what, args.memory, options, io::stdout(), telling)
            .await
    } else {
        if !args.force && args.output.exists() {
            let rule = "it exists; --force overwrites it";
            return Err(Error::invalid("output file", args.output.display(), rule).into());
        }
        let export = FileExport {
            reference: what,
            memory: args.memory,
            options,
            path: args.output.clone(),
            replace: args.force.into(),
        };
        host.export_file(export, telling).await
    };
    bar.finish_and_clear();
    let exported = exported?;
    if global.json {
        if args.output.as_os_str() != "-" {
            show::json(&exported);
        }
    } else if args.output.as_os_str() != "-" {
        let content = show::bytes(exported.content_bytes);
        let file = show::bytes(exported.file_bytes);
        show::line(&format!(
            "{}  {}  {content} in {file}",
            args.output.display(),
            exported.digest
        ));
    }
    Ok(ExitCode::SUCCESS)
}

async fn import(global: &Global, args: ImportArgs) -> Outcome {
    let is_stdin = args.file.as_os_str() == "-";
    let name = match &args.name {
        Some(name) => name.clone(),
        None if is_stdin => {
            let rule = "an import from standard input needs --name";
            return Err(Error::invalid("snapshot name", "-", rule).into());
        }
        None => stem(&args.file),
    };
    let host = open(global).await?;
    let input: Box<dyn Read + Send> = if is_stdin {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(&args.file).map_err(|e| Error::io("open", &args.file, e))?)
    };
    let (bar, telling) = progress::transfer(format!("importing {name}"));
    let imported = host.import(input, &name, args.force.into(), telling).await;
    bar.finish_and_clear();
    let imported = imported?;
    if global.json {
        show::json(&imported);
    } else {
        show::line(&format!(
            "{}  {}  {}",
            imported.name,
            imported.digest,
            show::bytes(imported.bytes)
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// `dev-env` of `dir/dev-env.tar.zst`.
fn stem(path: &Path) -> String {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let endings = [".zst", ".tar"];
    endings.iter().fold(name, |name, ending| {
        name.strip_suffix(ending).map(str::to_owned).unwrap_or(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_is_named_after_its_file() {
        for (path, name) in [
            ("a/dev-env.tar.zst", "dev-env"),
            ("x.tar", "x"),
            ("y", "y"),
            ("z.1.tar.zst", "z.1"),
        ] {
            assert_eq!(stem(Path::new(path)), name);
        }
    }
}
