//! Packages from the host's own apt: the sources, keys and proxies its administrator chose, with no
//! root needed.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use super::tool::{self, Tool};
use super::{Error, Progress, Stage, Watch, io_error};

const NOT_DEBIAN: &str = "building this image needs a Debian or Ubuntu host with apt and dpkg";
const APT_CACHE: Tool = Tool::new("apt-cache", NOT_DEBIAN);
const APT_GET: Tool = Tool::new("apt-get", NOT_DEBIAN);
const APT_CONFIG: Tool = Tool::new("apt-config", NOT_DEBIAN);
const DPKG_DEB: Tool = Tool::new("dpkg-deb", NOT_DEBIAN);

const POLL: Duration = Duration::from_millis(100);

/// The package that a meta package stands for at present: its only dependency.
pub(super) fn dependency(meta: &str) -> Result<String, Error> {
    let output = APT_CACHE.output(|command| {
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

/// The size of what would be downloaded; for progress only, so not knowing is fine.
fn download_bytes(package: &str) -> Result<Option<u64>, Error> {
    let shown = APT_CACHE.output(|command| {
        command.args(["show", "--no-all-versions", package]);
    })?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    Ok(shown
        .lines()
        .find_map(|line| line.strip_prefix("Size: ")?.trim().parse().ok()))
}

/// Where the host gets Debian from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sources {
    /// The release, such as `bookworm`.
    pub suite: String,
    /// In the one-line format of `sources.list`.
    pub lines: Vec<String>,
}

/// The host's sources that are Debian's own; others of the administrator's are not for guests.
pub(super) fn debian_sources() -> Result<Sources, Error> {
    let listed = APT_GET.run(|command| {
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
    // Otherwise: updates, security and backports have names that begin with the release's.
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

/// How the host's apt reaches its sources, as options for another apt.
pub(super) fn proxies() -> Result<Vec<String>, Error> {
    let dumped = APT_CONFIG.run(|command| {
        command.args(["dump", "Acquire"]);
    })?;
    let is_proxy =
        |line: &&str| line.to_ascii_lowercase().contains("::proxy") && !line.ends_with("\"\";");
    Ok(dumped.lines().filter(is_proxy).map(str::to_owned).collect())
}

/// Downloads packages into a directory that is empty before.
pub(super) fn download(
    packages: &[&str],
    dir: &Path,
    progress: &mut Watch<'_>,
) -> Result<(), Error> {
    let sizes = packages
        .iter()
        .map(|package| download_bytes(package))
        .collect::<Result<Vec<_>, _>>()?;
    let total_bytes = sizes.into_iter().sum::<Option<u64>>();
    let mut apt = APT_GET.spawn(|command| {
        // As root, apt would switch to a user of its own that cannot write here, and warn about it.
        command
            .args(["-q", "-o", "APT::Sandbox::User=root", "download"])
            .args(packages);
        command.current_dir(dir).stdout(Stdio::null());
    })?;
    let mut told = || {
        bytes_in(dir).and_then(|done_bytes| {
            progress(Progress {
                stage: Stage::Download,
                done_bytes,
                total_bytes,
            })
        })
    };
    while apt
        .try_wait()
        .map_err(|source| APT_GET.failed_to("wait for", source))?
        .is_none()
    {
        if let Err(error) = told() {
            apt.kill()
                .and_then(|()| apt.wait())
                .map_err(|source| APT_GET.failed_to("end", source))?;
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
    progress(Progress {
        stage: Stage::Download,
        done_bytes: bytes_in(dir)?,
        total_bytes,
    })
}

/// A file may be renamed between the listing and the look: then it counts in the next round.
fn bytes_in(dir: &Path) -> Result<u64, Error> {
    let entries = fs::read_dir(dir).map_err(io_error("list", dir))?;
    Ok(entries
        .filter_map(|entry| entry.ok()?.metadata().ok())
        .map(|metadata| metadata.len())
        .sum())
}

/// Unpacks one of the downloaded packages, then removes its file.
pub(super) fn unpack(package: &str, downloads: &Path, target: &Path) -> Result<(), Error> {
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
