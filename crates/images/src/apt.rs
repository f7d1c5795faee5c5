//! Packages from the host's own apt, with the sources, keys and proxies that its administrator
//! chose. No root is needed.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use crate::error::{Error, Result, io_error};
use crate::job::{Job, Progress, Stage};
use crate::tool::{self, HostTools, Tool};

const APT_CACHE: Tool = Tool::new("apt-cache", None);
const APT_GET: Tool = Tool::new("apt-get", None);
const APT_CONFIG: Tool = Tool::new("apt-config", None);
const DPKG_DEB: Tool = Tool::new("dpkg-deb", None);

/// How often a download reports, and notices that it is cancelled.
const POLL: Duration = Duration::from_millis(100);

/// The only dependency of a meta package: the package that it stands for today.
pub(crate) fn dependency(tools: HostTools<'_>, meta: &str) -> Result<String> {
    let output = APT_CACHE.output(tools, |command| {
        command.args(["depends", "--no-recommends", "--no-suggests", meta]);
    })?;
    first_dependency(&String::from_utf8_lossy(&output.stdout)).ok_or_else(|| {
        Error::UnknownPackage {
            package: meta.to_owned(),
        }
    })
}

fn first_dependency(text: &str) -> Option<String> {
    let package = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))?;
    // A virtual package is shown in angle brackets and cannot be downloaded.
    (!package.starts_with('<')).then(|| package.trim().to_owned())
}

/// The size of a package's file. `None`: apt does not know it; only the progress needs it.
fn download_bytes(tools: HostTools<'_>, package: &str) -> Result<Option<u64>> {
    let shown = APT_CACHE.output(tools, |command| {
        command.args(["show", "--no-all-versions", package]);
    })?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    Ok(shown
        .lines()
        .find_map(|line| line.strip_prefix("Size: ")?.trim().parse().ok()))
}

/// The host's sources of Debian packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sources {
    /// The release, such as `bookworm`.
    pub suite: String,
    /// Each in the one-line format of `sources.list`.
    pub lines: Vec<String>,
}

/// The host's sources that are Debian's own. The administrator's other sources are not for guests.
pub(crate) fn debian_sources(tools: HostTools<'_>) -> Result<Sources> {
    let listed = APT_GET.run(tools, |command| {
        let format = "$(CODENAME) deb $(SITE) $(RELEASE) $(COMPONENT)";
        command.args([
            "indextargets",
            "--format",
            format,
            "Created-By: Packages",
            "Origin: Debian",
        ]);
    })?;
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    sources(&listed, &release).ok_or(Error::NoDebianSources)
}

fn sources(listed: &str, os_release: &str) -> Option<Sources> {
    let targets: Vec<_> = listed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .collect();
    let of_host = os_release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let of_host = targets
        .iter()
        .find(|(codename, _)| Some(*codename) == of_host);
    // Otherwise the shortest name: updates, security and backports begin with the release's name.
    let (suite, _) =
        of_host.or_else(|| targets.iter().min_by_key(|(codename, _)| codename.len()))?;
    let of_release = targets
        .iter()
        .filter(|(codename, _)| is_of(codename, suite));
    let lines: BTreeSet<_> = of_release.map(|(_, line)| (*line).to_owned()).collect();
    Some(Sources {
        suite: (*suite).to_owned(),
        lines: lines.into_iter().collect(),
    })
}

fn is_of(codename: &str, suite: &str) -> bool {
    codename
        .strip_prefix(suite)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '/']))
}

/// The proxies that the host's apt is configured with, as options for another apt.
pub(crate) fn proxies(tools: HostTools<'_>) -> Result<Vec<String>> {
    let dumped = APT_CONFIG.run(tools, |command| {
        command.args(["dump", "Acquire"]);
    })?;
    let is_proxy =
        |line: &&str| line.to_ascii_lowercase().contains("::proxy") && !line.ends_with("\"\";");
    Ok(dumped.lines().filter(is_proxy).map(str::to_owned).collect())
}

/// Downloads packages into an empty directory.
pub(crate) fn download(job: &mut Job<'_>, packages: &[&str], dir: &Path) -> Result<()> {
    let tools = job.tools;
    let sizes = packages
        .iter()
        .map(|package| download_bytes(tools, package))
        .collect::<Result<Vec<_>>>()?;
    let total_bytes = sizes.into_iter().sum::<Option<u64>>();
    let mut apt = APT_GET.spawn(tools, |command| {
        // As root, apt would switch to a user of its own that cannot write here, and warn about it.
        command
            .args(["-q", "-o", "APT::Sandbox::User=root", "download"])
            .args(packages)
            .current_dir(dir)
            .stdout(Stdio::null());
    })?;
    while !has_ended(&mut apt)? {
        if let Err(error) = report(job, dir, total_bytes) {
            end(&mut apt)?;
            return Err(error);
        }
        thread::sleep(POLL);
    }
    let output = apt
        .wait_with_output()
        .map_err(|source| APT_GET.failed_to("wait for", source))?;
    if !output.status.success() {
        return Err(Error::Download {
            stderr: tool::stderr(&output),
        });
    }
    report(job, dir, total_bytes)
}

fn has_ended(apt: &mut Child) -> Result<bool> {
    let status = apt.try_wait();
    let status = status.map_err(|source| APT_GET.failed_to("wait for", source))?;
    Ok(status.is_some())
}

fn end(apt: &mut Child) -> Result<()> {
    apt.kill()
        .and_then(|()| apt.wait())
        .map(drop)
        .map_err(|source| APT_GET.failed_to("end", source))
}

fn report(job: &mut Job<'_>, dir: &Path, total_bytes: Option<u64>) -> Result<()> {
    job.report(Progress {
        stage: Stage::Download,
        done_bytes: bytes_in(dir)?,
        total_bytes,
    })
}

/// A file that apt renames between listing and `stat` counts in the next round.
fn bytes_in(dir: &Path) -> Result<u64> {
    let entries = fs::read_dir(dir).map_err(io_error("list", dir))?;
    Ok(entries
        .filter_map(|entry| entry.ok()?.metadata().ok())
        .map(|metadata| metadata.len())
        .sum())
}

/// Unpacks one of the downloaded packages, then removes its file.
pub(crate) fn unpack(
    tools: HostTools<'_>,
    package: &str,
    downloads: &Path,
    target: &Path,
) -> Result<()> {
    let entries = fs::read_dir(downloads).map_err(io_error("list", downloads))?;
    let prefix = format!("{package}_");
    let deb = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
        })
        .ok_or_else(|| Error::UnknownPackage {
            package: package.to_owned(),
        })?;
    DPKG_DEB.run(tools, |command| {
        command.arg("-x").arg(&deb).arg(target);
    })?;
    fs::remove_file(&deb).map_err(io_error("remove", &deb))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dependency_of_a_meta_package_is_found() {
        let text =
            "linux-image-6.12-cloud-amd64\n  Depends: linux-image-6.12.115+deb12-cloud-amd64\n";
        assert_eq!(
            first_dependency(text).unwrap(),
            "linux-image-6.12.115+deb12-cloud-amd64"
        );
        assert_eq!(first_dependency("x\n  Depends: <virtual>\n"), None);
        assert_eq!(first_dependency(""), None);
    }

    #[test]
    fn sources_are_those_of_the_release_each_once() {
        let listed = "bookworm-updates deb http://a/debian bookworm-updates main\n\
                      bookworm deb http://a/debian bookworm main\n\
                      bookworm deb http://a/debian bookworm main\n\
                      trixie-x deb http://a/debian trixie main\n\
                      bookworm-security deb http://a/security bookworm-security main\n";
        let found = sources(listed, "").unwrap();
        assert_eq!(found.suite, "bookworm");
        let lines = [
            "deb http://a/debian bookworm main",
            "deb http://a/debian bookworm-updates main",
            "deb http://a/security bookworm-security main",
        ];
        assert_eq!(found.lines, lines);
        assert_eq!(
            sources(listed, "ID=debian\nVERSION_CODENAME=trixie-x\n")
                .unwrap()
                .suite,
            "trixie-x"
        );
        assert_eq!(sources("", ""), None);
    }
}
