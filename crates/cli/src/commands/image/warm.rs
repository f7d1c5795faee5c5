//! `sandtree image warm`: booted states, which new sandboxes restore instead of booting.

use std::process::ExitCode;

use sandtree::{ImageInfo, Progress, SandboxSpec, WarmInfo};
use serde_json::json;

use super::short;
use crate::args::{Global, Shape};
use crate::commands::{Outcome, open};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct WarmArgs {
    /// List the booted states
    #[arg(long, conflicts_with_all = ["rm", "image", "Shape"])]
    pub ls: bool,
    /// Remove the booted states of the image
    #[arg(long, conflicts_with = "Shape")]
    pub rm: bool,
    #[command(flatten)]
    pub shape: Shape,
    /// Name or digest of the image
    #[arg(required_unless_present = "ls", value_name = "IMAGE")]
    pub image: Option<String>,
}

const HEADER: [&str; 7] = [
    "IMAGE",
    "MEMORY",
    "CPUS",
    "NETWORK",
    "ACCELERATOR",
    "SIZE",
    "CREATED",
];

pub async fn run(global: &Global, args: WarmArgs) -> Outcome {
    let image = args.image.clone().unwrap_or_default();
    match (args.ls, args.rm) {
        (true, _) => list(global).await,
        (_, true) => remove(global, &image).await,
        _ => make(global, &image, &args).await,
    }
}

async fn make(global: &Global, image: &str, args: &WarmArgs) -> Outcome {
    let host = open(global).await?;
    let spec = args.shape.of(SandboxSpec::new(image));
    spec.check()?;
    // Makes a missing image first, with progress on the terminal.
    let _kept = host
        .prepare(spec.clone(), Progress::silent(), progress::image(image))
        .await?;
    let spinner = progress::spinner(format!("booting {image}"));
    let warm = host.warm_image(&spec).await;
    spinner.finish_and_clear();
    let warm = warm?;
    if global.json {
        show::json(&warm);
    } else {
        show::table(&HEADER, &[row(&warm, &host.images().await?)]);
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(global: &Global) -> Outcome {
    let host = open(global).await?;
    let states = host.warm_states()?;
    if global.json {
        show::json(&states);
        return Ok(ExitCode::SUCCESS);
    }
    let images = host.images().await?;
    let rows: Vec<Vec<String>> = states.iter().map(|warm| row(warm, &images)).collect();
    show::table(&HEADER, &rows);
    Ok(ExitCode::SUCCESS)
}

fn row(warm: &WarmInfo, images: &[ImageInfo]) -> Vec<String> {
    let named = |digest: &str| {
        let image = images
            .iter()
            .find(|image| image.digest == digest && !image.names.is_empty());
        image.map_or_else(|| short(digest), super::names)
    };
    let image = match (&warm.image, &warm.kernel) {
        (Some(image), _) => named(image),
        (None, Some(kernel)) => format!("kernel {}", short(kernel)),
        (None, None) => "-".to_owned(),
    };
    let created = match &warm.unreadable {
        Some(why) => format!("cannot be used: {why}"),
        None => warm.created_at.clone(),
    };
    vec![
        image,
        warm.memory_bytes.map_or_else(|| "-".into(), show::bytes),
        warm.cpus
            .map_or_else(|| "-".into(), |cpus| cpus.to_string()),
        warm.network.map_or_else(
            || "-".into(),
            |network| format!("{network:?}").to_lowercase(),
        ),
        warm.accelerator.clone().unwrap_or_else(|| "-".into()),
        show::bytes(warm.bytes),
        created,
    ]
}

async fn remove(global: &Global, image: &str) -> Outcome {
    let count = open(global).await?.forget_warm(image).await?;
    if global.json {
        show::json(&json!({ "image": image, "removed": count }));
    } else {
        let states = if count == 1 { "state" } else { "states" };
        show::line(&format!("{image}: {count} booted {states} removed"));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Typed {
        #[command(flatten)]
        warm: WarmArgs,
    }

    #[test]
    fn listing_warm_images_takes_no_shape() {
        let warm = |typed: &[&str]| Typed::try_parse_from(["warm"].iter().chain(typed));
        assert!(warm(&["--ls"]).is_ok());
        assert!(warm(&["--rm", "tiny"]).is_ok());
        assert!(warm(&["tiny", "--memory", "1G", "--network", "none"]).is_ok());
        for bad in [
            &[][..],
            &["--rm"],
            &["--ls", "tiny"],
            &["--ls", "--rm"],
            &["--rm", "tiny", "--cpus", "2"],
        ] {
            assert!(warm(bad).is_err(), "{bad:?}");
        }
    }
}
