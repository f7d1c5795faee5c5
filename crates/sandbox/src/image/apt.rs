//! Packages from the host's own apt: the sources, keys and proxies its administrator chose, with no root needed.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use super::tool::{self, Tool};
use super::{Error, Progress, Stage, Watch, io_error};

const NOT_DEBIAN: &str = "building this image needs a Debian or Ubuntu host with apt and dpkg";
const APT_CACHE: Tool = Tool { program: "apt-cache", hint: NOT_DEBIAN };
const APT_GET: Tool = Tool { program: "apt-get", hint: NOT_DEBIAN };
const DPKG_DEB: Tool = Tool { program: "dpkg-deb", hint: NOT_DEBIAN };

const POLL: Duration = Duration::from_millis(100);

/// The package that a meta package stands for at present: its only dependency.
pub(super) fn dependency(meta: &str) -> Result<String, Error> {
    let output = APT_CACHE.output(|command| {
        command.args(["depends", "--no-recommends", "--no-suggests", meta]);
    })?;
    first_dependency(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| Error::UnknownPackage { package: meta.to_owned() })
}

fn first_dependency(text: &str) -> Option<String> {
    let package = text.lines().find_map(|line| line.trim().strip_prefix("Depends: "))?;
    // A virtual package is shown in angle brackets and cannot be downloaded.
    (!package.starts_with('<')).then(|| package.trim().to_owned())
}

/// The size of what would be downloaded; for progress only, so not knowing is fine.
fn download_bytes(package: &str) -> Result<Option<u64>, Error> {
    let shown = APT_CACHE.output(|command| {
        command.args(["show", "--no-all-versions", package]);
    })?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    Ok(shown.lines().find_map(|line| line.strip_prefix("Size: ")?.trim().parse().ok()))
}

/// Downloads packages into a directory that is empty before.
pub(super) fn download(packages: &[&str], dir: &Path, progress: &mut Watch<'_>) -> Result<(), Error> {
    let sizes = packages.iter().map(|package| download_bytes(package)).collect::<Result<Vec<_>, _>>()?;
    let total_bytes = sizes.into_iter().sum::<Option<u64>>();
    let mut apt = APT_GET.spawn(|command| {
        // As root, apt would switch to a user of its own that cannot write here, and warn about it.
        command.args(["-q", "-o", "APT::Sandbox::User=root", "download"]).args(packages);
        command.current_dir(dir).stdout(Stdio::null());
    })?;
    let mut told =
        || bytes_in(dir).and_then(|done_bytes| progress(Progress { stage: Stage::Download, done_bytes, total_bytes }));
    while apt.try_wait().map_err(|source| APT_GET.failed_to("wait for", source))?.is_none() {
        if let Err(error) = told() {
            apt.kill().and_then(|()| apt.wait()).map_err(|source| APT_GET.failed_to("end", source))?;
            return Err(error);
        }
        thread::sleep(POLL);
    }
    let output = apt.wait_with_output().map_err(|source| APT_GET.failed_to("wait for", source))?;
    if !output.status.success() {
        return Err(Error::Download { stderr: tool::stderr(&output) });
    }
    progress(Progress { stage: Stage::Download, done_bytes: bytes_in(dir)?, total_bytes })
}

/// A file may be renamed between the listing and the look: then it counts in the next round.
fn bytes_in(dir: &Path) -> Result<u64, Error> {
    let entries = fs::read_dir(dir).map_err(io_error("list", dir))?;
    Ok(entries.filter_map(|entry| entry.ok()?.metadata().ok()).map(|metadata| metadata.len()).sum())
}

/// Unpacks one of the downloaded packages, then removes its file.
pub(super) fn unpack(package: &str, downloads: &Path, target: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(downloads).map_err(io_error("list", downloads))?;
    let prefix = format!("{package}_");
    let deb = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)))
        .ok_or_else(|| Error::UnknownPackage { package: package.to_owned() })?;
    DPKG_DEB.run(|command: &mut Command| {
        command.arg("-x").arg(&deb).arg(target);
    })?;
    fs::remove_file(&deb).map_err(io_error("remove", &deb))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dependency_of_a_meta_package_is_found() {
        let text = "linux-image-6.12-cloud-amd64\n  Depends: linux-image-6.12.115+deb12-cloud-amd64\n";
        assert_eq!(first_dependency(text).unwrap(), "linux-image-6.12.115+deb12-cloud-amd64");
        assert_eq!(first_dependency("x\n  Depends: <virtual>\n"), None);
        assert_eq!(first_dependency(""), None);
    }
}
