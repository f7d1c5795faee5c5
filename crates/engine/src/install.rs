//! The QEMU installation: where it is and how old.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::fs::{Access, access};

use crate::arch::Arch;
use crate::error::Error;
use crate::jail::Jail;
use crate::version::Version;

const VERSION_DEADLINE: Duration = Duration::from_secs(10);

/// Where to find QEMU. The engine reads no environment: its caller says where programs are.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The program itself, if the caller named it.
    pub binary: Option<PathBuf>,
    /// Otherwise the directories to look in, first one first.
    pub search: Vec<PathBuf>,
    pub arch: Arch,
    /// A user id machines will run as, so that what probes find is true for them.
    pub jail: Jail,
}

/// Finds the program, by its own path or in the search directories.
pub(crate) fn find(config: &EngineConfig) -> Result<PathBuf, Error> {
    let program = config.arch.program();
    let candidates = match &config.binary {
        Some(binary) => vec![binary.clone()],
        None => config.search.iter().map(|dir| dir.join(program)).collect(),
    };
    match candidates.iter().find(|path| is_program(path)) {
        Some(found) => found.canonicalize().map_err(Error::io("resolve", found)),
        None => Err(not_found(config)),
    }
}

fn is_program(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

fn not_found(config: &EngineConfig) -> Error {
    let program = config.arch.program().to_owned();
    match &config.binary {
        Some(binary) => Error::NotFound {
            program,
            looked: vec![binary.clone()],
        },
        None => Error::NotFound {
            program,
            looked: config.search.clone(),
        },
    }
}

/// Where the program looks for its firmware and other data.
pub(crate) async fn data_dirs(binary: &Path) -> Result<Vec<PathBuf>, Error> {
    let output = ask(binary, &["-L", "help"]).await?;
    let lines = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(PathBuf::from)
        .collect::<Vec<_>>();
    Ok(lines
        .iter()
        .filter_map(|dir| dir.canonicalize().ok())
        .collect())
}

/// The firmware of a machine, where guests see it in memory.
pub(crate) fn firmware(arch: Arch, data_dirs: &[PathBuf]) -> Option<PathBuf> {
    match arch {
        Arch::X86_64 => data_dirs
            .iter()
            .map(|dir| dir.join("bios-256k.bin"))
            .find(|path| path.is_file()),
        Arch::Aarch64 => None,
    }
}

async fn ask(binary: &Path, args: &[&str]) -> Result<Output, Error> {
    // starts: qemu-system-x86_64
    let mut command = tokio::process::Command::new(binary);
    let output = command
        .args(args)
        .env_clear()
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    tokio::time::timeout(VERSION_DEADLINE, output)
        .await
        .map_err(|_| Error::Timeout {
            command: "--version",
            after: VERSION_DEADLINE,
        })?
        .map_err(Error::io("run", binary))
}

/// Asks the program for its version.
pub(crate) async fn version(binary: &Path) -> Result<Version, Error> {
    let output = ask(binary, &["--version"]).await?;
    let text = String::from_utf8_lossy(&output.stdout);
    Version::parse(&text).ok_or_else(|| Error::VersionUnknown {
        binary: binary.to_owned(),
        output: format!("{text}{}", String::from_utf8_lossy(&output.stderr))
            .chars()
            .take(200)
            .collect(),
    })
}

pub(crate) fn check_age(binary: &Path, found: Version) -> Result<(), Error> {
    if found < Version::OLDEST {
        Err(Error::TooOld {
            binary: binary.to_owned(),
            found,
        })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_distributions_print_them() {
        let version = |major, minor, micro| {
            Some(Version {
                major,
                minor,
                micro,
            })
        };
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c) 2003-2022";
        assert_eq!(Version::parse(debian), version(7, 2, 22));
        assert_eq!(
            Version::parse("QEMU emulator version 10.0.2\n"),
            version(10, 0, 2)
        );
        assert_eq!(
            Version::parse("QEMU emulator version 9.1-rc1"),
            version(9, 1, 0)
        );
        assert_eq!(Version::parse("bash: no such file"), None);
    }

    #[test]
    fn too_old_says_what_is_needed() {
        let found = Version {
            major: 6,
            minor: 2,
            micro: 0,
        };
        let error = check_age(Path::new("/q"), found).unwrap_err();
        assert_eq!(
            error.to_string(),
            "QEMU 6.2.0 at /q is too old: 7.2.0 or newer is needed"
        );
        assert!(check_age(Path::new("/q"), Version::OLDEST).is_ok());
    }

    #[test]
    fn missing_says_where_it_looked() {
        let search = vec!["/nowhere".into(), "/proc".into()];
        let config = EngineConfig {
            binary: None,
            search,
            arch: Arch::Aarch64,
            jail: Default::default(),
        };
        assert_eq!(
            find(&config).unwrap_err().to_string(),
            "no qemu-system-aarch64 found; looked in /nowhere, /proc"
        );
    }
}
