//! `sandtree image`: make, list and remove images.

mod build;
mod warm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use sandtree::{Error, ImageInfo, Init, RemovedImage, Result};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, Made};
use crate::{progress, show};

#[derive(Debug, clap::Subcommand)]
pub enum ImageCommand {
    /// Build a built-in image, or an image from a recipe
    Build(build::BuildArgs),
    /// Import a root file system, an OCI image or a disk as an image
    Import(ImportArgs),
    /// List images
    Ls,
    /// Show the details of an image
    Inspect {
        /// Name or digest of the image
        #[arg(value_name = "IMAGE")]
        image: String,
    },
    /// Remove names of images; the content stays while anything uses it
    Rm {
        /// Names to remove, or digests to remove all names of an image
        #[arg(required = true, value_name = "IMAGE")]
        images: Vec<String>,
    },
    /// Save a booted state, which sandboxes with the same machine options restore
    Warm(Box<warm::WarmArgs>),
}

#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// A tar archive, a directory, an OCI or Docker archive, an OCI layout, a save of Quicksand, a
    /// qcow2 or a raw disk
    pub path: PathBuf,
    /// Name of the image [default: the file name without extensions]
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub made: Made,
}

pub async fn run(global: &Global, what: ImageCommand) -> Outcome {
    match what {
        ImageCommand::Build(args) => build::run(global, args).await,
        ImageCommand::Import(args) => import(global, args).await,
        ImageCommand::Ls => list(global).await,
        ImageCommand::Inspect { image } => inspect(global, &image).await,
        ImageCommand::Rm { images } => remove(global, &images).await,
        ImageCommand::Warm(args) => warm::run(global, *args).await,
    }
}

async fn import(global: &Global, args: ImportArgs) -> Outcome {
    let spec = args.made.spec()?;
    let host = open(global).await?;
    let told = progress::stages(format!("importing {}", args.path.display()));
    let path = named_path(&args.path)?;
    let image = host
        .import_image(&path, args.name.as_deref(), spec, told)
        .await?;
    Ok(made(global, &image))
}

/// The path that an image is imported from and named after. `.` has no name of its own, but the
/// current directory has one.
fn named_path(path: &Path) -> Result<PathBuf> {
    if path.file_name().is_some() {
        return Ok(path.to_owned());
    }
    std::path::absolute(path).map_err(|e| Error::io("resolve", path, e))
}

/// Shows an image that was just made.
fn made(global: &Global, image: &ImageInfo) -> ExitCode {
    if global.json {
        show::json(image);
    } else {
        let names = names(image);
        let used = show::bytes(image.disk_bytes_used);
        show::line(&format!("{names}  {}  {used}", image.digest));
    }
    ExitCode::SUCCESS
}

async fn list(global: &Global) -> Outcome {
    let images = open(global).await?.images().await?;
    if global.json {
        show::json(&images);
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = images.iter().map(row).collect();
    show::table(
        &[
            "NAME", "DIGEST", "SIZE", "DISK", "KERNEL", "INIT", "WARM", "USED BY",
        ],
        &rows,
    );
    Ok(ExitCode::SUCCESS)
}

fn row(image: &ImageInfo) -> Vec<String> {
    let used = show::bytes(image.disk_bytes_used);
    if let Some(why) = &image.unreadable {
        let why = format!("cannot be used: {why}");
        return [
            vec![names(image), short(&image.digest), used, why],
            vec![String::new(); 4],
        ]
        .concat();
    }
    vec![
        names(image),
        short(&image.digest),
        used,
        show::bytes(image.disk_bytes),
        short(&image.kernel),
        init(image),
        warm_states(image),
        or_dash(users(image).join(", ")),
    ]
}

async fn inspect(global: &Global, reference: &str) -> Outcome {
    let image = open(global).await?.inspect_image(reference)?;
    if global.json {
        show::json(&image);
        return Ok(ExitCode::SUCCESS);
    }
    let defaults = &image.defaults;
    let env: Vec<String> = defaults
        .env
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let ready = defaults.ready.as_ref().map_or(String::new(), |ready| {
        format!("{}, within {} s", ready.command, ready.timeout_ms / 1000)
    });
    show::fields(&[
        ("names", names(&image)),
        ("digest", image.digest.clone()),
        ("arch", image.arch.clone()),
        ("kernel", image.kernel.clone()),
        ("init", init(&image)),
        (
            "root file system",
            format!(
                "{}, {} on disk",
                show::bytes(image.bytes),
                show::bytes(image.disk_bytes_used)
            ),
        ),
        ("disk", show::bytes(image.disk_bytes)),
        ("user", text(&defaults.user)),
        ("workdir", text(&defaults.workdir)),
        ("env", or_dash(env.join(" "))),
        ("entrypoint", words(&defaults.entrypoint)),
        ("command", words(&defaults.cmd)),
        ("start", text(&defaults.start)),
        ("ready", or_dash(ready)),
        ("warm", warm_states(&image)),
        ("used by", or_dash(users(&image).join(", "))),
        ("cannot be used", text(&image.unreadable)),
    ]);
    Ok(ExitCode::SUCCESS)
}

async fn remove(global: &Global, images: &[String]) -> Outcome {
    let host = open(global).await?;
    for reference in images {
        let removed = host.remove_image(reference).await?;
        let left = if removed.collected {
            None
        } else {
            host.inspect_image(&removed.digest).ok()
        };
        if global.json {
            show::json(
                &json!({ "removed": reference, "digest": removed.digest, "collected": removed.collected }),
            );
        } else {
            show::line(reference);
            show::notes(
                &kept(reference, &removed, left.as_ref())
                    .into_iter()
                    .collect::<Vec<_>>(),
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A note on content that stays, and why.
fn kept(reference: &str, removed: &RemovedImage, left: Option<&ImageInfo>) -> Option<String> {
    if removed.collected {
        return None;
    }
    let mut by = left.map(users).unwrap_or_default();
    by.extend(
        left.iter()
            .flat_map(|image| &image.names)
            .map(|name| format!("the name {name}")),
    );
    let by = if by.is_empty() {
        "something".to_owned()
    } else {
        by.join(", ")
    };
    Some(format!(
        "the content of {reference} stays, because of {by}; `sandtree gc` removes it when nothing uses it"
    ))
}

/// How many sandboxes and snapshots are made from an image.
fn users(image: &ImageInfo) -> Vec<String> {
    let counted = |count: u64, one: &str, many: &str| match count {
        0 => None,
        1 => Some(format!("1 {one}")),
        _ => Some(format!("{count} {many}")),
    };
    let sandboxes = counted(image.sandboxes, "sandbox", "sandboxes");
    sandboxes
        .into_iter()
        .chain(counted(image.snapshots, "snapshot", "snapshots"))
        .collect()
}

fn names(image: &ImageInfo) -> String {
    or_dash(image.names.join(","))
}

fn short(digest: &str) -> String {
    digest.chars().take(12).collect()
}

fn init(image: &ImageInfo) -> String {
    match image.init {
        Some(Init::Agent) => "agent".into(),
        Some(Init::Image) => "image".into(),
        None => "-".into(),
    }
}

fn warm_states(image: &ImageInfo) -> String {
    match image.warm {
        0 => "-".into(),
        count => format!("{count} ({})", show::bytes(image.warm_bytes)),
    }
}

/// A command with each word quoted.
fn words(command: &[String]) -> String {
    or_dash(
        command
            .iter()
            .map(|word| format!("{word:?}"))
            .collect::<Vec<_>>()
            .join(" "),
    )
}

fn or_dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}
