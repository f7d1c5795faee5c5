//! `sandtree screenshot`: what a sandbox's screen shows, as a PNG file.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use sandtree::{Display, Error, Result, Screenshot};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, duration, sandbox_ref};
use crate::show;

/// How long a guest may take to report about its screen. A picture does not need its answer.
const REPORT_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug, clap::Args)]
pub struct ScreenshotArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// PNG file to write; - writes to standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Wait until the screen changes
    #[arg(long, conflicts_with = "wait_still")]
    pub wait_change: bool,
    /// Wait until the screen has not changed for this time
    #[arg(
        long,
        value_name = "TIME",
        num_args = 0..=1,
        default_missing_value = "500ms",
        value_parser = duration
    )]
    pub wait_still: Option<Duration>,
    /// Longest time to wait
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub timeout: Duration,
}

pub async fn run(global: &Global, args: ScreenshotArgs) -> Outcome {
    let display = open(global).await?.sandbox(&args.sandbox)?.display()?;
    let picture = match (args.wait_still, args.wait_change) {
        (Some(still), _) => display.wait_still(still, args.timeout).await?,
        (None, true) => {
            let before = display.screenshot().await?;
            display.wait_change(&before, args.timeout).await?
        }
        (None, false) => display.screenshot().await?,
    };
    let is_stdout = args.output == Path::new("-");
    write(&args.output, &picture.png())?;
    if global.json && !is_stdout {
        report(&args, &display, &picture).await;
    }
    Ok(ExitCode::SUCCESS)
}

async fn report(args: &ScreenshotArgs, display: &Display, picture: &Screenshot) {
    let info = tokio::time::timeout(REPORT_WITHIN, display.info()).await;
    // A guest without an X server, or without time, has no desktop that could be ready.
    let ready = info.is_ok_and(|info| info.is_ok_and(|info| info.ready));
    show::json(&json!({
        "sandbox": args.sandbox,
        "file": args.output,
        "width": picture.width(),
        "height": picture.height(),
        "ready": ready,
    }));
}

/// A regular file is written whole or not at all. A device or a pipe is written to, and never
/// replaced.
fn write(output: &Path, png: &[u8]) -> Result<()> {
    let failed = |e| Error::io("write", output, e);
    if output == Path::new("-") {
        let mut stdout = std::io::stdout().lock();
        return stdout
            .write_all(png)
            .and_then(|()| stdout.flush())
            .map_err(failed);
    }
    // The name may be that of a link.
    let target = output.canonicalize().unwrap_or_else(|_| output.to_owned());
    if target.exists() && !target.is_file() {
        return std::fs::write(&target, png).map_err(failed);
    }
    let name = target.file_name().ok_or_else(|| {
        let what = output.display();
        Error::invalid("output", what, "the name of a file, or -")
    })?;
    let mut beside = std::ffi::OsString::from(".");
    beside.push(name);
    beside.push(format!(".{}", std::process::id()));
    let beside = target.with_file_name(beside);
    let written = std::fs::write(&beside, png).and_then(|()| std::fs::rename(&beside, &target));
    written.map_err(|e| {
        // It may not exist.
        drop(std::fs::remove_file(&beside));
        failed(e)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileTypeExt;

    use super::*;

    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        write(Path::new("/dev/null"), b"png").unwrap();
        let kind = std::fs::metadata("/dev/null").unwrap().file_type();
        assert!(kind.is_char_device());
    }

    #[test]
    fn a_file_is_replaced_also_behind_a_link_and_a_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("shot.png");
        let link = dir.path().join("link.png");
        std::fs::write(&file, b"an older and longer picture").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, b"png").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"png");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(write(dir.path(), b"png").is_err());
        assert!(write(&dir.path().join("missing/shot.png"), b"png").is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
