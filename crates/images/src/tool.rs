//! The host's programs, and the environment they run in.
//!
//! Always: a program gets the variables of [`HostTools`] and nothing else of this process's
//! environment, and runs in `/` unless its caller sets another directory.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Programs for administrators are not on every user's search path.
const ADMIN_DIRS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// Variables that the host's programs run with, by name. Debug shows the names only: a proxy's
/// address may hold a password.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ToolEnv(BTreeMap<String, String>);

impl ToolEnv {
    /// How apt and mmdebstrap reach the network.
    pub const PROXIES: [&'static str; 5] = [
        "http_proxy",
        "https_proxy",
        "ftp_proxy",
        "all_proxy",
        "no_proxy",
    ];
    /// Where apt finds its configuration, and where it puts temporary files.
    pub const APT: [&'static str; 2] = ["APT_CONFIG", "TMPDIR"];

    /// The variables that tools use, [`PROXIES`](Self::PROXIES) and [`APT`](Self::APT), as far as
    /// `value_of` has them. An edge passes its own environment's look-up.
    pub fn from_lookup(value_of: impl Fn(&str) -> Option<String>) -> Self {
        let names = Self::PROXIES.into_iter().chain(Self::APT);
        let known = names.filter_map(|name| Some((name.to_owned(), value_of(name)?)));
        Self(known.collect())
    }

    fn proxies(&self) -> impl Iterator<Item = (&String, &String)> {
        self.0
            .iter()
            .filter(|(name, _)| Self::PROXIES.contains(&name.as_str()))
    }
}

impl fmt::Debug for ToolEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// The directories of the host's programs, and their environment.
#[derive(Debug, Clone, Copy)]
pub struct HostTools<'a> {
    /// Directories to look for programs in; `/usr/sbin` and `/sbin` are always looked in last.
    /// Relative ones are ignored. Programs get the same directories as their `PATH`.
    pub search: &'a [PathBuf],
    pub env: &'a ToolEnv,
}

impl HostTools<'_> {
    fn dirs(&self) -> Vec<PathBuf> {
        let given = self.search.iter().filter(|dir| dir.is_absolute());
        let mut dirs: Vec<PathBuf> = given.cloned().collect();
        for dir in ADMIN_DIRS.map(PathBuf::from) {
            if !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        dirs
    }

    fn path_variable(&self) -> OsString {
        let mut dirs = self.dirs();
        // A directory with a colon in its name cannot be part of the variable.
        dirs.retain(|dir| !dir.as_os_str().as_bytes().contains(&b':'));
        let dirs: Vec<_> = dirs.into_iter().map(PathBuf::into_os_string).collect();
        dirs.join(OsStr::new(":"))
    }

    fn find(&self, program: &str) -> Option<PathBuf> {
        let candidates = self.dirs().into_iter().map(|dir| dir.join(program));
        candidates.into_iter().find(|path| is_program(path))
    }

    /// A command with exactly this environment.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = self.isolated_command(program);
        command.envs(&self.env.0);
        command
    }

    /// The same with the proxies as the caller's only variables.
    fn isolated_command(&self, program: &Path) -> Command {
        // starts: the program of Tool::new(…)
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", self.path_variable())
            .env("LC_ALL", "C")
            .envs(self.env.proxies())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// A program of the host that we need.
pub(crate) struct Tool {
    pub program: &'static str,
    /// Debian's package that has it, if it is not part of every Debian.
    pub package: Option<&'static str>,
}

impl Tool {
    pub(crate) const fn new(program: &'static str, package: Option<&'static str>) -> Self {
        Self { program, package }
    }

    /// Starts the program with all variables of the tools' environment.
    pub(crate) fn spawn(
        &self,
        tools: HostTools<'_>,
        setup: impl FnOnce(&mut Command),
    ) -> Result<Child> {
        self.start(tools.command(&self.find(tools)?), setup)
    }

    /// Starts the program with `PATH`, `LC_ALL` and the proxies alone, plus the additions of
    /// `setup`: for a program whose result must not depend on the calling user.
    pub(crate) fn spawn_isolated(
        &self,
        tools: HostTools<'_>,
        setup: impl FnOnce(&mut Command),
    ) -> Result<Child> {
        self.start(tools.isolated_command(&self.find(tools)?), setup)
    }

    fn find(&self, tools: HostTools<'_>) -> Result<PathBuf> {
        tools.find(self.program).ok_or(Error::ToolMissing {
            program: self.program,
            package: self.package,
        })
    }

    fn start(&self, mut command: Command, setup: impl FnOnce(&mut Command)) -> Result<Child> {
        setup(&mut command);
        command
            .spawn()
            .map_err(|source| self.failed_to("start", source))
    }

    /// Runs the program to its end, successful or not.
    pub(crate) fn output(
        &self,
        tools: HostTools<'_>,
        setup: impl FnOnce(&mut Command),
    ) -> Result<Output> {
        self.spawn(tools, setup)?
            .wait_with_output()
            .map_err(|source| self.failed_to("wait for", source))
    }

    /// Runs the program and returns what it printed. An exit status other than 0 is an error.
    pub(crate) fn run(
        &self,
        tools: HostTools<'_>,
        setup: impl FnOnce(&mut Command),
    ) -> Result<String> {
        let output = self.output(tools, setup)?;
        if !output.status.success() {
            return Err(Error::ToolFailed {
                program: self.program,
                status: output.status,
                stderr: stderr(&output),
            });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(crate) fn failed_to(&self, operation: &'static str, source: io::Error) -> Error {
        Error::Io {
            operation,
            path: self.program.into(),
            source,
        }
    }
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const ENV: Tool = Tool::new("env", None);
    const REALPATH: Tool = Tool::new("realpath", None);

    fn env() -> ToolEnv {
        ToolEnv::from_lookup(|name| match name {
            "http_proxy" => Some("http://me:s3cret@proxy".to_owned()),
            "TMPDIR" => Some("/var/tmp".to_owned()),
            _ => None,
        })
    }

    fn search() -> Vec<PathBuf> {
        ["/usr/bin", "relative", "/bin"].map(PathBuf::from).into()
    }

    fn lines(printed: &[u8]) -> Vec<String> {
        let text = String::from_utf8_lossy(printed);
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    /// Cargo's own variables are in this process's environment; a tool sees none of them.
    #[test]
    fn a_tool_gets_the_variables_passed_in_and_no_others() {
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        let search = search();
        let env = env();
        let tools = HostTools {
            search: &search,
            env: &env,
        };
        let printed = ENV.run(tools, |_| {}).unwrap();
        let expected = [
            "LC_ALL=C",
            "PATH=/usr/bin:/bin:/usr/sbin:/sbin",
            "TMPDIR=/var/tmp",
            "http_proxy=http://me:s3cret@proxy",
        ];
        assert_eq!(lines(printed.as_bytes()), expected);
        let isolated = ENV.spawn_isolated(tools, |_| {}).unwrap();
        let isolated = isolated.wait_with_output().unwrap();
        let expected = [expected[0], expected[1], expected[3]];
        assert_eq!(lines(&isolated.stdout), expected);
    }

    #[test]
    fn a_tool_runs_in_the_root_directory() {
        let search = search();
        let env = ToolEnv::default();
        let tools = HostTools {
            search: &search,
            env: &env,
        };
        let directory = REALPATH.run(tools, |command| {
            command.arg(".");
        });
        assert_eq!(directory.unwrap(), "/\n");
    }

    #[test]
    fn a_tool_is_an_executable_file_in_the_search_path() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("plain"), "").unwrap();
        fs::create_dir(dir.path().join("nested")).unwrap();
        let search = [dir.path().to_owned()];
        let env = ToolEnv::default();
        let tools = HostTools {
            search: &search,
            env: &env,
        };
        for program in ["plain", "nested", "absent"] {
            assert_eq!(tools.find(program), None, "{program}");
        }
    }

    #[test]
    fn values_of_variables_are_not_shown() {
        let shown = format!("{:?}", env());
        assert!(shown.contains("http_proxy"), "{shown}");
        assert!(!shown.contains("s3cret"), "{shown}");
    }
}
